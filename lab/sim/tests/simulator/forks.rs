//! Forks and ends of processes in a live trace: what a child inherits, and what an end removes.
//! with them.

#![allow(clippy::unwrap_used, reason = "everything here is a test helper")]

use undercroft_sim::memory_trace::Becomes::{
    self, Ended, Forked, Found, PassedOver, Shared, TakenBack,
};
use undercroft_sim::memory_trace::Moved;
use undercroft_sim::setup::{Memory, Setup, SimRoom};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{MemoryTrace, PageStream, SimReport, simulate};

const PAGE: u64 = 4096;

/// Bytes from one address space to the next.
const SPACE: u64 = 1 << 47;

/// A live trace under construction.
#[derive(Default)]
struct Live {
    references: Vec<u64>,
    moved: Vec<Moved>,
}

impl Live {
    fn read(&mut self, space: u64, page: u64) {
        self.references.push((space * SPACE + page * PAGE) << 1);
    }

    fn write(&mut self, space: u64, page: u64) {
        self.references.push((space * SPACE + page * PAGE) << 1 | 1);
    }

    fn tell(&mut self, space: u64, page: u64, what: Becomes) {
        self.moved.push(Moved {
            after: self.references.len(),
            address: space * SPACE + page * PAGE,
            what,
        });
    }

    fn fork(&mut self, parent: u16, child: u64) {
        self.tell(child, 0, Forked { parent });
    }

    fn run(&self, change: impl FnOnce(&mut Setup)) -> SimReport {
        let trace = MemoryTrace {
            name: "test".to_owned(),
            granule_bytes: PAGE,
            clients: vec![("run".to_owned(), self.references.clone())],
            moved: vec![self.moved.clone()],
            ..MemoryTrace::default()
        };
        let mut setup = Setup {
            reclaim: "lru".to_owned(),
            memory: Memory::Pages(3),
            tiers: vec!["nvme".parse().unwrap()],
            ..Setup::default()
        };
        change(&mut setup);
        simulate(&streams_of(&trace, PAGE).unwrap(), &setup, &mut |_| ()).unwrap()
    }
}

/// Pages 0 to 3 of a process in room for three: page 0 is out.
fn parent() -> Live {
    let mut live = Live::default();
    (0..4).for_each(|page| live.write(0, page));
    live
}

/// (misses, first touches among them, evictions)
fn counts(outcome: &SimReport) -> (u64, u64, u64) {
    (outcome.misses, outcome.first_touches, outcome.evictions)
}

#[test]
fn a_child_has_what_its_parent_had_in_memory_and_out_and_frames_when_it_writes() {
    let mut live = parent();
    live.fork(0, 1);
    live.read(1, 2);
    assert_eq!(counts(&live.run(|_| ())), (4, 4, 1), "a hit, and no frame");
    live.read(1, 0);
    // Page 1 leaves for it. The frame stays in memory until the child's page leaves, too.
    assert_eq!(counts(&live.run(|_| ())), (5, 4, 3), "no first touch");
    live.write(1, 2);
    live.write(1, 2);
    assert_eq!(counts(&live.run(|_| ())), (5, 4, 4), "a copy, once");
    live.moved.clear();
    assert_eq!(counts(&live.run(|_| ())), (6, 6, 3), "nobody's child");
}

/// A page that two processes have is freed when it has left both.
#[test]
fn a_shared_page_that_leaves_is_the_heirs_and_frees_nothing() {
    let mut live = parent(); // 1, 2 and 3 are in memory
    live.fork(0, 1);
    live.write(0, 0); // in place of page 1 of both
    live.read(1, 1); // the copy that its parent left, in place of page 2 of both
    live.read(1, 3);
    assert_eq!(counts(&live.run(|_| ())), (6, 4, 5));
    // If the trace has it as well, nothing changes.
    live.tell(1, 3, Found);
    live.read(1, 3);
    assert_eq!(counts(&live.run(|_| ())).0, 6);
}

#[test]
fn a_childs_page_found_in_memory_costs_a_frame_and_can_leave() {
    let mut live = parent();
    live.fork(0, 1);
    live.tell(1, 3, Found); // written, by any process
    live.read(1, 3);
    assert_eq!(counts(&live.run(|_| ())), (4, 4, 3));
}

#[test]
fn a_process_that_ends_leaves_nothing_and_its_number_can_be_reused() {
    let mut live = parent();
    live.fork(0, 1);
    live.read(1, 0);
    live.write(1, 3);
    live.tell(1, 0, Ended);
    assert_eq!(counts(&live.run(|_| ())), (5, 4, 5));
    live.read(0, 1); // into the room of one of them
    live.read(0, 2); // and of the other
    assert_eq!(counts(&live.run(|_| ())), (7, 4, 5));
    live.read(1, 0); // another process
    assert_eq!(counts(&live.run(|_| ())), (8, 5, 6));
    live.fork(0, 1); // and one more
    live.read(1, 0);
    assert_eq!(counts(&live.run(|_| ())).1, 5);
}

#[test]
fn grandchildren_have_what_their_parents_were_never_seen_to_use() {
    let mut live = parent();
    live.fork(0, 1);
    live.fork(1, 2);
    live.tell(0, 0, Ended);
    live.read(2, 0);
    live.read(2, 3);
    assert_eq!(counts(&live.run(|_| ())), (5, 4, 1));
    let unknown = Forked { parent: 9 };
    live.tell(2, 0, unknown);
    live.read(2, 3);
    assert_eq!(counts(&live.run(|_| ())), (6, 5, 1), "of nobody: empty");
}

#[test]
fn pages_shared_when_first_seen_cost_no_frame() {
    let mut live = parent();
    live.tell(1, 3, Shared);
    live.tell(1, 7, Shared); // no process here has it: it is found
    live.read(1, 3);
    live.read(1, 7);
    assert_eq!(counts(&live.run(|_| ())), (4, 4, 2));
    live.write(1, 3);
    assert_eq!(counts(&live.run(|_| ())), (4, 4, 3));
    // The child has the copies that its relative has stored by now.
    let mut live = parent();
    live.tell(1, 0, Shared);
    live.read(1, 0);
    assert_eq!(counts(&live.run(|_| ())), (5, 4, 2));
}

#[test]
fn processes_that_had_a_number_one_after_the_other_are_not_each_others_children() {
    let mut live = parent();
    live.fork(0, 1);
    live.write(1, 512 * 9);
    live.tell(1, 0, Ended);
    live.read(1, 512 * 5); // another
    live.read(1, 512 * 9);
    assert_eq!(counts(&live.run(|_| ())).1, 7, "zeros again");
    let chunks = |live: &Live| {
        let (references, moved) = (&live.references, &live.moved);
        let stream = PageStream::build_moved("t", references, moved, PAGE).unwrap();
        stream.numbers / 512
    };
    // A parent has numbers for the pages that its child names. Nothing else is known of those
    // pages.
    assert_eq!(chunks(&live), 4, "0 and 9; 5 and 9");
    live.moved.truncate(1); // all one process
    assert_eq!(chunks(&live), 5, "0, 5 and 9; 5 and 9");
}

/// The stored copy of one serves the other, too, unless the other was copied meanwhile.
#[test]
fn a_page_that_leaves_after_its_relatives_is_not_written_again() {
    for (copied, clean) in [(false, 3), (true, 2)] {
        let mut live = parent(); // 1, 2 and 3 are in memory, and 0 is out
        live.fork(0, 1);
        live.read(1, 1);
        if copied {
            live.tell(1, 1, Found);
        }
        for page in [0, 4, 5] {
            live.write(0, page); // in place of 1, 2 and 3 of both
        }
        let outcome = live.run(|_| ());
        let counts = (outcome.evictions, outcome.clean_evictions);
        assert_eq!(counts, (7, clean), "copied: {copied}");
        assert_eq!(
            outcome.tiers[0].pages_written,
            7 - clean,
            "copied: {copied}"
        );
    }
}

/// While a process does not run, none of its pages leaves. The policy forgets those that it chose,
/// and takes them for new ones afterwards.
#[test]
fn pages_that_are_passed_over_stay_and_are_new_when_they_are_taken_back() {
    let run = |passed_over: bool| {
        let mut live = Live::default();
        (0..3).for_each(|page| live.write(0, page));
        if passed_over {
            live.tell(0, 0, PassedOver);
        }
        live.write(0, 3); // one page leaves
        if passed_over {
            live.tell(0, 0, TakenBack);
        }
        live.write(0, 4); // and another
        live.read(0, 0);
        let outcome = live.run(|s| s.room = SimRoom::Ahead);
        (outcome.misses, outcome.evictions)
    };
    assert_eq!(
        run(false),
        (6, 3),
        "the oldest two leave, and one for the page that comes back"
    );
    assert_eq!(run(true), (5, 2), "the oldest stays");
}

/// If each page has a place of its own, a child's page stays there until it has left.
#[test]
fn a_parents_new_copy_goes_elsewhere_while_the_child_has_the_old_one() {
    let mut live = parent();
    live.fork(0, 1);
    (0..4).for_each(|page| live.write(0, page)); // page 0 is out, in, and out again
    live.read(1, 0);
    let outcome = live.run(|s| s.tiers = vec!["nvme,layout=home".parse().unwrap()]);
    assert_eq!(outcome.tiers[0].place_writes_max, 1);
    live.moved.clear();
    let outcome = live.run(|s| s.tiers = vec!["nvme,layout=home".parse().unwrap()]);
    assert_eq!(outcome.tiers[0].place_writes_max, 2, "nobody's child");
}

/// The same for tiers where each page has a place of its own: parent and child may both have a copy
/// there.
#[test]
fn copies_of_parent_and_child_are_told_apart_wherever_they_lie() {
    for texts in [
        &["nvme,layout=home"][..],
        &["nvme,layout=log"],
        &["ram,ratio=2", "nvme"],
    ] {
        let mut live = parent();
        live.fork(0, 1);
        for round in 0..3 {
            (0..4).for_each(|page| live.write(round % 2, page));
            (0..4).for_each(|page| live.write(1 - round % 2, page));
        }
        live.tell(0, 0, Ended);
        (0..4).for_each(|page| live.read(1, page));
        live.tell(1, 0, Ended);
        let tiers = texts.iter().map(|text| text.parse().unwrap());
        let outcome = live.run(|s| s.tiers = tiers.collect());
        let most = outcome
            .tiers
            .iter()
            .map(|tier| tier.logical_bytes_peak / PAGE);
        let most: u64 = most.sum();
        // Eight, and one more while a new copy is written.
        assert!((5..=9).contains(&most), "{texts:?}: {most} pages");
        assert_eq!(outcome.first_touches, 4, "{texts:?}");
    }
}
