//! Finds which pages of a guest were used: a scan takes the pages that are mapped out of the page
//! tables of the monitor, and those that are mapped again at the next scan were used meanwhile.
//!
//! ```text
//!   block by block:   came since the last scan -> what is in memory -> what is mapped
//!                     -> used = mapped, and did not come -> those pages are taken out (`zap`)
//! ```
//! Why not by Accessed bits: virtual CPUs set none in the page tables of their monitor. This way
//! all uses are seen: those by virtual CPUs, by threads that emulate one, and by devices.
//!
//! - No use is lost: only pages that were found mapped are taken out, and those are told. A page
//!   that is mapped between the look and the zap stays, and the next scan finds it.
//! - No byte is at stake: the page stays in its memory object, and so does a protection of one that
//!   is on its way out (`kernel_contract`, `objects`). A use of it raises no fault that we hear.
//! - An installation maps its page, used or not. So `Guest` remembers what came, before it comes.
//!   If a scan falls between the two, the page counts as used once.
//! - Pages that cannot be taken out look used. If nearly all of them cannot, nothing is known.
//!
//! Source: FlexSwap (§5.4) reads and clears the bits of nested page tables, in a module. Costs and
//! limits: `docs/design/0010-access-bits.md`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use undercroft_base::{PageSize, VirtPage, VirtRange};
use undercroft_proto::report::GuestAccess;
use undercroft_sys::access::{self, BLOCK_PAGES, BlockScan};
use undercroft_sys::object::MemoryObject;
use undercroft_sys::pagemap::{Category, Pagemap};
use undercroft_sys::probe::Swaps;
use undercroft_sys::process;

use super::guest::Guest;
use super::process::Process;

/// Words of a set with a bit for each page of a block.
const WORDS: usize = BLOCK_PAGES as usize / 64;

/// Pages from which on it counts if hardly any could be taken out, and scans in a row.
const MANY: u64 = 512;
const ROW: u32 = 2;

/// A look at the pages of one block, as sets of them.
pub(super) struct Seen {
    pub start: VirtPage,
    resident: [u64; WORDS],
    came: [u64; WORDS],
    mapped: [u64; WORDS],
}

fn has(set: &[u64; WORDS], at: usize) -> bool {
    set[at / 64] >> (at % 64) & 1 == 1
}

fn add(set: &mut [u64; WORDS], start: VirtPage, run: VirtRange) {
    let part = run.intersect(VirtRange::new(start, start.plus(BLOCK_PAGES)));
    for page in part.start.0..part.end.0 {
        let at = (page - start.0) as usize;
        set[at / 64] |= 1 << (at % 64);
    }
}

impl Seen {
    /// As a scan of Accessed bits would have it. There are no frames here: a page that came since
    /// the last scan has another one.
    ///
    /// * `before`: the frames at the last scan.
    pub(super) fn block(&self, before: [u8; BLOCK_PAGES as usize]) -> BlockScan {
        let mut block = BlockScan {
            start: self.start,
            frames: before,
            accessed: self.mapped,
        };
        for (at, frame) in block.frames.iter_mut().enumerate() {
            *frame = match *frame {
                _ if !has(&self.resident, at) => 0,
                0 => 1,
                old if has(&self.came, at) => 3 - old,
                old => old,
            };
        }
        block
    }
}

/// Work of one scan without a rest. A small guest is looked at in one go.
const BURST: Duration = Duration::from_millis(100);

/// Costs of a scan.
#[derive(Debug, Default)]
pub(super) struct Spent {
    /// CPU time that it took.
    pub work: Duration,
    /// Costs for the program.
    pub charge: Duration,
    /// Time that it rests afterwards.
    pub owed: Duration,
    burst: Duration,
}

impl Spent {
    /// The scan has gone on. Returns how long it rests now, so that work and charge are at most one
    /// part in `share` of the time.
    pub(super) fn add(&mut self, work: Duration, charge: Duration, share: u32) -> Duration {
        self.work += work;
        self.charge += charge;
        self.burst += work;
        self.owed += work * (share - 1) + charge * share;
        if self.burst < BURST {
            return Duration::ZERO;
        }
        self.burst = Duration::ZERO;
        std::mem::take(&mut self.owed)
    }
}

/// Scans of guests, by one thread.
pub(super) struct GuestScans {
    swaps: Swaps,
    found: Vec<(VirtRange, Category)>,
    runs: Vec<VirtRange>,
    /// Scans in a row that could take nothing out.
    without_effect: u32,
}

/// Pages that were mapped, and of them those that are after they were taken out.
#[derive(Clone, Copy, Default)]
struct Zapped {
    mapped: u64,
    left: u64,
}

impl Zapped {
    fn has_effect(self) -> bool {
        self.mapped < MANY || self.left < self.mapped / 16 * 15
    }
}

impl GuestScans {
    pub(super) fn new() -> GuestScans {
        GuestScans {
            swaps: Swaps::open(),
            found: Vec::new(),
            runs: Vec::new(),
            without_effect: 0,
        }
    }

    /// Looks at the guest, block by block, and takes its pages out of the page tables. `None`: its
    /// process ends, or the run. Cost: 2 to 70 us a page that is mapped, and 8 us for the virtual
    /// CPU that uses it again; 10 ns for any other page in memory.
    ///
    /// * `each`: hears of a block, and says what its uses cost the program.
    /// * `rest`: is told how long a block took, and that cost, and may sleep. False: the run ends.
    pub(super) fn scan(
        &mut self,
        process: &Process,
        each: impl FnMut(&Seen) -> Duration,
        rest: impl FnMut(Duration, Duration) -> bool,
    ) -> Option<GuestAccess> {
        let hosted = process.hosted.as_ref()?;
        let identity = hosted.host.identity.get()?;
        if !process.is_alive() || !hosted.host.has_running_identity() {
            return None;
        }
        // The kernel leaves huge pages mapped.
        let is_large = hosted.guest.page_size() != PageSize::Base;
        if is_large || self.without_effect >= ROW {
            return Some(GuestAccess::NoEffect);
        }
        // It would be swapped, and pages that are used would wait for a disk.
        if self.swaps.is_any() {
            return Some(GuestAccess::KernelSwap);
        }
        let pidfd = identity.pidfd.as_fd();
        match self.blocks(&hosted.guest, &identity.pagemap, pidfd, each, rest) {
            Ok(zapped) if zapped.has_effect() => {
                self.without_effect = 0;
                Some(GuestAccess::Scanned)
            }
            Ok(_) => {
                self.without_effect += 1;
                Some(GuestAccess::NoEffect)
            }
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                Some(GuestAccess::NotPermitted)
            }
            Err(_) => None,
        }
    }

    fn blocks(
        &mut self,
        guest: &Guest,
        pagemap: &Pagemap,
        pidfd: BorrowedFd<'_>,
        mut each: impl FnMut(&Seen) -> Duration,
        mut rest: impl FnMut(Duration, Duration) -> bool,
    ) -> io::Result<Zapped> {
        // A seek moves the offset of a descriptor, and the control thread seeks too.
        let object = MemoryObject::of(guest.object().as_fd())?;
        let whole = object.whole();
        let mut data = object.data(whole.start)?;
        let mut zapped = Zapped::default();
        while let Some(run) = data {
            if self.swaps.is_any() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let began = process::own_run_time();
            let start = VirtPage(run.start.0 / BLOCK_PAGES * BLOCK_PAGES);
            let block = VirtRange::new(start, start.plus(BLOCK_PAGES)).intersect(whole);
            let mut seen = Seen {
                start,
                resident: [0; WORDS],
                came: guest.take_arrivals(start),
                mapped: [0; WORDS],
            };
            // Pages that come behind this look are told the next time.
            while let Some(run) = data.filter(|run| run.start < block.end) {
                add(&mut seen.resident, start, run);
                data = if run.end > block.end {
                    Some(VirtRange::new(block.end, run.end))
                } else {
                    object.data(run.end)?
                };
            }
            self.look(guest, pagemap, block)?;
            let page = |at: VirtPage| VirtPage(at.0 - guest.base().0);
            for run in &self.runs {
                let run = VirtRange::new(page(run.start), page(run.end));
                add(&mut seen.mapped, start, run);
            }
            let charge = each(&seen);
            if !self.runs.is_empty() {
                zapped.mapped += pages(&self.runs);
                access::zap(pidfd, &self.runs)?;
                self.look(guest, pagemap, block)?;
                zapped.left += pages(&self.runs);
            }
            if !rest(process::own_run_time().saturating_sub(began), charge) {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        Ok(zapped)
    }

    /// Fills `runs` with the pages of a block that are mapped, as addresses.
    fn look(&mut self, guest: &Guest, pagemap: &Pagemap, block: VirtRange) -> io::Result<()> {
        self.found.clear();
        pagemap.scan(guest.at(block), Category::PRESENT, &mut self.found)?;
        self.runs.clear();
        self.runs.extend(self.found.iter().map(|(run, _)| *run));
        Ok(())
    }
}

fn pages(runs: &[VirtRange]) -> u64 {
    runs.iter().map(|run| run.count().0).sum()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use undercroft_base::BASE_PAGE_BYTES;
    use undercroft_sys::mapping::SharedMemory;
    use undercroft_sys::process::PidFd;
    use undercroft_sys::uffd::{Features, RegisterMode};
    use undercroft_sys::uffd_source::UffdSource;

    use super::*;
    use crate::space::findings::Last;
    use crate::space::port::{Space, Wake};

    /// More than a block, and no multiple of it.
    const PAGES: u64 = 700;

    /// A guest whose threads are those of the test, with every second page there.
    struct Bed {
        memory: SharedMemory,
        guest: Guest,
        scans: GuestScans,
        last: Last,
    }

    impl Bed {
        /// `None`: this user may have no userfaultfd.
        fn new() -> Option<Bed> {
            let uffd = UffdSource::open().and_then(|source| source.create());
            let Ok(uffd) = uffd else {
                let _ = writeln!(std::io::stderr(), "SKIPPED: guest_access: no userfaultfd");
                return None;
            };
            // Pages that are new on another CPU would stay mapped.
            let cpus = process::allowed_cpus(0).expect("CPUs");
            process::set_affinity(0, &cpus[..1]).expect("one of them");
            let memory = SharedMemory::create("guest", PAGES as usize * BASE_PAGE_BYTES);
            let memory = memory.expect("a memfd");
            let base = VirtPage::of(memory.words().as_ptr() as u64);
            uffd.api(Features::THREAD_ID).expect("the first call");
            let view = VirtRange::new(base, base.plus(PAGES));
            uffd.register(view, RegisterMode::MISSING_WP)
                .expect("shared");
            let object = MemoryObject::of(memory.as_fd()).expect("it opens anew");
            let bed = Bed {
                memory,
                guest: Guest::new(Arc::new(object), uffd, base).expect("base pages"),
                scans: GuestScans::new(),
                last: Last::default(),
            };
            (0..PAGES).step_by(2).for_each(|page| bed.install(page));
            Some(bed)
        }

        fn install(&self, page: u64) {
            let bytes = [7; BASE_PAGE_BYTES];
            let installed = self.guest.install(VirtPage(page), &bytes, Wake::Now);
            installed.expect("a hole");
        }

        fn use_page(&self, page: u64) {
            let word = &self.memory.words()[page as usize * BASE_PAGE_BYTES / 8];
            assert_ne!(word.load(Ordering::Relaxed), 0);
        }

        /// The pages that a scan finds used; `meanwhile` runs between its look and the zap.
        fn scan(&mut self, meanwhile: impl Fn(&Bed)) -> Vec<u64> {
            let own = std::process::id();
            let (pagemap, pidfd) = (Pagemap::open(own), PidFd::open(own));
            let (pagemap, pidfd) = (pagemap.expect("own"), pidfd.expect("own"));
            let mut scans = std::mem::replace(&mut self.scans, GuestScans::new());
            let (mut last, mut next) = (std::mem::take(&mut self.last), Last::default());
            let mut used = Vec::new();
            let each = |seen: &Seen| {
                last.used(
                    &seen.block(last.frames(seen.start)),
                    None,
                    &mut next,
                    &mut used,
                );
                if seen.start == VirtPage(0) {
                    meanwhile(self);
                }
                Duration::ZERO
            };
            let (guest, pidfd) = (&self.guest, pidfd.as_fd());
            let zapped = scans.blocks(guest, &pagemap, pidfd, each, |_, _| true);
            let zapped = zapped.expect("it scans itself");
            assert!(zapped.has_effect(), "{} of {}", zapped.left, zapped.mapped);
            (self.scans, self.last) = (scans, next);
            used.iter().map(|page| page.0).collect()
        }
    }

    #[test]
    fn pages_of_a_guest_that_are_used_are_found_and_those_that_came_are_not() {
        let Some(mut bed) = Bed::new() else { return };
        assert_eq!(bed.scan(|_| {}), [0; 0], "all of them came");
        assert_eq!(bed.scan(|_| {}), [0; 0]);
        [2, 4, 600, 698].iter().for_each(|page| bed.use_page(*page));
        bed.install(3);
        bed.guest
            .object()
            .punch(VirtRange::one(VirtPage(4)))
            .expect("it leaves");
        bed.install(4); // and is back
        assert_eq!(bed.scan(|_| {}), [2, 600, 698]);
        bed.use_page(3);
        bed.use_page(4);
        assert_eq!(bed.scan(|_| {}), [3, 4]);
        assert_eq!(bed.scan(|_| {}), [0; 0]);
    }

    /// A page that is used between the look and the zap is not lost, and not told twice.
    #[test]
    fn no_use_of_a_page_of_a_guest_is_lost_to_a_scan() {
        let Some(mut bed) = Bed::new() else { return };
        bed.scan(|_| {});
        bed.use_page(10);
        let both = |bed: &Bed| [10, 12].iter().for_each(|page| bed.use_page(*page));
        assert_eq!(bed.scan(both), [10]);
        assert_eq!(bed.scan(|_| {}), [12]);
        assert_eq!(bed.scan(|_| {}), [0; 0]);
    }

    #[test]
    fn a_scan_takes_a_part_of_the_time_at_most() {
        let (ms, mut spent) = (Duration::from_millis, Spent::default());
        assert_eq!(spent.add(ms(40), ms(10), 10), ms(0), "460 ms are owed");
        assert_eq!(spent.add(ms(60), ms(0), 10), ms(1000));
        assert_eq!(spent.add(ms(20), ms(0), 10), ms(0));
        assert_eq!((spent.work, spent.owed), (ms(120), ms(180)));
    }

    #[test]
    fn scans_that_take_nothing_out_know_nothing() {
        let of = |mapped, left| Zapped { mapped, left }.has_effect();
        assert!(of(0, 0) && of(511, 511) && of(1000, 900));
        assert!(!of(512, 512) && !of(4000, 3800));
    }
}
