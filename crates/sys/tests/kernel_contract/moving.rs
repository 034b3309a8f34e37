//! UFFDIO_MOVE, the eviction path: what moves, what is refused and how, and what a fork does to it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use io_uring::IoUring;
use undercroft_base::VirtRange;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::uffd::{Features, Message, RegisterMode, UffdError};

use crate::bed::*;

crate::facts! {
    a_page_moves_to_staging_without_an_event_and_then_faults,
    progress_is_told_as_layout_changing_whatever_stopped_it,
    a_hole_stops_a_move_as_not_mapped,
    a_present_target_stops_a_move_as_exists,
    a_page_shared_with_a_child_is_busy_and_populating_it_for_writing_frees_it,
    a_page_stays_busy_after_the_child_exited_until_it_is_populated_for_writing,
    a_page_that_a_child_inherited_is_busy_in_the_child_until_populated,
    populating_a_missing_page_for_writing_faults,
    a_pinned_page_is_busy,
    a_read_only_or_inaccessible_source_is_invalid,
    a_locked_source_is_invalid,
    flags_other_than_access_and_lock_do_not_matter,
    a_file_or_shared_source_is_invalid,
    a_range_over_two_mappings_is_invalid_and_moves_nothing,
    the_target_must_be_registered_with_the_same_userfaultfd,
    the_shared_zero_page_moves_and_reads_zeros,
    a_write_protected_page_moves,
    what_is_at_an_empty_target_after_exists_has_moved,
    a_huge_page_is_split_and_moves,
    a_fork_shared_huge_page_moves_once_populated,
    another_process_cannot_move,
    no_write_is_lost_when_pages_move_under_writers,
    a_write_is_lost_when_pages_are_read_and_dropped_without_protection,
    a_changed_layout_holds_back_a_move_and_not_a_drop,
}

/// Staging pages, not copied to children, and their own userfaultfd without events.
struct Staging {
    ear: Ear,
    area: Area,
}

impl Staging {
    fn new(pages: usize) -> Staging {
        let (ear, area) = (Ear::new(Features::MOVE), Area::new(pages));
        assert_eq!(area.advise(libc::MADV_DONTFORK), 0);
        ear.register(area.range(), RegisterMode::MISSING).unwrap();
        Staging { ear, area }
    }

    /// Moves the pages of `source` to page `to` of the staging area.
    fn take(&self, to: usize, source: Area) -> Result<(), UffdError> {
        // SAFETY: areas are never covered by Rust references.
        unsafe { self.ear.move_pages(self.area.at(to), source.range()) }
    }
}

/// Moves an area's pages to a staging area that is then forgotten: an eviction that raises no
/// event.
pub(crate) fn move_away(area: Area) {
    let staging = Staging::new(area.pages);
    staging.take(0, area).unwrap();
    std::mem::forget(staging);
}

const BUSY: Result<(), UffdError> = Err(UffdError::Busy { done: 0 });

fn populate(area: Area) {
    assert_eq!(area.advise(libc::MADV_POPULATE_WRITE), 0, "POPULATE_WRITE");
}

fn a_page_moves_to_staging_without_an_event_and_then_faults() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 3);
    let mut staging = Staging::new(3);
    staging.take(0, area).unwrap();
    assert_eq!([0, 1, 2].map(|page| staging.area.read(page)), [10, 11, 12]);
    ear.silent();
    staging.ear.silent();
    let reader = doing(move || area.read(1));
    let fault = ear.fault();
    assert!(fault.page == area.at(1) && !fault.write && !fault.wp);
    ear.serve(area.at(1), 5);
    assert_eq!(reader.done(), 5);
}

fn progress_is_told_as_layout_changing_whatever_stopped_it() {
    let again = Err(UffdError::LayoutChanging { done: 2 });
    // A hole.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    evict(source, 2);
    assert_eq!(staging.take(0, source), again);
    assert_eq!([0, 1].map(|page| staging.area.read(page)), [10, 11]);
    // A present target.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    staging.ear.serve(staging.area.at(2), 1);
    assert_eq!(staging.take(0, source), again);
    // A page shared with a child.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    let _child = child(|_| {
        pause(SOON);
        0
    });
    populate(source.part(0, 2));
    assert_eq!(staging.take(0, source), again);
    assert_eq!(
        staging.take(2, source.part(2, 2)),
        BUSY,
        "the reason comes next"
    );
}

fn a_hole_stops_a_move_as_not_mapped() {
    let (source, staging) = (Area::filled(2), Staging::new(2));
    evict(source, 0);
    let refused = staging.take(0, source);
    assert_eq!(refused, Err(UffdError::NotMapped { done: 0 }));
}

fn a_present_target_stops_a_move_as_exists() {
    let (source, staging) = (Area::filled(1), Staging::new(1));
    staging.ear.serve(staging.area.at(0), 1);
    let refused = staging.take(0, source);
    assert_eq!(refused, Err(UffdError::Exists { done: 0 }));
    assert_eq!((source.read(0), staging.area.read(0)), (10, 1));
}

fn a_page_shared_with_a_child_is_busy_and_populating_it_for_writing_frees_it() {
    let (_ear, source) = Ear::with_area(Features::default(), 1);
    let staging = Staging::new(1);
    let _child = child(|_| {
        pause(SOON);
        0
    });
    assert_eq!(staging.take(0, source), BUSY);
    populate(source);
    staging.take(0, source).unwrap();
    assert_eq!(staging.area.read(0), 10);
}

fn a_page_stays_busy_after_the_child_exited_until_it_is_populated_for_writing() {
    let (_ear, source) = Ear::with_area(Features::default(), 1);
    let staging = Staging::new(1);
    child(|_| 0).exit_status();
    assert_eq!(staging.take(0, source), BUSY);
    populate(source);
    staging.take(0, source).unwrap();
    assert_eq!(staging.area.read(0), 10);
}

fn a_page_that_a_child_inherited_is_busy_in_the_child_until_populated() {
    let source = Area::filled(1);
    let mut child = child(|_| {
        let staging = Staging::new(1);
        assert_eq!(staging.take(0, source), BUSY);
        populate(source);
        staging.take(0, source).unwrap();
        staging.area.read(0).into()
    });
    assert_eq!(child.exit_status(), 10);
    assert_eq!(source.read(0), 10);
}

fn populating_a_missing_page_for_writing_faults() {
    let (mut ear, area) = Ear::with_area(Features::default(), 4);
    evict(area, 1);
    let populating = doing(move || area.advise(libc::MADV_POPULATE_WRITE));
    let fault = ear.fault();
    assert!(fault.page == area.at(1) && fault.write);
    ear.serve(area.at(1), 4);
    assert_eq!(populating.done(), 0);
    assert_eq!(
        [0, 1].map(|page| area.read(page)),
        [10, 4],
        "bytes untouched"
    );
}

fn a_pinned_page_is_busy() {
    let ring = match IoUring::new(4) {
        Ok(ring) => ring,
        Err(error) => crate::skip(&format!("no io_uring here: {error}")),
    };
    let (source, staging) = (Area::filled(1), Staging::new(1));
    let buffer = libc::iovec {
        iov_base: source.pointer(),
        iov_len: PAGE,
    };
    // SAFETY: the area outlives the ring and is never covered by Rust references.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    assert_eq!(staging.take(0, source), BUSY);
    populate(source);
    assert_eq!(staging.take(0, source), BUSY, "populating does not help");
    assert_eq!(source.read(0), 10);
    ring.submitter().unregister_buffers().unwrap();
    until("unpinned", || staging.take(0, source).is_ok());
}

const INVALID: Result<(), UffdError> = Err(UffdError::Invalid);

fn a_read_only_or_inaccessible_source_is_invalid() {
    let all = RW | libc::PROT_EXEC;
    for prot in [libc::PROT_READ, libc::PROT_NONE, all] {
        let (source, staging) = (Area::filled(1), Staging::new(1));
        source.protect(prot);
        assert_eq!(staging.take(0, source), INVALID, "into a writable target");
        staging.area.protect(prot);
        let same = staging.take(0, source);
        let writable = prot & libc::PROT_WRITE != 0;
        assert_eq!(
            same.is_ok(),
            writable,
            "both of protection {prot}: {same:?}"
        );
    }
}

fn a_locked_source_is_invalid() {
    let (source, staging) = (Area::filled(1), Staging::new(1));
    // SAFETY: locks a page of ours.
    let locked = unsafe { libc::mlock(source.pointer(), PAGE) };
    if locked != 0 {
        crate::skip("mlock refused");
    }
    assert_eq!(staging.take(0, source), INVALID);
}

fn flags_other_than_access_and_lock_do_not_matter() {
    let advised = [
        libc::MADV_WIPEONFORK,
        libc::MADV_DONTDUMP,
        libc::MADV_DONTFORK,
        libc::MADV_SEQUENTIAL,
        libc::MADV_MERGEABLE,
    ];
    for advice in advised {
        let (source, staging) = (Area::filled(1), Staging::new(1));
        let errno = source.advise(advice);
        if errno != 0 {
            println!("  advice {advice} not in this kernel (errno {errno})");
            continue;
        }
        assert_eq!(staging.take(0, source), Ok(()), "advice {advice}");
    }
    // Stacks are not refused, so an evictor must leave them out.
    for flag in [libc::MAP_NORESERVE, libc::MAP_STACK, libc::MAP_GROWSDOWN] {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flag;
        let (source, staging) = (Area::mapped(1, RW, flags, -1), Staging::new(1));
        source.fill(0, 1);
        assert_eq!(staging.take(0, source), Ok(()), "flag {flag:#x}");
    }
}

fn a_file_or_shared_source_is_invalid() {
    let memory = SharedMemory::create("fact", PAGE).unwrap();
    let fd = crate::death::raw(&memory.as_fd());
    for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
        let (source, staging) = (Area::mapped(1, RW, flags, fd), Staging::new(1));
        source.fill(0, 1);
        assert_eq!(staging.take(0, source), INVALID);
    }
}

fn a_range_over_two_mappings_is_invalid_and_moves_nothing() {
    let intact = |source: Area| assert_eq!(source.read(0), 10);
    // Of another protection.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    source.part(2, 2).protect(libc::PROT_READ);
    assert_eq!(staging.take(0, source), INVALID);
    intact(source);
    // One registered, one not.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    let ear = Ear::new(Features::default());
    ear.register(source.part(0, 2).range(), RegisterMode::MISSING)
        .unwrap();
    assert_eq!(staging.take(0, source), INVALID);
    intact(source);
    // Beyond the end of the source.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    source.part(2, 2).unmap();
    assert_eq!(staging.take(0, source), INVALID);
    intact(source);
    // No source at all.
    let (source, staging) = (Area::filled(4), Staging::new(4));
    source.unmap();
    let refused = staging.take(0, source);
    assert_eq!(refused, Err(UffdError::NotMapped { done: 0 }));
}

fn the_target_must_be_registered_with_the_same_userfaultfd() {
    let (source, staging) = (Area::filled(1), Staging::new(1));
    let other = Staging::new(1);
    let plain = Area::new(1);
    for target in [plain, other.area] {
        // SAFETY: areas are never covered by Rust references.
        let refused = unsafe { staging.ear.move_pages(target.at(0), source.range()) };
        assert_eq!(refused, INVALID);
    }
    // With write-protect tracking as well it is as good.
    let ear = Ear::new(Features::MOVE);
    ear.register(plain.range(), RegisterMode::MISSING_WP)
        .unwrap();
    // SAFETY: as above.
    unsafe { ear.move_pages(plain.at(0), source.range()) }.unwrap();
    assert_eq!(plain.read(0), 10);
}

fn the_shared_zero_page_moves_and_reads_zeros() {
    let staging = Staging::new(2);
    let touched = Area::new(1);
    assert_eq!(touched.read(0), 0);
    staging.take(0, touched).unwrap();
    let (ear, installed) = (Ear::new(Features::default()), Area::new(1));
    ear.register(installed.range(), RegisterMode::MISSING)
        .unwrap();
    ear.zeropage(installed.range(), false).unwrap();
    staging.take(1, installed).unwrap();
    assert_eq!([0, 1].map(|page| staging.area.read(page)), [0, 0]);
}

fn a_write_protected_page_moves() {
    let (ear, source) = (Ear::new(Features::PAGEFAULT_FLAG_WP), Area::filled(1));
    ear.register(source.range(), RegisterMode::MISSING_WP)
        .unwrap();
    ear.write_protect(source.range(), true).unwrap();
    let staging = Staging::new(1);
    staging.take(0, source).unwrap();
    assert_eq!(staging.area.read(0), 10);
}

/// Pages move while their table entries change. Linux 6.18 does not count the pages that it moved
/// after it had to look again, and then finds them at the target. So the moved pages are those that
/// it counted and, after EXISTS, those at the target from there on.
fn what_is_at_an_empty_target_after_exists_has_moved() {
    const PAGES: usize = 16;
    let source = Area::filled(PAGES);
    let ear = Ear::new(Features::PAGEFAULT_FLAG_WP);
    ear.register(source.range(), RegisterMode::MISSING_WP)
        .unwrap();
    let staging = Staging::new(PAGES);
    let (ear, stop) = (Arc::new(ear), Arc::new(AtomicBool::new(false)));
    let (other, stopped) = (ear.clone(), stop.clone());
    let restless = doing(move || {
        while !stopped.load(Ordering::Relaxed) {
            for on in [true, false] {
                let _ = other.write_protect(source.range(), on);
            }
        }
    });
    let there = || {
        let mut there = [0u8; PAGES];
        let start = staging.area.at(0).address() as *mut libc::c_void;
        // SAFETY: one byte for each page of the area.
        let result = unsafe { libc::mincore(start, PAGES * PAGE, there.as_mut_ptr()) };
        assert_eq!(result, 0);
        there.map(|byte| byte & 1 == 1)
    };
    let (begin, mut forgotten) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_millis(500) {
        assert_eq!(there(), [false; PAGES]);
        let (mut at, mut moved) = (0, [false; PAGES]);
        while at < PAGES {
            let done = match staging.take(at, source.part(at, PAGES - at)) {
                Ok(()) => PAGES - at,
                Err(UffdError::LayoutChanging { done }) if done > 0 => done as usize,
                Err(UffdError::Exists { .. }) => {
                    let run = there()[at..].iter().take_while(|is| **is).count();
                    forgotten += run;
                    run
                }
                other => panic!("{other:?} at {at}"),
            };
            assert!(done > 0, "EXISTS with nothing there");
            moved[at..at + done].fill(true);
            at += done;
        }
        assert_eq!(moved, there());
        for page in 0..PAGES {
            assert_eq!(staging.area.read(page), 10 + page as u8);
        }
        // Back, by the descriptor that raises no event.
        staging.area.advise(libc::MADV_DONTNEED);
        for page in 0..PAGES {
            ear.serve(source.at(page), 10 + page as u8);
        }
    }
    stop.store(true, Ordering::Relaxed);
    restless.done();
    println!("  {forgotten} pages moved and were not counted");
}

const HUGE: usize = 512;

/// A huge page, if this kernel gives one.
fn huge_page() -> Area {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let room = Area::mapped(2 * HUGE, RW, flags, -1);
    let skip = (room.address / PAGE).next_multiple_of(HUGE) - room.address / PAGE;
    let huge = room.part(skip, HUGE);
    huge.advise(libc::MADV_HUGEPAGE);
    (0..HUGE).for_each(|page| huge.fill(page, page as u8));
    if !is_huge(huge) {
        crate::skip("no transparent huge page here (off, or memory is fragmented)");
    }
    huge
}

fn is_huge(area: Area) -> bool {
    use undercroft_sys::pagemap::{Category, Pagemap};
    let mut found = Vec::new();
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    pagemap
        .scan(area.range(), Category::HUGE, &mut found)
        .unwrap();
    let pages: u64 = found.iter().map(|(range, _)| range.count().0).sum();
    pages == HUGE as u64
}

fn a_huge_page_is_split_and_moves() {
    let source = huge_page();
    let ear = Ear::new(Features::default());
    ear.register(source.range(), RegisterMode::MISSING).unwrap();
    assert!(is_huge(source), "registering does not split it");
    let staging = Staging::new(64);
    let start = Instant::now();
    staging.take(0, source.part(16, 1)).unwrap();
    let split = start.elapsed();
    let start = Instant::now();
    staging.take(1, source.part(17, 63)).unwrap();
    println!(
        "  first page {split:?} (splits), next 63 {:?}",
        start.elapsed()
    );
    assert!(!is_huge(source));
    assert_eq!([0, 1, 63].map(|page| staging.area.read(page)), [16, 17, 79]);
}

fn a_fork_shared_huge_page_moves_once_populated() {
    let (source, staging) = (huge_page(), Staging::new(2));
    let _child = child(|_| {
        pause(SOON);
        0
    });
    assert_eq!(staging.take(0, source.part(1, 1)), BUSY);
    populate(source.part(1, 1));
    staging.take(0, source.part(1, 1)).unwrap();
    assert_eq!(staging.area.read(0), 1);
}

fn another_process_cannot_move() {
    let (source, staging) = (Area::filled(1), Staging::new(1));
    let range: VirtRange = source.range();
    let target = staging.area.at(0);
    let uffd = &staging.ear;
    let mut other = child(|_| {
        // SAFETY: refused, so nothing moves.
        let refused = unsafe { uffd.move_pages(target, range) };
        i32::from(refused != INVALID)
    });
    assert_eq!(other.exit_status(), 0);
    assert_eq!(source.read(0), 10);
}

/// Two threads increment a word in each of eight pages for a while, and `evict` takes pages from
/// under them. Every missing page is served with the bytes that `evict` returned. Returns the
/// increments made, pages evicted, and increments lost.
fn count_while_evicting(evict: impl Fn(Area) -> Option<[u8; PAGE]>) -> (u64, u64, u64) {
    const PAGES: usize = 8;
    let (mut ear, area) = Ear::with_area(Features::default(), PAGES);
    (0..PAGES).for_each(|page| area.fill(page, 0));
    let stop = Arc::new(AtomicBool::new(false));
    let writers = [0, 1].map(|writer| {
        let stop = stop.clone();
        doing(move || {
            let (mut made, mut lost) = (0u64, 0u64);
            let mut expected = [0u64; PAGES];
            while !stop.load(Ordering::Relaxed) {
                for (page, expected) in expected.iter_mut().enumerate() {
                    let word = (area.address + page * PAGE + 64 * writer) as *mut u64;
                    // SAFETY: an aligned word of a mapped page that only this thread writes.
                    let found = unsafe { word.read_volatile() };
                    lost += u64::from(found != *expected);
                    *expected = found + 1;
                    // SAFETY: as above.
                    unsafe { word.write_volatile(*expected) };
                    made += 1;
                }
            }
            (made, lost)
        })
    });
    let (start, mut evicted, mut stored) = (Instant::now(), 0, [None; PAGES]);
    let serve = |ear: &mut Ear, stored: &mut [Option<[u8; PAGE]>; PAGES], ms| {
        while let Some(Message::Fault { page, .. }) = ear.hear(ms) {
            let index = (page.0 - area.at(0).0) as usize;
            if let Some(bytes) = stored[index].take() {
                ear.copy(page, &bytes, false).unwrap();
            }
            ear.wake(area.range()).unwrap();
        }
    };
    for page in (0..PAGES).cycle() {
        if start.elapsed() > Duration::from_millis(400) {
            break;
        }
        if stored[page].is_none() {
            stored[page] = evict(area.part(page, 1));
            evicted += u64::from(stored[page].is_some());
        }
        // Some pages must be resident, or the writers make no progress.
        serve(&mut ear, &mut stored, u64::from(page == 0));
    }
    stop.store(true, Ordering::Relaxed);
    serve(&mut ear, &mut stored, 50);
    let [a, b] = writers.map(|writer| writer.done());
    (a.0 + b.0, evicted, a.1 + b.1)
}

fn no_write_is_lost_when_pages_move_under_writers() {
    let staging = Staging::new(1);
    let (made, evicted, lost) = count_while_evicting(|page| {
        staging.take(0, page).ok()?;
        let bytes = bytes_of(staging.area);
        evict(staging.area, 0);
        Some(bytes)
    });
    println!("  {made} increments, {evicted} evictions, {lost} lost");
    assert!(evicted > 20 && made > 1000 && lost == 0);
}

fn a_write_is_lost_when_pages_are_read_and_dropped_without_protection() {
    let (made, evicted, lost) = count_while_evicting(|page| {
        let bytes = bytes_of(page);
        // The time that a storing thread would need, so that the gap is realistic.
        pause(1);
        evict(page, 0);
        Some(bytes)
    });
    println!("  {made} increments, {evicted} evictions, {lost} lost");
    assert!(lost > 0, "the fact that moving is compared with");
}

fn bytes_of(page: Area) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    // SAFETY: a mapped page, copied while others may write it; the bytes may be torn and are only
    // stored.
    unsafe { std::ptr::copy_nonoverlapping(page.address as *const u8, bytes.as_mut_ptr(), PAGE) };
    bytes
}

/// Between the moment when an agent decides to take a page out and the moment when it does, another
/// thread may unmap it, and a third may map memory of its own there. A move is refused if the
/// userfaultfd has not reported the unmapping. A drop is not.
fn a_changed_layout_holds_back_a_move_and_not_a_drop() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS.with(Features::MOVE), 1);
    let staging = Area::new(1);
    ear.register(staging.range(), RegisterMode::MISSING)
        .unwrap();
    let unmapper = doing(move || area.unmap());
    unmapper.blocked();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: the place is free, or this fails.
    let again = unsafe { libc::mmap(area.pointer(), area.bytes(), RW, flags, -1, 0) };
    assert_eq!(again as usize, area.address, "another thread's mapping");
    area.fill(0, 77);
    // SAFETY: areas are never covered by Rust references.
    let moved = unsafe { ear.move_pages(staging.at(0), area.range()) };
    assert_eq!(moved, Err(UffdError::LayoutChanging { done: 0 }));
    assert_eq!(area.read(0), 77);
    assert_eq!(area.advise(libc::MADV_DONTNEED), 0);
    assert_eq!(area.read(0), 0, "the other thread's byte is lost");
    assert!(matches!(ear.hear(SOON), Some(Message::Unmap(_))));
    unmapper.done();
}
