//! `undercroft set`: changes an option of a running program.

use undercroft_manager::control::{Answered, Ask};
use undercroft_qos::LatencyBound;

use crate::failure::{Failure, status};
use crate::{live, show};

/// What is to change, as `KEY=VALUE`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// The bound of page-ins; `None`: there is none from now on.
    Latency(Option<LatencyBound>),
}

/// Reads `KEY=VALUE`. Errors: for the user.
pub(crate) fn change(text: &str) -> Result<Change, String> {
    let Some(value) = text.strip_prefix("latency=") else {
        return Err("only `latency` can be set; use for example latency=p99=300us".to_owned());
    };
    if value == "none" {
        return Ok(Change::Latency(None));
    }
    let bound = value.parse::<LatencyBound>();
    bound
        .map(|bound| Change::Latency(Some(bound)))
        .map_err(|error| error.to_string())
}

/// Changes an option of run `pid`.
pub(crate) fn set(pid: u32, change: Change) -> Result<u8, Failure> {
    let Change::Latency(bound) = change;
    if !live::snapshots()?.iter().any(|run| run.pid == pid) {
        return Err(live::no_run(pid));
    }
    match live::ask(pid, Ask::Latency { bound }) {
        Some(Answered::Yes) => {
            show::line(&match bound {
                Some(bound) => format!("Run {pid} keeps {bound} from now on."),
                None => format!("Run {pid} has no latency bound any more."),
            })?;
            Ok(0)
        }
        Some(Answered::Refused(why)) => Err(Failure::new(
            status::FAILED,
            format!("the latency bound of run {pid} is not changed"),
            why,
            "set a bound that can be kept; the old one still holds",
        )),
        None => Err(live::no_answer(pid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_bound_or_none_and_an_error_says_what_can_be_set() {
        let bound = "p99=300us".parse().expect("a bound");
        assert_eq!(
            change("latency=p99=300us"),
            Ok(Change::Latency(Some(bound)))
        );
        assert_eq!(change("latency=none"), Ok(Change::Latency(None)));
        for (text, part) in [("memory=1G", "latency="), ("latency=fast", "pPERCENTILE")] {
            let error = change(text).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }
}
