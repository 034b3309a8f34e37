//! Messages of keeper, manager, daemon and readers of a run, and the memory that managers of one
//! run share.
//!
//! | file | between |
//! |---|---|
//! | [`messages`] | keeper and manager; users and the daemon, to a manager |
//! | [`grant`] | keeper and daemon |
//! | [`name`], [`options`], [`tiers`] | command line, keeper and manager |
//! | [`handover`] | monitors of virtual machines, and the process that listens for them |
//! | [`report`] | manager, and all who read reports and status |
//! | [`kept`], [`legacy`], [`versions`] | one manager and the next |
//!
//! Shims and agents speak by `undercroft-wire`, which needs no standard library.

pub mod grant;
pub mod handover;
pub mod kept;
pub mod legacy;
pub mod messages;
pub mod name;
pub mod options;
pub mod report;
pub mod tiers;
pub mod versions;

/// Whether a process calls itself an agent. A hint: a program may take that name.
pub fn is_agent(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"uc-agent\n")
}
