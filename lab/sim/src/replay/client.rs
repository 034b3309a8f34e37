//! A client at work: its engine, its references, its clock, and the state of its pages.

use std::sync::Arc;

use hdrhistogram::Histogram;
use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, CHUNK_PAGES, Nanos, PageNo, SpaceId, TierId, VirtPage, VirtRange,
};
use undercroft_device::Time;
use undercroft_engine::reclaim::Reclaimer;
use undercroft_engine::{Config, DemoteItem, Engine, EvictItem, LoadPlan, Room, Stats, VecLedger};
use undercroft_policy::mrc::{Curve, Tiers};
use undercroft_policy::place::Place;
use undercroft_policy::prefetch::Prefetch;
use undercroft_policy::reclaim::{Reclaim, ReclaimName};

use crate::bound::belady::{Belady, Future};
use crate::bound::random::RandomReclaim;
use crate::page_stream::PageStream;
use crate::place::{Held, StallControl, StallMax};
use crate::plugin::Plugin;
use crate::replay::following::Following;
use crate::replay::page_outs::new_histogram;
use crate::setup::{self, Setup, SetupError, SimRoom};

/// The page differs from its stored copy, if it has one.
pub(super) const DIRTY: u8 = 1;
/// Written at some time, so it is not all zeros.
pub(super) const WRITTEN: u8 = 2;
/// Prefetched, and not used since.
pub(super) const AHEAD: u8 = 4;
/// Used before.
pub(super) const KNOWN: u8 = 8;
/// Inherited at a fork, and not evicted since. It may still have no frame of its own.
pub(super) const SHARED: u8 = 16;
/// In memory at a fork, and not evicted since. Pages that inherited it may have no frame of their
/// own.
pub(super) const LENT: u8 = 32;

/// Used since the last scan.
pub(super) const USED: u8 = 64;
/// In memory at the last scan, and not evicted since.
pub(super) const SCANNED: u8 = 128;

/// How many references are read ahead together.
const LOOK_AHEAD: usize = 16;

/// Least time of a window of a stall bound: a second.
const STALL_WINDOW: Time = Time(1_000_000_000_000);

/// The stall bound of a client, and its window.
#[derive(Debug)]
pub struct Stall {
    /// The control.
    pub control: StallControl,
    /// When the window began, and the time of references until then.
    began: Time,
    referenced: Time,
}

/// How a client's time was spent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Processor and DRAM.
    pub reference: Time,
    /// The kernel's path of faults.
    pub software: Time,
    /// Context switches.
    pub context_switch: Time,
    /// Waiting for demanded pages.
    pub read: Time,
    /// Waiting for prefetched pages: read in the same request, or not yet there when used.
    pub ahead: Time,
    /// Waiting for write-outs.
    pub write: Time,
    /// Compressing and decompressing.
    pub compression: Time,
}

impl Spent {
    /// The sum.
    pub fn total(&self) -> Time {
        self.reference
            + self.software
            + self.context_switch
            + self.read
            + self.ahead
            + self.write
            + self.compression
    }
}

/// How long a client waited at one of its references, for everything: its page, what came along,
/// and room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The reference, from 0.
    pub reference: u64,
    /// The time.
    pub time: Nanos,
}

/// A client's counts besides its engine's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// References that found no page in memory.
    pub misses: u64,
    /// Accesses that are a page's first use in the trace.
    pub first_touches: u64,
    /// Faults that read from a tier.
    pub loads: u64,
    /// Pages that left with a write, to whatever tier.
    pub writes: u64,
    /// Prefetched pages that were used before they left.
    pub ahead_used: u64,
}

/// A client of a replay: its trace, engine and clock.
pub struct Client<'a> {
    /// Its place among the clients.
    pub index: usize,
    /// Its references and pages.
    pub stream: &'a PageStream,
    /// The engine that runs live.
    pub engine: Engine<VecLedger>,
    /// Its one address space.
    pub space: SpaceId,
    /// Frames of its memory.
    pub frames: u64,
    /// References done.
    pub at: usize,
    /// Movements done.
    pub moved: usize,
    /// The fault at which it stopped, not yet served: the page, and whether it is written.
    pub fault: Option<(PageNo, bool)>,
    /// References done at the last fault, that one included.
    pub missed: usize,
    /// When reclaim runs, and how much it takes.
    pub reclaimer: Reclaimer,
    /// Reclaim rests until then.
    pub rests_until: Time,
    /// References whose time the clock includes.
    pub timed: usize,
    /// Its own virtual time.
    pub clock: Time,
    /// When it came.
    pub came: Time,
    /// [`DIRTY`], [`WRITTEN`], [`AHEAD`], [`KNOWN`], [`SHARED`], [`LENT`], [`USED`], [`SCANNED`] of
    /// each page.
    pub marks: Vec<u8>,
    /// When the prefetched pages on their way arrive.
    pub ahead_until: Time,
    /// Its first place in tiers where each page has its own.
    pub home: u64,
    /// Pages in each tier.
    pub held: Vec<u64>,
    /// Moves for it in the background.
    pub beside: Beside,
    /// The fault at hand.
    pub plan: LoadPlan,
    /// The eviction at hand.
    pub batch: Vec<EvictItem>,
    /// Pages that leave before any that the policy names, because the other owner of their frame
    /// has left.
    pub leave_next: Vec<PageNo>,
    /// The user's policy, if there is one.
    pub(super) plugin: Option<Plugin>,
    /// How many pages may not leave, by the trace.
    pub locked: u64,
    /// Nanoseconds of each fault that read from a tier.
    pub latency: Histogram<u64>,
    /// The wait of each fault, if they are kept.
    pub waits: Option<Vec<Wait>>,
    /// How its time was spent.
    pub spent: Spent,
    /// HybridSwap's rule, if that decides, or works beside what decides.
    pub(super) locality: Option<Held>,
    /// Its stall bound, if it has one.
    pub stall: Option<Stall>,
    /// Its counts.
    pub seen: Seen,
    /// The engine's counters at the start of the simulation proper.
    pub before: Stats,
    /// Its miss-ratio curve, if one is asked for.
    pub(super) following: Option<Following>,
    future: Option<Arc<Future>>,
}

/// Pages that were selected to move in the background, and have not moved yet.
#[derive(Debug)]
pub struct Beside {
    /// The pages, the last one first.
    pub items: Vec<DemoteItem>,
    /// Where they go.
    pub to: TierId,
}

/// Why a stretch of references ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// This page is not in memory, or is on its way, or is inherited and is written to.
    Fault(PageNo, bool),
    /// The trace has movements here.
    Moved,
    /// As many references as were asked for are done.
    Paused,
    /// The trace is over.
    End,
}

/// A reclaim policy, and the future if it needs one.
type WithFuture = (Box<dyn Reclaim>, Option<Arc<Future>>);

/// The reclaim policy of a setup.
fn reclaim_of(setup: &Setup, stream: &PageStream, seed: u64) -> Result<WithFuture, SetupError> {
    if let Some((name, _)) = setup::file_of(&setup.reclaim) {
        // A file only names pages first.
        return Ok((name.make(), None));
    }
    match setup.reclaim.as_str() {
        "random" => Ok((Box::new(RandomReclaim::new(seed)), None)),
        "belady" => {
            let future = Arc::new(Future::new(&stream.references, stream.numbers));
            Ok((Box::new(Belady::new(future.clone())), Some(future)))
        }
        name => match crate::reclaim::by_name(name) {
            Some(policy) => Ok((policy, None)),
            None => Err(setup::no_reclaim(name)),
        },
    }
}

/// The policy of places, and HybridSwap's rule if that is at work.
fn place_of(setup: &Setup) -> (Box<dyn Place>, Option<Held>) {
    match setup.kernel_swap {
        Some(kernel) => kernel.make(),
        None => setup.placement.make(),
    }
}

/// The prefetch policy of a setup.
fn prefetch_of(setup: &Setup) -> Result<Option<Box<dyn Prefetch>>, SetupError> {
    let name = &setup.prefetch;
    undercroft_policy::prefetch::by_name(name)
        .map_err(|error| SetupError::option("--prefetch", name, error.to_string(), ""))
}

/// The engine's configuration of a client with `frames` of memory. A page of the simulation is a
/// page of the engine, whatever its size.
fn config_of(setup: &Setup, frames: u64) -> Config {
    let latencies: Vec<_> = setup.tiers.iter().map(|tier| tier.kind.latency()).collect();
    let room = match setup.room {
        SimRoom::AfterPlan => Room::AfterPlan,
        SimRoom::Ahead => Room::Ahead,
    };
    Config::for_tiers(Bytes(frames * BASE_PAGE_BYTES as u64), room, &latencies)
}

/// Adds the client's one address space, with a mapping for each run. The numbers of its pages are
/// those of the stream.
fn add_pages(engine: &mut Engine<VecLedger>, stream: &PageStream) -> SpaceId {
    let space = engine.layout().add_space();
    for number in (0..stream.numbers).step_by(CHUNK_PAGES as usize) {
        let no = engine.uses().number(space, VirtPage(u64::from(number)));
        assert_eq!(no, Ok(PageNo(number)), "chunks are numbered in order");
    }
    for (start, end) in &stream.runs {
        let range = VirtRange::new(VirtPage(u64::from(*start)), VirtPage(u64::from(*end)));
        engine.layout().attached(space, range);
    }
    space
}

impl<'a> Client<'a> {
    /// A client before its first reference.
    ///
    /// * `seed`: its own.
    pub fn new(
        stream: &'a PageStream,
        setup: &Setup,
        frames: u64,
        home: u64,
        seed: u64,
    ) -> Result<Client<'a>, SetupError> {
        let name = setup.reclaim.parse::<ReclaimName>().ok();
        let (reclaim, future) = reclaim_of(setup, stream, seed)?;
        let prefetch = prefetch_of(setup)?;
        let config = config_of(setup, frames);
        let chunks = stream.numbers as usize / CHUNK_PAGES as usize;
        let mut engine = Engine::new(VecLedger::new(chunks), reclaim, prefetch, config);
        let (place, locality) = place_of(setup);
        let part = place.shown().reserve_part;
        engine.set_place(place);
        let space = add_pages(&mut engine, stream);
        let plugin = match setup::file_of(&setup.reclaim) {
            Some((_, path)) => {
                let plugin = setup::plugin(path)?;
                plugin.attend(&mut engine);
                Some(plugin)
            }
            None => None,
        };
        let numbers = stream.numbers as usize;
        Ok(Client {
            index: 0,
            stream,
            engine,
            space,
            frames,
            at: 0,
            moved: 0,
            fault: None,
            missed: 0,
            reclaimer: Reclaimer::new(1),
            rests_until: Time::default(),
            timed: 0,
            clock: Time::default(),
            came: Time::default(),
            marks: vec![0; numbers],
            ahead_until: Time::default(),
            home,
            held: vec![0; setup.tiers.len()],
            beside: Beside {
                items: Vec::new(),
                to: TierId(0),
            },
            plan: LoadPlan::default(),
            batch: Vec::new(),
            leave_next: Vec::new(),
            plugin,
            locked: 0,
            latency: new_histogram(),
            waits: setup.waits.then(Vec::new),
            spent: Spent::default(),
            locality,
            stall: None,
            seen: Seen::default(),
            before: Stats::default(),
            following: name
                .filter(|_| setup.curve)
                .zip(setup.placement.of_runs())
                .map(|(name, place)| Following::new(&name, place, frames, setup.room, part)),
            future,
        })
    }

    /// Its time, for the engine.
    pub(super) fn now(&self) -> Nanos {
        Nanos(self.clock.0 / 1000)
    }

    /// Whether pages are followed, and a scan is due.
    #[inline]
    pub(super) fn is_scan_due(&self) -> bool {
        let following = self.following.as_ref();
        following.is_some_and(|following| following.is_due(&self.engine))
    }

    /// Scans, if pages are followed, and tells the estimator. * `tiers`: as they are now.
    pub(super) fn follow_pages(&mut self, tiers: &Tiers) {
        let Some(following) = &mut self.following else {
            return;
        };
        for number in 0..self.marks.len() {
            let no = PageNo(number as u32);
            if !self.engine.books().is_resident(no) {
                continue;
            }
            let mark = self.marks[number];
            if mark & (USED | SCANNED) == USED | SCANNED {
                self.engine.uses().used(no);
            }
            self.marks[number] = (mark & !USED) | SCANNED;
        }
        following.feed(&mut self.engine, tiers);
    }

    /// The curve so far; `None` if no page is followed.
    pub fn curve(&self) -> Option<Curve> {
        let faults = self.engine.books().stats().swap_in - self.before.swap_in;
        let following = self.following.as_ref()?;
        Some(following.curve(faults))
    }

    /// Runs references while their pages are in memory, at most `most`. The reference that stops
    /// the run does not count as done.
    pub fn run(&mut self, most: usize) -> Stop {
        let most = match self.stream.moved.get(self.moved) {
            Some(next) if next.after > self.at => most.min(next.after - self.at),
            Some(_) if self.at < self.stream.references.len() => return Stop::Moved,
            _ => most,
        };
        match &self.future {
            None => self.run_on(most, |_| ()),
            Some(future) => self.run_to(most, future.clone()),
        }
    }

    #[inline(never)]
    fn run_to(&mut self, most: usize, future: Arc<Future>) -> Stop {
        self.run_on(most, |at| future.at(at))
    }

    #[inline]
    fn run_on(&mut self, most: usize, position: impl Fn(usize)) -> Stop {
        let references = &self.stream.references[self.at..];
        let references = &references[..references.len().min(most)];
        for (done, word) in references.iter().enumerate() {
            position(self.at + done);
            if (self.at + done).is_multiple_of(LOOK_AHEAD) {
                self.look_ahead(self.at + done + LOOK_AHEAD);
            }
            let (no, write) = (PageNo(word >> 1), word & 1 != 0);
            if !self.engine.uses().touch(no, write) {
                self.at += done;
                return Stop::Fault(no, write);
            }
            let mark = &mut self.marks[no.0 as usize];
            if *mark & (AHEAD | SHARED) != 0 {
                let along = *mark & AHEAD != 0;
                if along {
                    *mark = (*mark & !AHEAD) | KNOWN;
                    self.seen.ahead_used += 1;
                    if let Some(plugin) = &self.plugin {
                        plugin.first_used(self.space, VirtPage(u64::from(no.0)));
                    }
                }
                let late = along && self.ahead_until > Time::default();
                if late || (*mark & SHARED != 0 && write) {
                    self.at += done;
                    return Stop::Fault(no, write);
                }
            }
            *mark |= ((word & 1) as u8 * (DIRTY | WRITTEN)) | USED;
        }
        self.at += references.len();
        if self.at == self.stream.references.len() {
            Stop::End
        } else {
            Stop::Paused
        }
    }

    /// Reads the data that the references from `from` on will need, so that it is in cache by then.
    /// The reads do not depend on each other, so the processor waits for all at once.
    #[inline]
    fn look_ahead(&self, from: usize) {
        let references = &self.stream.references;
        let Some(next) = references.get(from..from + LOOK_AHEAD) else {
            return;
        };
        let look = |word: &u32| {
            let resident = self.engine.books().is_resident(PageNo(word >> 1));
            u32::from(resident) + u32::from(self.marks[(word >> 1) as usize])
        };
        std::hint::black_box(next.iter().map(look).sum::<u32>());
    }

    /// Whether its trace is over.
    pub(super) fn is_done(&self) -> bool {
        self.at == self.stream.references.len() && self.fault.is_none()
    }

    /// The part of its time so far in which it waited.
    pub fn stall_ratio(&self) -> f64 {
        let elapsed = (self.clock - self.came).seconds();
        if elapsed > 0.0 {
            (elapsed - self.spent.reference.seconds()) / elapsed
        } else {
            0.0
        }
    }

    /// Gives it a stall bound. Before time begins.
    pub(super) fn bound_stall(&mut self, bound: StallMax) {
        let control = StallControl::new(bound);
        if let Some(rule) = &self.locality {
            rule.set_shift(control.asked());
        }
        self.stall = Some(Stall {
            control,
            began: Time::default(),
            referenced: Time::default(),
        });
    }

    /// Ends the window of the stall bound, if it is time, and shifts pages as the bound needs.
    #[inline]
    pub(super) fn control_stall(&mut self) {
        let ratio = match &self.stall {
            Some(stall) if stall.began + STALL_WINDOW <= self.clock => self.stall_ratio(),
            _ => return,
        };
        let Some(stall) = &mut self.stall else {
            return;
        };
        let passed = self.clock.seconds() - stall.began.seconds();
        let referenced = self.spent.reference.seconds() - stall.referenced.seconds();
        let lately = (1.0 - referenced / passed).max(0.0);
        let all = self.locality.as_ref().and_then(Held::shift_of_all);
        let shift = stall.control.end_window(ratio, lately, all);
        (stall.began, stall.referenced) = (self.clock, self.spent.reference);
        if let Some(rule) = &self.locality {
            rule.set_shift(shift);
        }
    }

    /// Keeps the wait at a reference, if waits are kept. * `from`: the reference, and the time
    /// before it was served.
    #[inline]
    pub(super) fn note_wait(&mut self, from: (u64, Time)) {
        if let Some(waits) = &mut self.waits {
            let time = Nanos((self.clock - from.1).0 / 1000);
            let reference = from.0;
            if time.0 > 0 {
                waits.push(Wait { reference, time });
            }
        }
    }

    /// Adds the time of the references done, the current one included, to the clock.
    pub fn advance_clock(&mut self, per_reference: Time) {
        let until = (self.at + 1).min(self.stream.references.len());
        let time = Time(per_reference.0 * (until - self.timed) as u64);
        self.timed = until;
        self.clock += time;
        self.spent.reference += time;
    }
}
