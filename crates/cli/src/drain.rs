//! `undercroft tiers add`, `drain` and `remove`: has a running manager use another tier, or empty
//! one, and shows how far it is.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use undercroft_base::{Nanos, PageCount};
use undercroft_proto::messages::{Answered, Ask};
use undercroft_proto::report::{Drain, Snapshot, TierSnapshot};
use undercroft_tier::spec::TierSpec;

use crate::args::TiersChange;
use crate::{live, show};
use undercroft_terminal::{Failure, status};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// Looks in a row that find a drain stuck, before it is given up: the program may make room.
const STUCK_MAX: u32 = 40;

/// How far a drain is, in words.
pub(crate) fn progress(drain: &Drain) -> String {
    let time = |seconds: f64| Nanos((seconds * 1e9) as u64);
    if drain.removed {
        return format!(
            "removed: empty after {}, and its space was given back",
            time(drain.seconds)
        );
    }
    if drain.pages_left == 0 {
        return format!("drained: empty after {}", time(drain.seconds));
    }
    let left = PageCount(drain.pages_left).bytes();
    let of = PageCount(drain.pages.max(drain.pages_left)).bytes();
    if drain.stuck && drain.pages_unreadable > 0 {
        let count = drain.pages_unreadable;
        let pages = if count == 1 { "page" } else { "pages" };
        return format!(
            "draining: {left} of {of} left; {count} {pages} cannot be read, and a touch of one ends \
             the program"
        );
    }
    match (drain.stuck, drain.seconds_left) {
        (true, _) => format!("draining: {left} of {of} left, and no room for it"),
        (false, Some(seconds)) => format!("draining: {left} of {of} left, about {}", time(seconds)),
        (false, None) => format!("draining: {left} of {of} left"),
    }
}

/// The place of a tier by number, from 1, or by name. If several have the name: the first.
fn find(tiers: &[TierSnapshot], wanted: &str) -> Option<usize> {
    let by_number = wanted.parse::<usize>().ok();
    match by_number {
        Some(number) => (1..=tiers.len()).contains(&number).then(|| number - 1),
        None => tiers.iter().position(|tier| tier.figures.name == wanted),
    }
}

fn snapshot_of(pid: u32) -> Result<Option<Snapshot>, Failure> {
    let mut all = live::snapshots()?.into_iter();
    Ok(all.find(|snapshot| snapshot.is_of(pid)))
}

/// Names what is done with a tier, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Drain,
    Remove,
}

/// `undercroft tiers drain`, `remove` and `add`.
pub(crate) fn change(command: &TiersChange) -> Result<u8, Failure> {
    let (pid, json) = match command {
        TiersChange::Drain { run, json, .. }
        | TiersChange::Remove { run, json, .. }
        | TiersChange::Add { run, json, .. } => (live::run_of(run)?.pid, *json),
    };
    let at = match command {
        TiersChange::Drain { tier, .. } => empty(pid, tier, Verb::Drain)?,
        TiersChange::Remove { tier, .. } => empty(pid, tier, Verb::Remove)?,
        TiersChange::Add { tier, .. } => Some(add(pid, tier)?),
    };
    let found = at.and_then(|at| Some((at, snapshot_of(pid).ok()??)));
    let Some((at, snapshot)) = found.filter(|(at, found)| *at < found.tiers.len()) else {
        show::line(if json { "null" } else { "The run has ended." })?;
        return Ok(0);
    };
    show::line(&if json {
        let tier = &snapshot.tiers[at];
        let number = at + 1;
        serde_json::to_string_pretty(&serde_json::json!({
            "schema_version": snapshot.schema_version, "pid": pid, "number": number, "tier": tier,
        }))
        .unwrap_or_default()
    } else {
        state(at, &snapshot.tiers[at])
    })?;
    Ok(0)
}

/// The state of a tier, in words.
fn state(at: usize, tier: &TierSnapshot) -> String {
    let (number, name) = (at + 1, &tier.figures.name);
    match (&tier.figures.drain, tier.rank) {
        (Some(drain), _) => format!("tier {number}, {name}: {}", progress(drain)),
        (None, Some(rank)) => format!(
            "tier {number}, {name}: in use, number {rank} by speed; a load takes {}",
            Nanos((tier.load_seconds * 1e9) as u64)
        ),
        (None, None) => format!("tier {number}, {name}: not in use"),
    }
}

/// The running client, and the place of the tier that the user named.
fn found(pid: u32, wanted: &str) -> Result<(Snapshot, usize), Failure> {
    let Some(snapshot) = snapshot_of(pid)? else {
        return Err(live::no_run(pid));
    };
    match find(&snapshot.tiers, wanted) {
        Some(at) => Ok((snapshot, at)),
        None => Err(Failure::new(
            status::USAGE,
            format!("run {pid} has no tier `{wanted}`"),
            format!("it has {}", snapshot.tiers.len()),
            "give its number or its name, as `undercroft status` shows them",
        )),
    }
}

/// Has a tier emptied, and waits for it. Returns its place; `None` if the run has ended.
fn empty(pid: u32, wanted: &str, verb: Verb) -> Result<Option<usize>, Failure> {
    let (_, at) = found(pid, wanted)?;
    let (ask, done) = match verb {
        Verb::Drain => (Ask::Drain(at as u8), "drained"),
        Verb::Remove => (Ask::Remove(at as u8), "removed"),
    };
    match live::ask(pid, ask) {
        Some(Answered::Yes) => watch(pid, at, verb),
        Some(Answered::Refused(why)) => Err(Failure::new(
            status::FAILED,
            format!("tier {} of run {pid} is not {done}", at + 1),
            why,
            "`undercroft tiers add` gives the run another tier; nothing was changed",
        )),
        None => Err(live::no_answer(pid)),
    }
}

/// Waits until the tier is empty, or removed, or the run has ended. Returns its place.
fn watch(pid: u32, at: usize, verb: Verb) -> Result<Option<usize>, Failure> {
    let mut stuck = 0;
    let shows = std::io::stderr().is_terminal();
    loop {
        let Some(snapshot) = snapshot_of(pid)? else {
            return Ok(None);
        };
        let Some(drain) = snapshot.tiers.get(at).and_then(|tier| tier.figures.drain) else {
            return Err(Failure::new(
                status::FAILED,
                format!("tier {} of run {pid} is used again", at + 1),
                "another `undercroft tiers add` asked for that",
                "ask again, if it is to be emptied",
            ));
        };
        if shows {
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", progress(&drain));
        }
        let ended = match verb {
            Verb::Drain => drain.pages_left == 0,
            Verb::Remove => drain.removed,
        };
        if ended {
            if shows {
                let _ = writeln!(std::io::stderr());
            }
            return Ok(Some(at));
        }
        stuck = if drain.stuck { stuck + 1 } else { 0 };
        let unreadable = drain.stuck && drain.pages_unreadable >= drain.pages_left;
        if unreadable || stuck > STUCK_MAX {
            let fix = if unreadable {
                "the tier stays closed; it is empty when the program has dropped these pages"
            } else {
                "the run goes on trying; it succeeds when the program frees memory, or when \
                 `undercroft tiers add` gives it room"
            };
            return Err(Failure::new(
                status::FAILED,
                format!("tier {} of run {pid} cannot be emptied", at + 1),
                progress(&drain),
                fix,
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Gives a run another tier, or one of its own again. Returns its place.
fn add(pid: u32, wanted: &str) -> Result<usize, Failure> {
    let refused = |why: String| {
        let what = format!("run {pid} does not use `{wanted}`");
        let fix = "give a tier as `run --tier` takes it, such as file:/var/swap,size=8G";
        Failure::new(status::FAILED, what, why, fix)
    };
    let answer = |answered| match answered {
        Some(Answered::Yes) => Ok(()),
        Some(Answered::Refused(why)) => Err(refused(why)),
        None => Err(live::no_answer(pid)),
    };
    if wanted.parse::<usize>().is_ok() {
        let (_, at) = found(pid, wanted)?;
        answer(live::ask(pid, Ask::Reopen(at as u8)))?;
        return Ok(at);
    }
    let Some(before) = snapshot_of(pid)? else {
        return Err(live::no_run(pid));
    };
    let spec = absolute(wanted).map_err(refused)?;
    answer(live::ask(pid, Ask::Add(spec)))?;
    let after = snapshot_of(pid)?.ok_or_else(|| live::no_run(pid))?;
    let was_used = |at: usize| before.tiers.get(at).is_some_and(|tier| tier.rank.is_some());
    let mut all = after.tiers.iter().enumerate();
    let new = all.find(|(at, tier)| tier.rank.is_some() && !was_used(*at));
    new.map(|(at, _)| at)
        .ok_or_else(|| refused("another change came in between".to_owned()))
}

/// The description of a tier with an absolute path: the manager is in another folder. Error: it is
/// none.
fn absolute(wanted: &str) -> Result<String, String> {
    let spec: TierSpec = wanted.parse().map_err(|error| format!("{error}"))?;
    let Some(path) = &spec.path else {
        return Ok(wanted.to_owned());
    };
    let whole = std::path::absolute(path).map_err(|error| error.to_string())?;
    let (old, whole) = (path.display().to_string(), whole.display());
    let options = wanted
        .split_once(':')
        .and_then(|(_, rest)| rest.strip_prefix(&old));
    let kind = wanted.split(':').next().unwrap_or_default();
    Ok(format!("{kind}:{whole}{}", options.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use undercroft_proto::report::TierFigures;

    use super::*;

    fn drain_of(pages_left: u64, seconds_left: Option<f64>, stuck: bool) -> Drain {
        Drain {
            pages: 1024,
            pages_left,
            seconds: 2.0,
            seconds_left,
            stuck,
            pages_unreadable: 0,
            removes: false,
            removed: false,
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
        let unreadable = Drain {
            pages_unreadable: 3,
            ..drain_of(3, None, true)
        };
        assert!(progress(&unreadable).contains("3 pages cannot be read"));
        let removed = Drain {
            removed: true,
            ..drain_of(0, None, false)
        };
        assert!(progress(&removed).contains("given back"));
    }

    #[test]
    fn the_path_of_a_new_tier_is_made_absolute() {
        let here = std::env::current_dir().expect("a folder");
        let here = here.display();
        let spec = absolute("file:swap,size=1G").expect("a tier");
        assert_eq!(spec, format!("file:{here}/swap,size=1G"));
        assert_eq!(absolute("nvm:/a,size=1M").expect("one"), "nvm:/a,size=1M");
        assert!(absolute("swap").is_err());
    }

    #[test]
    fn a_tier_is_found_by_number_or_name() {
        let tier = |name: &str| TierSnapshot {
            figures: TierFigures {
                name: name.to_owned(),
                kind: "file".to_owned(),
                emulated: false,
                ratio: None,
                reads: 0,
                writes: 0,
                written_bytes: 0,
                updates: 0,
                cost: None,
                wear: None,
                remote: None,
                drain: None,
            },
            rank: Some(1),
            load_seconds: 0.0,
            logical_bytes: 0,
            stored_bytes: 0,
            held_bytes: 0,
            profile: None,
        };
        let tiers = [tier("ram"), tier("file:/a"), tier("file:/b")];
        for (wanted, found) in [("1", Some(0)), ("3", Some(2)), ("0", None), ("4", None)] {
            assert_eq!(find(&tiers, wanted), found, "{wanted}");
        }
        assert_eq!(find(&tiers, "file:/b"), Some(2));
        assert_eq!(find(&tiers, "file:/c"), None);
    }
}
