//! `undercroft upgrade`: has the keepers of running programs put another binary of the manager in
//! place. `keeper/src/upgrade.rs` says who may, and what is checked.

use std::os::fd::OwnedFd;
use std::path::Path;

use serde::Serialize;
use undercroft_base::Nanos;
use undercroft_keeper::upgrade::{Told, open_binary};
use undercroft_proto::report::SCHEMA_VERSION;
use undercroft_proto::versions::Versions;

use crate::args::UpgradeArgs;
use crate::{live, show};
use undercroft_terminal::{Failure, status};

/// The outcome of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Upgraded,
    /// The binary before manages it again.
    Kept,
    /// Nothing was touched.
    Refused,
    /// No manager could take over, and the program was ended.
    Ended,
    NoAnswer,
}

/// A run in the output.
#[derive(Debug, Serialize)]
struct Upgraded {
    pid: u32,
    outcome: Outcome,
    /// Version of the new binary; null if it was refused.
    version: Option<String>,
    /// How long the program waited; null if it did not.
    pause_seconds: Option<f64>,
    /// Why it is not upgraded; null if it is.
    why: Option<String>,
}

/// `undercroft versions`: what this binary can continue.
pub(crate) fn versions() -> Result<u8, Failure> {
    show::json(&Versions::of_this())?;
    Ok(0)
}

/// `undercroft upgrade`.
pub(crate) fn upgrade(args: &UpgradeArgs) -> Result<u8, Failure> {
    let path = args.binary.as_deref();
    let path = path.unwrap_or(Path::new("/proc/self/exe"));
    let binary = open_binary(path).map_err(|error| {
        Failure::new(
            status::USAGE,
            format!("{} cannot be opened", path.display()),
            error.to_string(),
            "give the path of an undercroft binary",
        )
    })?;
    let mut runs_wanted = Vec::new();
    for wanted in &args.runs {
        let run = live::run_of(wanted)?.pid;
        if !runs_wanted.contains(&run) {
            runs_wanted.push(run);
        }
    }
    if args.runs.is_empty() {
        runs_wanted = live::snapshots()?.iter().map(|run| run.pid).collect();
    }
    let mut runs = Vec::new();
    for pid in runs_wanted {
        runs.push(one(pid, &binary, args.json)?);
    }
    if args.json {
        #[derive(Serialize)]
        struct Upgrades<'a> {
            schema_version: u32,
            runs: &'a [Upgraded],
        }
        show::json(&Upgrades {
            schema_version: SCHEMA_VERSION,
            runs: &runs,
        })?;
    } else if runs.is_empty() {
        show::line("Nothing runs under undercroft now.")?;
    }
    let all = runs.iter().all(|run| run.outcome == Outcome::Upgraded);
    Ok(if all { 0 } else { status::FAILED })
}

/// Upgrades one run, and says how it goes.
fn one(pid: u32, binary: &OwnedFd, quiet: bool) -> Result<Upgraded, Failure> {
    let mut version = None;
    let told = live::upgrade(pid, binary, |news| {
        if let Told::Checked {
            version: of,
            pause_seconds,
            ..
        } = news
        {
            version = Some(of.clone());
            if !quiet {
                let text = checked(pid, of, *pause_seconds);
                let _ = show::line(&text); // the last line fails, too
            }
        }
    });
    let run = outcome(pid, version, told);
    if !quiet {
        show::line(&text(&run))?;
    }
    Ok(run)
}

/// The notice to the user before the manager is replaced.
fn checked(pid: u32, version: &str, pause_seconds: f64) -> String {
    let pause = match pause_seconds {
        0.0 => String::new(), // a keeper of an older version does not say
        seconds => format!(" The program waits for about {:.1} s.", seconds.max(0.1)),
    };
    format!("Run {pid}: undercroft {version} can take over; replacing its manager.{pause}")
}

fn outcome(pid: u32, version: Option<String>, told: Option<Told>) -> Upgraded {
    let (outcome, pause_seconds, why) = match told {
        Some(Told::Done { pause_seconds }) => (Outcome::Upgraded, Some(pause_seconds), None),
        Some(Told::Kept { why, pause_seconds }) => (Outcome::Kept, Some(pause_seconds), Some(why)),
        Some(Told::Refused { why }) => (Outcome::Refused, None, Some(why)),
        Some(Told::Ended { why }) => (Outcome::Ended, None, Some(why)),
        Some(Told::Checked { .. }) | None => {
            let why = "it has ended, or is busy; `undercroft status` shows whether it runs";
            (Outcome::NoAnswer, None, Some(why.to_owned()))
        }
    };
    Upgraded {
        pid,
        outcome,
        version,
        pause_seconds,
        why,
    }
}

fn text(run: &Upgraded) -> String {
    let pid = run.pid;
    let why = run.why.as_deref().unwrap_or_default();
    let pause = Nanos((run.pause_seconds.unwrap_or(0.0) * 1e9) as u64);
    match run.outcome {
        Outcome::Upgraded => format!("Run {pid} is upgraded; the program waited for {pause}."),
        Outcome::Kept => format!(
            "Run {pid} is not upgraded: the new binary did not take over ({why}), and the one before did; \
             the program waited for {pause}."
        ),
        Outcome::Refused => format!("Run {pid} is not upgraded, and nothing was touched: {why}."),
        Outcome::Ended => format!("Run {pid} was ended: {why}."),
        Outcome::NoAnswer => format!("Run {pid} does not answer: {why}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_hears_beforehand_how_long_the_program_waits() {
        assert!(checked(7, "1.2", 15.36).contains("for about 15.4 s."));
        assert!(checked(7, "1.2", 0.04).contains("for about 0.1 s."));
        assert!(checked(7, "1.2", 0.0).ends_with("replacing its manager."));
    }

    #[test]
    fn each_end_is_told_with_its_pause_or_its_reason() {
        let why = || "it reads version 4".to_owned();
        let pause_seconds = 0.0625;
        for (told, part, json) in [
            (Some(Told::Done { pause_seconds }), "62.5 ms", "upgraded"),
            (
                Some(Told::Kept {
                    why: why(),
                    pause_seconds,
                }),
                "one before",
                "kept",
            ),
            (
                Some(Told::Refused { why: why() }),
                "nothing was touched: it reads",
                "refused",
            ),
            (Some(Told::Ended { why: why() }), "was ended", "ended"),
            (None, "does not answer", "no_answer"),
        ] {
            let run = outcome(7, None, told);
            assert!(text(&run).contains(part), "{}", text(&run));
            let value = serde_json::to_value(&run).expect("JSON");
            assert_eq!(value["outcome"], json);
            assert_eq!(value["why"].is_null(), json == "upgraded");
        }
    }
}
