//! Applies layout events to the books. The layout lock is held for writing, so no page is installed
//! meanwhile.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use undercroft_base::VirtRange;
use undercroft_sys::uffd::{Message, Receipt, Uffd};

use crate::legacy::{Fds, Flag};
use crate::placement::Placement;
use crate::signals::Doom;
use crate::space::anonymous::Anonymous;
use crate::space::order::phase;
use crate::space::parts;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::Shared;
use crate::sync::lock;

/// Takes a layout event, in the order in which it was read, and applies all events that can be
/// applied now.
pub(crate) fn heard(shared: &Shared, process: &Process, event: Message, receipt: Receipt) {
    lock(&process.order).push(event, receipt);
    apply_all(shared, process, true);
}

/// Applies the event that a dead manager was applying, which had come as far as `at`.
pub(crate) fn apply_again(
    shared: &Shared,
    process: &Process,
    (event, receipt): (Message, Receipt),
    at: u8,
) {
    lock(&process.order).chosen(&event);
    apply(shared, process, event, &receipt, at == phase::PLACE_IS_FREE);
    receipt.done();
}

/// Applies waiting events; true if none is left. An event waits for a late one
/// ([`crate::space::order`]) while the kernel may still report it. The caller holds the layout lock
/// for writing, and no agent is moving pages.
pub(crate) fn apply_events(shared: &Shared, process: &Process) -> bool {
    {
        let order = lock(&process.order);
        if !order.asks() {
            return order.has_applied_all();
        }
    }
    if !process.event_pending() {
        apply_all(shared, process, false);
        lock(&process.order).forget_vacated();
    }
    process.has_applied_all()
}

fn apply_all(shared: &Shared, process: &Process, late_ones_come: bool) {
    loop {
        let event = lock(&process.order).next(late_ones_come, |range| {
            let engine = shared.books.engine();
            let regions = engine.books().regions(process.space);
            !range.overlapping(regions).is_empty()
        });
        match event {
            Some((event, receipt)) => {
                apply(shared, process, event, &receipt, false);
                receipt.done();
            }
            None => return,
        }
    }
}

/// * `freed`: a move, and what was at its new place before is out of the books.
fn apply(shared: &Shared, process: &Process, event: Message, receipt: &Receipt, freed: bool) {
    let space = process.space;
    shared.signals.stir();
    if let Message::Fork { child } = event {
        return fork(shared, process, child);
    }
    let moved = !matches!(event, Message::Remove(_));
    let (effect, range) = match event {
        Message::Fault { .. } | Message::Fork { .. } => return,
        Message::Remove(range) => {
            process.dropping.add(range, Instant::now());
            (parts::dropped(shared, space, range, false), range)
        }
        Message::Unmap(range) => (parts::dropped(shared, space, range, true), range),
        Message::Remap { from, to } => {
            follow(
                shared,
                process,
                from,
                VirtRange::new(to, to.plus(from.count().0)),
            );
            let free = || receipt.begin(phase::PLACE_IS_FREE);
            match parts::moved(shared, space, (from, to), freed, free) {
                Ok(effect) => (effect, from),
                Err(_) => return shared.signals.doom(Doom::TableFull),
            }
        }
    };
    if let (true, Some(agent)) = (effect.cancel_batch, process.agent.get()) {
        agent.commands.cancel();
    }
    shared.books.free_released();
    if moved {
        // A new mapping may have taken the address before the books knew that the old one was gone.
        process.recheck.add(range);
    }
    // A thread that waits on a page of the range faults again, and gets an answer from the new
    // books.
    process.memory.wake(range);
}

/// Notes that pages have moved. Some may not have been counted yet, and the count would not find
/// them at the old place.
fn follow(shared: &Shared, process: &Process, from: VirtRange, to: VirtRange) {
    let known = {
        let engine = shared.books.engine();
        let regions = engine.books().regions(process.space);
        from.minus(&regions[from.overlapping(regions)]).is_empty()
    };
    if !known {
        process.recheck.add(to);
    }
    if !known || process.counting.load(Ordering::SeqCst) > 0 {
        process.uncounted.add(to);
    }
}

fn fork(shared: &Shared, parent: &Process, child: Uffd) {
    // What the child does not have, or has as zeros, is found before its first page is served
    // ([`crate::space::correction`]).
    let space = shared.books.engine().forks().begin_fork(parent.space);
    let row = shared.books.row(space);
    row.put_fd(Fds::Uffd, Some(child.as_fd()));
    let child = Process::new(
        space,
        Arc::new(Anonymous::new(child)),
        parent.beacon,
        Some(parent.space),
        Some(parent.family),
        row,
    );
    child.managed.store(true, Ordering::Relaxed);
    child.row.set(Flag::Managed);
    let uncounted =
        parent.counting.load(Ordering::SeqCst) > 0 || parent.recount.load(Ordering::Acquire);
    child.recount.store(uncounted, Ordering::Release);
    let child = Arc::new(child);
    // The evictor may get a page of the child before its books are complete, and waits for them at
    // this lock.
    let layout = child.layout.write(); // its hold is a part of the parent's, which is noted
    shared.processes.add_forming(child.clone());
    let forked = parts::forked(shared, parent.space, space);
    drop(layout);
    match forked {
        Ok(effect) => {
            if let (true, Some(agent)) = (effect.cancel_batch, parent.agent.get()) {
                agent.commands.cancel();
            }
            child.row.commit(space, child.parent, child.family);
            shared.add_process(&child);
        }
        // The child is not served, and its userfaultfd stays open: it waits until it is ended.
        Err(_) => shared.signals.doom(Doom::TableFullByFork),
    }
}

/// Moves the evictor and all agents to CPUs where no client thread faults.
pub(crate) fn place_agents(processes: &Processes, placement: &Placement) {
    let mut agents = Vec::new();
    for process in processes.all() {
        let alive = process.agent.get().filter(|agent| !agent.has_ended());
        agents.extend(alive.map(|agent| (agent.tid(), process.pid())));
    }
    placement.place_workers(&agents);
}
