//! Serves plans: loads their pages, from memory at once, from a device by the ring, or from another
//! machine by the thread's inbox, and installs them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{
    FailKind, Fetched, Inbox, LoadError, Loaded, Nanos, PageSize, SpaceId, TierId, VirtRange,
};

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_engine::LoadItem;
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_sys::arena::PageArena;
use undercroft_sys::ring::PageRing;
use undercroft_tier::read_run::ReadRun;

use super::FaultThread;
use super::guards;
use super::install::{Load, Loads};
use crate::books::metered::MeteredTier;
use crate::books::table::Tiers;
use crate::space::pool::pool_is_empty;
use crate::space::process::Process;
use crate::sync::lock;

/// Slots that are freed at a time. Until then they count as held: at most 64 x 3.5 KiB.
const FREE_BATCH: usize = 64;

// A token has 16 bits for the place of a read in its plan, and 16 for its length.
const _: () = assert!(LOAD_PAGES_MAX <= 0xffff);

/// A plan being served; its pages are `lane_pages` base pages of the ring's arena.
pub(super) struct Lane {
    pub(super) loads: Loads,
    process: Option<Arc<Process>>,
    started: Instant,
    /// How long its fault had waited before it was served.
    pub(super) waited: Nanos,
    read_at: Instant,
    installed: Instant,
    /// Reads and fetches in flight, each read of a run of items.
    in_flight: usize,
    /// In which item's page the block arrives that an item is in.
    block_at: [u16; LOAD_PAGES_MAX],
    /// Write-out knows of these reads, and waits for them.
    counted: bool,
}

/// The buffers of a plan's pages, in base pages of the ring's arena.
#[derive(Clone, Copy)]
struct Buffers {
    base: usize,
    size: PageSize,
}

impl Buffers {
    fn pages(self, items: Range<usize>) -> Range<usize> {
        let each = self.size.base_pages() as usize;
        self.base + items.start * each..self.base + items.end * each
    }

    fn page_mut(self, arena: &mut PageArena, item: usize) -> Option<&mut [u8]> {
        let pages = self.pages(item..item + 1);
        arena.pages_mut(pages.start, pages.end)
    }

    /// Makes the page of item `to` one of the bytes of that of `from`. Large pages are alone.
    fn copy(self, arena: &mut PageArena, from: usize, to: usize) -> bool {
        from == to || arena.copy(self.base + from, self.base + to)
    }
}

impl Lane {
    pub(super) fn new() -> Lane {
        let now = Instant::now();
        Lane {
            loads: Loads::new(),
            process: None,
            started: now,
            waited: Nanos(0),
            read_at: now,
            installed: now,
            in_flight: 0,
            block_at: [0; LOAD_PAGES_MAX],
            counted: false,
        }
    }
}

impl FaultThread {
    /// Serves the plan of a lane. Pages in memory tiers are loaded and installed at once. For pages
    /// on a device, reads are started, and [`FaultThread::complete_reads`] installs them.
    ///
    /// * `times`: when the message arrived, was read, and was decided on.
    pub(super) fn carry_out(&mut self, lane: usize, process: &Arc<Process>, times: [Instant; 3]) {
        let [arrived, read, decided] = times;
        let this = &mut self.lanes[lane];
        this.process = Some(process.clone());
        this.loads.size = process.page_size();
        this.started = arrived;
        self.load(lane);
        let loaded = Instant::now();
        self.install_ready(lane);
        let this = &self.lanes[lane];
        if this.in_flight == 0 {
            let items = &this.loads.plan.items;
            if items.len() == 1 && items[0].demanded && !items[0].fresh {
                let times = [arrived, read, decided, loaded, this.installed];
                self.shared.gauges.breakdown.add(times);
            }
            self.release_lane(lane);
        }
    }

    /// Takes an idle lane; completes reads until there is one.
    pub(super) fn take_lane(&mut self) -> usize {
        loop {
            if let Some(lane) = self.idle.pop() {
                return lane;
            }
            self.wait_for_reads();
            self.complete_reads();
        }
    }

    /// Waits for a read or a fetch: at least one is in flight. A fetch ends at the tier's deadline.
    fn wait_for_reads(&mut self) {
        if self.fetching == 0 {
            let _ = self.ring.submit(1);
            return;
        }
        let _ = self.ring.submit(0);
        let mut fds = [
            PollFd::new(&self.ring, PollFlags::IN),
            PollFd::new(&*self.fetches, PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
    }

    fn release_lane(&mut self, lane: usize) {
        if std::mem::take(&mut self.lanes[lane].counted) {
            self.shared.gauges.knobs.read_ended();
        }
        self.lanes[lane].process = None;
        self.idle.push(lane);
    }

    /// Where the pages of a lane's items are.
    fn buffers(&self, lane: usize) -> Buffers {
        Buffers {
            base: lane * self.lane_pages,
            size: self.lanes[lane].loads.size,
        }
    }

    /// Step 3: loads the bytes of every item into the lane's pages, or starts reads for them.
    fn load(&mut self, lane: usize) {
        let buffers = self.buffers(lane);
        let page_bytes = buffers.size.bytes() as u64;
        let this = &mut self.lanes[lane];
        this.in_flight = 0;
        let mut run: Option<ReadRun> = None;
        let fresh = this.loads.plan.items[0].fresh;
        let mut fetches = 0;
        let tiers = &self.shared.books.tiers;
        for at in 0..this.loads.plan.items.len() {
            this.loads.states[at] = Load::Ready;
            this.block_at[at] = at as u16;
            if fresh {
                continue;
            }
            let item = this.loads.plan.items[at];
            let Some(page) = buffers.page_mut(self.ring.arena_mut(), at) else {
                continue;
            };
            if item.tier == TierId::FILL {
                fill(page, item.slot.0 as u32);
                continue;
            }
            let metered = &tiers[item.tier.0 as usize];
            match metered.load(item.slot, item.stamp, page) {
                Ok(Loaded::Done) => {}
                Ok(Loaded::Read { fd, offset }) => {
                    this.loads.states[at] = Load::Reading { again: false };
                    let join =
                        |run: &mut ReadRun| run.join((fd, offset), at, page_bytes, LOAD_PAGES_MAX);
                    if let Some(block) = run.as_mut().and_then(join) {
                        this.block_at[at] = block as u16;
                    } else if let Some(run) = run.replace(ReadRun::of(fd, offset, at)) {
                        start_read(&mut self.ring, tiers, this, lane, buffers, run);
                    }
                }
                Ok(Loaded::Fetch) => {
                    this.loads.states[at] = Load::Reading { again: false };
                    fetches += 1;
                }
                Err(_) => this.loads.states[at] = Load::Lost,
            }
        }
        if let Some(run) = run {
            start_read(&mut self.ring, tiers, this, lane, buffers, run);
        }
        let reads = this.in_flight;
        if reads + fetches > 0 {
            this.read_at = Instant::now();
            this.counted = self.shared.gauges.knobs.read_begins();
        }
        if reads > 0 {
            let _ = self.ring.submit(0);
        }
        if fetches > 0 {
            self.start_fetches(lane);
        }
    }

    /// Begins to fetch the copies of a plan that are on another machine.
    fn start_fetches(&mut self, lane: usize) {
        let this = &mut self.lanes[lane];
        let inbox: Arc<dyn Inbox> = self.fetches.clone();
        for (at, item) in this.loads.plan.items.iter().enumerate() {
            let metered = (self.shared.books.tiers).get(usize::from(item.tier.0));
            let is_remote = |it: &&MeteredTier| it.facts().remote;
            let remote = metered.filter(is_remote);
            if let (Some(metered), Load::Reading { .. }) = (remote, this.loads.states[at]) {
                metered.page_ins.fetch_add(1, Ordering::Relaxed);
                this.in_flight += 1;
                self.fetching += 1;
                let token = token(lane, at, 1);
                (metered.tier).fetch(item.slot, item.stamp, token, &inbox);
            }
        }
    }

    /// Takes a copy that was fetched, or notes why there is none.
    fn fetched(&mut self, lane: usize, at: usize, page: Result<Box<[u8]>, LoadError>) {
        self.fetching -= 1;
        let why = match page {
            Ok(bytes) => {
                let buffers = self.buffers(lane);
                let to = buffers.page_mut(self.ring.arena_mut(), at);
                let to = to.expect("no read is in flight for this page");
                to.copy_from_slice(&bytes);
                return self.read_done(lane, at, 1, Ok(buffers.size.bytes()));
            }
            Err(why) => why,
        };
        let this = &mut self.lanes[lane];
        this.in_flight -= 1;
        let item = &this.loads.plan.items[at];
        let metered = &self.shared.books.tiers[usize::from(item.tier.0)];
        metered.page_ins.fetch_sub(1, Ordering::Relaxed);
        metered.note_read(this.read_at.elapsed().as_nanos() as u64);
        // The tier has tried it for as long as it may. A late copy is asked for again when its
        // thread faults again: meanwhile the lane serves others.
        this.loads.states[at] = if why == LoadError::Late || !item.demanded {
            Load::Skipped
        } else {
            Load::Lost
        };
        if why != LoadError::Late {
            metered.errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Handles completed reads and fetches: verifies and installs their pages. Returns the space of
    /// the last plan that is finished now, if any is.
    pub(super) fn complete_reads(&mut self) -> Option<SpaceId> {
        let mut served = None;
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.clear();
        self.ring.reap(|token, result| reaped.push((token, result)));
        for (token, result) in &reaped {
            let (lane, first, count) = untoken(*token);
            self.read_done(lane, first, count, *result);
        }
        for Fetched { token, page } in self.fetches.take() {
            let (lane, at, _) = untoken(token);
            self.fetched(lane, at, page);
            reaped.push((token, Ok(0)));
        }
        for (token, _) in &reaped {
            let (lane, _, _) = untoken(*token);
            if self.lanes[lane].process.is_some() {
                self.install_ready(lane);
                if self.lanes[lane].in_flight == 0 {
                    served = Some(self.lanes[lane].loads.plan.fault.space);
                    self.release_lane(lane);
                }
            }
        }
        self.reaped = reaped;
        served
    }

    /// Verifies the pages of one completed read, or reads them once more.
    fn read_done(&mut self, lane: usize, first: usize, count: usize, result: Result<usize, i32>) {
        let buffers = self.buffers(lane);
        let got = result.unwrap_or(0) / buffers.size.bytes();
        let mut again = false;
        let this = &mut self.lanes[lane];
        this.in_flight -= 1;
        let took = this.read_at.elapsed().as_nanos() as u64;
        let of = &self.shared.books.tiers[usize::from(this.loads.plan.items[first].tier.0)];
        of.page_ins.fetch_sub(1, Ordering::Relaxed);
        for at in ReadRun::order(first, count) {
            let retried = this.loads.states[at] == Load::Reading { again: true };
            let item = this.loads.plan.items[at];
            let metered = &self.shared.books.tiers[item.tier.0 as usize];
            let block = usize::from(this.block_at[at]);
            let arena = self.ring.arena_mut();
            let is_right = |page: &mut [u8]| {
                let found = self.shared.books.key.checksum(page, item.stamp);
                metered.tier.checksum(item.slot, item.stamp) == Some(found)
            };
            let verified = block - first < got
                && buffers.copy(arena, block, at)
                && buffers.page_mut(arena, at).is_some_and(|page| {
                    let is_whole = metered.tier.unpack(item.slot, page);
                    is_whole && (metered.facts().is_source || is_right(page))
                });
            metered.note_read(took);
            if verified {
                this.loads.states[at] = Load::Ready;
                continue;
            }
            metered.errors.fetch_add(1, Ordering::Relaxed);
            // Each page is read once more by itself: a transient error or a short read must not
            // cost the page.
            if !retried && let Ok(Loaded::Read { fd, offset }) = reload(metered, &item) {
                this.loads.states[at] = Load::Reading { again: true };
                again = true;
                this.block_at[at] = at as u16;
                let tiers = &self.shared.books.tiers;
                let run = ReadRun::of(fd, offset, at);
                start_read(&mut self.ring, tiers, this, lane, buffers, run);
                continue;
            }
            // A prefetched page is not given up: if it faults, it is read again.
            this.loads.states[at] = if item.demanded {
                Load::Lost
            } else {
                Load::Skipped
            };
        }
        if again {
            let _ = self.ring.submit(0);
        }
    }

    /// Step 4: installs the pages that are ready, each contiguous run in one call.
    fn install_ready(&mut self, lane: usize) {
        let buffers = self.buffers(lane);
        let Some(process) = self.lanes[lane].process.clone() else {
            return;
        };
        // Threads that wait for these pages go on, or fault again if a page was not installed.
        let mut wake: Option<VirtRange> = None;
        let mut demanded = false;
        let layout = process.layout.read();
        if !process.has_applied_all() {
            self.lanes[lane].loads.skip_ready();
        }
        let mut from = 0;
        while let Some(part) = self.lanes[lane].loads.next_part(from) {
            from = part.end;
            let loads = &mut self.lanes[lane].loads;
            let books = &self.shared.books;
            let items = &loads.plan.items[part.clone()];
            demanded |= items.iter().any(|item| item.demanded);
            if !books.upsets.spare(&loads.plan) {
                let items = &mut loads.plan.items[part.clone()];
                books.engine().faults().validate(items);
            }
            let (fault, arena) = (loads.plan.fault, self.ring.arena());
            loads.kept = loads.size == PageSize::Large && books.keeps_copies(&loads.plan);
            loads.frames = loads.has_company(part.clone())
                && process.is_vacant(loads.pages(part.clone()), fault.thread.0);
            guards::spare(books, &process, loads, part.clone());
            loads.install(
                part.clone(),
                &*process.memory,
                |run| {
                    let pages = buffers.pages(run);
                    arena.pages(pages.start, pages.end)
                },
                &self.zeros,
                |zeros| {
                    // Zeros of a guest have frames of their own.
                    if process.hosted.is_none() {
                        books.zero_runs.note(fault.space, zeros);
                    }
                },
            );
            let pages = loads.pages(part.clone());
            let so_far = wake.unwrap_or(pages);
            wake = Some(VirtRange::new(
                so_far.start.min(pages.start),
                so_far.end.max(pages.end),
            ));
            self.finish_part(lane, part);
        }
        drop(layout);
        if std::mem::take(&mut self.lanes[lane].loads.short) {
            pool_is_empty(&self.shared, &process);
        }
        self.note_waits(lane, demanded, wake);
        // Last, and with no lock held: the woken thread runs on this CPU, and may replace this
        // thread at once.
        if let Some(range) = wake {
            process.memory.wake(range);
        }
        // Freeing takes the tier's lock and may give memory back to the system, so it is not done
        // for each fault.
        self.shared.books.free_late(self.index, FREE_BATCH);
    }

    /// Notes what threads have waited that go on now.
    ///
    /// * `demanded`: the thread of the fault does.   * `woken`: threads of these pages do.
    fn note_waits(&mut self, lane: usize, demanded: bool, woken: Option<VirtRange>) {
        let this = &mut self.lanes[lane];
        this.installed = Instant::now();
        let (space, now) = (
            this.loads.plan.fault.space,
            self.shared.elapsed_at(this.installed),
        );
        let gauges = &self.shared.gauges;
        if demanded {
            let took = this.installed.duration_since(this.started).as_nanos() as u64;
            let end = Nanos(now.as_nanos() as u64);
            lock(&gauges.fault_latency).note(took, this.waited, end);
            self.note_page_in(lane, took);
        }
        if let Some(range) = woken {
            gauges.woken(space, range, now);
        }
    }

    /// Counts the plan's page-in for the latency bound, if there is one: its faulting page came
    /// from a tier.
    fn note_page_in(&self, lane: usize, took: u64) {
        let this = &self.lanes[lane];
        let mut items = this.loads.plan.items.iter();
        if let Some(page_ins) = self.shared.gauges.page_ins.get()
            && let Some(item) = items.find(|item| item.demanded && !item.fresh)
        {
            let tiers = &self.shared.books.tiers;
            let tier = tiers.get(usize::from(item.tier.0)); // none of a page of one word
            let from_device = tier.is_some_and(|tier| !tier.is_memory());
            page_ins.add(Nanos(took + this.waited.0), from_device);
        }
    }

    /// Tells the engine the results of the items of `part`.
    fn finish_part(&mut self, lane: usize, part: Range<usize>) {
        let this = &mut self.lanes[lane];
        let fault = this.loads.plan.fault;
        let books = &self.shared.books;
        let held = books.pool_held();
        let items = this.loads.results(part.clone());
        let mut engine = books.engine();
        engine.faults().finish(fault, items);
        books.free_later(&mut engine, self.index);
        engine.migrations().set_pool_held(held);
        drop(engine);
        this.loads.states[part].fill(Load::Finished);
    }
}

/// Reads a run of copies. If the tier emulates a slower one, the kernel holds the completion back.
fn start_read(
    ring: &mut PageRing,
    tiers: &Tiers,
    lane: &mut Lane,
    index: usize,
    buffers: Buffers,
    run: ReadRun,
) {
    let ReadRun {
        fd, offset, first, ..
    } = run;
    let bytes = (run.blocks * buffers.size.bytes()) as u64;
    let Range {
        start: from,
        end: to,
    } = buffers.pages(run.pages());
    let token = token(index, first, run.items);
    let metered = &tiers[usize::from(lane.loads.plan.items[first].tier.0)];
    metered.page_ins.fetch_add(1, Ordering::Relaxed);
    let least = metered.tier.reading(offset, bytes);
    let started = match least {
        Nanos(0) => ring.read(fd, offset, from, to, token),
        Nanos(ns) => ring.read_slowly((fd, offset), from, to, token, Duration::from_nanos(ns)),
    };
    assert!(
        started.is_ok(),
        "the ring has an operation for each of its pages, and these were idle"
    );
    lane.in_flight += 1;
}

/// Where an item is to be read once more.
fn reload(metered: &MeteredTier, item: &LoadItem) -> Result<Loaded, LoadError> {
    // The copy is on the device, so nothing is written to the destination.
    let mut none = [0u8; 0];
    let is_there = || metered.tier.checksum(item.slot, item.stamp).is_some();
    if metered.facts().is_source || is_there() {
        metered.tier.load(item.slot, item.stamp, &mut none)
    } else {
        Err(LoadError::Failed(FailKind::Io))
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
pub(super) fn fill(page: &mut [u8], word: u32) {
    let (words, _) = page.as_chunks_mut::<4>();
    words.fill(word.to_ne_bytes());
}
