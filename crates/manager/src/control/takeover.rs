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

use undercroft_base::{PAGE_BYTES, PageState, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Found, Held as HeldPage, Here, InHand, Recovered};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::pagemap::{Category, Pagemap};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::{self, ThreadStatus};
use undercroft_sys::uffd::{Message, Uffd};
use undercroft_sys::{fdpass, handover};
use undercroft_wire::parse::answer;

use crate::fault::relief;
use crate::legacy::{EventInbox, Fds, Flag, Heir, Held, Legacy, LegacyError, Number, Row};
use crate::log;
use crate::space::agent::Agent;
use crate::space::anonymous::Anonymous;
use crate::space::command::Commands;
use crate::space::layout;
use crate::space::order::EventOrder;
use crate::space::port::Wake;
use crate::space::process::{ALL_PAGES, Identity, Process, Ticket};
use crate::space::shared::Shared;
use crate::sync::lock;

/// Longest wait for the agents to end their commands. One needs some 0.1 ms, if it has a CPU.
const AGENTS_MAX: Duration = Duration::from_secs(5);

/// Longest wait for one move of an agent before something else is done. It takes some 20 us.
const MOVE_MAX: Duration = Duration::from_millis(2);

/// Longest time until one part of a process's memory, or the batch, is seen with no event unread.
const QUIET_MAX: Duration = Duration::from_secs(5);

/// Pause between two looks.
const PAUSE: Duration = Duration::from_micros(50);

/// How often an agent is looked at before it may be waiting for a page.
const LOOKS_FOR_FAULT: u32 = 40;

/// How often before other processes are served meanwhile, and how often between two rounds: some 11
/// and 0.5 ms.
const LOOKS_FOR_OTHERS: u32 = 100;
const LOOKS_BETWEEN: u32 = 5;

const _: () = assert!(LOOKS_FOR_OTHERS.is_multiple_of(LOOKS_BETWEEN));

/// Pages that the kernel moves between frames for the moment show as swapped. So are marks that
/// stay (poison, guards). They are looked at again a few times.
const LOOKS: u32 = 5;
const LOOK_PAUSE: Duration = Duration::from_millis(2);

/// Why a successor does not take over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TakeoverError {
    #[error(transparent)]
    Legacy(#[from] LegacyError),
    #[error("no manager can take over: {0}")]
    Incomplete(&'static str),
    #[error("the descriptors of a process were not handed over: {0}")]
    NotHandedOver(io::Error),
    #[error("the agent of process {0} does not end its command (its thread: {1})")]
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

/// What a dead manager has left.
pub(super) struct Inheritance {
    legacy: Arc<Legacy>,
    heirs: Vec<(Row, Heir, Vec<Option<OwnedFd>>)>,
    held: Vec<Held>,
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
        let parents: BTreeSet<SpaceId> = held.iter().map(|event| event.space).collect();
        let zeros = [0u8; PAGE_BYTES];
        let mut kept = Vec::new();
        for (row, heir, fds) in heirs {
            // A space that is gone is still needed for events that it had: a fork child's pages
            // are those of its parent.
            let probe = fds[Fds::Uffd as usize].as_ref().ok_or_else(short)?;
            if parents.contains(&heir.space) || !is_gone(probe, &zeros) {
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

    /// The address spaces that live on.
    pub(super) fn spaces(&self) -> Vec<SpaceId> {
        self.heirs.iter().map(|(_, heir, _)| heir.space).collect()
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
        for (row, heir, fds) in self.heirs {
            let (process, greeting) = revive(row, &heir, fds)?;
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

/// What is left to do once the threads run.
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

fn is_gone(fd: &OwnedFd, zeros: &[u8]) -> bool {
    use crate::space::port::Space;
    let again = fd.try_clone().map(Uffd::from);
    again.is_ok_and(|uffd| Anonymous::new(uffd).is_gone(zeros))
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
        (&process.corrected, Flag::Corrected),
        (&process.exited, Flag::Exited),
        (&process.unreadable, Flag::Unreadable),
    ];
    for (flag, of) in flags {
        flag.store(heir.has(of), Ordering::Relaxed);
    }
    let pid = heir.number(Number::Pid) as u32;
    if heir.has(Flag::Announced) {
        let _ = process.identity.set(Identity {
            pid,
            pidfd: must(take(Fds::Pidfd))?.into(),
            pagemap: must(take(Fds::Pagemap))?.into(),
            maps: must(take(Fds::Maps))?.into(),
            tasks: must(take(Fds::Tasks))?.into(),
        });
        let page = SharedMemory::from_fd(must(take(Fds::CommandPage))?);
        let page = page.map_err(TakeoverError::NotHandedOver)?;
        let thread = (
            take(Fds::AgentPidfd).map(PidFd::from),
            take(Fds::AgentStatus).map(ThreadStatus::from),
        );
        let holding = uffd(must(take(Fds::HoldingUffd))?)?;
        let memory = must(take(Fds::Memory))?.into();
        let agent = Agent::again(Commands::new(page), holding, memory, thread, heir, row);
        let _ = process.agent.set(agent);
    } else if heir.number(Number::Nonce) != 0 {
        *lock(&process.ticket) = Some(Ticket {
            nonce: heir.number(Number::Nonce),
            thread: heir.number(Number::NonceThread) as u32,
        });
    }
    if let proven @ 1.. = heir.number(Number::Proven) as u32 {
        let _ = process.proven.set(proven);
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
    let zeros = [0u8; PAGE_BYTES];
    for process in shared.processes.all() {
        let Some(agent) = process.agent.get() else {
            continue;
        };
        let mut looks = 0;
        while !agent.commands.is_idle() && !process.has_lost_its_memory(&zeros) {
            if agent.has_ended() && process.is_alive() {
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
        if thread != agent.tid() {
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
        process.memory.wake(ALL_PAGES);
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
                PageState::Untouched | PageState::Stored => relief::give(shared, &process, page),
                PageState::Evicting => give_back(shared, &process, page),
                _ => continue,
            }
            process.memory.wake(VirtRange::one(page)); // it comes again if that was refused
        }
        if again {
            process.memory.wake(ALL_PAGES);
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
    let mut bytes = [0u8; PAGE_BYTES];
    if agent.commands.is_idle()
        && agent.held(place) == HeldPage::Here
        && agent.read_one(agent.commands.result(), place, &mut bytes)
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
fn apply_held(shared: &Shared, legacy: &Legacy, mut held: Vec<Held>) -> Result<(), TakeoverError> {
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
    let mut faults = Vec::new();
    loop {
        let failed = |error| TakeoverError::Events(pid_of(process), error);
        let mut messages = (process.memory.events(inbox.next(process.space))).map_err(failed)?;
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
        let present = present(pagemap, part);
        if !process.books_are_current() {
            wait_for_quiet(process, began)?;
            continue;
        }
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

/// The pages of `range` that have a frame. None if the process is gone.
fn present(pagemap: &Pagemap, range: VirtRange) -> Vec<VirtRange> {
    let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
    let mut found = Vec::new();
    for look in 0..LOOKS {
        found.clear();
        if pagemap.scan(range, any, &mut found).is_err() {
            return Vec::new();
        }
        let settled = |(_, is): &(VirtRange, Category)| is.has(Category::PRESENT);
        if found.iter().all(settled) || look + 1 == LOOKS {
            break;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
    found.retain(|(_, is)| is.has(Category::PRESENT));
    found.into_iter().map(|(range, _)| range).collect()
}

/// What the kernel and the agents show of the pages in flight.
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
        let (mut pages, zeros) = (HashMap::new(), [0u8; PAGE_BYTES]);
        for (space, page) in &flight {
            let process = processes.iter().find(|process| process.space == *space);
            let Some(process) = process else { continue };
            let shown = (process.pagemap()).map(|of| present(of, VirtRange::one(*page)));
            let gone = || process.has_lost_its_memory(&zeros);
            let here = match shown.map(|found| found.is_empty()) {
                Ok(true) if gone() => Here::NotManaged,
                Ok(true) => Here::Absent,
                Ok(false) => Here::Present,
                Err(_) => Here::Unknown, // it has not announced itself
            };
            pages.insert((*space, *page), here);
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

/// Slots that no entry refers to, per tier. The dead manager died between storing and publishing,
/// or before it freed them.
pub(super) fn unclaimed(slots: Vec<Vec<Slot>>, claims: &[(TierId, Slot)]) -> Vec<(TierId, Slot)> {
    let mut free = Vec::new();
    for (tier, slots) in slots.into_iter().enumerate() {
        let id = TierId(tier as u8);
        let is_claimed = |slot: &Slot| claims.binary_search(&(id, *slot)).is_ok();
        free.extend(
            slots
                .into_iter()
                .filter(|slot| !is_claimed(slot))
                .map(|slot| (id, slot)),
        );
    }
    free
}

/// Wakes every thread that waits. Those whose pages are still missing fault again.
pub(super) fn wake_everyone(shared: &Shared) {
    for process in shared.processes.all() {
        process.memory.wake(ALL_PAGES);
    }
}
