//! Takes the pages of a group out of their address space. Step 2 of 4 of an eviction. How that is
//! done is the memory's own affair ([`WayOut`]); processes have an agent for it (`agent.rs`).

mod agent;

use std::sync::Arc;

use undercroft_engine::EvictItem;
use undercroft_engine::limits::EVICT_PAGES_MAX;

use self::agent::AgentOut;
use crate::space::discover::apply_events_without_agent;
use crate::space::port::WayOut;
use crate::space::process::Process;
use crate::space::shared::Shared;

/// The way out of one process's memory.
pub(super) enum Way<'a> {
    Agent(AgentOut<'a>),
    /// Its memory has one of its own.
    Own(&'a dyn WayOut),
}

impl<'a> Way<'a> {
    /// `None`: its pages cannot leave.
    pub(super) fn of(shared: &'a Shared, process: &'a Arc<Process>) -> Option<Way<'a>> {
        if let Some(own) = process.memory.way_out() {
            return Some(Way::Own(own));
        }
        let agent = process.agent.get()?;
        if shared.options.page_size != process.page_size() {
            return None; // no tier takes its pages
        }
        Some(Way::Agent(AgentOut::new(shared, process, agent)))
    }

    pub(super) fn out(&self) -> &dyn WayOut {
        match self {
            Way::Agent(out) => out,
            Way::Own(out) => *out,
        }
    }
}

/// Applies the events that waited for a late one, if none is pending.
pub(super) fn apply_events(shared: &Shared, process: &Process) {
    if process.has_applied_all() {
        return;
    }
    let _layout = process.layout.write();
    let _held = shared.gauges.layout_holds.hold();
    match process.agent.get() {
        Some(agent) => _ = apply_events_without_agent(shared, process, agent),
        None => _ = crate::space::layout::apply_events(shared, process),
    }
}

/// The set of all items of the group. A group has 1 to 64 pages.
pub(super) fn all_of(group: &[EvictItem]) -> u64 {
    u64::MAX >> (EVICT_PAGES_MAX - group.len())
}

/// The places of a set's members, ascending.
pub(super) fn places(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = set.trailing_zeros() as usize;
        let any = set != 0;
        set &= set.wrapping_sub(1);
        any.then_some(first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_gives_its_members() {
        for set in [0, 1, 1 << 63, 0b1011_0100, u64::MAX] {
            let members: Vec<usize> = places(set).collect();
            let slow: Vec<usize> = (0..64).filter(|at| set >> at & 1 == 1).collect();
            assert_eq!(members, slow);
        }
    }
}
