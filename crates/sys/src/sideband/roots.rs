//! Which processes are watched, and by which events. The first watched process of a tree is its
//! *root*. A process that a watched one starts inherits the watch while the root's events are open.
//! So they stay open until the last process of the tree has ended.
//!
//! This is known from the records of starts, which can be lost or late. A process that is not known
//! is watched once more, until its record has come. Ended processes are found by testing which ones
//! live. That costs O(processes known), and is done once for half as many ends.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;

use rustix::process::{Pid, test_kill_process};

use super::Record;

/// Fewest ends reported before processes are tested.
const ENDS_MIN: usize = 64;

/// Fewest starts reported before processes are tested, because ends may be lost. The starts are
/// also at least twice as many as the processes that lived.
const STARTS_MIN: usize = 256;

/// A process that is watched by its id.
#[derive(Debug)]
struct Root {
    events: Vec<OwnedFd>,
    /// The process and its descendants that are not known to have ended.
    processes: usize,
}

#[derive(Clone, Copy, Debug)]
struct Watched {
    root: u64,
    /// Its first thread has ended: the number may be another's soon.
    ending: bool,
}

#[derive(Debug, Default)]
pub(super) struct Roots {
    roots: BTreeMap<u64, Root>,
    watched: HashMap<u32, Watched>,
    next: u64,
    /// Ends reported since the last [`Roots::prune`].
    ends: usize,
    /// Processes known after it.
    lived: usize,
}

impl Roots {
    /// Whether the process is known to be watched.
    pub(super) fn knows(&self, pid: u32) -> bool {
        self.watched.get(&pid).is_some_and(|known| !known.ending)
    }

    /// Descriptors held.
    pub(super) fn events(&self) -> usize {
        self.roots.values().map(|root| root.events.len()).sum()
    }

    /// The process is watched by these events.
    pub(super) fn add(&mut self, pid: u32, events: Vec<OwnedFd>) {
        let root = self.next;
        self.next += 1;
        let processes = 0;
        self.roots.insert(root, Root { events, processes });
        self.insert(pid, root);
    }

    /// Follows a record.
    pub(super) fn hear(&mut self, record: &Record<'_>) {
        match *record {
            Record::Fork { pid, ppid, .. } if pid != ppid => {
                // Records of different CPUs come unordered, so its parent may not be known yet. The
                // process was reported, so it is watched.
                let parent = self.watched.get(&ppid).map(|parent| parent.root);
                let root = parent.or_else(|| self.roots.keys().next().copied());
                if let Some(root) = root {
                    self.insert(pid, root);
                }
            }
            Record::Exit { pid, tid } if pid == tid => {
                if let Some(watched) = self.watched.get_mut(&pid) {
                    watched.ending = true;
                    self.ends += 1;
                }
            }
            _ => return,
        }
        let ended = self.ends >= ENDS_MIN.max(self.watched.len() / 2);
        if ended || self.watched.len() >= 2 * self.lived + STARTS_MIN {
            self.prune();
        }
    }

    fn insert(&mut self, pid: u32, root: u64) {
        let Some(of) = self.roots.get_mut(&root) else {
            return;
        };
        of.processes += 1;
        let ending = false;
        if let Some(before) = self.watched.insert(pid, Watched { root, ending }) {
            self.leave(before.root);
        }
    }

    fn leave(&mut self, root: u64) {
        if let Some(left) = self.roots.get_mut(&root) {
            left.processes -= 1;
            if left.processes == 0 {
                self.roots.remove(&root);
            }
        }
    }

    /// Forgets processes that have ended, and closes events that only they needed. O(processes
    /// known).
    pub(super) fn prune(&mut self) {
        self.keep(|pid| {
            let pid = Pid::from_raw(pid as i32);
            pid.is_some_and(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH))
        });
    }

    fn keep(&mut self, lives: impl Fn(u32) -> bool) {
        let known = self.watched.keys().copied();
        let ended: Vec<u32> = known.filter(|pid| !lives(*pid)).collect();
        for pid in ended {
            if let Some(watched) = self.watched.remove(&pid) {
                self.leave(watched.root);
            }
        }
        (self.ends, self.lived) = (0, self.watched.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Vec<OwnedFd> {
        vec![std::fs::File::open("/dev/null").unwrap().into()]
    }

    /// Watches `pids`, each with an event of its own.
    fn watching(pids: impl IntoIterator<Item = u32>) -> Roots {
        let mut roots = Roots::default();
        for pid in pids {
            roots.add(pid, event());
        }
        roots
    }

    fn fork(roots: &mut Roots, ppid: u32, pid: u32) {
        let (tid, ptid) = (pid, ppid);
        roots.hear(&Record::Fork {
            pid,
            ppid,
            tid,
            ptid,
        });
    }

    #[test]
    fn a_root_stays_while_any_descendant_lives() {
        let mut roots = watching([1]);
        fork(&mut roots, 1, 2);
        fork(&mut roots, 2, 3);
        for pid in [1, 2] {
            roots.hear(&Record::Exit { pid, tid: pid });
        }
        roots.keep(|pid| pid == 3);
        assert!(!roots.knows(1) && roots.knows(3));
        assert_eq!(roots.events(), 1);
        roots.keep(|_| false);
        assert_eq!(roots.events(), 0);
    }

    #[test]
    fn a_process_whose_first_thread_ended_keeps_its_events() {
        let mut roots = watching([1]);
        roots.hear(&Record::Exit { pid: 1, tid: 1 });
        assert_eq!((roots.knows(1), roots.events()), (false, 1));
        roots.keep(|_| true);
        assert_eq!(roots.events(), 1);
    }

    #[test]
    fn who_was_watched_before_its_start_was_heard_of_is_watched_once() {
        let mut roots = watching([1, 2]);
        assert_eq!(roots.events(), 2);
        fork(&mut roots, 1, 2);
        assert_eq!((roots.knows(2), roots.events()), (true, 1));
    }

    #[test]
    fn a_number_used_again_is_the_new_process() {
        let mut roots = watching([1, 2]);
        roots.hear(&Record::Exit { pid: 2, tid: 2 });
        fork(&mut roots, 1, 2);
        assert_eq!((roots.knows(2), roots.events()), (true, 1));
    }

    #[test]
    fn a_child_heard_of_before_its_parent_is_watched() {
        let mut roots = watching([1]);
        fork(&mut roots, 2, 3);
        fork(&mut roots, 1, 2);
        assert!(roots.knows(2) && roots.knows(3));
    }

    /// Numbers above any that the kernel gives: none of these processes lives.
    #[test]
    fn what_is_known_does_not_grow_with_ends_or_with_starts_alone() {
        const FIRST: u32 = 1 << 29;
        for exits in [true, false] {
            let own = std::process::id();
            let mut roots = watching([own]);
            for pid in FIRST..FIRST + 10_000 {
                fork(&mut roots, own, pid);
                if exits {
                    roots.hear(&Record::Exit { pid, tid: pid });
                }
                assert!(roots.watched.len() <= STARTS_MIN + 2);
            }
            assert_eq!(roots.events(), 1);
        }
    }
}
