//! The manager's side of a client's command page: orders to the agent, and keeping it from moving pages while layout events are
//! acknowledged.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use undercroft_sys::futex;
use undercroft_sys::mapping::SharedMemory;

use crate::protocol::{READER_SLEEPS, STAGING_PAGES};

/// Longest wait for an agent before the caller looks whether its process still lives.
const PATIENCE: Duration = Duration::from_millis(50);

/// Looks at a busy agent before sleeping until it is done: some 5 us.
const EXCLUDE_SPINS: u32 = 200;

/// Longest sleep until a busy agent is looked at again.
const NAP: Duration = Duration::from_millis(1);

/// Word index of the result behind the pages, half-word indices of the fork gate.
pub(crate) const STRANDED: usize = 6 + STAGING_PAGES;
pub(crate) const FORKING: usize = 2 * (STRANDED + 1);
pub(crate) const IN_HAND: usize = FORKING + 1;

/// One agent's command page.
pub(crate) struct Commands(SharedMemory);

/// What the agent did with the pages of a command; bit i = page i.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub moved: u64,
    pub refused: u64,
    /// Moved but not readable: the program has to be ended.
    pub stranded: u64,
}

impl Commands {
    pub fn new(page: SharedMemory) -> Commands {
        Commands(page)
    }

    fn half(&self, index: usize) -> &AtomicU32 {
        &self.0.halves()[index]
    }

    fn seq(&self) -> &AtomicU32 {
        self.half(0)
    }

    fn done(&self) -> &AtomicU32 {
        self.half(1)
    }

    fn busy(&self) -> &AtomicU32 {
        self.half(3)
    }

    fn reader_wants(&self) -> &AtomicU32 {
        self.half(4)
    }

    fn pages(&self) -> &[AtomicU64] {
        &self.0.words()[6..6 + STAGING_PAGES]
    }

    /// The agent's thread id; 0 before it starts, and when it is gone (or its process called exec).
    pub fn agent(&self) -> u32 {
        self.half(2).load(Ordering::Acquire)
    }

    /// Claims the right to take pages out: fork() in the program waits until [`Commands::release`]. False while the
    /// program is inside fork(), and while it has no agent that runs: try later. An agent that is still to start would carry
    /// out an order long after it was given up.
    pub fn claim(&self) -> bool {
        if self.agent() == 0 {
            return false;
        }
        self.half(IN_HAND).store(1, Ordering::SeqCst);
        if self.half(FORKING).load(Ordering::SeqCst) == 0 {
            return true;
        }
        self.release();
        false
    }

    /// What was moved out has been read.
    pub fn release(&self) {
        self.half(IN_HAND).store(0, Ordering::SeqCst);
        if self.half(FORKING).load(Ordering::SeqCst) != 0 {
            futex::wake(self.half(IN_HAND), u32::MAX >> 1);
        }
    }

    /// Posts an order; returns its number. The caller holds the layout lock for reading since it made sure that each page is
    /// still what it thinks it is: an event acknowledged later cancels this command, one acknowledged before has been seen.
    /// One command at a time. The agent is told by [`Commands::wake_agent`], with no lock held: it may take the caller's CPU at once, for
    /// the whole order.
    pub fn post(&self, op: u32, pages: impl Iterator<Item = u64>) -> u32 {
        let mut count = 0;
        for (slot, page) in self.pages().iter().zip(pages) {
            slot.store(page, Ordering::Relaxed);
            count += 1;
        }
        self.half(6).store(op, Ordering::Relaxed);
        self.half(7).store(count, Ordering::Relaxed);
        let seq = self.seq().load(Ordering::Relaxed).wrapping_add(1);
        self.seq().store(seq, Ordering::SeqCst);
        seq
    }

    /// There is a new order.
    pub fn wake_agent(&self) {
        futex::wake(self.seq(), 1);
    }

    /// Waits for the result of command `seq`; `None` when the agent died. `alive` is asked now and then.
    pub fn wait(&self, seq: u32, alive: impl Fn() -> bool) -> Option<Done> {
        loop {
            let done = self.done().load(Ordering::Acquire);
            if done == seq {
                let words = self.0.words();
                return Some(Done {
                    moved: words[4].load(Ordering::Relaxed),
                    refused: words[5].load(Ordering::Relaxed),
                    stranded: words[STRANDED].load(Ordering::Relaxed),
                });
            }
            if self.agent() == 0 || !alive() {
                return None;
            }
            futex::wait(self.done(), done, Some(PATIENCE));
        }
    }

    /// The command in progress must not move pages any more. Called between [`Commands::exclude_agent`] and
    /// [`Commands::admit_agent`], so it takes effect before the next page.
    pub fn cancel(&self) {
        let seq = self.seq().load(Ordering::Acquire);
        self.half(5).store(seq, Ordering::Release);
    }

    /// Returns when the agent is not moving pages; it will not start before [`Commands::admit_agent`]. The caller holds the
    /// layout lock for writing. Cost: two loads when it is idle; at most one MOVE of 16 pages otherwise.
    pub fn exclude_agent(&self, alive: impl Fn() -> bool) {
        if self.done().load(Ordering::Acquire) == self.seq().load(Ordering::Acquire) {
            return; // it has no order, and is given none while the layout lock is held
        }
        self.reader_wants().store(1, Ordering::SeqCst);
        for _ in 0..EXCLUDE_SPINS {
            if self.busy().load(Ordering::SeqCst) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        // It lost its CPU inside the MOVE, perhaps to this very thread, or died there.
        self.reader_wants().store(READER_SLEEPS, Ordering::SeqCst);
        while self.busy().load(Ordering::SeqCst) != 0 {
            if self.agent() == 0 || !alive() {
                return;
            }
            futex::wait(self.busy(), 1, Some(NAP));
        }
    }

    /// Lets the agent go on.
    pub fn admit_agent(&self) {
        self.reader_wants().store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Commands {
        Commands::new(SharedMemory::create("test", 4096).expect("a page"))
    }

    #[test]
    fn nothing_is_claimed_without_a_running_agent_or_in_a_fork() {
        let commands = page();
        assert!(!commands.claim(), "its agent has not started");
        assert_eq!(commands.half(IN_HAND).load(Ordering::SeqCst), 0);
        commands.half(2).store(7, Ordering::SeqCst);
        commands.half(FORKING).store(1, Ordering::SeqCst);
        assert!(!commands.claim(), "it is inside fork()");
        assert_eq!(commands.half(IN_HAND).load(Ordering::SeqCst), 0);
        commands.half(FORKING).store(0, Ordering::SeqCst);
        assert!(commands.claim());
        assert_eq!(commands.half(IN_HAND).load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_busy_agent_is_waited_for_and_an_idle_one_is_not() {
        let commands = page();
        commands.half(2).store(7, Ordering::SeqCst);
        commands.busy().store(1, Ordering::SeqCst); // left over: it has no order
        commands.exclude_agent(|| true);
        commands.seq().store(1, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while commands.reader_wants().load(Ordering::SeqCst) != READER_SLEEPS {
                    std::thread::yield_now();
                }
                commands.busy().store(0, Ordering::SeqCst);
                futex::wake(commands.busy(), 1);
            });
            commands.exclude_agent(|| true);
            assert_eq!(commands.busy().load(Ordering::SeqCst), 0);
        });
        assert_ne!(commands.reader_wants().load(Ordering::SeqCst), 0);
        commands.admit_agent();
        assert_eq!(commands.reader_wants().load(Ordering::SeqCst), 0);
    }
}
