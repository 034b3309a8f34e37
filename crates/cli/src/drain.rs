//! `undercroft tiers drain`: has a running manager empty a tier, and shows how far it is.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use undercroft_base::{Nanos, PageCount};
use undercroft_manager::control::{Answered, Ask};
use undercroft_manager::report::{Drain, Snapshot, TierSnapshot};

use crate::failure::{Failure, status};
use crate::{live, show};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// Looks in a row that find a drain stuck, before it is given up: the program may make room.
const STUCK_MAX: u32 = 40;

/// How far a drain is, in words.
pub(crate) fn progress(drain: &Drain) -> String {
    let time = |seconds: f64| Nanos((seconds * 1e9) as u64);
    if drain.pages_left == 0 {
        return format!("drained: empty after {}", time(drain.seconds));
    }
    let left = PageCount(drain.pages_left).bytes();
    let of = PageCount(drain.pages.max(drain.pages_left)).bytes();
    match (drain.stuck, drain.seconds_left) {
        (true, _) => format!("draining: {left} of {of} left, and no room for it, or not readable"),
        (false, Some(seconds)) => format!("draining: {left} of {of} left, about {}", time(seconds)),
        (false, None) => format!("draining: {left} of {of} left"),
    }
}

/// The place of a tier by number, from 1, or by name. If several have the name: the first.
fn find(tiers: &[TierSnapshot], wanted: &str) -> Option<usize> {
    let by_number = wanted.parse::<usize>().ok();
    match by_number {
        Some(number) => (1..=tiers.len()).contains(&number).then(|| number - 1),
        None => tiers.iter().position(|tier| tier.name == wanted),
    }
}

fn snapshot_of(pid: u32) -> Result<Option<Snapshot>, Failure> {
    let mut all = live::snapshots()?.into_iter();
    Ok(all.find(|snapshot| snapshot.pid == pid))
}

/// `undercroft tiers drain`.
pub(crate) fn drain(pid: u32, wanted: &str) -> Result<u8, Failure> {
    let Some(snapshot) = snapshot_of(pid)? else {
        return Err(live::no_run(pid));
    };
    let Some(at) = find(&snapshot.tiers, wanted) else {
        return Err(Failure::new(
            status::USAGE,
            format!("run {pid} has no tier `{wanted}`"),
            format!("it has {}", snapshot.tiers.len()),
            "give its number, 1 for the fastest, or its name as `undercroft status` shows it",
        ));
    };
    match live::ask(pid, Ask::Drain(at as u8)) {
        Some(Answered::Yes) => watch(pid, at),
        Some(Answered::Refused(why)) => Err(Failure::new(
            status::FAILED,
            format!("tier {} of run {pid} is not drained", at + 1),
            why,
            "start the run with larger tiers",
        )),
        None => Err(live::no_answer(pid)),
    }
}

/// Waits until the tier is empty, or the run has ended.
fn watch(pid: u32, at: usize) -> Result<u8, Failure> {
    let mut stuck = 0;
    let shows = std::io::stderr().is_terminal();
    loop {
        let Some(snapshot) = snapshot_of(pid)? else {
            show::line("The run has ended.")?;
            return Ok(0);
        };
        let Some(drain) = snapshot.tiers.get(at).and_then(|tier| tier.drain) else {
            std::thread::sleep(PAUSE);
            continue;
        };
        if shows {
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", progress(&drain));
        }
        if drain.pages_left == 0 {
            if shows {
                let _ = writeln!(std::io::stderr());
            }
            show::line(&progress(&drain))?;
            return Ok(0);
        }
        stuck = if drain.stuck { stuck + 1 } else { 0 };
        if stuck > STUCK_MAX {
            return Err(Failure::new(
                status::FAILED,
                format!("tier {} of run {pid} cannot be emptied now", at + 1),
                progress(&drain),
                "the run goes on trying; it succeeds when the program frees memory",
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain_of(pages_left: u64, seconds_left: Option<f64>, stuck: bool) -> Drain {
        Drain {
            pages: 1024,
            pages_left,
            seconds: 2.0,
            seconds_left,
            stuck,
        }
    }

    #[test]
    fn progress_says_what_is_left_and_for_how_long() {
        let of = |left, seconds, stuck| progress(&drain_of(left, seconds, stuck));
        assert!(of(0, None, false).starts_with("drained"));
        let left = of(256, Some(1.5), false);
        assert!(
            left.contains("1.0 MiB of 4.0 MiB left, about 1.5"),
            "{left}"
        );
        assert!(of(256, None, false).ends_with("left"));
        assert!(of(256, None, true).contains("no room"));
    }

    #[test]
    fn a_tier_is_found_by_number_or_name() {
        let tier = |name: &str| TierSnapshot {
            name: name.to_owned(),
            kind: "file".to_owned(),
            emulated: false,
            logical_bytes: 0,
            stored_bytes: 0,
            held_bytes: 0,
            ratio: None,
            reads: 0,
            writes: 0,
            written_bytes: 0,
            cost: None,
            wear: None,
            remote: None,
            drain: None,
        };
        let tiers = [tier("ram"), tier("file:/a"), tier("file:/b")];
        for (wanted, found) in [("1", Some(0)), ("3", Some(2)), ("0", None), ("4", None)] {
            assert_eq!(find(&tiers, wanted), found, "{wanted}");
        }
        assert_eq!(find(&tiers, "file:/b"), Some(2));
        assert_eq!(find(&tiers, "file:/c"), None);
    }
}
