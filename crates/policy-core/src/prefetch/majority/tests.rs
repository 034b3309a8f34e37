//! Trends that `majority` finds in scans, strides, interleaved streams and noise.

use undercroft_base::{SpaceId, ThreadId, VirtPage};

use super::*;
use undercroft_seeded::Random;

const BASE: u64 = 0x7_f000_0000;

/// Plays page references against a memory in which every loaded page stays mapped. Returns (faults,
/// prefetched pages).
fn play(references: impl IntoIterator<Item = u64>) -> (u64, u64) {
    let mut prefetch = Majority::new();
    let mut mapped = std::collections::HashSet::new();
    let (mut faults, mut brought) = (0, 0);
    for page in references {
        if !mapped.insert(page) {
            continue;
        }
        faults += 1;
        let window = prefetch.on_fault(FaultSeen {
            space: SpaceId(1),
            page: VirtPage(page),
            thread: ThreadId(1),
            first_touch: false,
        });
        for step in 1..=i64::from(window.count) {
            let target = page as i64 + step * window.stride;
            brought += u64::from(mapped.insert(target as u64));
        }
    }
    (faults, brought)
}

#[test]
fn forward_scan_ends_at_the_largest_window() {
    let (faults, brought) = play(BASE..BASE + 64 * 1000);
    // One fault a window, and one for each window left out.
    assert!(faults < 1010 + 1010 / 16, "{faults} faults");
    assert!(brought <= 64 * 1001);
}

#[test]
fn descending_and_strided_scans_are_found() {
    let (faults, _) = play((0..6400).map(|i| BASE - i));
    assert!(faults < 115, "descending: {faults} faults");
    for stride in [2, 7, 31, 33, 512, 100_000] {
        let (faults, brought) = play((0..6400).map(|i| BASE + i * stride));
        assert!(
            faults < 120 && brought < 6500,
            "stride {stride}: {faults} faults"
        );
    }
}

// A scan of every 16th page leaves each window of a sequential trend, 64 pages, exactly at its end.
#[test]
fn sparse_scan_after_a_dense_one_is_found() {
    for stride in [2, 16, 32] {
        let dense = BASE..BASE + 6400;
        let sparse = (0..6400).map(|i| BASE + 6400 + i * stride);
        let (before, _) = play(dense.clone());
        let (faults, brought) = play(dense.chain(sparse));
        let windows = brought / 64;
        assert!(
            faults - before < 200 && windows < 250,
            "stride {stride}: {faults} faults, {before} before, {windows} windows"
        );
    }
}

#[test]
fn interleaved_streams_of_one_thread_are_found() {
    let bases = [BASE, BASE + 500, BASE + (1 << 24), BASE - (1 << 20)];
    for streams in 2..=4 {
        let far = bases.map(|base| base + 4096 * (base & 7));
        let pages = (0..480).flat_map(|i| far[..streams].iter().map(move |base| base + i));
        let (faults, _) = play(pages);
        assert!(
            faults <= 20 * streams as u64,
            "{streams} streams: {faults} faults"
        );
    }
    let two = (0..6400).flat_map(|i| [BASE + i * 700, BASE + (1 << 30) - i * 900]);
    let (faults, _) = play(two);
    assert!(faults < 240, "two far strides: {faults} faults");
}

#[test]
fn scan_with_random_faults_between_is_still_found() {
    let mut random = Random::new(3);
    let pages = (0..6400).flat_map(|i| {
        let noise = (i % 4 == 0).then(|| (1 << 40) + random.below(1 << 24));
        [Some(BASE + i), noise].into_iter().flatten()
    });
    let (faults, _) = play(pages.collect::<Vec<_>>());
    assert!(faults < 1600 + 150, "{faults} faults");
}

#[test]
fn random_faults_bring_nothing() {
    for (pages, share) in [(1 << 20, 0.0001), (1 << 14, 0.003)] {
        let mut prefetch = Majority::new();
        let mut random = Random::new(1);
        let mut brought = 0;
        for _ in 0..100_000 {
            let window = prefetch.on_fault(FaultSeen {
                space: SpaceId(1),
                page: VirtPage(BASE + random.below(pages)),
                thread: ThreadId(1),
                first_touch: false,
            });
            brought += window.count;
        }
        assert!(
            f64::from(brought) <= share * 100_000.0,
            "{brought} pages brought in a space of {pages}"
        );
    }
}

#[test]
fn window_collapses_when_the_trend_breaks() {
    let mut prefetch = Majority::new();
    let mut random = Random::new(2);
    let mut at = |page| {
        prefetch.on_fault(FaultSeen {
            space: SpaceId(1),
            page: VirtPage(page),
            thread: ThreadId(1),
            first_touch: false,
        })
    };
    let mut page = BASE;
    for _ in 0..20 {
        page += u64::from(at(page).count) + 1;
    }
    assert_eq!(at(page).count, WINDOW_MAX);
    for _ in 0..20 {
        assert_eq!(at(random.below(1 << 30)).count, 0);
    }
}

#[test]
fn window_cut_by_the_engine_does_not_grow_and_does_not_break() {
    let mut prefetch = Majority::new();
    let counts: Vec<u32> = (0..40)
        .map(|i| {
            let fault = FaultSeen {
                space: SpaceId(1),
                page: VirtPage(BASE + i * 5),
                thread: ThreadId(1),
                first_touch: false,
            };
            prefetch.on_fault(fault).count
        })
        .collect();
    assert!(counts[2..].iter().all(|&count| count > 0), "{counts:?}");
    let mut page = BASE << 4;
    let mut prefetch = Majority::new();
    let mut last = 0;
    for _ in 0..40 {
        let fault = FaultSeen {
            space: SpaceId(1),
            page: VirtPage(page),
            thread: ThreadId(1),
            first_touch: false,
        };
        last = prefetch.on_fault(fault).count;
        // The engine brings at most 8.
        page += u64::from(last.min(8)) + 1;
    }
    assert!((8..=15).contains(&last), "{last}");
}

#[test]
fn repeated_fault_teaches_nothing() {
    let mut prefetch = Majority::new();
    let fault = FaultSeen {
        space: SpaceId(1),
        page: VirtPage(BASE),
        thread: ThreadId(1),
        first_touch: false,
    };
    for _ in 0..10 {
        assert_eq!(prefetch.on_fault(fault), Window::default());
    }
}

#[test]
fn first_touches_and_threads_have_their_own_streams() {
    let mut prefetch = Majority::new();
    let mut counts = [0; 4];
    for i in 0..10 {
        for (index, count) in counts.iter_mut().enumerate() {
            let fault = FaultSeen {
                space: SpaceId(1),
                page: VirtPage(BASE + i + 40 * index as u64),
                thread: ThreadId(1 + index as u32 / 2),
                first_touch: index % 2 == 1,
            };
            *count = prefetch.on_fault(fault).count;
        }
    }
    assert!(
        counts.iter().all(|&count| count >= WINDOW_FIRST),
        "{counts:?}"
    );
}
