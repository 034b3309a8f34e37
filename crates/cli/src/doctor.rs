//! `undercroft doctor`: what this machine allows, what is missing, and the exact fix.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use serde::Serialize;
use undercroft_keeper::place::{self, PlaceError};
use undercroft_sys::huge_pages::HugePages;
use undercroft_sys::probe::{Check, KernelReport, State};
use undercroft_sys::process;

use crate::{preflight, run, show};
use undercroft_terminal::{Failure, status};

#[derive(Serialize)]
struct Document {
    schema_version: u32,
    version: &'static str,
    verdict: &'static str,
    checks: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    name: &'static str,
    state: &'static str,
    detail: String,
    fix: Option<String>,
}

/// Prints the checks. 0 if nothing essential is missing, otherwise 1.
pub(crate) fn doctor(as_json: bool) -> Result<u8, Failure> {
    // As the program would be: file capabilities on this binary close its files in /proc.
    let _ = process::become_dumpable();
    let report = take();
    if as_json {
        show::json(&document(&report))?
    } else {
        show::line(&text(
            &report,
            std::io::stdout().is_terminal() && show::colours(),
        ))?
    }
    Ok(exit_status(&report))
}

/// The checks of the places that a run needs, then those of the kernel.
fn take() -> KernelReport {
    let chosen = std::env::var_os("UNDERCROFT_DIR").map(PathBuf::from);
    let tiers = run::tier_directory(chosen, std::env::temp_dir());
    let at = tiers.clone().unwrap_or_else(|_| std::env::temp_dir());
    let of = |failure: Failure| (format!("{}: {}", failure.what, failure.why), failure.fix);
    let no_proc = |error: io::Error| (error.to_string(), "mount -t proc proc /proc".to_owned());
    let no_place = |error: PlaceError| {
        let fix = "set UNDERCROFT_DIR to a directory of your own, on a file system that is not read-only or noexec";
        (error.to_string(), fix.to_owned())
    };
    let places = [
        (
            "/proc",
            File::open("/proc/self/status").map(drop).map_err(no_proc),
        ),
        ("/dev/null", preflight::null().map_err(of)),
        (
            "directory of runs",
            place::directory().map(drop).map_err(no_place),
        ),
        ("directory of tiers", tiers.map(drop).map_err(of)),
    ];
    let places = places.map(|(name, found)| {
        let (state, (detail, fix)) = match found {
            Ok(()) => (State::Ok, ("usable".to_owned(), String::new())),
            Err(why) => (State::Missing, why),
        };
        Check {
            name,
            state,
            detail,
            fix,
        }
    });
    let mut checks = Vec::from(places);
    checks.push(Check {
        name: "huge pages",
        state: State::Ok,
        detail: match HugePages::now() {
            Ok(pool) if pool.available > 0 => {
                format!("{} of 2 MiB are free for vm --page-size 2M", pool.available)
            }
            Ok(_) => "none; vm --page-size 2M needs some: sysctl vm.nr_hugepages=N".to_owned(),
            Err(_) => "this kernel has none, so there is no vm --page-size 2M".to_owned(),
        },
        fix: String::new(),
    });
    checks.extend(KernelReport::take(&at).checks);
    KernelReport { checks }
}

fn exit_status(report: &KernelReport) -> u8 {
    match report.worst() {
        State::Ok | State::Degraded => 0,
        State::Missing => status::FAILED,
    }
}

fn state_name(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Degraded => "degraded",
        State::Missing => "missing",
    }
}

fn document(report: &KernelReport) -> Document {
    let entry = |check: &Check| Entry {
        name: check.name,
        state: state_name(check.state),
        detail: check.detail.clone(),
        fix: (!check.fix.is_empty()).then(|| check.fix.clone()),
    };
    Document {
        schema_version: 1,
        version: env!("CARGO_PKG_VERSION"),
        verdict: state_name(report.worst()),
        checks: report.checks.iter().map(entry).collect(),
    }
}

fn text(report: &KernelReport, colour: bool) -> String {
    let width = report
        .checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for check in &report.checks {
        let (on, off) = match (colour, check.state) {
            (false, _) => ("", ""),
            (true, State::Ok) => ("\x1b[32m", "\x1b[0m"),
            (true, State::Degraded) => ("\x1b[33m", "\x1b[0m"),
            (true, State::Missing) => ("\x1b[31m", "\x1b[0m"),
        };
        let state = format!("{on}{:<8}{off}", state_name(check.state));
        text.push_str(&format!(
            "{state}  {:<width$}  {}\n",
            check.name, check.detail
        ));
        if !check.fix.is_empty() {
            text.push_str(&format!("{:10}{:width$}  fix: {}\n", "", "", check.fix));
        }
    }
    let count = |state| report.with_state(state).count();
    text.push_str(&match report.worst() {
        State::Ok => "\nEverything is there.".to_owned(),
        State::Degraded => format!(
            "\nundercroft works here; {} of {} checks say what would make it faster or safer.",
            count(State::Degraded),
            report.checks.len()
        ),
        State::Missing => format!(
            "\nundercroft does not work here: {} of {} checks name what is missing.",
            count(State::Missing),
            report.checks.len()
        ),
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(states: &[State]) -> KernelReport {
        let checks = states.iter().map(|state| Check {
            name: "a thing",
            state: *state,
            detail: "seen".to_owned(),
            fix: if *state == State::Ok {
                String::new()
            } else {
                "do this".to_owned()
            },
        });
        KernelReport {
            checks: checks.collect(),
        }
    }

    #[test]
    fn doctor_fails_only_when_something_essential_is_missing() {
        use State::{Degraded, Missing, Ok};
        for (states, status, word) in [
            (&[Ok, Ok][..], 0, "Everything is there"),
            (&[Ok, Degraded], 0, "1 of 2 checks say"),
            (&[Degraded, Missing, Ok], 1, "1 of 3 checks name"),
        ] {
            let report = report(states);
            assert_eq!(exit_status(&report), status);
            let text = text(&report, false);
            assert!(text.contains(word), "{text}");
            assert_eq!(
                text.matches("fix: do this").count(),
                states.iter().filter(|s| **s != Ok).count()
            );
        }
    }

    #[test]
    fn doctor_json_has_a_fix_exactly_where_one_is_needed() {
        let document = document(&report(&[State::Ok, State::Missing]));
        assert_eq!(document.verdict, "missing");
        assert_eq!(document.checks[0].fix, None);
        assert_eq!(document.checks[1].fix.as_deref(), Some("do this"));
    }
}
