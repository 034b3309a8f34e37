//! Reading another process's memory, and what the kernel reports about it.

use std::os::fd::AsFd;

use undercroft_base::VirtRange;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::pagemap::{Category, PageIs, Pagemap};
use undercroft_sys::process;
use undercroft_sys::procfs::{self, Vma};
use undercroft_sys::uffd::{Features, RegisterMode, UffdError};

use crate::bed::*;

crate::facts! {
    a_remote_read_of_a_missing_page_faults_like_a_touch,
    a_remote_read_of_an_inaccessible_page_fails,
    touching_a_hole_through_another_mapping_fills_it_with_zeros_unnoticed,
    pagemap_scan_tells_present_zero_and_missing_pages,
    guards_and_poison_look_swapped_and_their_words_tell_them_apart,
    a_page_in_the_kernel_s_swap_is_told_from_marks_and_its_touch_is_no_fault_of_ours,
    the_exclusive_bit_does_not_tell_what_a_move_will_say,
    an_open_pagemap_is_empty_after_exec,
    the_robust_list_head_lies_in_the_mapping_of_the_thread_s_control_block,
    wiped_and_uncopied_mappings_are_told_by_their_flags,
    locking_a_registered_range_faults_its_missing_pages,
    a_core_dump_raises_no_fault_and_lacks_missing_pages,
}

fn a_remote_read_of_a_missing_page_faults_like_a_touch() {
    let client = child(|parent| {
        let (ear, area) = Ear::with_area(Features::default(), 2);
        evict(area, 1);
        parent.hand_over(&[ear.as_fd()]);
        0
    });
    let mut ear = client.uffd();
    let address = registered_address(client.pid);
    let pid = client.pid;
    let reader = doing(move || {
        let mut bytes = vec![0; 2 * PAGE];
        process::read_memory(pid, address, &mut bytes).unwrap();
        (bytes[0], bytes[PAGE])
    });
    let fault = ear.fault();
    assert_eq!(fault.page.address(), address + PAGE as u64);
    ear.serve(fault.page, 99);
    assert_eq!(reader.done(), (10, 99));
}

/// The start of the first mapping tracked by a userfaultfd (`um`).
fn registered_address(pid: u32) -> u64 {
    let mut found = Vec::new();
    procfs::mappings_with_flags(pid, &mut [("um", &mut found)]).unwrap();
    found[0].start.address()
}

fn a_remote_read_of_an_inaccessible_page_fails() {
    let area = Area::filled(1);
    area.protect(libc::PROT_NONE);
    let client = child(|_| {
        pause(SOON);
        0
    });
    let got = process::read_memory(client.pid, area.range().start.address(), &mut [0; 8]);
    println!("  process_vm_readv of PROT_NONE memory: {got:?}");
    // FOLL_FORCE is for ptrace only. So the evictor must not rely on reading such pages in place.
    assert!(got.is_err());
}

fn touching_a_hole_through_another_mapping_fills_it_with_zeros_unnoticed() {
    let memory = SharedMemory::create("fact", PAGE).unwrap();
    let (client, manager) = (Area::shared(&memory), Area::shared(&memory));
    client.fill(0, 7);
    let mut ear = Ear::new(Features::default());
    ear.register(client.range(), RegisterMode::MISSING).unwrap();
    memory.punch(0, PAGE).unwrap();
    assert_eq!(manager.read(0), 0);
    assert_eq!(client.read(0), 0, "the client reads the zeros");
    ear.silent();
}

fn pagemap_scan_tells_present_zero_and_missing_pages() {
    let area = Area::new(6);
    area.fill(1, 5);
    assert_eq!(area.read(2), 0);
    area.fill(4, 5);
    evict(area, 4);
    let mut found = Vec::new();
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let any = Category(Category::PRESENT.0 | Category::PFNZERO.0);
    pagemap.scan(area.range(), any, &mut found).unwrap();
    let expected = [
        (area.part(1, 1).range(), Category::PRESENT),
        (area.part(2, 1).range(), any),
    ];
    assert_eq!(found, expected);
}

/// The findings of a scan and of the page's word for a page of this process.
fn seen(area: Area) -> (Vec<Category>, PageIs) {
    let mut found = Vec::new();
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
    pagemap.scan(area.range(), any, &mut found).unwrap();
    let is = found.into_iter().map(|(_, is)| is).collect();
    (is, pagemap.place(area.at(0)).unwrap())
}

fn guards_and_poison_look_swapped_and_their_words_tell_them_apart() {
    let ear = Ear::new(Features::POISON);
    let area = Area::filled(3);
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    let (poisoned, guarded, plain) = (area.part(0, 1), area.part(1, 1), area.part(2, 1));
    evict(poisoned, 0);
    ear.poison(poisoned.range()).unwrap();
    let swapped = vec![Category::SWAPPED];
    let mark = if rustix::process::geteuid().is_root() {
        PageIs::Mark
    } else {
        PageIs::Swapped
    };
    assert_eq!(seen(poisoned), (swapped.clone(), mark));
    assert_eq!(seen(plain), (vec![Category::PRESENT], PageIs::Present));
    evict(plain, 0);
    assert_eq!(seen(plain), (vec![], PageIs::Absent));
    match guarded.advise(crate::layout::MADV_GUARD_INSTALL) {
        0 => {}
        libc::EINVAL => crate::skip("no MADV_GUARD_INSTALL before Linux 6.13"),
        other => panic!("errno {other}"),
    }
    // Linux 6.13 and 6.14 have guards, and no word for them.
    let (scanned, place) = seen(guarded);
    assert_eq!(scanned, swapped);
    assert!([PageIs::Guard, mark].contains(&place), "{place:?}");
    println!("  a guard's word says {place:?}");
}

/// A swap file of a few pages, or the swap that is on. Gone with the fact.
struct TinySwap(Option<tempfile::NamedTempFile>);

impl TinySwap {
    fn on() -> TinySwap {
        let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
        if swaps.lines().count() > 1 {
            return TinySwap(None);
        }
        if std::env::var_os("UNDERCROFT_TEST_SWAPON").is_none() {
            crate::skip("no swap is on; UNDERCROFT_TEST_SWAPON=1 switches a small file on and off");
        }
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        std::io::Write::write_all(&mut file.as_file(), &vec![0; 256 * PAGE]).unwrap();
        let run = |tool: &str| {
            let status = std::process::Command::new(tool).arg(file.path()).status();
            assert!(status.unwrap().success(), "{tool}");
        };
        run("mkswap");
        run("swapon");
        TinySwap(Some(file))
    }
}

impl Drop for TinySwap {
    fn drop(&mut self) {
        if let Some(file) = &self.0 {
            let off = std::process::Command::new("swapoff")
                .arg(file.path())
                .status();
            assert!(off.unwrap().success(), "swapoff {:?}", file.path());
        }
    }
}

fn a_page_in_the_kernel_s_swap_is_told_from_marks_and_its_touch_is_no_fault_of_ours() {
    let _swap = TinySwap::on();
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 2);
    let page = area.part(1, 1);
    until("the kernel swaps the page", || {
        page.advise(libc::MADV_PAGEOUT);
        seen(page).1 == PageIs::Swapped
    });
    assert_eq!(seen(page).0, [Category::SWAPPED]);
    let installed = ear.copy(page.at(0), &[9; PAGE], false);
    assert!(
        matches!(installed, Err(UffdError::Exists { .. })),
        "{installed:?}"
    );
    assert_eq!(page.read(0), 11);
    assert_eq!(seen(page).1, PageIs::Present);
    ear.silent();
}

fn entry_is_exclusive(area: Area) -> bool {
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let mut buffer = [0; 8];
    let mut entries = pagemap.entries(area.at(0), &mut buffer).unwrap();
    entries.next().unwrap().exclusive()
}

fn the_exclusive_bit_does_not_tell_what_a_move_will_say() {
    let area = Area::filled(1);
    assert!(entry_is_exclusive(area));
    let mut sharing = child(|parent| {
        parent.wait();
        0
    });
    assert!(!entry_is_exclusive(area), "shared with a child");
    sharing.go();
    sharing.exit_status();
    // One process maps it again, so the bit is set again; a move still returns Busy (see `moving`).
    assert!(entry_is_exclusive(area));
}

fn an_open_pagemap_is_empty_after_exec() {
    let area = Area::filled(1);
    let client = child(|parent| {
        parent.wait();
        crate::death::exec_sleep()
    });
    let pagemap = Pagemap::open(client.pid).unwrap();
    let scan = || {
        let mut found = Vec::new();
        let result = pagemap.scan(area.range(), Category::PRESENT, &mut found);
        result.map(|()| found.len())
    };
    assert_eq!(scan().unwrap(), 1);
    client.go();
    until("exec", || matches!(scan(), Ok(0) | Err(_)));
    println!("  a scan after exec gives {:?}", scan());
}

fn vma_of(address: u64) -> VirtRange {
    let mut text = String::new();
    procfs::read_maps(std::process::id(), &mut text).unwrap();
    let page = undercroft_base::VirtPage::of(address);
    let mut vmas = text.lines().filter_map(Vma::parse);
    vmas.find(|vma| vma.range.contains(page)).unwrap().range
}

fn the_robust_list_head_lies_in_the_mapping_of_the_thread_s_control_block() {
    let thread = doing(|| {
        let local = 0u8;
        let stack = vma_of(&raw const local as u64);
        let head = process::robust_list_head(process::thread_id()).unwrap();
        (stack, vma_of(head))
    });
    let (stack, control_block) = thread.done();
    assert_eq!(stack, control_block, "glibc puts it on top of the stack");
    // Another process may ask too. So the manager finds memory that must never be managed.
    let main = std::process::id();
    let head = process::robust_list_head(main).unwrap();
    let mut other = child(move |_| i32::from(process::robust_list_head(main) != Some(head)));
    assert_eq!(other.exit_status(), 0);
    let main_block = vma_of(head);
    println!("  main thread's control block is in {main_block:?}");
}

fn wiped_and_uncopied_mappings_are_told_by_their_flags() {
    let me = std::process::id();
    for (advice, flag) in [(libc::MADV_WIPEONFORK, "wf"), (libc::MADV_DONTFORK, "dc")] {
        let area = Area::filled(3);
        assert_eq!(area.part(1, 1).advise(advice), 0);
        let mut found = Vec::new();
        procfs::mappings_with_flags(me, &mut [(flag, &mut found)]).unwrap();
        assert!(found.contains(&area.part(1, 1).range()), "{flag}");
    }
}

fn locking_a_registered_range_faults_its_missing_pages() {
    let (mut ear, area) = Ear::with_area(Features::default(), 2);
    evict(area, 1);
    // SAFETY: locks pages of ours; waits until the missing one is served.
    let locker = doing(move || errno(unsafe { libc::mlock(area.pointer(), area.bytes()) }.into()));
    assert_eq!(ear.fault().page, area.at(1));
    ear.serve(area.at(1), 7);
    assert_eq!(locker.done(), 0);
}

fn a_core_dump_raises_no_fault_and_lacks_missing_pages() {
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    let plain = pattern.trim() == "core";
    if !plain {
        crate::skip(&format!(
            "core_pattern is {:?}: no core file here",
            pattern.trim()
        ));
    }
    let dir = std::env::temp_dir().join(format!("undercroft-core-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let mut client = child(|parent| {
        std::env::set_current_dir(&dir).unwrap();
        let limit = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: reads one live structure.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &limit) };
        let ear = Ear::new(Features::default());
        let area = Area::new(2);
        // Two marks that no other memory of this process has whole.
        for (page, byte) in [(0, 0xc3), (1, 0x9d)] {
            area.fill(page, byte);
        }
        ear.register(area.range(), RegisterMode::MISSING).unwrap();
        evict(area, 1);
        parent.hand_over(&[ear.as_fd()]);
        // SAFETY: ends this child with a core dump.
        unsafe { libc::abort() };
    });
    let mut ear = client.uffd();
    client.go();
    let status = client.end();
    ear.silent();
    let cores: Vec<_> = std::fs::read_dir(&dir).unwrap().flatten().collect();
    let bytes = cores
        .first()
        .map(|core| std::fs::read(core.path()).unwrap());
    std::fs::remove_dir_all(&dir).unwrap();
    let Some(bytes) = bytes.filter(|_| libc::WCOREDUMP(status)) else {
        crate::skip("no core was written");
    };
    let holds = |byte: u8| {
        bytes
            .windows(PAGE)
            .step_by(PAGE)
            .any(|page| page == [byte; PAGE])
    };
    assert!(holds(0xc3) && !holds(0x9d));
}
