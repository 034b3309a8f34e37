//! The machine's pool of huge pages, for tests that need some.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// Tests that change the pool take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The pool with more pages in it. Dropping it restores the old number.
pub struct HugePages {
    old: u64,
    _turn: MutexGuard<'static, ()>,
}

impl HugePages {
    /// `None`: the kernel does not give that number, or this user may not ask.
    pub fn more(pages: u64) -> Option<HugePages> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = HugePages {
            old: number()?,
            _turn: turn,
        };
        let wanted = pool.old + pages;
        fs::write(POOL, wanted.to_string()).ok()?;
        (number()? >= wanted).then_some(pool)
    }
}

fn number() -> Option<u64> {
    fs::read_to_string(POOL).ok()?.trim().parse().ok()
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.old.to_string());
    }
}
