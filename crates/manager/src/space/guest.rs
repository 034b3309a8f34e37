//! The port `Space` over the memory of a virtual machine: a memory object that its monitor maps.
//!
//! Its pages are those of the object, so the port's numbers have nothing to do with addresses. A
//! *view* is a place where the object is mapped, registered for missing pages and for writes to
//! protected ones. The registration hears of no layout event: nothing says that the monitor gives
//! pages back (a balloon). So a page that is resident by the books may be missing, and is zeros.
//!
//! The way out: the pages are protected, read, stored and published. Then they are punched, which
//! takes them out of every mapping.
//!
//! ```text
//!                begin         take    store   leaving  publish   left
//! in the object  there, protected ---------------------------->|  hole
//! by the books   Evicting ------------------------------>| Stored --------
//! a read         goes on                                       |  a fault
//! a write        waits: the page is recalled             | it loads, and installs after `left`
//! ```
//! Between publication and punch the page is in two places. It must not be installed meanwhile: an
//! installation would find it there, the thread would write to it, and the punch would take the
//! write away. So an installation waits for the punch of its own pages ([`Leaving`]). It waits for
//! no other page's: the evictor may lose its CPU in the middle.
//!
//! `left` wakes no thread. A thread that waits has sent a message, and the answer to that wakes it.
//!
//! Not protected are writes that were begun by address translation before: a device that was given
//! the memory (VFIO), or direct I/O into it. The command line refuses those.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use undercroft_base::{BASE_PAGE_BYTES, PageCount, VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_sys::object::MemoryObject;
use undercroft_sys::uffd::{MessageBuf, Messages, RegisterMode, Uffd, UffdError};

use super::port::{Answered, Asked, Begun, Late, Read, Space, Taken, Took, Wake, WayOut};
use crate::sync::lock;

/// A place where a memory object is mapped whole.
struct View {
    /// Of the address space. It hears of no layout event.
    uffd: Uffd,
    /// The address of the object's first page.
    base: VirtPage,
}

/// Pages that are published, and not punched yet.
#[derive(Default)]
struct Leaving {
    runs: Mutex<Vec<VirtRange>>,
    gone: Condvar,
}

impl Leaving {
    fn begin(&self, runs: impl Iterator<Item = VirtRange>) {
        lock(&self.runs).extend(runs);
    }

    fn end(&self) {
        let mut runs = lock(&self.runs);
        if !runs.is_empty() {
            runs.clear();
            self.gone.notify_all(); // a system call, also if none waits
        }
    }

    /// Waits until no page of `range` is leaving.
    fn wait(&self, range: VirtRange) {
        let leaves = |runs: &mut Vec<VirtRange>| {
            let mut runs = runs.iter();
            runs.any(|run| !run.intersect(range).is_empty())
        };
        let runs = self.gone.wait_while(lock(&self.runs), leaves);
        drop(runs.unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

/// The memory of a virtual machine.
pub(crate) struct Guest {
    object: Arc<MemoryObject>,
    view: View,
    /// Held while pages are protected that are on their way out from now on.
    begins: Mutex<()>,
    leaving: Leaving,
    /// A bit for each page: it was installed since that was asked last, or is about to be.
    arrivals: Box<[AtomicU64]>,
    /// Pages that were installed, less those that were punched, since it was asked last.
    balance: AtomicI64,
    /// Pages that were found to be given back.
    given_back: AtomicU64,
}

impl Guest {
    /// * `base`: where `object` is mapped whole, in the address space of `uffd`.
    pub(crate) fn new(object: Arc<MemoryObject>, uffd: Uffd, base: VirtPage) -> Guest {
        let words = object.whole().count().0.div_ceil(64);
        Guest {
            arrivals: (0..words).map(|_| AtomicU64::new(0)).collect(),
            object,
            view: View { uffd, base },
            begins: Mutex::default(),
            leaving: Leaving::default(),
            balance: AtomicI64::new(0),
            given_back: AtomicU64::new(0),
        }
    }

    /// By how many pages it has grown since this was asked last, if the monitor has given none
    /// back. Pages that come or leave meanwhile may be counted the next time.
    pub(crate) fn take_balance(&self) -> i64 {
        self.balance.swap(0, Ordering::Relaxed)
    }

    /// Pages that are about to be installed. Said before, so that no scan takes a page that is just
    /// there for one that was used.
    fn come(&self, range: VirtRange) {
        for page in range.start.0..range.end.0 {
            if let Some(word) = self.arrivals.get(page as usize / 64) {
                word.fetch_or(1 << (page % 64), Ordering::Relaxed);
            }
        }
    }

    /// The pages that came to a block since that was asked last: a bit each.
    pub(super) fn take_arrivals<const WORDS: usize>(&self, start: VirtPage) -> [u64; WORDS] {
        let words = self.arrivals.get(start.0 as usize / 64..).unwrap_or(&[]);
        std::array::from_fn(|at| {
            let word = words.get(at);
            word.map_or(0, |word| word.swap(0, Ordering::Relaxed))
        })
    }

    /// Counts pages of which `result` says how many were installed.
    fn came(&self, pages: u64, result: Result<(), UffdError>) -> Result<(), UffdError> {
        let done = match &result {
            Ok(()) => pages,
            Err(
                UffdError::Exists { done }
                | UffdError::LayoutChanging { done }
                | UffdError::NotMapped { done }
                | UffdError::NoMemory { done }
                | UffdError::Busy { done },
            ) => *done,
            Err(_) => 0,
        };
        self.balance.fetch_add(done as i64, Ordering::Relaxed);
        result
    }

    /// The monitor has given back pages of which the books knew.
    pub(crate) fn note_given_back(&self, pages: u64) {
        self.given_back.fetch_add(pages, Ordering::Relaxed);
    }

    /// Pages were given back, and are taken away. The caller holds the layout lock for writing, so
    /// none of them is installed, and [`Guest::stays`].
    /// * `present`: the number of them that the books had in memory.
    pub(crate) fn give_up(&self, range: VirtRange, present: u64) -> io::Result<()> {
        self.balance.fetch_sub(present as i64, Ordering::Relaxed);
        self.object.punch(range)
    }

    /// Pages of which this was noted.
    pub(crate) fn given_back(&self) -> PageCount {
        PageCount(self.given_back.load(Ordering::Relaxed))
    }

    /// Pages that are resident stay so while the caller has this: none begins to leave.
    pub(crate) fn stays(&self) -> MutexGuard<'_, ()> {
        lock(&self.begins)
    }

    /// Where it is mapped.
    pub(crate) fn base(&self) -> VirtPage {
        self.view.base
    }

    pub(crate) fn object(&self) -> &MemoryObject {
        &self.object
    }

    /// Where these pages are mapped. Pages behind the end are left out.
    pub(super) fn at(&self, range: VirtRange) -> VirtRange {
        let pages = range.intersect(self.object.whole());
        let base = self.view.base.0;
        VirtRange::new(pages.start.plus(base), pages.end.plus(base))
    }

    /// The pages of a group whose bits are set, in runs: each with its first place in the group.
    fn runs(group: &[EvictItem], pages: u64) -> impl Iterator<Item = (usize, VirtRange)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            at += pages.checked_shr(at as u32)?.trailing_zeros() as usize;
            let first = group.get(at)?.page;
            let from = at;
            while at < group.len()
                && pages >> at & 1 == 1
                && group[at].page == first.plus((at - from) as u64)
            {
                at += 1;
            }
            Some((from, VirtRange::new(first, first.plus((at - from) as u64))))
        })
    }
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.view.uffd.as_fd()
    }
}

impl Space for Guest {
    fn register(&self, range: VirtRange, mode: RegisterMode) -> Result<(), UffdError> {
        self.view.uffd.register(self.at(range), mode)
    }

    fn unregister(&self, range: VirtRange) -> Result<(), UffdError> {
        self.view.uffd.unregister(self.at(range))
    }

    fn events<'a>(&self, buffer: &'a mut MessageBuf) -> io::Result<Messages<'a>> {
        let messages = self.view.uffd.read_messages(buffer)?;
        Ok(messages.of_object(self.at(self.object.whole())))
    }

    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError> {
        let count = (bytes.len() / BASE_PAGE_BYTES) as u64;
        let pages = VirtRange::new(at, at.plus(count));
        self.leaving.wait(pages);
        self.come(pages);
        let to = self.at(VirtRange::one(at)).start;
        let copied = self.view.uffd.copy(to, bytes, wake == Wake::Later);
        self.came(count, copied)
    }

    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError> {
        self.leaving.wait(range);
        self.come(range);
        let to = self.at(range);
        let zeroed = self.view.uffd.zeropage(to, wake == Wake::Later);
        self.came(to.count().0, zeroed)
    }

    fn wake(&self, range: VirtRange) {
        // Refused if the view is gone, and then no thread waits there.
        let _ = self.view.uffd.wake(self.at(range));
    }

    fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError> {
        self.view.uffd.write_protect(self.at(range), on)
    }

    fn poison(&self, range: VirtRange) -> Result<(), UffdError> {
        self.view.uffd.poison(self.at(range))
    }

    fn is_gone(&self) -> bool {
        undercroft_sys::held::is_gone(self.as_fd())
    }

    fn lowest(&self) -> VirtPage {
        VirtPage(0)
    }

    fn is_event_pending(&self) -> bool {
        false
    }

    fn way_out(&self) -> Option<&dyn WayOut> {
        Some(self)
    }
}

impl WayOut for Guest {
    fn begin(&self, group: &[EvictItem]) -> Begun {
        let _begins = lock(&self.begins);
        let mut runs = Guest::runs(group, u64::MAX);
        // Pages that stay protected are resident: the next write to them ends that.
        if runs.all(|(_, run)| self.protect(run, true).is_ok()) {
            Begun::Yes(Asked::default())
        } else {
            Begun::No
        }
    }

    fn wait(&self, asked: Asked) -> Answered {
        Answered::Done(asked)
    }

    fn take(&self, _: Answered, group: &[EvictItem], buffer: &mut [u8]) -> Took {
        let mut moved = 0;
        for (from, run) in Guest::runs(group, u64::MAX) {
            let count = run.count().0 as usize;
            let bytes = &mut buffer[from * BASE_PAGE_BYTES..][..count * BASE_PAGE_BYTES];
            if self.object.read(run.start, bytes).is_ok() {
                moved |= u64::MAX >> (64 - count) << from;
            }
        }
        Took::Pages(Taken {
            moved,
            refused: 0,
            read: Read::Yes,
        })
    }

    fn resume(&self, late: Late, _: Duration, _: &[EvictItem], _: &mut [u8]) -> Took {
        unreachable!("{late:?} of a memory object")
    }

    fn stay(&self, page: VirtPage, _: &[u8]) -> Result<(), UffdError> {
        self.protect(VirtRange::one(page), false)
    }

    fn leaving(&self, group: &[EvictItem], pages: u64) {
        self.leaving
            .begin(Guest::runs(group, pages).map(|(_, run)| run));
    }

    fn left(&self, group: &[EvictItem], pages: u64) {
        for (_, run) in Guest::runs(group, pages) {
            // A page that is not punched is in memory, as its copy says, and protected: the next
            // write to it makes it resident.
            if self.object.punch(run).is_ok() {
                let pages = run.count().0 as i64;
                self.balance.fetch_sub(pages, Ordering::Relaxed);
            }
        }
        self.leaving.end();
    }

    fn end(&self, _: &[EvictItem]) {}
}
