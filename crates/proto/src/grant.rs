//! The messages between a keeper and the daemon, which grants memory and storage: one JSON value a
//! line, each at most [`LINE_BYTES_MAX`] long. docs/design/0027.
//!
//! A keeper says `Hello`, and is granted or refused. From then on the daemon asks (`Tell`, `Keep`,
//! `Quotas`), at most one question of a kind at a time, and the keeper answers. The grant lasts as
//! long as the connection. A keeper whose daemon has gone says `Hello` with a claim to the next
//! one.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use undercroft_qos::LatencyBound;
use undercroft_qos::tail::BUCKETS;

pub use undercroft_engine::reclaim::Goes;
pub use undercroft_tier::file::SLAB_BYTES;

/// The daemon's socket, in the directory of the runs.
pub const SOCKET: &str = "daemon.sock";

/// Version of these messages. Others are refused.
pub const VERSION: u32 = 4;

/// Longest message.
pub const LINE_BYTES_MAX: usize = 64 << 10;

/// Most bytes of a command line that are sent.
pub const COMMAND_BYTES_MAX: usize = 200;

/// The daemon has answered a new run after this, whatever others do.
pub const ADMISSION_MAX: Duration = Duration::from_secs(60);

/// Words of a keeper, or of a user, to the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// The first message of a keeper.
    Hello(Hello),
    /// The answer to `Tell`.
    Figures {
        /// How the client does.
        client: Figures,
        /// Its room in each tier that has a budget.
        storage: Vec<StorageFigures>,
    },
    /// The answer to `Keep`.
    Kept {
        /// The limit that was asked for.
        memory: u64,
        /// Why it is not in force; null = it is.
        refused: Option<String>,
    },
    /// Half of what a quota left is full. Not an answer: it may be said at any time.
    Fills(Vec<StorageFigures>),
    /// The answer to `Quotas`: what it has of each tier that has a budget, since they hold.
    Quotas(Vec<StorageFigures>),
    /// A question of a user: what is the state of everything?
    Status,
}

/// Who asks for a grant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// Name of the class.
    pub class: String,
    /// The command line, cut.
    pub command: String,
    /// The user's own limit; null = none.
    pub memory_max: Option<u64>,
    /// Grants of an earlier daemon; null = nothing yet.
    pub claim: Option<Claim>,
}

/// Holdings of a keeper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// The limit in force, in bytes.
    pub memory: u64,
    /// Its room in each tier that has a budget.
    pub storage: Vec<StorageClaim>,
    /// Descriptions of the tiers whose emulated devices it uses. The memory of each comes along as
    /// a descriptor.
    pub devices: Vec<String>,
}

/// A keeper's holding of a tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageClaim {
    /// Its description, as granted.
    pub tier: String,
    /// Its room there.
    pub figures: StorageFigures,
}

/// A client's room in a tier, in bytes. All of them 0: the tier was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageFigures {
    /// Its quota: what it may take.
    pub quota: u64,
    /// Space that it has, with or without pages in it. More than the quota: it may get no more, and
    /// gives back what comes free.
    pub held: u64,
    /// Of its pages.
    pub used: u64,
}

/// Figures of a client whose use of memory is not known.
pub const UNKNOWN: u64 = u64::MAX;

/// How a client does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// DRAM in use, in bytes; [`UNKNOWN`] = as much as it may still use.
    pub dram: u64,
    /// The limit that it keeps to, in bytes; null = none.
    pub limit: Option<u64>,
    /// Seconds that its threads have waited for pages since the start.
    pub stall_seconds: f64,
    /// Faults that read a tier since the start.
    pub swap_ins: u64,
    /// Its miss-ratio curve; null = not known.
    pub curve: Option<CurveFigures>,
    /// Its page-ins since the last figures; null = it has no latency bound that control may keep.
    pub page_ins: Option<PageIns>,
}

/// A latency bound as its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bound(pub LatencyBound);

impl TryFrom<String> for Bound {
    type Error = undercroft_qos::BoundError;

    fn try_from(text: String) -> Result<Bound, undercroft_qos::BoundError> {
        text.parse().map(Bound)
    }
}

impl From<Bound> for String {
    fn from(bound: Bound) -> String {
        bound.0.to_string()
    }
}

/// Page-ins under one bound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageIns {
    /// The bound.
    pub bound: Bound,
    /// All of them.
    pub all: Latencies,
    /// Page-ins from a device.
    pub device: Latencies,
    /// Of all: above the limit.
    pub over: u64,
}

/// Latencies by bucket of `undercroft_qos::tail`: each bucket at most once, in their order, and no
/// more than [`Latencies::MAX`] in all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u16, u32)>", into = "Vec<(u16, u32)>")]
pub struct Latencies(Vec<(u16, u32)>);

/// These are no latencies by bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLatencies;

impl fmt::Display for NoLatencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no latencies by bucket")
    }
}

impl Latencies {
    /// More page-ins than a program can have in some seconds.
    pub const MAX: u64 = 10_000_000;

    /// Bucket and count of those that are not 0.
    pub fn each(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.0.iter().map(|(at, count)| (usize::from(*at), *count))
    }
}

impl TryFrom<Vec<(u16, u32)>> for Latencies {
    type Error = NoLatencies;

    fn try_from(counts: Vec<(u16, u32)>) -> Result<Latencies, NoLatencies> {
        let in_order = counts.is_sorted_by(|(one, _), (two, _)| one < two);
        let in_range = counts
            .last()
            .is_none_or(|(at, _)| usize::from(*at) < BUCKETS);
        let sum: u64 = counts.iter().map(|(_, count)| u64::from(*count)).sum();
        if in_order && in_range && sum <= Latencies::MAX {
            Ok(Latencies(counts))
        } else {
            Err(NoLatencies)
        }
    }
}

impl From<Latencies> for Vec<(u16, u32)> {
    fn from(latencies: Latencies) -> Vec<(u16, u32)> {
        latencies.0
    }
}

/// How the knobs of a client are to be turned, for [`TURN_HOLDS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// Pages of one batch, its part of S(t) of NVSwap. 0 counts as 1.
    pub batch: u32,
    /// Where its pages go.
    #[serde(with = "GoesWord")]
    pub goes: Goes,
}

/// The words for [`Goes`] in these messages.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Goes")]
enum GoesWord {
    AsPlaced,
    ToDevice,
    ToBuffer,
}

/// How long a client obeys a [`Turn`]. Without another it turns its own knobs.
pub const TURN_HOLDS: Duration = Duration::from_secs(3);

/// A miss-ratio curve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurveFigures {
    /// How long it was counted.
    pub seconds: f64,
    /// Limits in bytes, and the seconds of stall in a second that each would mean. Smallest first.
    pub points: Vec<(u64, f64)>,
}

/// Words of the daemon to a keeper, or to a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// The answer to `Hello`.
    Granted(Grant),
    /// The answer to `Hello`, or to what is no message.
    Refused(Refusal),
    /// How does the client do?
    Tell,
    /// Keep to this limit from now on.
    Keep {
        /// In bytes.
        memory: u64,
    },
    /// Take no more than this, in bytes, of each tier that has a budget: whole slabs of
    /// [`SLAB_BYTES`], as the last answer has them or others.
    Quotas(Vec<u64>),
    /// Turn the knobs of latency control so. No answer is awaited.
    Turn(Turn),
    /// The answer to `Status`.
    Status(Box<DaemonStatus>),
}

/// The grant to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    /// Its class.
    pub class: String,
    /// The limit now, in bytes.
    pub memory: u64,
    /// The largest limit that it may ever have.
    pub memory_most: u64,
    /// Its tiers, as `--tier` has them; empty = the run chooses.
    pub tiers: Vec<String>,
    /// Quotas: the room that it may take of each tier that has a budget, in bytes. Of a file that
    /// may become more, up to its size.
    pub storage: Vec<u64>,
    /// Tiers, counted from 0, whose emulated device all clients share. The memory of each comes
    /// along as a descriptor.
    pub devices: Vec<u8>,
    /// The latency bound of its class; null = none.
    pub latency: Option<String>,
    /// CPUs of its manager; null = all.
    pub cpus: Option<String>,
    /// Its manager may have real-time priority.
    pub realtime: bool,
    /// Bytes a second that its manager may move between tiers; null = as without a daemon.
    pub moves: Option<u64>,
    /// Path of the policy file of its class, for reports; null = none. Its bytes come along as the
    /// last descriptor, sealed. A claim gets none.
    #[serde(default)]
    pub policy: Option<String>,
}

/// Why there is no grant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refusal {
    /// The reason for the user, with the fix.
    pub why: String,
    /// Bytes that could be granted now, of what was short; null = that is not the reason.
    pub could: Option<u64>,
}

/// The answer to `undercroft daemon status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// 1.
    pub schema_version: u32,
    /// Process id of the daemon.
    pub pid: u32,
    /// Since it started.
    pub uptime_seconds: f64,
    /// DRAM that it divides.
    pub memory_bytes: u64,
    /// Of it: held by clients,
    pub held_bytes: u64,
    /// and not held.
    pub free_bytes: u64,
    /// Tiers with a budget.
    pub tiers: Vec<BudgetStatus>,
    /// Clients, in order of their admission.
    pub clients: Vec<MemberStatus>,
    /// Clients that wait to be admitted.
    pub waiting: usize,
    /// Clients that were refused since the start.
    pub refused: u64,
    /// Limits that were changed since the start.
    pub moves: u64,
}

/// The budget of one tier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BudgetStatus {
    /// As configured.
    pub spec: String,
    /// Bytes that may be granted in all.
    pub size_bytes: u64,
    /// Bytes that clients may take, or have.
    pub granted_bytes: u64,
    /// Bytes that their pages take, as they say.
    pub used_bytes: u64,
}

/// A client of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Process id of the keeper, as the kernel gives it.
    pub pid: u32,
    /// Command line, cut.
    pub command: String,
    /// Its class.
    pub class: String,
    /// Its weight.
    pub weight: u32,
    /// Its protection.
    pub memory_min_bytes: u64,
    /// Its limit now.
    pub limit_bytes: u64,
    /// The limit that it should have, by the last division.
    pub target_bytes: u64,
    /// DRAM that it uses, as it says.
    pub dram_bytes: u64,
    /// Whether its miss-ratio curve is known.
    pub has_curve: bool,
    /// Stall since its start, as it says.
    pub stall_seconds: f64,
    /// Faults that read a tier since its start, as it says.
    pub swap_ins: u64,
    /// Its room in each tier with a budget, as it says.
    pub storage: Vec<StorageFigures>,
    /// Whether it claimed what an earlier daemon had granted.
    pub claimed: bool,
    /// How its latency bound is kept; null = it has none, or the daemon has no say in it.
    pub latency: Option<MemberLatency>,
}

/// The latency bound of a client, as the control of all clients sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberLatency {
    /// The bound.
    pub bound: Bound,
    /// Windows of the control that kept it,
    pub windows_kept: u64,
    /// and that missed it.
    pub windows_missed: u64,
    /// How its knobs are turned.
    pub turn: Turn,
}

/// A line for a message, with its end.
pub fn line(message: &impl Serialize) -> Vec<u8> {
    // These types have no map with other keys than texts, and nothing else fails.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Bytes that have arrived, cut into lines.
#[derive(Debug, Default)]
pub struct Lines {
    bytes: Vec<u8>,
}

/// A peer sent a line that is too long, or ended one in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong;

impl Lines {
    /// Takes what has arrived. Errors: a line is longer than [`LINE_BYTES_MAX`].
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), TooLong> {
        self.bytes.extend_from_slice(bytes);
        let last = self.bytes.iter().rposition(|byte| *byte == b'\n');
        let unfinished = self.bytes.len() - last.map_or(0, |at| at + 1);
        if unfinished > LINE_BYTES_MAX {
            return Err(TooLong);
        }
        Ok(())
    }

    /// The next whole line, without its end.
    pub fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.bytes.iter().position(|byte| *byte == b'\n')?;
        let mut line: Vec<u8> = self.bytes.drain(..=end).collect();
        line.pop();
        Some(line)
    }

    /// Whether there is one.
    pub fn has_line(&self) -> bool {
        self.bytes.contains(&b'\n')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_and_are_bounded() {
        let mut lines = Lines::default();
        assert_eq!(lines.take(b"\"Sta"), Ok(()));
        assert_eq!(lines.next_line(), None);
        assert_eq!(lines.take(b"tus\"\n\"Tell\"\n{"), Ok(()));
        let line = lines.next_line().expect("a line");
        assert_eq!(
            serde_json::from_slice::<ToDaemon>(&line).ok(),
            Some(ToDaemon::Status)
        );
        let line = lines.next_line().expect("a line");
        assert_eq!(
            serde_json::from_slice::<ToKeeper>(&line).ok(),
            Some(ToKeeper::Tell)
        );
        assert_eq!(lines.next_line(), None);
        assert_eq!(lines.take(&vec![b'x'; LINE_BYTES_MAX]), Err(TooLong));
    }

    #[test]
    fn latencies_that_cannot_be_are_no_message() {
        for (text, is) in [
            ("[]", true),
            ("[[0,1],[1055,4294]]", true),
            ("[[0,10000000]]", true),
            ("[[0,10000000],[1,1]]", false),
            ("[[1056,1]]", false),
            ("[[5,1],[5,1]]", false),
            ("[[5,1],[4,1]]", false),
            ("[[-1,1]]", false),
            ("[[1,4294967296]]", false),
        ] {
            let parsed = serde_json::from_str::<Latencies>(text);
            assert_eq!(parsed.is_ok(), is, "{text}");
        }
        assert!(serde_json::from_str::<Bound>("\"p99=200us\"").is_ok());
        assert!(serde_json::from_str::<Bound>("\"p99=0us\"").is_err());
    }

    #[test]
    fn message_is_the_same_on_the_other_side() {
        let hello = ToDaemon::Hello(Hello {
            version: VERSION,
            class: "batch".to_owned(),
            command: "a\nb".to_owned(),
            memory_max: None,
            claim: Some(Claim {
                memory: 1 << 40,
                storage: vec![StorageClaim {
                    tier: "file:/a,size=1G".to_owned(),
                    figures: StorageFigures::default(),
                }],
                devices: vec!["file:/a,shape=nvme".to_owned()],
            }),
        });
        let sent = line(&hello);
        assert_eq!(sent.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<ToDaemon>(&sent).ok(), Some(hello));
    }
}
