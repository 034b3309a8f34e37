//! Memory objects: a memfd that is mapped and registered as the memory of a virtual machine is.

use std::os::fd::AsFd;

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::access;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::pagemap::{Category, Pagemap};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::uffd::{Features, RegisterMode, UffdError};

use crate::bed::*;

crate::facts! {
    a_hole_is_missing_and_a_page_of_the_file_is_mapped_in_silence,
    protection_holds_for_pages_that_are_mapped_and_for_those_that_are_not_yet,
    copy_and_zeros_come_into_holes_only,
    a_punched_page_is_missing_for_a_writer_that_waited_and_its_write_comes_after_the_copy,
    a_fork_child_that_inherits_the_mapping_reads_holes_as_zeros,
    a_view_that_is_moved_is_registered_no_more,
    a_page_that_is_zapped_keeps_its_bytes_and_its_next_use_maps_it_without_a_message,
    a_page_that_is_zapped_keeps_its_protection_and_a_hole_its_message,
    a_page_that_is_mapped_twice_is_not_zapped,
}

/// An object of four pages, mapped here and registered. Page 2 is in the file, and the mapping has
/// not touched it. Others write to the file by the first.
fn object() -> (SharedMemory, Ear, Area) {
    let memory = SharedMemory::create("uc-contract", 4 * PAGE).unwrap();
    let area = Area::shared(&memory);
    let ear = Ear::new(Features::THREAD_ID);
    ear.register(area.range(), RegisterMode::MISSING_WP)
        .unwrap();
    memory.bytes_in(2 * PAGE, &[12; PAGE]);
    (memory, ear, area)
}

fn one(area: Area, page: usize) -> VirtRange {
    area.part(page, 1).range()
}

fn a_hole_is_missing_and_a_page_of_the_file_is_mapped_in_silence() {
    let (memory, mut ear, area) = object();
    assert_eq!(doing(move || area.read(2)).done(), 12);
    doing(move || area.write(2, 13)).done();
    ear.silent();
    let reader = doing(move || area.read(1));
    let fault = ear.fault();
    assert_eq!((fault.page, fault.wp), (area.at(1), false));
    ear.serve(area.at(1), 5);
    assert_eq!(reader.done(), 5);
    // No event tells that the program gives pages back, by whatever call.
    memory.punch(2 * PAGE, PAGE).unwrap();
    assert_eq!(
        doing(move || area.part(1, 1).advise(libc::MADV_REMOVE)).done(),
        0
    );
    ear.silent();
    let reader = doing(move || area.read(1));
    assert_eq!(ear.fault().page, area.at(1));
    ear.zeropage(one(area, 1), false).unwrap();
    assert_eq!(reader.done(), 0);
}

fn protection_holds_for_pages_that_are_mapped_and_for_those_that_are_not_yet() {
    let (memory, mut ear, area) = object();
    ear.serve(area.at(0), 10);
    ear.write_protect(area.range(), true).unwrap();
    memory.bytes_in(3 * PAGE, &[33; PAGE]); // where a hole was protected
    for (page, byte) in [(0, 10), (2, 12), (3, 33)] {
        assert_eq!(doing(move || area.read(page)).done(), byte);
        ear.silent();
        let writer = doing(move || area.write(page, 7));
        let fault = ear.fault();
        assert!(fault.wp && fault.page == area.at(page), "{fault:?}");
        writer.blocked();
        ear.write_protect(one(area, page), false).unwrap();
        writer.done();
        assert_eq!(area.read(page), 7);
    }
}

fn copy_and_zeros_come_into_holes_only() {
    let (_memory, ear, area) = object();
    let exists = Err(UffdError::Exists { done: 0 });
    for touched in [false, true] {
        assert_eq!(ear.try_serve(area.at(2), 9), exists);
        assert_eq!(ear.zeropage(one(area, 2), false), exists);
        assert_eq!(area.read(2), 12, "mapped before: {touched}");
    }
    ear.zeropage(one(area, 1), false).unwrap();
    assert_eq!(ear.try_serve(area.at(1), 9), exists);
    assert_eq!(area.read(1), 0);
    area.write(1, 8); // a frame of its own, and no event
    assert_eq!(area.read(1), 8);
}

/// The way out of a page, while a thread writes to it.
fn a_punched_page_is_missing_for_a_writer_that_waited_and_its_write_comes_after_the_copy() {
    let (memory, mut ear, area) = object();
    area.write(2, 20);
    ear.write_protect(one(area, 2), true).unwrap();
    let writer = doing(move || area.write(2, 21));
    assert!(ear.fault().wp);
    let mut page = [0; PAGE];
    memory.bytes_out(2 * PAGE, &mut page);
    assert_eq!((page[0], page[1]), (20, 12));
    memory.punch(2 * PAGE, PAGE).unwrap();
    writer.blocked();
    ear.wake(one(area, 2)).unwrap();
    let fault = ear.fault();
    assert!(!fault.wp && fault.write);
    writer.blocked();
    ear.copy(area.at(2), &page, false).unwrap();
    writer.done();
    memory.bytes_out(2 * PAGE, &mut page);
    assert_eq!((page[0], page[1]), (21, 12));
    ear.silent(); // the protection is gone
}

/// So a guest's memory must not be inherited.
fn a_fork_child_that_inherits_the_mapping_reads_holes_as_zeros() {
    let (_memory, mut ear, area) = object();
    let mut one = child(|_| i32::from(area.read(1)) + i32::from(area.read(2)));
    assert_eq!(one.exit_status(), 12);
    ear.silent();
}

fn a_view_that_is_moved_is_registered_no_more() {
    let (_memory, mut ear, area) = object();
    let moved = area.remap(
        4,
        libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
        Area::new(4).address,
    );
    assert_eq!(doing(move || moved.read(1)).done(), 0);
    ear.silent();
    let protected = ear.write_protect(moved.range(), true);
    assert_eq!(protected, Err(UffdError::NotMapped { done: 0 }));
}

/// A view of `pages` pages whose every page has come by a copy. Everything is on one CPU, because
/// pages in the lists of another are not zapped.
fn view(pages: usize) -> (SharedMemory, Ear, Area) {
    let cpus = process::allowed_cpus(0).unwrap();
    process::set_affinity(0, &cpus[..1]).unwrap();
    let memory = SharedMemory::create("uc-contract", pages * PAGE).unwrap();
    let area = Area::shared(&memory);
    let ear = Ear::new(Features::THREAD_ID);
    ear.register(area.range(), RegisterMode::MISSING_WP)
        .unwrap();
    (0..pages).for_each(|page| ear.serve(area.at(page), 10));
    (memory, ear, area)
}

fn zap(area: Area) {
    let pidfd = PidFd::open(std::process::id()).unwrap();
    access::zap(pidfd.as_fd(), &[area.range()]).unwrap();
}

/// The pages of the view that are mapped.
fn mapped(area: Area) -> Vec<usize> {
    let mut found = Vec::new();
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    pagemap
        .scan(area.range(), Category::PRESENT, &mut found)
        .unwrap();
    let pages = found.iter().flat_map(|(run, _)| run.start.0..run.end.0);
    pages
        .map(|page| (page - area.at(0).0) as usize)
        .inspect(|at| assert!(area.range().contains(VirtPage(area.at(0).0 + *at as u64))))
        .collect()
}

/// Of 256 pages 32 are used, each an eighth of them apart: no page around them is mapped along.
fn a_page_that_is_zapped_keeps_its_bytes_and_its_next_use_maps_it_without_a_message() {
    let (_memory, mut ear, area) = view(256);
    assert_eq!(mapped(area).len(), 256);
    zap(area);
    assert_eq!(mapped(area), []);
    for page in (0..256).step_by(8) {
        assert_eq!(doing(move || area.read(page)).done(), 10);
        doing(move || area.write(page, 11)).done();
    }
    ear.silent();
    assert_eq!(mapped(area), (0..256).step_by(8).collect::<Vec<_>>());
    zap(area);
    assert_eq!(mapped(area), []);
    for page in 0..256 {
        let byte = if page % 8 == 0 { 11 } else { 10 };
        assert_eq!(area.read(page), byte);
    }
}

fn a_page_that_is_zapped_keeps_its_protection_and_a_hole_its_message() {
    let (memory, mut ear, area) = view(4);
    ear.write_protect(one(area, 1), true).unwrap();
    memory.punch(2 * PAGE, PAGE).unwrap();
    zap(area);
    assert_eq!(doing(move || area.read(1)).done(), 10);
    ear.silent();
    zap(area);
    let writer = doing(move || area.write(1, 12));
    let fault = ear.fault();
    assert!(fault.wp && fault.page == area.at(1), "{fault:?}");
    writer.blocked();
    // It leaves: its copy is made, it is punched, and the write comes after the copy.
    zap(area);
    memory.punch(PAGE, PAGE).unwrap();
    ear.wake(one(area, 1)).unwrap();
    let fault = ear.fault();
    assert_eq!((fault.page, fault.wp), (area.at(1), false));
    ear.serve(area.at(1), 10);
    writer.done();
    assert_eq!(area.read(1), 12);
    let reader = doing(move || area.read(2));
    assert_eq!(ear.fault().page, area.at(2));
    ear.serve(area.at(2), 13);
    assert_eq!(reader.done(), 13);
}

/// And no error says so. The second mapping is not registered, so pages around are mapped along.
fn a_page_that_is_mapped_twice_is_not_zapped() {
    let (memory, _ear, area) = view(256);
    memory.bytes_out(100 * PAGE, &mut [0]);
    zap(area);
    let left = mapped(area);
    assert!(left.contains(&100) && left.len() <= 64, "{left:?}");
}
