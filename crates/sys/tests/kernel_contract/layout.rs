//! Changes of a program's layout, and the messages that they raise.

use std::os::fd::AsFd;

use undercroft_base::VirtRange;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::PidFd;
use undercroft_sys::uffd::{Features, Message, RegisterMode, UffdError};

use crate::bed::*;

crate::facts! {
    remap_is_told_and_the_new_place_stays_registered,
    a_move_without_the_event_reads_zeros,
    unregistering_takes_what_was_moved_there_and_an_unread_event_tells,
    remap_without_unmap_leaves_the_old_range_registered_and_empty,
    dontneed_and_free_raise_remove_and_wait_for_it,
    remove_of_shared_memory_raises_remove,
    punching_a_memfd_raises_nothing,
    unmap_is_told_after_the_fact,
    a_mapping_over_a_registered_one_is_told_as_unmap_and_is_not_registered,
    growing_in_place_is_silent_and_the_grown_part_faults,
    growth_of_the_heap_is_not_registered,
    a_neighbouring_mapping_is_not_registered,
    installing_a_guard_is_silent_and_removing_it_makes_the_page_missing,
    a_protection_change_is_silent_and_keeps_the_registration,
    another_process_may_register_but_not_drop,
    registration_from_outside_works_through_the_client_s_userfaultfd,
}

fn remap_is_told_and_the_new_place_stays_registered() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 2);
    crate::moving::move_away(area.part(0, 1));
    let target = Area::new(2);
    let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let mover = doing(move || area.remap(2, fixed, target.address));
    let Some(Message::Remap { from, to }) = ear.hear(SOON) else {
        panic!("no REMAP");
    };
    assert_eq!((from, to), (area.range(), target.at(0)));
    // The old range is unmapped too, and that is reported as well.
    while let Some(message) = ear.hear(QUIET) {
        println!("  also heard {message:?}");
    }
    mover.done();
    assert_eq!(target.read(1), 11);
    let reader = doing(move || target.read(0));
    assert_eq!(ear.fault().page, target.at(0));
    ear.serve(target.at(0), 5);
    assert_eq!(reader.done(), 5);
}

fn a_move_without_the_event_reads_zeros() {
    let (mut ear, area) = Ear::with_area(Features::default(), 1);
    evict(area, 0);
    let target = Area::new(1);
    let moved = area.remap(1, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, target.address);
    assert_eq!(moved.read(0), 0);
    ear.silent();
}

const MREMAP_DONTUNMAP: i32 = 4;

/// The manager takes mappings that it cannot manage out of the registration, by their ranges.
fn unregistering_takes_what_was_moved_there_and_an_unread_event_tells() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 3);
    crate::moving::move_away(area.part(0, 1));
    crate::moving::move_away(area.part(1, 1));
    let foreign = Area::shared(&SharedMemory::create("foreign", 3 * PAGE).unwrap());
    ear.register(foreign.range(), RegisterMode::MISSING)
        .unwrap();
    let no_page = VirtRange::new(foreign.at(0), foreign.at(0));
    let is_unread = |ear: &Ear| {
        let asked = ear.write_protect(no_page, false);
        matches!(asked, Err(UffdError::LayoutChanging { .. }))
    };
    assert!(!is_unread(&ear));
    let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let mover = doing(move || area.remap(3, fixed, foreign.address));
    until("a move", || is_unread(&ear));
    assert_eq!(ear.unregister(foreign.range()), Ok(()));
    assert!(is_unread(&ear), "still");
    assert_eq!(foreign.read(0), 0, "zeros, and no message");
    let mode = RegisterMode::MISSING_WP;
    assert_eq!(ear.register(foreign.range(), mode), Ok(()));
    let reader = doing(move || foreign.read(1));
    let heard: Vec<Message> = std::iter::from_fn(|| ear.hear(QUIET)).collect();
    let is_fault = |message: &Message| matches!(message, Message::Fault { .. });
    assert!(heard.iter().any(is_fault), "{heard:?}");
    mover.done();
    ear.serve(foreign.at(1), 5);
    assert_eq!((reader.done(), foreign.read(2)), (5, 12));
}

fn remap_without_unmap_leaves_the_old_range_registered_and_empty() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 1);
    let mover = doing(move || area.remap(1, libc::MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0));
    let Some(Message::Remap { from, to }) = ear.hear(SOON) else {
        panic!("no REMAP");
    };
    while ear.hear(QUIET).is_some() {}
    let moved = mover.done();
    assert_eq!((from, to), (area.range(), moved.at(0)));
    assert_eq!(moved.read(0), 10);
    let reader = doing(move || area.read(0));
    assert_eq!(ear.fault().page, area.at(0));
    ear.serve(area.at(0), 0);
    assert_eq!(reader.done(), 0);
}

fn removed(ear: &mut Ear) -> VirtRange {
    match ear.hear(SOON) {
        Some(Message::Remove(range)) => range,
        other => panic!("expected REMOVE, heard {other:?}"),
    }
}

fn dontneed_and_free_raise_remove_and_wait_for_it() {
    for advice in [libc::MADV_DONTNEED, libc::MADV_FREE] {
        let (mut ear, area) = Ear::with_area(Features::EVENTS, 2);
        let dropper = doing(move || area.part(1, 1).advise(advice));
        dropper.blocked();
        assert_eq!(removed(&mut ear), area.part(1, 1).range());
        assert_eq!(dropper.done(), 0);
    }
}

fn shared(events: Features) -> (Ear, Area, SharedMemory) {
    let memory = SharedMemory::create("fact", PAGE).unwrap();
    let area = Area::shared(&memory);
    area.fill(0, 7);
    let ear = Ear::new(events);
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    (ear, area, memory)
}

fn remove_of_shared_memory_raises_remove() {
    let (mut ear, area, _memory) = shared(Features::EVENTS);
    let dropper = doing(move || area.advise(libc::MADV_REMOVE));
    assert_eq!(removed(&mut ear), area.range());
    assert_eq!(dropper.done(), 0);
}

fn punching_a_memfd_raises_nothing() {
    let (mut ear, area, memory) = shared(Features::EVENTS);
    memory.punch(0, PAGE).unwrap();
    ear.silent();
    let reader = doing(move || area.read(0));
    assert_eq!(ear.fault().page, area.at(0));
    ear.serve(area.at(0), 3);
    assert_eq!(reader.done(), 3);
}

fn unmapped(ear: &mut Ear) -> VirtRange {
    match ear.hear(SOON) {
        Some(Message::Unmap(range)) => range,
        other => panic!("expected UNMAP, heard {other:?}"),
    }
}

fn unmap_is_told_after_the_fact() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 4);
    let part = area.part(1, 2);
    let unmapper = doing(move || part.unmap());
    unmapper.blocked();
    let mut text = String::new();
    undercroft_sys::procfs::read_maps(std::process::id(), &mut text).unwrap();
    let still = text.contains(&format!("{:x}-", area.address + PAGE));
    assert!(!still, "it is gone before the event is read");
    assert_eq!(unmapped(&mut ear), part.range());
    unmapper.done();
}

fn map_over(area: Area, flags: i32) {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: replaces pages of ours that no Rust reference covers.
    let got = unsafe { libc::mmap(area.pointer(), area.bytes(), RW, flags, -1, 0) };
    assert_eq!(got, area.pointer());
}

fn a_mapping_over_a_registered_one_is_told_as_unmap_and_is_not_registered() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 3);
    let middle = area.part(1, 1);
    let mapper = doing(move || map_over(middle, 0));
    assert_eq!(unmapped(&mut ear), middle.range());
    mapper.done();
    assert_eq!(middle.read(0), 0);
    ear.silent();
}

/// `pages` of address space with nothing mapped after the first `mapped`.
fn with_room(mapped: usize, pages: usize) -> Area {
    let room = Area::new(pages);
    room.part(mapped, pages - mapped).unmap();
    room.part(0, mapped)
}

fn growing_in_place_is_silent_and_the_grown_part_faults() {
    let area = with_room(4, 64);
    let mut ear = Ear::new(Features::EVENTS);
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    let grown = area.remap(8, 0, 0);
    assert_eq!(grown.address, area.address);
    ear.silent();
    let reader = doing(move || grown.read(6));
    assert_eq!(ear.fault().page, grown.at(6));
    ear.serve(grown.at(6), 0);
    assert_eq!(reader.done(), 0);
}

/// Moves the end of the heap up and returns the new pages (whole ones).
pub(crate) fn grow_heap(pages: usize) -> Area {
    // SAFETY: grows the heap by pages that nothing uses; glibc notices that the break moved and
    // copes.
    let end = unsafe { libc::sbrk((pages * PAGE) as isize) } as usize;
    assert_ne!(end, usize::MAX);
    let first = end.next_multiple_of(PAGE);
    Area {
        address: first,
        pages: (end + pages * PAGE - first) / PAGE,
    }
}

fn growth_of_the_heap_is_not_registered() {
    let first = grow_heap(8);
    let mut ear = Ear::new(Features::EVENTS);
    ear.register(first.range(), RegisterMode::MISSING).unwrap();
    let second = grow_heap(8);
    second.write(2, 1);
    ear.silent();
}

fn a_neighbouring_mapping_is_not_registered() {
    let area = with_room(4, 8);
    let mut ear = Ear::new(Features::EVENTS);
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    let next = Area {
        address: area.address + area.bytes(),
        pages: 2,
    };
    map_over(next, 0);
    next.write(0, 1);
    ear.silent();
}

pub(crate) const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;

fn installing_a_guard_is_silent_and_removing_it_makes_the_page_missing() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 1);
    match area.advise(MADV_GUARD_INSTALL) {
        0 => {}
        libc::EINVAL => crate::skip("no MADV_GUARD_INSTALL before Linux 6.13"),
        other => panic!("errno {other}"),
    }
    ear.silent();
    assert_eq!(area.advise(MADV_GUARD_REMOVE), 0);
    let reader = doing(move || area.read(0));
    ear.fault();
    ear.serve(area.at(0), 0);
    assert_eq!(reader.done(), 0);
}

fn a_protection_change_is_silent_and_keeps_the_registration() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 4);
    crate::moving::move_away(area.part(1, 1));
    area.part(1, 1).protect(libc::PROT_READ);
    area.part(2, 1).protect(libc::PROT_NONE);
    ear.silent();
    let reader = doing(move || area.read(1));
    assert_eq!(ear.fault().page, area.at(1));
    ear.serve(area.at(1), 6);
    assert_eq!(reader.done(), 6);
}

fn another_process_may_register_but_not_drop() {
    let area = Area::filled(1);
    let client = child(|_| {
        pause(SOON);
        0
    });
    let pidfd = PidFd::open(client.pid).unwrap();
    let remote = |advice: i32| {
        let vector = libc::iovec {
            iov_base: area.pointer(),
            iov_len: PAGE,
        };
        let fd = crate::death::raw(&pidfd);
        // SAFETY: reads one live structure; the memory it names is the child's.
        let got = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                fd,
                &raw const vector,
                1,
                advice,
                0,
            )
        };
        errno(got)
    };
    assert_eq!(remote(libc::MADV_DONTNEED), libc::EINVAL);
    assert_eq!(remote(libc::MADV_FREE), libc::EINVAL);
    assert_eq!(remote(libc::MADV_COLD), 0, "the call itself works");
}

fn registration_from_outside_works_through_the_client_s_userfaultfd() {
    let area = Area::new(2);
    let mut client = child(move |parent| {
        let ear = Ear::new(Features::default());
        parent.hand_over(&[ear.as_fd()]);
        area.read(1).into()
    });
    let mut ear = client.uffd();
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    client.go();
    assert_eq!(ear.fault().page, area.at(1));
    ear.serve(area.at(1), 33);
    assert_eq!(client.exit_status(), 33);
    // The manager's own process was never registered.
    assert_eq!(area.read(1), 0);
}
