//! Applies layout events to the books. The layout lock is held for writing, so no page is installed
//! meanwhile.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use undercroft_base::VirtRange;
use undercroft_proto::legacy::{Fds, Flag};
use undercroft_sys::uffd::{Message, Receipt, Uffd};

use crate::space::anonymous::Anonymous;
use crate::space::foreign;
use crate::space::order::phase;
use crate::space::parts;
use crate::space::process::Process;
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

/// Removes an address space that is gone. Events that waited for a late one are applied first,
/// because none comes any more: a FORK among them brings a child that lives. With its descriptor
/// closed, it would read zeros. The caller holds no lock.
pub(crate) fn ended(shared: &Shared, process: &Arc<Process>) {
    {
        let _layout = process.layout.write();
        let _held = shared.gauges.layout_holds.hold();
        apply_all(shared, process, false);
    }
    parts::ended(shared, process);
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
        if let Some(handed) = &process.handed {
            // Only a monitor that asked for it has such an event.
            let regions = shared.books.engine().books().regions(space).to_vec();
            handed.refuse_child(&regions, &child);
            return process.end("it forked, and the memory of its child is not served");
        }
        return fork(shared, process, child);
    }
    let moved = !matches!(event, Message::Remove(_));
    let (effect, range) = match event {
        Message::Fault { .. } | Message::Fork { .. } => return,
        Message::Remove(range) => {
            process.dropping.add(range, Instant::now());
            process.refused.gone(range);
            (parts::dropped(shared, space, range, false), range)
        }
        Message::Unmap(range) => {
            process.ground.gone(range);
            process.refused.gone(range);
            (parts::dropped(shared, space, range, true), range)
        }
        Message::Remap { from, to } => {
            let new = VirtRange::new(to, to.plus(from.count().0));
            process.ground.gone(from);
            process.ground.registered(new);
            process.refused.moved(from, new);
            foreign::read_zeros(shared, process, from, new);
            follow(shared, process, from, new);
            let free = || receipt.begin(phase::PLACE_IS_FREE);
            let effect = parts::moved(shared, process, (from, to), freed, free);
            (effect, from)
        }
    };
    if let (true, Some(agent)) = (effect.cancel_batch, process.agent.get()) {
        agent.commands.cancel();
    }
    shared.books.free_released();
    if moved {
        // A new mapping may have taken the address before the books knew that the old one was gone.
        process.backlog.recheck.add(range);
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
        process.backlog.recheck.add(to);
    }
    if !known || process.backlog.counting.load(Ordering::SeqCst) > 0 {
        process.backlog.uncounted.add(to);
    }
}

fn fork(shared: &Shared, parent: &Process, child: Uffd) {
    // What the child does not have, or has as zeros, is found before its first page is served
    // ([`crate::space::correction`]).
    let begun = shared.books.engine().forks().begin_fork(parent.space);
    let Ok(space) = begun else {
        // No number is free. There are more of them than processes on a machine. The child waits at
        // its first missing page: with its descriptor closed, it would read zeros.
        shared.gauges.shortages.no_entry();
        return std::mem::forget(child);
    };
    let row = shared.books.row(space);
    row.put_fd(Fds::Uffd, Some(child.as_fd()));
    let child = Process::new(
        space,
        Arc::new(Anonymous::new(child)),
        parent.relatives.beacon,
        Some(parent.space),
        Some(parent.relatives.family),
        row,
    );
    child.ground.fenced_as(&parent.ground); // until its first discovery
    child.managed.store(true, Ordering::Relaxed);
    child.row.set(Flag::Managed);
    let uncounted = parent.backlog.counting.load(Ordering::SeqCst) > 0
        || parent.backlog.recount.load(Ordering::Acquire);
    child.backlog.recount.store(uncounted, Ordering::Release);
    child.refused.inherit(&parent.refused);
    if child.refused.any() {
        child.row.set(Flag::Short);
    }
    let child = Arc::new(child);
    // The evictor may get a page of the child before its books are complete, and waits for them at
    // this lock.
    let layout = child.layout.write(); // its hold is a part of the parent's, which is noted
    shared.processes.add_forming(child.clone());
    let effect = parts::forked(shared, parent.space, &child);
    drop(layout);
    if let (true, Some(agent)) = (effect.cancel_batch, parent.agent.get()) {
        agent.commands.cancel();
    }
    child
        .row
        .commit(space, child.relatives.parent, child.relatives.family);
    shared.add_process(&child);
}

#[cfg(test)]
mod tests {
    use undercroft_base::VirtPage;

    use super::*;
    use crate::fault::model_tests::{options, shared};
    use crate::space::model::ModelMemory;

    /// A parent whose FORK waits behind a move that waits for a late event. The other end of the
    /// child's descriptor shows whether it is open.
    fn held_back() -> (Arc<Shared>, Arc<Process>, std::os::fd::OwnedFd) {
        let shared = shared(options("ram"));
        let range = VirtRange::new(VirtPage(512), VirtPage(600));
        let space = {
            let mut engine = shared.books.engine();
            let space = engine.layout().add_space();
            engine.layout().attached(space, range);
            space
        };
        let (beacon, row) = (VirtPage(1 << 20), shared.books.row(space));
        let memory = Arc::new(ModelMemory::new(range));
        let parent = Arc::new(Process::new(space, memory, beacon, None, None, row));
        shared.add_process(&parent);
        let (child, other_end) = rustix::pipe::pipe().expect("a pipe");
        let from = VirtRange::new(VirtPage(520), VirtPage(530));
        let moved = Message::Remap {
            from,
            to: VirtPage(550), // in use by the books
        };
        let forked = Message::Fork {
            child: Uffd::from(child),
        };
        for event in [moved, forked] {
            let _layout = parent.layout.write();
            heard(&shared, &parent, event, Receipt::default());
        }
        assert!(
            !parent.has_applied_all(),
            "the move waits, and the fork behind it"
        );
        (shared, parent, other_end)
    }

    fn is_open(other_end: &impl AsFd) -> bool {
        let mut fds = [rustix::event::PollFd::new(
            other_end,
            rustix::event::PollFlags::OUT,
        )];
        let now = rustix::fs::Timespec::default();
        rustix::event::poll(&mut fds, Some(&now)).expect("poll");
        !fds[0].revents().contains(rustix::event::PollFlags::ERR)
    }

    #[test]
    fn a_child_whose_fork_was_held_back_outlives_its_parent() {
        let (shared, parent, other_end) = held_back();
        assert!(is_open(&other_end));
        ended(&shared, &parent);
        let all = shared.processes.all();
        assert_eq!(all.len(), 1, "the child, without the parent");
        assert_eq!(all[0].relatives.parent, Some(parent.space));
        drop(parent);
        assert!(is_open(&other_end), "the child would read zeros");
    }
}
