//! The command page in this process: its words, with the processor's own atomics.

use core::ops::Deref;
use core::sync::atomic::{AtomicU32, Ordering, Ordering::*};
use core::time::Duration;

use undercroft_wire::command::{CommandWords, Word};
use undercroft_wire::protocol::{CommandPage, QUIT};

use crate::alone::{end, others};
use crate::raw::{call3, call6, nr};
use crate::{COMMAND, OWNER};

/// A command page that is mapped in this process for as long as the address space lives.
#[derive(Clone, Copy)]
pub(crate) struct Page(pub(crate) &'static CommandPage);

impl Deref for Page {
    type Target = CommandPage;

    #[inline(always)]
    fn deref(&self) -> &CommandPage {
        self.0
    }
}

/// Yields of the agent between two questions, and its pause after them.
const YIELDS: u32 = 4096;
const PAUSE: Duration = Duration::from_micros(500);

impl Page {
    /// The agent has yielded its processor to a reader of messages that goes before it. That reader
    /// may be dead: now and then the agent asks whether it is still needed.
    fn yielded(&self) {
        #[unsafe(link_section = ".data")]
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if COUNT.fetch_add(1, Relaxed) % YIELDS != YIELDS - 1 {
            return;
        }
        if self.quit.load(Acquire) == QUIT || others() == 0 {
            self.agent.store(0, Release);
            end();
        }
        self.wait(Word::Seq, self.load(Word::Seq, Relaxed), Some(PAUSE));
    }
}

/// The command page, if this process has one.
pub(crate) fn command_page() -> Option<Page> {
    let command = COMMAND.load(Relaxed) as *const CommandPage;
    // SAFETY: takes no arguments.
    let pid = unsafe { call3(nr::GETPID, 0, 0, 0) } as u32;
    if command.is_null() || OWNER.load(Relaxed) != pid {
        return None;
    }
    // SAFETY: it stays mapped as long as its owner's address space, which is this process's.
    Some(Page(unsafe { &*command }))
}

/// The word of that name.
#[inline(always)]
fn word_of(page: &CommandPage, word: Word) -> &AtomicU32 {
    let at = core::ptr::from_ref(page).wrapping_byte_add(CommandPage::offset(word));
    // SAFETY: the offset is that of a field of this type.
    unsafe { &*at.cast() }
}

/// The real words: in the mapped page, with the processor's own atomics and the kernel's futexes.
impl CommandWords for Page {
    #[inline(always)]
    fn load(&self, word: Word, order: Ordering) -> u32 {
        word_of(self, word).load(order)
    }

    #[inline(always)]
    fn store(&self, word: Word, value: u32, order: Ordering) {
        word_of(self, word).store(value, order);
    }

    #[inline(always)]
    fn add(&self, word: Word, value: u32) {
        word_of(self, word).fetch_add(value, SeqCst);
    }

    #[inline(always)]
    fn wait(&self, word: Word, expected: u32, limit: Option<Duration>) {
        let limit = limit.map(|limit| [limit.as_secs(), u64::from(limit.subsec_nanos())]);
        let limit = limit.as_ref().map_or(0, |limit| limit.as_ptr() as usize);
        let at = core::ptr::from_ref(word_of(self, word)) as usize;
        // SAFETY: the word is live, and so is the time-out if there is one.
        unsafe { call6(nr::FUTEX, at, 0, expected as usize, limit, 0, 0) };
    }

    #[inline(always)]
    fn wake(&self, word: Word, count: u32) {
        let at = core::ptr::from_ref(word_of(self, word)) as usize;
        // SAFETY: the word is live.
        unsafe { call6(nr::FUTEX, at, 1, count as usize, 0, 0, 0) };
    }

    #[inline(always)]
    fn pause(&self, long: bool) {
        core::hint::spin_loop();
        if long {
            // SAFETY: takes no arguments.
            unsafe { call3(nr::SCHED_YIELD, 0, 0, 0) };
            self.yielded();
        }
    }
}
