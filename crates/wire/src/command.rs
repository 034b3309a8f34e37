//! The protocol of the command page, both halves: what the manager, the agent and forking threads
//! do to its words, and in which order.
//!
//! Compiled into the shim and the manager. A model runs these same functions through all
//! interleavings and stale reads that the memory model allows
//! (`crates/manager/tests/command_model`). `no_std`: only `core`. Nothing here knows what a command
//! says or how it is carried out. These functions only say when the callers may touch it.
//!
//! There are two exclusions, each by Dekker's algorithm: a side sets its word, then reads the other
//! side's word. All of it is sequentially consistent, so at least one of the two sides sees the
//! other.
//!
//! - Reader and agent: `reader_wants` ([`exclude_agent`]) against `busy`
//!   ([`between_events`]). The agent is inside no MOVE while an event is acknowledged. An
//!   event about pages of the batch also sets `cancelled`. The reader waits for at most 8 MOVEs of
//!   together 16 pages; it sleeps if that takes longer than some 20 us, for 2 ms in all.
//! - Fork gate: `forking` (the atfork handlers) against `in_hand` (`claim`, `release`). No page of
//!   the process is between taken out and published while fork() copies the address space.
//!
//! A range that is given back is told by [`tell`], and taken by [`next_told`] and [`heard`]: one
//! side writes `told`, the other `heard`.
//!
//! An agent without a command is not excluded. One that has not started gets no command: it might
//! carry the command out after the manager has given it up.

use core::sync::atomic::Ordering::{self, *};
use core::time::Duration;

/// The words that decide which side may do what. Each is the field of [`CommandPage`] of that name.
///
/// [`CommandPage`]: crate::protocol::CommandPage
#[allow(missing_docs, reason = "the fields of the page say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    Seq,
    Done,
    Agent,
    Busy,
    ReaderWants,
    Cancelled,
    Forking,
    InHand,
    Ready,
    Told,
    Heard,
}

/// Needs of the protocol from its memory and from the kernel. Seven methods: each is one operation
/// that the model replaces, and joining two would hide a memory order from it.
pub trait CommandWords {
    /// An atomic load.
    fn load(&self, word: Word, order: Ordering) -> u32;
    /// An atomic store.
    fn store(&self, word: Word, value: u32, order: Ordering);
    /// Adds `value`, wrapping; sequentially consistent.
    fn add(&self, word: Word, value: u32);
    /// Sleeps while `word` is `expected`, until it is woken, or for `limit`. May return without a
    /// reason. A full barrier before `word` is read.
    fn wait(&self, word: Word, expected: u32, limit: Option<Duration>);
    /// Wakes up to `count` threads that sleep on `word`. A full barrier before that.
    fn wake(&self, word: Word, count: u32);
    /// A moment between two looks at a word; `long`: others may have the processor.
    fn pause(&self, long: bool);
    /// How often to poll before something slower is done. The model polls only a few times.
    #[inline(always)]
    fn looks(most: u32) -> u32 {
        most
    }
}

/// Value of [`Word::ReaderWants`]: the reader sleeps until [`Word::Busy`] is cleared.
pub const READER_SLEEPS: u32 = 2;

/// Longest wait for an agent before the caller checks whether its process still lives, and whether
/// to go on waiting.
const PATIENCE: Duration = Duration::from_millis(5);

/// How often to poll a busy agent before sleeping until it is done: some 20 us, its usual time.
const EXCLUDE_LOOKS: u32 = 800;

/// Longest sleep until a busy agent is polled again.
const NAP: Duration = Duration::from_millis(1);

/// How often to poll the fork gate before sleeping.
const FORK_LOOKS: u32 = 100;

/// How often a thread polls that has told of a range, before it sleeps: some 20 us.
const HEARD_LOOKS: u32 = 800;

/// How often to poll the reader before yielding the CPU between polls. By then it has read a few
/// messages, or lost its CPU.
const READER_LOOKS: u32 = 2000;

/// Every thread that sleeps.
const ALL: u32 = u32::MAX >> 1;

// The manager's half.

/// Claims the right to take pages out: fork() in the program waits until [`release`]. False while
/// the program is inside fork(), and while it has no running agent: try later. An agent that is
/// still to start would carry out a command long after it was given up.
///
/// The right may be claimed more than once: `in_hand` counts.
#[inline]
pub fn claim(page: &impl CommandWords) -> bool {
    if page.load(Word::Agent, Acquire) == 0 {
        return false;
    }
    page.add(Word::InHand, 1);
    if page.load(Word::Forking, SeqCst) == 0 {
        return true;
    }
    release(page);
    false
}

/// The pages that were moved out by one claim have been read and published.
#[inline]
pub fn release(page: &impl CommandWords) {
    page.add(Word::InHand, u32::MAX);
    wake_forks(page);
}

/// As [`release`], whatever was claimed by a manager that is dead.
pub fn release_all(page: &impl CommandWords) {
    page.store(Word::InHand, 0, SeqCst);
    wake_forks(page);
}

#[inline]
fn wake_forks(page: &impl CommandWords) {
    if page.load(Word::Forking, SeqCst) != 0 {
        page.wake(Word::InHand, ALL);
    }
}

/// Posts a command, which `write` writes down. Returns its number. One command at a time, between
/// [`claim`] and [`release`]: the one before is answered. The caller has checked each page, and has
/// held the layout lock for reading since. So events acknowledged before are known, and an event
/// acknowledged later cancels this command. [`wait`] wakes the agent.
#[inline]
pub fn post(page: &impl CommandWords, write: impl FnOnce()) -> u32 {
    write();
    let seq = page.load(Word::Seq, Relaxed).wrapping_add(1);
    page.store(Word::Seq, seq, SeqCst);
    seq
}

/// Outcomes of waiting for an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The command is answered.
    Answered,
    /// The agent died.
    Gone,
    /// The caller lost its patience.
    Late,
}

/// Wakes the agent for command `seq` and waits for the answer. `alive` and `patient` are asked now
/// and then. `alive` is the kernel's word, not that of the page: any thread of the program may
/// write there. The caller holds no lock: the agent may take the caller's CPU at once, for the
/// whole command.
#[inline]
pub fn wait(
    page: &impl CommandWords,
    seq: u32,
    alive: impl Fn() -> bool,
    patient: impl Fn() -> bool,
) -> Waited {
    page.wake(Word::Seq, 1);
    loop {
        let done = page.load(Word::Done, Acquire);
        if done == seq {
            return Waited::Answered;
        }
        if !alive() {
            return Waited::Gone;
        }
        if !patient() {
            return Waited::Late;
        }
        page.wait(Word::Done, done, Some(PATIENCE));
    }
}

/// Gives command `seq` up after [`Waited::Late`]: the agent starts no further MOVE of it once it
/// sees this. Before [`is_answered`], it is unknown which pages have moved. Until then the pages
/// are on their way out, the gate stays shut for fork(), and no other command may be posted.
#[inline]
pub fn give_up(page: &impl CommandWords, seq: u32) {
    page.store(Word::Cancelled, seq, Release);
}

/// Whether command `seq` is answered: then, and not before, its result may be read.
#[inline]
pub fn is_answered(page: &impl CommandWords, seq: u32) -> bool {
    page.load(Word::Done, Acquire) == seq
}

/// The command in progress must move no more pages. Called between [`exclude_agent`] and
/// [`admit_agent`], so it takes effect before the next page.
#[inline]
pub fn cancel(page: &impl CommandWords) {
    let seq = page.load(Word::Seq, Acquire);
    page.store(Word::Cancelled, seq, Release);
}

/// True when the agent is moving no pages. It moves none before [`admit_agent`]. The caller holds
/// the layout lock for writing. Cost: two loads when the agent is idle; otherwise at most the work
/// given to [`between_events`].
///
/// False when the caller lost its patience, which is asked for now and then: the agent is in a
/// MOVE, or about to make one, and does not run. It may go on at any time, so no event may be
/// acknowledged. There is nothing to admit then.
#[inline]
pub fn exclude_agent<S: CommandWords>(
    page: &S,
    alive: impl Fn() -> bool,
    patient: impl Fn() -> bool,
) -> bool {
    if page.load(Word::Done, Acquire) == page.load(Word::Seq, Acquire) {
        return true; // it has no command, and gets none while the layout lock is held
    }
    page.store(Word::ReaderWants, 1, SeqCst);
    for _ in 0..S::looks(EXCLUDE_LOOKS) {
        if page.load(Word::Busy, SeqCst) == 0 {
            return true;
        }
        page.pause(false);
    }
    // It lost its CPU inside the MOVE, perhaps to this very thread, or died there.
    page.store(Word::ReaderWants, READER_SLEEPS, SeqCst);
    while page.load(Word::Busy, SeqCst) != 0 {
        if !alive() {
            return true;
        }
        if !patient() {
            admit_agent(page);
            return false;
        }
        page.wait(Word::Busy, 1, Some(NAP));
    }
    true
}

/// The manager waits for a range that is given back, other than the `last` one. Returns its number.
/// * `sleep`: waits at [`Word::Told`] while it is the number given. False: no more is to be heard.
#[inline]
pub fn next_told(
    page: &impl CommandWords,
    last: u32,
    mut sleep: impl FnMut(u32) -> bool,
) -> Option<u32> {
    loop {
        let told = page.load(Word::Told, Acquire);
        if told != last {
            return Some(told);
        }
        if !sleep(last) {
            return None;
        }
    }
}

/// The manager has acted on range `told`.
#[inline]
pub fn heard(page: &impl CommandWords, told: u32) {
    page.store(Word::Heard, told, Release);
    page.wake(Word::Heard, 1);
}

/// Lets the agent continue.
#[inline]
pub fn admit_agent(page: &impl CommandWords) {
    page.store(Word::ReaderWants, 0, Release);
}

// The program's half: its agent, and its forking threads.

/// Tells the thread that started the agent that the agent needs nothing more of it.
#[inline]
pub fn announce(page: &impl CommandWords) {
    page.store(Word::Ready, 1, Release);
    page.wake(Word::Ready, 1);
}

/// Waits for [`announce`]. False if `comes`, which is asked now and then, says that no agent was
/// made.
#[inline]
pub fn wait_for_agent(page: &impl CommandWords, mut comes: impl FnMut() -> bool) -> bool {
    while page.load(Word::Ready, Acquire) == 0 {
        if !comes() {
            return false;
        }
        page.wait(Word::Ready, 0, Some(PATIENCE));
    }
    true
}

/// The agent waits for a command other than `last`. Returns its number.
/// * `sleep`: waits at [`Word::Seq`] while it is the number given, and perhaps for more.
#[inline]
pub fn next_command(page: &impl CommandWords, last: u32, mut sleep: impl FnMut(u32)) -> u32 {
    loop {
        let seq = page.load(Word::Seq, Acquire);
        if seq != last {
            return seq;
        }
        sleep(last);
    }
}

/// Runs `act`, which carries out part of command `seq`, while the manager acknowledges no event.
/// `None`: the command is cancelled.
#[inline]
pub fn between_events<S: CommandWords, R>(
    page: &S,
    seq: u32,
    act: impl FnOnce() -> R,
) -> Option<R> {
    exclude_reader(page);
    let cancelled = page.load(Word::Cancelled, Acquire) == seq;
    let result = if cancelled { None } else { Some(act()) };
    admit_reader(page);
    result
}

/// The agent has written down what it did for command `seq`.
#[inline]
pub fn answer(page: &impl CommandWords, seq: u32) {
    page.store(Word::Done, seq, Release);
    page.wake(Word::Done, 1);
}

/// A thread that is about to fork waits until no page is being moved out. No page is moved out
/// before [`after_fork`].
#[inline]
pub fn before_fork<S: CommandWords>(page: &S) {
    page.add(Word::Forking, 1);
    let mut looks = 0;
    loop {
        let in_hand = page.load(Word::InHand, SeqCst);
        if in_hand == 0 {
            return;
        }
        looks += 1;
        if looks > S::looks(FORK_LOOKS) {
            page.wait(Word::InHand, in_hand, None);
        }
        page.pause(false);
    }
}

/// The fork is over, in the parent.
#[inline]
pub fn after_fork(page: &impl CommandWords) {
    page.add(Word::Forking, u32::MAX);
}

/// Tells the manager of a range that is given back, which `write` writes down, and waits until it
/// has acted on it, for as long as that takes: a manager that was told may act at any time, and
/// what the program writes there after this call must stay. One thread at a time.
#[inline]
pub fn tell<S: CommandWords>(page: &S, write: impl FnOnce()) {
    write();
    let told = page.load(Word::Told, Relaxed).wrapping_add(1);
    page.store(Word::Told, told, Release);
    page.wake(Word::Told, 1);
    let mut looks = 0;
    loop {
        let heard = page.load(Word::Heard, Acquire);
        if heard == told {
            return;
        }
        looks += 1;
        if looks > S::looks(HEARD_LOOKS) {
            page.wait(Word::Heard, heard, None);
        }
        page.pause(false);
    }
}

/// Sets [`Word::Busy`] while the manager is not reading messages. Half of [`between_events`].
#[inline]
pub fn exclude_reader<S: CommandWords>(page: &S) {
    loop {
        page.store(Word::Busy, 1, SeqCst);
        if page.load(Word::ReaderWants, SeqCst) == 0 {
            return;
        }
        admit_reader(page);
        let mut looks = 0;
        while page.load(Word::ReaderWants, Acquire) != 0 {
            looks += 1;
            page.pause(looks > S::looks(READER_LOOKS));
        }
    }
}

/// Clears [`Word::Busy`], and wakes the manager if it sleeps on it.
#[inline]
fn admit_reader(page: &impl CommandWords) {
    page.store(Word::Busy, 0, SeqCst);
    if page.load(Word::ReaderWants, SeqCst) == READER_SLEEPS {
        page.wake(Word::Busy, 1);
    }
}
