//! Layout events of a client, applied while its layout lock is held for writing: nothing is installed meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use undercroft_base::VirtRange;
use undercroft_sys::procfs;
use undercroft_sys::uffd::{Message, Uffd};

use crate::process::Process;
use crate::shared::Shared;

/// Applies one event other than a fault.
pub(crate) fn apply(shared: &Shared, process: &Process, event: Message) {
    let space = process.space;
    let (effect, range) = match event {
        Message::Fault { .. } => return,
        Message::Remove(range) => (shared.engine().removed(space, range), range),
        Message::Unmap(range) => (shared.engine().unmapped(space, range), range),
        Message::Remap { from, to } => match shared.engine().remapped(space, from, to) {
            Ok(effect) => (effect, from),
            Err(_) => {
                return shared.doom("the page table is full: the program maps too much memory");
            }
        },
        Message::Fork { child } => return fork(shared, process, child),
    };
    if let (true, Some(agent)) = (effect.cancel_batch, process.agent.get()) {
        agent.commands.cancel();
    }
    shared.free_released();
    // Whoever waits on a page that is no longer there faults again, and is answered by what is true now.
    let _ = process.uffd.wake(range);
}

fn fork(shared: &Shared, parent: &Process, child: Uffd) {
    let (mut wiped, mut absent) = (Vec::new(), Vec::new());
    if let Some(pid) = parent.pid() {
        // The parent has returned from fork() by now, but its marks are those it forked with unless it changes them in this
        // very moment.
        let read = procfs::mappings_with_flags(pid, &mut [("wf", &mut wiped), ("dc", &mut absent)]);
        if let Err(error) = read {
            return shared.doom(&format!(
                "reading the program's mappings at a fork failed: {error}"
            ));
        }
    }
    let forked = shared.engine().forked(parent.space, &wiped);
    let Ok((space, effect)) = forked else {
        return shared.doom("the page table is full: the program forks too much memory");
    };
    for range in absent {
        shared.engine().unmapped(space, range);
    }
    shared.free_released();
    if let (true, Some(agent)) = (effect.cancel_batch, parent.agent.get()) {
        agent.commands.cancel();
    }
    let process = Process::new(space, child, parent.beacon, true);
    process.managed.store(true, Ordering::Relaxed);
    shared.add_process(Arc::new(process));
}

/// Moves the evictor and all agents to where no client thread faults.
pub(crate) fn place_agents(shared: &Shared) {
    let mut agents = Vec::new();
    for process in shared.all_processes() {
        agents.extend(process.agent.get().map(|agent| agent.commands.agent()));
    }
    shared.placement.place_workers(&agents);
}

/// A range minus others: what is left, ascending.
pub(crate) fn subtract(range: VirtRange, holes: &[VirtRange]) -> Vec<VirtRange> {
    let mut left = vec![range];
    for hole in holes {
        left = left
            .into_iter()
            .flat_map(|part| {
                [
                    VirtRange::new(part.start, part.end.min(hole.start)),
                    VirtRange::new(part.start.max(hole.end), part.end),
                ]
            })
            .filter(|part| !part.is_empty())
            .collect();
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::VirtPage;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    #[test]
    fn subtract_leaves_what_no_hole_covers() {
        let holes = [range(0, 2), range(4, 6), range(9, 20)];
        assert_eq!(subtract(range(0, 10), &holes), [range(2, 4), range(6, 9)]);
        assert_eq!(subtract(range(0, 10), &[range(0, 10)]), []);
        assert_eq!(subtract(range(5, 8), &[range(0, 3)]), [range(5, 8)]);
    }
}
