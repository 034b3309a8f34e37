//! What large programs cost: how long locks are held while many pages change, and which resources
//! ran short. The counts are in the report. The control thread warns once of each shortage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

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
    /// Places that were missing in the page table.
    pub table: AtomicU64,
    /// Bits of the shortages that the user was warned of.
    told: AtomicU64,
}

const DESCRIPTORS: u64 = 1;
const TABLE: u64 = 2;

impl Shortages {
    /// The ledger had no room for a page, which goes on unmanaged.
    pub(crate) fn no_entry(&self) {
        self.table.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a missing descriptor.
    pub(crate) fn no_descriptor(&self) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
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
            &self.table,
            TABLE,
            "the page table is full (1 TiB of address space): some memory of the program is outside the \
             limit",
        );
        news
    }
}

/// True if this process, or the whole machine, has no descriptor left.
pub(crate) fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    errno == Some(Errno::MFILE) || errno == Some(Errno::NFILE)
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
}
