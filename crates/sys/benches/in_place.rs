//! Prints what a page costs that is mapped where a tier keeps it, beside one that is copied in and
//! moved out again.
//!
//! `cargo bench -p undercroft-sys --bench in_place`
//!
//! No memory here is slower than DRAM: an ordinary file stands for the tier. So the times are of
//! the kernel's work. Those of devices are added by their figures. Compare lines of one run only.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::uffd::{Features, MessageBuf, RegisterMode, Uffd, UffdDevice};

type Failure = Box<dyn std::error::Error>;

const PAGE: usize = BASE_PAGE_BYTES;

/// `UFFDIO_MOVE` and `UFFDIO_CONTINUE`.
const MOVE: u64 = 0xC028_AA05;
const CONTINUE: u64 = 0xC020_AA07;

/// Most pages that are mapped or moved together.
const RUN_MAX: usize = 64;

/// Nanoseconds by which a read of one line of 64 bytes takes longer than from DRAM, and by which a
/// page takes longer to copy: `device/src/profiles.rs`.
const DEVICES: [(&str, f64, f64); 2] = [
    (
        "Optane",
        305.0 - 101.0,
        204.0 + 4096.0 / 6.6 - 4096.0 / 21.3,
    ),
    ("CXL", 200.0 - 101.0, 99.0),
];

/// The least wait of a thread for a page that is not there, besides the page: two context switches
/// and a message on one processor.
const HAND_OVER_NS: f64 = 6_800.0;

fn main() -> Result<(), Failure> {
    // Cargo adds `--bench`, but not when it tests: then a small size is enough.
    let is_test = std::env::args().all(|word| word != "--bench");
    let sizes = if is_test {
        Sizes {
            mappings: &[100],
            repeats: 20,
            beside: Duration::from_millis(20),
        }
    } else {
        Sizes {
            mappings: &[1_000, 10_000, 60_000],
            repeats: 400,
            beside: Duration::from_secs(3),
        }
    };
    let Ok(device) = UffdDevice::open() else {
        println!("skipped: no userfaultfd here");
        return Ok(());
    };
    let tier = Tier::new()?;
    println!("microseconds; p50 p99");
    refusals(&device, &tier)?;
    let copied = copied(&device, sizes.repeats)?;
    shared(&device, sizes.repeats)?;
    for mappings in sizes.mappings {
        let mapped = mapped(&device, &tier, *mappings, sizes.repeats)?;
        mapped.iter().for_each(|runs| break_even(runs, &copied));
    }
    beside(&device, &tier, sizes.beside)
}

struct Sizes {
    /// Mappings of the process.
    mappings: &'static [usize],
    repeats: usize,
    /// How long two threads run beside each other.
    beside: Duration,
}

/// Times of one action, nanoseconds.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn of(repeats: usize, mut work: impl FnMut(usize)) -> Times {
        let times = (0..repeats).map(|at| {
            let start = Instant::now();
            work(at);
            start.elapsed().as_nanos() as f64
        });
        Times(times.collect())
    }

    fn at(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() as f64 * part) as usize).min(sorted.len() - 1)]
    }

    fn print(&self, what: &str) {
        let [p50, p99] = [0.5, 0.99].map(|part| self.at(part) / 1000.0);
        println!("  {what:<58} {p50:>9.2} {p99:>9.2}");
    }
}

/// Private memory of this process that no Rust reference covers, and that is never unmapped.
#[derive(Clone, Copy)]
struct Area {
    address: usize,
    pages: usize,
}

impl Area {
    /// * `file`: `None`: private anonymous memory.
    fn new(pages: usize, file: Option<i32>) -> Area {
        let flags = match file {
            None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            Some(_) => libc::MAP_SHARED,
        };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let (bytes, file) = (pages * PAGE, file.unwrap_or(-1));
        // SAFETY: a fresh mapping at an address the kernel chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, file, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", error());
        let area = Area {
            address: start as usize,
            pages,
        };
        area.advise(libc::MADV_NOHUGEPAGE);
        area
    }

    fn part(self, first: usize, pages: usize) -> Area {
        assert!(first + pages <= self.pages);
        Area {
            address: self.address + first * PAGE,
            pages,
        }
    }

    fn range(self) -> VirtRange {
        let start = VirtPage::of(self.address as u64);
        VirtRange::new(start, start.plus(self.pages as u64))
    }

    fn pointer(self) -> *mut libc::c_void {
        self.address as *mut _
    }

    fn advise(self, advice: i32) {
        // SAFETY: memory of ours that no Rust reference covers; its contents may go.
        unsafe { libc::madvise(self.pointer(), self.pages * PAGE, advice) };
    }

    fn read(self) -> u8 {
        // SAFETY: mapped memory of ours that no Rust reference covers.
        unsafe { (self.address as *const u8).read_volatile() }
    }

    fn write(self) {
        // SAFETY: as in `read`.
        unsafe { (self.address as *mut u8).write_volatile(7) };
    }

    /// Maps pages of the tier here, in place of what was here.
    fn show(self, tier: &Tier, first: usize, how: How) {
        let (flags, prot) = match how {
            How::Shared => (libc::MAP_SHARED, libc::PROT_READ),
            How::Private => (libc::MAP_PRIVATE, libc::PROT_READ | libc::PROT_WRITE),
        };
        let flags = flags | libc::MAP_FIXED;
        let offset = (first * PAGE) as libc::off_t;
        let (fd, bytes) = (tier.file.as_raw_fd(), self.pages * PAGE);
        // SAFETY: memory of ours that no Rust reference covers.
        let at = unsafe { libc::mmap(self.pointer(), bytes, prot, flags, fd, offset) };
        assert_ne!(at, libc::MAP_FAILED, "{}", error());
    }

    /// Moves these pages and their mapping to another place, and leaves none here.
    fn move_to(self, other: Area) {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let bytes = self.pages * PAGE;
        // SAFETY: both are memory of ours that no Rust reference covers.
        let at = unsafe { libc::mremap(self.pointer(), bytes, bytes, flags, other.pointer()) };
        assert_ne!(at, libc::MAP_FAILED, "{}", error());
    }
}

/// How a page of the tier is mapped.
#[derive(Clone, Copy, Debug)]
enum How {
    /// The page itself, for reading alone: a write must not change the only copy.
    Shared,
    /// A write gives the program a page of its own.
    Private,
}

/// 0, or errno of a call that failed.
fn errno(failed: bool) -> i32 {
    if failed {
        error().raw_os_error().unwrap_or(-1)
    } else {
        0
    }
}

fn error() -> std::io::Error {
    std::io::Error::last_os_error()
}

/// The file that stands for a tier, in the page cache.
struct Tier {
    file: File,
    pages: usize,
}

impl Tier {
    fn new() -> Result<Tier, Failure> {
        let pages = 4096;
        let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR"))?;
        std::io::Write::write_all(&mut &file, &vec![3; pages * PAGE])?;
        Ok(Tier { file, pages })
    }

    /// Where the `at`th run of pages lies, as scattered as slots are.
    fn place(&self, at: usize) -> usize {
        at * 389 % (self.pages - RUN_MAX)
    }
}

fn uffd(device: &UffdDevice, features: Features) -> Result<Uffd, Failure> {
    let uffd = device.create()?;
    uffd.api(features)?;
    Ok(uffd)
}

/// An ioctl of a userfaultfd whose argument has these words. 0 or errno.
fn call<const N: usize>(uffd: &Uffd, code: u64, mut words: [u64; N]) -> i32 {
    use std::os::fd::AsFd;
    let fd = uffd.as_fd().as_raw_fd();
    // SAFETY: MOVE takes five words and CONTINUE four; the memory they change is ours, and no Rust
    // reference covers it.
    let result = unsafe { libc::ioctl(fd, code as _, &mut words) };
    errno(result != 0)
}

fn move_pages(uffd: &Uffd, from: Area, to: Area) -> i32 {
    let bytes = (from.pages * PAGE) as u64;
    call(
        uffd,
        MOVE,
        [to.address as u64, from.address as u64, bytes, 0, 0],
    )
}

/// Checks which calls the kernel refuses for a page of an ordinary file.
fn refusals(device: &UffdDevice, tier: &Tier) -> Result<(), Failure> {
    let uffd = uffd(device, Features::default())?;
    let fd = tier.file.as_raw_fd();
    for how in [How::Shared, How::Private] {
        println!("what the kernel says of one page of the file, {how:?}");
        let area = Area::new(3, None);
        let page = area.part(1, 1);
        page.show(tier, 0, how);
        let answer = uffd.register(page.range(), RegisterMode::MISSING_WP);
        println!("  REGISTER: {answer:?}");
        let staging = Area::new(1, None);
        uffd.register(staging.range(), RegisterMode::MISSING)?;
        // SAFETY: memory of ours that no Rust reference covers; the kernel refuses, or writes it.
        let read = unsafe { libc::pread(fd, page.pointer(), PAGE, 0) };
        println!("  read() into it: errno {}", errno(read < 0));
        black_box(page.read());
        let moved = move_pages(&uffd, page, staging);
        println!("  MOVE out of it: errno {moved}");
        let bytes = area.pages * PAGE;
        // SAFETY: as above; nothing is used there afterwards.
        let grown = unsafe { libc::mremap(area.pointer(), bytes, 2 * bytes, libc::MREMAP_MAYMOVE) };
        let failed = errno(grown == libc::MAP_FAILED);
        println!("  mremap of memory around it, to grow: errno {failed}");
    }
    Ok(())
}

/// Costs of the way that is built, nanoseconds a page.
struct Copied {
    /// Copied in alone, and 64 at a time.
    one: f64,
    many: f64,
    out: f64,
}

/// Pages that are copied in one at a time or in runs, and moved out 64 at a time.
fn copied(device: &UffdDevice, repeats: usize) -> Result<Copied, Failure> {
    println!("copied in, moved out");
    let repeats = repeats.next_multiple_of(RUN_MAX);
    let memory = Area::new(repeats * RUN_MAX, None);
    let staging = Area::new(RUN_MAX, None);
    let (uffd, other) = (
        uffd(device, Features::default())?,
        uffd(device, Features::default())?,
    );
    uffd.register(memory.range(), RegisterMode::MISSING)?;
    other.register(staging.range(), RegisterMode::MISSING)?;
    let page = vec![3; RUN_MAX * PAGE];
    let (mut one, mut many) = (0.0, 0.0);
    for run in [1, 8, 64] {
        memory.advise(libc::MADV_DONTNEED);
        let times = Times::of(repeats, |at| {
            let to = memory.part(at * run, run).range().start;
            assert_eq!(uffd.copy(to, &page[..run * PAGE], false), Ok(()));
        });
        times.print(&format!("COPY of {run} page(s)"));
        match run {
            1 => one = times.at(0.5),
            _ => many = times.at(0.5) / run as f64,
        }
    }
    let out = Times::of(repeats, |at| {
        let from = memory.part(at * RUN_MAX, RUN_MAX);
        assert_eq!(move_pages(&other, from, staging), 0);
        // As the holding area's, its pages go with the next batch.
        staging.advise(libc::MADV_DONTNEED);
    });
    out.print("MOVE of 64 pages, and their frames freed");
    let out = out.at(0.5) / RUN_MAX as f64;
    Ok(Copied { one, many, out })
}

/// Shared memory (a memfd): pages that are in it already, mapped by CONTINUE.
fn shared(device: &UffdDevice, repeats: usize) -> Result<(), Failure> {
    println!("shared memory: a page of the memfd itself");
    let pages = repeats * RUN_MAX;
    let memfd = SharedMemory::create("in-place", pages * PAGE)?;
    (0..pages).for_each(|page| memfd.bytes_in(page * PAGE, &[3]));
    let uffd = uffd(device, Features::MINOR_SHMEM.with(Features::MISSING_SHMEM))?;
    let fd = std::os::fd::AsFd::as_fd(&memfd).as_raw_fd();
    for run in [1, 8, 64] {
        let area = Area::new(pages, Some(fd));
        let mode = RegisterMode {
            missing: true,
            wp: false,
            minor: true,
        };
        uffd.register(area.range(), mode)?;
        let times = Times::of(repeats, |at| {
            let to = area.part(at * run, run);
            let bytes = (run * PAGE) as u64;
            let done = call(&uffd, CONTINUE, [to.address as u64, bytes, 0, 0]);
            assert_eq!(done, 0);
        });
        times.print(&format!("CONTINUE of {run} page(s)"));
        uffd.unregister(area.range())?;
    }
    Ok(())
}

/// Costs of pages that are mapped in place together, nanoseconds a page.
struct Mapped {
    /// How many.
    run: usize,
    /// To map it, and its first read.
    there: f64,
    /// To take it back.
    back: f64,
}

/// Pages of the tier that are mapped in place, in a process of `mappings`. Returns the costs
/// of private ones: the others are wrong once the program writes.
fn mapped(
    device: &UffdDevice,
    tier: &Tier,
    mappings: usize,
    repeats: usize,
) -> Result<Vec<Mapped>, Failure> {
    println!("mapped in place, {mappings} mappings");
    let uffd = uffd(device, Features::default())?;
    // Each page in place makes two mappings more.
    let filler = Area::new(mappings + 1, None);
    uffd.register(filler.range(), RegisterMode::MISSING)?;
    for at in (1..mappings).step_by(2) {
        let place = tier.place(at);
        filler.part(at, 1).show(tier, place, How::Shared);
    }
    let mut costs = Vec::new();
    for (how, run) in [
        (How::Shared, 1),
        (How::Shared, 8),
        (How::Shared, 64),
        (How::Private, 1),
        (How::Private, 64),
    ] {
        let memory = Area::new(repeats * 2 * run, None);
        uffd.register(memory.range(), RegisterMode::MISSING)?;
        let runs = round_trip(&uffd, tier, (how, run), memory)?;
        if let How::Private = how {
            costs.push(runs);
        }
        memory.forget();
    }
    filler.forget();
    Ok(costs)
}

/// Runs of pages are mapped in place, read, written if they may be, and taken back.
fn round_trip(
    uffd: &Uffd,
    tier: &Tier,
    (how, run): (How, usize),
    memory: Area,
) -> Result<Mapped, Failure> {
    let repeats = memory.pages / 2 / run;
    let part = |at: usize| memory.part(at * 2 * run, run);
    let before = count()?;
    let map = Times::of(repeats, |at| part(at).show(tier, tier.place(at), how));
    map.print(&format!("mmap of {run} page(s) of the file, {how:?}"));
    let read = Times::of(repeats, |at| {
        for page in 0..run {
            black_box(part(at).part(page, 1).read());
        }
    });
    read.print("  first read of each");
    if let How::Private = how {
        let write = Times::of(repeats, |at| part(at).write());
        write.print("  first write to one: the kernel copies the page");
    }
    let with = count()?;
    let back = take_back(uffd, repeats, run, part)?;
    back.print("  taken back: copied aside, mremap, REGISTER");
    println!(
        "  mappings: {before}, in place {with}, taken back {}",
        count()?
    );
    match how {
        How::Shared => assert_eq!(part(0).read(), 3, "the bytes are the tier's"),
        How::Private => assert_eq!(part(0).read(), 7, "the bytes are the program's"),
    }
    part(0).write(); // it is private memory, in any case
    Ok(Mapped {
        run,
        there: (map.at(0.5) + read.at(0.5)) / run as f64,
        back: back.at(0.5) / run as f64,
    })
}

impl Area {
    /// Unmaps it. It is not used any more.
    fn forget(self) {
        // SAFETY: memory of ours that no Rust reference covers.
        unsafe { libc::munmap(self.pointer(), self.pages * PAGE) };
    }
}

/// Replaces the file's pages by private pages with the same bytes. No thread may see zeros
/// meanwhile, so the pages are made aside, and take the place in one step.
fn take_back(
    uffd: &Uffd,
    repeats: usize,
    run: usize,
    part: impl Fn(usize) -> Area,
) -> Result<Times, Failure> {
    let times = Times::of(repeats, |at| {
        let place = part(at);
        let aside = Area::new(run, None);
        for page in 0..run {
            let (from, to) = (place.part(page, 1), aside.part(page, 1));
            // SAFETY: two pages of ours that no Rust reference covers, and that do not overlap.
            unsafe { std::ptr::copy(from.pointer(), to.pointer(), PAGE) };
        }
        aside.move_to(place);
        let registered = uffd.register(place.range(), RegisterMode::MISSING);
        assert_eq!(registered, Ok(()));
    });
    Ok(times)
}

/// Mappings of this process.
fn count() -> Result<usize, Failure> {
    Ok(std::fs::read_to_string("/proc/self/maps")?.lines().count())
}

/// Prints how many lines of a page may be read in place until the copy would have been cheaper. A
/// page in place takes no frame. At best, so another page does not have to leave and come back.
fn break_even(mapped: &Mapped, copied: &Copied) {
    let run = mapped.run;
    let (taken_back, kept) = (mapped.there + mapped.back, mapped.there);
    for (device, line, page) in DEVICES {
        let copy_in = if run == 1 { copied.one } else { copied.many };
        let copy = copy_in + page + copied.out;
        let spared = copy + HAND_OVER_NS / run as f64 + copy;
        for (way, in_place) in [("taken back", taken_back), ("never taken back", kept)] {
            let [alone, with] = [copy, spared].map(|cost| (cost - in_place) / line);
            println!(
                "  {device}, runs of {run}, {way}: {:.2} us a page and {:.2} a line; copied {:.2}, with \
                 another fault {:.2}: cheaper up to {alone:.0} and {with:.0} lines",
                in_place / 1000.0,
                line / 1000.0,
                copy / 1000.0,
                spared / 1000.0,
            );
        }
    }
}

/// Measures first touches and COPYs of other threads while pages are mapped in place and taken
/// back; and how long an mmap takes whose UNMAP event a manager has to read.
fn beside(device: &UffdDevice, tier: &Tier, time: Duration) -> Result<(), Failure> {
    println!("beside a thread that maps pages and takes them back");
    let uffd = uffd(device, Features::default())?;
    let memory = Area::new(2 * RUN_MAX, None);
    uffd.register(memory.range(), RegisterMode::MISSING)?;
    let (heap, copies) = (Area::new(512, None), Area::new(512, None));
    uffd.register(copies.range(), RegisterMode::MISSING)?;
    let page = vec![3; PAGE];
    for maps in [false, true] {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| -> Result<(), Failure> {
            let mapper = scope.spawn(|| {
                let mut done = 0;
                while maps && !stop.load(Ordering::Relaxed) {
                    let part = |at: usize| memory.part(at * 2, 1);
                    for at in 0..RUN_MAX {
                        part(at).show(tier, tier.place(at), How::Private);
                    }
                    let back = take_back(&uffd, RUN_MAX, 1, part);
                    assert!(back.is_ok());
                    done += RUN_MAX;
                }
                done
            });
            let (mut touches, mut installs) = (Times::default(), Times::default());
            let start = Instant::now();
            while start.elapsed() < time {
                heap.advise(libc::MADV_DONTNEED);
                touches
                    .0
                    .extend(Times::of(512, |at| heap.part(at, 1).write()).0);
                copies.advise(libc::MADV_DONTNEED);
                let copy = Times::of(512, |at| {
                    let to = copies.part(at, 1).range().start;
                    assert_eq!(uffd.copy(to, &page, false), Ok(()));
                });
                installs.0.extend(copy.0);
            }
            stop.store(true, Ordering::Relaxed);
            let done = mapper.join().expect("the mapper ends");
            println!("  {done} pages mapped and taken back meanwhile");
            touches.print("first touch of another thread");
            installs.print("COPY of another thread");
            Ok(())
        })?;
    }
    with_events(device, tier)
}

/// The program's userfaultfd reports layout events, so an mmap over its memory waits for the
/// manager.
fn with_events(device: &UffdDevice, tier: &Tier) -> Result<(), Failure> {
    let uffd = uffd(device, Features::EVENTS)?;
    let memory = Area::new(2 * RUN_MAX, None);
    uffd.register(memory.range(), RegisterMode::MISSING)?;
    let stop = AtomicBool::new(false);
    let times = thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = MessageBuf::default();
            while !stop.load(Ordering::Relaxed) {
                // Empty most of the time: it does not sleep, so the wait is the shortest there is.
                let _ = uffd.read_messages(&mut buffer);
            }
        });
        let times = Times::of(RUN_MAX, |at| {
            let place = memory.part(at * 2, 1);
            place.show(tier, tier.place(at), How::Private);
        });
        stop.store(true, Ordering::Relaxed);
        times
    });
    times.print("mmap of 1 page, its UNMAP event read by a manager that spins");
    Ok(())
}
