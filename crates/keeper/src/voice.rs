//! The keeper's messages on standard error. A thread of their own writes them. So the run and its
//! end do not wait for a full pipe, a full disk or a stopped terminal.

use std::io::{self, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Messages that may wait to be written; further ones are dropped.
const WAITING_MAX: usize = 64;

/// Lines of the manager that are written without delay; after these, one a second.
const BURST: u32 = 10;

/// How long the end of the run waits for unwritten messages.
const PATIENCE: Duration = Duration::from_secs(1);

enum Said {
    Text(String),
    /// All before it is written: to be told here.
    Done(SyncSender<()>),
}

pub(super) struct Voice {
    to: SyncSender<Said>,
    done: Receiver<()>,
    budget: Budget,
}

impl Voice {
    /// Call this after signals are blocked: the thread inherits the mask.
    pub(super) fn new() -> io::Result<Voice> {
        let (to, from) = sync_channel::<Said>(WAITING_MAX);
        let (ended, done) = sync_channel(1);
        std::thread::Builder::new()
            .name("uc-voice".into())
            .spawn(move || {
                for said in from {
                    match said {
                        Said::Text(text) => drop(io::stderr().write_all(text.as_bytes())),
                        Said::Done(told) => drop(told.send(())),
                    }
                }
                let _ = ended.send(());
            })?;
        Ok(Voice {
            to,
            done,
            budget: Budget::new(Instant::now()),
        })
    }

    /// Writes a message of the keeper's own.
    pub(super) fn say(&self, text: &str) {
        self.print(format!("undercroft: {text}\n"));
    }

    /// Writes text as it is.
    pub(super) fn print(&self, text: String) {
        let _ = self.to.try_send(Said::Text(text));
    }

    /// Waits for unwritten messages, for [`PATIENCE`] at most.
    pub(super) fn flush(&self) {
        let (told, done) = sync_channel(1);
        if self.to.try_send(Said::Done(told)).is_ok() {
            let _ = done.recv_timeout(PATIENCE);
        }
    }

    /// Writes a line of the manager's, if the budget allows it.
    pub(super) fn relay(&mut self, line: &str) {
        if self.budget.takes(Instant::now()) {
            self.say(line);
        }
    }

    /// Waits for unwritten messages, for [`PATIENCE`] at most.
    pub(super) fn end(self) {
        if self.budget.left_out > 0 {
            self.say(&format!(
                "{} more messages of the manager were left out",
                self.budget.left_out
            ));
        }
        drop(self.to);
        let _ = self.done.recv_timeout(PATIENCE);
    }
}

/// Allows a burst of lines, and then one a second.
struct Budget {
    left: u32,
    refilled: Instant,
    left_out: u64,
}

impl Budget {
    fn new(now: Instant) -> Budget {
        Budget {
            left: BURST,
            refilled: now,
            left_out: 0,
        }
    }

    fn takes(&mut self, now: Instant) -> bool {
        let seconds = now.saturating_duration_since(self.refilled).as_secs();
        if seconds > 0 {
            self.left = self.left.saturating_add(seconds as u32).min(BURST);
            self.refilled = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => {
                self.left_out += 1;
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_to_a_burst_and_one_a_second() {
        let began = Instant::now();
        let mut budget = Budget::new(began);
        let mut told = 0;
        for millisecond in 0..5_000 {
            told += u32::from(budget.takes(began + Duration::from_millis(millisecond)));
        }
        assert_eq!(told, BURST + 4);
        assert_eq!(budget.left_out, 5_000 - u64::from(told));
    }
}
