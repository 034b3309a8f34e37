//! The keeper's messages on standard error. A thread of their own writes them. So the run and its
//! end do not wait for a full pipe, a full disk or a stopped terminal.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use time::OffsetDateTime;
use undercroft_proto::name::RunName;
use undercroft_proto::options::RunOptions;
use undercroft_proto::report::{Report, human_summary};
use undercroft_terminal::{LogFormat, log_object};

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

/// An event of a run, in a log for programs. It has the numbers that the daemon's log has.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    /// The program has started.
    Started {
        client_pid: u32,
        program: &'a str,
        limit_bytes: Option<u64>,
        class: Option<&'a str>,
    },
    /// A sentence of the keeper or the manager.
    Message { text: &'a str },
    /// The program has ended. The report (`--report`) says more.
    Ended {
        exit_status: i32,
        signal: Option<i32>,
        wall_seconds: f64,
        memory_bytes_peak: u64,
        dram_bytes_peak: u64,
        faults: u64,
        stall_seconds: f64,
        limit_exceeded_seconds: f64,
        lost_pages: u64,
    },
}

pub(super) struct Voice {
    format: LogFormat,
    /// The run's name, if it has one.
    name: Option<RunName>,
    to: SyncSender<Said>,
    done: Receiver<()>,
    budget: Budget,
}

impl Voice {
    /// Call this after signals are blocked: the thread inherits the mask.
    pub(super) fn new(format: LogFormat, name: Option<RunName>) -> io::Result<Voice> {
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
            format,
            name,
            to,
            done,
            budget: Budget::new(Instant::now()),
        })
    }

    /// Writes a message of the keeper's own.
    pub(super) fn say(&self, text: &str) {
        match self.format {
            LogFormat::Text => self.print(format!("undercroft: {text}\n")),
            LogFormat::Json => self.log(&Event::Message { text }),
        }
    }

    /// Tells programs that the client's program has started.
    pub(super) fn started(&self, client_pid: u32, options: &RunOptions) {
        if self.format == LogFormat::Json {
            let limit = options.client.memory_max.0;
            let path = options.command[0].to_string_lossy();
            self.log(&Event::Started {
                client_pid,
                program: path.rsplit('/').next().unwrap_or_default(),
                limit_bytes: (limit != u64::MAX).then_some(limit),
                class: options.client.class.as_deref(),
            });
        }
    }

    /// Tells how the run went.
    pub(super) fn ended(&self, report: &Report) {
        match self.format {
            LogFormat::Text => self.print(human_summary(report, uses_color())),
            LogFormat::Json => self.log(&Event::Ended {
                exit_status: report.exit_status,
                signal: report.signal,
                wall_seconds: report.wall_seconds,
                memory_bytes_peak: report.memory_bytes_peak,
                dram_bytes_peak: report.dram_bytes_peak,
                faults: report.faults.total,
                stall_seconds: report.stall_seconds,
                limit_exceeded_seconds: report.limit_exceeded.seconds,
                lost_pages: report.counters.lost,
            }),
        }
    }

    fn log(&self, event: &Event<'_>) {
        #[derive(Serialize)]
        struct OfRun<'a> {
            pid: u32,
            name: Option<String>,
            #[serde(flatten)]
            event: &'a Event<'a>,
        }
        let of_run = OfRun {
            pid: std::process::id(),
            name: self.name.as_ref().map(ToString::to_string),
            event,
        };
        self.print(log_object(&of_run, OffsetDateTime::now_utc()) + "\n");
    }

    /// Writes text as it is.
    fn print(&self, text: String) {
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

fn uses_color() -> bool {
    io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()
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
