//! Plans of a real engine are installed in a model of the kernel's memory, which refuses as the
//! kernel does. Afterwards every page has its own bytes, or is where it was.

use std::cell::{Cell, RefCell};
use std::io;

use undercroft_base::{
    Bytes, PAGE_BYTES, PageState, Slot, SpaceId, ThreadId, TierId, VirtPage, VirtRange,
};
use undercroft_engine::{Config, Engine, EvictItem, Fault, FaultAnswer, Outcome, Room, VecLedger};
use undercroft_model::content::Content;
use undercroft_model::memory::{Memory, Mm, Refusal};
use undercroft_sys::uffd::{MessageBuf, Messages, UffdError};

use super::install::{Load, Loads};
use crate::space::port::{Space, Wake};

/// The model's memory behind the port.
struct ModelMemory {
    memory: RefCell<Memory>,
    mm: Mm,
    /// A mapping begins here: no call reaches over it.
    cut: VirtPage,
    /// Pages until a layout event comes.
    until_event: Cell<u64>,
    calls: Cell<u32>,
}

impl ModelMemory {
    fn put(&self, range: VirtRange, content: impl Fn(usize) -> Content) -> Result<(), UffdError> {
        self.calls.set(self.calls.get() + 1);
        if range.start < self.cut && self.cut < range.end {
            return Err(UffdError::NotMapped { done: 0 });
        }
        for (at, page) in range.pages().enumerate() {
            let done = at as u64;
            if self.until_event.get() == 0 {
                return Err(UffdError::LayoutChanging { done });
            }
            self.until_event.set(self.until_event.get() - 1);
            let put = self.memory.borrow_mut().install(self.mm, page, content(at));
            put.map_err(|refusal| match refusal {
                Refusal::Exists => UffdError::Exists { done },
                Refusal::NotMapped => UffdError::NotMapped { done },
                Refusal::LayoutChanging => UffdError::LayoutChanging { done },
                Refusal::NoMemory => UffdError::NoMemory { done },
            })?;
        }
        Ok(())
    }
}

impl Space for ModelMemory {
    fn events<'a>(&self, _: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        unreachable!("an installation reads no events")
    }

    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError> {
        assert_eq!(
            wake,
            Wake::Later,
            "no thread is woken before the books are right"
        );
        let range = VirtRange::new(at, at.plus((bytes.len() / PAGE_BYTES) as u64));
        let page = |at: usize| Content::of(&bytes[at * PAGE_BYTES..][..PAGE_BYTES]);
        self.put(range, |at| page(at).expect("whole pages"))
    }

    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError> {
        assert_eq!(
            wake,
            Wake::Later,
            "no thread is woken before the books are right"
        );
        self.put(range, |_| Content::ZERO)
    }

    fn wake(&self, _: VirtRange) {}

    fn protect(&self, _: VirtRange, _: bool) -> Result<(), UffdError> {
        Ok(())
    }

    fn poison(&self, range: VirtRange) -> Result<(), UffdError> {
        let done = self.memory.borrow_mut().poison(self.mm, range.start);
        done.map_err(|_| UffdError::LayoutChanging { done: 0 })
    }
}

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
            limit: Bytes(4096 * PAGE_BYTES as u64),
            retain: vec![false],
            demotes: vec![false],
            room: Room::Ahead,
        };
        let reclaim = undercroft_policy::reclaim::by_name("clock").expect("a policy");
        let prefetch = undercroft_policy::prefetch::by_name("window:7").expect("a policy");
        let mut engine = Engine::new(VecLedger::new(4), reclaim, prefetch, config);
        let space = engine.layout().add_space();
        let range = VirtRange::new(VirtPage(FIRST), VirtPage(FIRST + PAGES));
        engine.layout().attached(space, range);
        let mut memory = Memory::default();
        let mm = memory.add();
        memory.map(mm, range);
        memory.advise(mm, range, |advice| advice.registered = true);
        let mut bed = Bed {
            engine,
            space,
            memory: ModelMemory {
                memory: RefCell::new(memory),
                mm,
                cut: VirtPage(0),
                until_event: Cell::new(u64::MAX),
                calls: Cell::new(0),
            },
            loads: Loads::new(),
            zeros: vec![0; PAGES as usize * PAGE_BYTES],
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
            self.engine
                .faults()
                .validate(&mut self.loads.plan.items[part.clone()]);
            let loaded = |run: std::ops::Range<usize>| {
                Some(&bytes[run.start * PAGE_BYTES..run.end * PAGE_BYTES])
            };
            self.loads
                .install(part.clone(), &self.memory, loaded, &self.zeros, |_| {});
            let fault = self.loads.plan.fault;
            let items = self.loads.results(part.clone());
            self.engine.faults().finish(fault, items);
            self.loads.states[part].fill(Load::Finished);
        }
    }

    /// Every page in memory has its own bytes, and the books say of each what the memory does.
    fn check(&self, states: &[PageState], fresh: bool) {
        let memory = self.memory.memory.borrow();
        for (page, state) in (FIRST..).map(VirtPage).zip(states) {
            let here = memory.peek(self.memory.mm, page);
            let right = match fresh {
                true => Content::ZERO,
                false => content(page),
            };
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
        assert_eq!(bed.memory.calls.get(), 1);
    }
}

#[test]
fn a_written_fresh_page_has_a_frame_of_its_own() {
    let mut bed = Bed::new(true);
    let states = bed.fault(FIRST, true);
    bed.check(&states, true);
    assert_eq!(bed.memory.calls.get(), 2, "one COPY, then one ZEROPAGE");
}

/// Wherever an event comes, the pages installed before it stay, and the others are as they were.
#[test]
fn an_event_at_each_page_loses_none() {
    for fresh in [false, true] {
        for event in 0..PAGES {
            let mut bed = Bed::new(fresh);
            bed.memory.until_event.set(event);
            let states = bed.fault(FIRST, false);
            bed.check(&states, fresh);
            let here = states.iter().filter(|s| **s == PageState::Resident).count();
            assert!(here as u64 <= event);
            bed.memory.until_event.set(u64::MAX);
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
        bed.memory.cut = VirtPage(FIRST + cut);
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
            let mm = bed.memory.mm;
            let put = bed.memory.memory.borrow_mut().install(mm, page, own);
            assert_eq!(put, Ok(()));
            let states = bed.fault(FIRST, false);
            assert_eq!(bed.memory.memory.borrow().peek(mm, page), Some(own));
            let state = states[there as usize];
            match fresh {
                true => assert_eq!(state, PageState::Untouched),
                false => assert!(matches!(state, PageState::Resident | PageState::Stored)),
            }
        }
    }
}

/// What is skipped or lost is never mapped.
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
    let memory = bed.memory.memory.borrow();
    let here = |at: u64| memory.peek(bed.memory.mm, VirtPage(FIRST + at)).is_some();
    assert_eq!([0, 1, 2, 3].map(here), [true, false, false, true]);
}
