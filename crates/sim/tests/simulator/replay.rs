//! The results of a replay: the paper's formula, clean pages, clients that wait for each other,
//! pools, energy.

#![allow(clippy::unwrap_used, reason = "everything here is a test helper")]

use undercroft_base::Nanos;
use undercroft_device::profiles;
use undercroft_seeded::Random;
use undercroft_sim::memory_trace::Becomes::{
    self, Ahead, Dropped, Found, Locked, Recalled, Returned, Unchanged, Used, Written,
};
use undercroft_sim::memory_trace::Moved;
use undercroft_sim::setup::{Cost, Initial, Memory, Setup, SetupError, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{MemoryTrace, SimReport, Sweep, simulate};

const PAGE: u64 = 4096;

const EVICTED: Becomes = Becomes::Evicted { batch: 0 };
const NAMED: Becomes = Becomes::Named { batch: 0 };

/// `count` references to `footprint` pages, skewed; every `writes`th of ten writes.
fn skewed(count: u64, footprint: u64, writes: u64, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed);
    let mut reference = || {
        let uniform = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
        let page = (uniform * uniform * uniform * footprint as f64) as u64;
        let write = u64::from(random.below(10) < writes);
        ((page * PAGE + random.below(PAGE)) << 1) | write
    };
    (0..count).map(|_| reference()).collect()
}

fn scan(count: u64, footprint: u64) -> Vec<u64> {
    (0..count).map(|at| (at % footprint * PAGE) << 1).collect()
}

fn trace(clients: Vec<Vec<u64>>) -> MemoryTrace {
    let named = clients.into_iter().enumerate();
    MemoryTrace {
        name: "test".to_owned(),
        granule_bytes: 1,
        clients: named.map(|(at, refs)| (format!("c{at}"), refs)).collect(),
        ..MemoryTrace::default()
    }
}

fn run(trace: &MemoryTrace, change: impl FnOnce(&mut Setup)) -> SimReport {
    let mut setup = Setup::default();
    change(&mut setup);
    let streams = streams_of(trace, setup.page_bytes).unwrap();
    simulate(&streams, &setup, &mut |_| ()).unwrap()
}

fn tiers(texts: &[&str]) -> Vec<undercroft_sim::setup::SimTier> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn elapsed_time_is_the_papers_sum_over_reads_and_writes() {
    let trace = trace(vec![skewed(40_000, 500, 4, 1)]);
    for page_bytes in [512, 4096, 65536] {
        let outcome = run(&trace, |s| {
            s.page_bytes = page_bytes;
            s.initial = Initial::Stored;
        });
        let pcm = profiles::by_name("pcm").unwrap();
        let (reads, writes) = (outcome.tiers[0].pages_read, outcome.tiers[0].pages_written);
        assert!(reads > 0 && writes > 0);
        assert_eq!(
            reads, outcome.misses,
            "every miss reads: all pages were stored"
        );
        let expected = reads as f64
            * (pcm.read.access_ns + pcm.read.per_byte_ns * page_bytes as f64)
            + writes as f64 * (pcm.write.access_ns + pcm.write.per_byte_ns * page_bytes as f64);
        let error = (outcome.elapsed_seconds * 1e9 / expected - 1.0).abs();
        assert!(error < 1e-5, "{page_bytes}: {error}");
    }
}

#[test]
fn pages_that_are_only_read_are_written_never_and_zeros_are_not_read_either() {
    let trace = trace(vec![skewed(40_000, 500, 0, 2)]);
    let stored = run(&trace, |s| s.initial = Initial::Stored);
    assert_eq!(stored.tiers[0].pages_written, 0);
    assert_eq!(stored.clean_evictions, stored.evictions);
    let zero = run(&trace, |_| ());
    assert_eq!((zero.tiers[0].pages_read, zero.elapsed_seconds), (0, 0.0));
    assert_eq!(zero.misses, stored.misses, "the policy sees the same");
    assert_eq!(zero.first_touches, zero.footprint_pages);
}

#[test]
fn a_page_written_once_is_written_out_once_however_often_it_leaves() {
    let mut references = scan(500, 100);
    references[7] |= 1;
    let outcome = run(&trace(vec![references]), |s| s.initial = Initial::Stored);
    assert_eq!(outcome.tiers[0].pages_written, 1);
    assert_eq!(outcome.misses, 500);
}

#[test]
fn time_is_accounted_for_to_the_last_bit() {
    let trace = trace(vec![skewed(30_000, 400, 3, 3)]);
    for tier in [
        &["pcm"][..],
        &["nvme"],
        &["hdd-7200,layout=log"],
        &["ram", "sata-ssd"],
    ] {
        for prefetch in ["none", "readahead:8", "window:4"] {
            let outcome = run(&trace, |s| {
                s.tiers = tiers(tier);
                s.prefetch = prefetch.to_owned();
                s.reference_time = Nanos(100);
                s.software = Cost::On;
                s.context_switch = Cost::Is(Nanos(1500));
            });
            let t = outcome.times;
            let sum = t.reference_seconds
                + t.software_seconds
                + t.context_switch_seconds
                + t.read_wait_seconds
                + t.prefetch_wait_seconds
                + t.write_wait_seconds
                + t.compression_seconds;
            let error = (sum / outcome.elapsed_seconds - 1.0).abs();
            assert!(error < 1e-9, "{tier:?} {prefetch}: {t:?}");
            let references = outcome.references as f64 * 100e-9;
            assert!((t.reference_seconds / references - 1.0).abs() < 1e-9);
            assert_eq!(outcome.clients[0].fault_latency.count, outcome.swap_ins);
            let written = outcome.evictions - outcome.clean_evictions - outcome.zero_evictions;
            assert_eq!(outcome.clients[0].page_out_latency.count, written);
            assert!(outcome.settled_seconds >= outcome.elapsed_seconds);
        }
    }
}

#[test]
fn clients_that_share_a_disk_wait_for_each_other_and_miss_as_alone() {
    let streams: Vec<_> = (0..4).map(|seed| skewed(5_000, 300, 3, seed)).collect();
    let disk = |s: &mut Setup| {
        s.tiers = tiers(&["hdd-7200"]);
        s.memory = Memory::Percent(25.0);
    };
    let together = run(&trace(streams.clone()), disk);
    for (at, stream) in streams.into_iter().enumerate() {
        let alone = run(&trace(vec![stream]), disk);
        let (us, them) = (&together.clients[at], &alone.clients[0]);
        assert_eq!(us.memory_pages, them.memory_pages, "a share by footprint");
        assert_eq!(us.misses, them.misses);
        assert!(us.elapsed_seconds > 2.0 * them.elapsed_seconds);
        assert!(us.fault_latency.p50_seconds > them.fault_latency.p50_seconds);
    }
    assert!(together.tiers[0].read_queued_seconds > 0.0);
    assert_eq!(together.clients.len(), 4);
}

#[test]
fn readahead_pays_on_an_ssd_and_a_fixed_window_costs_on_pcm() {
    let scanned = trace(vec![scan(20_000, 2_000)]);
    let random = trace(vec![skewed(20_000, 2_000, 2, 5)]);
    let elapsed = |trace: &MemoryTrace, tier: &str, prefetch: &str| {
        let outcome = run(trace, |s| {
            s.tiers = tiers(&[tier]);
            s.prefetch = prefetch.to_owned();
            s.initial = Initial::Stored;
        });
        assert_eq!(outcome.prefetched > 0, prefetch != "none");
        assert!(outcome.prefetch_hits <= outcome.prefetched);
        outcome.elapsed_seconds
    };
    let (with, without) = ("readahead:8", "none");
    assert!(elapsed(&scanned, "nvme", with) < 0.5 * elapsed(&scanned, "nvme", without));
    assert!(elapsed(&random, "pcm", "window:8") > 1.5 * elapsed(&random, "pcm", "none"));
}

#[test]
fn zero_pages_that_come_along_count_as_no_prefetch() {
    let scanned = trace(vec![scan(20_000, 20_000)]);
    let outcome = run(&scanned, |s| {
        s.prefetch = "majority".to_owned();
        s.initial = Initial::Zero;
    });
    assert!(
        outcome.misses < 10_000,
        "they come along: {}",
        outcome.misses
    );
    assert_eq!((outcome.prefetched, outcome.prefetch_hits), (0, 0));
}

#[test]
fn a_pool_takes_from_the_memory_it_saves_and_demotes_when_full() {
    let trace = trace(vec![skewed(60_000, 1_000, 5, 6)]);
    let alone = run(&trace, |s| {
        s.tiers = tiers(&["ram,ratio=4"]);
        s.memory = Memory::Percent(40.0);
    });
    let device = run(&trace, |s| {
        s.tiers = tiers(&["nvme"]);
        s.memory = Memory::Percent(40.0);
    });
    assert!(alone.misses > device.misses, "fewer frames are left");
    assert!(
        alone.elapsed_seconds < device.elapsed_seconds,
        "and still faster"
    );
    let both = run(&trace, |s| {
        s.tiers = tiers(&["ram,ratio=4,max=10%", "nvme"]);
        s.memory = Memory::Percent(40.0);
    });
    assert!(both.demotions > 0 && both.tiers[1].pages_read > 0);
    // 10 % of 400 frames at four pages a frame.
    assert!(
        both.tiers[0].logical_bytes_peak <= 160 * PAGE,
        "{:?}",
        both.tiers[0]
    );
}

/// A pool, memory that is not DRAM, and a device: each too small for all, so all three are used,
/// and a full one is relieved by the next.
#[test]
fn three_tiers_fill_one_after_the_other() {
    let trace = trace(vec![skewed(60_000, 4_000, 5, 16)]);
    let with = |texts: &[&str], placement: &str| {
        let outcome = run(&trace, |s| {
            s.tiers = tiers(texts);
            s.memory = Memory::Pages(400);
            s.placement = placement.parse().unwrap();
        });
        for (at, tier) in outcome.tiers.iter().enumerate() {
            assert!(tier.pages_read > 20, "{placement}, tier {at}: {tier:?}");
        }
        outcome
    };
    let three = ["ram,ratio=4,max=10%", "optane-dimm,size=4M", "nvme"];
    for placement in ["waterfall", "worth"] {
        let all = with(&three, placement);
        assert!(all.tiers[1].logical_bytes_peak <= 4 << 20);
        // The last tier takes what is left, not what would fit above it.
        let two = with(&["ram,ratio=4,max=10%", "nvme"], placement);
        assert!(all.tiers[2].pages_read < two.tiers[1].pages_read * 3 / 4);
        assert!(all.elapsed_seconds < two.elapsed_seconds, "{placement}");
    }
}

#[test]
fn tiers_that_are_full_and_traces_that_are_empty_are_errors() {
    let full = trace(vec![skewed(10_000, 500, 10, 7)]);
    let setup = Setup {
        tiers: tiers(&["pcm,size=64K"]),
        ..Setup::default()
    };
    let streams = streams_of(&full, PAGE).unwrap();
    let error = simulate(&streams, &setup, &mut |_| ()).unwrap_err();
    assert!(matches!(error, SetupError::TiersFull { references } if references > 0));
    let error = Sweep::single(Setup::default())
        .run(&trace(vec![]), &mut |_| ())
        .unwrap_err();
    assert_eq!(error, SetupError::EmptyTrace("test".to_owned()));
    let coarse = MemoryTrace {
        granule_bytes: 8192,
        ..full
    };
    let error = Sweep::single(Setup::default()).run(&coarse, &mut |_| ());
    assert!(error.unwrap_err().to_string().starts_with("--page-size"));
}

#[test]
fn little_memory_over_pcm_takes_less_energy_than_all_memory_over_a_disk() {
    let trace = trace(vec![skewed(200_000, 2_000, 3, 8)]);
    let small = run(&trace, |s| {
        s.page_bytes = 512;
        s.initial = Initial::Stored;
        s.reference_time = Nanos(100);
    });
    let large = run(&trace, |s| {
        s.tiers = tiers(&["hdd-7200"]);
        s.memory = Memory::Percent(100.0);
        s.initial = Initial::Stored;
        s.reference_time = Nanos(100);
    });
    assert_eq!(large.misses, large.footprint_pages);
    assert!(small.energy.total_joules < 0.25 * large.energy.total_joules);
    assert!(small.energy.dram_static_joules < 0.2 * large.energy.dram_static_joules);
    assert!(small.cost.total_dollars < large.cost.total_dollars);
    assert!(small.tiers[0].lifetime_years.unwrap() > 0.0);
    assert_eq!(large.tiers[0].lifetime_years, None, "a disk does not wear");
}

#[test]
fn the_same_setup_ends_the_same_to_the_last_digit() {
    let trace = trace((0..3).map(|seed| skewed(10_000, 300, 4, seed)).collect());
    let once = || {
        run(&trace, |s| {
            s.tiers = tiers(&["ram", "sata-ssd"]);
            s.reclaim = "random".to_owned();
            s.prefetch = "readahead:8".to_owned();
        })
    };
    assert_eq!(once(), once());
}

#[test]
fn a_sweep_runs_every_combination_once_and_reports_progress_to_the_end() {
    let trace = trace(vec![skewed(5_000, 300, 4, 9)]);
    let mut sweep = Sweep::single(Setup::default());
    sweep.memory = ["5%", "64K", "20p"]
        .map(|text| text.parse().unwrap())
        .to_vec();
    sweep.page_bytes = vec![512, 4096];
    sweep.reclaim = ["clock", "belady"].map(str::to_owned).to_vec();
    sweep.prefetch = ["none", "window:2"].map(str::to_owned).to_vec();
    sweep.tiers.push(tiers(&["ram", "hdd-7200"]));
    let mut last = None;
    let results = sweep
        .run(&trace, &mut |progress| last = Some(progress))
        .unwrap();
    assert_eq!(results.outcomes.len(), 48);
    let mut settings: Vec<_> = results
        .outcomes
        .iter()
        .map(|outcome| format!("{:?}", outcome.setting))
        .collect();
    settings.sort();
    settings.dedup();
    assert_eq!(settings.len(), 48);
    let last = last.unwrap();
    assert_eq!(last.references, last.references_total);
}

/// A trace of whole pages, with movements of some: (references before, page, movement).
fn live(references: &[u64], moved: &[(usize, u64, Becomes)]) -> MemoryTrace {
    let packed = references.iter().map(|page| (page * PAGE) << 1).collect();
    let moved = moved.iter().map(|(after, page, what)| Moved {
        after: *after,
        address: page * PAGE,
        what: *what,
    });
    MemoryTrace {
        granule_bytes: PAGE,
        moved: vec![moved.collect()],
        ..trace(vec![packed])
    }
}

fn pages(count: u64) -> impl FnOnce(&mut Setup) {
    move |setup| {
        setup.memory = Memory::Pages(count);
        setup.reclaim = "lru".to_owned();
    }
}

/// The reserve of 262,144 pages is 1,024, and pages leave until 1,536 are free.
#[test]
fn batches_of_a_recorded_run_leave_with_one_fault_each_and_others_at_once() {
    let uses: Vec<u64> = (0..262_144 - 1_024 + 3).collect();
    let evictions = |moved: &[(usize, u64, Becomes)]| {
        let outcome = run(&live(&uses, moved), |setup| {
            pages(262_144)(setup);
            setup.room = SimRoom::Ahead;
        });
        outcome.evictions
    };
    let recorded = evictions(&[(1, 0, Written)]);
    assert!((64..=4 * 64).contains(&recorded), "{recorded}");
    assert!(evictions(&[]) >= 512);
}

#[test]
fn pages_that_are_found_are_in_memory_until_others_push_them_out() {
    let found: Vec<_> = (0..4).map(|page| (0, page, Found)).collect();
    // All are hits. Then page 9 pushes out page 0, which must be read: it was used before, and its
    // bytes are unknown.
    let outcome = run(&live(&[3, 2, 9, 0], &found), pages(4));
    assert_eq!((outcome.misses, outcome.first_touches), (2, 1));
    assert_eq!((outcome.swap_ins, outcome.evictions), (1, 2));
    assert_eq!(outcome.zero_evictions, 0, "found pages may hold anything");
    assert_eq!(outcome.footprint_pages, 5);
    // More pages than fit: the first found left first. A page that is found in the middle of the
    // run is there from then on.
    let outcome = run(
        &live(&[3, 2, 0, 7], &[&found[..], &[(3, 7, Found)]].concat()),
        pages(2),
    );
    assert_eq!(outcome.misses, 1);
    // Without the found pages, all are first touches.
    let outcome = run(&live(&[3, 2, 9, 0], &[]), pages(4));
    assert_eq!((outcome.misses, outcome.first_touches), (4, 4));
}

#[test]
fn a_page_that_was_seen_used_in_memory_outlives_one_that_was_not() {
    // Page 3 pushes out the page used longest ago: page 1, unless it was used after page 2.
    let references = [1, 2, 3, 1];
    assert_eq!(run(&live(&references, &[]), pages(2)).misses, 4);
    let used = run(&live(&references, &[(2, 1, Used)]), pages(2));
    assert_eq!(used.misses, 3);
    // A page that is not in memory here is not used here, although it was live.
    let used = run(&live(&references, &[(2, 1, Used), (3, 1, Used)]), pages(1));
    assert_eq!(used.misses, 4);
    // A use is no reference.
    assert_eq!(used.references, 4);
}

#[test]
fn pages_that_are_dropped_are_gone_from_memory_and_below() {
    let references = [1, 2, 3, 1, 2, 3];
    let none = run(&live(&references, &[]), pages(3));
    assert_eq!((none.misses, none.first_touches), (3, 3));
    // Drops page 2, which is in memory, and everything else in its chunk. Its numbers are as
    // before.
    let drops: Vec<_> = (1..4).map(|page| (3, page, Dropped)).collect();
    let outcome = run(&live(&references, &drops), pages(3));
    assert_eq!((outcome.misses, outcome.first_touches), (6, 6));
    assert_eq!((outcome.evictions, outcome.swap_ins), (0, 0));
    // Drops a stored page: page 1 was evicted, and comes back as zeros, without a read.
    let outcome = run(&live(&[1, 2, 1], &[(2, 1, Dropped)]), pages(1));
    assert_eq!((outcome.misses, outcome.swap_ins), (3, 0));
    // The last page of a chunk, with an empty chunk behind it, and pages that were never touched.
    let edge = [511, 512, 511, 512, 1600];
    let drops = [
        (2, 511, Dropped),
        (2, 512, Dropped),
        (2, 5, Dropped),
        (4, 513, Dropped),
    ];
    let outcome = run(&live(&edge, &drops), pages(3));
    assert_eq!((outcome.misses, outcome.first_touches), (5, 5));
    // And in reverse: both chunks are empty then.
    let back = [(2, 512, Dropped), (2, 511, Dropped)];
    let outcome = run(&live(&edge, &back), pages(3));
    assert_eq!((outcome.misses, outcome.first_touches), (5, 5));
    // If a part of a larger page is dropped, the rest stays.
    let outcome = run(&live(&references, &drops), |s| {
        pages(3)(s);
        s.page_bytes = 2 * PAGE;
    });
    assert_eq!(outcome.misses, 2);
}

#[test]
fn room_made_ahead_keeps_a_reserve_and_hits_no_more_than_without() {
    let trace = trace(vec![skewed(60_000, 4_000, 3, 9)]);
    for reclaim in ["clock", "active_inactive", "lru"] {
        let of = |room, memory| {
            run(&trace, |s| {
                s.memory = Memory::Pages(memory);
                s.reclaim = reclaim.to_owned();
                s.room = room;
            })
        };
        let (after, ahead) = (of(SimRoom::AfterPlan, 1024), of(SimRoom::Ahead, 1024));
        // A reserve of 32 pages, 48 after a batch; batches of 64 exceed that.
        assert_eq!(ahead.evictions % 64, 0, "{reclaim}");
        let held = ahead.misses - ahead.evictions;
        assert!((1024 - 32 - 64..=1024 - 32).contains(&held), "{held}");
        assert!(ahead.misses > after.misses, "{reclaim}");
        let small = of(SimRoom::AfterPlan, 1024 - 32 - 64);
        assert!(ahead.misses < small.misses * 101 / 100, "{reclaim}");
        // A limit without a reserve is served, too.
        assert_eq!(
            of(SimRoom::Ahead, 1).misses,
            of(SimRoom::AfterPlan, 1).misses
        );
    }
}

#[test]
fn recorded_evictions_are_followed_only_when_asked_and_in_number() {
    let references = [1, 2, 3, 1, 2, 3];
    // Two pages left after the third reference, whichever they are.
    let evicted = [(3, 7, EVICTED), (3, 8, EVICTED)];
    let ignored = run(&live(&references, &evicted), pages(3));
    assert_eq!((ignored.misses, ignored.evictions), (3, 0));
    let followed = run(&live(&references, &evicted), |s| {
        pages(3)(s);
        s.room = SimRoom::Traced;
    });
    // LRU names 1 and 2; both come back.
    assert_eq!((followed.misses, followed.evictions), (5, 2));
    let traced = |references: &[u64], moved: &[_]| {
        run(&live(references, moved), |s| {
            pages(16)(s);
            s.room = SimRoom::Traced;
        })
    };
    // With more room they need not be out before the program needs them again. They are out, unless
    // the trace says otherwise.
    let out = traced(&references, &evicted);
    assert_eq!((out.misses, out.evictions), (5, 2));
    let both = [&evicted[..], &[(3, 1, Recalled), (4, 2, Recalled)]].concat();
    let recalled = traced(&references, &both);
    assert_eq!((recalled.misses, recalled.evictions), (5, 0));
    let one = traced(&references, &[&evicted[..], &[(4, 2, Recalled)]].concat());
    assert_eq!((one.misses, one.evictions), (5, 1));
    // The next batch evicts page 2, and names 3.
    let more = [(4, 9, EVICTED), (4, 2, Recalled), (5, 3, Recalled)];
    let more = [&both[..3], &more].concat();
    let more = traced(&references, &more);
    assert_eq!((more.misses, more.evictions), (6, 1));
    // Page 1 stayed after all, as if it was not allowed to leave.
    let stayed = traced(&references, &[&evicted[..], &[(3, 1, Returned)]].concat());
    assert_eq!((stayed.misses, stayed.evictions), (4, 1));
    // It is out when the next batch begins. If it stayed even then, it is in memory again.
    let next = Becomes::Evicted { batch: 1 };
    let late = [(3, 7, EVICTED), (3, 8, next), (3, 1, Returned)];
    let late = traced(&references, &late);
    assert_eq!((late.misses, late.evictions), (4, 2));
    let last = |moved: &[_]| traced(&[1, 2, 3, 1], moved).misses;
    assert_eq!(last(&evicted[..1]), 4);
    assert_eq!(last(&[&[(0, 1, Locked)], &evicted[..1]].concat()), 3);
    // More than there are.
    let many: Vec<_> = (0..100).map(|page| (3, page, EVICTED)).collect();
    let followed = run(&live(&references, &many), |s| {
        pages(3)(s);
        s.room = SimRoom::Traced;
    });
    assert_eq!((followed.misses, followed.evictions), (6, 3));
}

/// In the live run, the program has the room of pages that wait to be written while none wait.
#[test]
fn a_run_whose_evictor_was_late_evicts_when_it_did() {
    let references: Vec<u64> = (0..128).collect();
    let of = |room, frames| {
        let moved: Vec<_> = (0..64).map(|page| (129, page, EVICTED)).collect();
        run(&live(&[&references[..], &[0, 127]].concat(), &moved), |s| {
            pages(frames)(s);
            s.room = room;
        })
    };
    // Two pages more than 126 frames: page 0 is still there when it is used again.
    let late = of(SimRoom::Traced, 126);
    assert_eq!((late.misses, late.evictions), (128, 64));
    // It needs more than that room, so it evicts before.
    assert_eq!(of(SimRoom::Traced, 120).misses, 129);
    assert_eq!(of(SimRoom::AfterPlan, 126).misses, 129);
}

#[test]
fn a_run_that_began_above_its_limit_evicts_no_more_than_it_did() {
    // Twelve pages, and room for ten; four left before the first fault.
    let mut moved: Vec<_> = (0..12).map(|page| (0, page, Found)).collect();
    moved.extend((0..4).map(|page| (0, page, EVICTED)));
    let of = |room, moved: &[_]| {
        run(&live(&[20], moved), |s| {
            pages(10)(s);
            s.room = room;
        })
    };
    assert_eq!(of(SimRoom::Traced, &moved).evictions, 4);
    // The bounds and the compared policies keep to the limit, and so does a replay that follows
    // only what was found.
    assert_eq!(of(SimRoom::AfterPlan, &moved).evictions, 3);
    assert_eq!(of(SimRoom::Traced, &moved[..12]).evictions, 3);
}

#[test]
fn pages_that_the_manager_chose_leave_whatever_the_policy_says() {
    // LRU would name page 0. The manager chooses none of the newest pages, which may not leave.
    let misses = |wanted: u64, what, room| {
        let references: Vec<u64> = (0..200).chain([wanted]).collect();
        let run = run(
            &live(&references, &[(200, 70, what), (200, 999, what)]),
            |s| {
                pages(512)(s);
                s.room = room;
            },
        );
        run.misses - 200
    };
    assert_eq!(misses(70, NAMED, SimRoom::Traced), 1);
    assert_eq!(misses(0, NAMED, SimRoom::Traced), 0);
    assert_eq!(misses(70, EVICTED, SimRoom::Traced), 0);
    assert_eq!(misses(0, EVICTED, SimRoom::Traced), 1);
    // The compared policies decide for themselves.
    assert_eq!(misses(70, NAMED, SimRoom::Ahead), 0);
}

#[test]
fn where_no_page_may_leave_a_traced_eviction_comes_to_nothing() {
    // Page 1 is locked, and page 2 is the newest: no page can be named while there is room.
    let moved = [
        (0, 1, Locked),
        (2, 2, EVICTED),
        (3, 1, EVICTED),
        (3, 2, EVICTED),
    ];
    for reclaim in ["lru", "clock", "active_inactive"] {
        let outcome = run(&live(&[1, 2, 3], &moved), |s| {
            pages(16)(s);
            s.reclaim = reclaim.to_owned();
            s.room = SimRoom::Traced;
        });
        assert_eq!(outcome.misses, 3, "{reclaim}");
        assert!(outcome.evictions <= 1, "{reclaim}");
    }
}

#[test]
fn memory_without_end_is_as_much_as_the_trace_needs() {
    let outcome = run(&live(&[1, 2, 3, 1], &[]), |s| {
        pages(u64::MAX)(s);
        s.room = SimRoom::Ahead;
    });
    assert_eq!((outcome.misses, outcome.evictions), (3, 0));
}

#[test]
fn a_page_that_the_live_run_found_written_is_stored_again() {
    // Page 1 is read twice and pushed out twice; the second time it is clean, unless it was written
    // in memory.
    let references = [1, 2, 1, 2];
    let of = |moved: &[_]| run(&live(&references, moved), pages(1));
    let (zeros, once) = (of(&[]), of(&[(1, 1, Written)]));
    assert_eq!((zeros.zero_evictions, zeros.tiers[0].pages_written), (3, 0));
    assert_eq!((once.clean_evictions, once.tiers[0].pages_written), (1, 1));
    let twice = of(&[(1, 1, Written), (3, 1, Written)]);
    assert_eq!(
        (twice.clean_evictions, twice.tiers[0].pages_written),
        (0, 2)
    );
}

#[test]
fn a_write_that_changed_nothing_leaves_the_copy_below_right() {
    // Page 1 is written and pushed out, then written again and pushed out again.
    let packed = [1, 2, 1, 2].map(|page: u64| (page * PAGE) << 1 | u64::from(page == 1));
    let of = |moved: &[_], frames| {
        let mut trace = live(&[], moved);
        trace.clients[0].1 = packed.to_vec();
        run(&trace, pages(frames))
    };
    let changed = of(&[], 1);
    assert_eq!((changed.clean_evictions, changed.writes), (0, 2));
    let unchanged = of(&[(3, 1, Unchanged)], 1);
    assert_eq!((unchanged.clean_evictions, unchanged.writes), (1, 2));
    // If the page has stayed, its bytes differ from the stored copy as before.
    let stayed = of(&[(3, 1, Unchanged), (4, 5, Found), (4, 6, Found)], 2);
    assert_eq!((stayed.misses, stayed.clean_evictions), (2, 0));
}

/// A scan over twice the memory, as `readahead` would be recorded: every fourth page is faulted on,
/// the others are prefetched.
///
/// * `written`: the program wrote each prefetched page afterwards.
fn scanned(rounds: u64, written: bool) -> MemoryTrace {
    let (mut references, mut moved) = (Vec::new(), Vec::new());
    for page in (0..rounds * 512).map(|page| page % 512).step_by(4) {
        references.push(page);
        moved.extend(written.then_some((references.len(), page, Written)));
        for along in 1..4 {
            moved.push((references.len(), page + along, Ahead { written: false }));
        }
    }
    live(&references, &moved)
}

fn prefetch(name: &str) -> impl FnOnce(&mut Setup) + '_ {
    move |setup| {
        pages(256)(setup);
        setup.prefetch = name.to_owned();
        setup.tiers = tiers(&["nvme"]);
        setup.initial = Initial::Stored;
    }
}

#[test]
fn a_window_comes_with_its_fault_while_its_room_or_pages_are_still_leaving() {
    // 23 of 24 pages are used, and eleven leave. By the next fault at least three of them are out:
    // the room of its window.
    let references: Vec<u64> = (0..23).chain([30, 7]).collect();
    let mut moved: Vec<_> = (0..11).map(|page| (23, page, EVICTED)).collect();
    let along = |after, page| (after, page, Ahead { written: false });
    moved.extend([31, 32, 33].map(|page| along(24, page)));
    // The last pages of the batch come back, so they are out by then.
    moved.extend([8, 9, 10].map(|page| along(25, page)));
    let outcome = run(&live(&references, &moved), |s| {
        prefetch("traced")(s);
        pages(24)(s);
        s.room = SimRoom::Traced;
    });
    assert_eq!((outcome.misses, outcome.prefetched), (25, 6));
    assert_eq!(outcome.tiers[0].read_requests, 25);
}

#[test]
fn recorded_prefetches_are_repeated_when_asked_for() {
    let trace = scanned(4, false);
    let traced = run(&trace, prefetch("traced"));
    // LRU keeps nothing of a loop larger than memory, as in the live run.
    assert_eq!(traced.misses, trace.references());
    assert_eq!(traced.prefetched, 3 * traced.misses);
    assert_eq!(traced.evictions, 4 * traced.misses - 256);
    // Each page is read once.
    let device = &traced.tiers[0];
    assert_eq!(device.pages_read, 4 * traced.misses);
    // The same if the trace has more entries about the page that was faulted on.
    assert_eq!(device.read_requests, traced.misses);
    let written = run(&scanned(4, true), prefetch("traced"));
    assert_eq!(written.tiers[0].read_requests, traced.misses);
    // Without prefetch, the pages that were faulted on fit, and the trace shows nothing of the
    // others.
    let none = run(&trace, prefetch("none"));
    assert_eq!((none.misses, none.prefetched, none.evictions), (128, 0, 0));
    let asked_anew = run(&trace, prefetch("majority"));
    assert!(
        asked_anew.misses < traced.misses / 2,
        "{}",
        asked_anew.misses
    );
}

#[test]
fn recorded_prefetches_below_a_fault_with_gaps_or_at_a_hit_are_repeated_once() {
    let along = |after, page| (after, page, Ahead { written: false });
    let moved = [
        along(0, 8), // a descending window: in the order of addresses
        along(0, 9),
        along(1, 21), // every second one of two windows
        along(1, 23),
        along(2, 40), // with page 10, which has stayed
        along(2, 40), // in memory already
        along(3, 50),
        along(3, 52), // one was in memory in the live run, and here
    ];
    let mut trace = live(&[10, 10, 49, 51, 51], &moved);
    let of = |trace: &MemoryTrace| run(trace, prefetch("traced"));
    let outcome = of(&trace);
    assert_eq!((outcome.misses, outcome.prefetched), (3, 7));
    assert_eq!(outcome.evictions, 0);
    assert_eq!(outcome.prefetch_hits, 0, "no use was seen");
    // A page that was written was used.
    trace.moved[0][0].what = Ahead { written: true };
    let written = of(&trace);
    assert_eq!((written.misses, written.prefetch_hits), (3, 1));
    // So was a page that a scan of access bits found.
    trace.moved[0].push(Moved {
        after: 4,
        address: 50 * PAGE,
        what: Used,
    });
    assert_eq!(of(&trace).prefetch_hits, 2);
}

#[test]
fn a_prefetched_page_that_was_written_is_stored_again() {
    let references: Vec<u64> = [0].into_iter().chain(2..300).collect();
    let of = |written| {
        let moved = [(1, 1, Ahead { written })];
        run(&live(&references, &moved), prefetch("traced"))
    };
    let (clean, dirty) = (of(false), of(true));
    assert_eq!((clean.misses, clean.evictions), (299, 44));
    assert_eq!((clean.clean_evictions, dirty.clean_evictions), (44, 43));
}

#[test]
fn recorded_prefetch_needs_a_trace_that_names_prefetched_pages() {
    let setup = Setup {
        prefetch: "traced".to_owned(),
        ..Setup::default()
    };
    let sweep = Sweep::single(setup);
    let error = sweep.run(&live(&[1, 2, 3], &[]), &mut |_| ()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("--prefetch traced") && text.contains("run --trace"),
        "{text}"
    );
    assert!(sweep.run(&scanned(1, false), &mut |_| ()).is_ok());
}
