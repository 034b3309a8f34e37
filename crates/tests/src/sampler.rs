//! Measures the DRAM of a client of Undercroft from outside, through `/proc`: its anonymous memory
//! and the RAM pool.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::processes::{anonymous_kib, anonymous_part_kib, is_agent};

/// Samples between two searches for processes. A search costs more than a sample.
const SEARCH_EVERY: usize = 4;

/// Pause between two samples.
const PAUSE: Duration = Duration::from_millis(1);

/// A sample, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time since the sampler began.
    pub at: Duration,
    /// Anonymous memory of the client's processes, stacks and other unmanaged memory included. A
    /// frame that they share counts once.
    pub anonymous: u64,
    /// Memory of the memfds that `undercroft` processes hold: the RAM pool. The ledger, which
    /// holds no page of the client, is left out.
    pub memfds: u64,
}

impl Sample {
    /// Memory that counts against the limit.
    pub fn used(&self) -> u64 {
        self.anonymous + self.memfds
    }
}

/// Takes a sample about every millisecond, on a thread of its own, until `finish`.
#[derive(Debug)]
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Sample>>,
}

/// The processes of the tree, and our memfds. A memfd stays open between samples. It is known by
/// its inode, so one that two processes hold counts once.
#[derive(Default)]
struct Sight {
    clients: Vec<i32>,
    memfds: Vec<(u64, File)>,
}

impl Sight {
    fn search(&mut self, root: i32) {
        let mut family = Vec::new();
        descend(root, &mut family);
        let is_client = |pid: &i32| *pid != root && !is_ours(*pid);
        let ours: Vec<i32>;
        (self.clients, ours) = family.into_iter().partition(is_client);
        ours.into_iter().for_each(|pid| self.open_memfds(pid));
    }

    fn open_memfds(&mut self, pid: i32) {
        let folder = fs::read_dir(format!("/proc/{pid}/fd"));
        for entry in folder.into_iter().flatten().flatten() {
            let path = entry.path();
            let name = fs::read_link(&path).unwrap_or_default();
            let name = name.to_string_lossy();
            if !name.starts_with("/memfd:") || name.contains("uc-ledger") {
                continue;
            }
            let Ok(data) = fs::metadata(&path) else {
                continue;
            };
            if self.memfds.iter().all(|(inode, _)| *inode != data.ino())
                && let Ok(file) = File::open(&path)
            {
                self.memfds.push((data.ino(), file));
            }
        }
    }

    /// Bytes in memfds.
    fn memfds(&self) -> u64 {
        let data = self.memfds.iter().filter_map(|(_, f)| f.metadata().ok());
        data.map(|data| data.blocks() * 512).sum()
    }

    /// Bytes of the client. A process without living relatives shares no frame, and its size is
    /// known to the kernel without a walk of its page tables.
    fn anonymous(&self) -> u64 {
        let of = match self.clients.len() {
            1 => anonymous_kib,
            _ => anonymous_part_kib,
        };
        self.clients.iter().map(|pid| of(*pid) * 1024).sum()
    }
}

/// Appends `pid` and its descendants to `family`.
fn descend(pid: i32, family: &mut Vec<i32>) {
    family.push(pid);
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let children = text.split_whitespace().filter_map(|word| word.parse().ok());
        children.for_each(|child| descend(child, family));
    }
}

fn is_ours(pid: i32) -> bool {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&bytes).replace('\0', " ");
    let program = command.split(' ').next().unwrap_or("");
    program.rsplit('/').next() == Some("undercroft")
        || command.starts_with("undercroft: ")
        || is_agent(pid)
}

impl Sampler {
    /// Begins to sample the tree of `root`, an `undercroft run` process.
    pub fn start(root: i32) -> Sampler {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let begin = Instant::now();
            let mut samples = Vec::new();
            let mut sight = Sight::default();
            while !seen.load(Ordering::Relaxed) {
                if samples.len() % SEARCH_EVERY == 0 {
                    sight.search(root);
                }
                samples.push(Sample {
                    at: begin.elapsed(),
                    anonymous: sight.anonymous(),
                    memfds: sight.memfds(),
                });
                std::thread::sleep(PAUSE);
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
