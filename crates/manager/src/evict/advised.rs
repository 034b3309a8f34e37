//! The plugin at work: a thread of its own, which tells it the events, and the evictor's side,
//! which takes its wishes when it asks our policy.
//!
//! Pages that it wants in memory are loaded by fault threads (`fault/ahead.rs`), which it wakes.
//! Copies that it wants in another tier are moved by `uc-migrate` (`migrate/`).
//!
//! The thread has the lowest scheduling class, takes no lock that a fault or an eviction takes, and
//! is woken by none: it looks by itself, each millisecond while there are events. It gets a part of
//! one CPU (`allowance.rs`). Events that it does not hear in time are dropped and counted.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::EvictItem;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_plugin::{Counts, Desk, Event, Kind, What, Wish};
use undercroft_proto::options::AccessScan;
use undercroft_sys::process;

use super::allowance::Allowance;
use super::{Evictor, inside};
use crate::advice::{Advice, PLUGIN_THREAD};
use crate::space::shared::Shared;

/// Makes a plugin of a file's bytes. Errors: why it is none, for the user.
pub type ReadPlugin = fn(&[u8]) -> Result<Desk, String>;

/// Events between two looks at the time, the memory in use, and whether the run ends. A few: each
/// may take some milliseconds of a CPU, and the thread may get little of one.
const EVENTS_A_TURN: usize = 16;

/// Shortest and longest pause of the thread when no event waits.
const NAP_MIN: Duration = Duration::from_millis(1);
const NAP_MAX: Duration = Duration::from_millis(16);

/// Wishes that are tried for one batch.
const WISHES_A_BATCH: usize = 2 * EVICT_PAGES_MAX;

/// Wishes of where a page goes that are noted before one batch: the engine is locked meanwhile.
const PLACES_A_BATCH: usize = 8 * EVICT_PAGES_MAX;

/// Times that a batch is looked for among pages that shall leave although there may be room. Most
/// of them may have left.
const LOOKS_FOR_NOW: usize = 16;

/// Stack of the thread: twice what hostile files get in the tests of `plugin-wasm`, where the
/// interpreter is not optimised. Calls of a policy take none of it.
const STACK_BYTES: usize = 1 << 20;

/// Threads of plugins that have not ended. One that was replaced ends when it gets a CPU.
static THREADS: AtomicUsize = AtomicUsize::new(0);
const THREADS_MAX: usize = 4;

/// Starts the plugin's thread.
///
/// * `begin`: makes the plugin, on that thread.
///
/// Errors: also if those that were replaced have not ended.
pub(crate) fn start(
    shared: &Arc<Shared>,
    advice: &Arc<Advice>,
    begin: impl FnOnce() -> Result<Desk, String> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    if THREADS.load(Ordering::Relaxed) >= THREADS_MAX {
        let why = "the policies before have not ended yet, for want of a CPU; ask again";
        return Err(io::Error::other(why));
    }
    let (shared, advice) = (shared.clone(), advice.clone());
    let thread = Builder::new()
        .name(PLUGIN_THREAD.into())
        .stack_size(STACK_BYTES);
    let body = move || {
        let ended = catch_unwind(AssertUnwindSafe(|| run(&shared, &advice, begin)));
        THREADS.fetch_sub(1, Ordering::Relaxed);
        let why = match ended {
            Ok(None) => return,
            Ok(Some(why)) => why,
            Err(_) => INTERPRETER_FAILED.to_owned(),
        };
        advice.dismiss();
        if !advice.is_over() {
            crate::log::warn(&format!(
                "the policy file is not asked any more: {why}. The default policy goes on alone"
            ));
        }
    };
    THREADS.fetch_add(1, Ordering::Relaxed);
    let started = thread.spawn(body);
    started.inspect_err(|_| _ = THREADS.fetch_sub(1, Ordering::Relaxed))
}

const NO_SCANS: &str = "the policy file asks for scans of access bits, and hears of none, because \
                        of `--access-scan never`";

/// Why a policy is none that makes its interpreter panic.
pub(crate) const INTERPRETER_FAILED: &str = "it made its interpreter fail";

/// Shows what a plugin has asked for at its start.
fn introduce(desk: &Desk, shared: &Shared, advice: &Advice) {
    advice.show_parameters(desk.parameters());
    if desk.asks_tiers() {
        advice.ears.ask_tiers();
    }
    if desk.asks_instructions() {
        advice.ears.ask_instructions();
        let asked = &shared.books.asked_instructions;
        asked.store(true, Ordering::Relaxed);
        inside::look_at_registers(shared);
    }
}

/// Tells the plugin the events until the run ends. Returns why it is not asked any more.
fn run(
    shared: &Shared,
    advice: &Advice,
    begin: impl FnOnce() -> Result<Desk, String>,
) -> Option<String> {
    // If that is refused, it competes with the others as they do among each other.
    let _ = process::set_idle(0);
    let mut desk = match begin() {
        Ok(desk) => desk,
        Err(why) => return Some(why),
    };
    introduce(&desk, shared, advice);
    let (mut late, mut nap) = (0, NAP_MIN);
    let (loads, leaves) = (Cell::new(false), Cell::new(false));
    let mut wish = |wish: Wish| {
        match wish.what {
            What::Prefetch => loads.set(true),
            What::ReclaimNow => leaves.set(true),
            What::Reclaim | What::Place(_) | What::Link(_) | What::Move { .. } => {}
        }
        advice.wishes.add(wish);
    };
    let mut allowance = Allowance::new(shared.elapsed(), process::own_run_time());
    let ends = || shared.signals.stopped() || advice.is_over();
    while !ends() {
        advice.take_set(|name, value| _ = desk.set(name, value));
        let now = shared.elapsed().as_millis() as u64;
        if desk.asks_tiers() {
            desk.tiers(advice.tiers(), advice.wishes.moves_free());
        }
        desk.at(advice.memory(shared.gauges.memory_max()), now, &mut wish);
        let dropped = advice.ears.dropped();
        if dropped > late {
            desk.hear(&Event::plain(Kind::Lost, dropped - late), &mut wish);
            late = dropped;
        }
        let mut heard = 0;
        while heard < EVENTS_A_TURN
            && let Some(event) = advice.ears.next()
        {
            inside::show(&mut desk, shared);
            desk.hear(&event, &mut wish);
            heard += 1;
        }
        let counts: Counts = desk.counts();
        advice.note_counts(counts, late);
        if advice.note_scan_ms(desk.scan_ms()) && shared.options.access_scan == AccessScan::Never {
            crate::log::warn(NO_SCANS);
        }
        if counts.dismissed {
            let why = desk.last_failure().map(ToString::to_string);
            return Some(format!("it failed {} times: {}", counts.failures, why?));
        }
        advice.show_values(&desk.take_shown());
        if loads.take() {
            shared.wake_loader();
        }
        if leaves.take() {
            shared.signals.kick_evictor();
        }
        if heard < EVENTS_A_TURN {
            let longer = NAP_MAX.min(2 * nap);
            nap = if heard > 0 { NAP_MIN } else { longer };
            std::thread::sleep(nap);
        }
        let owed = allowance.rest(shared.elapsed(), process::own_run_time());
        rest(owed, ends);
    }
    None
}

/// Sleeps, unless it `ends` before.
fn rest(mut time: Duration, ends: impl Fn() -> bool) {
    while !time.is_zero() && !ends() {
        let part = time.min(NAP_MAX);
        std::thread::sleep(part);
        time -= part;
    }
}

fn next_wishes(advice: &Advice, what: What, most: usize) -> Vec<(SpaceId, VirtPage)> {
    let next = std::iter::from_fn(|| advice.wishes.next(what));
    next.take(most).collect()
}

impl Evictor {
    /// The run's plugin, if it has one, and its oldest wishes: twice as many as a batch, because
    /// some are of pages that have left meanwhile.
    pub(super) fn take_wishes(&self) -> (Option<Arc<Advice>>, Vec<(SpaceId, VirtPage)>) {
        let Some(advice) = self.shared.books.advice() else {
            return (None, Vec::new()); // no memory is taken
        };
        self.take_places(&advice);
        let wishes = next_wishes(&advice, What::Reclaim, WISHES_A_BATCH);
        advice.note_wishes(wishes.len());
        (Some(advice), wishes)
    }

    /// Has the engine know where the plugin wants pages to go, and which come together.
    fn take_places(&self, advice: &Advice) {
        let next = std::iter::from_fn(|| advice.wishes.next_place());
        let places: Vec<_> = next.take(PLACES_A_BATCH).collect();
        if places.is_empty() {
            return;
        }
        let mut engine = self.shared.books.engine_for_many();
        let mut evictions = engine.evictions();
        let known = places
            .iter()
            .filter(|(space, page, placing)| evictions.place(*space, *page, *placing));
        let known = known.count() as u64;
        drop(engine);
        advice.note_places(places.len() as u64, known);
    }

    /// Takes pages that the plugin wants to leave although there may be room, up to a batch of
    /// those that may. What may not leave is passed over here: it is no reason to begin a batch.
    pub(super) fn take_leave_now(&mut self) {
        if !self.leave_now.is_empty() {
            return;
        }
        let Some(advice) = self.shared.books.advice() else {
            return;
        };
        for _ in 0..LOOKS_FOR_NOW {
            let wishes = next_wishes(&advice, What::ReclaimNow, EVICT_PAGES_MAX);
            if wishes.is_empty() {
                return;
            }
            advice.note_wishes(wishes.len());
            self.leave_now.extend(wishes);
            self.take_places(&advice);
            let mut engine = self.shared.books.engine();
            let evictions = engine.evictions();
            (self.leave_now).retain(|(space, page)| evictions.may_leave(*space, *page));
            if !self.leave_now.is_empty() {
                return;
            }
        }
    }

    /// Begins a batch with these pages. False if none of them can leave any more.
    pub(super) fn choose_leave_now(&mut self, most: usize, items: &mut Vec<EvictItem>) -> bool {
        let mut engine = self.shared.books.engine_for_many();
        let before = engine.books().stats().wished;
        let wishes = &mut self.leave_now;
        let any = engine.evictions().select_wished(wishes, most, items);
        let chosen = engine.books().stats().wished - before;
        drop(engine);
        if let Some(advice) = self.shared.books.advice() {
            advice.note_chosen(chosen);
        }
        any
    }
}
