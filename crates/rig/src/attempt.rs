//! A run of a program on a rig, within a time. Meters the anonymous memory of all its processes.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use undercroft_base::Bytes;

use super::{CommandLine, Finished, Rig, RigError, interrupt};

/// A run.
#[derive(Debug)]
pub struct Attempt {
    /// The outcome of `timeout`, and what that took.
    pub outcome: Finished,
    /// The most anonymous memory of all its processes, sampled.
    pub peak: Bytes,
    /// Pages that kernel swap read meanwhile.
    pub swapped_in: u64,
    /// Whether it took too long, and was stopped.
    pub stopped: bool,
}

/// Runs the program on a rig for at most `most`. timeout(1) ends all of its processes.
pub fn attempt(
    rig: &dyn Rig,
    limit: Bytes,
    command: &CommandLine,
    most: Duration,
) -> Result<Attempt, RigError> {
    let seconds = most.as_secs().max(1).to_string();
    let timed = ["timeout".into(), "-k".into(), "5".into(), seconds.into()];
    let command = CommandLine {
        words: timed.into_iter().chain(command.words.clone()).collect(),
        stdout: command.stdout.clone(),
    };
    let stage = rig.set_up(limit)?;
    let before = swapped_in();
    let mut running = stage.spawn(&command)?;
    let mut peak = 0;
    while running.is_running() && !interrupt::requested() {
        peak = peak.max(anonymous_of_tree(running.id()));
        std::thread::sleep(Duration::from_millis(10));
    }
    let swapped_in = swapped_in().saturating_sub(before);
    let outcome = running.finish()?;
    // 137 is also the shell's status of a program that the kernel killed early.
    let stopped = match outcome.status.code() {
        Some(124) => true,
        Some(137) => outcome.wall >= most,
        _ => false,
    };
    let outcome = if stopped {
        outcome
    } else {
        outcome.successful(rig.name(), "program")?
    };
    Ok(Attempt {
        outcome,
        peak: Bytes(peak),
        swapped_in,
        stopped,
    })
}

/// Pages that the kernel has read from swap since it started.
fn swapped_in() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix("pswpin "));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Anonymous memory of a process and all its descendants, in bytes. What an agent has is its
/// program's.
fn anonymous_of_tree(root: u32) -> u64 {
    let (mut open, mut sum) = (vec![root], 0);
    while let Some(pid) = open.pop() {
        let of = PathBuf::from(format!("/proc/{pid}"));
        let status = fs::read_to_string(of.join("status")).unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
        if !status.starts_with("Name:\tuc-agent\n") {
            sum += kib.unwrap_or(0u64) * 1024;
        }
        let children = fs::read_to_string(of.join(format!("task/{pid}/children")));
        let children = children.unwrap_or_default();
        open.extend(
            children
                .split_whitespace()
                .filter_map(|child| child.parse::<u32>().ok()),
        );
    }
    sum
}
