//! The manager's side of a command page: commands to the agent, and the exclusion of the agent
//! while layout events are acknowledged. The order of accesses to the words is in
//! `undercroft_wire::command`, which the client's side shares.

use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use undercroft_base::PageSize;
use undercroft_sys::futex;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::object::FileId;

use undercroft_wire::command::{self as both_sides, CommandWords, Waited, Word};
use undercroft_wire::protocol::{CPU_WORDS, CommandPage, QUIT, STAGING_PAGES, STAY};

/// Name of the memory by which an agent gets its commands. `maps` of its process show it.
pub(crate) const COMMAND_PAGE: &str = "uc-command";

/// The command page of an agent.
pub(crate) struct Commands(SharedMemory);

/// The agent's answer for the pages of a command; bit i = page i.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub moved: u64,
    pub refused: u64,
    /// Pages that were moved no further than the staging area.
    pub stranded: u64,
}

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotDone {
    /// The agent died.
    Gone,
    /// The caller stopped waiting. The command is cancelled, and its pages wait for
    /// [`Commands::answer_to`].
    GivenUp,
}

impl CommandWords for Commands {
    #[inline(always)]
    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.word(word).load(order)
    }

    #[inline(always)]
    fn store(&self, word: Word, value: u32, order: Ordering) {
        self.word(word).store(value, order);
    }

    #[inline(always)]
    fn add(&self, word: Word, value: u32) {
        self.word(word).fetch_add(value, Ordering::SeqCst);
    }

    #[inline(always)]
    fn wait(&self, word: Word, expected: u32, limit: Option<Duration>) {
        futex::wait(self.word(word), expected, limit);
    }

    #[inline(always)]
    fn wake(&self, word: Word, count: u32) {
        futex::wake(self.word(word), count);
    }

    #[inline(always)]
    fn pause(&self, long: bool) {
        if long {
            std::thread::yield_now()
        } else {
            std::hint::spin_loop()
        }
    }
}

impl AsFd for Commands {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Commands {
    pub(crate) fn new(page: SharedMemory) -> Commands {
        Commands(page)
    }

    #[inline(always)]
    fn word(&self, word: Word) -> &AtomicU32 {
        &self.0.halves()[CommandPage::offset(word) / 4]
    }

    fn pages(&self) -> &[AtomicU64] {
        &self.0.words()[offset_of!(CommandPage, pages) / 8..][..STAGING_PAGES]
    }

    /// The number of the last command that was posted.
    pub(crate) fn last(&self) -> u32 {
        self.load(Word::Seq, Ordering::Acquire)
    }

    /// Takes over from a dead manager. The command in progress is cancelled, and a reader of events
    /// no longer keeps the agent waiting.
    pub(crate) fn take_over(&self) {
        if !self.is_idle() {
            both_sides::give_up(self, self.last());
        }
        self.admit_agent();
        self.wake(Word::Seq, 1); // the dead manager may not have come so far
    }

    /// The agent's process id, as the program says. 0 before it starts, and once it is gone.
    pub(crate) fn agent(&self) -> u32 {
        self.load(Word::Agent, Ordering::Acquire)
    }

    /// Whether the agent was there, and is gone, or could not be made. False before it starts.
    pub(crate) fn agent_is_gone(&self) -> bool {
        // The first of the two words is set before the second can be cleared.
        self.load(Word::Ready, Ordering::Acquire) != 0 && self.agent() == 0
    }

    /// Wakes the agent without a command: it asks whether its program is gone.
    pub(crate) fn wake_agent(&self) {
        self.wake(Word::Seq, 1);
    }

    /// Whether the program ends, and has had its agent end first.
    pub(crate) fn has_quit(&self) -> bool {
        let at = offset_of!(CommandPage, quit) / 4;
        self.0.halves()[at].load(Ordering::Relaxed) == QUIT
    }

    /// Whether the shim is making the agent, by a process that has the memory meanwhile.
    pub(crate) fn is_starting(&self) -> bool {
        let at = offset_of!(CommandPage, starting) / 4;
        self.0.halves()[at].load(Ordering::Acquire) != 0
    }

    /// Another process has the memory: the agent stays when the program ends.
    pub(crate) fn stay(&self) {
        self.change_quit(0, STAY);
    }

    /// No other process has it: the agent ends with the program.
    pub(crate) fn stay_no_more(&self) {
        self.change_quit(STAY, 0);
    }

    fn change_quit(&self, from: u32, to: u32) {
        let quit = &self.0.halves()[offset_of!(CommandPage, quit) / 4];
        if quit.load(Ordering::Relaxed) == from {
            let _ = quit.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn bound_word(&self) -> &AtomicU32 {
        &self.0.halves()[offset_of!(CommandPage, bound) / 4]
    }

    /// The thread that is bound to one CPU. 0: none, or the program has chosen its CPUs itself.
    pub(crate) fn bound(&self) -> u32 {
        self.bound_word().load(Ordering::SeqCst)
    }

    /// Tells the shim that thread `tid`, which may use `cpus`, is about to be bound to one of them.
    pub(crate) fn bind(&self, tid: u32, cpus: &[usize]) {
        let words = &self.0.words()[offset_of!(CommandPage, cpus) / 8..][..CPU_WORDS];
        for (at, word) in words.iter().enumerate() {
            let bits = cpus.iter().filter(|cpu| *cpu / 64 == at);
            let set = bits.fold(0u64, |set, cpu| set | 1 << (cpu % 64));
            word.store(set, Ordering::Relaxed);
        }
        self.bound_word().store(tid, Ordering::SeqCst);
    }

    /// The CPUs of the thread that is bound, as they were before.
    pub(crate) fn bound_cpus(&self) -> Vec<usize> {
        let words = &self.0.words()[offset_of!(CommandPage, cpus) / 8..][..CPU_WORDS];
        let of = |(at, word): (usize, &AtomicU64)| {
            let word = word.load(Ordering::Relaxed);
            let set = (0..64).filter(move |bit| word >> bit & 1 == 1);
            set.map(move |bit| at * 64 + bit)
        };
        words.iter().enumerate().flat_map(of).collect()
    }

    /// Tells the shim that the thread is free.
    pub(crate) fn unbind(&self, tid: u32) {
        let _ = self
            .bound_word()
            .compare_exchange(tid, 0, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Writes down of which file the memory of the run's machine is, before the program begins.
    pub(crate) fn say_machine(page: &SharedMemory, machine: FileId) {
        let words = &page.words()[offset_of!(CommandPage, machine) / 8..];
        words[0].store(machine.device, Ordering::Relaxed);
        words[1].store(machine.inode, Ordering::Relaxed);
    }

    /// Has the program tell from now on what it gives back of its guest's memory.
    ///
    /// * `guest`: device and inode of the memory, where it is mapped, and its bytes.
    /// * `page`: size of its pages.
    pub(crate) fn listen(&self, guest: [u64; 4], page: PageSize) {
        let words = &self.0.words()[offset_of!(CommandPage, guest) / 8..];
        for (word, value) in words.iter().zip(guest) {
            word.store(value, Ordering::Relaxed);
        }
        let listens = &self.0.halves()[offset_of!(CommandPage, listens) / 4];
        listens.store(page.base_pages() as u32, Ordering::SeqCst);
    }

    /// The number of the last range that was acted on.
    pub(crate) fn last_heard(&self) -> u32 {
        self.load(Word::Heard, Ordering::Relaxed)
    }

    /// Waits for a range that is given back: its number, and its bytes in the guest's memory, as
    /// the program says. `None`: `goes_on`, which is asked every `limit`, says no.
    pub(crate) fn told(
        &self,
        last: u32,
        limit: Duration,
        goes_on: impl Fn() -> bool,
    ) -> Option<(u32, [u64; 2])> {
        let told = both_sides::next_told(self, last, |last| {
            CommandWords::wait(self, Word::Told, last, Some(limit));
            goes_on()
        })?;
        let given = &self.0.words()[offset_of!(CommandPage, given) / 8..];
        Some((told, [0, 1].map(|at| given[at].load(Ordering::Relaxed))))
    }

    /// See [`both_sides::heard`].
    pub(crate) fn heard(&self, told: u32) {
        both_sides::heard(self, told);
    }

    /// See [`both_sides::claim`].
    pub(crate) fn claim(&self) -> bool {
        both_sides::claim(self)
    }

    /// See [`both_sides::release`].
    pub(crate) fn release(&self) {
        both_sides::release(self);
    }

    /// See [`both_sides::release_all`].
    pub(crate) fn release_all(&self) {
        both_sides::release_all(self);
    }

    /// Posts a command about `pages`, one at a time, with the first at place `from`; returns its
    /// number. See [`both_sides::post`] for what must be locked.
    pub(crate) fn post(&self, op: u32, from: usize, pages: impl Iterator<Item = u64>) -> u32 {
        both_sides::post(self, || {
            let mut end = from;
            for (slot, page) in self.pages()[from..].iter().zip(pages) {
                slot.store(page, Ordering::Relaxed);
                end += 1;
            }
            let put = |offset: usize, value: usize| {
                self.0.halves()[offset / 4].store(value as u32, Ordering::Relaxed);
            };
            put(offset_of!(CommandPage, op), op as usize);
            put(offset_of!(CommandPage, from), from);
            put(offset_of!(CommandPage, count), end);
        })
    }

    /// Waits for the result of command `seq`, while `alive` and `patient` say so. Both are asked
    /// now and then.
    pub(crate) fn wait(
        &self,
        seq: u32,
        alive: impl Fn() -> bool,
        patient: impl Fn() -> bool,
    ) -> Result<Done, NotDone> {
        match both_sides::wait(self, seq, alive, patient) {
            Waited::Answered => Ok(self.done()),
            Waited::Gone => Err(NotDone::Gone),
            Waited::Late => {
                both_sides::give_up(self, seq);
                Err(NotDone::GivenUp)
            }
        }
    }

    /// The result of command `seq`, which was given up; `None` until the agent has answered.
    pub(crate) fn answer_to(&self, seq: u32) -> Option<Done> {
        both_sides::is_answered(self, seq).then(|| self.done())
    }

    /// The result of the last command, which is answered.
    pub(crate) fn result(&self) -> Done {
        self.done()
    }

    fn done(&self) -> Done {
        let result = |offset: usize| self.0.words()[offset / 8].load(Ordering::Relaxed);
        Done {
            moved: result(offset_of!(CommandPage, moved)),
            refused: result(offset_of!(CommandPage, refused)),
            stranded: result(offset_of!(CommandPage, stranded)),
        }
    }

    /// True if a reader of events keeps the agent waiting.
    pub(crate) fn reader_wants(&self) -> bool {
        self.load(Word::ReaderWants, Ordering::Relaxed) != 0
    }

    /// Notes that zeros were mapped in the staging area. The agent removes them before its next
    /// command.
    pub(crate) fn has_strays(&self) {
        let at = offset_of!(CommandPage, strays) / 4;
        self.0.halves()[at].fetch_or(3, Ordering::Relaxed);
    }

    /// True if the agent has no command. It gets none while the layout lock is held for writing.
    pub(crate) fn is_idle(&self) -> bool {
        self.load(Word::Done, Ordering::Acquire) == self.load(Word::Seq, Ordering::Acquire)
    }

    /// See [`both_sides::cancel`].
    pub(crate) fn cancel(&self) {
        both_sides::cancel(self);
    }

    /// See [`both_sides::exclude_agent`].
    #[must_use]
    pub(crate) fn exclude_agent(
        &self,
        alive: impl Fn() -> bool,
        patient: impl Fn() -> bool,
    ) -> bool {
        both_sides::exclude_agent(self, alive, patient)
    }

    /// See [`both_sides::admit_agent`].
    pub(crate) fn admit_agent(&self) {
        both_sides::admit_agent(self);
    }
}

#[cfg(test)]
mod tests {
    use undercroft_sys::process::thread_id;

    use super::both_sides::READER_SLEEPS;
    use super::*;
    use crate::space::partners::Partners;

    fn page() -> Commands {
        Commands::new(SharedMemory::create("test", 4096).expect("a page"))
    }

    #[test]
    fn nothing_is_claimed_without_a_running_agent_or_in_a_fork() {
        let commands = page();
        assert!(!commands.claim(), "its agent has not started");
        assert_eq!(commands.word(Word::InHand).load(Ordering::SeqCst), 0);
        commands.word(Word::Agent).store(7, Ordering::SeqCst);
        commands.word(Word::Forking).store(1, Ordering::SeqCst);
        assert!(!commands.claim(), "it is inside fork()");
        assert_eq!(commands.word(Word::InHand).load(Ordering::SeqCst), 0);
        commands.word(Word::Forking).store(0, Ordering::SeqCst);
        assert!(commands.claim());
        assert_eq!(commands.word(Word::InHand).load(Ordering::SeqCst), 1);
    }

    #[test]
    fn an_agent_that_has_not_started_is_not_gone() {
        let commands = page();
        assert!(!commands.agent_is_gone());
        let set = |word, value| commands.word(word).store(value, Ordering::SeqCst);
        set(Word::Agent, 7);
        assert!(!commands.agent_is_gone(), "it has not announced itself");
        set(Word::Ready, 1);
        assert!(!commands.agent_is_gone());
        set(Word::Agent, 0);
        assert!(commands.agent_is_gone());
    }

    /// This thread stands for a process that has the memory.
    #[test]
    fn what_the_shim_starts_to_make_the_agent_is_no_partner() {
        let (commands, partners) = (page(), Partners::default());
        let word = |offset: usize| &commands.0.halves()[offset / 4];
        let quit = || word(offset_of!(CommandPage, quit)).load(Ordering::SeqCst);
        let (pid, tid) = (std::process::id(), thread_id());
        word(offset_of!(CommandPage, starting)).store(1, Ordering::SeqCst);
        partners.started(tid, pid, Some(&commands));
        assert_eq!(quit(), 0, "the agent ends with the program");
        word(offset_of!(CommandPage, starting)).store(0, Ordering::SeqCst);
        partners.started(tid, pid, Some(&commands));
        assert_eq!(quit(), STAY);
    }

    #[test]
    fn a_busy_agent_is_waited_for_and_an_idle_one_is_not() {
        let commands = page();
        commands.word(Word::Agent).store(7, Ordering::SeqCst);
        commands.word(Word::Busy).store(1, Ordering::SeqCst); // left over: it has no command
        assert!(commands.exclude_agent(|| true, || true));
        commands.word(Word::Seq).store(1, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while commands.word(Word::ReaderWants).load(Ordering::SeqCst) != READER_SLEEPS {
                    std::thread::yield_now();
                }
                commands.word(Word::Busy).store(0, Ordering::SeqCst);
                futex::wake(commands.word(Word::Busy), 1);
            });
            assert!(commands.exclude_agent(|| true, || true));
            assert_eq!(commands.word(Word::Busy).load(Ordering::SeqCst), 0);
        });
        assert_ne!(commands.word(Word::ReaderWants).load(Ordering::SeqCst), 0);
        commands.admit_agent();
        assert_eq!(commands.word(Word::ReaderWants).load(Ordering::SeqCst), 0);
    }

    #[test]
    fn nobody_waits_for_ever_for_an_agent_that_does_not_go_on() {
        let commands = page();
        commands.word(Word::Agent).store(7, Ordering::SeqCst);
        assert!(commands.claim());
        let seq = commands.post(1, 0, [4096].into_iter());
        commands.word(Word::Busy).store(1, Ordering::SeqCst);
        let began = std::time::Instant::now();
        let patient = || began.elapsed() < Duration::from_millis(20);
        assert!(!commands.exclude_agent(|| true, patient));
        assert!(!commands.reader_wants(), "the agent is let go on");
        let told = commands.wait(seq, || true, patient);
        assert_eq!(told.expect_err("no answer"), NotDone::GivenUp);
        assert!(began.elapsed() < Duration::from_secs(2));
        let cancelled = commands.word(Word::Cancelled).load(Ordering::SeqCst);
        assert_eq!(cancelled, seq);
        assert!(commands.answer_to(seq).is_none());
        assert_eq!(commands.word(Word::InHand).load(Ordering::SeqCst), 1);
        let moved = offset_of!(CommandPage, moved) / 8;
        commands.0.words()[moved].store(1, Ordering::SeqCst);
        commands.word(Word::Done).store(seq, Ordering::SeqCst);
        assert_eq!(commands.answer_to(seq).map(|done| done.moved), Some(1));
    }
}
