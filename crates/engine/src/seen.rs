//! Events of the pages that an estimator of the miss-ratio curve follows
//! (`policy/src/mrc`). They are kept until the caller takes them. The estimator works elsewhere, so
//! that a fault pays for the choice of pages alone.

use undercroft_base::PageNo;
use undercroft_policy::mrc::{Event, Sampling, What};

use crate::limits::SEEN_MAX;
use crate::{Engine, LoadPlan, Uses};

/// Events that the caller has not taken yet.
#[derive(Debug)]
pub(crate) struct Seen {
    sampling: Sampling,
    events: Vec<Event>,
}

impl<L> Uses<'_, L> {
    /// From now on, pages that `sampling` takes are followed. Before the first page, or to follow
    /// fewer.
    pub fn follow(&mut self, sampling: Sampling) {
        match &mut self.engine.seen {
            Some(seen) => seen.sampling = sampling,
            none => {
                *none = Some(Box::new(Seen {
                    sampling,
                    events: Vec::new(),
                }));
            }
        }
    }

    /// Moves what happened since the last call to `out`, which is empty, in its order. If more than
    /// [`SEEN_MAX`] things happened, the rest is missing. O(1).
    pub fn take_seen(&mut self, out: &mut Vec<Event>) {
        debug_assert!(out.is_empty(), "the caller has dealt with what it took");
        if let Some(seen) = &mut self.engine.seen {
            std::mem::swap(&mut seen.events, out);
        }
    }
}

impl<L> Engine<L> {
    /// Something happened to a page.
    #[inline]
    pub(crate) fn see(&mut self, page: PageNo, what: What) {
        if let Some(seen) = &mut self.seen
            && seen.sampling.takes(page)
            && seen.events.len() < SEEN_MAX
        {
            seen.events.push(Event { page, what });
        }
    }

    /// A fault brings these pages.
    #[inline]
    pub(crate) fn see_plan(&mut self, plan: &LoadPlan) {
        if self.seen.is_none() {
            return;
        }
        let pages = plan.items.len() as u8;
        for item in &plan.items {
            let demanded = item.demanded;
            let what = if item.fresh {
                What::New { pages }
            } else {
                What::Loaded { pages, demanded }
            };
            self.see(item.no, what);
        }
    }
}
