//! Applies layout events to the books. The layout lock is held for writing, so no page is installed
//! meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use undercroft_base::VirtRange;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::procfs;
use undercroft_sys::uffd::{Message, Uffd};

use crate::gauges::scale::is_out_of_descriptors;
use crate::placement::Placement;
use crate::signals::Doom;
use crate::space::anonymous::Anonymous;
use crate::space::parts;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::Shared;
use crate::sync::lock;

/// Takes a layout event, in the order in which it was read, and applies all events that can be
/// applied now.
pub(crate) fn heard(shared: &Shared, process: &Process, event: Message) {
    lock(&process.order).push(event);
    apply_all(shared, process, true);
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
            Some(event) => apply(shared, process, event),
            None => return,
        }
    }
}

fn apply(shared: &Shared, process: &Process, event: Message) {
    let space = process.space;
    if let Message::Fork { child } = event {
        return fork(shared, process, child);
    }
    let moved = !matches!(event, Message::Remove(_));
    let (effect, range) = match event {
        Message::Fault { .. } | Message::Fork { .. } => return,
        Message::Remove(range) => (parts::dropped(shared, space, range, false), range),
        Message::Unmap(range) => (parts::dropped(shared, space, range, true), range),
        Message::Remap { from, to } => {
            follow(
                shared,
                process,
                from,
                VirtRange::new(to, to.plus(from.count().0)),
            );
            match parts::moved(shared, space, from, to) {
                Ok(effect) => (effect, from),
                Err(_) => {
                    return shared.signals.doom(Doom::TableFull);
                }
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

/// Notes that pages have moved which may not have been counted yet. Who counts them would not find
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
    // `correct_fork_child` finds the parts that the child does not have, or has as zeros, at its
    // first fault.
    let space = shared.books.engine().forks().begin_fork(parent.space);
    let child = Process::new(
        space,
        Arc::new(Anonymous::new(child)),
        parent.beacon,
        Some(parent.space),
        Some(parent.family),
    );
    child.managed.store(true, Ordering::Relaxed);
    let uncounted =
        parent.counting.load(Ordering::SeqCst) > 0 || parent.recount.load(Ordering::Acquire);
    child.recount.store(uncounted, Ordering::Release);
    let child = Arc::new(child);
    // The evictor may get a page of the child before its books are complete, and waits for them at
    // this lock.
    let layout = child.layout.write();
    shared.processes.add_forming(child.clone());
    let forked = parts::forked(shared, parent.space, space);
    drop(layout);
    match forked {
        Ok(effect) => {
            if let (true, Some(agent)) = (effect.cancel_batch, parent.agent.get()) {
                agent.commands.cancel();
            }
            shared.add_process(&child);
        }
        // The child is not served, and its userfaultfd stays open: it waits until it is ended.
        Err(_) => shared.signals.doom(Doom::TableFullByFork),
    }
}

/// Corrects a fork child's books by its own mappings: those marked `MADV_DONTFORK` are absent,
/// those marked `MADV_WIPEONFORK` are zeros. Called before the first page of the child is served.
/// Its only thread (`tid`) waits, so the marks are those of the fork. Cost: reads the child's
/// smaps, a few ms a GiB, once.
pub(crate) fn correct_fork_child(shared: &Shared, process: &Process, tid: u32, zeros: &[u8]) {
    if process.parent.is_none() || process.corrected.swap(true, Ordering::AcqRel) {
        return;
    }
    let tid = only_thread(&shared.processes, process, tid);
    let (mut wiped, mut present) = (Vec::new(), Vec::new());
    // Every managed mapping has the flag of missing-page tracking (`um`).
    let read = procfs::mappings_with_flags(tid, &mut [("wf", &mut wiped), ("um", &mut present)]);
    if read.is_err() || !present.iter().any(|range| range.contains(process.beacon)) {
        let short = read.is_err_and(|error| is_out_of_descriptors(&error));
        if !process.has_lost_its_memory(zeros) {
            shared.signals.doom(if short {
                Doom::NoDescriptors
            } else {
                Doom::ChildUnreadable
            });
        }
        return; // the child was killed meanwhile
    }
    let layout = process.layout.write();
    let regions = shared.books.regions(process.space);
    for region in regions {
        for absent in region.minus(&present[region.overlapping(&present)]) {
            parts::dropped(shared, process.space, absent, true);
        }
    }
    for range in wiped {
        parts::dropped(shared, process.space, range, false);
    }
    shared.books.free_released();
    drop(layout);
    crate::space::cow::protect(&shared.books, process, tid);
}

/// The only thread of a fork child. Its first fault names thread `tid`, which may be another
/// process's that reads the child's memory, or a number of another pid namespace. So a number is
/// put on the child's beacon, and that page is read in each process that may be the child. Without
/// proof `tid` is returned as it is; the caller verifies the process that it names.
fn only_thread(processes: &Processes, child: &Process, tid: u32) -> u32 {
    let Some(nonce) = child.issue_ticket(tid) else {
        return tid;
    };
    let shows = |pid: &u32| {
        let mut seen = [0u8; 8];
        let address = child.beacon.address();
        let read = ProcessMemory::open(*pid).and_then(|memory| memory.read(address, &mut seen));
        read.is_ok() && u64::from_ne_bytes(seen) == nonce
    };
    let parent = child.parent.and_then(|parent| processes.get(parent));
    let parent = parent.and_then(|parent| parent.pid());
    // A child made with `CLONE_PARENT` is its parent's brother.
    let parents = || {
        let above = parent.and_then(|pid| procfs::status_number(pid, "PPid"));
        parent.into_iter().chain(above.map(|pid| pid as u32))
    };
    let found = Some(tid)
        .filter(shows)
        .or_else(|| parents().flat_map(procfs::children).find(shows));
    if let Some(thread) = found {
        child.give_ticket(thread);
    }
    found.unwrap_or(tid)
}

/// Moves the evictor and all agents to CPUs where no client thread faults.
pub(crate) fn place_agents(processes: &Processes, placement: &Placement) {
    let mut agents = Vec::new();
    for process in processes.all() {
        let alive = process.agent.get().filter(|agent| !agent.has_ended());
        agents.extend(alive.map(|agent| agent.tid()));
    }
    placement.place_workers(&agents);
}
