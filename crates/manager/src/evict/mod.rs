//! The evictor keeps the reserve free. When pages leave, and how many at a time, is decided by
//! [`Reclaimer`]. Here its steps are carried out. A batch is `choose.rs` -> `wayout` -> `store.rs`
//! -> `publish.rs`, by groups of one address space each (`pending.rs`). `demote.rs` makes room
//! in a full tier that the processor reads.
//!
//! A batch:
//!
//! 1. Begin. A fault that leaves less room than the reserve wakes the evictor; it also looks by
//!    itself at intervals. The reserve is a 256th of the limit, or a 64th once a policy file links
//!    pages (`Place::reserve_part`); 32 to 2048 pages, but never more than a quarter of the limit.
//!    It goes on until one and a half reserves are free. A limit that was lowered is approached
//!    here, batch by batch. Before each batch the placement policy is asked what to demote.
//! 2. Choose, up to 64 pages, of the first kind that gives one: zero pages that were only read, if
//!    16 of them are found or there is no room; the other pages of a shared frame, once a fork
//!    relative's page of it has left; pages that a plugin wants to leave; victims that the policy
//!    names. Locked pages are never chosen.
//!    The 32 pages installed last stay, unless there is no room and nothing else can leave. A page
//!    that the kernel refused to move waits until as many pages were chosen as are resident, and
//!    twice as long after each refusal in a row.
//! 3. Move out (`wayout`). `claim` shuts the fork gate: no fork of the process runs until
//!    `release`. A page that has moved or gone since it was chosen is left out. The agent moves
//!    pages to the staging area and on to the holding area; the pages there are read, one read for
//!    each run. Those that did not move stay resident (`settle`).
//! 4. Store, 8 pages at a time for each thread that compresses (`compressors.rs`), or 64 if the
//!    tier that they are offered to first is a device. A page of one repeated word is kept in its
//!    entry. A clean page needs no new copy. Any other goes to the first tier that takes it, in the
//!    order of `tiers_for`; the older copy in an nvm tier is changed in place.
//! 5. Publish. The entry names the slot, and only then is the old slot given up; it is freed with
//!    no lock held. A page that a thread waits for is put back before the rest is stored, unless
//!    fork relatives share it: that one is stored, and loaded again. A page that no tier takes is
//!    put back.
//!
//! The engine answers for many items in one call, so a batch of 64 pages locks it 17 times; a test
//! allows 24 (`tests/tests/live/limits.rs`). A `BatchIndex` is void once the next batch has begun;
//! a group that is set aside gets new ones.

mod adopt;
pub(crate) mod advised;
mod allowance;
mod aside;
mod choose;
mod compressors;
mod demote;
#[cfg(test)]
pub(crate) mod guest_tests;
mod inside;
mod pending;
mod publish;
mod store;
#[cfg(test)]
mod view_tests;
mod wayout;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::{Nanos, PageCount, PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_engine::limits::{DEMOTE_PAGES_MAX, EVICT_PAGES_MAX};
use undercroft_engine::reclaim::{Ended, Now, Reclaimer, Step};
use undercroft_engine::{BatchIndex, DemoteItem, Engine, EvictItem, Outcome};
use undercroft_policy::place::{TIERS_MAX, TierOrder, TierState};
use undercroft_proto::options::WhenFull;
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::pagemap::Category;
use undercroft_sys::process;
use undercroft_wire::protocol::STAGING_PAGES;

use self::aside::Aside;
use self::compressors::Compressors;
use self::pending::Pending;
use crate::books::engine_locks;
use crate::books::ledger::MemfdLedger;
use crate::books::metered::MeteredTier;
use crate::gauges::MemoryNow;
use crate::signals::Doom;
use crate::space::parts;
use crate::space::shared::Shared;
use crate::sync::read;

/// Batches in flight where pages are moved while others are stored.
const BATCHES: usize = 2;

/// Time between two looks whether a fault still waits for a device.
const YIELD_PAUSE: Duration = Duration::from_micros(20);

// One command takes a whole batch, and a set of its pages is one word.
const _: () = assert!(EVICT_PAGES_MAX == STAGING_PAGES && EVICT_PAGES_MAX <= 64);

/// A batch in flight.
#[derive(Clone, Copy, Debug)]
struct Batch {
    /// Pages that were asked for.
    asked: usize,
    /// Zero pages were chosen.
    zeros: bool,
    /// Of pages that a user has named.
    named: bool,
}

/// The books before the batch that ends next.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    /// Base pages that had been freed, and pages that no tier had taken.
    freed: u64,
    refused: u64,
    /// There was no room for a page.
    pressed: bool,
}

pub(crate) struct Evictor {
    shared: Arc<Shared>,
    items: Vec<EvictItem>,
    buffer: PageBuf,
    helpers: Compressors,
    wakes: Vec<(SpaceId, VirtPage)>,
    zeros: Vec<(VirtRange, Category)>,
    /// The last batch of zero pages freed nothing.
    zeros_in_vain: bool,
    /// Pages that are stored and still to be published.
    stored: Vec<(BatchIndex, Outcome)>,
    /// The tiers to try for each page that is stored next, by the page's place in the group.
    orders: [TierOrder; EVICT_PAGES_MAX],
    /// The state of the tiers, as the engine was told last.
    states: Vec<TierState>,
    demotions: Vec<DemoteItem>,
    demote_buffer: PageBuf,
    reclaimer: Reclaimer,
    /// A group is asked for before the one before is stored.
    overlaps: bool,
    pending: VecDeque<Pending>,
    before: Before,
    /// A page of the last batch did not compress; others may.
    unfit: bool,
    /// The user was told that every tier is full.
    warned: bool,
    /// Processes that cannot give pages at the moment.
    aside: VecDeque<Aside>,
    /// When those are visited next.
    revisit_at: Duration,
    /// Pages of these processes that the policy has forgotten.
    kept: PageCount,
    /// Pages that the plugin wants to leave although there may be room.
    leave_now: Vec<(SpaceId, VirtPage)>,
    /// The last batch of named pages was a user's.
    by_user: bool,
}

impl Evictor {
    pub(crate) fn new(shared: Arc<Shared>) -> std::io::Result<Evictor> {
        let overlaps = Compressors::wanted(shared.options.compressors) > 1;
        let large = shared.options.page_size.base_pages() as usize;
        Ok(Evictor {
            shared,
            items: Vec::with_capacity(EVICT_PAGES_MAX),
            buffer: PageBuf::new(large.max(EVICT_PAGES_MAX), PageSize::Base)?,
            helpers: Compressors::default(),
            wakes: Vec::with_capacity(EVICT_PAGES_MAX),
            zeros: Vec::new(),
            zeros_in_vain: false,
            stored: Vec::with_capacity(EVICT_PAGES_MAX),
            orders: [TierOrder::default(); EVICT_PAGES_MAX],
            states: Vec::with_capacity(TIERS_MAX),
            demotions: Vec::with_capacity(DEMOTE_PAGES_MAX),
            demote_buffer: PageBuf::new(large.max(DEMOTE_PAGES_MAX), PageSize::Base)?,
            reclaimer: Reclaimer::new(if overlaps { BATCHES } else { 1 }),
            overlaps,
            pending: VecDeque::new(),
            before: Before::default(),
            unfit: false,
            warned: false,
            aside: VecDeque::new(),
            revisit_at: Duration::ZERO,
            kept: PageCount(0),
            leave_now: Vec::new(),
            by_user: false,
        })
    }

    /// Works until the run ends.
    pub(crate) fn run(mut self) {
        // Before this thread is bound to CPUs: its helpers are not.
        self.helpers = Compressors::start(self.shared.options.compressors);
        self.shared.cpu_plan.set_evictor(process::thread_id());
        while !self.shared.signals.stopped() {
            let asleep = self.reclaimer.is_asleep();
            let kick = asleep.then(|| self.shared.signals.evictor_rests());
            if !asleep && self.forgets_some() {
                self.finish_pending(); // there may be many
                continue;
            }
            self.revisit();
            let locks = engine_locks();
            let shared = self.shared.clone();
            let storing = read(&shared.books.storing);
            let step = self.next_step();
            if let Step::Demote(migration) = step {
                self.finish_all();
                if !self.demote(migration) {
                    self.reclaimer.moved_none();
                }
            }
            drop(storing);
            match (step, kick) {
                (Step::Sleep(most), Some(kick)) => {
                    self.sleep(kick, most);
                    continue;
                }
                (_, Some(_)) => shared.signals.evictor_works(),
                (_, None) => {}
            }
            self.carry_out(step, locks);
        }
        self.finish_pending();
        self.shared.signals.evictor_works();
    }

    /// Asks what is to be done next. Locks the engine once.
    fn next_step(&mut self) -> Step {
        self.take_leave_now();
        let gauges = &self.shared.gauges;
        let turned = gauges.knobs.get();
        let now = Now {
            time: self.shared.now(),
            limit: gauges.limit_now(),
            paused: gauges.is_paused(),
            calm: self.shared.signals.is_calm(),
            reads: turned.is_some() && gauges.knobs.reads_in_flight(),
            named: !self.leave_now.is_empty() || !self.shared.books.named.queue().is_empty(),
        };
        self.states.clear();
        let tiers = self.shared.books.tiers.iter();
        self.states.extend(tiers.map(MeteredTier::state));
        let advice = self.shared.books.advice();
        let mut engine = self.shared.books.engine();
        engine.migrations().set_tiers(self.states.iter().copied());
        engine.turn(turned);
        let step = self.reclaimer.step(&mut engine, now);
        self.before.pressed = engine.books().room() < 1;
        if let Some(advice) = advice {
            let books = engine.books();
            advice.note_memory(books.dram_used(), books.stats().faults);
            advice.note_tiers(books.ranked_tiers());
        }
        if self.pending.is_empty() {
            let stats = engine.books().stats();
            self.before.freed = stats.base_pages_freed;
            self.before.refused = stats.refused_store;
        }
        step
    }

    /// Does what the machine says. Sleeps and demotions are done.
    ///
    /// * `locks`: how often this thread had locked the engine when it asked.
    fn carry_out(&mut self, step: Step, locks: u64) {
        if !matches!(step, Step::Choose(_) | Step::Named(_)) {
            self.finish_pending();
        }
        match step {
            Step::Sleep(_) | Step::Demote(_) | Step::Wait => {}
            Step::Choose(pages) | Step::Named(pages) => {
                let any = self.evict_batch(pages, matches!(step, Step::Named(_)));
                if any {
                    self.shared.gauges.eviction.note(engine_locks() - locks);
                }
            }
            Step::Yield(most) => self.yield_to_reads(duration(most)),
            Step::Rest(time) => {
                self.progress();
                std::thread::sleep(duration(time));
            }
            Step::Full(time) => {
                self.everything_full();
                self.progress();
                std::thread::sleep(duration(time));
            }
            Step::Enough => {
                self.admit_waiters();
                for tier in self.shared.books.tiers.iter() {
                    tier.note_usage();
                }
            }
        }
    }

    /// Sleeps until a kick that is newer than `kick`, at most for `most`.
    fn sleep(&mut self, kick: u32, most: Nanos) {
        let shared = self.shared.clone();
        // The program may have given memory back: only the evictor admits threads that wait for
        // room.
        self.admit_waiters();
        shared.books.follow_pages();
        let most = if self.aside.is_empty() {
            duration(most)
        } else {
            duration(most).min(self.revisit_at.saturating_sub(shared.elapsed()))
        };
        let mut stirred = shared.signals.evictor_sleep(kick, most);
        if stirred {
            shared.signals.stir();
        } else {
            for metered in shared.books.tiers.ranked() {
                stirred |= metered.tier.tidy(); // soon again
            }
        }
        self.reclaimer.slept(stirred);
    }

    /// Lets reads of devices go first, at most for `most`. No page of a batch is in hand.
    fn yield_to_reads(&self, most: Duration) {
        let knobs = &self.shared.gauges.knobs;
        knobs.note_yield();
        let began = Instant::now();
        while knobs.reads_in_flight() && began.elapsed() < most {
            std::thread::sleep(YIELD_PAUSE);
        }
    }

    /// Handles a limit that is reached while no tier has room: tells the user once, and does what
    /// the user chose.
    fn everything_full(&mut self) {
        let when_full = self.shared.options.when_full;
        if !std::mem::replace(&mut self.warned, true) {
            crate::log::say(&format!(
                "every tier is full and the memory limit of {} is reached; {}",
                self.shared.gauges.memory_max(),
                match when_full {
                    WhenFull::Stay =>
                        "pages stay in memory above the limit. \
                        Add room with `--tier file:PATH,size=SIZE` or raise --memory-max",
                    WhenFull::Kill => "ending the program (--when-full kill)",
                }
            ));
        }
        match when_full {
            WhenFull::Stay => self.reclaimer.exceed(&mut self.shared.books.engine()),
            WhenFull::Kill => self.shared.signals.doom(Doom::TiersFull),
        }
    }

    /// Tells the books what the tiers hold, and notes time above the limit. Admits threads that
    /// wait for room.
    fn progress(&mut self) {
        self.note_progress(|_, _| ());
    }

    fn note_progress(&mut self, tell: impl FnOnce(&mut Reclaimer, &mut Engine<MemfdLedger>)) {
        let held = self.shared.books.pool_held();
        let mut engine = self.shared.books.engine();
        engine.migrations().set_pool_held(held);
        tell(&mut self.reclaimer, &mut engine);
        let now = MemoryNow::of(engine.books());
        engine.faults().take_waiters(&mut self.wakes);
        drop(engine);
        self.shared.gauges.note_memory(now);
        self.shared.processes.wake_pages(&mut self.wakes);
    }

    /// Forgets books that are gone, before any page is evicted. False if there are none.
    fn forgets_some(&mut self) -> bool {
        let left = !parts::forget_some(&self.shared);
        if left {
            self.admit_waiters();
        }
        left
    }

    /// Wakes the threads that wait for room, so that they fault again.
    fn admit_waiters(&mut self) {
        self.shared
            .books
            .engine()
            .faults()
            .take_waiters(&mut self.wakes);
        self.shared.processes.wake_pages(&mut self.wakes);
    }

    /// Chooses and evicts one batch of up to `most` pages. False if no page could be chosen.
    /// * `named`: only of pages that a user or a plugin has named.
    fn evict_batch(&mut self, most: usize, named: bool) -> bool {
        let shared = self.shared.clone();
        let storing = read(&shared.books.storing);
        let mut items = std::mem::take(&mut self.items);
        let (any, zeros, named) = if named {
            let (any, by_user) = self.choose_named(most, &mut items);
            (any, false, by_user)
        } else {
            let (any, zeros) = self.choose(most, &mut items);
            (any, zeros, false)
        };
        let batch = Batch {
            asked: most,
            zeros,
            named,
        };
        self.evict_groups(&items, Some(batch));
        self.items = items;
        shared.books.free_released();
        drop(storing);
        shared.books.follow_pages();
        any
    }

    /// Tells the machine how a batch ended, and the books what the tiers hold. Notes time above the
    /// limit, and admits threads that wait for room.
    fn batch_ended(&mut self, batch: Batch) {
        let answer_due = self.answer_is_due();
        let (before, unfit) = (self.before, std::mem::take(&mut self.unfit));
        let time = self.shared.now();
        let mut after = before;
        self.note_progress(|reclaimer, engine| {
            let stats = engine.books().stats();
            after.freed = stats.base_pages_freed;
            after.refused = stats.refused_store;
            let ended = Ended {
                asked: batch.asked,
                freed: after.freed - before.freed,
                refused: after.refused != before.refused,
                unfit,
                answer_due,
            };
            reclaimer.ended(engine, time, ended);
        });
        if batch.named {
            self.shared
                .gauges
                .ages
                .note_left(after.freed - before.freed);
        }
        self.zeros_in_vain = batch.zeros && after.freed == before.freed;
        self.before = after;
    }
}

fn duration(time: Nanos) -> Duration {
    Duration::from_nanos(time.0)
}
