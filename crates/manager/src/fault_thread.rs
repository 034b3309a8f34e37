//! One fault thread: reads messages, applies layout events, serves faults. The fault path: allocates nothing once warm but 304
//! bytes for the first listed page of 512 (and what a write to a fork relative's page asks for), never waits for eviction, never logs.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::event::epoll;
use undercroft_base::{
    FailKind, LoadError, Loaded, PAGE_BYTES, PageCount, PageState, ThreadId, TierId, VirtPage,
    VirtRange, page_checksum,
};
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_engine::{Fault, FaultAnswer, Install, LoadItem, LoadPlan};
use undercroft_sys::mapping::ZeroPages;
use undercroft_sys::ring::Ring;
use undercroft_sys::uffd::{Message, MessageBuf, UffdError};
use undercroft_trace::Movement;

use crate::awake::Awake;
use crate::process::Process;
use crate::shared::{Shared, lock, note_run};

/// Plans a thread can have waiting for storage at once.
const LANES: usize = 16;

/// Wakes on a page thought resident, in a row, after which the kernel is asked whether it is.
const PUZZLED_AFTER: u32 = 3;

/// Slots freed at a time; until then they count as held: at most 64 x 3.5 KiB.
const FREE_BATCH: usize = 64;

/// Messages of one process read in a row without a look at the others: some 0.3 ms where each needs a page from memory.
const TURNS_MAX: u32 = 16;

/// Epoll data of the thread's own descriptors; spaces have smaller numbers.
const WAKEUP: u64 = u64::MAX;
const RING: u64 = u64::MAX - 1;

/// Events taken at once.
const EVENTS_MAX: usize = 16;

/// One plan being served; its pages are `LOAD_PAGES_MAX` pages of the ring's arena.
struct Lane {
    plan: LoadPlan,
    /// Per item: reads still in flight (1), or ready to be installed (0).
    pending: [bool; LOAD_PAGES_MAX],
    /// Per item: installed or given up.
    finished: [bool; LOAD_PAGES_MAX],
    /// Per item: not to be installed this time.
    skipped: [bool; LOAD_PAGES_MAX],
    process: Option<Arc<Process>>,
    /// Who faulted.
    thread: ThreadId,
    started: Instant,
    read_at: Instant,
    installed: Instant,
    in_flight: usize,
    /// Per item: its read has failed once and was started again.
    retried: [bool; LOAD_PAGES_MAX],
}

impl Lane {
    fn new() -> Lane {
        let now = Instant::now();
        Lane {
            plan: LoadPlan::default(),
            pending: [false; LOAD_PAGES_MAX],
            finished: [false; LOAD_PAGES_MAX],
            skipped: [false; LOAD_PAGES_MAX],
            process: None,
            thread: ThreadId(0),
            started: now,
            read_at: now,
            installed: now,
            in_flight: 0,
            retried: [false; LOAD_PAGES_MAX],
        }
    }
}

pub(crate) struct FaultThread {
    shared: Arc<Shared>,
    index: usize,
    epoll: OwnedFd,
    /// The processes whose userfaultfds are polled, as of `generation`.
    known: HashMap<u64, Arc<Process>>,
    generation: u64,
    active: bool,
    messages: MessageBuf,
    faults: Vec<Fault>,
    /// Writes to protected pages.
    writes: Vec<Fault>,
    ring: Ring,
    lanes: Vec<Lane>,
    idle: Vec<usize>,
    zeros: ZeroPages,
    freed: Vec<(TierId, undercroft_base::Slot)>,
    /// Waits for completion of the whole batch of tokens reaped at once.
    reaped: Vec<(u64, Result<usize, i32>)>,
    /// The thread that faulted last is the only one that faults, and bound to a CPU.
    alone: bool,
    awake: Awake,
}

impl FaultThread {
    pub fn new(shared: Arc<Shared>, index: usize) -> std::io::Result<FaultThread> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // As many operations as pages: it is never full.
        let entries = LANES * LOAD_PAGES_MAX;
        let ring = Ring::new(entries as u32, entries)?;
        let wakeup = &shared.wakeups[index];
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
        Ok(FaultThread {
            index,
            epoll,
            known: HashMap::new(),
            generation: u64::MAX,
            active: false,
            messages: MessageBuf::default(),
            faults: Vec::with_capacity(64),
            writes: Vec::with_capacity(64),
            ring,
            lanes: (0..LANES).map(|_| Lane::new()).collect(),
            idle: (0..LANES).rev().collect(),
            zeros: undercroft_sys::mapping::PageBuf::zeros(LOAD_PAGES_MAX)?,
            freed: Vec::with_capacity(1024),
            reaped: Vec::with_capacity(512),
            alone: false,
            awake: Awake::default(),
            shared,
        })
    }

    /// Serves until told to stop.
    pub fn run(mut self) {
        use undercroft_sys::process;
        let cpu = self.shared.placement.cpus[self.index];
        let _ = process::set_affinity(0, &[cpu]);
        let (mut events, mut keys) = (Vec::with_capacity(EVENTS_MAX), Vec::new());
        while !self.shared.stop.load(Ordering::Acquire) {
            self.look_around();
            // Something is being read, for the only thread that faults.
            let lone_read = self.alone && self.idle.len() < LANES;
            if self
                .awake
                .wait(&self.epoll, &mut events, lone_read)
                .is_err()
            {
                continue;
            }
            let mut ring_ready = false;
            keys.clear();
            for event in &events {
                match event.data.u64() {
                    WAKEUP => self.drain_wakeup(),
                    RING => ring_ready = true,
                    key => keys.push(key),
                }
            }
            for key in &keys {
                if let Some(process) = self.known.get(key).cloned() {
                    // Whoever was woken ran on this CPU, and may have come to its next fault by now: no need to ask first.
                    let mut turns = 1;
                    while self.serve(&process) && turns < TURNS_MAX && self.may_stay() {
                        turns += 1;
                    }
                }
            }
            if ring_ready {
                self.complete_reads();
            }
        }
    }

    /// Whether, as far as is known without asking the kernel, nothing waits but this process's next message.
    fn may_stay(&self) -> bool {
        self.idle.len() == LANES
            && self.generation == self.shared.generation.load(Ordering::Acquire)
            && self.shared.placement.is_active(self.index)
    }

    fn drain_wakeup(&self) {
        let mut word = [0u8; 8];
        let _ = rustix::io::read(&self.shared.wakeups[self.index], &mut word);
    }

    /// Follows changes of the set of processes and of this thread's turn.
    fn look_around(&mut self) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        let active = self.shared.placement.is_active(self.index);
        if generation == self.generation && active == self.active {
            return;
        }
        for process in self.known.values() {
            let _ = epoll::delete(&self.epoll, &process.uffd);
        }
        self.known.clear();
        self.generation = generation;
        self.active = active;
        if !active {
            return;
        }
        for process in self.shared.all_processes() {
            let key = u64::from(process.space.0);
            let data = epoll::EventData::new_u64(key);
            if epoll::add(&self.epoll, &process.uffd, data, epoll::EventFlags::IN).is_ok() {
                self.known.insert(key, process);
            }
        }
    }

    /// Reads what is pending of one process and serves it; false when no fault was.
    fn serve(&mut self, process: &Arc<Process>) -> bool {
        let arrived = Instant::now();
        self.faults.clear();
        self.intake(process);
        let read = Instant::now();
        let any = !self.faults.is_empty();
        for at in 0..self.faults.len() {
            let fault = self.faults[at];
            if self.faults[..at].iter().any(|f| f.page == fault.page) {
                continue; // the same page twice: a kernel-mode fault repeats its message; one answer wakes all
            }
            self.fault(process, fault, arrived, read);
        }
        self.writes.dedup_by_key(|fault| fault.page);
        for fault in self.writes.drain(..) {
            let zeros = &self.zeros[..PAGE_BYTES];
            crate::layout::settle_fork_child(&self.shared, process, fault.thread.0, zeros);
            crate::cow::written(&self.shared, process, fault);
        }
        any
    }

    /// Step 1: read, and apply layout events before anything can be installed.
    fn intake(&mut self, process: &Arc<Process>) {
        let _layout = process.layout.write();
        let agent = process.agent.get();
        if let Some(agent) = agent {
            agent.commands.exclude_agent(|| process.is_alive());
        }
        match process.uffd.read_messages(&mut self.messages) {
            Ok(messages) => {
                for message in messages {
                    match message {
                        Message::Fault {
                            page,
                            write,
                            wp,
                            thread,
                            ..
                        } => {
                            let space = process.space;
                            let list = match wp {
                                true => &mut self.writes,
                                false => &mut self.faults,
                            };
                            list.push(Fault {
                                space,
                                page,
                                write,
                                thread,
                            });
                        }
                        event => crate::layout::heard(&self.shared, process, event),
                    }
                }
            }
            // Out of descriptors for a fork child: it stays blocked in fork() and is tried again.
            Err(error) => self
                .shared
                .doom(&format!("reading the program's faults failed: {error}")),
        }
        if !crate::layout::settle(&self.shared, process) {
            // The books are behind the kernel for the moment, and nothing can be installed: who faulted faults again.
            for fault in self.faults.drain(..).chain(self.writes.drain(..)) {
                let page = VirtRange::new(fault.page, fault.page.plus(1));
                let _ = process.uffd.wake(page);
            }
        }
        if let Some(agent) = agent {
            agent.commands.admit_agent();
        }
    }

    /// Steps 2 to 4 of one fault: decide, load, install.
    fn fault(&mut self, process: &Arc<Process>, fault: Fault, arrived: Instant, read: Instant) {
        crate::layout::settle_fork_child(
            &self.shared,
            process,
            fault.thread.0,
            &self.zeros[..PAGE_BYTES],
        );
        if fault.page == process.beacon {
            return self.answer_beacon(process);
        }
        let now = self.shared.elapsed().as_nanos() as u64;
        if self.shared.placement.fault_seen(fault.thread.0, now) {
            self.shared.wake_fault_threads();
            crate::layout::place_agents(&self.shared);
        }
        self.alone = self.shared.placement.pin.holds(fault.thread.0);
        let lane = self.take_lane();
        let answer = {
            let held = self.shared.pool_held();
            let mut engine = self.shared.engine();
            engine.set_pool_held(held);
            // The agent must never wait for room: it is who makes it.
            let agent = process.agent.get().map(|agent| agent.commands.agent());
            let urgent = agent == Some(fault.thread.0) && fault.thread.0 != 0;
            let allowed = urgent.then(|| engine.set_over_limit(PageCount(1 << 40)));
            let answer = engine.fault(fault, &mut self.lanes[lane].plan);
            if let Some(allowed) = allowed {
                engine.set_over_limit(allowed);
            }
            let kick = engine.reclaim_wanted();
            if let Some(record) = &self.shared.record
                && answer == FaultAnswer::Wait
                && engine.entry(fault.space, fault.page).state == PageState::Evicting
            {
                record.waits(fault.space, fault.page, fault.write, fault.thread);
            }
            drop(engine);
            if kick {
                self.shared.kick_evictor();
            }
            answer
        };
        let decided = Instant::now();
        if answer == FaultAnswer::Load {
            process.puzzled.store(0, Ordering::Relaxed);
            self.lanes[lane].process = Some(process.clone());
            self.lanes[lane].started = arrived;
            self.lanes[lane].thread = fault.thread;
            self.load(lane);
            let loaded = Instant::now();
            self.install_ready(lane);
            if self.lanes[lane].in_flight == 0 {
                let installed = self.lanes[lane].installed;
                let items = &self.lanes[lane].plan.items;
                if items.len() == 1 && !items[0].fresh {
                    let times = [arrived, read, decided, loaded, installed];
                    self.shared.breakdown.add(times);
                }
                self.release_lane(lane);
            }
            return;
        }
        self.idle.push(lane);
        let page = VirtRange::new(fault.page, fault.page.plus(1));
        let agent = process.agent.get().map(|agent| agent.commands.agent());
        if answer == FaultAnswer::Wait && agent == Some(fault.thread.0) {
            // The agent waits for a page of its own batch, which went away without an event: it would wait for ever.
            let _layout = process.layout.read();
            let _ = process.uffd.zeropage(page, false);
            return;
        }
        match answer {
            FaultAnswer::Wake => self.wake_or_wonder(process, fault.page),
            FaultAnswer::Wait | FaultAnswer::NoRoom | FaultAnswer::Load => {}
            FaultAnswer::Lost => self.poison(process, fault.page),
            FaultAnswer::Unmanaged => {
                let _layout = process.layout.read();
                if process.uffd.zeropage(page, false).is_err() {
                    let _ = process.uffd.wake(page);
                }
            }
        }
    }

    /// A fork child asks which userfaultfd is its own.
    fn answer_beacon(&mut self, process: &Arc<Process>) {
        let lane = self.take_lane();
        if let Some(page) = self.ring.arena_mut().page_mut(lane * LOAD_PAGES_MAX) {
            page.fill(0);
            page[..8].copy_from_slice(&u64::from(process.space.0).to_ne_bytes());
        }
        let at = lane * LOAD_PAGES_MAX;
        if let Some(page) = self.ring.arena().pages(at, at + 1) {
            let _layout = process.layout.read();
            if process.uffd.copy(process.beacon, page, false).is_err() {
                let range = VirtRange::new(process.beacon, process.beacon.plus(1));
                let _ = process.uffd.wake(range);
            }
        }
        self.idle.push(lane);
    }

    /// The page is there: wake the thread. If it keeps faulting, the kernel knows better: zeros can only be installed where
    /// nothing is, and where no layout event is pending. Two things take a page away without an event: guard pages, which
    /// read as zeros afterwards; and fork, where a mapping has held nothing but the shared zero page and is not registered for
    /// write protection.
    fn wake_or_wonder(&mut self, process: &Arc<Process>, page: VirtPage) {
        let range = VirtRange::new(page, page.plus(1));
        let times = process.puzzled.fetch_add(1, Ordering::Relaxed) + 1;
        if times >= PUZZLED_AFTER {
            process.puzzled.store(0, Ordering::Relaxed);
            let _layout = process.layout.read();
            let entry = self.shared.engine().entry(process.space, page);
            let sure = entry.state == PageState::Resident && process.is_settled();
            if sure && process.uffd.zeropage(range, false).is_ok() {
                let mut engine = self.shared.engine();
                engine.vanished(process.space, page);
                if let Some(record) = &self.shared.record {
                    record.dropped(process.space, range);
                }
            }
        }
        let _ = process.uffd.wake(range);
        self.shared.free_released();
    }

    /// No copy verifies: every access fails from now on, rather than read wrong bytes.
    fn poison(&mut self, process: &Arc<Process>, page: VirtPage) {
        let range = VirtRange::new(page, page.plus(1));
        match process.uffd.poison(range) {
            // The layout changes: whoever faulted faults again, and this is tried again.
            Ok(()) | Err(UffdError::LayoutChanging { .. }) => {}
            Err(_) => self
                .shared
                .doom("a page's stored copy failed to verify, and the kernel cannot poison it"),
        }
        let _ = process.uffd.wake(range);
    }

    fn take_lane(&mut self) -> usize {
        loop {
            if let Some(lane) = self.idle.pop() {
                return lane;
            }
            let _ = self.ring.submit(1);
            self.complete_reads();
        }
    }

    fn release_lane(&mut self, lane: usize) {
        self.lanes[lane].process = None;
        self.idle.push(lane);
    }

    /// Step 3: bytes of every item into the lane's pages, or reads started for them.
    fn load(&mut self, lane: usize) {
        let base = lane * LOAD_PAGES_MAX;
        let this = &mut self.lanes[lane];
        this.in_flight = 0;
        this.retried.fill(false);
        // A run of items whose copies follow each other on the device: (fd, offset of its end, first, count).
        let mut run: Option<(i32, u64, usize, usize)> = None;
        let fresh = this.plan.items[0].fresh;
        for at in 0..this.plan.items.len() {
            this.pending[at] = false;
            this.finished[at] = false;
            this.skipped[at] = false;
            if fresh {
                continue;
            }
            let item = this.plan.items[at];
            let Some(page) = self.ring.arena_mut().page_mut(base + at) else {
                continue;
            };
            if item.tier == TierId::FILL {
                fill(page, item.slot.0 as u32);
                continue;
            }
            let metered = &self.shared.tiers[item.tier.0 as usize];
            match metered.load(item.slot, item.stamp, page) {
                Ok(Loaded::Done) => {}
                Ok(Loaded::Read { fd, offset }) => {
                    this.pending[at] = true;
                    match &mut run {
                        Some((f, end, first, count))
                            if *f == fd && *end == offset && *first + *count == at =>
                        {
                            *end += PAGE_BYTES as u64;
                            *count += 1;
                        }
                        _ => {
                            if let Some(run) = run.take() {
                                start_read(&mut self.ring, this, lane, base, run);
                            }
                            run = Some((fd, offset + PAGE_BYTES as u64, at, 1));
                        }
                    }
                }
                Err(_) => this.plan.items[at].install = Install::Lost,
            }
        }
        if let Some(run) = run {
            start_read(&mut self.ring, this, lane, base, run);
        }
        if this.in_flight > 0 {
            this.read_at = Instant::now();
            let _ = self.ring.submit(0);
        }
    }

    /// Completions of reads: verify, install what is ready.
    fn complete_reads(&mut self) {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.clear();
        self.ring.reap(|token, result| reaped.push((token, result)));
        for (token, result) in &reaped {
            let (lane, first, count) = untoken(*token);
            self.read_done(lane, first, count, *result);
        }
        for (token, _) in &reaped {
            let (lane, _, _) = untoken(*token);
            if self.lanes[lane].process.is_some() {
                self.install_ready(lane);
                if self.lanes[lane].in_flight == 0 {
                    self.release_lane(lane);
                }
            }
        }
        self.reaped = reaped;
    }

    fn read_done(&mut self, lane: usize, first: usize, count: usize, result: Result<usize, i32>) {
        let base = lane * LOAD_PAGES_MAX;
        let got = result.unwrap_or(0) / PAGE_BYTES;
        let mut again = false;
        let this = &mut self.lanes[lane];
        this.in_flight -= 1;
        let took = this.read_at.elapsed().as_nanos() as u64;
        for at in first..first + count {
            this.pending[at] = false;
            let item = this.plan.items[at];
            let metered = &self.shared.tiers[item.tier.0 as usize];
            let verified = at - first < got
                && self
                    .ring
                    .arena()
                    .pages(base + at, base + at + 1)
                    .is_some_and(|page| {
                        metered.tier.checksum(item.slot, item.stamp)
                            == Some(page_checksum(page, item.stamp))
                    });
            lock(&metered.read_latency).saturating_record(took);
            if verified {
                continue;
            }
            metered.errors.fetch_add(1, Ordering::Relaxed);
            // One more try, one page at a time: a transient error or a short read must not cost the page.
            if !std::mem::replace(&mut this.retried[at], true)
                && let Ok(Loaded::Read { fd, offset }) = reload(metered, &item)
            {
                this.pending[at] = true;
                again = true;
                let run = (fd, offset + PAGE_BYTES as u64, at, 1);
                start_read(&mut self.ring, this, lane, base, run);
                continue;
            }
            // A page brought along is not given up: if it is asked for, it is read once more.
            if item.demanded {
                this.plan.items[at].install = Install::Lost;
            } else {
                this.skipped[at] = true;
            }
        }
        if again {
            let _ = self.ring.submit(0);
        }
    }

    /// Step 4: installs what is ready and not yet finished, the whole of each contiguous run in one call.
    fn install_ready(&mut self, lane: usize) {
        let base = lane * LOAD_PAGES_MAX;
        let this = &mut self.lanes[lane];
        let Some(process) = this.process.clone() else {
            return;
        };
        let count = this.plan.items.len();
        let space = this.plan.space;
        // Whoever waits for one of these pages runs on, or faults again where it was not installed.
        let mut wake: Option<VirtRange> = None;
        let mut note_wake = |page: VirtPage| {
            let range = wake.unwrap_or(VirtRange::new(page, page));
            wake = Some(VirtRange::new(
                range.start.min(page),
                range.end.max(page.plus(1)),
            ));
        };
        let layout = process.layout.read();
        if !process.is_settled() {
            this.skipped[..count].fill(true);
        }
        let mut start = 0;
        let mut demanded_done = false;
        while start < count {
            // The next stretch of items that are ready.
            if this.pending[start] || this.finished[start] {
                start += 1;
                continue;
            }
            let mut end = start + 1;
            while end < count && !this.pending[end] && !this.finished[end] {
                end += 1;
            }
            let items = &mut this.plan.items[start..end];
            self.shared.engine().validate(items);
            let skipped = &this.skipped[start..end];
            let mut at = 0;
            let mut run_max = LOAD_PAGES_MAX;
            while at < items.len() {
                if !items[at].valid || items[at].install == Install::Lost || skipped[at] {
                    at += 1;
                    continue;
                }
                let mut stop = at + 1;
                while stop < items.len()
                    && stop - at < run_max
                    && items[stop].valid
                    && items[stop].install != Install::Lost
                    && !skipped[stop]
                    && items[stop].page == items[stop - 1].page.plus(1)
                {
                    stop += 1;
                }
                let page = items[at].page;
                let result = match (items[at].fresh, this.plan.write) {
                    (true, false) => {
                        let range = VirtRange::new(page, page.plus((stop - at) as u64));
                        process.uffd.zeropage(range, true)
                    }
                    (true, true) => {
                        let zeros = &self.zeros[..(stop - at) * PAGE_BYTES];
                        process.uffd.copy(page, zeros, true)
                    }
                    (false, _) => {
                        let from = base + start + at;
                        match self.ring.arena().pages(from, from + stop - at) {
                            Some(bytes) => process.uffd.copy(page, bytes, true),
                            None => Err(UffdError::LayoutChanging { done: 0 }),
                        }
                    }
                };
                let across = matches!(result, Err(UffdError::NotMapped { done: 0 }));
                let (done, exists) = match result {
                    Ok(()) => (stop - at, false),
                    Err(UffdError::Exists { done }) => (done as usize, true),
                    Err(
                        UffdError::LayoutChanging { done }
                        | UffdError::NotMapped { done }
                        | UffdError::NoMemory { done }
                        | UffdError::Busy { done },
                    ) => (done as usize, false),
                    Err(_) => (0, false),
                };
                for item in &mut items[at..at + done] {
                    item.install = Install::Done;
                }
                if done > 0 && items[at].fresh && !this.plan.write {
                    let zeros = VirtRange::new(page, page.plus(done as u64));
                    note_run(&self.shared.zero_runs, space, zeros);
                }
                at += done;
                if exists && at < stop {
                    // Somebody else's page is there. A fresh page may be one that is about to be dropped, so it is left
                    // untouched in our books.
                    if !items[at].fresh {
                        items[at].install = Install::Done;
                    }
                    at += 1;
                } else if across && stop - at > 1 {
                    run_max = (stop - at) / 2; // the run spans two mappings: shorter ones do not
                } else if at < stop {
                    at = stop; // refused for now: back to where it was
                }
            }
            for item in items.iter() {
                demanded_done |= item.demanded;
                note_wake(item.page);
            }
            let held = self.shared.pool_held();
            let mut engine = self.shared.engine();
            engine.finish(space, items);
            // With the engine locked, as all that is recorded: in the order of its books.
            if let Some(record) = &self.shared.record {
                let came = |item: &&LoadItem| item.valid && item.install == Install::Done;
                for item in items.iter().filter(came) {
                    match item.demanded {
                        true => record.fault(space, item.page, this.plan.write, this.thread),
                        false => record.moved(space, item.page, Movement::Ahead),
                    }
                }
            }
            engine.take_freed(&mut self.freed);
            engine.set_pool_held(held);
            drop(engine);
            this.finished[start..end].fill(true);
            start = end;
        }
        drop(layout);
        this.installed = Instant::now();
        if demanded_done {
            let took = this.installed.duration_since(this.started).as_nanos() as u64;
            lock(&self.shared.fault_latency).saturating_record(took);
        }
        // Last, with no lock held: who is woken runs on this CPU, and may do so at once, in this thread's place.
        if let Some(range) = wake {
            let _ = process.uffd.wake(range);
        }
        // Freeing takes the tier's lock and may give memory back to the system: not for each fault.
        if self.freed.len() >= FREE_BATCH {
            self.shared.free_slots(&mut self.freed);
        }
    }
}

/// Reads a run of pages that follow each other on the device.
fn start_read(
    ring: &mut Ring,
    lane: &mut Lane,
    index: usize,
    base: usize,
    (fd, end, first, count): (i32, u64, usize, usize),
) {
    let offset = end - (count * PAGE_BYTES) as u64;
    let (from, to) = (base + first, base + first + count);
    let started = ring.read(fd, offset, from, to, token(index, first, count));
    assert!(
        started.is_ok(),
        "the ring has an operation for each of its pages, and these were idle"
    );
    lane.in_flight += 1;
}

fn reload(
    metered: &crate::shared::MeteredTier,
    item: &undercroft_engine::LoadItem,
) -> Result<Loaded, LoadError> {
    // It was read from the device, where it still is: nothing is written to the destination.
    let mut none = [0u8; 0];
    match metered.tier.checksum(item.slot, item.stamp) {
        Some(_) => metered.tier.load(item.slot, item.stamp, &mut none),
        None => Err(LoadError::Failed(FailKind::Io)),
    }
}

fn token(lane: usize, first: usize, count: usize) -> u64 {
    (lane as u64) << 32 | (first as u64) << 16 | count as u64
}

fn untoken(token: u64) -> (usize, usize, usize) {
    (
        (token >> 32) as usize,
        (token >> 16 & 0xffff) as usize,
        (token & 0xffff) as usize,
    )
}

/// Fills a page with one word.
fn fill(page: &mut [u8], word: u32) {
    let (words, _) = page.as_chunks_mut::<4>();
    words.fill(word.to_ne_bytes());
}
