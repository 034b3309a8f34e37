//! Tells the user of a program of which no process is managed, from the control thread.

use std::time::{Duration, Instant};

use undercroft_sys::{process, procfs};

use super::Control;
use super::strays::why_not;

/// How long a program may run without a managed process before the user is warned.
const PATIENCE: Duration = Duration::from_secs(2);

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

impl Control {
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
            why_not(program).unwrap_or("has not loaded the shim, or could not reach the manager")
        ));
    }

    /// The first process of the program that runs.
    pub(super) fn program(&self) -> Option<u32> {
        let own = [std::process::id(), self.doors.holder.0];
        procfs::children(self.launch.keeper)
            .into_iter()
            .find(|pid| !own.contains(pid) && process::is_running(*pid))
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
}
