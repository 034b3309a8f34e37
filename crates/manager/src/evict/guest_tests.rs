//! Pages of guest memory on their way out, over a real userfaultfd.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, PageCount, PageSize, PageState, VirtPage, VirtRange,
};
use undercroft_engine::EvictItem;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::object::MemoryObject;
use undercroft_sys::page_locks::{self, Client, PageLocks};
use undercroft_sys::uffd::{Features, Message, MessageBuf, RegisterMode, UffdError};
use undercroft_sys::uffd_source::UffdSource;

use super::Evictor;
use crate::fault::model_tests::{options, shared};
use crate::space::guest::Guest;
use crate::space::locks::Locks;
use crate::space::model::ModelMemory;
use crate::space::port::{Answered, Asked, Begun, Space, Took, Wake, WayOut};
use crate::space::process::Process;
use crate::space::shared::Shared;

const PAGES: u64 = 2048;
const PAGE_WORDS: usize = BASE_PAGE_BYTES / 8;

/// Every word of a page, in the beginning. Its halves are the same, so its entry has room for it.
fn word_of(page: VirtPage) -> u64 {
    (page.0 + 100) * 0x1_0000_0001
}

/// A guest whose threads are those of the test.
pub(crate) struct Machine {
    memory: SharedMemory,
    pub shared: Arc<Shared>,
    pub process: Arc<Process>,
    evictor: Evictor,
    pub items: Vec<EvictItem>,
    /// In which clients lock its pages, two each.
    lock_memory: OwnedFd,
    locks: Arc<Locks>,
}

impl Machine {
    /// `None`: this user may have no userfaultfd.
    pub(crate) fn new() -> Option<Machine> {
        let uffd = UffdSource::open().and_then(|source| source.create());
        let Ok(uffd) = uffd else {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: guest_tests: no userfaultfd here"
            );
            return None;
        };
        let memory = SharedMemory::create("guest", PAGES as usize * BASE_PAGE_BYTES);
        let memory = memory.expect("a memfd");
        for (at, word) in memory.words().iter().enumerate() {
            word.store(
                word_of(VirtPage((at / PAGE_WORDS) as u64)),
                Ordering::Relaxed,
            );
        }
        let base = VirtPage::of(memory.words().as_ptr() as u64);
        uffd.api(Features::THREAD_ID).expect("the first call");
        let view = VirtRange::new(base, base.plus(PAGES));
        uffd.register(view, RegisterMode::MISSING_WP)
            .expect("a shared mapping");
        let object = MemoryObject::of(memory.as_fd()).expect("it opens anew");
        let guest = Guest::new(Arc::new(object), uffd, base).expect("base pages");
        let (pages, each_max) = (PageCount(PAGES), PageCount(2));
        let lock_memory = page_locks::create(pages, PageSize::Base, each_max).expect("a memfd");
        let locks = PageLocks::of(lock_memory.as_fd(), pages).expect("it is one");
        let locks = Arc::new(Locks::new(locks, each_max));
        let guest = guest.with_locks(Some(locks.clone()));
        let mut options = options("ram");
        options.memory_max = Bytes(2 * PAGES * BASE_PAGE_BYTES as u64);
        let mut evictor = Evictor::new(shared(options)).expect("an evictor");
        let _ = evictor.next_step(); // the engine learns of the tiers
        let shared = evictor.shared.clone();
        let mut items = Vec::new();
        let space = {
            let mut engine = shared.books.engine();
            let space = engine.layout().add_space();
            let whole = guest.object().whole();
            engine.layout().attached(space, whole);
            engine.discovery().found_resident(space, whole);
            assert!(engine.evictions().select(8, &mut items));
            space
        };
        let nothing = VirtRange::new(VirtPage(0), VirtPage(1));
        let (host, row) = (Arc::new(ModelMemory::new(nothing)), shared.books.row(space));
        let host = Process::new(space, host, VirtPage(1 << 20), None, None, row.clone());
        let process = Arc::new(Process::of_guest(space, guest, Arc::new(host), row));
        shared.add_process(&process);
        Some(Machine {
            memory,
            shared,
            process,
            evictor,
            items,
            lock_memory,
            locks,
        })
    }

    /// A program that can lock pages.
    fn client(&self, place: usize) -> Client {
        Client::take(self.lock_memory.as_fd(), place).expect("a free place")
    }

    /// The pages of the group that would stay now, one bit each.
    fn locked(&self) -> u64 {
        match self.guest().begin(&self.items) {
            Begun::Yes(asked) => asked.locked,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn guest(&self) -> &Guest {
        &self.process.hosted.as_ref().expect("it is a guest").guest
    }

    /// The state of the first page of the group, and whether it is in memory.
    fn first(&self) -> (PageState, bool) {
        let page = self.items[0].page;
        let state = {
            let engine = self.shared.books.engine();
            engine.books().entry(self.process.space, page).state
        };
        let data = self.guest().object().data(page).expect("it seeks");
        (state, data.is_some_and(|run| run.contains(page)))
    }

    /// Evicts the group.
    pub(crate) fn evict(&mut self) {
        self.evictor.overlaps = false;
        let items = self.items.clone();
        self.evictor.evict_groups(&items, None);
    }

    /// Protects and reads the group.
    pub(crate) fn take(&mut self) -> Took {
        let guest = &self.process.hosted.as_ref().expect("it is a guest").guest;
        guest.begin(&self.items);
        let asked = Answered::Done(Asked::default());
        guest.take(asked, &self.items, &mut self.evictor.buffer)
    }

    /// Stores, publishes and punches the group.
    pub(crate) fn go_on(&mut self, took: Took) {
        let process = self.process.clone();
        let guest = &process.hosted.as_ref().expect("it is a guest").guest;
        let waits = (self.evictor).go_on(&process, &**guest, &self.items, took);
        assert!(waits.is_none());
    }

    /// A word of the guest's memory.
    pub(crate) fn word(&self, page: VirtPage) -> &AtomicU64 {
        &self.memory.words()[page.0 as usize * PAGE_WORDS]
    }

    /// The next fault, which must come.
    fn fault(&self) -> (VirtPage, bool) {
        let mut buffer = MessageBuf::default();
        for _ in 0..1000 {
            let mut messages = self.guest().events(&mut buffer).expect("it is read");
            if let Some(Message::Fault { page, wp, .. }) = messages.next() {
                return (page, wp);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("no fault");
    }
}

#[test]
fn a_group_of_a_guest_leaves_and_a_write_to_it_comes_after_the_copy() {
    let Some(mut machine) = Machine::new() else {
        return;
    };
    let items = machine.items.clone();
    machine.evict();
    assert_eq!(machine.first(), (PageState::Stored, false));
    let page = items[0].page;
    let word = page.0 as usize * PAGE_WORDS;
    std::thread::scope(|scope| {
        let words = machine.memory.words();
        let writer = scope.spawn(move || words[word].fetch_add(1, Ordering::Relaxed));
        assert_eq!(machine.fault(), (page, false), "a page of the object");
        let bytes = word_of(page).to_ne_bytes().repeat(PAGE_WORDS);
        let guest = machine.guest();
        guest
            .install(page, &bytes, Wake::Now)
            .expect("nothing is there");
        assert_eq!(writer.join().expect("it goes on"), word_of(page));
        let again = guest.install(page, &bytes, Wake::Now);
        assert_eq!(again, Err(UffdError::Exists { done: 0 }));
        assert_eq!(words[word].load(Ordering::Relaxed), word_of(page) + 1);
    });
}

/// The control of the next test: the same steps, without the layout lock.
#[test]
fn a_write_between_publication_and_punch_would_be_lost() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let (items, guest) = (&machine.items[..1], machine.guest());
    let word = items[0].page.0 as usize * PAGE_WORDS;
    let mut buffer = [0; BASE_PAGE_BYTES];
    guest.begin(items);
    let took = guest.take(Answered::Done(Asked::default()), items, &mut buffer);
    assert!(matches!(took, Took::Pages(taken) if taken.moved == 1));
    // A fault thread finds the page stored, loads it, and has it installed already.
    let there = guest.install(items[0].page, &buffer, Wake::Later);
    assert_eq!(there, Err(UffdError::Exists { done: 0 }));
    guest
        .stay(items[0].page, &buffer)
        .expect("the next fault finds it resident");
    machine.memory.words()[word].store(7, Ordering::Relaxed);
    guest.left(items, 1);
    guest
        .object()
        .read(items[0].page, &mut buffer)
        .expect("read");
    assert_eq!(buffer, [0; BASE_PAGE_BYTES], "the 7 is nowhere");
}

/// An installation of a page that is published waits for its punch. One of another page does not.
#[test]
fn a_page_of_a_guest_is_installed_after_it_is_punched() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let (items, guest) = (&machine.items[..2], machine.guest());
    let other = VirtPage(PAGES - 1);
    guest.object().punch(VirtRange::one(other)).expect("a hole");
    let mut buffer = [0; 2 * BASE_PAGE_BYTES];
    guest.begin(items);
    guest.take(Answered::Done(Asked::default()), items, &mut buffer);
    let copy = |at: usize| &buffer[at * BASE_PAGE_BYTES..][..BASE_PAGE_BYTES];
    guest.leaving(items, 0b10);
    std::thread::scope(|scope| {
        let installs = scope.spawn(|| guest.install(items[1].page, copy(1), Wake::Later));
        let zeros = scope.spawn(|| guest.zero(VirtRange::one(items[1].page), Wake::Later));
        guest
            .install(other, copy(0), Wake::Later)
            .expect("it waits for no other page");
        std::thread::sleep(Duration::from_millis(50));
        let early = installs.is_finished() || zeros.is_finished();
        guest.left(items, 0b10); // a thread that waits ends
        assert!(!early);
        let came = [installs, zeros].map(|thread| thread.join().expect("it ends").is_ok());
        assert_ne!(came[0], came[1], "one of them finds the hole");
    });
}

/// A page that is resident and gets zeros does not begin to leave meanwhile.
#[test]
fn no_page_of_a_guest_begins_to_leave_while_resident_pages_stay() {
    let Some(mut machine) = Machine::new() else {
        return;
    };
    let process = machine.process.clone();
    let hosted = process.hosted.as_ref().expect("it is a guest");
    std::thread::scope(|scope| {
        let stays = hosted.guest.stays();
        let evicts = scope.spawn(|| machine.evict());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!evicts.is_finished());
        drop(stays);
    });
    assert_eq!(machine.first(), (PageState::Stored, false));
}

/// Pages that a program has locked stay, and are not protected. They leave when it has ended.
#[test]
fn locked_pages_of_a_guest_stay_as_long_as_their_client_lives() {
    let Some(mut machine) = Machine::new() else {
        return;
    };
    let client = machine.client(3);
    let pages: Vec<_> = machine.items.iter().map(|item| item.page).collect();
    [0, 2].iter().for_each(|at| client.set(pages[*at], true));
    assert_eq!(machine.locked(), 0b101);
    machine.evict();
    let states: Vec<_> = {
        let engine = machine.shared.books.engine();
        let state = |page: &VirtPage| engine.books().entry(machine.process.space, *page).state;
        pages.iter().map(state).collect()
    };
    let is_here = |at: &usize| states[*at] == PageState::Resident;
    assert_eq!((0..8).filter(is_here).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(machine.first(), (PageState::Resident, true));
    std::thread::scope(|scope| {
        let word = machine.word(pages[0]);
        let writes = scope.spawn(|| word.fetch_add(1, Ordering::Relaxed));
        let begun = Instant::now();
        while !writes.is_finished() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let waits = !writes.is_finished();
        let on = machine.guest().protect(VirtRange::one(pages[0]), false);
        assert!(!waits && on.is_ok(), "no thread serves faults");
    });
    assert_eq!(machine.locks.now(), (PageCount(2), 0));
    client.set(pages[2], false);
    assert_eq!(machine.locked() & 0b101, 0b001);
    drop(client);
    assert_eq!(machine.locked() & 0b101, 0);
    assert_eq!(machine.locks.now(), (PageCount(0), 0));
}

/// Every page is locked. Of each client twice as many stay as it may lock, whichever they are.
#[test]
fn a_client_keeps_no_more_pages_of_a_guest_than_it_may() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let (client, other) = (machine.client(0), machine.client(1));
    let pages: Vec<_> = machine.items.iter().map(|item| item.page).collect();
    pages.iter().for_each(|page| client.set(*page, true));
    assert_eq!(machine.locked(), 0b1111);
    assert_eq!(machine.locks.now(), (PageCount(4), 4));
    client.set(pages[1], false);
    assert_eq!(machine.locked(), 0b1_1101, "there is room for another");
    assert_eq!(machine.locks.now(), (PageCount(4), 7));
    pages[4..].iter().for_each(|page| other.set(*page, true));
    assert_eq!(machine.locked(), 0b1111_1101);
}

/// The order of a client that locks a page while it leaves: it waits if it writes to it. The
/// control is a client that only reads it. What its device writes is nowhere.
#[test]
fn a_client_that_locks_a_page_on_its_way_out_waits_if_it_writes_to_it() {
    let Some(machine) = Machine::new() else {
        return;
    };
    let (items, guest) = (&machine.items[..1], machine.guest());
    let (page, client) = (items[0].page, machine.client(0));
    let locked = || match guest.begin(items) {
        Begun::Yes(asked) => asked.locked,
        other => panic!("{other:?}"),
    };
    let (word, mut buffer) = (machine.word(page), [0; BASE_PAGE_BYTES]);
    assert_eq!(locked(), 0);
    client.set(page, true);
    std::thread::scope(|scope| {
        let writes = scope.spawn(|| word.fetch_add(0x10, Ordering::Relaxed));
        let fault = machine.fault();
        let waited = !writes.is_finished();
        guest.stay(page, &buffer).expect("it is recalled");
        writes.join().expect("it goes on");
        assert!(waited);
        assert_eq!(fault, (page, false), "a page of the object");
    });
    assert_eq!(locked(), 1, "the next time it stays");
    client.set(page, false);
    assert_eq!(locked(), 0);
    client.set(page, true);
    assert_eq!(word.load(Ordering::Relaxed), word_of(page) + 0x10);
    guest.take(Answered::Done(Asked::default()), items, &mut buffer);
    let object = guest.object();
    let done = rustix::io::pwrite(object.as_fd(), &7u64.to_ne_bytes(), page.address());
    assert_eq!(done, Ok(8));
    guest.leaving(items, 1);
    guest.left(items, 1);
    object.read(page, &mut buffer).expect("read");
    assert_eq!(buffer, [0; BASE_PAGE_BYTES], "the 7 is nowhere");
}
