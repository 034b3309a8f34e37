//! How long the agent lives: as long as another process uses its memory. An agent that stays longer
//! keeps all that memory from being freed.
//!
//! The kernel clears a word of the program's first thread when that thread ends or calls exec, and
//! wakes those that wait there. The agent waits there too. It then asks the kernel whether it is
//! alone in its memory: the first thread may have ended alone. The manager wakes the agent of a
//! process that has ended, so that it asks once more.
//!
//! A program that ends in order has its agent end first: so its memory is gone when its parent
//! hears of its end.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::time::Duration;

use undercroft_wire::command::{CommandWords, Word};
use undercroft_wire::protocol::{QUIT, STAY};

use crate::alone::{end, others};
use crate::page::{Page, command_page};
use crate::raw::{EAGAIN, EINTR, EINVAL, call3, call6, nr, own_id};

const PR_GET_TID_ADDRESS: usize = 40;

/// `FUTEX2_SIZE_U32`, shared: that is how the kernel wakes those who wait at the word.
const SHARED_WORD: u32 = 2;

/// Pauses between two questions, while the word does not tell: the first, the longest of the first
/// [`NAPS`], and the longest. On a busy machine a program that ends may have no CPU meanwhile.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_SHORT: Duration = Duration::from_micros(500);
const NAP_MAX: Duration = Duration::from_secs(1);
const NAPS: u32 = 1000;

/// Longest wait of a program that ends for its agent, which may have no CPU.
const END_MAX: Duration = Duration::from_millis(100);

/// Pauses of a program that ends, until the kernel has taken the memory from the agent: the first,
/// and their number. Each is twice the one before.
const TAKEN_MIN: Duration = Duration::from_micros(10);
const TAKEN_PAUSES: u32 = 6;

/// `struct futex_waitv`.
#[repr(C)]
struct Waiter {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// The program's end, for which the agent waits besides commands.
#[derive(Clone, Copy)]
pub(crate) struct Life {
    /// Address of the word of the program's first thread; 0: it does not tell, or no longer.
    word: usize,
    /// The word's value while that thread lives.
    thread: u32,
    /// The next pause between two questions, and how many there were.
    nap: Duration,
    naps: u32,
}

impl Life {
    /// That of an agent which the calling thread starts: the first, and only one, of its process.
    pub(crate) fn of_caller() -> Life {
        let mut word = 0usize;
        let at = core::ptr::from_mut(&mut word) as usize;
        // SAFETY: the kernel writes one live word, if it knows the request.
        let asked = unsafe { call3(nr::PRCTL, PR_GET_TID_ADDRESS, at, 0) };
        // SAFETY: live; volatile because the kernel wrote it behind the compiler's back.
        let word = unsafe { core::ptr::read_volatile(&word) };
        Life {
            word: if asked == 0 { word } else { 0 },
            thread: own_id(),
            nap: if asked == 0 { NAP_MIN } else { NAP_MAX },
            naps: if asked == 0 { 0 } else { NAPS },
        }
    }

    /// Sleeps until there may be a command other than `last`. Does not return if the program is
    /// gone.
    pub(crate) fn sleep(&mut self, page: &Page, last: u32) {
        if page.quit.load(Acquire) == QUIT {
            end();
        }
        if self.word == 0 {
            page.wait(Word::Seq, last, Some(self.nap));
            self.naps = self.naps.saturating_add(1);
            let most = if self.naps < NAPS { NAP_SHORT } else { NAP_MAX };
            self.nap = (2 * self.nap).min(most);
        } else {
            self.wait(page, last);
        }
        // Once the first thread has ended, commands may come for ever, all for memory that no
        // process uses any more.
        let asks = self.word == 0 || page.seq.load(Relaxed) == last;
        if asks && self.is_alone() {
            // The kernel clears the word only if the memory has other users.
            page.agent.store(0, Release);
            end();
        }
    }

    /// Waits for a command, the program's end, or its first thread's.
    fn wait(&mut self, page: &Page, last: u32) {
        let waiter = |value: u32, address: usize| Waiter {
            value: value.into(),
            address: address as u64,
            flags: SHARED_WORD,
            reserved: 0,
        };
        let quit = page.quit.load(Acquire);
        if quit == QUIT {
            return;
        }
        let waiters = [
            waiter(last, core::ptr::from_ref(&page.seq) as usize),
            waiter(quit, core::ptr::from_ref(&page.quit) as usize),
            waiter(self.thread, self.word),
        ];
        let at = waiters.as_ptr() as usize;
        // SAFETY: the waiters are live; the kernel reads the words that they name, if it can.
        let woken = unsafe { call6(nr::FUTEX_WAITV, at, waiters.len(), 0, 0, 0, 0) };
        let told = page.seq.load(Acquire) != last || page.quit.load(Acquire) != quit;
        match woken {
            0.. | EINTR => {}
            EAGAIN if told => {}
            // The first thread has ended, or the word cannot be read.
            _ => {
                // The kernel wakes one of those that wait: a thread of the program may be another.
                // SAFETY: takes an address, which need not be mapped.
                unsafe { call3(nr::FUTEX, self.word, 1, i32::MAX as usize) };
                self.word = 0;
            }
        }
    }

    /// Whether no other process uses this memory.
    fn is_alone(&self) -> bool {
        match others() {
            0 => true,
            EINVAL => false,
            // The program forbids the question to all that it starts.
            _ => self.word == 0,
        }
    }
}

/// Ends the agent of this process, if it has one.
pub(crate) fn end_agent() {
    let Some(page) = command_page() else { return };
    if page.quit.compare_exchange(0, QUIT, AcqRel, Acquire) == Err(STAY) {
        return; // it ends with the last process that has the memory
    }
    page.wake(Word::Seq, 1);
    wake(&page.quit);
    let mut left = END_MAX;
    let pause = END_MAX / 4;
    loop {
        let agent = page.load(Word::Agent, Acquire);
        if agent == 0 {
            break;
        }
        if left.is_zero() {
            return;
        }
        page.wait(Word::Agent, agent, Some(pause));
        left = left.saturating_sub(pause);
    }
    // The kernel clears the word, and wakes us, some steps before it takes the memory. If this
    // process has other threads or shares its memory, it cannot be known when.
    for pause in (0..TAKEN_PAUSES).map(|nth| TAKEN_MIN * (1 << nth)) {
        if others() != EINVAL {
            return;
        }
        page.wait(Word::Agent, 0, Some(pause));
    }
}

fn wake(word: &core::sync::atomic::AtomicU32) {
    let at = core::ptr::from_ref(word) as usize;
    // SAFETY: the word is live.
    unsafe { call3(nr::FUTEX, at, 1, 1) };
}

#[used]
#[unsafe(link_section = ".fini_array")]
static FINI: extern "C" fn() = fini;

extern "C" fn fini() {
    end_agent();
}

/// Stands in for the C library's function, which ends the process without its destructors.
#[unsafe(no_mangle)]
extern "C" fn _exit(status: i32) -> ! {
    end_agent();
    loop {
        // SAFETY: the program's own call, passed on.
        unsafe { call3(nr::EXIT_GROUP, status as u32 as usize, 0, 0) };
    }
}

/// The same function by its name in the C standard.
#[unsafe(no_mangle)]
extern "C" fn _Exit(status: i32) -> ! {
    _exit(status)
}
