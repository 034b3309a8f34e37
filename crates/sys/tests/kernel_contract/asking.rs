//! Questions about an address space: they change nothing in it.

use std::os::fd::{AsFd, AsRawFd};

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::held;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::pagemap::{Pagemap, PagemapEntry};
use undercroft_sys::uffd::{Features, Message, RegisterMode, UffdError};

use crate::bed::*;
use crate::death::exec_sleep;

crate::facts! {
    asking_whether_a_space_is_gone_changes_no_page,
    asking_whether_a_space_is_gone_wakes_nobody,
    a_space_is_gone_after_exit_and_exec_and_not_while_an_event_waits,
    a_space_lives_on_in_a_process_that_shares_it,
    the_lowest_page_is_the_lowest_that_can_be_registered,
}

/// Where the range of the question begins: the only place whose mapping the kernel looks at.
const ASKED: usize = 0x4000_0000;
const FIXED: i32 = libc::MAP_FIXED_NOREPLACE;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const PAGES: usize = 4;
const MINOR: RegisterMode = RegisterMode {
    missing: true,
    wp: false,
    minor: true,
};

fn mapped_there(pages: usize, flags: i32, fd: i32) -> Area {
    let address = ASKED as *mut libc::c_void;
    // SAFETY: a fresh mapping that replaces none.
    let start = unsafe { libc::mmap(address, pages * PAGE, RW, flags | FIXED, fd, 0) };
    assert_eq!(start as usize, ASKED, "{}", std::io::Error::last_os_error());
    let area = Area {
        address: ASKED,
        pages,
    };
    area.advise(libc::MADV_NOHUGEPAGE);
    area
}

/// The kernel's words of the pages, and the first byte of those that are there.
fn state(area: Area, reads: bool) -> Vec<(PagemapEntry, Option<u8>)> {
    let mut words = vec![0u8; 8 * area.pages];
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let entries = pagemap.entries(area.at(0), &mut words).unwrap();
    let byte = |(page, entry): (usize, PagemapEntry)| {
        let there = entry.present() && reads;
        (entry, there.then(|| area.read(page)))
    };
    entries.enumerate().map(byte).collect()
}

/// Asks with a userfaultfd of every mode, and compares.
fn unchanged(what: &str, ear: &Ear, area: Area) {
    let reads = what != "one cannot be read";
    let before = state(area, reads);
    assert_eq!(before.len(), area.pages, "{what}");
    for _ in 0..100 {
        assert!(!held::is_gone(ear.as_fd()), "{what}");
        assert!(held::address_spaces().unwrap() > 0, "{what}");
    }
    assert_eq!(state(area, reads), before, "{what}");
}

fn asking_whether_a_space_is_gone_changes_no_page() {
    let ear = Ear::new(Features::EVENTS.with(Features::POISON));
    let fresh = || mapped_there(PAGES, PRIVATE, -1);
    let registered = |mode| {
        let area = fresh();
        ear.register(area.range(), mode).unwrap();
        area
    };
    unchanged(
        "nothing is mapped",
        &ear,
        Area {
            address: ASKED,
            pages: PAGES,
        },
    );
    for (what, mode) in [
        ("missing", RegisterMode::MISSING),
        ("missing or protected", RegisterMode::MISSING_WP),
    ] {
        let area = registered(mode);
        unchanged(what, &ear, area);
        ear.serve(area.at(1), 7);
        if mode.wp {
            ear.write_protect(area.part(1, 1).range(), true).unwrap();
        }
        unchanged("one is there", &ear, area);
        ear.poison(area.part(2, 1).range()).unwrap();
        unchanged("one is poisoned", &ear, area);
        area.part(1, 1).protect(libc::PROT_READ);
        unchanged("one cannot be written", &ear, area);
        area.part(1, 1).protect(libc::PROT_NONE);
        unchanged("one cannot be read", &ear, area);
        // Unregistered first: otherwise this would wait for its event.
        ear.unregister(area.range()).unwrap();
        area.unmap();
    }
    let area = fresh();
    area.fill(1, 9);
    unchanged("not registered", &ear, area);
    area.unmap();

    // The file has pages that are not mapped: what a CONTINUE of one page would map.
    let memory = SharedMemory::create("asked", PAGES * PAGE).unwrap();
    memory.bytes_in(0, &[5; 2 * PAGE]);
    for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
        let area = mapped_there(PAGES, flags, memory.as_fd().as_raw_fd());
        unchanged("a file, not registered", &ear, area);
        ear.register(area.range(), RegisterMode::MISSING).unwrap();
        unchanged("a file", &ear, area);
        ear.unregister(area.range()).unwrap();
        if flags == libc::MAP_SHARED {
            let other = Ear::new(Features::MINOR_SHMEM); // the program's own
            other.register(area.range(), MINOR).unwrap();
            unchanged("a file with faults of its own", &ear, area);
            other.unregister(area.range()).unwrap();
        }
        area.unmap();
    }
    huge_pages(&ear);
}

/// Huge pages that nothing was reserved for: no machine needs a pool of them for this.
fn huge_pages(ear: &Ear) {
    const HUGE: usize = 512;
    let flags = PRIVATE | libc::MAP_HUGETLB | libc::MAP_NORESERVE;
    let area = mapped_there(HUGE, flags, -1);
    unchanged("huge, not registered", ear, area);
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    unchanged("huge", ear, area);
}

fn asking_whether_a_space_is_gone_wakes_nobody() {
    let mut ear = Ear::new(Features::EVENTS);
    let area = mapped_there(1, PRIVATE, -1);
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    let reader = doing(move || area.read(0));
    ear.fault();
    (0..100).for_each(|_| assert!(!held::is_gone(ear.as_fd())));
    reader.blocked();
    ear.silent();
    ear.serve(area.at(0), 3);
    assert_eq!(reader.done(), 3);
}

fn a_space_is_gone_after_exit_and_exec_and_not_while_an_event_waits() {
    for execs in [false, true] {
        let client = child(|parent| {
            let (ear, area) = Ear::with_area(Features::EVENTS, 1);
            let dropping = doing(move || area.advise(libc::MADV_DONTNEED));
            parent.hand_over(&[ear.as_fd()]);
            dropping.done();
            drop(ear);
            if execs { exec_sleep() } else { 0 }
        });
        let mut ear = client.uffd();
        until("an event", || {
            let page = Area::new(1).at(0);
            matches!(
                ear.try_serve(page, 1),
                Err(UffdError::LayoutChanging { .. })
            )
        });
        assert!(!held::is_gone(ear.as_fd()), "an event waits");
        assert_eq!(held::address_spaces().unwrap(), 1);
        assert!(matches!(ear.hear(SOON), Some(Message::Remove(_))));
        assert!(!held::is_gone(ear.as_fd()));
        client.go();
        until("the end", || held::is_gone(ear.as_fd()));
        assert_eq!(held::address_spaces().unwrap(), 0);
    }
}

fn a_space_lives_on_in_a_process_that_shares_it() {
    let mut client = child(|parent| {
        let (ear, _area) = Ear::with_area(Features::EVENTS, 1);
        parent.hand_over(&[ear.as_fd()]);
        // SAFETY: a vfork by its system call; the child only waits, and never returns from here.
        if unsafe { libc::syscall(libc::SYS_vfork) } == 0 {
            // SAFETY: takes no arguments.
            let leader = unsafe { libc::getppid() };
            // SAFETY: signals the leader, which shares this memory.
            unsafe { libc::kill(leader, libc::SIGKILL) };
            pause(3 * QUIET);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        0
    });
    let ear = client.uffd();
    client.go();
    client.end();
    assert!(!held::is_gone(ear.as_fd()), "the other process has it");
    until("the end", || held::is_gone(ear.as_fd()));
}

fn the_lowest_page_is_the_lowest_that_can_be_registered() {
    let ear = Ear::new(Features::EVENTS);
    let lowest = ear.lowest_page();
    let area = |page: VirtPage| {
        let address = page.address() as *mut libc::c_void;
        // SAFETY: a fresh mapping that replaces none.
        let start = unsafe { libc::mmap(address, PAGE, RW, PRIVATE | FIXED, -1, 0) };
        (start == address).then_some(VirtRange::one(page))
    };
    let mode = RegisterMode::MISSING_WP;
    let at_lowest = area(lowest).expect("a mapping at the lowest address");
    assert_eq!(ear.register(at_lowest, mode), Ok(()));
    assert_eq!(
        ear.wake(VirtRange::new(lowest, lowest.plus(1 << 30))),
        Ok(())
    );
    let Some(below) = lowest.0.checked_sub(1).map(VirtPage) else {
        return; // since Linux 6.16 the kernel accepts all
    };
    assert_eq!(ear.wake(VirtRange::one(below)), Err(UffdError::Invalid));
    // The kernel may let this process map pages that it does not let it register.
    if let Some(below) = area(below) {
        assert_eq!(ear.register(below, mode), Err(UffdError::Invalid));
    }
}
