//! Takes over from a dead manager, whose clients wait meanwhile.
//!
//! 1. [`Inheritance::of`] gets the descriptors from the dead manager's holder, under new numbers,
//!    and makes these the true ones. Before that, nothing is changed.
//! 2. `start.rs` recovers engine and tiers.
//! 3. [`Inheritance::settle`] stops the agents, applies the layout events that were read and those
//!    that wait, and ends what was in flight by what the kernel shows. No other thread of this
//!    manager runs yet.
//! 4. `start.rs` starts the threads. The evictor begins with the pages in hand.
//! 5. [`wake_everyone`]: faults that the dead manager had read are not reported again.
//!
//! Whatever is not certain ends in an error. The keeper then ends the client, as it always did.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{BASE_PAGE_BYTES, PageSize, PageState, SpaceId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Found, HeldPage, Here, InHand, Recovered};
use undercroft_proto::legacy::{
    EventInbox, Fds, Flag, Heir, HeldEvent, Legacy, LegacyError, Number, Row,
};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::pagemap::{Category, PageIs, Pagemap};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::{self, ThreadStatus};
use undercroft_sys::uffd::{Message, Uffd};
use undercroft_sys::{fdpass, handover};
use undercroft_wire::parse::answer;

use super::guest;
use crate::fault::relief;
use crate::gauges::scale::Short;
use crate::log;
use crate::space::agent::Agent;
use crate::space::anonymous::Anonymous;
use crate::space::command::Commands;
use crate::space::foreign;
use crate::space::identity::Identity;
use crate::space::layout;
use crate::space::order::EventOrder;
use crate::space::port::Wake;
use crate::space::process::Process;
use crate::space::relatives::Ticket;
use crate::space::shared::Shared;
use crate::sync::lock;

/// Longest wait for the agents to end their commands. One needs some 0.1 ms, if it has a CPU.
const AGENTS_MAX: Duration = Duration::from_secs(5);

/// Longest wait for one move of an agent before something else is done. It takes some 20 us.
const MOVE_MAX: Duration = Duration::from_millis(2);

/// Longest time until one part of a process's memory, or the batch, is seen with no event unread.
const QUIET_MAX: Duration = Duration::from_secs(5);

/// Pause before events are read again that could not be read for want of memory or a descriptor.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(50);

/// How often an agent is looked at before it may be waiting for a page.
const LOOKS_FOR_FAULT: u32 = 40;

/// How often before other processes are served meanwhile, and how often between two rounds: some 11
/// and 0.5 ms.
const LOOKS_FOR_OTHERS: u32 = 100;
const LOOKS_BETWEEN: u32 = 5;

/// How often before an ended agent was killed. The memory of a program that calls exec is gone a
/// moment after its agent.
const LOOKS_FOR_END: u32 = 1000;

const _: () = assert!(LOOKS_FOR_OTHERS.is_multiple_of(LOOKS_BETWEEN));

/// Why a successor does not take over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeoverError {
    #[error(transparent)]
    Legacy(#[from] LegacyError),
    #[error("no manager can take over: {0}")]
    Incomplete(&'static str),
    #[error("the descriptors of a process were not handed over: {0}")]
    NotHandedOver(io::Error),
    #[error("the agent of process {0} does not end its command (its state: {1})")]
    AgentBusy(u32, char),
    #[error("the agent of process {0} has ended, and its memory is still in use")]
    AgentGone(u32),
    #[error("layout events of process {0} cannot be read: {1}")]
    Events(u32, io::Error),
    #[error("the memory of process {0} did not stand still for {QUIET_MAX:?}")]
    NeverQuiet(u32),
    #[error("{0} pages that were on their way out are nowhere: they may be lost")]
    Nowhere(u64),
}

/// The inheritance from a dead manager.
pub(super) struct Inheritance {
    legacy: Arc<Legacy>,
    heirs: Vec<(Row, Heir, Vec<Option<OwnedFd>>)>,
    held: Vec<HeldEvent>,
}

impl Inheritance {
    /// Gets all descriptors, and makes their new numbers the true ones.
    ///
    /// Errors: something is missing. Nothing was changed then.
    pub(super) fn of(legacy: &Arc<Legacy>, holder: &OwnedFd) -> Result<Inheritance, TakeoverError> {
        if let Some(why) = legacy.refusal() {
            return Err(TakeoverError::Incomplete(why));
        }
        let ask = |numbers: &[i32]| {
            handover::ask(holder.as_fd(), numbers).map_err(TakeoverError::NotHandedOver)
        };
        let mut heirs = Vec::new();
        for (row, heir) in legacy.heirs() {
            let fds = ask(&heir.fds)?;
            let number =
                |fd: &Option<OwnedFd>| fd.as_ref().map_or(handover::NONE, AsRawFd::as_raw_fd);
            let numbers: Vec<i32> = fds.iter().map(number).collect();
            let numbers = numbers.as_slice().try_into();
            row.put_next_fds(numbers.map_err(|_| short())?);
            heirs.push((row, heir, fds));
        }
        let mut held = legacy.held();
        for event in &mut held {
            let Some(number) = event.child_number(legacy) else {
                continue;
            };
            // One that is a row's already is applied: only that was not written down any more.
            let known = |(_, heir, _): &(Row, Heir, _)| heir.fds[Fds::Uffd as usize] == number;
            if !heirs.iter().any(known) {
                let child = ask(&[number])?.pop().flatten().ok_or_else(short)?;
                event.renumber(legacy, child.as_raw_fd());
                event.child = Some(uffd(child)?);
            }
        }
        legacy.begin_generation();
        // If the host of guest memory is gone, so is that, when it is asked after it.
        heirs.sort_by_key(|(_, heir, _)| heir.has(Flag::Guest));
        let parents: BTreeSet<SpaceId> = held.iter().map(|event| event.space).collect();
        let mut kept = Vec::new();
        for (row, heir, fds) in heirs {
            // A space that is gone is still needed for events that it had: a fork child's pages
            // are those of its parent.
            let probe = fds[Fds::Uffd as usize].as_ref().ok_or_else(short)?;
            if parents.contains(&heir.space) || !is_gone(probe) {
                kept.push((row, heir, fds));
            } else {
                row.free();
            }
        }
        Ok(Inheritance {
            legacy: legacy.clone(),
            heirs: kept,
            held,
        })
    }

    /// The address spaces that live on. Guest memory has pages of size `guest`.
    pub(super) fn spaces(&self, guest: PageSize) -> Vec<(SpaceId, PageSize)> {
        let size = |heir: &Heir| [PageSize::Base, guest][usize::from(heir.has(Flag::Guest))];
        let heirs = self.heirs.iter().map(|(_, heir, _)| heir);
        heirs.map(|heir| (heir.space, size(heir))).collect()
    }

    /// The managed ranges of each.
    pub(super) fn regions(&self) -> impl Iterator<Item = (SpaceId, Vec<VirtRange>)> {
        let heirs = self.heirs.iter();
        heirs.map(|(_, heir, _)| (heir.space, heir.regions.clone()))
    }

    /// Brings the books up to date with the processes, which stay for the caller to watch. Returns
    /// the pages in hand.
    pub(super) fn settle(self, shared: &Shared) -> Result<Settled, TakeoverError> {
        let mut greetings = Vec::new();
        for (row, heir, mut fds) in self.heirs {
            if heir.has(Flag::Guest) || heir.has(Flag::Handed) {
                let process = guest::revive(shared, row, &heir, &mut fds);
                shared.add_process(&process.ok_or_else(short)?);
                continue;
            }
            let (process, greeting) = revive(row, &heir, fds)?;
            foreign::exposed_before(&process, heir.exposed());
            shared.add_process(&process);
            greetings.extend(greeting.map(|socket| (process, socket)));
        }
        let mut inbox = EventInbox::new(self.legacy.clone());
        cancel_commands(shared);
        apply_held(shared, &self.legacy, self.held)?;
        await_agents(shared, &mut inbox)?;
        let mut done = BTreeSet::new();
        // Fork children may come while events are read.
        while let Some(process) =
            (shared.processes.all().into_iter()).find(|process| !done.contains(&process.space))
        {
            correct_installed(shared, &process, &mut inbox)?;
            done.insert(process.space);
        }
        let recovered = end_flight(shared, &mut inbox)?;
        // The program may have dropped them without an event. Nothing shows that.
        if recovered.vanished > 0 {
            return Err(TakeoverError::Nowhere(recovered.vanished));
        }
        if !recovered.lost.is_empty() {
            log::warn(&format!(
                "{} pages ended with their process: another process that shares them gets SIGBUS there",
                recovered.lost.len()
            ));
        }
        Ok(Settled {
            in_hand: recovered.in_hand,
            greetings,
        })
    }
}

/// Work that is left once the threads run.
pub(super) struct Settled {
    /// Pages that the dead manager had taken out and not published.
    pub in_hand: Vec<InHand>,
    /// Processes that wait for the last answer of their handshake.
    greetings: Vec<(Arc<Process>, OwnedFd)>,
}

impl Settled {
    /// Sends the last answers of handshakes. One that was sent already is not read.
    pub(super) fn greet(&mut self) {
        for (process, socket) in self.greetings.drain(..) {
            let given = [process.memory.as_fd()];
            let _ = fdpass::send(socket.as_fd(), &answer(false), &given);
            process.row.put_fd(Fds::Greeting, None);
        }
    }
}

fn short() -> TakeoverError {
    TakeoverError::NotHandedOver(io::ErrorKind::NotFound.into())
}

fn uffd(fd: OwnedFd) -> Result<Uffd, TakeoverError> {
    Uffd::from_stranger(fd).map_err(TakeoverError::NotHandedOver)
}

fn is_gone(fd: &OwnedFd) -> bool {
    undercroft_sys::held::is_gone(fd.as_fd())
}

/// Makes the process that a row describes.
fn revive(
    row: Row,
    heir: &Heir,
    mut fds: Vec<Option<OwnedFd>>,
) -> Result<(Arc<Process>, Option<OwnedFd>), TakeoverError> {
    let mut take = |of: Fds| fds[of as usize].take();
    let must = |fd: Option<OwnedFd>| fd.ok_or_else(short);
    let memory = Arc::new(Anonymous::new(uffd(must(take(Fds::Uffd))?)?));
    let beacon = VirtPage(heir.number(Number::Beacon));
    let family = Some(heir.family);
    let process = Process::new(heir.space, memory, beacon, heir.parent, family, row.clone());
    *lock(&process.order) = EventOrder::new(row.clone(), heir.vacated.clone());
    let flags = [
        (&process.managed, Flag::Managed),
        (&process.relatives.corrected, Flag::Corrected),
        (&process.exited, Flag::Exited),
        (&process.relatives.unreadable, Flag::Unreadable),
        (&process.partners.found, Flag::Partners),
    ];
    for (flag, of) in flags {
        flag.store(heir.has(of), Ordering::Relaxed);
    }
    if heir.has(Flag::Short) {
        process.refused.add(process.all_pages); // the list was the dead manager's
    }
    let pid = heir.number(Number::Pid) as u32;
    if heir.has(Flag::Announced) {
        let pidfd = PidFd::from(must(take(Fds::Pidfd))?);
        let _ = process.identity.set(Identity {
            pid,
            is_below: pidfd.is_below(),
            pidfd,
            pagemap: must(take(Fds::Pagemap))?.into(),
            maps: must(take(Fds::Maps))?.into(),
            tasks: must(take(Fds::Tasks))?.into(),
        });
        let page = SharedMemory::from_fd(must(take(Fds::CommandPage))?);
        let page = page.map_err(TakeoverError::NotHandedOver)?;
        let task = (
            take(Fds::AgentPidfd).map(PidFd::from),
            take(Fds::AgentStatus).map(ThreadStatus::from),
        );
        let holding = uffd(must(take(Fds::HoldingUffd))?)?;
        let memory = must(take(Fds::Memory))?.into();
        let agent = Agent::again(Commands::new(page), holding, memory, task, heir, row);
        let _ = process.agent.set(agent);
    } else if heir.number(Number::Nonce) != 0 {
        *lock(&process.relatives.ticket) = Some(Ticket {
            nonce: heir.number(Number::Nonce),
            thread: heir.number(Number::NonceThread) as u32,
        });
    }
    if let proven @ 1.. = heir.number(Number::Proven) as u32 {
        let _ = process.relatives.proven.set(proven);
    }
    let greeting = take(Fds::Greeting);
    Ok((Arc::new(process), greeting))
}

fn pid_of(process: &Process) -> u32 {
    process.pid().unwrap_or(0)
}

/// An agent is waited for in vain. The letter of its state, as ps shows it, tells why: T is
/// stopped, D waits in the kernel.
fn busy(process: &Process, agent: &Agent) -> TakeoverError {
    TakeoverError::AgentBusy(pid_of(process), agent.state())
}

/// Cancels all commands: an agent goes on without its manager.
fn cancel_commands(shared: &Shared) {
    for process in shared.processes.all() {
        if let Some(agent) = process.agent.get() {
            agent.commands.take_over();
        }
    }
}

/// Does `act` while the agent of the process, if it has one, moves no page.
fn without_agent<R>(process: &Process, act: impl FnOnce() -> R) -> Result<R, TakeoverError> {
    let done = if_agent_rests(process, AGENTS_MAX, act);
    let agent = process.agent.get();
    done.ok_or_else(|| TakeoverError::AgentBusy(pid_of(process), agent.map_or('?', Agent::state)))
}

/// The same, if it moves none within `longest`. `None`: it may be stopped in the middle of a move.
fn if_agent_rests<R>(process: &Process, longest: Duration, act: impl FnOnce() -> R) -> Option<R> {
    let Some(agent) = process.agent.get() else {
        return Some(act());
    };
    let began = Instant::now();
    let patient = || began.elapsed() < longest;
    if !(agent.commands).exclude_agent(|| !agent.has_ended(), patient) {
        return None;
    }
    let result = act();
    agent.commands.admit_agent();
    Some(result)
}

/// Waits until all commands are answered. An agent may wait for a page meanwhile.
fn await_agents(shared: &Shared, inbox: &mut EventInbox) -> Result<(), TakeoverError> {
    let began = Instant::now();
    for process in shared.processes.all() {
        let Some(agent) = process.agent.get() else {
            continue;
        };
        let (mut looks, mut ended) = (0, 0);
        while !agent.commands.is_idle() && !process.has_lost_its_memory() {
            ended += u32::from(agent.has_ended() && process.is_alive());
            if ended > LOOKS_FOR_END {
                // Nothing moves its pages any more.
                if process.pagemap().is_ok_and(|of| agent.find_left(of)) {
                    break;
                }
                return Err(TakeoverError::AgentGone(pid_of(&process)));
            }
            if began.elapsed() > AGENTS_MAX {
                return Err(busy(&process, agent));
            }
            looks += 1;
            if looks % LOOKS_FOR_FAULT == 0 {
                serve_agent(shared, &process, agent, inbox)?;
            }
            if looks >= LOOKS_FOR_OTHERS && looks % LOOKS_BETWEEN == 0 {
                let again = looks == LOOKS_FOR_OTHERS;
                serve_others(shared, process.space, inbox, again)?;
            }
            std::thread::sleep(PAUSE);
        }
        unbind(&process, agent);
    }
    Ok(())
}

/// Gives the agent the page that it waits for, if it does, so that it ends its command: as fault
/// threads do for an urgent fault.
fn serve_agent(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    inbox: &mut EventInbox,
) -> Result<(), TakeoverError> {
    let _layout = process.layout.write();
    let read = if_agent_rests(process, MOVE_MAX, || read_events(shared, process, inbox));
    let Some(faults) = read.transpose()? else {
        return Ok(()); // it waits for no page
    };
    let mut served = false;
    for (page, protected, thread) in faults {
        if thread != agent.number() {
            continue;
        }
        served = true;
        if protected {
            let _ = process.memory.protect(VirtRange::one(page), false);
        } else {
            relief::give(shared, process, page);
        }
    }
    if !served {
        // The dead manager may have read its fault. It faults again, and the next look finds that:
        // on a busy machine it takes some milliseconds.
        process.memory.wake(process.all_pages);
    }
    Ok(())
}

/// Serves the other processes: one of them may have stopped this one (SIGSTOP, ptrace), and wait
/// for a page before it lets it go on. Only pages are given that no busy agent can have in its
/// hands, and not to a fork child whose books were never compared with its memory.
/// * `again`: faults that the dead manager had read are to come again, for the next round.
fn serve_others(
    shared: &Shared,
    waiting: SpaceId,
    inbox: &mut EventInbox,
    again: bool,
) -> Result<(), TakeoverError> {
    for process in shared.processes.all() {
        let agent = process.agent.get();
        let is_idle = agent.is_none_or(|agent| agent.commands.is_idle());
        if process.space == waiting || !is_idle || !process.is_corrected() {
            continue;
        }
        let _layout = process.layout.write();
        let faults = without_agent(&process, || read_events(shared, &process, inbox))??;
        for (page, protected, _) in faults {
            let state = {
                let engine = shared.books.engine();
                engine.books().entry(process.space, page).state
            };
            if protected || !process.has_applied_all() {
                continue;
            }
            match state {
                PageState::Untouched if process.refused.has(page) => continue,
                PageState::Untouched | PageState::Stored => relief::give(shared, &process, page),
                PageState::Evicting => give_back(shared, &process, page),
                _ => continue,
            }
            process.memory.wake(VirtRange::one(page)); // it comes again if that was refused
        }
        if again {
            process.memory.wake(process.all_pages);
        }
    }
    Ok(())
}

/// Puts a page back that an agent has moved out, if that agent has no command any more. The batch
/// ends later: a page that is present has returned.
fn give_back(shared: &Shared, process: &Process, page: VirtPage) {
    let noted = {
        let engine = shared.books.engine();
        engine.noted_place(process.space, page)
    };
    let Some((owner, place)) = noted else { return };
    let owner = shared.processes.get(owner);
    let Some(agent) = owner.as_ref().and_then(|owner| owner.agent.get()) else {
        return;
    };
    let mut bytes = [0u8; BASE_PAGE_BYTES];
    if (agent.commands.is_idle() || agent.died_at_work())
        && agent.held(place) == HeldPage::Here
        && agent.read_one(agent.result(), place, &mut bytes)
    {
        // Refused if something is there, or an event is unread.
        let _ = process.memory.install(page, &bytes, Wake::Now);
    }
}

/// Frees the thread that the dead manager had bound to one CPU.
fn unbind(process: &Process, agent: &Agent) {
    let tid = agent.commands.bound();
    if tid != 0 {
        let cpus = agent.commands.bound_cpus();
        if procfs::is_thread_of(pid_of(process), tid) && !cpus.is_empty() {
            let _ = process::set_affinity(tid, &cpus);
        }
        agent.commands.unbind(tid);
    }
}

/// Applies the events that the dead manager had read. First, for each space, the one that it was
/// applying.
fn apply_held(
    shared: &Shared,
    legacy: &Legacy,
    mut held: Vec<HeldEvent>,
) -> Result<(), TakeoverError> {
    held.sort_by_key(|event| event.phase() == 0); // stable
    for event in held {
        let (phase, process) = (event.phase(), shared.processes.get(event.space));
        let (message, receipt) = event.take(legacy);
        // No message: a FORK whose child has its row. No process: nothing of it is in the books.
        let (Some(message), Some(process)) = (message, process) else {
            receipt.done();
            continue;
        };
        let _layout = process.layout.write();
        without_agent(&process, || {
            if phase == 0 {
                layout::heard(shared, &process, message, receipt);
            } else {
                layout::apply_again(shared, &process, (message, receipt), phase);
            }
        })?;
    }
    Ok(())
}

/// A fault: its page, whether that is write-protected, and the thread.
type Faulted = (VirtPage, bool, u32);

/// Reads and applies the events that wait. Faults are returned: their threads are woken later. The
/// caller holds the layout lock for writing, and no agent is moving pages.
fn read_events(
    shared: &Shared,
    process: &Process,
    inbox: &mut EventInbox,
) -> Result<Vec<Faulted>, TakeoverError> {
    let (mut faults, began) = (Vec::new(), Instant::now());
    loop {
        let mut messages = match process.memory.events(inbox.next(process.space)) {
            Ok(messages) => messages,
            // The event stays unread.
            Err(error) if Short::of(&error).is_some() && began.elapsed() < QUIET_MAX => {
                Short::of(&error).inspect(|short| shared.gauges.shortages.note(*short));
                std::thread::sleep(SHORTAGE_PAUSE);
                continue;
            }
            Err(error) => return Err(TakeoverError::Events(pid_of(process), error)),
        };
        let mut events = Vec::new();
        let any = !messages.is_empty();
        while let Some(message) = messages.next() {
            match message {
                Message::Fault {
                    page, wp, thread, ..
                } => faults.push((page, wp, thread.0)),
                event => events.push((event, messages.slot())),
            }
        }
        drop(messages);
        for (event, slot) in events {
            layout::heard(shared, process, event, inbox.receipt(slot));
        }
        // After each read, as fault threads do: a move that waits must not wait for what the
        // program does next.
        layout::apply_events(shared, process);
        if !any {
            break;
        }
    }
    Ok(faults)
}

/// Corrects the pages of a process that a load had installed and not finished. They are found part
/// by part, because the process may change its memory meanwhile.
fn correct_installed(
    shared: &Shared,
    process: &Arc<Process>,
    inbox: &mut EventInbox,
) -> Result<(), TakeoverError> {
    // A process that has not announced itself cannot be looked at. A page of it that was installed
    // counts as stored until it is dropped. It never faults, and never leaves.
    if process.hosted.is_some() {
        guest::correct(shared, process);
        return Ok(());
    }
    let began = Instant::now();
    let mut left = EVERYTHING;
    loop {
        let _layout = process.layout.write();
        read_events(shared, process, inbox)?;
        let part = {
            let engine = shared.books.engine();
            engine.books().some_parts(process.space, left, 1).pop()
        };
        let (Some(part), Ok(pagemap)) = (part, process.pagemap()) else {
            if process.has_applied_all() {
                return Ok(());
            }
            wait_for_quiet(process, began)?;
            continue;
        };
        // If it cannot be read, it is gone, or the kernel has no memory for a moment.
        let present = match present(pagemap, part) {
            Ok(present) if process.books_are_current() => present,
            Err(_) if process.has_lost_its_memory() => Vec::new(),
            Ok(_) | Err(_) => {
                wait_for_quiet(process, began)?;
                continue;
            }
        };
        let mut engine = shared.books.engine();
        for range in present {
            engine.reconcile_present(process.space, range);
        }
        left.start = part.end;
    }
}

fn wait_for_quiet(process: &Process, began: Instant) -> Result<(), TakeoverError> {
    if began.elapsed() > QUIET_MAX && process.is_alive() {
        return Err(TakeoverError::NeverQuiet(pid_of(process)));
    }
    Ok(())
}

/// The pages of `range` whose bytes the program has, in a frame or in the kernel's swap.
///
/// Errors: the process is gone, or the kernel does not tell.
fn present(pagemap: &Pagemap, range: VirtRange) -> io::Result<Vec<VirtRange>> {
    let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
    let mut found = Vec::new();
    pagemap.scan(range, any, &mut found)?;
    with_bytes(found, |page| pagemap.place(page))
}

/// Of what a scan has found, the pages whose bytes the program has.
/// * `place`: asked only where the scan does not say it.
fn with_bytes(
    found: Vec<(VirtRange, Category)>,
    mut place: impl FnMut(VirtPage) -> io::Result<PageIs>,
) -> io::Result<Vec<VirtRange>> {
    let mut ranges = Vec::new();
    for (range, is) in found {
        if is.has(Category::PRESENT) {
            ranges.push(range);
            continue;
        }
        for page in range.pages() {
            if matches!(here(place(page)?), Here::Present | Here::Swapped) {
                ranges.push(VirtRange::one(page));
            }
        }
    }
    Ok(ranges)
}

/// A page in flight, as its process's page tables show it. An error says nothing of the page: its
/// process has not announced itself, or the kernel does not tell.
fn shown(place: io::Result<PageIs>, gone: impl FnOnce() -> bool) -> Here {
    match place.map(here) {
        Ok(Here::Absent) if gone() => Here::NotManaged,
        Ok(here) => here,
        Err(_) => Here::Unknown,
    }
}

/// The meaning of the kernel's word for a page that is managed. A page in the kernel's swap is
/// where the program left it. So is one that may be a mark that we cannot tell: if it is one, each
/// access fails, and the books have one page too many.
fn here(place: PageIs) -> Here {
    match place {
        PageIs::Present => Here::Present,
        PageIs::Swapped => Here::Swapped,
        PageIs::Guard => Here::Guarded,
        PageIs::Absent | PageIs::Mark => Here::Absent,
    }
}

/// Finds pages in flight by what the kernel and the agents show.
struct Shown<'a> {
    shared: &'a Shared,
    pages: HashMap<(SpaceId, VirtPage), Here>,
}

impl Found for Shown<'_> {
    fn page(&mut self, space: SpaceId, page: VirtPage) -> Here {
        let seen = self.pages.get(&(space, page));
        seen.copied().unwrap_or(Here::Absent)
    }

    fn held(&mut self, owner: SpaceId, place: usize) -> HeldPage {
        match self.shared.processes.get(owner) {
            None => HeldPage::OwnerGone,
            Some(process) => match process.agent.get() {
                Some(agent) => agent.held(place),
                // It was chosen, and no agent could take it.
                None => HeldPage::NotMoved,
            },
        }
    }
}

/// A process whose agent died with its manager, in the middle of a command.
fn first_without_agent(shared: &Shared) -> Option<u32> {
    let died = |of: &Arc<Process>| of.agent.get().is_some_and(Agent::died_at_work);
    let all = shared.processes.all();
    all.iter().find(|of| died(of)).map(|of| pid_of(of))
}

/// Ends the batch of the dead manager.
fn end_flight(shared: &Shared, inbox: &mut EventInbox) -> Result<Recovered, TakeoverError> {
    let began = Instant::now();
    loop {
        let flight = shared.books.engine().in_flight();
        let spaces: BTreeSet<SpaceId> = flight.iter().map(|(space, _)| *space).collect();
        let processes: Vec<Arc<Process>> = spaces
            .iter()
            .filter_map(|space| shared.processes.get(*space))
            .collect();
        let _layouts: Vec<_> = processes.iter().map(|p| p.layout.write()).collect();
        for process in &processes {
            read_events(shared, process, inbox)?;
        }
        // Events may have moved pages.
        let flight = shared.books.engine().in_flight();
        let mut pages = HashMap::new();
        for (space, page) in &flight {
            let process = processes.iter().find(|process| process.space == *space);
            let Some(process) = process else { continue };
            let place = process.pagemap().and_then(|of| of.place(*page));
            let here = match process.hosted {
                None => shown(place, || process.has_lost_its_memory()),
                Some(_) => Here::Present, // not punched yet
            };
            pages.insert((*space, *page), here);
        }
        if pages.values().any(|here| *here == Here::Unknown)
            && let Some(without) = first_without_agent(shared)
        {
            // What is in its holding area may be older.
            return Err(TakeoverError::AgentGone(without));
        }
        let known = flight.iter().all(|(space, _)| spaces.contains(space));
        if known && processes.iter().all(|process| process.books_are_current()) {
            let mut recovered = Recovered::default();
            let mut shown = Shown { shared, pages };
            let mut engine = shared.books.engine();
            engine.reconcile_flight(&mut shown, &mut recovered);
            return Ok(recovered);
        }
        for process in &processes {
            wait_for_quiet(process, began)?;
        }
    }
}

/// Wakes every thread that waits. Those whose pages are still missing fault again.
pub(super) fn wake_everyone(shared: &Shared) {
    for process in shared.processes.all() {
        process.memory.wake(process.all_pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_sys::pagemap::PagemapEntry;

    #[test]
    fn a_page_that_cannot_be_looked_at_is_unknown_and_not_absent() {
        let none = || Err(io::ErrorKind::OutOfMemory.into());
        assert_eq!(shown(none(), || false), Here::Unknown);
        assert_eq!(shown(none(), || true), Here::Unknown);
        assert_eq!(shown(Ok(PageIs::Absent), || false), Here::Absent);
        assert_eq!(shown(Ok(PageIs::Absent), || true), Here::NotManaged);
        let found = vec![(run(5, 6), Category::SWAPPED)];
        assert!(with_bytes(found, |_| none()).is_err());
    }

    fn run(from: u64, to: u64) -> VirtRange {
        VirtRange::new(VirtPage(from), VirtPage(to))
    }

    #[test]
    fn pages_in_kernel_swap_have_bytes_and_marks_have_none() {
        let (swapped, guard, poison) = (1 << 62 | 64, 1 << 62 | 1 << 58, 1 << 62 | 0x5f);
        // Another user than root does not see the entry: neither its type nor its place.
        let words = [(5, swapped), (6, guard), (7, poison), (8, 1 << 62), (9, 0)];
        let word = |page: VirtPage| words.iter().find(|(at, _)| *at == page.0);
        let found = vec![
            (run(1, 4), Category::PRESENT),
            (run(5, 10), Category::SWAPPED), // page 9 has left since the scan
            (run(20, 22), Category::PRESENT),
        ];
        let ranges = with_bytes(found, |page| {
            let (_, word) = word(page).expect("asked only where the scan does not say it");
            Ok(PagemapEntry::of(*word).place())
        });
        let ranges = ranges.expect("each was told");
        assert_eq!(ranges, [run(1, 4), run(5, 6), run(8, 9), run(20, 22)]);
    }
}
