//! `undercroft demote`: has pages leave memory that a program has not used for a time, although
//! there is room, and waits for it.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use undercroft_base::{Bytes, Nanos};
use undercroft_keeper::wanted::Wanted;
use undercroft_proto::messages::{Answered, Ask};
use undercroft_proto::report::Demotion;
use undercroft_terminal::{Failure, status};

use crate::{live, show};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// Looks in a row that do not find the run, before it has ended: its manager may be busy.
const MISSED_MAX: u32 = 10;

/// `undercroft demote`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DemoteArgs {
    /// The run: any process of it, its name (`run --name`), or its program, such as redis-server
    #[arg(value_name = "RUN")]
    run: Wanted,

    /// Pages that have not been used for this long leave, such as 90s, 10m or 1h
    #[arg(long, value_name = "TIME")]
    older_than: Nanos,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  undercroft run --access-scan 10s -m 4G -- redis-server
  undercroft status redis-server                        # how much was not used for how long
  undercroft demote redis-server --older-than 10m       # that leaves memory now

Only a run with an interval of scans knows how long its pages have not been used (`run --access-scan`). Pages come back
when they are touched, as ever. To have less memory whatever is used: `undercroft set RUN memory-max=SIZE`.";

/// Asks, and waits until all pages were tried.
pub(crate) fn demote(args: &DemoteArgs) -> Result<u8, Failure> {
    let run = live::run_of(&args.run)?;
    let (pid, manager) = (run.pid, run.manager_pid);
    let before = run.ages.and_then(|ages| ages.demotion).unwrap_or_default();
    match live::ask(pid, Ask::Demote(args.older_than.0 / 1_000_000)) {
        Some(Answered::Yes) => {}
        Some(Answered::Refused(why)) => {
            return Err(Failure::new(
                status::FAILED,
                format!("no page of run {pid} leaves"),
                why,
                "`undercroft set RUN memory-max=SIZE` makes any run smaller",
            ));
        }
        None => return Err(live::no_answer(pid)),
    }
    let shows = std::io::stderr().is_terminal();
    let mut missed = 0;
    let done = loop {
        let mut runs = live::snapshots()?.into_iter();
        let Some(run) = runs.find(|run| run.is_of(pid)) else {
            missed += 1;
            if missed < MISSED_MAX {
                std::thread::sleep(PAUSE);
                continue;
            }
            show::line(if args.json {
                "null"
            } else {
                "The run has ended."
            })?;
            return Ok(0);
        };
        missed = 0;
        if run.manager_pid != manager {
            return Err(Failure::new(
                status::FAILED,
                format!("not all old pages of run {pid} were tried"),
                "its manager died, and the next one knows no ages yet",
                "ask again after some scans",
            ));
        }
        let now = run.ages.and_then(|ages| ages.demotion).unwrap_or_default();
        let done = since(before, now);
        if !now.under_way {
            break done;
        }
        if shows {
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", words(pid, &done));
        }
        std::thread::sleep(PAUSE);
    };
    if shows {
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    if args.json {
        show::json(&serde_json::json!({
            "schema_version": run.schema_version, "pid": pid, "demotion": done,
        }))?;
    } else {
        show::line(&words(pid, &done))?;
    }
    Ok(0)
}

/// The result of one request.
fn since(before: Demotion, now: Demotion) -> Demotion {
    Demotion {
        asked: now.asked.saturating_sub(before.asked),
        named_bytes: now.named_bytes.saturating_sub(before.named_bytes),
        left_bytes: now.left_bytes.saturating_sub(before.left_bytes),
        under_way: now.under_way,
    }
}

fn words(pid: u32, done: &Demotion) -> String {
    let [named, left] = [done.named_bytes, done.left_bytes].map(Bytes);
    match done.named_bytes {
        0 => format!("No page of run {pid} is that old."),
        _ => format!("Run {pid}: {left} of {named} that are old enough have left memory."),
    }
}
