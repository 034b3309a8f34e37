//! The daemon's log: a line on standard error for each run that is admitted, refused, given another
//! limit, or gone. Of a command only the program is told: arguments may be secrets.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use time::OffsetDateTime;
use undercroft_base::Bytes;
use undercroft_terminal::{LogFormat, log_object, log_time};

use crate::member::Member;

/// Least time between two lines about the limit of one run: it moves many times a second.
const LIMIT_EVERY: Duration = Duration::from_secs(1);

/// An event of the log.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event<'a> {
    /// The daemon serves from now on.
    Serves { memory_bytes: u64 },
    /// A new run has its share.
    Admitted {
        #[serde(flatten)]
        run: RunName<'a>,
        limit_bytes: u64,
    },
    /// A run of an earlier daemon keeps what it has.
    Claimed {
        #[serde(flatten)]
        run: RunName<'a>,
        limit_bytes: u64,
    },
    /// A run does not start.
    Refused {
        #[serde(flatten)]
        run: RunName<'a>,
        why: &'a str,
    },
    /// A run has another limit.
    Limit {
        #[serde(flatten)]
        run: RunName<'a>,
        from_bytes: u64,
        limit_bytes: u64,
    },
    /// A run does not take another limit.
    LimitRefused { pid: u32, why: &'a str },
    /// A run has ended.
    Left {
        #[serde(flatten)]
        run: RunName<'a>,
    },
    /// A connection was ended, because its peer broke the rules.
    Ended { pid: u32, why: &'a str },
}

/// A run, as the log names it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct RunName<'a> {
    /// Process id of its keeper; 0: it is outside of this pid namespace.
    pub(crate) pid: u32,
    pub(crate) class: &'a str,
    pub(crate) program: &'a str,
}

impl<'a> RunName<'a> {
    /// * `command`: the whole line.
    pub(crate) fn new(pid: u32, class: &'a str, command: &'a str) -> RunName<'a> {
        RunName {
            pid,
            class,
            program: command.split(' ').next().unwrap_or(""),
        }
    }

    fn text(&self) -> String {
        let RunName {
            pid,
            class,
            program,
        } = self;
        format!("process {pid} ({program}, class {class})")
    }
}

impl Event<'_> {
    fn text(&self) -> String {
        match self {
            Event::Serves { memory_bytes } => format!("dividing {}", Bytes(*memory_bytes)),
            Event::Admitted { run, limit_bytes } => {
                format!("admitted {}, limit {}", run.text(), Bytes(*limit_bytes))
            }
            Event::Claimed { run, limit_bytes } => {
                format!("{} is back, limit {}", run.text(), Bytes(*limit_bytes))
            }
            Event::Refused { run, why } => format!("refused {}: {why}", run.text()),
            Event::Limit {
                run,
                from_bytes,
                limit_bytes,
            } => format!(
                "limit of {} from {} to {}",
                run.text(),
                Bytes(*from_bytes),
                Bytes(*limit_bytes)
            ),
            Event::LimitRefused { pid, why } => {
                format!("process {pid} does not take its limit: {why}")
            }
            Event::Left { run } => format!("{} has left", run.text()),
            Event::Ended { pid, why } => format!("process {pid} is not served any more: {why}"),
        }
    }

    /// The line, without its end. Bytes that a terminal would obey are escaped.
    fn line(&self, format: LogFormat, now: OffsetDateTime) -> String {
        match format {
            LogFormat::Text => {
                let text = self.text();
                let shown = text
                    .chars()
                    .map(|of| if of.is_control() { '?' } else { of });
                format!("{} {}", log_time(now), shown.collect::<String>())
            }
            LogFormat::Json => log_object(self, now),
        }
    }
}

/// A run as it was last told of.
struct Told {
    pid: u32,
    class: String,
    command: String,
    limit: Bytes,
    at: Duration,
}

impl Told {
    fn name(&self) -> RunName<'_> {
        RunName::new(self.pid, &self.class, &self.command)
    }
}

/// The runs that were told of, and the form of the log.
pub(crate) struct Journal {
    format: LogFormat,
    runs: BTreeMap<u64, Told>,
}

impl Journal {
    pub(crate) fn new(format: LogFormat) -> Journal {
        Journal {
            format,
            runs: BTreeMap::new(),
        }
    }

    /// Writes an event. A closed standard error is no reason to fail.
    pub(crate) fn write(&self, event: &Event<'_>) {
        let line = event.line(self.format, OffsetDateTime::now_utc());
        let _ = writeln!(io::stderr(), "{line}");
    }

    /// Tells of runs that have come, gone, or have another limit.
    /// * `now`: time since the daemon's start.
    pub(crate) fn follow<'a>(
        &mut self,
        members: impl Iterator<Item = (u64, &'a Member)>,
        now: Duration,
    ) {
        self.news(members, now, |journal, event| journal.write(event));
    }

    fn news<'a>(
        &mut self,
        members: impl Iterator<Item = (u64, &'a Member)>,
        now: Duration,
        mut tell: impl FnMut(&Journal, &Event<'_>),
    ) {
        let mut before = std::mem::take(&mut self.runs);
        for (id, member) in members {
            let run = RunName::new(member.pid, &member.class_name, &member.command);
            let limit_bytes = member.limit.0;
            let mut told = before.remove(&id).unwrap_or_else(|| {
                let run = run.clone();
                let came = if member.claimed {
                    Event::Claimed { run, limit_bytes }
                } else {
                    Event::Admitted { run, limit_bytes }
                };
                tell(self, &came);
                Told {
                    pid: member.pid,
                    class: member.class_name.clone(),
                    command: member.command.clone(),
                    limit: member.limit,
                    at: now,
                }
            });
            if told.limit != member.limit && now.saturating_sub(told.at) >= LIMIT_EVERY {
                let from_bytes = told.limit.0;
                tell(
                    self,
                    &Event::Limit {
                        run,
                        from_bytes,
                        limit_bytes,
                    },
                );
                (told.limit, told.at) = (member.limit, now);
            }
            self.runs.insert(id, told);
        }
        for told in before.values() {
            tell(self, &Event::Left { run: told.name() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Class;
    use undercroft_proto::grant::{Hello, VERSION};

    fn member(pid: u32, mib: u64) -> Member {
        let hello = Hello {
            version: VERSION,
            class: "web".to_owned(),
            command: "redis --requirepass secret".to_owned(),
            memory_max: None,
            claim: None,
        };
        let class = Class {
            weight: 1,
            memory_min: Bytes(0),
            memory_max: Bytes(1 << 30),
            latency: None,
            demand: None,
            cpus: None,
            realtime: true,
            moves: None,
            policy: None,
        };
        let limit = Bytes(mib << 20);
        Member::new(pid, hello, class, (limit, Bytes(1 << 30)), Duration::ZERO)
    }

    fn news(journal: &mut Journal, members: &[(u64, &Member)], millis: u64) -> Vec<String> {
        let mut told = Vec::new();
        let now = Duration::from_millis(millis);
        let all = members.iter().copied();
        journal.news(all, now, |_, event| told.push(event.text()));
        told
    }

    #[test]
    fn runs_that_come_change_and_go_are_told_once() {
        let mut journal = Journal::new(LogFormat::Text);
        let (mut first, mut second) = (member(7, 64), member(8, 32));
        second.claimed = true;
        let told = news(&mut journal, &[(1, &first), (2, &second)], 0);
        assert_eq!(
            told,
            [
                "admitted process 7 (redis, class web), limit 64.0 MiB",
                "process 8 (redis, class web) is back, limit 32.0 MiB"
            ]
        );
        first.limit = Bytes(32 << 20);
        assert!(news(&mut journal, &[(1, &first), (2, &second)], 999).is_empty());
        first.limit = Bytes(48 << 20);
        let told = news(&mut journal, &[(1, &first), (2, &second)], 1000);
        let limit = "limit of process 7 (redis, class web) from 64.0 MiB to 48.0 MiB";
        assert_eq!(told, [limit]);
        assert!(news(&mut journal, &[(1, &first), (2, &second)], 5000).is_empty());
        let told = news(&mut journal, &[(1, &first)], 5001);
        assert_eq!(told, ["process 8 (redis, class web) has left"]);
    }

    #[test]
    fn a_line_is_one_line_with_its_time_and_without_arguments() {
        let now = OffsetDateTime::from_unix_timestamp_nanos(1_700_000_000_123_456_789);
        let now = now.expect("a time");
        let run = RunName::new(7, "we\x1bb", "redis\n --requirepass secret");
        let event = Event::Refused {
            run,
            why: "no \"room\"",
        };
        assert_eq!(
            event.line(LogFormat::Text, now),
            "2023-11-14T22:13:20.123Z refused process 7 (redis?, class we?b): no \"room\""
        );
        assert_eq!(
            event.line(LogFormat::Json, now),
            "{\"time\":\"2023-11-14T22:13:20.123Z\",\"event\":\"refused\",\"pid\":7,\
             \"class\":\"we\\u001bb\",\"program\":\"redis\\n\",\"why\":\"no \\\"room\\\"\"}"
        );
    }
}
