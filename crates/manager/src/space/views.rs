//! Further places where the memory of a machine is mapped, each in a process of its own: a back end
//! of vhost-user. Any part of the memory may be mapped there.
//!
//! A page comes by the monitor's mapping, and is then in memory for all. What is of one mapping is
//! done in each: a page is protected in all before it leaves, and threads are woken in all. A
//! thread that faults in a view sends its message there, and is served as the monitor's are.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use undercroft_base::{PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_sys::uffd::{MessageBuf, Messages, Uffd, UffdError};

/// A mapping of a memory object, or of a part of it.
pub(crate) struct View {
    /// Different from those of all others.
    pub number: u64,
    /// The address space that has it.
    pub space: SpaceId,
    /// Of that. It hears of no layout event.
    pub(super) uffd: Uffd,
    /// The pages of the object that are mapped, and the address of the first.
    pub pages: VirtRange,
    base: VirtPage,
    size: PageSize,
}

impl View {
    /// * `pages`: of an object with pages of `size`, mapped at `base` in the space of `uffd`.
    pub(crate) fn new(
        space: SpaceId,
        uffd: Uffd,
        (base, pages): (VirtPage, VirtRange),
        size: PageSize,
    ) -> View {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        View {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            space,
            uffd,
            pages,
            base,
            size,
        }
    }

    /// Where it is mapped, in base pages.
    pub(crate) fn range(&self) -> VirtRange {
        self.at(self.pages).unwrap_or(VirtRange::one(self.base))
    }

    /// The byte of the object that is mapped at an address in it.
    pub(crate) fn offset(&self, at: VirtPage) -> u64 {
        let first = self.pages.start.0 * self.size.bytes() as u64;
        first + at.address() - self.base.address()
    }

    /// Where these pages are mapped, in base pages. `None`: none of them is.
    fn at(&self, range: VirtRange) -> Option<VirtRange> {
        let pages = range.intersect(self.pages);
        let each = self.size.base_pages();
        let at = |page: VirtPage| VirtPage(self.base.0 + (page.0 - self.pages.start.0) * each);
        (!pages.is_empty()).then(|| VirtRange::new(at(pages.start), at(pages.end)))
    }

    /// The page of the object at a base page of its process. `None`: it is elsewhere.
    fn page_at(&self, at: VirtPage) -> Option<VirtPage> {
        let each = self.size.base_pages();
        let is_here = self.range().contains(at);
        is_here.then(|| VirtPage(self.pages.start.0 + (at.0 - self.base.0) / each))
    }

    /// The faults of all views of its process, by address.
    pub(crate) fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        self.uffd.read_messages(buffer)
    }

    /// Protects pages, or removes the protection and wakes.
    pub(super) fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError> {
        let Some(at) = self.at(range) else {
            return Ok(());
        };
        match self.uffd.write_protect(at, on) {
            Err(UffdError::ClientGone) => Ok(()), // no thread writes there any more
            result => result,
        }
    }

    pub(super) fn wake(&self, range: VirtRange) {
        if let Some(at) = self.at(range) {
            let _ = self.uffd.wake(at); // refused if it is gone
        }
    }

    pub(super) fn poison(&self, range: VirtRange) -> Result<(), UffdError> {
        self.at(range).map_or(Ok(()), |at| self.uffd.poison(at))
    }

    /// The part of it that is at these base pages of its process.
    pub(crate) fn part(&self, range: VirtRange) -> io::Result<View> {
        let each = self.size.base_pages();
        let page = |at: VirtPage| VirtPage(self.pages.start.0 + (at.0 - self.base.0) / each);
        let pages = VirtRange::new(page(range.start), page(range.end));
        let uffd = self.uffd.as_fd().try_clone_to_owned()?.into();
        Ok(View::new(self.space, uffd, (range.start, pages), self.size))
    }

    /// Whether all of it is registered. Its pages are protected by that: a write to one that is in
    /// memory is a fault, which ends it.
    pub(crate) fn is_registered(&self) -> bool {
        self.protect(self.pages, true).is_ok()
    }
}

impl AsFd for View {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }
}

/// The views of one object, besides that of its monitor.
#[derive(Default)]
pub(super) struct Views {
    all: RwLock<Vec<Arc<View>>>,
    /// A page could not be protected in one.
    pub(super) doubted: AtomicBool,
}

impl Views {
    pub(super) fn all(&self) -> Vec<Arc<View>> {
        self.all
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
    }

    pub(super) fn each(&self, act: impl FnMut(&Arc<View>)) {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().for_each(act);
    }

    /// The page of the object at a base page of a process.
    pub(super) fn page_at(&self, space: SpaceId, at: VirtPage) -> Option<VirtPage> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let mut own = all.iter().filter(|view| view.space == space);
        own.find_map(|view| view.page_at(at))
    }

    /// Adds one, in place of what its space had at the same addresses.
    pub(super) fn add(&self, view: View) -> Arc<View> {
        let view = Arc::new(view);
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let range = view.range();
        all.retain(|old| old.space != view.space || old.range().intersect(range).is_empty());
        all.push(view.clone());
        view
    }

    /// Has others in place of one. False: there is no such one.
    pub(super) fn replace(&self, number: u64, by: Vec<View>) -> bool {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = all.iter().position(|view| view.number == number) else {
            return false;
        };
        all.swap_remove(at);
        all.extend(by.into_iter().map(Arc::new));
        true
    }

    /// Forgets those that are not wanted. True if there were any.
    pub(super) fn retain(&self, wanted: impl Fn(&View) -> bool) -> bool {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let before = all.len();
        all.retain(|view| wanted(view));
        all.len() != before
    }

    /// Protects pages in all of them, or removes the protection.
    ///
    /// Errors: those are protected in all but one, or in some.
    pub(super) fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError> {
        let mut result = Ok(());
        self.each(|view| {
            if let Err(error) = view.protect(range, on) {
                self.doubted.store(true, Ordering::Relaxed);
                result = Err(error);
            }
        });
        result
    }
}
