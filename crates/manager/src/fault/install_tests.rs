//! Plans of a real engine are installed in a model of the kernel's memory, which refuses as the
//! kernel does. Afterwards every page has its own bytes, or is where it was.

use std::sync::atomic::Ordering::Relaxed;

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, PageState, Slot, SpaceId, ThreadId, TierId, VirtPage, VirtRange,
};
use undercroft_engine::{Config, Engine, EvictItem, Fault, FaultAnswer, Outcome, Room, VecLedger};
use undercroft_model::content::Content;

use super::install::{Load, Loads};
use crate::space::model::ModelMemory;
use crate::space::port::{Space, Wake};

/// The first of the pages.
const FIRST: u64 = 512;
/// As many as one plan brings in.
const PAGES: u64 = 8;

struct Bed {
    engine: Engine<VecLedger>,
    space: SpaceId,
    memory: ModelMemory,
    loads: Loads,
    zeros: Vec<u8>,
}

fn content(page: VirtPage) -> Content {
    Content::numbered(page.0)
}

impl Bed {
    /// Pages that were stored, or (`fresh`) were never touched; a read of the first brings in all.
    fn new(fresh: bool) -> Bed {
        let config = Config {
            limit: Bytes(4096 * BASE_PAGE_BYTES as u64),
            retain: vec![false],
            demotes: vec![false],
            room: Room::Ahead,
        };
        let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
        let prefetch = undercroft_policy::prefetch::by_name("window:7").expect("a policy");
        let mut engine = Engine::new(VecLedger::new(4), reclaim, prefetch, config);
        let space = engine.layout().add_space();
        let range = VirtRange::new(VirtPage(FIRST), VirtPage(FIRST + PAGES));
        engine.layout().attached(space, range);
        let mut bed = Bed {
            engine,
            space,
            memory: ModelMemory::new(range),
            loads: Loads::new(),
            zeros: vec![0; PAGES as usize * BASE_PAGE_BYTES],
        };
        if !fresh {
            bed.store(range);
        }
        bed
    }

    /// All pages of `range` leave for slots of their own number.
    fn store(&mut self, range: VirtRange) {
        self.engine.discovery().found_resident(self.space, range);
        let mut items: Vec<EvictItem> = Vec::new();
        assert!(
            self.engine
                .evictions()
                .select_these(self.space, &[range], &mut items)
        );
        assert_eq!(items.len() as u64, PAGES);
        for item in &items {
            let stored = Outcome::Stored(TierId(0), Slot(item.page.0));
            self.engine
                .evictions()
                .publish(item.at, stored, &mut Vec::new());
        }
    }

    /// Decides, loads and installs once; what the engine says of each page afterwards.
    fn fault(&mut self, page: u64, write: bool) -> Vec<PageState> {
        let fault = Fault {
            space: self.space,
            page: VirtPage(page),
            write,
            thread: ThreadId(1),
            urgent: false,
        };
        if self.engine.faults().answer(fault, &mut self.loads.plan) == FaultAnswer::Load {
            let items = self.loads.plan.items.len();
            self.loads.states[..items].fill(Load::Ready);
            self.install();
        }
        let pages = (FIRST..FIRST + PAGES).map(VirtPage);
        pages
            .map(|page| self.engine.books().entry(self.space, page).state)
            .collect()
    }

    fn install(&mut self) {
        let mut bytes = Vec::new();
        for item in &self.loads.plan.items {
            bytes.extend_from_slice(&content(item.page).bytes());
        }
        let mut from = 0;
        while let Some(part) = self.loads.next_part(from) {
            from = part.end;
            assert!(self.engine.upsets().spare(&self.loads.plan));
            let loaded = |run: std::ops::Range<usize>| {
                Some(&bytes[run.start * BASE_PAGE_BYTES..run.end * BASE_PAGE_BYTES])
            };
            self.loads
                .install(part.clone(), &self.memory, loaded, &self.zeros, |_| {});
            let fault = self.loads.plan.fault;
            let items = self.loads.results(part.clone());
            self.engine.faults().finish(fault, items);
            self.loads.states[part].fill(Load::Finished);
        }
        let waking = self.memory.waking_calls.load(Relaxed);
        assert_eq!(waking, 0, "no thread is woken before the books are right");
    }

    /// Every page in memory has its own bytes, and the books say of each what the memory does.
    fn check(&self, states: &[PageState], fresh: bool) {
        for (page, state) in (FIRST..).map(VirtPage).zip(states) {
            let here = self.memory.peek(page);
            let right = if fresh { Content::ZERO } else { content(page) };
            match state {
                PageState::Resident => assert_eq!(here, Some(right), "{page:?}"),
                PageState::Stored | PageState::Untouched => assert_eq!(here, None, "{page:?}"),
                other => panic!("{page:?} is {other:?}"),
            }
        }
    }
}

#[test]
fn a_plan_is_installed_by_one_call() {
    for fresh in [false, true] {
        let mut bed = Bed::new(fresh);
        let states = bed.fault(FIRST, false);
        bed.check(&states, fresh);
        let here = states.iter().filter(|s| **s == PageState::Resident).count();
        assert!(here > 1, "{states:?}: nothing came along");
        assert_eq!(bed.memory.calls.load(Relaxed), 1);
    }
}

#[test]
fn a_written_fresh_page_has_a_frame_of_its_own() {
    let mut bed = Bed::new(true);
    let states = bed.fault(FIRST, true);
    bed.check(&states, true);
    assert_eq!(
        bed.memory.calls.load(Relaxed),
        2,
        "one COPY, then one ZEROPAGE"
    );
}

/// Wherever an event comes, the pages installed before it stay, and the others are as they were.
#[test]
fn an_event_at_each_page_loses_none() {
    for fresh in [false, true] {
        for event in 0..PAGES {
            let mut bed = Bed::new(fresh);
            bed.memory.until_event.store(event, Relaxed);
            let states = bed.fault(FIRST, false);
            bed.check(&states, fresh);
            let here = states.iter().filter(|s| **s == PageState::Resident).count();
            assert!(here as u64 <= event);
            bed.memory.until_event.store(u64::MAX, Relaxed);
            let states = (FIRST..FIRST + PAGES).map(|page| bed.fault(page, false));
            let last = states.last().expect("a state");
            bed.check(&last, fresh);
            assert_eq!(last, [PageState::Resident; PAGES as usize]);
        }
    }
}

/// A run over two mappings is refused whole: each half is installed by itself.
#[test]
fn a_run_over_two_mappings_is_halved() {
    for cut in 1..PAGES {
        let mut bed = Bed::new(false);
        bed.memory.cut.store(FIRST + cut, Relaxed);
        let states = bed.fault(FIRST, false);
        bed.check(&states, false);
        let here = states.iter().filter(|s| **s == PageState::Resident).count();
        assert!(here > 1, "cut at {cut}: {states:?}");
    }
}

/// A page that is there already is the program's. A stored one counts as installed; a fresh one may
/// be about to be dropped, and is left out of the books.
#[test]
fn a_page_that_exists_is_not_replaced() {
    for fresh in [false, true] {
        for there in 0..PAGES {
            let mut bed = Bed::new(fresh);
            let page = VirtPage(FIRST + there);
            let own = Content::fill(7);
            let put = bed.memory.install(page, &own.bytes(), Wake::Later);
            assert_eq!(put, Ok(()));
            let states = bed.fault(FIRST, false);
            assert_eq!(bed.memory.peek(page), Some(own));
            let state = states[there as usize];
            if fresh {
                assert_eq!(state, PageState::Untouched)
            } else {
                assert!(matches!(state, PageState::Resident | PageState::Stored))
            }
        }
    }
}

/// Pages that are skipped or lost are never mapped.
#[test]
fn what_is_skipped_or_lost_is_not_installed() {
    let mut bed = Bed::new(false);
    let fault = Fault {
        space: bed.space,
        page: VirtPage(FIRST),
        write: false,
        thread: ThreadId(1),
        urgent: false,
    };
    assert_eq!(
        bed.engine.faults().answer(fault, &mut bed.loads.plan),
        FaultAnswer::Load
    );
    let items = bed.loads.plan.items.len();
    assert!(items > 3);
    bed.loads.states[..items].fill(Load::Ready);
    bed.loads.states[1] = Load::Lost;
    bed.loads.states[2] = Load::Skipped;
    bed.install();
    let state = |at: u64| {
        bed.engine
            .books()
            .entry(bed.space, VirtPage(FIRST + at))
            .state
    };
    assert_eq!(
        [0, 1, 2, 3].map(state),
        [
            PageState::Resident,
            PageState::Lost,
            PageState::Stored,
            PageState::Resident,
        ]
    );
    let here = |at: u64| bed.memory.peek(VirtPage(FIRST + at)).is_some();
    assert_eq!([0, 1, 2, 3].map(here), [true, false, false, true]);
}
