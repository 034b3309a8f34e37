//! The inbox: blocks of messages, as the kernel wrote them. Reading an event acknowledges it, so it
//! is read into memory that survives, and stays there until the books have it.
//!
//! ```text
//! word 0         the space whose messages these are, + 1
//! word 1         counts reads: it orders the blocks of one space
//! words 8..136   messages (`MessageBuf`), each zero in its first byte if it is none, or applied
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::SpaceId;
use undercroft_sys::uffd::{self, Leftover, MESSAGE_BUF_WORDS, Message, MessageBuf, Receipt, Uffd};

use super::lock;
use super::{Cannot, HEADER_WORDS, Legacy};

/// Each fault thread has one block, and one for each read whose events are still held back.
pub(super) const BLOCKS: usize = 120;

const MESSAGES_AT: usize = 8;
const BLOCK_WORDS: usize = MESSAGES_AT + MESSAGE_BUF_WORDS;
const INBOX_AT: usize = HEADER_WORDS;
pub(super) const END_WORD: usize = (INBOX_AT + BLOCKS * BLOCK_WORDS).next_multiple_of(512);

fn base(block: usize) -> usize {
    INBOX_AT + block * BLOCK_WORDS
}

/// A thread's place to read messages into.
pub struct EventInbox {
    legacy: Arc<Legacy>,
    block: usize,
    buffer: MessageBuf,
    /// Blocks with events that are held back.
    lent: Vec<usize>,
    /// Where to read while no block is free. A successor does not find it.
    spare: bool,
}

impl EventInbox {
    /// Nothing is read yet.
    pub fn new(legacy: Arc<Legacy>) -> EventInbox {
        let mut inbox = EventInbox {
            legacy,
            block: 0,
            buffer: MessageBuf::default(),
            lent: Vec::new(),
            spare: true,
        };
        inbox.take_block();
        inbox
    }

    fn take_block(&mut self) {
        let legacy = self.legacy.clone();
        let mut free = lock(&legacy.blocks);
        let buffer_of =
            |block: usize| MessageBuf::over(legacy.memory.clone(), base(block) + MESSAGES_AT);
        let clear = |block: &usize| buffer_of(*block).is_clear();
        let (back, lent) = std::mem::take(&mut self.lent).into_iter().partition(clear);
        self.lent = lent;
        let back: Vec<usize> = back;
        free.extend(back);
        // One with a leftover of a dead manager may be among them.
        let at = free.iter().rposition(clear);
        match at {
            Some(at) => {
                self.block = free.swap_remove(at);
                self.buffer = buffer_of(self.block);
                // Written once: a read must not have to wait for this memory.
                for word in 0..BLOCK_WORDS {
                    legacy
                        .word(base(self.block) + word)
                        .store(0, Ordering::Relaxed);
                }
                self.spare = false;
            }
            None => {
                legacy.cannot(Cannot::Events);
                self.buffer = MessageBuf::default();
                self.spare = true;
            }
        }
    }

    /// Room for the next read of messages of `space`. The caller holds its layout lock.
    pub fn next(&mut self, space: SpaceId) -> &mut MessageBuf {
        if self.spare || !self.buffer.is_clear() {
            if !self.spare {
                self.lent.push(self.block);
            }
            self.take_block();
        }
        if !self.spare {
            let reads = self.legacy.reads.fetch_add(1, Ordering::Relaxed) + 1;
            let base = base(self.block);
            let word = |at: usize| self.legacy.word(base + at);
            word(0).store(u64::from(space.0) + 1, Ordering::Relaxed);
            word(1).store(reads, Ordering::Release);
        }
        &mut self.buffer
    }

    /// The record of the message at `slot` of the last read.
    pub fn receipt(&self, slot: usize) -> Receipt {
        if self.spare {
            return Receipt::default();
        }
        let memory = self.legacy.memory.clone();
        Receipt::over(memory, base(self.block) + MESSAGES_AT, slot)
    }
}

/// A layout event that a dead manager had read.
pub struct HeldEvent {
    /// The address space.
    pub space: SpaceId,
    /// Its order among those of its space.
    at: (u64, usize),
    block: usize,
    left: Leftover,
    /// FORK: the child's descriptor, once this process has it.
    pub child: Option<Uffd>,
}

/// The mark of a generation in a message; never 0.
fn mark(generation: u64) -> u8 {
    0x80 | (generation & 0x7f) as u8
}

impl HeldEvent {
    /// How far the dead manager had come with it.
    pub fn phase(&self) -> u8 {
        self.left.phase
    }

    /// The number of a FORK's descriptor in the table of the manager of this generation.
    pub fn child_number(&self, legacy: &Legacy) -> Option<i32> {
        match self.left.renumbered {
            (of, number) if of == mark(legacy.generation()) => self.left.child.map(|_| number),
            _ => self.left.child,
        }
    }

    /// A FORK's descriptor has this number in the next generation.
    pub fn renumber(&self, legacy: &Legacy, number: i32) {
        let of = mark(legacy.generation() + 1);
        uffd::renumber_fork(self.words(legacy), self.left, of, number);
    }

    fn words<'a>(&self, legacy: &'a Legacy) -> &'a [AtomicU64] {
        let at = base(self.block) + MESSAGES_AT;
        &legacy.memory.words()[at..at + MESSAGE_BUF_WORDS]
    }

    /// The event, and what is written down of it.
    pub fn take(self, legacy: &Legacy) -> (Option<Message>, Receipt) {
        let (at, slot) = (base(self.block) + MESSAGES_AT, self.left.slot);
        let words = &legacy.memory.words()[at..at + MESSAGE_BUF_WORDS];
        let message = uffd::leftover_message(words, self.left, self.child);
        (message, Receipt::over(legacy.memory.clone(), at, slot))
    }
}

impl Legacy {
    /// The layout events that a dead manager had read and not applied, in order. Blocks with faults
    /// only are clear afterwards.
    pub fn held(&self) -> Vec<HeldEvent> {
        let mut held = Vec::new();
        for block in 0..BLOCKS {
            let at = base(block);
            let words = &self.memory.words()[at + MESSAGES_AT..at + BLOCK_WORDS];
            let (space, reads) = (self.load(at), self.load(at + 1));
            self.reads.fetch_max(reads, Ordering::Relaxed);
            for left in uffd::leftovers(words) {
                held.push(HeldEvent {
                    space: SpaceId((space as u32).wrapping_sub(1)),
                    at: (reads, left.slot),
                    block,
                    left,
                    child: None,
                });
            }
        }
        held.sort_by_key(|event| event.at);
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_events_that_wait_are_not_read_into_again() {
        let legacy = Legacy::for_tests();
        let mut inbox = EventInbox::new(legacy.clone());
        inbox.next(SpaceId(3));
        let first = inbox.block;
        inbox.next(SpaceId(3));
        assert_eq!(inbox.block, first);
        // As the kernel writes an UNMAP, in slot 2.
        let slot = base(first) + MESSAGES_AT + 8;
        for (at, word) in [0x16u64, 0x1000, 0x3000].into_iter().enumerate() {
            legacy.word(slot + at).store(word, Ordering::Relaxed);
        }
        let receipt = inbox.receipt(2);
        inbox.next(SpaceId(4));
        assert_ne!(inbox.block, first);
        receipt.begin(1);
        let [held] = &legacy.held()[..] else {
            panic!("one event")
        };
        assert_eq!((held.space, held.phase()), (SpaceId(3), 1));
        assert_eq!(held.child_number(&legacy), None);
        let (message, _) = legacy.held().remove(0).take(&legacy);
        assert!(matches!(message, Some(Message::Unmap(range)) if range.count().0 == 2));
        receipt.done();
        assert!(legacy.held().is_empty());
    }

    #[test]
    fn without_a_free_block_no_successor_takes_over() {
        let legacy = Legacy::for_tests();
        let mut inbox = EventInbox::new(legacy.clone());
        for _ in 0..BLOCKS {
            inbox.next(SpaceId(1));
            let slot = base(inbox.block) + MESSAGES_AT;
            legacy.word(slot).store(0x15, Ordering::Relaxed);
        }
        assert_eq!(legacy.refusal(), None);
        inbox.next(SpaceId(1));
        assert!(legacy.refusal().is_some());
        assert_eq!(legacy.held().len(), BLOCKS);
    }
}
