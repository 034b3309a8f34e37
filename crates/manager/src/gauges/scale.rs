//! Costs of large programs: how long locks are held while many pages change, and which resources
//! ran short. The counts are in the report. The control thread warns once of each shortage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use undercroft_base::PageCount;
use undercroft_sys::process::own_run_time;

/// The longest holds of a lock, in nanoseconds. `wall` includes time in which the holder did not
/// have its CPU; `cpu` is the CPU time that a holder used. The two may be of different holds.
#[derive(Default)]
pub(crate) struct Longest {
    pub wall: AtomicU64,
    pub cpu: AtomicU64,
}

impl Longest {
    /// Begins a hold. It is noted when the value is dropped: before the lock is released. Cost: one
    /// system call, and one more if the hold may be the longest.
    pub(crate) fn hold(&self) -> Hold<'_> {
        self.hold_after(own_run_time())
    }

    /// As [`Longest::hold`], without a system call at the beginning.
    /// * `ran`: the CPU time that this thread had used before it waited for the lock.
    pub(crate) fn hold_after(&self, ran: Duration) -> Hold<'_> {
        Hold {
            longest: self,
            since: Instant::now(),
            ran,
        }
    }
}

/// A lock is held.
pub(crate) struct Hold<'a> {
    longest: &'a Longest,
    since: Instant,
    ran: Duration,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let nanos = |time: Duration| time.as_nanos() as u64;
        let wall = nanos(self.since.elapsed());
        self.longest.wall.fetch_max(wall, Ordering::Relaxed);
        // A thread uses no more CPU time than passes.
        if wall > self.longest.cpu.load(Ordering::Relaxed) {
            let ran = own_run_time().saturating_sub(self.ran);
            let ran = nanos(ran).min(wall); // it may have spun for the lock
            self.longest.cpu.fetch_max(ran, Ordering::Relaxed);
        }
    }
}

/// Shortages of one run.
#[derive(Default)]
pub(crate) struct Shortages {
    /// Descriptors that were missing: for a fork child, a new process, or its watch.
    pub descriptors: AtomicU64,
    /// Calls for which the kernel had no memory: to read events, to poison a page, to look at a
    /// fork child.
    pub memory: AtomicU64,
    /// Places that were missing in the page table.
    pub table: AtomicU64,
    /// Pages that are SIGBUS, because the page table had no place for them.
    pub refused: AtomicU64,
    /// Bits of the shortages that the user was warned of.
    told: AtomicU64,
}

const DESCRIPTORS: u64 = 1;
const TABLE: u64 = 2;
const MEMORY: u64 = 4;
const REFUSED: u64 = 8;

impl Shortages {
    /// The ledger had no room for a page, which goes on unmanaged.
    pub(crate) fn no_entry(&self) {
        self.table.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts pages that are refused to a process, because the ledger had no room for them.
    pub(crate) fn refused(&self, pages: PageCount) {
        self.refused.fetch_add(pages.0, Ordering::Relaxed);
    }

    /// Counts a missing descriptor.
    pub(crate) fn no_descriptor(&self) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts what was short.
    pub(crate) fn note(&self, short: Short) {
        match short {
            Short::Descriptors => &self.descriptors,
            Short::Memory => &self.memory,
        }
        .fetch_add(1, Ordering::Relaxed);
    }

    /// The warnings that have not been given yet.
    pub(crate) fn news(&self) -> Vec<&'static str> {
        let mut news = Vec::new();
        let mut tell = |count: &AtomicU64, kind: u64, text| {
            let new = count.load(Ordering::Relaxed) > 0;
            if new && self.told.fetch_or(kind, Ordering::Relaxed) & kind == 0 {
                news.push(text);
            }
        };
        tell(
            &self.descriptors,
            DESCRIPTORS,
            "out of file descriptors: new processes of the program wait for one. Raise its hard \
             limit (`ulimit -Hn`)",
        );
        tell(
            &self.memory,
            MEMORY,
            "the kernel is out of memory for its own tables: faults and forks of the program wait. \
             Leave it more memory, or raise the limit of the memory group",
        );
        tell(
            &self.table,
            TABLE,
            "the page table is full: some memory of the program is outside the limit",
        );
        tell(
            &self.refused,
            REFUSED,
            "the page table is full: pages of a fork child, or of a mapping that moved, are refused \
             to their process (SIGBUS)",
        );
        news
    }
}

/// Resources for want of which the kernel refuses a call. The call may succeed after a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    /// This process, or the whole machine, has no descriptor left.
    Descriptors,
    /// The kernel has no memory, or the memory group of this process or of the client.
    Memory,
}

impl Short {
    /// `None`: the call failed for another reason.
    pub(crate) fn of(error: &std::io::Error) -> Option<Short> {
        use rustix::io::Errno;
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE) => Some(Short::Descriptors),
            Some(Errno::NOMEM) => Some(Short::Memory),
            _ => None,
        }
    }
}

/// True if this process, or the whole machine, has no descriptor left.
pub(crate) fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    Short::of(error) == Some(Short::Descriptors)
}

/// Longest time for which the kernel may be without memory for the calls of one process.
const SPELL_MAX: Duration = Duration::from_secs(60);

/// Since when the kernel has had no memory for one kind of call, in milliseconds from the start of
/// the run + 1; 0 = it has.
#[derive(Debug, Default)]
pub(crate) struct Spell(AtomicU64);

impl Spell {
    /// A call failed. True if it may be tried again: not every call has failed for [`SPELL_MAX`].
    /// * `now`: since the start of the run.
    pub(crate) fn may_end(&self, now: Duration) -> bool {
        let now = now.as_millis() as u64 + 1;
        let began = (self.0).compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        let since = began.err().unwrap_or(now);
        Duration::from_millis(now.saturating_sub(since)) < SPELL_MAX
    }

    /// A call succeeded. Cost if none had failed: one load.
    #[inline]
    pub(crate) fn ends(&self) {
        if self.0.load(Ordering::Relaxed) != 0 {
            self.0.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_counts_the_time_and_only_the_holders_own_work_as_cpu_time() {
        let longest = Longest::default();
        let nanos = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
        let hold = longest.hold();
        std::thread::sleep(Duration::from_millis(30));
        drop(hold);
        assert!(nanos(&longest.wall) >= Duration::from_millis(30));
        assert!(nanos(&longest.cpu) < Duration::from_millis(15));
        let hold = longest.hold();
        let began = own_run_time();
        while own_run_time() - began < Duration::from_millis(20) {}
        drop(hold);
        assert!(nanos(&longest.cpu) >= Duration::from_millis(20));
    }

    #[test]
    fn each_shortage_is_told_once() {
        let shortages = Shortages::default();
        assert!(shortages.news().is_empty());
        shortages.table.fetch_add(1, Ordering::Relaxed);
        assert_eq!(shortages.news().len(), 1);
        shortages.table.fetch_add(1, Ordering::Relaxed);
        shortages.descriptors.fetch_add(1, Ordering::Relaxed);
        assert_eq!(shortages.news().len(), 1);
        assert!(shortages.news().is_empty());
    }

    #[test]
    fn a_spell_without_memory_is_borne_until_it_has_lasted_too_long() {
        let (spell, at) = (Spell::default(), Duration::from_secs);
        assert!(spell.may_end(at(10)) && spell.may_end(at(69)));
        assert!(!spell.may_end(at(70)));
        spell.ends();
        assert!(spell.may_end(at(70)), "it begins anew");
    }

    #[test]
    fn a_shortage_is_told_from_other_errors() {
        let of = |errno| Short::of(&std::io::Error::from_raw_os_error(errno));
        assert_eq!(of(12), Some(Short::Memory));
        assert_eq!((of(23), of(24)), (Some(Short::Descriptors), of(23)));
        assert_eq!((of(3), of(14)), (None, None));
    }
}
