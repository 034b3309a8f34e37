//! The plugin at work: a thread of its own, which tells it the events, and the evictor's side,
//! which takes its wishes when it asks our policy.
//!
//! The thread has the lowest scheduling class, takes no lock that a fault or an eviction takes, and
//! is woken by none: it looks by itself, each millisecond while there are events. So a plugin that
//! works without end slows neither. Events that it does not hear in time are dropped and counted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_plugin::{Counts, Desk, Event, Kind, Wish};
use undercroft_sys::process;

use super::Evictor;
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

/// Stack of the thread: twice what hostile files get in the tests of `plugin-wasm`, where the
/// interpreter is not optimised. Calls of a policy take none of it.
const STACK_BYTES: usize = 1 << 20;

/// Starts the plugin's thread.
pub(crate) fn start(
    shared: &Arc<Shared>,
    advice: &Arc<Advice>,
    read: ReadPlugin,
) -> std::io::Result<JoinHandle<()>> {
    let (shared, advice) = (shared.clone(), advice.clone());
    let thread = Builder::new()
        .name(PLUGIN_THREAD.into())
        .stack_size(STACK_BYTES);
    thread.spawn(move || {
        let ended = catch_unwind(AssertUnwindSafe(|| run(&shared, &advice, read)));
        let why = match ended {
            Ok(None) => return,
            Ok(Some(why)) => why,
            Err(_) => "it made its interpreter fail".to_owned(),
        };
        advice.dismiss();
        crate::log::warn(&format!(
            "the policy file is not asked any more: {why}. The default policy goes on alone"
        ));
    })
}

/// Tells the plugin the events until the run ends. Returns why it is not asked any more.
fn run(shared: &Shared, advice: &Advice, read: ReadPlugin) -> Option<String> {
    // If that is refused, it competes with the others as they do among each other.
    let _ = process::set_idle(0);
    // Here, not when the manager starts: a successor is waited for.
    let mut desk = match read(&shared.options.plugin.as_ref()?.module) {
        Ok(desk) => desk,
        Err(why) => return Some(why),
    };
    advice.set_parameters(desk.parameters());
    let (mut late, mut nap) = (0, NAP_MIN);
    let mut wish = |wish: Wish| _ = advice.wishes.add(wish);
    while !shared.signals.stopped() {
        let now = shared.elapsed().as_millis() as u64;
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
            desk.hear(&event, &mut wish);
            heard += 1;
        }
        let counts: Counts = desk.counts();
        advice.note_counts(counts, late);
        if counts.dismissed {
            let why = desk.last_failure().map(ToString::to_string);
            return Some(format!("it failed {} times: {}", counts.failures, why?));
        }
        if heard < EVENTS_A_TURN {
            nap = if heard > 0 {
                NAP_MIN
            } else {
                NAP_MAX.min(2 * nap)
            };
            std::thread::sleep(nap);
        }
    }
    None
}

impl Evictor {
    /// Takes the oldest wishes of the plugin: twice as many as a batch, because some are of pages
    /// that have left meanwhile. None if there is no plugin.
    pub(super) fn take_wishes(&self) -> Vec<(SpaceId, VirtPage)> {
        let Some(advice) = &self.shared.books.advice else {
            return Vec::new(); // no memory is taken
        };
        let next = std::iter::from_fn(|| advice.wishes.next());
        let wishes: Vec<_> = (next.take(WISHES_A_BATCH))
            .map(|wish| (wish.space, wish.page))
            .collect();
        advice.note_wishes(wishes.len());
        wishes
    }
}
