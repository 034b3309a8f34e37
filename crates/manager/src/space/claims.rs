//! Faults that are not the books': a process answers them by itself. Memory that is not a process's
//! has none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use undercroft_base::{PageState, VirtPage, VirtRange};
use undercroft_engine::Fault;

use crate::space::agent::Agent;
use crate::space::correction::{ChildBooks, Who, correct};
use crate::space::port::Wake;
use crate::space::process::{EXCLUDE_MAX, Process};
use crate::space::shared::Shared;

/// Who answers a fault.
#[must_use]
pub(crate) enum Claim {
    /// The books do.
    Free,
    /// The process has answered it.
    Answered,
    /// The page is to be refused: no thread may read it.
    Refused,
    /// The thread was woken, and faults again. Messages of others come first.
    Later,
    /// The same, after a pause: a descriptor, or memory in the kernel, is short.
    AfterPause,
}

/// Who answers a fault on a missing page. The caller holds no lock. Cost for a process that is no
/// fork child: three loads.
pub(crate) fn of(shared: &Shared, process: &Arc<Process>, fault: Fault) -> Claim {
    match of_child(shared, process, fault) {
        Claim::Free => {}
        claim => return claim,
    }
    if fault.page == process.relatives.beacon {
        answer_beacon(process, fault.thread.0);
        return Claim::Answered;
    }
    if let Some(agent) = process.agent.get()
        && agent.private.contains(fault.page)
    {
        fill_staging(process, agent, fault.page);
        return Claim::Answered;
    }
    if process.refused.has(fault.page) && is_new(shared, process, fault.page) {
        return Claim::Refused;
    }
    Claim::Free
}

/// Corrects the books of a fork child before its first page is served.
pub(crate) fn of_child(shared: &Shared, process: &Process, fault: Fault) -> Claim {
    let claim = match correct(shared, process, Who::Faulted(fault.thread.0)) {
        ChildBooks::Right => return Claim::Free,
        ChildBooks::Never => return Claim::Refused,
        ChildBooks::Later => Claim::Later,
        ChildBooks::Short => Claim::AfterPause,
    };
    process.memory.wake(VirtRange::one(fault.page));
    claim
}

/// Whether the books know nothing of a page.
fn is_new(shared: &Shared, process: &Process, page: VirtPage) -> bool {
    let engine = shared.books.engine();
    engine.books().entry(process.space, page).state == PageState::Untouched
}

/// Tells a fork child the number of its address space. If there is a number already, the child
/// reads that one. If there can be none now, it faults again.
fn answer_beacon(process: &Process, thread: u32) {
    let thread = process.relatives.proven.get().copied().unwrap_or(thread);
    let _ = process.issue_ticket(thread);
    process
        .memory
        .wake(VirtRange::one(process.relatives.beacon));
}

/// Serves a thread of the program that touches the staging area, as mlockall does. The thread gets
/// zeros, which the agent removes. Not while a command is carried out: the agent would find a page
/// there that it did not move.
fn fill_staging(process: &Process, agent: &Agent, page: VirtPage) {
    let range = VirtRange::one(page);
    let layout = process.layout.write();
    if agent.commands.is_idle() {
        // The agent sees this with its next command, which needs the lock.
        agent.commands.has_strays();
        let _ = process.memory.zero(range, Wake::Later);
    }
    drop(layout);
    process.memory.wake(range);
}

/// Excludes the agent while messages are read. False if it does not stop in time. Only the first
/// thread waits for such an agent.
pub(crate) fn lets_read(process: &Process, agent: &Agent) -> bool {
    let began = std::cell::Cell::new(None);
    let patient = || {
        let since = began.get().unwrap_or_else(std::time::Instant::now);
        began.set(Some(since));
        !process.unread.load(Ordering::Relaxed) && since.elapsed() < EXCLUDE_MAX
    };
    let excluded = (agent.commands).exclude_agent(|| !agent.has_ended(), patient);
    if process.unread.load(Ordering::Relaxed) == excluded {
        process.unread.store(!excluded, Ordering::Relaxed);
    }
    excluded
}
