//! A second mapping of guest memory, as another process would have it, over real userfaultfds.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use undercroft_base::{BASE_PAGE_BYTES, PageSize, PageState, SpaceId, VirtPage, VirtRange};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::uffd::{Features, Message, MessageBuf};
use undercroft_sys::uffd_source::UffdSource;

use super::guest_tests::Machine;
use crate::space::port::{Space, Wake, WayOut};
use crate::space::views::View;

const SPACE: SpaceId = SpaceId(7);
const PAGE_WORDS: usize = BASE_PAGE_BYTES / 8;

/// Maps all of the memory again, without registration.
fn map(machine: &Machine) -> (SharedMemory, View) {
    let memfd = machine.guest().object().as_fd();
    let memory = memfd.try_clone_to_owned().and_then(SharedMemory::from_fd);
    let memory = memory.expect("it is mapped");
    let uffd = UffdSource::open().and_then(|source| source.create());
    let uffd = uffd.expect("as for the first mapping");
    uffd.api(Features::THREAD_ID).expect("the first call");
    let base = VirtPage::of(memory.words().as_ptr() as u64);
    let whole = machine.guest().object().whole();
    let view = View::new(SPACE, uffd, (base, whole), PageSize::Base);
    (memory, view)
}

/// The page of the next fault in a view, which must come.
fn fault(machine: &Machine, view: &View) -> VirtPage {
    let mut buffer = MessageBuf::default();
    for _ in 0..1000 {
        let mut messages = view.events(&mut buffer).expect("it is read");
        if let Some(Message::Fault { page, .. }) = messages.next() {
            return machine
                .guest()
                .page_at(SPACE, page)
                .expect("a page of the view");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("no fault");
}

/// A page is protected in each mapping before it is read, also in one that comes meanwhile.
#[test]
fn a_write_in_a_view_to_a_page_on_its_way_out_waits() {
    for late in [false, true] {
        let Some(mut machine) = Machine::new() else {
            return;
        };
        let (memory, view) = map(&machine);
        let mut view = Some(view);
        if !late {
            let view = view.take().expect("one");
            machine.guest().add_view(view).expect("it is registered");
        }
        let _took = machine.take();
        if let Some(view) = view {
            machine.guest().add_view(view).expect("it is registered");
        }
        let page = machine.items[0].page;
        let views: Vec<Arc<View>> = machine.guest().views();
        std::thread::scope(|scope| {
            let word = &memory.words()[page.0 as usize * PAGE_WORDS];
            let writer = scope.spawn(|| word.store(7, Relaxed));
            assert_eq!(fault(&machine, &views[0]), page, "late: {late}");
            assert_ne!(machine.word(page).load(Relaxed), 7, "late: {late}");
            machine
                .guest()
                .stay(page, &[])
                .expect("it is protected no more");
            writer.join().expect("it goes on");
        });
        assert_eq!(machine.word(page).load(Relaxed), 7);
    }
}

/// The page comes by the monitor's mapping, and the view's thread is woken.
#[test]
fn a_page_that_is_away_comes_to_a_view() {
    let Some(mut machine) = Machine::new() else {
        return;
    };
    let (memory, view) = map(&machine);
    machine.guest().add_view(view).expect("it is registered");
    let page = machine.items[0].page;
    let before = machine.word(page).load(Relaxed);
    machine.evict();
    let entry = {
        let engine = machine.shared.books.engine();
        engine.books().entry(machine.process.space, page)
    };
    assert_eq!(entry.state, PageState::Stored);
    let views = machine.guest().views();
    std::thread::scope(|scope| {
        let word = &memory.words()[page.0 as usize * PAGE_WORDS];
        let reader = scope.spawn(|| word.load(Relaxed));
        assert_eq!(fault(&machine, &views[0]), page);
        let bytes = before.to_ne_bytes().repeat(PAGE_WORDS);
        let installed = machine.guest().install(page, &bytes, Wake::Now);
        installed.expect("nothing is there");
        assert_eq!(reader.join().expect("it is woken"), before);
    });
}

/// A view whose mapping is gone keeps a group from leaving until it is known, and only then.
#[test]
fn a_view_that_was_unmapped_is_doubted_and_forgotten() {
    let Some(mut machine) = Machine::new() else {
        return;
    };
    let (memory, view) = map(&machine);
    machine.guest().add_view(view).expect("it is registered");
    drop(memory);
    assert!(!machine.guest().doubts_views());
    let run = VirtRange::one(machine.items[0].page);
    assert!(machine.guest().protect(run, true).is_err());
    assert!(machine.guest().take_doubt());
    assert!(machine.guest().forget_views(|view| view.space == SPACE));
    assert!(machine.guest().protect(run, true).is_ok());
    machine.evict();
    let engine = machine.shared.books.engine();
    let entry = engine.books().entry(machine.process.space, run.start);
    assert_eq!(entry.state, PageState::Stored);
}
