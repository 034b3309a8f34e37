//! Processes that have ended, or whose agent has, before their memory was gone. It is gone within a
//! millisecond: the agent of a process that was killed, or called exec, hears of that and ends. The
//! books are forgotten then.
//!
//! If another process shares the memory, the agent stays for it. The kernel tells the agent of no
//! further end: we have it ask again and again whether it is alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Control;
use crate::log::warn;
use crate::space::process::Process;

/// Time between two looks, and the longest that memory is looked for so often: another process
/// shares it, or the agent has no CPU.
const LOOK_EVERY: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_millis(500);

/// Time between two looks at memory that lives on.
const ASK_EVERY: Duration = Duration::from_millis(250);

const _: () = assert!(LOOK_EVERY.as_nanos() < ASK_EVERY.as_nanos());

#[derive(Default)]
pub(super) struct Parting {
    /// There are books of address spaces that are gone, to be forgotten.
    pub(super) forgets: bool,
    /// Since when each has ended, and when they are looked at next.
    processes: Vec<(Arc<Process>, Instant)>,
    look_at: Option<Instant>,
    /// Processes whose memory lives on, with an agent, and when they are looked at next.
    shared: Vec<Arc<Process>>,
    ask_at: Option<Instant>,
    /// Processes that dump core.
    pub(super) dumping: Vec<Arc<Process>>,
    /// The user was told of an agent that was killed.
    told: bool,
}

impl Parting {
    pub(super) fn add(&mut self, process: &Arc<Process>) {
        self.wait_for(process.clone(), Instant::now());
    }

    fn wait_for(&mut self, process: Arc<Process>, since: Instant) {
        (self.look_at).get_or_insert_with(|| Instant::now() + LOOK_EVERY);
        self.processes.push((process, since));
    }

    /// Time until the next look, if that is sooner than `wait`.
    pub(super) fn until_look(&self, wait: Duration) -> Duration {
        if self.forgets {
            return Duration::ZERO;
        }
        let next = self.look_at.into_iter().chain(self.ask_at).min();
        let until = |at: Instant| at.saturating_duration_since(Instant::now());
        next.map_or(wait, |at| wait.min(until(at)))
    }

    /// The processes to look at now, and since when they have ended.
    fn due(&mut self, now: Instant) -> Vec<(Arc<Process>, Instant)> {
        let mut due = Vec::new();
        if self.look_at.is_some_and(|at| now >= at) {
            self.look_at = None;
            due = std::mem::take(&mut self.processes);
        }
        if self.ask_at.is_some_and(|at| now >= at) {
            self.ask_at = None;
            let long_ago = now.checked_sub(LOOK_MAX).unwrap_or(now);
            due.extend(self.shared.drain(..).map(|process| (process, long_ago)));
        }
        due
    }
}

impl Control {
    /// Forgets those whose memory is gone by now.
    pub(super) fn forget_parted(&mut self) {
        let now = Instant::now();
        for (process, since) in self.parting.due(now) {
            let known = self.shared.processes.get(process.space);
            if !known.is_some_and(|known| Arc::ptr_eq(&known, &process)) {
                continue; // a check has found it gone
            }
            if process.has_lost_its_memory() {
                self.forget(&process);
            } else if now - since < LOOK_MAX {
                self.parting.wait_for(process, since);
            } else if let Some(agent) = process.agent.get().filter(|_| process.has_agent()) {
                agent.commands.wake_agent();
                self.parting.ask_at.get_or_insert(now + ASK_EVERY);
                self.parting.shared.push(process);
            } else if process.lost_its_agent() && !std::mem::replace(&mut self.parting.told, true) {
                let pid = process.pid().unwrap_or(0);
                warn(&format!(
                    "the agent of process {pid} was killed: the process goes on, and its memory is \
                     outside the limit from now on"
                ));
            }
        }
    }
}
