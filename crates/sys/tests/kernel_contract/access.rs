//! Which pages were used: Accessed bits by a walk of the page tables.

use std::os::fd::AsFd;
use std::time::Instant;

use undercroft_base::{VirtPage, VirtRange};
use undercroft_sys::access::vcpu::VirtualCpus;
use undercroft_sys::access::{AccessError, AccessScanner, BlockScan, ClearRefs, blocks_of, clear};
use undercroft_sys::process::PidFd;

use crate::bed::*;

crate::facts! {
    a_scan_finds_exactly_the_pages_that_were_touched,
    every_process_finds_where_the_kernel_maps_memory,
    clear_refs_clears_every_bit_of_a_process_and_no_other,
    a_page_that_came_back_has_another_frame,
    a_huge_page_is_used_as_a_whole,
    a_page_mapped_by_an_installation_counts_as_used,
    a_scan_of_a_process_that_is_gone_says_so,
    a_scan_costs_nanoseconds_a_page,
    a_thread_that_runs_no_virtual_cpu_has_no_registers,
}

fn scanner() -> AccessScanner {
    match AccessScanner::open() {
        Ok(scanner) => scanner,
        Err(error) => crate::skip(&format!("no access bits here: {error}")),
    }
}

/// Whether this machine runs DAMON on its memory. Some times a second that clears the bit of one
/// page in each of its thousands of regions.
fn damon_runs() -> bool {
    let Ok(threads) = std::fs::read_dir("/sys/kernel/mm/damon/admin/kdamonds") else {
        return false;
    };
    let state = |of: std::fs::DirEntry| std::fs::read_to_string(of.path().join("state"));
    threads
        .flatten()
        .any(|of| state(of).is_ok_and(|state| state.trim() == "on"))
}

/// New pages that one CPU keeps before they enter the kernel's lists (`struct folio_batch`).
const BATCH: usize = 31;

/// `found` are the pages of `touched`, all of them; where DAMON runs, but for one in two hundred.
fn assert_found(found: &[usize], touched: &[usize]) {
    let lost = touched.iter().filter(|page| !found.contains(page)).count();
    let most = if damon_runs() { touched.len() / 200 } else { 0 };
    assert!(lost <= most, "{lost} of {} pages were lost", touched.len());
    assert_eq!(found.len(), touched.len() - lost, "others were found");
}

/// (present, accessed) pages of a range of a process.
fn look(scanner: &mut AccessScanner, pid: u32, range: VirtRange) -> (Vec<usize>, Vec<usize>) {
    let (mut present, mut accessed) = (Vec::new(), Vec::new());
    scan(scanner, pid, range, |block, at, page| {
        if block.is_present(at) {
            present.push(page);
        }
        if block.is_accessed(at) {
            accessed.push(page);
        }
    });
    (present, accessed)
}

/// Calls `each` with every page of `range` in blocks that have any: block, place in it, place in
/// the range.
fn scan(
    scanner: &mut AccessScanner,
    pid: u32,
    range: VirtRange,
    mut each: impl FnMut(&BlockScan, usize, usize),
) {
    let result = scanner.scan(pid, &blocks_of(&[range]), |block| {
        for at in 0..512 {
            let page = block.start.plus(at as u64);
            if range.contains(page) {
                each(block, at, (page.0 - range.start.0) as usize);
            }
        }
    });
    result.unwrap();
}

fn a_scan_finds_exactly_the_pages_that_were_touched() {
    let mut scanner = scanner();
    let own = std::process::id();
    let area = Area::new(20_000);
    assert_eq!(look(&mut scanner, own, area.range()), (vec![], vec![]));
    let touched: Vec<usize> = (0..20_000).filter(|page| page % 7 == 3).collect();
    for page in &touched {
        area.fill(*page, 1);
    }
    let (present, accessed) = look(&mut scanner, own, area.range());
    assert_eq!(present, touched);
    assert_found(&accessed, &touched);
    let myself = PidFd::open(own).unwrap();
    clear(myself.as_fd(), &[area.range()]).unwrap();
    let (present, left) = look(&mut scanner, own, area.range());
    // If another CPU filled them, its last pages are in no list yet and keep their bits.
    let most = BATCH * std::thread::available_parallelism().map_or(1, usize::from);
    println!("  {} bits are left", left.len());
    assert!(present == touched && left.len() <= most);
    let again: Vec<usize> = touched
        .iter()
        .copied()
        .filter(|page| page % 3 == 0)
        .collect();
    for page in &again {
        assert_eq!(area.read(*page), 1);
    }
    let (present, accessed) = look(&mut scanner, own, area.range());
    println!(
        "  touched {} of {}, found {}",
        again.len(),
        present.len(),
        accessed.len()
    );
    assert_eq!(present, touched);
    let used: Vec<usize> = (touched.iter().copied())
        .filter(|page| again.contains(page) || left.contains(page))
        .collect();
    assert_found(&accessed, &used);
}

/// The search begins at a process's own top table, so each process goes another way.
fn every_process_finds_where_the_kernel_maps_memory() {
    drop(scanner()); // or SKIPPED
    let area = Area::filled(64);
    for _ in 0..24 {
        let mut client = child(move |_| {
            let mut scanner = scanner();
            area.fill(7, 3);
            let (present, _) = look(&mut scanner, std::process::id(), area.range());
            i32::from(!present.contains(&7))
        });
        assert_eq!(
            client.exit_status(),
            0,
            "a page that was just written was not seen"
        );
    }
}

fn clear_refs_clears_every_bit_of_a_process_and_no_other() {
    let mut scanner = scanner();
    let area = Area::filled(64);
    let client = child(|_| {
        pause(SOON);
        0
    });
    for page in 0..64 {
        area.fill(page, 2);
    }
    let own = std::process::id();
    ClearRefs::open(own).unwrap().clear().unwrap();
    assert_eq!(look(&mut scanner, own, area.range()).1, Vec::<usize>::new());
    let (present, accessed) = look(&mut scanner, client.pid, area.range());
    assert_eq!(present.len(), 64);
    println!("  bits of a fork child's pages: {}", accessed.len());
}

fn a_page_that_came_back_has_another_frame() {
    let mut scanner = scanner();
    let area = Area::new(512);
    let fill = |area: Area| (0..512).for_each(|page| area.fill(page, 1));
    fill(area);
    let frames = |scanner: &mut AccessScanner| {
        let mut frames = vec![0; 512];
        scan(
            scanner,
            std::process::id(),
            area.range(),
            |block, at, page| {
                frames[page] = block.frames[at];
            },
        );
        frames
    };
    let before = frames(&mut scanner);
    assert_eq!(frames(&mut scanner), before);
    area.advise(libc::MADV_DONTNEED);
    fill(Area::new(512)); // takes the frames that the first had
    fill(area);
    let after = frames(&mut scanner);
    let same = (0..512).filter(|at| before[*at] == after[*at]).count();
    println!("  {same} of 512 look the same");
    assert!(same < 32);
}

fn a_huge_page_is_used_as_a_whole() {
    let mut scanner = scanner();
    let area = Area::new(2048);
    if area.advise(libc::MADV_HUGEPAGE) != 0 {
        crate::skip("this kernel has no transparent huge pages");
    }
    let first = area.range().start.0.next_multiple_of(512);
    let block = VirtRange::new(
        undercroft_base::VirtPage(first),
        undercroft_base::VirtPage(first + 512),
    );
    area.fill((first - area.range().start.0) as usize + 17, 1);
    let (present, accessed) = look(&mut scanner, std::process::id(), block);
    if present.len() == 1 {
        crate::skip("the kernel made no huge page");
    }
    assert_eq!((present.len(), accessed.len()), (512, 512));
    ClearRefs::open(std::process::id())
        .unwrap()
        .clear()
        .unwrap();
    let (present, accessed) = look(&mut scanner, std::process::id(), block);
    assert_eq!((present.len(), accessed.len()), (512, 0));
}

fn a_page_mapped_by_an_installation_counts_as_used() {
    let mut scanner = scanner();
    let (ear, area) = Ear::with_area(undercroft_sys::uffd::Features::default(), 8);
    area.advise(libc::MADV_DONTNEED);
    for at in [2, 3] {
        ear.serve(area.at(at), 5);
    }
    let found = look(&mut scanner, std::process::id(), area.range());
    assert_eq!(found, (vec![2, 3], vec![2, 3]), "no thread touched them");
}

fn a_scan_of_a_process_that_is_gone_says_so() {
    let mut scanner = scanner();
    let range = Area::filled(1).range();
    let mut client = child(|_| 0);
    client.end();
    let gone = scanner.scan(client.pid, &blocks_of(&[range]), |_| {
        panic!("it has no pages")
    });
    assert!(matches!(gone, Err(AccessError::Gone)), "{gone:?}");
}

fn a_scan_costs_nanoseconds_a_page() {
    drop(scanner()); // or SKIPPED
    let began = Instant::now();
    let mut scanner = scanner();
    println!("  opened in {:?}", began.elapsed());
    let pages = 50_000;
    let area = Area::new(pages);
    for page in 0..pages {
        area.fill(page, 1);
    }
    let all = ClearRefs::open(std::process::id()).unwrap();
    let myself = PidFd::open(std::process::id()).unwrap();
    let (mut scans, mut clears, mut colds) = (Vec::new(), Vec::new(), Vec::new());
    let mut whole_rounds = 0;
    for _ in 0..9 {
        (0..pages).for_each(|page| area.write(page, 1));
        let began = Instant::now();
        let mut blocks = Vec::new();
        let wanted = blocks_of(&[area.range()]);
        let result = scanner.scan(std::process::id(), &wanted, |block| {
            blocks.push((block.start, block.accessed));
        });
        result.unwrap();
        scans.push(began.elapsed());
        let is_used = |page: VirtPage| {
            let of = blocks
                .iter()
                .find(|(start, _)| (*start..start.plus(512)).contains(&page));
            of.is_some_and(|(start, used)| {
                let at = (page.0 - start.0) as usize;
                used[at / 64] >> (at % 64) & 1 == 1
            })
        };
        let found = area.range().pages().filter(|page| is_used(*page)).count();
        let lost = pages - found;
        assert!(
            lost <= if damon_runs() { pages / 200 } else { 0 },
            "{lost} of {pages}"
        );
        whole_rounds += usize::from(found == pages);
        let began = Instant::now();
        all.clear().unwrap();
        clears.push(began.elapsed());
        (0..pages).for_each(|page| area.write(page, 1));
        let began = Instant::now();
        clear(myself.as_fd(), &[area.range()]).unwrap();
        colds.push(began.elapsed());
        (0..pages).for_each(|page| area.write(page, 1));
    }
    assert!(
        whole_rounds >= 6,
        "{whole_rounds} of 9 rounds found all pages"
    );
    let each = |times: &mut Vec<std::time::Duration>| {
        times.sort();
        times[times.len() / 2].as_nanos() as f64 / pages as f64
    };
    println!(
        "  scan {:.1} ns a page, clear {:.1}, clear_refs {:.1} (medians of 9, {pages} pages)",
        each(&mut scans),
        each(&mut colds),
        each(&mut clears)
    );
}

/// Also if it has a file of the name that KVM gives to its own, or none of this number runs.
fn a_thread_that_runs_no_virtual_cpu_has_no_registers() {
    let cpus = match VirtualCpus::open() {
        Ok(cpus) => cpus,
        Err(error) => crate::skip(&format!("no registers here: {error}")),
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = std::fs::File::create(folder.path().join("kvm-vcpu:0")).expect("a scratch file");
    let thread = cpus.thread(std::process::id()).expect("a thread");
    assert_eq!(thread.registers().expect("a look"), None);
    let begun = Instant::now();
    (0..1000).for_each(|_| drop(thread.registers()));
    let files = std::fs::read_dir("/proc/self/fd")
        .expect("descriptors")
        .count();
    println!(
        "a look at {files} descriptors: {:?}",
        begun.elapsed() / 1000
    );
    drop(file);
    // A number that is free by then may be refused at once.
    if let Ok(none) = cpus.thread(u32::MAX >> 1) {
        assert_eq!(none.registers().expect("a look"), None);
    }
}
