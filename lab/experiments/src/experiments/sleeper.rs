//! A client that fills its memory and then sleeps, and undercroft's processes around it.

use super::Lab;
use crate::rig::{Finished, Rig, RigError, Running};
use anyhow::ensure;
use std::fs;
use std::time::Duration;
use undercroft_base::Bytes;

/// Starts the client, and waits until it has filled its memory. Errors: it ended before, or the
/// user asked for the end.
pub(super) fn start(
    lab: &Lab,
    rig: &dyn Rig,
    limit: Bytes,
    footprint_mib: u64,
    sleep_seconds: u64,
) -> anyhow::Result<Running> {
    let command = lab.touch([
        "--footprint-mib",
        &footprint_mib.to_string(),
        "--sleep-seconds",
        &sleep_seconds.to_string(),
    ]);
    let mut running = rig.set_up(limit)?.spawn(&command)?;
    while running.lines_so_far().is_empty() {
        ensure!(
            running.is_running() && !crate::rig::interrupt::requested(),
            "the client ended before it had filled its memory"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(running)
}

/// Waits until the client has slept enough.
pub(super) fn finish(running: Running, rig: &dyn Rig) -> Result<Finished, RigError> {
    running.finish()?.successful(rig.name(), "sleeping client")
}

/// Processes of undercroft itself: `root` and its descendants whose executable is the same file.
pub(super) fn family(root: u32) -> Vec<u32> {
    let executable = |pid: u32| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let Some(program) = executable(root) else {
        return Vec::new();
    };
    let mut members = tree(root);
    members.retain(|pid| executable(*pid).as_ref() == Some(&program));
    members
}

/// `root` and its descendants.
pub(super) fn tree(root: u32) -> Vec<u32> {
    let mut members = vec![root];
    let parents: Vec<(u32, u32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, stat_field(pid, 3)? as u32))
        })
        .collect();
    let mut index = 0;
    while index < members.len() {
        let parent = members[index];
        members.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(pid, _)| *pid),
        );
        index += 1;
    }
    members
}

/// Field `index` (from 0) of `/proc/PID/stat`. The name in parentheses may hold spaces, so it is
/// cut off first.
pub(super) fn stat_field(pid: u32, index: usize) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(')')?;
    rest.split_whitespace()
        .nth(index.checked_sub(2)?)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_field_reads_the_parent_of_this_process() {
        let pid = std::process::id();
        assert_eq!(
            stat_field(pid, 3),
            Some(u64::from(std::os::unix::process::parent_id()))
        );
        assert!(family(pid).contains(&pid));
    }
}
