//! Pages of guest memory on their way out, over a real userfaultfd.

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageState, VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::object::MemoryObject;
use undercroft_sys::uffd::{Features, Message, MessageBuf, RegisterMode, UffdError};
use undercroft_sys::uffd_source::UffdSource;

use super::Evictor;
use crate::fault::model_tests::{options, shared};
use crate::space::guest::Guest;
use crate::space::model::ModelMemory;
use crate::space::port::{Answered, Asked, Space, Took, Wake, WayOut};
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
        })
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
