//! Where the server gets what it shows, and who carries out changes.

use std::path::PathBuf;

use undercroft_base::{Bytes, Nanos};
use undercroft_keeper as keeper;
use undercroft_proto::messages::{Answered, Ask};
use undercroft_proto::report::Snapshot;
use undercroft_qos::LatencyBound;

/// A change of one running client.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The bound of page-ins; `None`: no bound from now on.
    Latency(Option<LatencyBound>),
    /// DRAM for the program and its compressed pages; `None`: no limit from now on.
    MemoryMax(Option<Bytes>),
    /// Empty this tier, counted from 0, and use it no more.
    Drain(u8),
    /// Empty this tier, counted from 0, and give its space back.
    Remove(u8),
    /// Use this tier again, counted from 0.
    Reopen(u8),
    /// Use another tier, of this description.
    Add(String),
    /// True: evict nothing and move nothing. False: go on.
    Pause(bool),
    /// Pages that were not used for this long leave memory.
    Demote(Nanos),
    /// Have this policy file name pages; `None`: none from now on.
    Policy(Option<PathBuf>),
    /// Give a parameter of that file a value.
    Parameter(String, i64),
}

/// Why a change was not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotChanged {
    /// The client does not answer: it has ended, or its manager is very busy.
    NoAnswer,
    /// The manager refused, and why.
    Refused(String),
}

/// The running clients. Calls come from several threads at once.
pub trait Source: Send + Sync {
    /// All clients now, in order of their process ids. The server asks at most twice a second.
    fn clients(&self) -> Vec<Snapshot>;

    /// Makes a change. Errors: nothing was changed.
    fn change(&self, pid: u32, change: Change) -> Result<(), NotChanged>;
}

/// The clients on this machine, asked over their sockets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Live {
    /// Whether clients of other users are among them.
    pub of_all: bool,
}

impl Source for Live {
    fn clients(&self) -> Vec<Snapshot> {
        if self.of_all {
            keeper::others::snapshots_of_all()
        } else {
            keeper::status::snapshots()
        }
    }

    fn change(&self, pid: u32, change: Change) -> Result<(), NotChanged> {
        let what = match change {
            Change::Policy(Some(file)) => return outcome(keeper::status::ask_policy(pid, &file)),
            Change::Policy(None) => Ask::Policy { file: None },
            Change::Parameter(name, value) => Ask::Parameter { name, value },
            Change::Latency(bound) => Ask::Latency { bound },
            Change::MemoryMax(limit) => Ask::MemoryMax(limit.map_or(u64::MAX, |limit| limit.0)),
            Change::Drain(tier) => Ask::Drain(tier),
            Change::Remove(tier) => Ask::Remove(tier),
            Change::Reopen(tier) => Ask::Reopen(tier),
            Change::Add(spec) => Ask::Add(spec),
            Change::Pause(paused) => Ask::Pause(paused),
            Change::Demote(older) => Ask::Demote(older.0 / 1_000_000),
        };
        outcome(keeper::status::ask(pid, what))
    }
}

fn outcome(answered: Option<Answered>) -> Result<(), NotChanged> {
    match answered {
        Some(Answered::Yes) => Ok(()),
        Some(Answered::Refused(why)) => Err(NotChanged::Refused(why)),
        None => Err(NotChanged::NoAnswer),
    }
}
