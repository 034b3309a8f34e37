//! Runs a storm, or many on several threads, and reports how each ended.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use undercroft_base::{VirtPage, VirtRange};

use super::meddler::{MakePolicy, meddler};
use super::recipe::Recipe;
use super::setup::StormSetup;
use super::world::World;

/// Most steps for each operation asked for: ends a storm whose world has stopped.
const STEPS_PER_OPERATION: u64 = 20;

/// The counts of a storm.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Storms.
    pub seeds: u64,
    /// Steps taken.
    pub steps: u64,
    /// Accesses, decisions, pages installed, taken, stored and published, events: outside calm
    /// phases.
    pub operations: u64,
    /// Pages touched by the programs.
    pub accesses: u64,
    /// How often each case was met.
    pub seen: BTreeMap<&'static str, u64>,
}

impl Tally {
    /// Adds another's numbers.
    pub fn add(&mut self, other: &Tally) {
        self.seeds += other.seeds;
        self.steps += other.steps;
        self.operations += other.operations;
        self.accesses += other.accesses;
        for (what, times) in &other.seen {
            *self.seen.entry(what).or_default() += times;
        }
    }
}

/// An assertion that failed: of the engine, of a policy, or of the world that checks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// File and line. The same bug fails at the same place.
    pub place: String,
    /// Its message.
    pub message: String,
    /// The step in which it failed. One past the last step: the final check failed.
    pub step: u64,
    /// The events before it, oldest first.
    pub history: Vec<String>,
}

/// How a storm ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its counts.
    pub tally: Tally,
    /// The storm to run to see it again.
    pub recipe: Recipe,
    /// Why it failed, if it did.
    pub failure: Option<Failure>,
}

/// Runs the storm of `setup` until `operations` have been done.
pub fn run(setup: &StormSetup, operations: u64) -> Ended {
    run_with(setup, operations, meddler)
}

/// As [`run`], with another policy in the place of the plugin that names pages at random.
pub fn run_with(setup: &StormSetup, operations: u64, policy: MakePolicy) -> Ended {
    let mut next = 0;
    let most = operations.saturating_mul(STEPS_PER_OPERATION);
    let (tally, failure) = drive(setup, policy, |world| {
        let go_on = world.operations < operations && next < most;
        go_on.then(|| {
            next += 1;
            next - 1
        })
    });
    let steps = match &failure {
        Some(failure) => (0..next.min(failure.step + 1)).collect(),
        None => (0..next).collect(),
    };
    Ended {
        tally,
        recipe: Recipe {
            setup: setup.clone(),
            steps,
        },
        failure,
    }
}

/// Runs exactly the steps of `recipe`.
pub fn replay(recipe: &Recipe) -> Ended {
    let mut steps = recipe.steps.iter().copied();
    let (tally, failure) = drive(&recipe.setup, meddler, |_| steps.next());
    Ended {
        tally,
        recipe: recipe.clone(),
        failure,
    }
}

fn drive(
    setup: &StormSetup,
    policy: MakePolicy,
    mut next: impl FnMut(&World) -> Option<u64>,
) -> (Tally, Option<Failure>) {
    let mut world = World::with_policy(setup.clone(), policy);
    let mut taken = 0;
    let panicked = capture(|| {
        let proc = world.spawn();
        for _ in 0..world.setup.program_threads {
            world.add_thread(proc);
        }
        world.map_attached(proc, VirtRange::new(VirtPage(100), VirtPage(400)));
        world.set_failures(true);
        while let Some(step) = next(&world) {
            taken += 1;
            world.take_step(step);
        }
        world.end();
    });
    let failure = panicked.map(|(place, message)| Failure {
        place,
        message,
        step: world.steps,
        history: world.history.iter().cloned().collect(),
    });
    for at in 0..world.tiers.len() {
        for (what, times) in world.tiers[at].take_struck() {
            *world.seen.entry(what).or_default() += times;
        }
    }
    let tally = Tally {
        seeds: 1,
        steps: taken,
        operations: world.operations,
        accesses: world.accesses,
        seen: std::mem::take(&mut world.seen),
    };
    if failure.is_some() {
        // The world is broken: even dropping it may panic.
        std::mem::forget(world);
    }
    (tally, failure)
}

thread_local! {
    /// While this thread runs a storm: place and message of the last panic.
    static CAUGHT: RefCell<Option<(String, String)>> = const { RefCell::new(None) };
    static CAPTURING: RefCell<bool> = const { RefCell::new(false) };
}

/// Runs `act`. Returns where and why it panicked, if it did. Nothing is printed.
fn capture(act: impl FnOnce()) -> Option<(String, String)> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !CAPTURING.with(|capturing| *capturing.borrow()) {
                return before(panic);
            }
            let place = panic.location().map_or(String::new(), |location| {
                // The path is the same, whatever folder the file was compiled in.
                let file = location.file().replace('\\', "/");
                let short = file
                    .rsplit_once("crates/")
                    .map_or(&*file, |(_, short)| short);
                format!("{short}:{}", location.line())
            });
            let message = message_of(panic.payload());
            CAUGHT.with(|caught| *caught.borrow_mut() = Some((place, message)));
        }));
    });
    CAPTURING.with(|capturing| *capturing.borrow_mut() = true);
    let done = catch_unwind(AssertUnwindSafe(act));
    CAPTURING.with(|capturing| *capturing.borrow_mut() = false);
    let caught = CAUGHT.with(|caught| caught.borrow_mut().take());
    match done {
        Ok(()) => None,
        Err(payload) => {
            Some(caught.unwrap_or_else(|| (String::new(), message_of(payload.as_ref()))))
        }
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Runs the storms of `seeds` on `threads` threads, each of `operations` operations.
///
/// * `change`: a change that is made to every setup.
/// * `done`: called for each storm that ended, by one thread at a time.
///
/// Goes on after a failure while `done` returns true.
pub fn run_seeds(
    seeds: std::ops::Range<u64>,
    operations: u64,
    threads: usize,
    change: impl Fn(&mut StormSetup) + Sync,
    done: impl FnMut(&Ended) -> bool + Send,
) -> Tally {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new((Tally::default(), done));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let mut setup = StormSetup::of_seed(seed);
                    change(&mut setup);
                    let ended = run(&setup, operations);
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    let (tally, done) = &mut *total;
                    tally.add(&ended.tally);
                    if !done(&ended) {
                        next.store(seeds.end, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner).0
}
