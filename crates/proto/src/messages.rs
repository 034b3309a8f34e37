//! The messages between keeper and manager, and those of users and the daemon to a manager.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use undercroft_qos::LatencyBound;

use crate::grant::Turn;
use crate::options::{ClientOptions, LockMemory};
use crate::report::{Report, ShownCommand};
use crate::tiers::TierLaunch;

/// Version of the messages in this file: [`Launch`], [`Request`] and [`Notice`]. A keeper and a
/// manager of different binaries must have the same.
pub const VERSION: u64 = 8;

/// The name that a manager has, before the number of its run. The binary knows by it that it is a
/// manager, and reads its [`Launch`] from standard input.
pub const MANAGER_TITLE: &str = "undercroft: manager of ";

/// Everything that the keeper gives its manager: options, and the numbers of inherited descriptors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// The client's options.
    pub options: ClientOptions,
    /// Program and arguments, for status.
    pub command: ShownCommand,
    /// Process id of the keeper.
    pub keeper: u32,
    /// Process id of the `undercroft run` that the user started; `None`: it has ended, and what its
    /// program left behind goes on.
    pub front: Option<u32>,
    /// The path of the shim, without links, and that of its socket. They mark the program's
    /// processes.
    pub shim: (PathBuf, PathBuf),
    /// Listening socket of the shims.
    pub listener: i32,
    /// Stream to the keeper.
    pub link: i32,
    /// Listening socket for status.
    pub status: i32,
    /// Memfd of the ledger.
    pub ledger: i32,
    /// Chunks that the ledger is laid out for.
    pub ledger_chunks: usize,
    /// The number of the first address space, for tests: they come to the last number soon.
    pub first_space: Option<u32>,
    /// A file that tells the kernel's swap in place of `/proc/swaps`, as under a kernel that loses
    /// pages beside swap, for tests.
    pub swaps: Option<PathBuf>,
    /// Descriptors of each tier, fastest first.
    pub tiers: Vec<TierLaunch>,
    /// Memfd of the legacy.
    pub legacy: i32,
    /// Memfd of the memory of a virtual machine; `None`: the program is none.
    pub guest: Option<i32>,
    /// The locks of its pages.
    pub locks: Option<LockMemory>,
    /// Memfd of the policy file that users have set; `None`: the keeper is too old to have it.
    #[serde(default)]
    pub policy: Option<i32>,
    /// Socket on which the holder hands descriptors to a successor.
    pub handover: i32,
    /// A successor: the socket to ask the holder of its predecessor. `None`: the first manager.
    pub predecessor: Option<i32>,
}

/// A request of the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The client has ended: report and exit.
    Finish {
        /// The exit status of the run.
        exit_status: i32,
        /// Time from the program's start to its end.
        wall_ns: u64,
    },
    /// The program has ended, and has left processes behind. To be reported as far as it is.
    Leave {
        /// The exit status of the program.
        exit_status: i32,
        /// Time from the program's start to its end.
        wall_ns: u64,
    },
}

/// Requests of a user to a running manager. Nothing at all asks for the status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ask {
    /// Empty this tier, counted from 0, and use it no more.
    Drain(u8),
    /// Empty this tier, counted from 0, and give its space back.
    Remove(u8),
    /// Use this tier again, counted from 0, which was to be emptied.
    Reopen(u8),
    /// Use another tier: its description, as `--tier` takes it, with an absolute path.
    Add(String),
    /// Keep this bound from now on.
    Latency {
        /// `None`: no bound.
        #[serde(with = "crate::options::as_bound")]
        bound: Option<LatencyBound>,
    },
    /// Keep to this much DRAM from now on: bytes; `u64::MAX` = no limit.
    MemoryMax(u64),
    /// True: evict nothing and move nothing between tiers. False: go on.
    Pause(bool),
    /// The kernel writes the core of this process: bring its pages in, above the limit if need be,
    /// and keep all pages of the run where they are until it has ended.
    Core(u32),
    /// True: as `Pause`, and all pages come back into memory. False: go on.
    Keep(bool),
    /// Pages that have not been used for this many milliseconds leave now, although there is room.
    Demote(u64),
    /// Have this policy file name pages from now on. Its bytes come along, as a sealed memfd.
    Policy {
        /// Its path, for reports; `None`: no file from now on, and no bytes.
        file: Option<String>,
    },
    /// Give this value to a parameter of the policy file.
    Parameter {
        /// The parameter's name.
        name: String,
        /// Its value from now on.
        value: i64,
    },
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answered {
    /// The request is done, or under way.
    Yes,
    /// Nothing was changed, and why.
    Refused(String),
}

/// Words of the daemon that the keeper passes on. The answer is an `Option<Figures>`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Word {
    /// Tell what the run has and does now, and the page-ins that were not told yet.
    Figures,
    /// Turn the knobs so. The answer is `None`.
    Turn(Turn),
}

/// A message of the manager, one JSON value a line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Notice {
    /// The holder of the manager's descriptors has started.
    Holder(u32),
    /// The manager is ready for clients.
    Ready,
    /// The manager cannot serve, and why.
    Failed(String),
    /// The client was ended, and why.
    Doomed(String),
    /// The answer to `Finish` and to `Leave`.
    Report(Box<Report>),
}

/// Writes one notice to the keeper.
pub fn tell(link: &OwnedFd, notice: &Notice) -> io::Result<()> {
    let mut line = serde_json::to_vec(notice)?;
    line.push(b'\n');
    let mut rest = &line[..];
    while !rest.is_empty() {
        let sent = rustix::io::write(link, rest)?;
        rest = &rest[sent..];
    }
    Ok(())
}

/// Checks what must hold of every message that is accepted, whatever bytes came: written again, it
/// is accepted, and a message without measurements is the same. For the fuzz target and its test.
/// Returns how many kinds of message `bytes` are.
#[cfg(any(test, fuzzing))]
pub fn check(bytes: &[u8]) -> u32 {
    let kinds = [
        accepted::<Launch>(bytes, true),
        accepted::<Request>(bytes, true),
        // Measurements are fractions. Reading one may change its last digit.
        accepted::<Notice>(bytes, false),
        accepted::<crate::report::Snapshot>(bytes, false),
    ];
    kinds.iter().filter(|is| **is).count() as u32
}

/// * `exact`: written again, it must be the same.
#[cfg(any(test, fuzzing))]
fn accepted<T: Serialize + for<'de> Deserialize<'de>>(bytes: &[u8], exact: bool) -> bool {
    let Ok(message) = serde_json::from_slice::<T>(bytes) else {
        return false;
    };
    let write = |message: &T| serde_json::to_string(message).expect("a message is plain data");
    let text = write(&message);
    let again: T = serde_json::from_str(&text).expect("a message that was accepted");
    assert!(!exact || write(&again) == text, "{text}");
    true
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;

    const LAUNCH: &str = r#"{"options":{"memory_max":16777216,"tiers":["ram,lz4,max=12.5%",
        "file:/a:b,size=20G,tbw=600T"],"reclaim":"lru","prefetch":"readahead:8","placement":"worth",
        "when_full":"kill","quiet":true,"trace":null,"access_scan":{"every":{"secs":1,
        "nanos":500}},"latency":"p99=200us","latency_control":true,
        "takeovers_max":7,"class":"web","memory_price":"4.5",
        "rights":{"cpus":"0-3,6","realtime":false,"moves":33554432},
        "name":"a-1","compressors":null},
        "command":{"words":["sort","-n"],"arguments":1},"keeper":7,"front":6,"shim":["/a/shim","/a/socket"],
        "listener":3,"link":4,"status":5,"ledger":6,"ledger_chunks":512,
        "tiers":[{"memory":7,"backing":null,"device":null,"bell":null,"profile":null},
        {"memory":8,"backing":[9,"/a:b",1048576],"device":13,"bell":14,"profile":null}],
        "legacy":10,"guest":15,"locks":{"memfd":16,"each_max":18446744073709551615},"handover":11,"predecessor":12}"#;
    const OTHERS: [&str; 6] = [
        r#"{"Holder":17}"#,
        r#"{"Finish":{"exit_status":-9,"wall_ns":18446744073709551615}}"#,
        r#"{"Leave":{"exit_status":255,"wall_ns":0}}"#,
        r#""Ready""#,
        r#"{"Failed":"no \u00e9\n\ud83d\ude00"}"#,
        r#"{"Doomed":""}"#,
    ];
    const PIECES: [&str; 10] = [
        "1e99",
        "-1",
        "null",
        "[]",
        "{}",
        "\"\"",
        "0.5",
        "99999999999999999999",
        "%",
        "\\u0000",
    ];

    /// Bytes change, pieces are put in place of others, and messages follow each other.
    #[test]
    fn mutated_messages_keep_every_promise() {
        let mut random = Random::new(21);
        let (mut taken, mut refused) = (0, 0);
        for round in 0..40_000 {
            let mut bytes = match round % 2 {
                0 => LAUNCH,
                _ => OTHERS[random.index(OTHERS.len())],
            }
            .as_bytes()
            .to_vec();
            for _ in 0..random.below(3) {
                let at = random.index(bytes.len());
                let to = (at + random.index(8)).min(bytes.len());
                match random.below(4) {
                    0 => bytes[at] ^= 1 << random.below(8),
                    1 => bytes[at] = b"0123456789"[random.index(10)],
                    2 => bytes.truncate(at + 1),
                    _ => drop(bytes.splice(at..to, PIECES[random.index(10)].bytes())),
                }
            }
            match check(&bytes) {
                0 => refused += 1,
                _ => taken += 1,
            }
        }
        assert!(taken > 10_000 && refused > 10_000, "{taken}, {refused}");
        assert_eq!(check(LAUNCH.as_bytes()), 1);
        for message in OTHERS {
            assert_eq!(check(message.as_bytes()), 1, "{message}");
        }
    }
}
