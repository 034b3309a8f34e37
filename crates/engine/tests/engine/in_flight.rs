//! Pages that a dead manager had chosen and not moved: each is what the kernel shows of it.

use std::sync::atomic::Ordering;

use undercroft_base::{BASE_PAGE_BYTES, Bytes, Entry, PageSize, PageState, SpaceId, VirtPage};
use undercroft_engine::{
    Config, Engine, Found, HeldPage, Here, Ledger, Recovered, Room, VecLedger,
};
use undercroft_policy::{prefetch, reclaim};

const SPACE: SpaceId = SpaceId(1);

/// The kernel shows page `i` as the `i`th says, and no agent has moved any.
struct Shows<'a>(&'a [Here]);

impl Found for Shows<'_> {
    fn page(&mut self, _: SpaceId, page: VirtPage) -> Here {
        self.0[page.0 as usize]
    }

    fn held(&mut self, _: SpaceId, _: usize) -> HeldPage {
        HeldPage::NotMoved
    }
}

/// A ledger whose pages 0, 1, ... are on their way out: the first `noted` have notes.
fn ledger(pages: usize, noted: usize) -> VecLedger {
    let ledger = VecLedger::new(1);
    ledger.chunks()[0].store(1 << 63 | 1 << 36, Ordering::Relaxed);
    let evicting = Entry {
        state: PageState::Evicting,
        ..Entry::UNTOUCHED
    };
    for at in 0..pages {
        ledger.entries()[at].store(evicting.pack(), Ordering::Relaxed);
        if at < noted {
            let note = 1 << 63 | 1 << 38 | (at as u64) << 32 | at as u64;
            ledger.notes()[2 + at].store(note, Ordering::Relaxed);
        }
    }
    ledger
}

fn reconciled(shows: &[Here], noted: usize) -> (Recovered, Vec<PageState>) {
    let config = Config {
        limit: Bytes(100 * BASE_PAGE_BYTES as u64),
        retain: vec![false],
        demotes: vec![false],
        room: Room::Ahead,
    };
    let (reclaim, prefetch) = (reclaim::by_name("lru"), prefetch::by_name("none"));
    let engine = Engine::recover(
        ledger(shows.len(), noted),
        reclaim.expect("a policy"),
        prefetch.expect("a policy"),
        config,
        &[(SPACE, PageSize::Base)],
    );
    let (mut engine, _) = engine.expect("a ledger");
    let mut asked = engine.in_flight();
    asked.sort_unstable();
    let all = (0..shows.len() as u64).map(|at| (SPACE, VirtPage(at)));
    assert!(asked.into_iter().eq(all), "all that are in flight");
    let mut recovered = Recovered::default();
    engine.reconcile_flight(&mut Shows(shows), &mut recovered);
    engine.books().audit();
    assert_eq!(engine.in_flight(), []);
    let state = |at| engine.books().entry(SPACE, VirtPage(at as u64)).state;
    (recovered, (0..shows.len()).map(state).collect())
}

#[test]
fn a_page_in_kernel_swap_returns_and_one_behind_a_guard_was_dropped() {
    let shows = [Here::Present, Here::Swapped, Here::Guarded, Here::Absent];
    let (recovered, states) = reconciled(&shows, 4);
    let (here, gone) = (PageState::Resident, PageState::Untouched);
    assert_eq!(states, [here, here, gone, gone]);
    assert_eq!((recovered.returned, recovered.vanished), (2, 1));
    assert!(recovered.in_hand.is_empty() && recovered.lost.is_empty());
}

/// The notes were full: such pages are found among all entries.
#[test]
fn a_page_without_a_note_is_found_and_lost_only_if_it_is_nowhere() {
    let shows = [Here::Present, Here::Swapped, Here::Guarded, Here::Absent];
    let (recovered, states) = reconciled(&shows, 1);
    let (here, gone) = (PageState::Resident, PageState::Untouched);
    assert_eq!(states, [here, here, gone, PageState::Lost]);
    assert_eq!((recovered.returned, recovered.vanished), (2, 0));
    assert_eq!(recovered.lost, [(SPACE, VirtPage(3))]);
}
