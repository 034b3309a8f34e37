//! A ledger that survives its manager, and can kill it between any two words it writes.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::PageKey;
use undercroft_engine::{FlatLedger, Ledger, LedgerError, bytes_for};

/// Panic that unwinds out of the engine when its manager is killed.
pub(super) struct Killed;

const NEVER: u64 = u64::MAX;

/// The live layout in ordinary memory, shared by a manager and its successor.
#[derive(Clone, Debug)]
pub struct StormLedger {
    memory: Arc<[AtomicU64]>,
    flat: FlatLedger<Arc<[AtomicU64]>>,
    /// Words that the manager may still write.
    fuse: Arc<AtomicU64>,
}

impl StormLedger {
    /// An empty ledger of `chunks` chunks.
    pub fn new(chunks: usize) -> StormLedger {
        let words = bytes_for(chunks) / 8;
        let memory: Arc<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        StormLedger {
            flat: FlatLedger::create(memory.clone(), chunks, &PageKey::KNOWN)
                .expect("memory for the chunks"),
            memory,
            fuse: Arc::new(AtomicU64::new(NEVER)),
        }
    }

    /// The same memory, as a successor finds it.
    pub(super) fn reopen(&self) -> Result<StormLedger, LedgerError> {
        Ok(StormLedger {
            memory: self.memory.clone(),
            flat: FlatLedger::open(self.memory.clone())?,
            fuse: self.fuse.clone(),
        })
    }

    /// After this many words the manager dies instead of writing the next one.
    pub(super) fn arm(&self, words: u64) {
        self.fuse.store(words, Ordering::Relaxed);
    }

    /// The manager no longer dies of a word it writes.
    pub(super) fn disarm(&self) {
        self.fuse.store(NEVER, Ordering::Relaxed);
    }
}

impl Ledger for StormLedger {
    fn entries(&self) -> &[AtomicU64] {
        self.flat.entries()
    }

    fn chunks(&self) -> &[AtomicU64] {
        self.flat.chunks()
    }

    fn notes(&self) -> &[AtomicU64] {
        self.flat.notes()
    }

    fn write(&self, word: &AtomicU64, value: u64) {
        match self.fuse.load(Ordering::Relaxed) {
            NEVER => {}
            0 => resume_unwind(Box::new(Killed)),
            left => self.fuse.store(left - 1, Ordering::Relaxed),
        }
        word.store(value, Ordering::Release);
    }
}
