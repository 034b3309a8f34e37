//! Reads `/proc`: which processes exist, which descend from which, and how much anonymous memory
//! they hold.

use std::collections::HashSet;
use std::fs;

/// The command of an agent.
pub const AGENT: &str = "[uc-agent]";

pub(crate) fn is_agent(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "uc-agent\n")
}

/// A process, as `/proc` shows it now.
#[derive(Clone, Debug)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Parent's process id.
    pub parent: i32,
    /// State letter; `Z` is a zombie.
    pub state: char,
    /// Process group. 0: its leader is outside our pid namespace.
    pub group: i32,
    /// Session. 0 as above.
    pub session: i32,
    /// Arguments joined by spaces. Of an agent, which has its program's: [`AGENT`].
    pub command: String,
}

fn read(pid: i32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let mut number = || fields.next()?.parse().ok();
    let (parent, group, session) = (number()?, number()?, number()?);
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = if is_agent(pid) {
        AGENT.into()
    } else {
        String::from_utf8_lossy(&command).replace('\0', " ")
    };
    let command = command.trim().to_owned();
    Some(Process {
        pid,
        parent,
        state,
        group,
        session,
        command,
    })
}

/// The process ids of the machine.
fn pids() -> impl Iterator<Item = i32> {
    let folder = fs::read_dir("/proc").into_iter().flatten();
    folder.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Every process of the machine. Cost: three file reads a process.
pub fn processes() -> Vec<Process> {
    pids().filter_map(read).collect()
}

/// The processes in `all` that are `root` or descend from it.
pub fn descendants(all: &[Process], root: i32) -> Vec<Process> {
    let mut family = HashSet::from([root]);
    loop {
        let before = family.len();
        for process in all {
            if family.contains(&process.parent) {
                family.insert(process.pid);
            }
        }
        if family.len() == before {
            break;
        }
    }
    all.iter()
        .filter(|process| family.contains(&process.pid))
        .cloned()
        .collect()
}

/// Processes whose environment holds `text`. Finds those that left their parent's tree, too.
pub(crate) fn with_environment(text: &str) -> Vec<i32> {
    pids()
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|bytes| bytes.split(|&b| b == 0).any(|line| line == text.as_bytes()))
        })
        .collect()
}

/// Anonymous memory of one process in KiB: `RssAnon`, or 0 if the process is gone. An agent has
/// none: what it has is its program's.
pub fn anonymous_kib(pid: i32) -> u64 {
    if is_agent(pid) {
        return 0;
    }
    kib(&format!("/proc/{pid}/status"), "RssAnon:")
}

/// The share of a process in anonymous memory whose frames several processes share: `Pss_Anon`.
/// Cost: the kernel walks its page tables, a few ms a GiB.
pub(crate) fn anonymous_part_kib(pid: i32) -> u64 {
    if is_agent(pid) {
        return 0;
    }
    kib(&format!("/proc/{pid}/smaps_rollup"), "Pss_Anon:")
}

fn kib(file: &str, field: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix(field))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
