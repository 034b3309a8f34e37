//! Tells a listener each change of the books, as it happens. The engine is locked or owned by one
//! thread, so the events come in the order of the books. An eviction comes after the fault that
//! brought the page, and before the one that brings it back.

use std::sync::Arc;

use undercroft_base::{SpaceId, TierId, VirtPage, VirtRange};

use crate::{Engine, Fault};

/// A change of the books. Pages are named where they are now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookEvent {
    /// The fault brought its page in.
    Faulted(Fault),
    /// A thread faulted on a page of the batch, and waits. [`PageEvent::PutBack`] follows, or the
    /// thread faults again.
    Waits(Fault),
    /// A batch begins. Pages of the one before are on their way out only if they were set aside.
    BatchBegan,
    /// Something happened to one page.
    Page(SpaceId, VirtPage, PageEvent),
    /// A new copy of the page, which leaves memory, is in the tier of this rank.
    Stored(SpaceId, VirtPage, TierId),
    /// The copy of the page was moved, and is in the tier of this rank.
    Migrated(SpaceId, VirtPage, TierId),
    /// A thread waited for the page, which came from the tier of this rank. After
    /// [`BookEvent::Faulted`].
    Loaded(SpaceId, VirtPage, TierId),
    /// These pages may not leave from now on.
    Locked(SpaceId, VirtRange),
    /// The program dropped what it had in the range, or nothing is mapped there any more.
    Dropped(SpaceId, VirtRange),
    /// The pages of a range moved to the place that begins with the page. What was there is gone.
    Moved(SpaceId, VirtRange, VirtPage),
    /// The child begins with what its parent has.
    Forked {
        /// The parent.
        parent: SpaceId,
        /// The child.
        child: SpaceId,
    },
    /// The address space is gone, with all it had. It may be told twice, and [`BookEvent::Dropped`]
    /// may follow: neither means anything then.
    Ended(SpaceId),
}

/// Event of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageEvent {
    /// The page came with a fault on another page.
    CameAlong,
    /// The policy, or the caller, chose it to leave.
    Chosen,
    /// The page was chosen, and stays: it could not be taken, or it has moved meanwhile.
    Stayed,
    /// The page left without a write: its copy below is still good.
    LeftClean,
    /// The policy chose it, but its space is passed over. It stays, and the policy has forgotten
    /// it.
    Kept,
    /// The policy knows it again, as one that was chosen and stayed.
    TakenBack,
    /// The page had been taken out, and is put back.
    PutBack,
    /// The page is in memory, and was not in the books. Or it was inherited, and counts from now
    /// on: it was copied, or the relative that was charged for its frame releases it.
    Found,
    /// The page is in memory, in a frame that a relative is charged for.
    FoundShared,
    /// The page is in memory, and was used.
    Used,
}

/// Hears what happens. It is called with the engine locked, so it may not wait.
pub trait Journal: Send + Sync {
    /// Takes note of one event.
    fn note(&self, event: BookEvent);
}

impl<L> Engine<L> {
    /// Tells `journal` all that happens from now on, besides the others.
    pub fn add_journal(&mut self, journal: Arc<dyn Journal>) {
        self.journals.push(journal);
    }

    /// Tells `journal` nothing from now on.
    pub fn remove_journal(&mut self, journal: &Arc<dyn Journal>) {
        let is_this =
            |of: &Arc<dyn Journal>| std::ptr::addr_eq(Arc::as_ptr(of), Arc::as_ptr(journal));
        self.journals.retain(|of| !is_this(of));
    }

    /// Tells the listeners, if there are any. Cost: one branch without.
    #[inline(always)]
    pub(crate) fn tell(&self, event: BookEvent) {
        for journal in &self.journals {
            journal.note(event);
        }
    }

    /// Tells the listeners where a copy is or was, if its tier is in use.
    #[inline(never)]
    pub(crate) fn tell_placed(
        &self,
        space: SpaceId,
        page: VirtPage,
        tier: TierId,
        event: impl FnOnce(SpaceId, VirtPage, TierId) -> BookEvent,
    ) {
        if let Some(rank) = self.ranks.iter().position(|other| *other == tier) {
            self.tell(event(space, page, TierId(rank as u8)));
        }
    }

    #[inline(always)]
    pub(crate) fn tell_page(&self, space: SpaceId, page: VirtPage, what: PageEvent) {
        self.tell(BookEvent::Page(space, page, what));
    }
}
