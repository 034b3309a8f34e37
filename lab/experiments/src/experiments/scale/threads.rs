//! Work of undercroft's threads and of the program between two moments of a run, by `/proc`.

use super::super::sleeper::{family, tree};
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// The kernel's unit of the times in `/proc/PID/stat` (USER_HZ), fixed at 100 on x86-64.
const TICK_NS: u64 = 10_000_000;

/// A thread of undercroft. Between two moments, all of it is a difference.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Thread {
    pub(super) name: String,
    pub(super) cpu_ns: u64,
    pub(super) voluntary: u64,
    pub(super) involuntary: u64,
}

/// Processes of a run.
pub(super) struct Processes {
    /// Undercroft's own, and its agents.
    ours: Vec<u32>,
    /// The program's.
    program: Vec<u32>,
}

/// A moment of a run.
pub(super) struct Moment {
    at: Instant,
    threads: BTreeMap<u32, Thread>,
    program_ns: u64,
}

/// The time between two moments.
#[derive(Clone, Debug, Default)]
pub(super) struct Work {
    pub(super) time: Duration,
    /// Undercroft's threads, the busiest first.
    pub(super) threads: Vec<Thread>,
    /// CPU time of the program.
    pub(super) program_ns: u64,
}

impl Processes {
    /// The processes below `root`. `managed`: it is an `undercroft run`.
    pub(super) fn of(root: u32, managed: bool) -> Processes {
        let all = tree(root);
        let mut ours = if managed { family(root) } else { Vec::new() };
        if managed {
            let agent = |pid: &&u32| name(&format!("/proc/{pid}")) == "uc-agent";
            ours.extend(all.iter().filter(agent).copied().collect::<Vec<_>>());
        }
        let program = all.into_iter().filter(|pid| !ours.contains(pid)).collect();
        Processes { ours, program }
    }

    /// All of them now. Threads of the program that have ended are counted.
    pub(super) fn now(&self) -> Moment {
        let mut threads = BTreeMap::new();
        for pid in &self.ours {
            let tasks = fs::read_dir(format!("/proc/{pid}/task"));
            for task in tasks.into_iter().flatten().flatten() {
                let id = task.file_name().to_str().and_then(|id| id.parse().ok());
                if let Some(id) = id {
                    threads.insert(id, thread(&task.path().display().to_string()));
                }
            }
        }
        let stat = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let ticks: u64 = self.program.iter().map(|pid| ticks_of(&stat(pid))).sum();
        Moment {
            at: Instant::now(),
            threads,
            program_ns: ticks * TICK_NS,
        }
    }
}

impl Moment {
    /// Work from `earlier` to here.
    pub(super) fn since(&self, earlier: &Moment) -> Work {
        let nothing = Thread::default();
        let mut threads: Vec<Thread> = Vec::new();
        for (id, now) in &self.threads {
            let before = earlier.threads.get(id).unwrap_or(&nothing);
            threads.push(Thread {
                name: now.name.clone(),
                cpu_ns: now.cpu_ns.saturating_sub(before.cpu_ns),
                voluntary: now.voluntary.saturating_sub(before.voluntary),
                involuntary: now.involuntary.saturating_sub(before.involuntary),
            });
        }
        threads.sort_by_key(|thread| std::cmp::Reverse(thread.cpu_ns));
        Work {
            time: self.at.duration_since(earlier.at),
            threads,
            program_ns: self.program_ns.saturating_sub(earlier.program_ns),
        }
    }
}

impl Work {
    /// CPU time of undercroft.
    pub(super) fn ours_ns(&self) -> u64 {
        self.threads.iter().map(|thread| thread.cpu_ns).sum()
    }

    /// Threads by kind, `uc-fault-0` and `uc-fault-3` as `uc-fault-N`: name, how many, CPU time of
    /// all.
    pub(super) fn kinds(&self) -> Vec<(String, usize, u64)> {
        let mut kinds: BTreeMap<String, (usize, u64)> = BTreeMap::new();
        for thread in &self.threads {
            let kind = kinds.entry(kind(&thread.name)).or_default();
            kind.0 += 1;
            kind.1 += thread.cpu_ns;
        }
        let named = |(name, (count, ns))| (name, count, ns);
        kinds.into_iter().map(named).collect()
    }
}

/// A thread's name, without its number if it has one.
fn kind(name: &str) -> String {
    match name.rsplit_once('-') {
        Some((kind, number)) if number.parse::<u32>().is_ok() => format!("{kind}-N"),
        _ => name.to_owned(),
    }
}

/// The thread whose folder in `/proc` this is. What cannot be read is 0.
fn thread(folder: &str) -> Thread {
    let read = |file: &str| fs::read_to_string(format!("{folder}/{file}")).unwrap_or_default();
    let ran = read("schedstat");
    let ran = ran.split_whitespace().next().and_then(|ns| ns.parse().ok());
    let (voluntary, involuntary) = switches(&read("status"));
    Thread {
        name: name(folder),
        cpu_ns: ran.unwrap_or_else(|| ticks_of(&read("stat")) * TICK_NS),
        voluntary,
        involuntary,
    }
}

fn name(folder: &str) -> String {
    let text = fs::read_to_string(format!("{folder}/comm")).unwrap_or_default();
    text.trim_end().to_owned()
}

/// CPU time of a `stat` file: of a process with all of its threads, or of a thread.
fn ticks_of(stat: &str) -> u64 {
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let times = fields.split_whitespace().skip(11).take(2);
    times.filter_map(|time| time.parse::<u64>().ok()).sum()
}

/// Voluntary and involuntary switches, of a `/proc/PID/status`.
fn switches(status: &str) -> (u64, u64) {
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok())
    };
    (
        field("voluntary_ctxt_switches:").unwrap_or(0),
        field("nonvoluntary_ctxt_switches:").unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_read_apart_and_kinds_have_no_number() {
        let text =
            "Name:\tuc-evict\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        assert_eq!(switches(text), (12, 3));
        assert_eq!(switches("Name:\tx\n"), (0, 0));
        assert_eq!(ticks_of("7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 40 2 8 8"), 42);
        for (name, want) in [
            ("uc-fault-11", "uc-fault-N"),
            ("uc-evict", "uc-evict"),
            ("a-b", "a-b"),
        ] {
            assert_eq!(kind(name), want);
        }
    }

    #[test]
    fn a_thread_that_works_is_the_busiest() {
        let own = Processes {
            ours: vec![std::process::id()],
            program: Vec::new(),
        };
        let before = own.now();
        let worker = std::thread::Builder::new().name("uc-busy-1".into());
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let worker = worker.spawn(move || {
            let until = Instant::now() + Duration::from_millis(300);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            let _ = wait.recv(); // a thread that has ended is not in /proc
        });
        std::thread::sleep(Duration::from_millis(350));
        let work = own.now().since(&before);
        drop(done);
        worker.expect("a thread").join().expect("it ends");
        let busy = work
            .threads
            .iter()
            .find(|thread| thread.name == "uc-busy-1");
        assert!(
            busy.is_some_and(|thread| thread.cpu_ns > 10_000_000),
            "{work:?}"
        );
        assert!(
            work.kinds()
                .iter()
                .any(|(name, count, _)| name == "uc-busy-N" && *count == 1)
        );
        assert!(work.ours_ns() >= busy.map_or(0, |thread| thread.cpu_ns));
    }
}
