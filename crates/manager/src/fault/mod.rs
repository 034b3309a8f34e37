//! A fault thread: it reads messages, applies layout events and decides about each fault;
//! `lane.rs` carries the decision out. The fault path never waits for eviction and never logs. Once
//! warm, it allocates only 368 bytes for the first listed page of a chunk, and what a write to a
//! fork relative's page needs.
//!
//! - Intake: the space's layout is locked for writing, and its agent kept from moving pages. Faults
//!   are served once the lock is released. After an answer, a thread that knows of no other work
//!   reads the process's next messages at once, 16 times in a row at most.
//! - Without room a fault waits (`NoRoom`), until the evictor's `admit_waiters` wakes its thread.
//! - A fault on a page that is being evicted recalls the page. On a page that is being loaded it
//!   waits for the load. A write to a page that fork relatives share is answered by `written`
//!   (`space/cow.rs`): nothing is loaded.
//! - A copy that does not verify is read once more. If it still does not, `finish` makes the page
//!   `Lost`, the thread faults again, and `poison` fills the page.
//! - A page that is resident by the books may be missing, because the kernel dropped it.
//!   `fill_missing` (`relief.rs`) poisons it if it was, or may have been, out of memory. Otherwise
//!   it is zeros. A page of a virtual machine is always zeros then (`stays`).
//! - A page that no thread waits for is not copied over a guard page (`guards.rs`).
//! - Pages that the user's policy wants in memory are loaded between faults (`ahead.rs`).
//! - A copy on another machine that is later than 80 ms is asked for again when its thread faults
//!   again: no lane waits long.

mod ahead;
mod awake;
mod guards;
mod inbox;
mod install;
#[cfg(test)]
mod install_tests;
mod lane;
#[cfg(test)]
pub(crate) mod model_tests;
mod registers;
pub(crate) mod relief;
mod views;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use undercroft_base::{Nanos, PageSize, SpaceId, ThreadId, VirtPage, VirtRange};
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_engine::{Engine, Fault, FaultAnswer};
use undercroft_proto::legacy::EventInbox;
use undercroft_sys::mapping::ZeroPages;
use undercroft_sys::process::instruction_of;
use undercroft_sys::ring::PageRing;
use undercroft_sys::uffd::{Message, MessageBuf, UffdError};

use crate::books::ledger::MemfdLedger;
use crate::fault::awake::Awake;
use crate::fault::inbox::FetchInbox;
use crate::gauges::scale::Short;
use crate::signals::Doom;
use crate::space::claims::{self, Claim};
use crate::space::foreign;
use crate::space::port::Wake;
use crate::space::process::Process;
use crate::space::processes::Change;
use crate::space::shared::Shared;
use crate::space::views::View;
use crate::sync::lock;
use lane::Lane;
use registers::Looks;

/// Plans of a thread that may wait for storage at once, and those if a page of one may be large:
/// the buffers of all are in memory.
const LANES: usize = 16;
const LARGE_LANES: usize = 4;

/// Operations of a thread's ring: one for each page, so it is never full.
pub(crate) const RING_ENTRIES: usize = LANES * LOAD_PAGES_MAX;

/// A fault may come on a page that is resident by the books. Every eighth time the kernel is asked
/// whether the page is really there. If it is missing, its thread faults again and again, so one of
/// its faults is the eighth.
const PUZZLED_AFTER: u32 = 8;

/// Times that one process is served in a row before others: some 0.3 ms if each fault needs a page
/// from memory.
const TURNS_MAX: u32 = 16;

/// Pause if there is no descriptor, or no memory in the kernel: a fork event then stays unread, and
/// the userfaultfd ready.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(1);

/// Epoll data of the first view. Spaces have smaller numbers.
const VIEWS: u64 = 1 << 32;

/// Epoll data of the thread's own descriptors; spaces and views have smaller numbers.
const WAKEUP: u64 = u64::MAX;
const RING: u64 = u64::MAX - 1;
const INBOX: u64 = u64::MAX - 2;

// A space's number is 32 bits.
const _: () = assert!(VIEWS > u32::MAX as u64 && INBOX > VIEWS && RING > INBOX && WAKEUP > RING);

/// Time until a process is served again if its agent did not let its messages be read.
const COME_BACK: Duration = Duration::from_millis(5);

/// Epoll events that are taken at once.
const EVENTS_MAX: usize = 16;

/// Reads in a row of one process, so that events behind many faults are read. Each brings 32
/// messages, and a thread that waits has sent one.
const READS_MAX: u32 = 512;

/// The outcome of one read.
struct ReadOnce {
    /// As many messages as there is room for: more may wait.
    full: bool,
    events: bool,
}

/// The result of reading a process's messages.
enum Intake {
    Read,
    /// As before, but there was no descriptor for a fork child, or no memory in the kernel.
    Short,
    /// Nothing was read: the agent does not let go.
    Unread,
}

pub(crate) struct FaultThread {
    shared: Arc<Shared>,
    index: usize,
    epoll: OwnedFd,
    /// The processes whose userfaultfds are polled, as of `generation`.
    known: HashMap<u64, Arc<Process>>,
    generation: u64,
    /// Further mappings of a guest's memory that are polled, each with the guest; and the one whose
    /// messages are served now.
    views: HashMap<u64, (Arc<Process>, Arc<View>)>,
    view: Option<Arc<View>>,
    active: bool,
    inbox: EventInbox,
    faults: Vec<Fault>,
    /// Writes to protected pages.
    writes: Vec<Fault>,
    ring: PageRing,
    /// Where copies arrive from other machines, and how many are awaited.
    fetches: Arc<FetchInbox>,
    fetching: usize,
    lanes: Vec<Lane>,
    idle: Vec<usize>,
    /// Base pages of the ring that a lane has: those of a plan, or of one large page.
    lane_pages: usize,
    zeros: ZeroPages,
    /// Scratch: the completions of one reap.
    reaped: Vec<(u64, Result<usize, i32>)>,
    /// The thread that faulted last is the only one that faults, and is bound to a CPU.
    alone: bool,
    awake: Awake,
    /// A fork child cannot be served before other messages are read.
    is_put_off: bool,
    /// Processes whose messages stay unread until this time, because their agent does not let go.
    later: Vec<(u64, Instant)>,
    /// Processes that the kernel has no memory to poll.
    unpolled: Vec<Arc<Process>>,
    /// Pages that the user's policy wants in memory, and whether there may be more.
    ahead: VecDeque<(SpaceId, VirtPage)>,
    asked_ahead: bool,
    looks: Looks,
}

impl FaultThread {
    pub(crate) fn new(shared: Arc<Shared>, index: usize) -> std::io::Result<FaultThread> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (lanes, lane_pages) = match shared.options.page_size {
            PageSize::Base => (LANES, LOAD_PAGES_MAX),
            PageSize::Large => (LARGE_LANES, PageSize::Large.base_pages() as usize),
        };
        let ring = PageRing::new(RING_ENTRIES as u32, lanes * lane_pages, PageSize::Base)?;
        let wakeup = shared.signals.wakeup(index);
        epoll::add(
            &epoll,
            wakeup,
            epoll::EventData::new_u64(WAKEUP),
            epoll::EventFlags::IN,
        )?;
        epoll::add(
            &epoll,
            ring.as_fd(),
            epoll::EventData::new_u64(RING),
            epoll::EventFlags::IN,
        )?;
        let fetches = Arc::new(FetchInbox::new()?);
        epoll::add(
            &epoll,
            &*fetches,
            epoll::EventData::new_u64(INBOX),
            epoll::EventFlags::IN,
        )?;
        Ok(FaultThread {
            index,
            fetches,
            fetching: 0,
            epoll,
            known: HashMap::new(),
            generation: u64::MAX,
            views: HashMap::new(),
            view: None,
            active: false,
            inbox: EventInbox::new(shared.books.legacy.clone()),
            faults: Vec::with_capacity(64),
            writes: Vec::with_capacity(64),
            ring,
            lanes: (0..lanes).map(|_| Lane::new()).collect(),
            idle: (0..lanes).rev().collect(),
            lane_pages,
            zeros: undercroft_sys::mapping::PageBuf::zeros(LOAD_PAGES_MAX)?,
            reaped: Vec::with_capacity(512),
            alone: false,
            awake: Awake::default(),
            is_put_off: false,
            later: Vec::new(),
            unpolled: Vec::new(),
            ahead: VecDeque::new(),
            asked_ahead: false,
            looks: Looks::default(),
            shared,
        })
    }

    /// Serves until the run ends.
    pub(crate) fn run(mut self) {
        use undercroft_sys::process;
        let cpu = self.shared.cpu_plan.cpus[self.index];
        let _ = process::set_affinity(0, &[cpu]);
        let (mut events, mut keys) = (Vec::with_capacity(EVENTS_MAX), Vec::new());
        while !self.shared.signals.stopped() {
            self.follow_processes();
            // A read is in flight for the only thread that faults.
            let ahead = self.may_load_ahead();
            let lone_read = self.alone && self.idle.len() < self.lanes.len() && !ahead;
            let waits = !self.later.is_empty() || !self.unpolled.is_empty();
            let limit = if ahead {
                Some(Duration::ZERO)
            } else {
                waits.then_some(COME_BACK)
            };
            if self
                .awake
                .wait(&self.epoll, &mut events, lone_read, limit)
                .is_err()
            {
                continue;
            }
            if !self.later.is_empty() {
                self.come_back();
            }
            if !self.unpolled.is_empty() {
                self.poll_again();
            }
            let mut ring_ready = false;
            keys.clear();
            for event in &events {
                match event.data.u64() {
                    WAKEUP => self.drain_wakeup(),
                    RING | INBOX => ring_ready = true,
                    key => keys.push(key),
                }
            }
            for key in &keys {
                if let Some(process) = self.known.get(key).cloned() {
                    self.stay_with(&process);
                } else if let Some((guest, view)) = self.views.get(key).cloned() {
                    self.view = Some(view);
                    self.stay_with(&guest);
                    self.view = None;
                }
            }
            if ring_ready
                && let Some(space) = self.complete_reads()
                && self.alone
                && self.may_stay()
                && let Some(process) = self.known.get(&u64::from(space.0)).cloned()
            {
                self.stay_with(&process);
            }
            if self.may_load_ahead() {
                self.load_ahead();
            }
        }
    }

    /// Serves a process while it faults and no other work is known, at most [`TURNS_MAX`] times. A
    /// thread that was woken on this CPU may have faulted again by now, so messages are read
    /// without a poll.
    fn stay_with(&mut self, process: &Arc<Process>) {
        let mut turns = 1;
        while self.serve(process) && turns < TURNS_MAX && self.may_stay() {
            turns += 1;
        }
    }

    /// True if no other work is known, without asking the kernel.
    fn may_stay(&self) -> bool {
        self.idle.len() == self.lanes.len()
            && self.generation == self.shared.processes.generation()
            && self.shared.cpu_plan.is_active(self.index)
    }

    fn drain_wakeup(&mut self) {
        let mut word = [0u8; 8];
        let _ = rustix::io::read(self.shared.signals.wakeup(self.index), &mut word);
        self.asked_ahead = true;
        let pages = self.shared.signals.take_to_bring();
        for (space, page) in pages {
            let process = self.shared.processes.get(space);
            // A fork child's books are correct only after its first fault.
            if let Some(process) = process.filter(|process| process.is_corrected()) {
                let fault = Fault {
                    space,
                    page,
                    write: false,
                    thread: ThreadId(0),
                    urgent: false,
                };
                self.answer(&process, fault, Instant::now(), Instant::now());
            }
        }
    }

    /// Follows changes of the set of processes, and of whether this thread is active.
    fn follow_processes(&mut self) {
        let generation = self.shared.processes.generation();
        let active = self.shared.cpu_plan.is_active(self.index);
        if generation == self.generation && active == self.active {
            return;
        }
        self.generation = generation;
        self.follow_spaces(active);
        self.follow_views();
    }

    fn follow_spaces(&mut self, active: bool) {
        let news = self.shared.processes.news(self.index);
        // A thread that is not active hears nothing. Active again, it reads the whole set.
        if let Some(news) = news.filter(|_| active && self.active) {
            for change in news {
                match change {
                    Change::Came(process) => self.poll(process),
                    Change::Went(space) => self.leave(u64::from(space.0)),
                }
            }
            return;
        }
        self.active = active;
        let known: Vec<u64> = self.known.keys().copied().collect();
        known.into_iter().for_each(|key| self.leave(key));
        if active {
            let all = self.shared.processes.all();
            all.into_iter().for_each(|process| self.poll(process));
        }
    }

    fn poll(&mut self, process: Arc<Process>) {
        let key = u64::from(process.space.0);
        let data = epoll::EventData::new_u64(key);
        match epoll::add(&self.epoll, &process.memory, data, epoll::EventFlags::IN) {
            Ok(()) => _ = self.known.insert(key, process),
            Err(rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC) => {
                self.shared.gauges.shortages.note(Short::Memory);
                self.unpolled.push(process);
            }
            Err(_) => {} // it is gone
        }
    }

    /// Polls processes that the kernel had no memory to poll.
    #[cold]
    fn poll_again(&mut self) {
        for process in std::mem::take(&mut self.unpolled) {
            self.poll(process);
        }
        self.follow_views();
    }

    fn leave(&mut self, key: u64) {
        self.unpolled.retain(|of| u64::from(of.space.0) != key);
        if let Some(process) = self.known.remove(&key) {
            let _ = epoll::delete(&self.epoll, &process.memory);
        }
    }

    /// Reads the pending messages of one process and serves them. False if there was no fault.
    fn serve(&mut self, process: &Arc<Process>) -> bool {
        let arrived = Instant::now();
        self.faults.clear();
        match self.intake(process) {
            Intake::Read => {}
            Intake::Short => std::thread::sleep(SHORTAGE_PAUSE),
            Intake::Unread => {
                self.leave_unread(process);
                return false;
            }
        }
        let read = Instant::now();
        let any = !self.faults.is_empty();
        for at in 0..self.faults.len() {
            let fault = self.faults[at];
            if self.faults[..at].iter().any(|f| f.page == fault.page) {
                // A fault in the kernel repeats its message. One answer wakes all threads.
                continue;
            }
            self.fault(process, fault, arrived, read);
        }
        self.writes.dedup_by_key(|fault| fault.page);
        let mut writes = std::mem::take(&mut self.writes);
        for fault in writes.drain(..) {
            self.write(process, fault);
        }
        self.writes = writes;
        any && !std::mem::take(&mut self.is_put_off)
    }

    /// Serves a write to a protected page.
    fn write(&mut self, process: &Arc<Process>, fault: Fault) {
        let claim = claims::of_child(&self.shared, process, fault);
        match claim {
            Claim::Free | Claim::Answered => {
                crate::space::cow::written(&self.shared, process, fault);
            }
            // The page is the process's own, whatever the books say.
            Claim::Refused => {
                let page = VirtRange::one(fault.page);
                if process.memory.protect(page, false).is_err() {
                    process.memory.wake(page); // it faults again
                }
            }
            Claim::Later => self.put_off(Duration::ZERO),
            Claim::AfterPause => self.put_off(SHORTAGE_PAUSE),
        }
    }

    /// Leaves a process unread whose agent does not let go: the agent is about to move pages, and
    /// does not run. The process is served later, the others now.
    #[cold]
    fn leave_unread(&mut self, process: &Arc<Process>) {
        let key = u64::from(process.space.0);
        let data = epoll::EventData::new_u64(key);
        if epoll::modify(
            &self.epoll,
            &process.memory,
            data,
            epoll::EventFlags::empty(),
        )
        .is_ok()
        {
            self.later.push((key, Instant::now() + COME_BACK));
        }
    }

    /// Polls processes again that were to be served later.
    #[cold]
    fn come_back(&mut self) {
        let now = Instant::now();
        let (known, epoll) = (&self.known, &self.epoll);
        self.later.retain(|(key, at)| {
            if now >= *at
                && let Some(process) = known.get(key)
            {
                let data = epoll::EventData::new_u64(*key);
                let _ = epoll::modify(epoll, &process.memory, data, epoll::EventFlags::IN);
            }
            now < *at
        });
    }

    /// Step 1: reads messages, and applies layout events before any page can be installed.
    fn intake(&mut self, process: &Arc<Process>) -> Intake {
        // A guest has no events.
        let _layout = (process.hosted.is_none()).then(|| process.layout.write());
        let (mut changed, mut short) = (false, false);
        let agent = process.agent.get();
        if agent.is_some_and(|agent| !claims::lets_read(process, agent)) {
            return Intake::Unread;
        }
        for _ in 0..READS_MAX {
            match self.read_messages(process) {
                Ok(read) => {
                    process.short_reads.ends();
                    changed |= read.events;
                    // The kernel gives faults before events. While an event waits, no page can be
                    // installed, and each thread that is woken faults again. So the faults of many
                    // threads would keep the event from being read for ever.
                    if !(read.full && process.event_pending()) {
                        break;
                    }
                }
                Err(error) => {
                    short = self.waits_for(process, &error);
                    if !short {
                        self.shared.signals.doom(Doom::NoFaults(error));
                    }
                    break;
                }
            }
        }
        let held = changed.then(|| self.shared.gauges.layout_holds.hold());
        if !crate::space::layout::apply_events(&self.shared, process) {
            // The books are behind the kernel at the moment, and no page can be installed. The
            // threads fault again.
            for fault in self.faults.drain(..).chain(self.writes.drain(..)) {
                let page = VirtRange::one(fault.page);
                process.memory.wake(page);
            }
        }
        if let Some(agent) = agent {
            agent.commands.admit_agent();
        }
        drop(held); // the layout lock is released now, too
        if short { Intake::Short } else { Intake::Read }
    }

    /// Whether messages that could not be read can be read after a pause. There may be no
    /// descriptor for a fork child, or no memory for one: its parent stays blocked in fork(), and
    /// the event stays unread.
    #[cold]
    fn waits_for(&self, process: &Process, error: &std::io::Error) -> bool {
        let Some(short) = Short::of(error) else {
            return false;
        };
        self.shared.gauges.shortages.note(short);
        short == Short::Descriptors || process.short_reads.may_end(self.shared.elapsed())
    }

    /// Reads messages once: faults go to the lists, events to the process's order of events.
    fn read_messages(&mut self, process: &Arc<Process>) -> std::io::Result<ReadOnce> {
        if let Some(view) = self.view.clone() {
            return self.read_view(process, &view);
        }
        let mut messages = process.memory.events(self.inbox.next(process.space))?;
        let mut read = ReadOnce {
            full: messages.len() == MessageBuf::MESSAGES,
            events: false,
        };
        let mut events = Vec::new();
        while let Some(message) = messages.next() {
            match message {
                Message::Fault {
                    page,
                    write,
                    wp,
                    thread,
                    ..
                } => {
                    let list = if wp {
                        &mut self.writes
                    } else {
                        &mut self.faults
                    };
                    // The agent must never wait for room, because it makes room.
                    let agent = process.agent.get().map(|agent| agent.number());
                    list.push(Fault {
                        space: process.space,
                        page,
                        write,
                        thread,
                        urgent: agent == Some(thread.0) && thread.0 != 0,
                    });
                }
                event => {
                    events.push((event, messages.slot()));
                }
            }
        }
        drop(messages);
        read.events = !events.is_empty();
        for (event, slot) in events {
            let receipt = self.inbox.receipt(slot);
            crate::space::layout::heard(&self.shared, process, event, receipt);
        }
        Ok(read)
    }

    /// Steps 2 to 4 of one fault: decides, loads, installs.
    fn fault(&mut self, process: &Arc<Process>, fault: Fault, arrived: Instant, read: Instant) {
        match claims::of(&self.shared, process, fault) {
            Claim::Free => {}
            Claim::Answered => return,
            Claim::Refused => return self.poison(process, fault.page),
            Claim::Later => return self.put_off(Duration::ZERO),
            Claim::AfterPause => return self.put_off(SHORTAGE_PAUSE),
        }
        self.note_thread(process, fault, read);
        let legacy = &self.shared.books.legacy;
        legacy.serving(self.index, fault.space, fault.page);
        self.answer(process, fault, arrived, read);
        let legacy = &self.shared.books.legacy;
        legacy.rests(self.index);
        legacy.served();
    }

    /// Notes which thread faults, and where: fault threads serve on the CPUs of these.
    fn note_thread(&mut self, process: &Arc<Process>, fault: Fault, read: Instant) {
        let is_guest = process.hosted.is_some();
        let view = self.view.as_ref();
        let user = view.and_then(|view| self.shared.processes.get(view.space));
        let process = user.as_ref().unwrap_or(process.host());
        let now = self.shared.elapsed_at(read).as_nanos() as u64;
        let thread = process.known_thread(fault.thread.0);
        if let Some(pid) = process.pid() {
            process.partners.faulted(thread, pid);
        }
        let cpu_plan = &self.shared.cpu_plan;
        if cpu_plan.fault_seen(thread, now, || Some(process.clone())) {
            self.shared.signals.wake_fault_threads();
        }
        self.alone = cpu_plan.pin.holds(thread);
        if self.shared.books.asked_instructions.load(Ordering::Relaxed) {
            self.note_instruction(process, thread, fault, is_guest);
        }
    }

    /// Tells the run's plugin which instruction faults, if it asks for that. The thread waits, so
    /// the kernel knows it.
    #[cold]
    fn note_instruction(&mut self, process: &Process, thread: u32, fault: Fault, is_guest: bool) {
        let advice = self.shared.books.advice();
        let Some(advice) = advice.filter(|of| of.wants_instructions()) else {
            return;
        };
        let cpus = self.shared.inside.cpus.get().filter(|_| is_guest);
        let (address, cr3) = match cpus.and_then(|cpus| self.looks.registers(cpus, thread)) {
            Some(registers) => (registers.ip, registers.cr3),
            None => {
                let address = process.pid().and_then(|pid| instruction_of(pid, thread));
                (address.unwrap_or(0), 0)
            }
        };
        advice.ears.faults_at(fault.space, fault.page, address, cr3);
    }

    /// Serves others before this process.
    #[cold]
    fn put_off(&mut self, pause: Duration) {
        self.is_put_off = true;
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }

    /// As [`FaultThread::fault`], for a page that is not the shim's.
    fn answer(&mut self, process: &Arc<Process>, fault: Fault, arrived: Instant, read: Instant) {
        let lane = self.take_lane();
        let gauges = &self.shared.gauges;
        let now = self.shared.elapsed_at(read);
        let (answer, waited) = {
            let held = self.shared.books.pool_held();
            let Some(mut engine) = engine_for(&self.shared, process, fault.page) else {
                return self.idle.push(lane);
            };
            engine.migrations().set_pool_held(held);
            let answer = engine
                .faults()
                .answer(fault, &mut self.lanes[lane].loads.plan);
            // The agent does not wait for a page of its own batch: see below.
            let waits = matches!(answer, FaultAnswer::NoRoom | FaultAnswer::Wait) && !fault.urgent;
            let waited = gauges.unserved.answered(&fault, !waits, now);
            let kick = engine.books().reclaim_wanted();
            drop(engine);
            if kick {
                self.shared.signals.kick_evictor();
            }
            (answer, waited)
        };
        if answer == FaultAnswer::Load {
            let times = [arrived, read, Instant::now()];
            self.lanes[lane].waited = waited;
            return self.carry_out(lane, process, times);
        }
        self.idle.push(lane);
        if waited > Nanos(0) {
            // Its page came by another way while it waited.
            lock(&gauges.fault_latency).note_wait(waited, Nanos(now.as_nanos() as u64));
        }
        let page = VirtRange::one(fault.page);
        if answer == FaultAnswer::Wait && fault.urgent {
            // The agent waits for a page of its own batch, which was removed without an event. It
            // would wait for ever.
            let _layout = process.layout.read();
            if process.memory.zero(page, Wake::Now).is_err() {
                process.memory.wake(page); // it faults again
            }
            return;
        }
        match answer {
            FaultAnswer::Wake => self.wake_or_wonder(process, fault.page),
            FaultAnswer::Wait | FaultAnswer::NoRoom | FaultAnswer::Load => {}
            FaultAnswer::Lost => self.poison(process, fault.page),
            FaultAnswer::Unmanaged => {
                if process.is_alive() {
                    self.shared.gauges.shortages.no_entry();
                }
                let _layout = process.layout.read();
                if process.memory.zero(page, Wake::Now).is_err() {
                    process.memory.wake(page);
                }
            }
        }
    }

    /// Wakes the thread: the page is resident by the books. If such faults go on, the page may be
    /// missing.
    fn wake_or_wonder(&mut self, process: &Arc<Process>, page: VirtPage) {
        if let Some(hosted) = &process.hosted {
            relief::stays(&self.shared, process, &hosted.guest, page);
            return process.memory.wake(VirtRange::one(page));
        }
        let times = process.puzzled.fetch_add(1, Ordering::Relaxed) + 1;
        if times.is_multiple_of(PUZZLED_AFTER) {
            let _layout = process.layout.write();
            let _ = relief::fill_missing(&self.shared, process, page); // its thread faults again
        }
        process.memory.wake(VirtRange::one(page));
        self.shared.books.free_released();
    }

    /// No copy of the page verifies: makes every access fail, so that no wrong bytes are read.
    fn poison(&mut self, process: &Arc<Process>, page: VirtPage) {
        let range = VirtRange::one(page);
        match process.memory.poison(range) {
            // The layout is changing: the thread faults again, and this is tried again. If
            // something is there, another thread has poisoned it. If the mapping is gone, there is
            // nothing to read.
            Ok(())
            | Err(UffdError::LayoutChanging { .. })
            | Err(UffdError::Exists { .. })
            | Err(UffdError::NotMapped { .. })
            | Err(UffdError::ClientGone) => process.short_poisons.ends(),
            // As if the layout were changing, after a pause.
            Err(UffdError::NoMemory { .. })
                if process.short_poisons.may_end(self.shared.elapsed()) =>
            {
                self.shared.gauges.shortages.note(Short::Memory);
                std::thread::sleep(SHORTAGE_PAUSE);
            }
            Err(_) => self.shared.signals.doom(Doom::NotPoisoned),
        }
        process.memory.wake(range);
    }
}

/// The engine, to answer a fault. `None`: the page is in a mapping that cannot be managed, and its
/// thread faults again, without us.
fn engine_for<'a>(
    shared: &'a Shared,
    process: &Process,
    page: VirtPage,
) -> Option<MutexGuard<'a, Engine<MemfdLedger>>> {
    let engine = shared.books.engine();
    if engine.books().is_managed(process.space, page) {
        return Some(engine);
    }
    drop(engine);
    // A mapping that is not in the books yet, or a foreign one.
    (!foreign::release(process, page)).then(|| shared.books.engine())
}
