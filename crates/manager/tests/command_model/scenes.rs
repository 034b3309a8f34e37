//! The scenes of the model: what each thread does to one command page, and what must hold in every
//! interleaving.
//!
//! `loom` has cells that fail when two threads use one and nothing orders the two uses. What the
//! protocol guards is in such cells. A thread that never ends is a deadlock, which fails too.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*};

use loom::cell::UnsafeCell;
use loom::sync::RwLock;
use loom::thread;

use crate::memory::{Broken, Made, Page, Side, accesses_made};
use undercroft_wire::command::{self, CommandWords, Waited, Word};

/// The agent's thread id.
const AGENT: u32 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    /// Commands, and nothing else.
    Commands,
    /// A command while layout events are acknowledged.
    Events,
    /// As before, with two events.
    EventsTwice,
    /// Commands while a thread of the program forks.
    Fork,
    /// Two threads fork.
    Forks,
    /// A thread forks while the agent moves pages.
    ForkAndCommand,
    /// The agent is not there yet.
    Late,
    /// The agent dies: 0 before it sees its command, 1 inside a MOVE, 2 before it answers.
    Death(u32),
    /// An agent starts.
    Start,
    /// The evictor gives up a command.
    GivenUp,
    /// A thread forks while the evictor gives up a command.
    GivenUpInFork,
    /// The reader loses its patience with the agent.
    LeftUnread,
    /// A thread gives memory of a guest back.
    GivesBack,
}

pub(crate) const ALL: [Scene; 15] = [
    Scene::Commands,
    Scene::Events,
    Scene::EventsTwice,
    Scene::Fork,
    Scene::Forks,
    Scene::ForkAndCommand,
    Scene::Late,
    Scene::Death(0),
    Scene::Death(1),
    Scene::Death(2),
    Scene::Start,
    Scene::GivenUp,
    Scene::GivenUpInFork,
    Scene::LeftUnread,
    Scene::GivesBack,
];

/// Errors of a caller, or of the protocol itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    AsItIs,
    /// The agent asks whether its command is cancelled before it keeps the reader out.
    CancelledSeenEarly,
    /// The agent asks whether the reader wants to read before it says that it moves.
    LooksThenSets,
    /// The reader lets the agent go on before the event is in the books.
    AdmitsEarly,
    /// The reader does not keep the agent out.
    ExcludesNobody,
    /// The command is posted without the layout lock.
    PostsUnlocked,
    /// The fork gate opens before the pages are published.
    ReleasesEarly,
    /// The evictor asks whether a fork is under way before it claims.
    ClaimLooksThenSets,
    /// The thread that forks asks whether pages are in hand before it says that it forks.
    ForkLooksThenSets,
    /// A command is posted although no agent has started.
    PostsUnclaimed,
    /// The result of a command that was given up is read before the answer comes.
    SettlesEarly,
    /// The fork gate opens when a command is given up.
    ReleasesGivenUp,
    /// A reader that has lost its patience with the agent reads all the same.
    ReadsAnyway,
}

/// Something that threads use in turn. If a thread uses it while another may be using it, the model
/// fails.
struct Guarded {
    turn: UnsafeCell<()>,
    value: AtomicU32,
}

impl Guarded {
    /// `Rc`, because all threads of a model are one to the system.
    fn new() -> Rc<Guarded> {
        let (turn, value) = (UnsafeCell::new(()), AtomicU32::new(0));
        Rc::new(Guarded { turn, value })
    }

    fn get(&self) -> u32 {
        self.turn.with(|_| self.value.load(Relaxed))
    }

    fn set(&self, value: u32) {
        self.turn.with_mut(|_| self.value.store(value, Relaxed));
    }

    /// Uses it as a writer does.
    fn change(&self) -> u32 {
        self.turn.with_mut(|_| self.value.load(Relaxed))
    }
}

/// The outcome of a scene that was run in every interleaving.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The scene held in this many interleavings.
    Held(usize),
    /// Two threads used something at once that they must use in turn.
    Race,
    /// No thread can go on.
    Hang,
    /// An assertion of the scene failed.
    Wrong(String),
}

/// Threads of this name panic without a message, and without the second that a backtrace takes: the
/// outcome has the message.
const MODEL: &str = "model";
static HUSH: std::sync::Once = std::sync::Once::new();

impl Scene {
    /// Most context switches forced upon threads that could go on. More would take longer than
    /// seconds; `LOOM_MAX_PREEMPTIONS` sets another number.
    fn preemptions(self) -> usize {
        match self {
            Scene::EventsTwice => 2,
            Scene::Events | Scene::Forks | Scene::ForkAndCommand | Scene::Death(1..) => 3,
            Scene::Commands | Scene::Fork | Scene::GivesBack => 5,
            Scene::GivenUp | Scene::GivenUpInFork | Scene::LeftUnread => 3,
            Scene::Late | Scene::Death(_) | Scene::Start => 8,
        }
    }

    /// Runs the scene in every interleaving, until one fails. Also returns the accesses that were
    /// made, if the scene is not broken.
    pub(crate) fn run(self, broken: Broken, variant: Variant) -> (Outcome, Vec<Made>) {
        self.run_with(self.preemptions(), broken, variant)
    }

    /// As [`Scene::run`] without a variant, with one forced switch less: ten times as fast.
    pub(crate) fn run_briefly(self, broken: Broken) -> Outcome {
        self.run_with(self.preemptions() - 1, broken, Variant::AsItIs)
            .0
    }

    fn run_with(
        self,
        preemptions: usize,
        broken: Broken,
        variant: Variant,
    ) -> (Outcome, Vec<Made>) {
        let ways = Arc::new(AtomicUsize::new(0));
        let count = ways.clone();
        let all = move || {
            let mut model = loom::model::Builder::new();
            model.preemption_bound.get_or_insert(preemptions);
            model.check(move || {
                count.fetch_add(1, Relaxed);
                match self {
                    Scene::Commands => commands(broken),
                    Scene::Events => events(broken, variant, 1),
                    Scene::EventsTwice => events(broken, variant, 2),
                    Scene::Fork => fork(broken, variant, 1),
                    Scene::Forks => fork(broken, variant, 2),
                    Scene::ForkAndCommand => fork_and_command(broken),
                    Scene::Late => late(broken, variant),
                    Scene::Death(stage) => death(broken, stage),
                    Scene::Start => start(broken),
                    Scene::GivenUp => given_up(broken, variant, false),
                    Scene::GivenUpInFork => given_up(broken, variant, true),
                    Scene::LeftUnread => left_unread(broken, variant),
                    Scene::GivesBack => gives_back(broken),
                }
            });
            accesses_made()
        };
        // A thread of its own, because a failure may leave what `loom` keeps for each thread in
        // disorder.
        HUSH.call_once(|| {
            let loud = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                if std::thread::current().name() != Some(MODEL) {
                    loud(panic);
                }
            }));
        });
        let thread = std::thread::Builder::new().name(MODEL.into());
        let thread = thread.spawn(all).expect("a thread");
        let panic = match thread.join() {
            Ok(made) => return (Outcome::Held(ways.load(Relaxed)), made),
            Err(panic) => panic,
        };
        let text = match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(panic) => panic
                .downcast::<&str>()
                .map_or_else(|_| "?".into(), |text| text.to_string()),
        };
        let outcome = match &text {
            text if text.contains("Causality violation") => Outcome::Race,
            text if text.contains("deadlock") => Outcome::Hang,
            _ => Outcome::Wrong(text),
        };
        (outcome, Vec::new())
    }
}

/// A page whose agent runs.
fn page_with_agent(broken: Broken) -> Arc<Page> {
    let page = Page::new(broken);
    page.side().agent_is(AGENT);
    page
}

/// Whether the agent lives, as the kernel has it.
fn lives(side: &Side) -> bool {
    side.load(Word::Agent, Acquire) != 0
}

/// Waits as long as it takes.
fn waits(side: &Side, seq: u32) -> Waited {
    command::wait(side, seq, || lives(side), || true)
}

/// The agent waits for a command, and for nothing else.
fn next_command(side: &Side, last: u32) -> u32 {
    command::next_command(side, last, |last| side.wait(Word::Seq, last, None))
}

/// Carries out `count` commands. `act` gets the number of each.
fn agent(side: &Side, count: usize, said: &Guarded, result: &Guarded, act: impl Fn(u32)) {
    let mut seq = 0;
    for _ in 0..count {
        seq = next_command(side, seq);
        let words = said.get();
        act(seq);
        result.set(words);
        command::answer(side, seq);
    }
}

/// A thread with an agent that moves the pages of one command.
fn moving_agent(
    page: &Arc<Page>,
    said: &Rc<Guarded>,
    result: &Rc<Guarded>,
    memory: &Rc<Guarded>,
) -> thread::JoinHandle<()> {
    let (page, memory) = (page.clone(), memory.clone());
    let (said, result) = (said.clone(), result.clone());
    thread::spawn(move || {
        let side = page.side();
        agent(&side, 1, &said, &result, |seq| {
            command::between_events(&side, seq, || memory.set(1));
        });
    })
}

/// Each command is carried out once, with its own words, and answered. The answer has the result of
/// that command.
fn commands(broken: Broken) {
    const COMMANDS: usize = 2;
    let page = page_with_agent(broken);
    let (said, result) = (Guarded::new(), Guarded::new());
    let agent_thread = {
        let (page, said, result) = (page.clone(), said.clone(), result.clone());
        thread::spawn(move || agent(&page.side(), COMMANDS, &said, &result, |_| ()))
    };
    let side = page.side();
    for number in 0..COMMANDS as u32 {
        assert!(command::claim(&side));
        let seq = command::post(&side, || said.set(10 + number));
        assert_eq!(waits(&side, seq), Waited::Answered);
        assert_eq!(
            result.get(),
            10 + number,
            "the result is of another command"
        );
        command::release(&side);
    }
    agent_thread.join().expect("the agent ends");
}

/// While an event is acknowledged, the agent is in no MOVE. After an event that cancels its
/// command, it starts no MOVE for that command.
fn events(broken: Broken, variant: Variant, events: usize) {
    const MOVES: usize = 2;
    let page = page_with_agent(broken);
    let layout = Arc::new(RwLock::new(()));
    let (said, result) = (Guarded::new(), Guarded::new());
    // The number of the command whose pages an event has dropped. Used by MOVEs and
    // acknowledgements.
    let dropped = Guarded::new();
    let posted = Arc::new(AtomicU32::new(0));
    let agent_thread = {
        let (page, said, result) = (page.clone(), said.clone(), result.clone());
        let dropped = dropped.clone();
        thread::spawn(move || {
            let side = page.side();
            let one_move = |seq| assert_ne!(dropped.change(), seq, "moved after the event");
            agent(&side, 1, &said, &result, |seq| {
                for _ in 0..MOVES {
                    let done = match variant {
                        Variant::CancelledSeenEarly => {
                            if side.load(Word::Cancelled, Acquire) == seq {
                                None
                            } else {
                                command::between_events(&side, 0, || one_move(seq))
                            }
                        }
                        Variant::LooksThenSets => {
                            while side.load(Word::ReaderWants, SeqCst) != 0 {
                                side.pause(true);
                            }
                            side.store(Word::Busy, 1, SeqCst);
                            one_move(seq);
                            side.store(Word::Busy, 0, SeqCst);
                            side.wake(Word::Busy, 1);
                            Some(())
                        }
                        _ => command::between_events(&side, seq, || one_move(seq)),
                    };
                    if done.is_none() {
                        break;
                    }
                }
            });
        })
    };
    let reader = {
        let (page, layout, posted) = (page.clone(), layout.clone(), posted.clone());
        thread::spawn(move || {
            let side = page.side();
            for _ in 0..events {
                let _layout = layout.write().expect("nobody panics and goes on");
                if variant != Variant::ExcludesNobody {
                    assert!(command::exclude_agent(&side, || lives(&side), || true));
                }
                if variant == Variant::AdmitsEarly {
                    command::admit_agent(&side);
                }
                dropped.set(posted.load(Relaxed));
                command::cancel(&side);
                command::admit_agent(&side);
            }
        })
    };
    let side = page.side();
    assert!(command::claim(&side));
    let locked = match variant {
        Variant::PostsUnlocked => None,
        _ => Some(layout.read().expect("nobody panics and goes on")),
    };
    let seq = command::post(&side, || {
        said.set(10);
        posted.store(1, Relaxed);
    });
    assert_eq!(seq, 1);
    drop(locked);
    assert_eq!(waits(&side, seq), Waited::Answered);
    assert_eq!(result.get(), 10);
    command::release(&side);
    agent_thread.join().expect("the agent ends");
    reader.join().expect("the reader ends");
}

/// No page is between selected and published while a fork copies the address space. Both go on in
/// the end.
fn fork(broken: Broken, variant: Variant, forks: usize) {
    let page = page_with_agent(broken);
    let memory = Guarded::new();
    let forking = |_| {
        let (page, memory) = (page.clone(), memory.clone());
        thread::spawn(move || {
            let side = page.side();
            if variant == Variant::ForkLooksThenSets {
                while side.load(Word::InHand, SeqCst) != 0 {
                    side.pause(true);
                }
                side.add(Word::Forking, 1);
            } else {
                command::before_fork(&side);
            }
            assert_eq!(memory.get(), 0, "a page is on its way out");
            command::after_fork(&side);
        })
    };
    let threads: Vec<_> = (0..forks).map(forking).collect();
    let side = page.side();
    for round in 0..3 - forks {
        let claimed = match variant {
            Variant::ClaimLooksThenSets => {
                let free = side.load(Word::Forking, SeqCst) == 0;
                if free {
                    side.store(Word::InHand, 1, SeqCst);
                }
                free
            }
            _ => command::claim(&side),
        };
        if !claimed {
            continue;
        }
        memory.set(1);
        if variant == Variant::ReleasesEarly {
            command::release(&side);
            memory.set(0);
            continue;
        }
        // The next group is claimed before this one is published.
        let next = forks == 1 && round == 0 && command::claim(&side);
        memory.set(0);
        command::release(&side);
        if next {
            memory.set(1);
            memory.set(0);
            command::release(&side);
        }
    }
    for thread in threads {
        thread.join().expect("the fork ends");
    }
}

/// As `fork`, with the agent that moves the pages.
fn fork_and_command(broken: Broken) {
    let page = page_with_agent(broken);
    let (said, result, memory) = (Guarded::new(), Guarded::new(), Guarded::new());
    let agent_thread = moving_agent(&page, &said, &result, &memory);
    let forking = {
        let (page, memory) = (page.clone(), memory.clone());
        thread::spawn(move || {
            let side = page.side();
            command::before_fork(&side);
            assert_eq!(memory.get(), 0, "a page is on its way out");
            command::after_fork(&side);
        })
    };
    let side = page.side();
    let mut forking = Some(forking);
    if !command::claim(&side) {
        // Trying again at once could go on for ever, in theory: each try holds up the fork that it
        // waits for.
        let forking = forking.take().expect("one fork");
        forking.join().expect("the fork ends");
        assert!(command::claim(&side), "nobody forks any more");
    }
    let seq = command::post(&side, || said.set(10));
    assert_eq!(waits(&side, seq), Waited::Answered);
    assert_eq!(memory.get(), 1, "the page was not moved");
    memory.set(0);
    command::release(&side);
    agent_thread.join().expect("the agent ends");
    if let Some(forking) = forking {
        forking.join().expect("the fork ends");
    }
}

/// A command is not carried out after it was given up: none is posted to an agent that has not
/// started.
fn late(broken: Broken, variant: Variant) {
    let page = Page::new(broken);
    let given_up = Arc::new(AtomicBool::new(false));
    let agent_thread = {
        let (page, given_up) = (page.clone(), given_up.clone());
        thread::spawn(move || {
            let side = page.side();
            side.agent_is(AGENT);
            let (said, result) = (Guarded::new(), Guarded::new());
            agent(&side, 1, &said, &result, |_| {
                assert!(!given_up.load(Relaxed), "carried out after it was given up");
            });
        })
    };
    let side = page.side();
    while variant != Variant::PostsUnclaimed && !command::claim(&side) {
        thread::yield_now();
    }
    let seq = command::post(&side, || ());
    if waits(&side, seq) == Waited::Gone {
        given_up.store(true, Relaxed);
    }
    command::release(&side);
    agent_thread.join().expect("the agent ends");
}

/// No thread waits for an agent that died (limits pass then), and a dead agent does nothing after
/// its command was given up.
fn death(broken: Broken, stage: u32) {
    let page = page_with_agent(broken);
    let layout = Arc::new(RwLock::new(()));
    let given_up = Arc::new(AtomicBool::new(false));
    // Used by MOVEs and acknowledgements.
    let memory = Guarded::new();
    let agent_thread = {
        let (page, given_up, memory) = (page.clone(), given_up.clone(), memory.clone());
        thread::spawn(move || {
            let side = page.side();
            if stage > 0 {
                let seq = next_command(&side, 0);
                if stage == 1 {
                    // What `between_events` does until it has the right to move, and no more.
                    command::exclude_reader(&side);
                } else {
                    command::between_events(&side, seq, || memory.set(1));
                }
            }
            assert!(!given_up.load(Relaxed), "still there after it was given up");
            side.agent_is(0);
            side.time_passes(Word::Done);
            side.time_passes(Word::Busy);
        })
    };
    let reader = {
        let (page, layout) = (page.clone(), layout.clone());
        thread::spawn(move || {
            let side = page.side();
            let _layout = layout.write().expect("nobody panics and goes on");
            assert!(command::exclude_agent(&side, || lives(&side), || true));
            memory.set(2);
            command::admit_agent(&side);
        })
    };
    let side = page.side();
    if command::claim(&side) {
        let locked = layout.read().expect("nobody panics and goes on");
        let seq = command::post(&side, || ());
        drop(locked);
        assert_eq!(waits(&side, seq), Waited::Gone, "nobody answered");
        given_up.store(true, Relaxed);
        command::release(&side);
    }
    agent_thread.join().expect("the agent ends");
    reader.join().expect("the reader ends");
}

/// A thread that starts an agent goes on when the agent has what it needs, and only then.
fn start(broken: Broken) {
    let page = Page::new(broken);
    let descriptors = Guarded::new();
    let agent_thread = {
        let (page, descriptors) = (page.clone(), descriptors.clone());
        thread::spawn(move || {
            descriptors.get();
            command::announce(&page.side());
        })
    };
    assert!(command::wait_for_agent(&page.side(), || true));
    descriptors.set(1); // closed
    agent_thread.join().expect("the agent ends");
}

/// A command is given up at any time. Its result is read when its answer comes, and not before.
///
/// * `forks`: no fork copies the address space until then.
fn given_up(broken: Broken, variant: Variant, forks: bool) {
    let page = page_with_agent(broken);
    let (said, result, memory) = (Guarded::new(), Guarded::new(), Guarded::new());
    let agent_thread = moving_agent(&page, &said, &result, &memory);
    let side = page.side();
    assert!(command::claim(&side), "nobody forks yet");
    let forking = forks.then(|| {
        let (page, memory) = (page.clone(), memory.clone());
        thread::spawn(move || {
            let side = page.side();
            command::before_fork(&side);
            assert_eq!(memory.get(), 0, "a page is on its way out");
            command::after_fork(&side);
        })
    });
    let seq = command::post(&side, || said.set(10));
    if command::wait(&side, seq, || lives(&side), || false) == Waited::Late {
        command::give_up(&side, seq);
        if variant == Variant::ReleasesGivenUp {
            command::release(&side);
        }
        while variant != Variant::SettlesEarly && !command::is_answered(&side, seq) {
            thread::yield_now();
        }
    }
    assert_eq!(result.get(), 10, "the result is of another command");
    memory.set(0);
    command::release(&side);
    agent_thread.join().expect("the agent ends");
    if let Some(forking) = forking {
        forking.join().expect("the fork ends");
    }
}

/// A reader that finds the agent at work and loses its patience acknowledges nothing, and may come
/// back.
fn left_unread(broken: Broken, variant: Variant) {
    let page = page_with_agent(broken);
    let layout = Arc::new(RwLock::new(()));
    let (said, result) = (Guarded::new(), Guarded::new());
    // Used by MOVEs and acknowledgements.
    let memory = Guarded::new();
    let agent_thread = moving_agent(&page, &said, &result, &memory);
    let reader = {
        let (page, layout) = (page.clone(), layout.clone());
        thread::spawn(move || {
            let side = page.side();
            let _layout = layout.write().expect("nobody panics and goes on");
            let excluded = command::exclude_agent(&side, || lives(&side), || false);
            if excluded || variant == Variant::ReadsAnyway {
                memory.set(2);
                command::admit_agent(&side);
            }
        })
    };
    let side = page.side();
    assert!(command::claim(&side));
    let locked = layout.read().expect("nobody panics and goes on");
    let seq = command::post(&side, || said.set(10));
    drop(locked);
    assert_eq!(waits(&side, seq), Waited::Answered);
    assert_eq!(result.get(), 10);
    command::release(&side);
    agent_thread.join().expect("the agent ends");
    reader.join().expect("the reader ends");
}

/// Each range that is given back is acted on once, before the thread that gives it back goes on.
fn gives_back(broken: Broken) {
    const RANGES: usize = 2;
    let page = Page::new(broken);
    let (said, books) = (Guarded::new(), Guarded::new());
    let manager = {
        let (page, said, books) = (page.clone(), said.clone(), books.clone());
        thread::spawn(move || {
            let (side, mut last) = (page.side(), 0);
            for _ in 0..RANGES {
                let told = command::next_told(&side, last, |last| {
                    side.wait(Word::Told, last, None);
                    true
                });
                last = told.expect("it sleeps until it is told");
                books.set(said.get());
                command::heard(&side, last);
            }
        })
    };
    let side = page.side();
    for number in 0..RANGES as u32 {
        command::tell(&side, || said.set(10 + number));
        assert_eq!(books.change(), 10 + number, "acted on another range");
    }
    manager.join().expect("it ends");
}
