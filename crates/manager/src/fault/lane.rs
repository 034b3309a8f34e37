//! Plans being served: their pages are loaded, from memory at once or from a device by the ring,
//! and installed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use undercroft_base::{
    FailKind, LoadError, Loaded, PAGE_BYTES, SpaceId, ThreadId, TierId, VirtPage, VirtRange,
    page_checksum,
};
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_engine::{Install, LoadItem, LoadPlan};
use undercroft_sys::ring::Ring;
use undercroft_sys::uffd::UffdError;
use undercroft_trace::Movement;

use super::FaultThread;
use crate::books::metered::MeteredTier;
use crate::space::process::Process;
use crate::sync::lock;

/// Slots freed at a time; until then they count as held: at most 64 x 3.5 KiB.
const FREE_BATCH: usize = 64;

/// One plan being served; its pages are `LOAD_PAGES_MAX` pages of the ring's arena.
pub(super) struct Lane {
    pub(super) plan: LoadPlan,
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
    pub(super) fn new() -> Lane {
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

impl FaultThread {
    /// Serves the plan of a lane: what is in memory is loaded and installed at once; of what a
    /// device has, the reads are started, and [`FaultThread::complete_reads`] installs it.
    ///
    /// * `times`: when the message was there, was read, and was decided on.
    pub(super) fn carry_out(
        &mut self,
        lane: usize,
        process: &Arc<Process>,
        thread: ThreadId,
        times: [Instant; 3],
    ) {
        let [arrived, read, decided] = times;
        let this = &mut self.lanes[lane];
        this.process = Some(process.clone());
        this.started = arrived;
        this.thread = thread;
        self.load(lane);
        let loaded = Instant::now();
        self.install_ready(lane);
        let this = &self.lanes[lane];
        if this.in_flight == 0 {
            let items = &this.plan.items;
            if items.len() == 1 && !items[0].fresh {
                let times = [arrived, read, decided, loaded, this.installed];
                self.shared.gauges.breakdown.add(times);
            }
            self.release_lane(lane);
        }
    }

    pub(super) fn take_lane(&mut self) -> usize {
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
        // A run of items whose copies follow each other on the device: (fd, offset of its end,
        // first, count).
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
            let metered = &self.shared.books.tiers[item.tier.0 as usize];
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

    /// Completions of reads: verify, install what is ready. Returns the space of the last plan that
    /// is served whole now, if any is.
    pub(super) fn complete_reads(&mut self) -> Option<SpaceId> {
        let mut served = None;
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
                    served = Some(self.lanes[lane].plan.space);
                    self.release_lane(lane);
                }
            }
        }
        self.reaped = reaped;
        served
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
            let metered = &self.shared.books.tiers[item.tier.0 as usize];
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
            // One more try, one page at a time: a transient error or a short read must not cost the
            // page.
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

    /// Step 4: installs what is ready and not yet finished, the whole of each contiguous run in one
    /// call.
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
            self.shared.books.engine().faults().validate(items);
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
                    && is_copied(&items[stop], this.plan.write)
                        == is_copied(&items[at], this.plan.write)
                    && items[stop].valid
                    && items[stop].install != Install::Lost
                    && !skipped[stop]
                    && items[stop].page == items[stop - 1].page.plus(1)
                {
                    stop += 1;
                }
                let page = items[at].page;
                let ahead = items[at].fresh && !is_copied(&items[at], this.plan.write);
                let result = match items[at].fresh {
                    true if ahead => {
                        let range = VirtRange::new(page, page.plus((stop - at) as u64));
                        process.uffd.zeropage(range, true)
                    }
                    true => {
                        let zeros = &self.zeros[..(stop - at) * PAGE_BYTES];
                        process.uffd.copy(page, zeros, true)
                    }
                    false => {
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
                if done > 0 && ahead {
                    let zeros = VirtRange::new(page, page.plus(done as u64));
                    self.shared.books.zero_runs.note(space, zeros);
                }
                at += done;
                if exists && at < stop {
                    // Somebody else's page is there. A fresh page may be one that is about to be
                    // dropped, so it is left untouched in our books.
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
            let held = self.shared.books.pool_held();
            let mut engine = self.shared.books.engine();
            engine.faults().finish(space, items);
            // With the engine locked, as all that is recorded: in the order of its books.
            if let Some(record) = &self.shared.books.record {
                let came = |item: &&LoadItem| item.valid && item.install == Install::Done;
                for item in items.iter().filter(came) {
                    match item.demanded {
                        true => record.fault(space, item.page, this.plan.write, this.thread),
                        false => record.moved(space, item.page, Movement::Ahead),
                    }
                }
            }
            engine.take_freed(&mut self.freed);
            engine.migrations().set_pool_held(held);
            drop(engine);
            this.finished[start..end].fill(true);
            start = end;
        }
        drop(layout);
        this.installed = Instant::now();
        if demanded_done {
            let took = this.installed.duration_since(this.started).as_nanos() as u64;
            lock(&self.shared.gauges.fault_latency).saturating_record(took);
        }
        // Last, with no lock held: who is woken runs on this CPU, and may do so at once, in this
        // thread's place.
        if let Some(range) = wake {
            let _ = process.uffd.wake(range);
        }
        // Freeing takes the tier's lock and may give memory back to the system: not for each fault.
        if self.freed.len() >= FREE_BATCH {
            self.shared.books.free_slots(&mut self.freed);
        }
    }
}

/// A fresh page that is written to gets a frame of its own; one that only comes along, or is read,
/// the shared zero page, which is the only installation that never takes the place of a guard page.
fn is_copied(item: &LoadItem, write: bool) -> bool {
    !item.fresh || (write && item.demanded)
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

fn reload(metered: &MeteredTier, item: &LoadItem) -> Result<Loaded, LoadError> {
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
