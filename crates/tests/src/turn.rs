//! Turns of tests: those that measure run alone, the others three at a time. Each test in
//! `tests/live` takes one, but for two that only sleep.
//!
//! Those that run beside others go first, so that a test that is to run alone need not wait for the
//! end of one while half of the machine is idle. That works if the harness has more threads than
//! there are tests that run alone: `cargo xtask test` gives it as many.

use std::panic::{self, PanicHookInfo};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Instant;

use crate::say;

/// Tests that run beside each other at most.
const BESIDE_MAX: usize = 3;

#[derive(Default)]
struct Turns {
    alone: bool,
    beside: usize,
    /// Tests that want to run beside others.
    waiting: usize,
}

static TURNS: Mutex<Turns> = Mutex::new(Turns {
    alone: false,
    beside: 0,
    waiting: 0,
});
static CHANGED: Condvar = Condvar::new();

/// Says why a test fails as soon as it does: at the end of a long log, a reader may be shown less.
/// The harness prints all of it then.
fn tell_failures() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("a thread of a test");
            let why = info.to_string();
            let [head, tail] =
                [1000, why.len().saturating_sub(2000)].map(|at| why.ceil_char_boundary(at));
            let why = if tail > head {
                format!("{} [...] {}", &why[..head], &why[tail..])
            } else {
                why
            };
            say(&format!("FAILS: {name}: {why}"));
            before(info);
        }));
    });
}

/// Waits while `unfit`.
fn once_not(unfit: impl FnMut(&mut Turns) -> bool) -> MutexGuard<'static, Turns> {
    let turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    let turns = CHANGED.wait_while(turns, unfit);
    turns.unwrap_or_else(PoisonError::into_inner)
}

/// The turn of a test. It ends when this is dropped, and then says how long it was.
pub struct Turn {
    alone: bool,
    began: Instant,
}

impl Turn {
    fn new(alone: bool) -> Turn {
        tell_failures();
        let began = Instant::now();
        Turn { alone, began }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = once_not(|_| false);
        if self.alone {
            turns.alone = false;
        } else {
            turns.beside -= 1;
        }
        CHANGED.notify_all();
        drop(turns);
        let thread = std::thread::current();
        say(&format!(
            "turn of {}: {:.1} s, {}",
            thread.name().unwrap_or("a test"),
            self.began.elapsed().as_secs_f64(),
            if self.alone { "alone" } else { "beside others" }
        ));
    }
}

/// Runs a test by itself: it measures.
pub fn one_at_a_time() -> Turn {
    let mut turns = once_not(|turns| turns.alone || turns.beside > 0 || turns.waiting > 0);
    turns.alone = true;
    Turn::new(true)
}

/// Runs a test beside two others, but beside none that measures. It checks what the program reads
/// and what the report counts, never how long something takes.
pub fn beside_others() -> Turn {
    once_not(|_| false).waiting += 1;
    let mut turns = once_not(|turns| turns.alone || turns.beside >= BESIDE_MAX);
    turns.waiting -= 1;
    turns.beside += 1;
    Turn::new(false)
}
