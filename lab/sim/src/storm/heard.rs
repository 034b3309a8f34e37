//! Knowledge of a listener of the engine: the pages in memory, from its events alone. It must
//! agree with the books whenever no layout event waits.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::{BookEvent, Journal, PageEvent};

type Pages = BTreeSet<(SpaceId, VirtPage)>;

/// Pages in memory, as told.
#[derive(Debug, Default)]
pub struct Heard(Mutex<Pages>);

impl Heard {
    pub(super) fn of(pages: Pages) -> Heard {
        Heard(Mutex::new(pages))
    }

    pub(super) fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the pages of a range out.
fn take(pages: &mut Pages, space: SpaceId, range: VirtRange) -> Vec<VirtPage> {
    let range = (space, range.start)..(space, range.end);
    pages.extract_if(range, |_| true).map(|(_, p)| p).collect()
}

impl Journal for Heard {
    fn note(&self, event: BookEvent) {
        let mut pages = self.pages();
        match event {
            BookEvent::Faulted(fault) => _ = pages.insert((fault.space, fault.page)),
            BookEvent::Page(space, page, PageEvent::Chosen) => {
                assert!(pages.remove(&(space, page)), "not in memory: {event:?}");
            }
            BookEvent::Page(
                space,
                page,
                PageEvent::Used | PageEvent::Kept | PageEvent::TakenBack,
            ) => {
                assert!(pages.contains(&(space, page)), "not in memory: {event:?}");
            }
            BookEvent::Page(_, _, PageEvent::LeftClean) => {}
            BookEvent::Page(
                space,
                page,
                PageEvent::CameAlong
                | PageEvent::Stayed
                | PageEvent::PutBack
                | PageEvent::Found
                | PageEvent::FoundShared,
            ) => _ = pages.insert((space, page)),
            BookEvent::Dropped(space, range) => _ = take(&mut pages, space, range),
            BookEvent::Moved(space, from, to) => {
                let new = VirtRange::new(to, to.plus(from.count().0));
                take(&mut pages, space, new);
                for page in take(&mut pages, space, from) {
                    pages.insert((space, to.plus(page.0 - from.start.0)));
                }
            }
            BookEvent::Forked { parent, child } => {
                let all = (parent, VirtPage(0))..=(parent, VirtPage(u64::MAX));
                let copied: Vec<_> = pages.range(all).map(|(_, page)| (child, *page)).collect();
                pages.extend(copied);
            }
            BookEvent::Ended(space) => {
                pages.retain(|(of, _)| *of != space);
            }
            BookEvent::Waits(_) | BookEvent::BatchBegan | BookEvent::Locked(..) => {}
            BookEvent::Stored(..) | BookEvent::Migrated(..) | BookEvent::Loaded(..) => {}
        }
    }
}
