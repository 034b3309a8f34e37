//! What the control thread does for the keeper. It continues a keeper that stopped with its
//! program, and it reports processes of the program that are not managed.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use undercroft_sys::image::Image;
use undercroft_sys::{process, procfs, signal};
use undercroft_wire::protocol::SOCKET_VARIABLE;

use super::Control;

/// How long a program may run without a managed process before the user is warned.
const PATIENCE: Duration = Duration::from_secs(2);

/// Most processes that one look at a program's processes asks about.
const LOOK_MAX: usize = 1024;

/// The bits of a file's mode that give its program another user or group.
const SET_ID: u32 = 0o6000;

/// A look takes at most one part in this of the time.
const LOOK_PART: u32 = 200;

/// Whether any process of the program is managed.
pub(super) struct Presence {
    absent_since: Option<Instant>,
    /// No process was managed for [`PATIENCE`].
    pub missed: bool,
}

impl Presence {
    pub(super) fn new(now: Instant) -> Presence {
        Presence {
            absent_since: Some(now),
            missed: false,
        }
    }

    /// True once a run: no process has been managed for [`PATIENCE`].
    fn note(&mut self, any: bool, now: Instant) -> bool {
        if any {
            self.absent_since = None;
            return false;
        }
        let since = *self.absent_since.get_or_insert(now);
        let late = now.saturating_duration_since(since) >= PATIENCE;
        late && !std::mem::replace(&mut self.missed, true)
    }
}

/// Processes of the program whose memory is outside the limit.
pub(super) struct Strays {
    look_at: Instant,
    /// Not managed at the last look.
    seen: HashSet<u32>,
    told: bool,
    /// The most at once.
    pub peak: u64,
}

impl Strays {
    /// * `told`: the user knows of them, from the manager before this one.
    pub(super) fn new(now: Instant, told: bool) -> Strays {
        Strays {
            look_at: now + PATIENCE,
            seen: HashSet::new(),
            told,
            peak: 0,
        }
    }

    /// Notes the processes that are not managed now. Returns those that were not managed at the
    /// last look either: a new process is managed a moment after its start.
    fn note(&mut self, now: HashSet<u32>) -> Vec<u32> {
        let again = self.seen.intersection(&now).copied().collect();
        self.seen = now;
        again
    }
}

impl Control {
    /// Looks every two seconds for processes that are not managed, and warns once of the first. A
    /// process is found while its parents live.
    pub(super) fn look_for_strays(&mut self) {
        let began = Instant::now();
        if began < self.strays.look_at {
            return;
        }
        let now = self.not_managed();
        let again = self.strays.note(now).into_iter();
        let strays: Vec<_> = again
            .filter_map(|pid| Some((pid, why_stray(pid)?)))
            .collect();
        self.strays.look_at = Instant::now() + PATIENCE.max(LOOK_PART * began.elapsed());
        self.strays.peak = self.strays.peak.max(strays.len() as u64);
        // If no process at all is managed, that is said elsewhere.
        if let Some((pid, why)) = strays.first()
            && !self.presence.missed
            && !std::mem::replace(&mut self.strays.told, true)
            && !self.launch.options.quiet
        {
            let name = procfs::thread_name(*pid).unwrap_or_default();
            crate::log::warn(&format!(
                "process {pid} ({name}) is not managed, so its memory is outside the limit: it \
                 {why}. The report counts such processes"
            ));
        }
    }

    /// Descendants of the keeper that are not managed.
    fn not_managed(&self) -> HashSet<u32> {
        let processes = self.shared.processes.all();
        let managed: HashSet<u32> = processes.iter().filter_map(|p| p.pid()).collect();
        let own = [std::process::id(), self.holder.0];
        let mut left = procfs::children(self.launch.keeper);
        left.retain(|pid| !own.contains(pid));
        let this = std::fs::read_link("/proc/self/exe").ok();
        let (mut found, mut at) = (HashSet::new(), 0);
        while let Some(pid) = left.get(at).copied()
            && at < LOOK_MAX
        {
            at += 1;
            if this.is_some() && std::fs::read_link(format!("/proc/{pid}/exe")).ok() == this {
                continue; // a run inside this run: it manages what it starts
            }
            if !managed.contains(&pid) && process::is_running(pid) {
                found.insert(pid);
            }
            left.extend(procfs::children(pid));
        }
        found
    }

    /// Continues the keeper, which stopped with its program, once the program runs again. The
    /// keeper cannot see that.
    pub(super) fn wake_keeper(&mut self) {
        if let Some(program) = self.paused
            && !procfs::is_stopped(program)
        {
            self.paused = None;
            signal::send(signal::SIGCONT, self.launch.keeper);
        }
    }

    /// Warns once that no process of the program is managed, and says why that may be.
    pub(super) fn note_presence(&mut self, any: bool) {
        if !self.presence.note(any, Instant::now()) {
            return;
        }
        // Between two programs of a script there may be no process.
        let Some(program) = self.program() else {
            self.presence.missed = false;
            return;
        };
        if self.launch.options.quiet {
            return;
        }
        crate::log::warn(&format!(
            "no process of the program is managed, so the limit does not hold: process {program} {}",
            why_stray(program).unwrap_or("has not loaded the shim, or could not reach the manager")
        ));
    }

    /// The first process of the program that runs.
    pub(super) fn program(&self) -> Option<u32> {
        let own = [std::process::id(), self.holder.0];
        procfs::children(self.launch.keeper)
            .into_iter()
            .find(|pid| !own.contains(pid) && process::is_running(*pid))
    }
}

/// Why the loader has not brought the shim into a process. `None`: it may have.
fn why_stray(pid: u32) -> Option<&'static str> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok();
    let lacks = |name: &str| {
        let begins = |entry: &[u8]| entry.starts_with(name.as_bytes());
        let entries = environment.as_deref();
        entries.is_some_and(|bytes| !bytes.split(|byte| *byte == 0).any(begins))
    };
    let file = File::open(format!("/proc/{pid}/exe")).ok();
    let mode = file.as_ref().and_then(|file| file.metadata().ok());
    let mode = mode.map_or(0, |of| of.permissions().mode());
    match file.as_ref().and_then(|file| Image::of(file).ok()) {
        Some(Image::Foreign) => Some("is no 64-bit x86 program"),
        Some(Image::Static | Image::Relocates) => {
            Some("is linked statically, so it has no loader to bring the shim in")
        }
        _ if lacks("LD_PRELOAD=") || lacks(SOCKET_VARIABLE) => {
            Some("was started without LD_PRELOAD or UNDERCROFT_SOCKET in its environment")
        }
        _ if mode & SET_ID != 0 => Some("is setuid or setgid, so its loader brings no shim in"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_is_told_once_and_only_when_it_lasts() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut presence = Presence::new(began);
        assert!(!presence.note(false, at(1)));
        assert!(!presence.note(true, at(3)), "a process came");
        assert!(!presence.note(false, at(4)));
        assert!(!presence.note(false, at(5)));
        assert!(presence.note(false, at(6)));
        assert!(!presence.note(false, at(60)), "once");
        assert!(presence.missed);
    }

    #[test]
    fn a_process_without_the_variables_is_named_so() {
        let why = why_stray(std::process::id()).expect("a test has no shim");
        assert!(why.contains("LD_PRELOAD"));
    }

    #[test]
    fn strays_are_those_of_two_looks() {
        let mut strays = Strays::new(Instant::now(), false);
        assert!(
            strays.note(HashSet::from([1, 2])).is_empty(),
            "they are new"
        );
        assert_eq!(strays.note(HashSet::from([2, 3])), [2]);
        assert!(strays.note(HashSet::new()).is_empty());
        assert!(strays.note(HashSet::from([2, 3])).is_empty());
    }
}
