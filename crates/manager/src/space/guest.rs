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
//! Large pages are kept track of: one that comes back for a read is protected, and the first write
//! to it is a fault. If it leaves before, its copy is right, and it is neither read nor stored.
//!
//! Other processes may map it, too (`views.rs`): those pages are protected in all mappings.
//!
//! Not protected are writes that were begun by address translation before: a device that was given
//! the memory (VFIO), or direct I/O into it. The command line refuses those, and a program of one's
//! own locks the pages meanwhile (`locks.rs`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use undercroft_base::{PageCount, PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_sys::mapping::{PageBuf, ZeroPages};
use undercroft_sys::object::MemoryObject;
use undercroft_sys::uffd::{MessageBuf, Messages, RegisterMode, Uffd, UffdError};

use super::locks::Locks;
use super::port::{Answered, Asked, Begun, Late, Read, Space, Taken, Took, Wake, WayOut};
use super::views::{View, Views};
use crate::sync::lock;

/// The monitor's mapping of a memory object, which is whole.
struct Whole {
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
    view: Whole,
    /// Mappings of other processes.
    views: Views,
    /// The pages that are on their way out. Held while pages are protected that are from now on.
    begins: Mutex<Vec<VirtRange>>,
    leaving: Leaving,
    /// A bit for each page: it was installed since that was asked last, or is about to be.
    arrivals: Box<[AtomicU64]>,
    /// Pages that were installed, less those that were punched, since it was asked last.
    balance: AtomicI64,
    /// Base pages that were found to be given back.
    given_back: AtomicU64,
    /// Of large pages alone.
    large: Option<Large>,
    /// Pages that programs keep in memory.
    locks: Option<Arc<Locks>>,
}

/// Of memory in large pages.
struct Large {
    /// A page of zeros: the kernel has none of this size to map.
    zeros: ZeroPages,
    /// A bit for each page: it is protected, and as the copy that it came from. Changed while the
    /// page is not on its way out, so under `begins` or before it is resident.
    unwritten: Vec<AtomicU64>,
}

impl Large {
    fn new(pages: VirtRange) -> io::Result<Large> {
        let words = pages.count().0.div_ceil(64);
        Ok(Large {
            zeros: PageBuf::zeros(PageSize::Large.base_pages() as usize)?,
            unwritten: (0..words).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    fn set(&self, page: VirtPage, unwritten: bool) {
        let (word, bit) = (&self.unwritten[page.0 as usize / 64], 1 << (page.0 % 64));
        if unwritten {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    fn is_unwritten(&self, page: VirtPage) -> bool {
        self.unwritten[page.0 as usize / 64].load(Ordering::Relaxed) >> (page.0 % 64) & 1 == 1
    }
}

impl Guest {
    /// * `base`: where `object` is mapped whole, in the address space of `uffd`.
    pub(crate) fn new(object: Arc<MemoryObject>, uffd: Uffd, base: VirtPage) -> io::Result<Guest> {
        let large = match object.page_size() {
            PageSize::Base => None,
            PageSize::Large => Some(Large::new(object.whole())?),
        };
        let words = object.whole().count().0.div_ceil(64);
        Ok(Guest {
            arrivals: (0..words).map(|_| AtomicU64::new(0)).collect(),
            object,
            view: Whole { uffd, base },
            views: Views::default(),
            begins: Mutex::default(),
            leaving: Leaving::default(),
            balance: AtomicI64::new(0),
            given_back: AtomicU64::new(0),
            large,
            locks: None,
        })
    }

    /// The same, with pages that stay as long as programs lock them.
    pub(crate) fn with_locks(self, locks: Option<Arc<Locks>>) -> Guest {
        Guest { locks, ..self }
    }

    pub(crate) fn page_size(&self) -> PageSize {
        self.object.page_size()
    }

    /// Pages of which the call does not know whether they are written from now on.
    fn may_be_written(&self, range: VirtRange) {
        if let Some(large) = &self.large {
            let pages = range.intersect(self.object.whole());
            pages.pages().for_each(|page| large.set(page, false));
        }
    }

    /// The result of a copy to `pages`, in pages of the object. If no huge page is free, the kernel
    /// says that a page is there: so it is asked whether one is. A page that would count as
    /// installed, and is nowhere, would be lost.
    fn in_pages(&self, pages: VirtRange, result: Result<(), UffdError>) -> Result<(), UffdError> {
        let each = self.page_size().base_pages();
        if let (Some(_), Err(UffdError::Exists { done })) = (&self.large, &result) {
            let first = VirtRange::one(pages.start.plus(done / each));
            if !matches!(self.view.uffd.is_in_file(self.at(first)), Ok(true)) {
                return Err(UffdError::NoMemory { done: done / each });
            }
        }
        result.map_err(|error| match error {
            UffdError::Exists { done } => UffdError::Exists { done: done / each },
            UffdError::LayoutChanging { done } => UffdError::LayoutChanging { done: done / each },
            UffdError::NotMapped { done } => UffdError::NotMapped { done: done / each },
            UffdError::NoMemory { done } => UffdError::NoMemory { done: done / each },
            UffdError::Busy { done } => UffdError::Busy { done: done / each },
            other => other,
        })
    }

    /// The first page at `from` or behind it that is in the memory, or that is not. `None`: there
    /// is none. The end is a page that is not.
    fn first(&self, from: VirtPage, there: bool) -> io::Result<Option<VirtPage>> {
        if self.large.is_none() {
            return if there {
                self.object.first_data(from)
            } else {
                self.object.first_hole(from)
            };
        }
        let end = self.object.whole().end;
        for page in VirtRange::new(from, end).pages() {
            if self.view.uffd.is_in_file(self.at(VirtRange::one(page)))? == there {
                return Ok(Some(page));
            }
        }
        Ok((!there && from < end).then_some(end))
    }

    /// The first page that is there, at `from` or behind it. `None`: there is none.
    pub(crate) fn first_data(&self, from: VirtPage) -> io::Result<Option<VirtPage>> {
        self.first(from, true)
    }

    /// The first page that is not there, at `from` or behind it; the end counts. `None`: `from` is
    /// not before the end.
    pub(crate) fn first_hole(&self, from: VirtPage) -> io::Result<Option<VirtPage>> {
        self.first(from, false)
    }

    /// The first pages that are there at `from` or behind it. `None`: there are none.
    pub(crate) fn data(&self, from: VirtPage) -> io::Result<Option<VirtRange>> {
        let Some(start) = self.first_data(from)? else {
            return Ok(None);
        };
        let end = self.first_hole(start)?.unwrap_or(start);
        Ok(Some(VirtRange::new(start, end)))
    }

    /// By how many pages it has grown since this was asked last, if the monitor has given none
    /// back. Pages that come or leave meanwhile may be counted the next time.
    pub(crate) fn take_balance(&self) -> i64 {
        self.balance.swap(0, Ordering::Relaxed)
    }

    /// Pages that are about to be installed. Said before, so that no scan takes a page that is just
    /// there for one that was used.
    fn come(&self, range: VirtRange) {
        let mut next = range.start.0;
        while next < range.end.0 {
            let end = range.end.0.min((next / 64 + 1) * 64);
            let bits = u64::MAX >> (64 - (end - next)) << (next % 64);
            if let Some(word) = self.arrivals.get(next as usize / 64) {
                word.fetch_or(bits, Ordering::Relaxed);
            }
            next = end;
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

    /// Counts those of `pages` of which `result` says that they were installed.
    fn came(&self, pages: VirtRange, result: Result<(), UffdError>) -> Result<(), UffdError> {
        let result = self.in_pages(pages, result);
        let done = match &result {
            Ok(()) => pages.count().0,
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
        let pages = pages * self.page_size().base_pages();
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
    pub(crate) fn stays(&self) -> MutexGuard<'_, Vec<VirtRange>> {
        lock(&self.begins)
    }

    /// Mappings of processes other than the monitor.
    pub(crate) fn views(&self) -> Vec<Arc<View>> {
        self.views.all()
    }

    /// The page that is at an address of a process which has a view. `None`: none.
    pub(crate) fn page_at(&self, space: SpaceId, at: VirtPage) -> Option<VirtPage> {
        self.views.page_at(space, at)
    }

    /// Registers another mapping. No page of it that is away, or leaves, can be used there unheard
    /// from now on. The caller holds the layout lock for writing, so none is installed meanwhile.
    pub(crate) fn add_view(&self, view: View) -> Result<(), UffdError> {
        let out = lock(&self.begins);
        self.may_be_written(self.object.whole());
        // Listed first: a fault that no view knows would be lost.
        let view = self.views.add(view);
        let registered = view.uffd.register(view.range(), RegisterMode::MISSING_WP);
        let result =
            registered.and_then(|()| out.iter().try_for_each(|run| view.protect(*run, true)));
        if result.is_err() {
            self.views.retain(|of| of.number != view.number);
        }
        result
    }

    /// Has parts of a mapping in its place: the others are not mapped any more.
    pub(crate) fn replace_view(&self, number: u64, parts: Vec<View>) -> bool {
        self.views.replace(number, parts)
    }

    /// Forgets mappings. True if there were such.
    pub(crate) fn forget_views(&self, gone: impl Fn(&View) -> bool) -> bool {
        self.views.retain(|view| !gone(view))
    }

    /// Whether one of them was not as it was registered since that was cleared.
    pub(crate) fn doubts_views(&self) -> bool {
        self.views.doubted.load(Ordering::Relaxed)
    }

    /// Clears that. Returns what it was.
    pub(crate) fn take_doubt(&self) -> bool {
        self.views.doubted.swap(false, Ordering::Relaxed)
    }

    /// Where it is mapped.
    pub(crate) fn base(&self) -> VirtPage {
        self.view.base
    }

    pub(crate) fn object(&self) -> &MemoryObject {
        &self.object
    }

    /// Where these pages are mapped, in base pages. Pages behind the end are left out.
    pub(super) fn at(&self, range: VirtRange) -> VirtRange {
        let pages = range.intersect(self.object.whole());
        let (base, each) = (self.view.base.0, self.page_size().base_pages());
        let at = |page: VirtPage| VirtPage(base + page.0 * each);
        VirtRange::new(at(pages.start), at(pages.end))
    }

    /// Pages were installed: wakes the threads that wait for them in other processes.
    fn wake_views(&self, range: VirtRange, wake: Wake) {
        if wake == Wake::Now {
            self.views.each(|view| view.wake(range));
        }
    }

    /// Waits until nothing of these pages is leaving, and says that they come. Returns which.
    fn place(&self, at: VirtPage, bytes: &[u8]) -> VirtRange {
        let count = (bytes.len() / self.page_size().bytes()) as u64;
        let pages = VirtRange::new(at, at.plus(count));
        self.leaving.wait(pages);
        self.come(pages);
        pages
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
        Ok(messages.of_object(self.at(self.object.whole()), self.page_size()))
    }

    fn install(&self, at: VirtPage, bytes: &[u8], wake: Wake) -> Result<(), UffdError> {
        let pages = self.place(at, bytes);
        let to = self.at(pages).start;
        self.may_be_written(pages);
        let copied = self.view.uffd.copy(to, bytes, wake == Wake::Later);
        self.wake_views(pages, wake);
        self.came(pages, copied)
    }

    fn install_unwritten(&self, at: VirtPage, bytes: &[u8]) -> Result<(), UffdError> {
        // In a view it would have to be protected before it is there.
        let Some(large) = self.large.as_ref().filter(|_| self.views.is_empty()) else {
            return self.install(at, bytes, Wake::Later);
        };
        let pages = self.place(at, bytes);
        let to = self.at(pages).start;
        self.came(pages, self.view.uffd.copy_protected(to, bytes))?;
        pages.pages().for_each(|page| large.set(page, true));
        Ok(())
    }

    fn zero(&self, range: VirtRange, wake: Wake) -> Result<(), UffdError> {
        self.leaving.wait(range);
        let Some(large) = &self.large else {
            self.come(range);
            let to = self.at(range);
            let zeroed = self.view.uffd.zeropage(to, wake == Wake::Later);
            self.wake_views(range, wake);
            return self.came(range, zeroed);
        };
        for (done, page) in range.pages().enumerate() {
            let copied = self.install(page, &large.zeros, wake);
            if copied.is_err() && done > 0 {
                return Err(UffdError::Busy { done: done as u64 }); // the rest by itself
            }
            copied?;
        }
        Ok(())
    }

    fn wake(&self, range: VirtRange) {
        // Refused if the view is gone, and then no thread waits there.
        let _ = self.view.uffd.wake(self.at(range));
        self.wake_views(range, Wake::Now);
    }

    fn protect(&self, range: VirtRange, on: bool) -> Result<(), UffdError> {
        if !on {
            self.may_be_written(range); // before the write
        }
        let there = self.view.uffd.write_protect(self.at(range), on);
        let elsewhere = self.views.protect(range, on);
        there.and(elsewhere.or_else(|error| if on { Err(error) } else { Ok(()) }))
    }

    fn poison(&self, range: VirtRange) -> Result<(), UffdError> {
        let poisoned = self.view.uffd.poison(self.at(range));
        self.views.each(|view| _ = view.poison(range)); // refused: its mapping is gone, or poisoned
        poisoned
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
        let mut out = lock(&self.begins);
        let mut runs = Guest::runs(group, u64::MAX);
        // Pages that stay protected are resident: the next write to them ends that.
        if !runs.all(|(_, run)| self.protect(run, true).is_ok()) {
            return Begun::No;
        }
        // After that, see `locks.rs`. A page whose protection stays is resident, as above.
        let locked = (self.locks.as_ref()).map_or(0, |locks| locks.among(group));
        for (_, run) in Guest::runs(group, locked) {
            let _ = self.protect(run, false);
        }
        let is_kept = |item: &EvictItem| {
            let large = self.large.as_ref();
            item.retained.is_some() && large.is_some_and(|large| large.is_unwritten(item.page))
        };
        let kept = group.iter().enumerate();
        let kept = kept.filter_map(|(at, item)| is_kept(item).then_some(1 << at));
        out.extend(Guest::runs(group, u64::MAX).map(|(_, run)| run));
        Begun::Yes(Asked {
            kept: kept.sum(),
            locked,
            ..Asked::default()
        })
    }

    fn wait(&self, asked: Asked) -> Answered {
        Answered::Done(asked)
    }

    fn take(&self, answered: Answered, group: &[EvictItem], buffer: &mut [u8]) -> Took {
        let Answered::Done(Asked { kept, locked, .. }) = answered else {
            unreachable!("{answered:?} of a memory object");
        };
        let kept = kept & !locked;
        // What the monitor has given back since is read: as zeros.
        let is_there = |at: &usize| {
            let page = VirtRange::one(group[*at].page);
            matches!(self.view.uffd.is_in_file(self.at(page)), Ok(true))
        };
        let all = (0..group.len()).filter(|at| kept >> at & 1 == 1);
        let kept: u64 = all.filter(is_there).map(|at| 1 << at).sum();
        let (mut moved, each) = (kept, self.page_size().bytes());
        for (from, run) in Guest::runs(group, !(kept | locked)) {
            let count = run.count().0 as usize;
            let bytes = &mut buffer[from * each..][..count * each];
            if self.object.read(run.start, bytes).is_ok() {
                moved |= u64::MAX >> (64 - count) << from;
            }
        }
        Took::Pages(Taken {
            moved,
            refused: locked,
            kept,
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

    fn end(&self, group: &[EvictItem]) {
        let mut out = lock(&self.begins);
        for (_, run) in Guest::runs(group, u64::MAX) {
            if let Some(at) = out.iter().position(|of| *of == run) {
                out.swap_remove(at);
            }
        }
    }
}
