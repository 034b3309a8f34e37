//! Latency bounds in virtual time: kept with control, missed without, for one client and for three
//! that share a device.

use undercroft_qos::{Asks, Devices, Service, place};
use undercroft_sim::open::open;
use undercroft_sim::outcome::BoundOutcome;
use undercroft_sim::setup::{BoundChange, Initial, Latencies, Memory, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{Load, Setup, Sharing, SimReport, Terms, simulate};

use undercroft_base::{Bytes, Nanos};
use undercroft_seeded::Random;

/// Zipfian pages in half of their memory over a SATA SSD, in windows of 20 ms. A client for each
/// share of writes.
///
/// Control begins after one missed window, and tries the device again after 8, 16, 32 windows and
/// so on. So a trace has to be long for 95 % of all.
fn run(writes: &[f64], bounds: &[&str], tiers: &[&str], control: bool) -> SimReport {
    run_changed(writes, bounds, tiers, (control, Vec::new()))
}

/// The same, with bounds that are set later.
fn run_changed(
    writes: &[f64],
    bounds: &[&str],
    tiers: &[&str],
    (control, changes): (bool, Vec<BoundChange>),
) -> SimReport {
    let parts = writes.iter().enumerate().map(|(client, writes)| {
        format!(
            "zipf:pages=10000,refs=400000,theta=0.6,writes={writes},client={client},seed={client}1"
        )
    });
    let trace = open(&parts.collect::<Vec<_>>().join("+")).expect("a trace");
    let streams = streams_of(&trace, 4096).expect("pages");
    let setup = Setup {
        memory: Memory::Percent(50.0),
        tiers: tiers.iter().map(|tier| tier.parse().expect(tier)).collect(),
        reference_time: Nanos(34_000),
        room: SimRoom::Ahead,
        initial: Initial::Stored,
        latency: Latencies {
            bounds: bounds.iter().map(|of| of.parse().expect(of)).collect(),
            changes,
            window: Nanos(20_000_000),
            control,
        },
        ..Setup::default()
    };
    simulate(&streams, &setup, &mut |_| ()).expect("a simulation")
}

const HYBRID: [&str; 2] = ["optane-dimm", "sata-ssd"];

fn bound(report: &SimReport, client: usize) -> &BoundOutcome {
    let of = &report.clients[client].latency_bound;
    of.as_ref().expect("the client has a bound")
}

#[test]
fn one_client_misses_its_bound_without_control_and_keeps_it_with() {
    let of = |control| run(&[0.5], &["p99=200us"], &HYBRID, control);
    let (without, with) = (of(false), of(true));
    let (none, kept) = (bound(&without, 0), bound(&with, 0));
    assert_eq!(without.tiers[0].pages_written, 0, "only the SSD is used");
    assert!(none.kept_percent() < 50.0, "{none:?}");
    assert!(none.tail_seconds > Some(250e-6), "{none:?}");
    assert!(kept.kept_percent() >= 95.0, "{kept:?}");
    assert!(kept.tail_seconds <= Some(200e-6), "{kept:?}");
    assert!(with.tiers[0].pages_written > 10_000, "the buffer is used");
    let page_outs = [&without, &with].map(|report| report.clients[0].page_out_latency);
    let [slow, fast] = page_outs;
    assert!(slow.p50_seconds >= 640e-6, "a write takes 640 us: {slow:?}");
    // Those to the SSD before control began are among them.
    assert!(fast.p50_seconds < 3e-6, "a page into the buffer: {fast:?}");
}

#[test]
fn three_clients_that_share_an_ssd_keep_their_bounds() {
    let writes = [0.5, 0.05, 0.0];
    let bounds = ["p99=1000us", "p99=500us", "p99=300us"];
    let of = |control| run(&writes, &bounds, &HYBRID, control);
    let (without, with) = (of(false), of(true));
    for client in 0..3 {
        let (none, kept) = (bound(&without, client), bound(&with, client));
        assert!(kept.kept_percent() >= 95.0, "{client}: {kept:?}");
        assert!(kept.tail_seconds <= none.tail_seconds, "{none:?} {kept:?}");
    }
    assert!(bound(&without, 2).kept_percent() < 95.0);
}

/// The last tier alone: fewer writes at a time, and no buffer.
#[test]
fn without_a_buffer_writes_leave_channels_to_reads() {
    let of = |control| run(&[0.5], &["p99=250us"], &["sata-ssd"], control);
    let (without, with) = (of(false), of(true));
    let (none, some) = (bound(&without, 0), bound(&with, 0));
    assert!(some.tail_seconds < none.tail_seconds, "{none:?} {some:?}");
    assert!(
        some.kept_percent() > none.kept_percent(),
        "{none:?} {some:?}"
    );
}

/// The second of two clients is served by the device until its bound is changed to one that the
/// device misses. What is changed to the same bound goes on as before.
#[test]
fn a_changed_bound_reaches_the_control_of_its_client() {
    const AT: f64 = 6.0;
    let of = |bound: &str| {
        let change = BoundChange {
            at: Nanos((AT * 1e9) as u64),
            client: 1,
            bound: bound.parse().expect(bound),
        };
        let bounds = ["p99=100us", "p99=1000us"];
        run_changed(&[0.5, 1.0], &bounds, &HYBRID, (true, vec![change]))
    };
    let (same, changed) = (of("p99=1000us"), of("p99=300us"));
    let windows = |report: &SimReport, client: usize, late: bool| {
        let all = bound(report, client).windows.clone().into_iter();
        let part = all.filter(|of| (of.end_seconds > AT + 0.01) == late);
        part.collect::<Vec<_>>()
    };
    for client in [0, 1] {
        let early = windows(&same, client, false);
        assert!(early.len() > 100, "{client}: {}", early.len());
        assert_eq!(early, windows(&changed, client, false), "{client}");
    }
    let late = [&same, &changed].map(|report| windows(report, 1, true));
    let limits = [1_000_000, 300_000];
    for (windows, limit) in late.iter().zip(limits) {
        assert!(windows.iter().all(|of| of.bound.limit.0 == limit));
        let kept = windows.iter().filter(|of| of.is_kept()).count();
        assert!(kept * 100 >= windows.len() * 95, "{kept} of {limit} ns");
    }
    let from_device = late.map(|windows| {
        let all: u64 = windows.iter().map(|of| of.window.page_ins).sum();
        let device: u64 = windows.iter().map(|of| of.from_last_tier).sum();
        device as f64 / all as f64
    });
    assert!(
        from_device[0] > 0.5 && from_device[1] < 0.2,
        "{from_device:?}"
    );
    let anew = bound(&changed, 1);
    let counted = (anew.windows_kept + anew.windows_missed) as usize;
    assert_eq!(counted, windows(&changed, 1, true).len());
    let whole = bound(&same, 1);
    let counted = (whole.windows_kept + whole.windows_missed) as usize;
    assert_eq!(counted, whole.windows.len());
}

#[test]
fn a_bound_changes_nothing_if_it_is_only_measured() {
    let of = |bounds: &[&str]| run(&[0.3], bounds, &["sata-ssd"], false);
    let (mut measured, plain) = (of(&["p90=1us"]), of(&[]));
    let found = measured.clients[0].latency_bound.take().expect("a bound");
    assert_eq!(measured, plain);
    assert_eq!(found.windows_kept, 0);
    assert_eq!(found.page_ins, found.page_ins_over);
    assert!(found.page_ins <= plain.swap_ins);
}

#[test]
fn bounds_are_one_for_all_or_one_for_each() {
    let trace = open("zipf:pages=100,refs=1000,client=0+zipf:pages=100,refs=1000,client=2");
    let streams = streams_of(&trace.expect("a trace"), 4096).expect("pages");
    let of_changed = |bounds: usize, changed: Option<usize>| {
        let bound = "p99=1ms".parse().expect("a bound");
        let (at, changed) = (Nanos(0), changed.into_iter());
        let change = |client| BoundChange { at, client, bound };
        let setup = Setup {
            latency: Latencies {
                bounds: vec![bound; bounds],
                changes: changed.map(change).collect(),
                ..Latencies::default()
            },
            ..Setup::default()
        };
        simulate(&streams, &setup, &mut |_| ()).map_err(|error| error.to_string())
    };
    let of = |bounds| of_changed(bounds, None);
    for fits in [0, 1, 2] {
        assert!(of(fits).is_ok(), "{fits}");
    }
    assert!(of_changed(1, Some(1)).is_ok());
    let error = of_changed(1, Some(2)).expect_err("two clients");
    assert!(error.contains("client 2 is changed"), "{error}");
    let error = of(3).expect_err("two clients");
    assert!(
        error.contains("--latency") && error.contains("2 client"),
        "{error}"
    );
}

const MIB: u64 = 1 << 20;

/// Five clients of 6 MiB in 10 MiB, above a buffer of 4 MiB: one with a bound, one that writes all
/// the time, one whose protection is too large, one whose bound needs more of the buffer than there
/// is, and one that comes when the others are gone.
fn five(seed: u64, control: bool) -> SimReport {
    let part = |client: u64, refs: u64, rest: &str| {
        let seed = seed * 10 + client;
        format!("{rest},pages=1500,refs={refs},client={client},seed={seed}")
    };
    let parts = [
        part(0, 60_000, "zipf:theta=0.6,writes=0.5"),
        part(1, 30_000, "uniform:writes=1"),
        part(2, 1_000, "uniform:writes=0"),
        part(3, 5_000, "uniform:writes=0"),
        part(4, 10_000, "uniform:writes=0.2"),
    ];
    let trace = open(&parts.join("+")).expect("a trace");
    let streams = streams_of(&trace, 4096).expect("pages");
    let terms = |bound: &str, comes: u64| Terms {
        weight: 1,
        least: Bytes(MIB),
        most: Bytes(64 * MIB),
        bound: (!bound.is_empty()).then(|| bound.parse().expect("a bound")),
        demand: Some(Load {
            reads: 3_000.0,
            writes: 1_000.0,
        }),
        comes: Nanos(comes * 1_000_000_000),
        reference_time: Nanos(100_000),
    };
    let tiers = ["optane-dimm,size=4M", "sata-ssd"];
    let setup = Setup {
        memory: Memory::Bytes(Bytes(10 * MIB)),
        tiers: tiers.iter().map(|tier| tier.parse().expect(tier)).collect(),
        room: SimRoom::Ahead,
        initial: Initial::Stored,
        latency: Latencies {
            window: Nanos(10_000_000),
            control,
            ..Latencies::default()
        },
        curve: true,
        sharing: Some(Sharing {
            terms: vec![
                terms("p99=400us", 0),
                terms("", 0),
                Terms {
                    least: Bytes(9 * MIB),
                    ..terms("", 1)
                },
                terms("p99=50us", 1),
                terms("", 100),
            ],
            by_curves: true,
            every: Nanos(1_000_000_000),
            admission: true,
        }),
        ..Setup::default()
    };
    simulate(&streams, &setup, &mut |_| ()).expect("a simulation")
}

#[test]
fn clients_that_come_and_go_share_one_budget_by_bounds_and_curves() {
    let report = five(1, true);
    assert_eq!(report, five(1, true), "one seed, one result");
    let (kept, none) = (bound(&report, 0), five(1, false));
    let none = bound(&none, 0);
    assert!(
        kept.windows_kept > 20 && kept.kept_percent() >= 85.0,
        "{kept:?}"
    );
    assert!(none.kept_percent() < 50.0, "{none:?}");
    let shared = |at: usize| report.clients[at].shared.as_ref().expect("shared");
    let refused = |at: usize| shared(at).refused.as_ref().map(ToString::to_string);
    assert_eq!((refused(0), refused(1), refused(4)), (None, None, None));
    let none = refused(2).expect("too much is protected");
    let room = refused(3).expect("the buffer is too small");
    assert!(none.contains("8.0 MiB could be protected"), "{none}");
    assert!(room.contains("could be kept"), "{room}");
    assert_eq!(report.clients[2].references, 0);
    // The last one has all memory: those before gave back what they had.
    assert!(shared(0).mean_limit_bytes < 10 * MIB);
    assert_eq!(shared(4).mean_limit_bytes, 10 * MIB);
}

/// A client whose last second has no fault has its memory to its own end: one that comes meanwhile
/// gets half of it all, and not everything.
#[test]
fn a_client_has_its_memory_until_its_own_end() {
    let part = |client: u64, pages: u64, refs: u64| {
        format!("uniform:writes=0,pages={pages},refs={refs},client={client},seed={client}")
    };
    // 500 pages fit into 5 MiB: after the first uses, the first client finds all it uses.
    let trace = open(&[part(0, 500, 100_000), part(1, 6000, 10_000)].join("+")).expect("a trace");
    let streams = streams_of(&trace, 4096).expect("pages");
    let terms = |comes: u64| Terms {
        weight: 1,
        least: Bytes(MIB),
        most: Bytes(64 * MIB),
        bound: None,
        demand: None,
        comes: Nanos(comes),
        reference_time: Nanos(100_000),
    };
    let setup = Setup {
        memory: Memory::Bytes(Bytes(10 * MIB)),
        tiers: vec!["sata-ssd".parse().expect("a tier")],
        room: SimRoom::Ahead,
        initial: Initial::Stored,
        sharing: Some(Sharing {
            terms: vec![terms(0), terms(3_000_000_000)],
            by_curves: false,
            every: Nanos(1_000_000_000),
            admission: true,
        }),
        ..Setup::default()
    };
    let report = simulate(&streams, &setup, &mut |_| ()).expect("a simulation");
    let seconds = |client: usize| report.clients[client].elapsed_seconds;
    assert!(seconds(0) > 10.0 && seconds(1) < 5.0, "{report:?}");
    let of = report.clients[1].shared.as_ref().expect("shared");
    assert_eq!(of.mean_limit_bytes, 5 * MIB);
}

/// A set of clients of the same memory, over devices that all share.
struct Set {
    clients: Vec<Asker>,
    buffer_mib: u64,
}

/// A client of a [`Set`]: uniform references to its pages, half of which fit.
struct Asker {
    bound: &'static str,
    pages: u64,
    writes: f64,
    reference: Nanos,
}

/// DRAM of each client of a set, pages.
const FRAMES: u64 = 256;
/// Sets that are tried.
const SETS: usize = 20;
/// How long a set runs, and its windows.
const RUN: u64 = 450_000_000;
const WINDOW: u64 = 20_000_000;

impl Set {
    /// Demand from a tenth of what the SSD can serve to three times as much.
    fn random(seed: u64) -> Set {
        let mut random = Random::new(seed);
        let bounds = [
            "p99=60us",
            "p99=260us",
            "p99=500us",
            "p99=1ms",
            "p99=5ms",
            "",
        ];
        let count = 2 + random.below(7);
        let asker = |random: &mut Random| Asker {
            bound: bounds[random.below(bounds.len() as u64) as usize],
            pages: FRAMES * (2 + random.below(3)),
            writes: [0.0, 0.05, 0.3, 1.0][random.below(4) as usize],
            reference: Nanos([30_000, 60_000, 200_000, 1_000_000][random.below(4) as usize]),
        };
        Set {
            clients: (0..count).map(|_| asker(&mut random)).collect(),
            buffer_mib: [1, 4, 16][random.below(3) as usize],
        }
    }

    fn run(&self, admission: bool) -> SimReport {
        let parts = self.clients.iter().enumerate().map(|(at, of)| {
            let refs = RUN / of.reference.0;
            let (pages, writes, seed) = (of.pages, of.writes, at + 1);
            format!("uniform:pages={pages},refs={refs},writes={writes},client={at},seed={seed}")
        });
        let trace = open(&parts.collect::<Vec<_>>().join("+")).expect("a trace");
        let streams = streams_of(&trace, 4096).expect("pages");
        let terms = self.clients.iter().enumerate().map(|(at, of)| Terms {
            weight: 1,
            least: Bytes(FRAMES << 12),
            most: Bytes(FRAMES << 12),
            bound: (!of.bound.is_empty()).then(|| of.bound.parse().expect("a bound")),
            demand: Some(of.demand()),
            comes: Nanos(at as u64 * 1_000),
            reference_time: of.reference,
        });
        let tiers = [
            format!("optane-dimm,size={}M", self.buffer_mib),
            "sata-ssd".to_owned(),
        ];
        let setup = Setup {
            memory: Memory::Bytes(Bytes(self.clients.len() as u64 * (FRAMES << 12))),
            tiers: tiers.iter().map(|tier| tier.parse().expect(tier)).collect(),
            room: SimRoom::Ahead,
            initial: Initial::Stored,
            latency: Latencies {
                window: Nanos(WINDOW),
                ..Latencies::default()
            },
            sharing: Some(Sharing {
                terms: terms.collect(),
                by_curves: false,
                every: Nanos(RUN),
                admission,
            }),
            ..Setup::default()
        };
        simulate(&streams, &setup, &mut |_| ()).expect("a simulation")
    }
}

impl Asker {
    /// Uniform references miss what does not fit (a quarter of the frames is kept free), and each
    /// miss waits for a read.
    fn demand(&self) -> Load {
        let miss = 1.0 - 0.75 * FRAMES as f64 / self.pages as f64;
        let read = if self.bound == "p99=60us" {
            2e-6
        } else {
            100e-6
        };
        let each = self.reference.seconds() / miss + read;
        let reads = 1.0 / each;
        // A page is dirty if one of its uses while it was in memory was a write.
        let dirty = 1.0 - (1.0 - self.writes).powf(1.0 / miss);
        Load {
            reads,
            writes: reads * dirty,
        }
    }
}

fn refusal_of(report: &SimReport) -> Option<String> {
    let shared = report.clients.iter().filter_map(|of| of.shared.as_ref());
    let refused = shared.filter_map(|of| of.refused.as_ref());
    refused.map(ToString::to_string).next()
}

/// Whether each bound was kept in 95 % of its windows, or in all but one.
fn all_kept(report: &SimReport) -> bool {
    let mut bounds = report
        .clients
        .iter()
        .filter_map(|of| of.latency_bound.as_ref());
    bounds.all(|of| of.windows_missed <= 1.max((of.windows_kept + of.windows_missed) / 20))
}

/// Devices as admission sees them, by the data sheets. A fault takes 8 us besides its read of an
/// SSD.
fn devices(buffer_pages: u64) -> Devices {
    let service = |name: &str, path: u64| {
        let profile = undercroft_device::by_name(name).expect("a profile");
        Service {
            path: Nanos(path),
            read: Nanos(profile.read.time(4096).0 / 1000),
            write: Nanos(profile.write.time(4096).0 / 1000),
            beside: profile.read_beside_write,
            channels: profile.channels,
        }
    };
    Devices {
        device: service("sata-ssd", 8_000),
        buffer: Some((service("optane-dimm", 0), buffer_pages)),
    }
}

impl Set {
    /// Whether the answer is another with a quarter more or less of everything.
    fn is_near_the_boundary(&self) -> bool {
        let answer = |part: f64| {
            let asks = |of: &Asker| Asks {
                bound: (!of.bound.is_empty()).then(|| of.bound.parse().expect("a bound")),
                load: of.demand().times(part),
                pages: of.pages,
            };
            let set: Vec<Asks> = self.clients.iter().map(asks).collect();
            let buffer = (self.buffer_mib << 8) as f64 / part;
            place(&set, &devices(buffer as u64)).is_ok()
        };
        answer(0.75) != answer(1.25)
    }
}

/// A set that is admitted keeps all its bounds. One that is refused does not, if it is admitted all
/// the same. Sets that are near the boundary are left out.
#[test]
fn admission_refuses_the_sets_that_cannot_be_kept_and_no_other() {
    let mut counts = [0, 0];
    let sets = (1..).map(|seed| (seed, Set::random(seed)));
    for (seed, set) in sets
        .filter(|(_, set)| !set.is_near_the_boundary())
        .take(SETS)
    {
        let report = set.run(true);
        let refusal = refusal_of(&report);
        let kept = match refusal {
            None => all_kept(&report),
            Some(_) => all_kept(&set.run(false)),
        };
        let is_right = kept == refusal.is_none();
        assert!(
            is_right,
            "seed {seed}: {refusal:?}; all bounds kept: {kept}"
        );
        counts[usize::from(kept)] += 1;
    }
    assert!(counts.iter().all(|count| *count >= SETS / 4), "{counts:?}");
}
