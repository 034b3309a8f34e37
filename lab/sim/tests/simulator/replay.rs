//! The results of a replay: the paper's formula, clean pages, clients that wait for each other,
//! pools, energy.

#![allow(clippy::unwrap_used, reason = "everything here is a test helper")]

use undercroft_base::Nanos;
use undercroft_device::profiles;
use undercroft_seeded::Random;
use undercroft_sim::memory_trace::Becomes::{self, Dropped, Found, Unchanged, Used, Written};
use undercroft_sim::memory_trace::Moved;
use undercroft_sim::setup::{Cost, Initial, Memory, Setup, SetupError, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{MemoryTrace, SimReport, Sweep, simulate};

const PAGE: u64 = 4096;

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
