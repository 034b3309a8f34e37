//! Measures the DRAM of a client of Undercroft from outside, through `/proc`: its anonymous memory
//! and the RAM pool.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::processes::{anonymous_part_kib, descendants, processes};

/// One sample, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time since the sampler began.
    pub at: Duration,
    /// Anonymous memory of the client's processes, stacks and other unmanaged memory included. A
    /// frame that they share counts once.
    pub anonymous: u64,
    /// Memory of the memfds that `undercroft` processes hold: the RAM pool and the ledger.
    pub memfds: u64,
}

/// Takes a sample about every 10 ms, on a thread of its own, until `finish`.
#[derive(Debug)]
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

// Allocated bytes of each memfd a process holds open, by inode, so that a memfd held by two
// processes counts once.
fn memfds(pid: i32, seen: &mut HashSet<u64>) -> u64 {
    let folder = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    folder
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = fs::read_link(&path).ok()?;
            if !name.to_string_lossy().starts_with("/memfd:") {
                return None;
            }
            let data = fs::metadata(&path).ok()?;
            seen.insert(data.ino()).then(|| data.blocks() * 512)
        })
        .sum()
}

impl Sampler {
    /// Begins to sample the tree of `root`, an `undercroft run` process. Finding the processes
    /// costs more than sampling them, so the tree is read again only every 5 samples.
    pub fn start(root: i32) -> Sampler {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let begin = Instant::now();
            let mut samples = Vec::new();
            let (mut ours, mut clients) = (Vec::new(), Vec::new());
            while !seen.load(Ordering::Relaxed) {
                if samples.len() % 5 == 0 {
                    (ours, clients) = descendants(&processes(), root)
                        .into_iter()
                        .partition(|process| process.pid == root || is_ours(&process.command));
                }
                let mut inodes = HashSet::new();
                samples.push(Sample {
                    at: begin.elapsed(),
                    anonymous: clients
                        .iter()
                        .map(|p| anonymous_part_kib(p.pid) * 1024)
                        .sum(),
                    memfds: ours.iter().map(|p| memfds(p.pid, &mut inodes)).sum(),
                });
                std::thread::sleep(Duration::from_millis(10));
            }
            samples
        });
        Sampler { stop, thread }
    }

    /// Ends sampling. Returns the samples in order.
    ///
    /// Panics: if the sampling thread panicked.
    pub fn finish(self) -> Vec<Sample> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the sampler did not panic")
    }
}

fn is_ours(command: &str) -> bool {
    let program = command.split(' ').next().unwrap_or("");
    program.rsplit('/').next() == Some("undercroft") || command.contains("undercroft manager")
}
