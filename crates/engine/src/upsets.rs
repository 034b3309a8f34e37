//! Upset loads: the page was dropped or moved before its bytes arrived.
//!
//! Another plan may load the same page again by then, and its item may look alike. So each upset
//! load is remembered until the plan that had the page finishes it. Fault threads read the count
//! of upsets without the engine's lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{PageNo, PageState};

use crate::ledger::Ledger;
use crate::{Engine, LoadItem, LoadPlan};

/// Counts upset loads of all spaces, and chunks that were given away: pages there may be loading.
/// Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct Upsets(Arc<AtomicU64>);

impl Upsets {
    /// A load is upset, or a chunk given away. Returns the count with it.
    fn add(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The count now, for an item that is decided now.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether every item of the plan may still be installed: no load was upset since the plan was
    /// decided. If not, [`Faults::validate`](crate::Faults::validate) says which may be. The caller
    /// has locked the layout of the plan's space, as for that. The thread that changed the count
    /// for a page of the space has released this lock since, so the change is seen.
    pub fn spare(&self, plan: &LoadPlan) -> bool {
        let count = self.count();
        plan.items.iter().all(|item| item.decided == count)
    }
}

/// Loads that were upset and are not finished, in the order of their counts.
#[derive(Debug, Default)]
pub(crate) struct Orphans(Vec<(PageNo, u64)>);

impl Orphans {
    /// Where the load of `item` is, if it was upset. Of several of the same page it is the first
    /// after the item was decided.
    ///
    /// Cost: O(log n) and the upsets since the item was decided.
    fn place(&self, item: &LoadItem) -> Option<usize> {
        let since = self.0.partition_point(|(_, count)| *count <= item.decided);
        let at = self.0[since..].iter().position(|(no, _)| *no == item.no)?;
        Some(since + at)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

impl<L: Ledger> Engine<L> {
    /// The page is dropped or moved while a plan loads it.
    pub(crate) fn upset(&mut self, no: PageNo) {
        self.uncount(no);
        self.orphans.0.push((no, self.upsets.add()));
    }

    /// A chunk of a space was given away, and some of its pages may be loading.
    pub(crate) fn upset_chunk(&self) {
        self.upsets.add();
    }

    /// Whether the item is still to be installed at its page.
    #[inline]
    pub(crate) fn is_expected(&self, item: &LoadItem) -> bool {
        // The address is compared too: the page's chunk may have been given away.
        self.orphans.place(item).is_none()
            && self.loads(item)
            && self.table.is_at(item.no, item.space, item.page)
    }

    /// Whether the entry is as the plan of the item has left it.
    fn loads(&self, item: &LoadItem) -> bool {
        let entry = self.table.entry(item.no);
        entry.state == PageState::Loading
            && (entry.tier, entry.slot, entry.stamp) == (item.tier, item.slot, item.stamp)
    }

    /// Ends an item that is not to be installed, and gives back the plan's reference to its slot.
    #[inline(never)]
    pub(crate) fn end_upset(&mut self, item: &LoadItem) {
        let at = self.orphans.place(item).unwrap_or_else(|| {
            // In a chunk that was given away and is not dropped yet: the page is dropped now.
            assert!(
                self.loads(item),
                "a page stopped loading, and no event said so"
            );
            self.drop_page(item.no);
            self.orphans.0.len() - 1
        });
        self.orphans.0.remove(at);
        self.release(item.tier, item.slot);
    }
}
