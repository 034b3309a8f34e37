//! `undercroft set`: changes how a running program is managed.

use std::path::PathBuf;

use undercroft_base::{Bytes, Nanos};
use undercroft_keeper::wanted::Wanted;
use undercroft_proto::messages::{Answered, Ask};
use undercroft_proto::report::Snapshot;
use undercroft_qos::LatencyBound;

use crate::memory::Memory;
use crate::values::{self, MemoryMax};
use crate::{live, show};
use undercroft_terminal::{Failure, status};

/// A change, as `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    /// The bound of page-ins; `None`: there is none from now on.
    Latency(Option<LatencyBound>),
    /// DRAM for the program and its compressed pages.
    MemoryMax(MemoryMax),
    /// Nothing is evicted, and nothing moves.
    Paused(bool),
    /// The same, and what was evicted comes back.
    Keep(bool),
    /// The file that names pages; `None`: none from now on.
    Policy(Option<PathBuf>),
    /// A parameter of that file, and its value.
    Parameter(String, i64),
}

/// Reads `KEY=VALUE`. Errors: for the user.
pub(crate) fn change(text: &str) -> Result<Change, String> {
    match text.split_once('=') {
        Some(("latency", "none")) => Ok(Change::Latency(None)),
        Some(("latency", bound)) => match bound.parse::<LatencyBound>() {
            Ok(bound) => Ok(Change::Latency(Some(bound))),
            Err(error) => Err(error.to_string()),
        },
        Some(("stall-max", _)) => Err(
            "an earlier version had it; use policy.stall_max_percent=NUMBER of the policy file \
             locality.wasm"
                .to_owned(),
        ),
        Some(("memory-max", limit)) => values::memory_max(limit).map(Change::MemoryMax),
        Some(("paused", "yes")) => Ok(Change::Paused(true)),
        Some(("paused", "no")) => Ok(Change::Paused(false)),
        Some(("keep", "yes")) => Ok(Change::Keep(true)),
        Some(("keep", "no")) => Ok(Change::Keep(false)),
        Some(("keep", _)) => Err("it is `keep=yes` or `keep=no`".to_owned()),
        Some(("paused", _)) => Err("it is `paused=yes` or `paused=no`".to_owned()),
        Some(("policy", "none" | "auto")) => Ok(Change::Policy(None)),
        Some(("policy", file)) if file.ends_with(".wasm") => {
            Ok(Change::Policy(Some(PathBuf::from(file))))
        }
        Some(("policy", _)) => {
            let why = "it is `policy=FILE.wasm`, or `policy=none`: no other policy can be chosen \
                       while the program runs";
            Err(why.to_owned())
        }
        Some((key, value)) if key.starts_with("policy.") => match value.parse() {
            Ok(value) => Ok(Change::Parameter(key["policy.".len()..].to_owned(), value)),
            Err(_) => Err(format!("`{value}` is no whole number of 64 bits")),
        },
        _ => Err(
            "only `memory-max`, `latency`, `paused`, `keep`, `policy` and `policy.NAME` can be \
             set; use for example memory-max=512M or latency=p99=300us"
                .to_owned(),
        ),
    }
}

/// Changes an option of a run.
pub(crate) fn set(wanted: &Wanted, change: Change) -> Result<u8, Failure> {
    let run = live::run_of(wanted)?;
    let pid = run.pid;
    if let (Change::MemoryMax(_), Some(why)) = (&change, run.limit_is_kept_by()) {
        return Err(Failure::new(
            status::FAILED,
            format!("the limit of run {pid} is not changed"),
            why,
            "change memory_max of the class in the daemon's configuration, and send the daemon SIGHUP",
        ));
    }
    match change {
        Change::Latency(bound) => set_latency(&run, bound),
        Change::MemoryMax(limit) => set_memory_max(&run, limit),
        Change::Paused(paused) => pause(pid, Ask::Pause(paused), paused),
        Change::Keep(keep) => pause(pid, Ask::Keep(keep), keep),
        Change::Policy(Some(file)) => {
            let done = format!("Run {pid} asks {} from now on.", file.display());
            let fix =
                "the policy before goes on; docs/guide/policies.md says what a file must have";
            answer(pid, live::ask_policy(pid, &file), &done, "the policy", fix)
        }
        Change::Policy(None) => {
            let rule = &run.policies.reclaim;
            let done = format!("Run {pid} asks no policy file any more; {rule} chooses.");
            let fix = "the policy before goes on";
            ask(pid, Ask::Policy { file: None }, &done, "the policy", fix)
        }
        Change::Parameter(name, value) => {
            let done = format!("{name} of the policy of run {pid} is {value} from now on.");
            let fix = "`undercroft status --json` has the parameters, in policies.plugin";
            let what = format!("{name} of the policy");
            ask(pid, Ask::Parameter { name, value }, &done, &what, fix)
        }
    }
}

/// Pauses run `pid`, or ends its pause.
fn pause(pid: u32, ask_it: Ask, paused: bool) -> Result<u8, Failure> {
    let done = if ask_it == Ask::Keep(true) {
        format!(
            "Run {pid} brings its pages back and keeps them, until `undercroft set {pid} keep=no`; \
             `undercroft status {pid}` shows how far it is."
        )
    } else if paused {
        format!("Run {pid} is paused: no page leaves, until `undercroft set {pid} paused=no`.")
    } else {
        format!(
            "Run {pid} keeps to its limit again; `undercroft status {pid}` shows how far it is."
        )
    };
    let fix = "leave the run as it is, or start it without what is in the way";
    ask(pid, ask_it, &done, "the pause", fix)
}

fn set_latency(run: &Snapshot, bound: Option<LatencyBound>) -> Result<u8, Failure> {
    let pid = run.pid;
    let done = match bound {
        Some(bound) => match hindrance(bound, run) {
            Some(why) => format!("Run {pid} is held to {bound} from now on, but {why}."),
            None => format!("Run {pid} keeps {bound} from now on."),
        },
        None => format!("Run {pid} has no latency bound any more."),
    };
    let fix = "set a bound that can be kept; the old one still holds";
    ask(pid, Ask::Latency { bound }, &done, "the latency bound", fix)
}

/// Why no page-in of a run can keep a bound, if none can.
fn hindrance(bound: LatencyBound, run: &Snapshot) -> Option<String> {
    let used = run.tiers.iter().filter(|tier| tier.rank.is_some());
    let shortest = used.map(|tier| tier.load_seconds).reduce(f64::min)?;
    let load = Nanos((shortest * 1e9) as u64);
    (load > bound.limit).then(|| format!("a load from its fastest tier takes {load}"))
}

fn set_memory_max(run: &Snapshot, limit: MemoryMax) -> Result<u8, Failure> {
    let pid = run.pid;
    let bytes = limit.bytes(Memory::of(pid)?.all()).map_err(|why| {
        Failure::new(
            status::USAGE,
            "memory-max is too small",
            why,
            "give a larger share, or a size such as 512M",
        )
    })?;
    let done = match bytes {
        u64::MAX => format!("Run {pid} has no limit any more."),
        _ if run.paused => format!(
            "Run {pid} is paused, and keeps to {} once that ends.",
            Bytes(bytes)
        ),
        _ => format!(
            "Run {pid} keeps to {} from now on; `undercroft status {pid}` shows how far it is.",
            Bytes(bytes)
        ),
    };
    let fix = "set another limit; the old one still holds";
    ask(pid, Ask::MemoryMax(bytes), &done, "the limit", fix)
}

/// Asks a run for a change.
///
/// * `done`: what to print if it is made.
/// * `what`, `fix`: what is not changed if it is refused, and what to do then.
fn ask(pid: u32, change: Ask, done: &str, what: &str, fix: &str) -> Result<u8, Failure> {
    answer(pid, live::ask(pid, change), done, what, fix)
}

/// Tells the user what a run has answered.
fn answer(
    pid: u32,
    answered: Option<Answered>,
    done: &str,
    what: &str,
    fix: &str,
) -> Result<u8, Failure> {
    match answered {
        Some(Answered::Yes) => {
            show::line(done)?;
            Ok(0)
        }
        Some(Answered::Refused(why)) => Err(Failure::new(
            status::FAILED,
            format!("{what} of run {pid} is not changed"),
            why,
            fix,
        )),
        None => Err(live::no_answer(pid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_shorter_than_a_load_of_the_fastest_tier_cannot_be_kept() {
        let text = include_str!("top/snapshot.json");
        let run: Snapshot = serde_json::from_str(text).expect("a snapshot");
        let of = |bound: &str| hindrance(bound.parse().expect("a bound"), &run);
        let why = of("p99=1us").unwrap_or_default();
        assert!(why.contains("takes 3.0 us"), "{why}");
        assert_eq!(of("p99=3us"), None);
    }

    #[test]
    fn a_change_is_a_bound_or_none_and_an_error_says_what_can_be_set() {
        let bound = "p99=300us".parse().expect("a bound");
        assert_eq!(
            change("latency=p99=300us"),
            Ok(Change::Latency(Some(bound)))
        );
        assert_eq!(change("latency=none"), Ok(Change::Latency(None)));
        assert_eq!(change("paused=yes"), Ok(Change::Paused(true)));
        let size = MemoryMax::Size(Bytes(512 << 20));
        assert_eq!(change("memory-max=512M"), Ok(Change::MemoryMax(size)));
        assert_eq!(
            change("memory-max=max"),
            Ok(Change::MemoryMax(MemoryMax::Max))
        );
        let file = || Some(PathBuf::from("a=b.wasm"));
        assert_eq!(change("policy=a=b.wasm"), Ok(Change::Policy(file())));
        assert_eq!(change("policy=auto"), Ok(Change::Policy(None)));
        assert_eq!(change("policy=none"), Ok(Change::Policy(None)));
        let behind = Change::Parameter("behind".to_owned(), -7);
        assert_eq!(change("policy.behind=-7"), Ok(behind));
        for (text, part) in [
            ("policy=lru", "policy=FILE.wasm"),
            ("policy.behind=1.5", "no whole number"),
            ("policy.behind=9223372036854775808", "of 64 bits"),
            ("memory=1G", "memory-max=512M"),
            ("latency=fast", "pPERCENTILE"),
            ("memory-max=1K", "cannot make progress"),
            ("memory-max=", "or a share"),
            ("paused=1", "paused=yes"),
            ("keep=1", "keep=yes"),
            ("pause=yes", "`paused`"),
        ] {
            let error = change(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
