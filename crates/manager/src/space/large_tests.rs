//! Guest memory in pages of 2 MiB, of this process: what is known of a page that leaves.

use std::fs;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use undercroft_base::{Bytes, PageCount, PageSize, Slot, Stamp, TierId, VirtPage, VirtRange};
use undercroft_engine::EvictItem;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::object::{self, MemoryObject};
use undercroft_sys::page_locks::{self, Client, PageLocks};
use undercroft_sys::uffd::{Features, MessageBuf, Messages, RegisterMode, UffdError};
use undercroft_sys::uffd_source::UffdSource;

use super::guest::Guest;
use super::locks::Locks;
use super::port::{Answered, Begun, Space, Took, Wake, WayOut};
use crate::fault::model_tests::{options, shared};

const PAGES: u64 = 4;
const BYTES: usize = PageSize::Large.bytes();
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// Tests that change the pool take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Huge pages of this test. Dropping it restores the old number.
struct Pool(
    u64,
    #[allow(dead_code, reason = "it is held")] MutexGuard<'static, ()>,
);

impl Pool {
    fn more() -> Option<Pool> {
        let number = || fs::read_to_string(POOL).ok()?.trim().parse::<u64>().ok();
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = Pool(number()?, turn);
        let wanted = pool.0 + PAGES;
        fs::write(POOL, wanted.to_string()).ok()?;
        (number()? >= wanted).then_some(pool)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.0.to_string());
    }
}

struct Large {
    guest: Guest,
    memory: SharedMemory,
    /// A page that leaves, with a copy that a tier keeps.
    item: EvictItem,
    /// In which a client locks its pages.
    lock_memory: OwnedFd,
    // Last: the pages are free before.
    _pool: Pool,
}

impl Large {
    /// `None`: there are no huge pages, or no userfaultfd.
    fn new() -> Option<Large> {
        let uffd = UffdSource::open().and_then(|source| source.create());
        let (Some(pool), Ok(uffd)) = (Pool::more(), uffd) else {
            let text = "SKIPPED: large_tests: no pool of huge pages can be made here";
            let _ = writeln!(std::io::stderr(), "{text}");
            return None;
        };
        let bytes = Bytes(PAGES * BYTES as u64);
        let memfd = object::create("guest", bytes, PageSize::Large).expect("a memfd");
        let object = MemoryObject::of(memfd.as_fd()).expect("it opens anew");
        assert_eq!((object.bytes(), object.whole().count().0), (bytes, PAGES));
        let memory = SharedMemory::from_fd(memfd).expect("it is mapped");
        let base = VirtPage::of(memory.words().as_ptr() as u64);
        uffd.api(Features::THREAD_ID).expect("the first call");
        let view = VirtRange::new(base, base.plus(bytes.pages_floor().0));
        uffd.register(view, RegisterMode::MISSING_WP)
            .expect("a shared mapping");
        let guest = Guest::new(Arc::new(object), uffd, base).expect("large pages");
        let (pages, one) = (PageCount(PAGES), PageCount(1));
        let lock_memory = page_locks::create(pages, PageSize::Large, one).expect("a memfd");
        let locks = PageLocks::of(lock_memory.as_fd(), pages).expect("it is one");
        let guest = guest.with_locks(Some(Arc::new(Locks::new(locks, one))));
        let mut options = options("ram");
        options.memory_max = Bytes(64 << 20);
        let shared = shared(options);
        let mut items = Vec::new();
        let mut engine = shared.books.engine();
        let space = engine.layout().new_space(PageSize::Large, |_| false);
        let (space, whole) = (space.expect("a number"), guest.object().whole());
        engine.layout().attached(space, whole);
        engine.discovery().found_resident(space, whole);
        assert!(engine.evictions().select(64, &mut items));
        assert_eq!(items.len(), 1, "a large page is a batch");
        let item = EvictItem {
            retained: Some((TierId(0), Slot(0), Stamp(0))),
            ..items[0]
        };
        Some(Large {
            guest,
            memory,
            item,
            lock_memory,
            _pool: pool,
        })
    }

    /// Begins with the page and takes it. Returns whether it is as its copy, and the first byte of
    /// what was read.
    fn take(&self, item: EvictItem) -> (bool, u8) {
        let mut buffer = vec![0xee; BYTES];
        let Begun::Yes(asked) = self.guest.begin(&[item]) else {
            panic!("it begins");
        };
        let Took::Pages(taken) = (self.guest).take(Answered::Done(asked), &[item], &mut buffer)
        else {
            panic!("it is taken");
        };
        assert_eq!(taken.moved, 1);
        (taken.kept == 1, buffer[BYTES - 1])
    }

    fn install(&self, byte: u8) {
        let one = VirtRange::one(self.item.page);
        self.guest.object().punch(one).expect("a hole");
        let bytes = vec![byte; BYTES];
        let put = self.guest.install_unwritten(self.item.page, &bytes);
        put.expect("nothing is there");
    }
}

#[test]
fn a_large_page_is_as_its_copy_until_it_is_written() {
    let Some(large) = Large::new() else { return };
    let (item, guest) = (large.item, &large.guest);
    large.install(7);
    assert_eq!(large.take(item), (true, 0xee), "it is not even read");
    let lost = EvictItem {
        retained: None,
        ..item
    };
    assert_eq!(large.take(lost), (false, 7), "no tier keeps a copy");
    let word = item.page.0 as usize * BYTES / 8 + 5;
    std::thread::scope(|scope| {
        let words = large.memory.words();
        let writer = scope.spawn(move || words[word].store(9, Ordering::Relaxed));
        let mut buffer = MessageBuf::default();
        let of_the_page = |messages: &mut Messages<'_>| {
            matches!(messages.next(), Some(undercroft_sys::uffd::Message::Fault { page, .. })
                if page == item.page)
        };
        while !of_the_page(&mut guest.events(&mut buffer).expect("it is read")) {
            std::thread::yield_now();
        }
        guest.stay(item.page, &[]).expect("it may be written");
        writer.join().expect("it goes on");
    });
    assert_eq!(large.take(item), (false, 7), "another word of it is 9");
    // It is given back by a raw system call, and is not missed yet.
    large.install(7);
    let one = VirtRange::one(item.page);
    guest.object().punch(one).expect("a hole");
    assert_eq!(large.take(item), (false, 0), "its copy is of before");
    // What comes for a write, or is zeros, is as no copy.
    large.install(7);
    guest
        .object()
        .punch(VirtRange::one(item.page))
        .expect("a hole");
    guest
        .zero(VirtRange::one(item.page), Wake::Later)
        .expect("zeros");
    assert_eq!(large.take(item), (false, 0));
}

#[test]
fn large_pages_that_are_there_are_found_and_results_are_in_large_pages() {
    let Some(large) = Large::new() else { return };
    let guest = &large.guest;
    let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
    guest.zero(range(1, 3), Wake::Later).expect("zeros");
    let data = |from| guest.data(VirtPage(from)).expect("it is told");
    assert_eq!(
        [0, 1, 2, 3].map(data),
        [
            Some(range(1, 3)),
            Some(range(1, 3)),
            Some(range(2, 3)),
            None
        ]
    );
    let hole = |from| guest.first_hole(VirtPage(from)).expect("it is told");
    assert_eq!(
        [0, 1, 3, 4].map(hole),
        [
            Some(VirtPage(0)),
            Some(VirtPage(3)),
            Some(VirtPage(3)),
            None
        ]
    );
    assert_eq!(
        guest.object().allocated().expect("a size"),
        Bytes(2 * BYTES as u64)
    );
    let bytes = vec![7; 2 * BYTES];
    let there = guest.install(VirtPage(0), &bytes, Wake::Later);
    assert_eq!(there, Err(UffdError::LayoutChanging { done: 1 }));
    let there = guest.install(VirtPage(1), &bytes[..BYTES], Wake::Later);
    assert_eq!(there, Err(UffdError::Exists { done: 0 }));
    assert_eq!(guest.take_balance(), 3);
}

/// A page that is as its copy, and that a device is about to write to.
#[test]
fn a_large_page_that_is_locked_stays_and_is_no_more_as_its_copy() {
    let Some(large) = Large::new() else { return };
    let (item, guest) = (large.item, &large.guest);
    large.install(7);
    let client = Client::take(large.lock_memory.as_fd(), 0).expect("a free place");
    client.set(item.page, true);
    let Begun::Yes(asked) = guest.begin(&[item]) else {
        panic!("it begins");
    };
    let mut buffer = vec![0xee; BYTES];
    let took = guest.take(Answered::Done(asked), &[item], &mut buffer);
    assert!(matches!(took, Took::Pages(taken) if (taken.moved, taken.refused) == (0, 1)));
    assert_eq!(buffer[0], 0xee, "it is not read");
    let word = item.page.0 as usize * BYTES / 8 + 5;
    large.memory.words()[word].store(9, Ordering::Relaxed); // no thread serves faults
    drop(client);
    assert_eq!(large.take(item), (false, 7), "another word of it is 9");
}
