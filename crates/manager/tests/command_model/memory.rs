//! The memory and the kernel of the model: atomics that may read stale values, futexes, and one
//! thing at a time that is broken on purpose.
//!
//! `loom` takes sequentially consistent accesses for acquire and release only, but it knows such
//! *fences*. So an SC store is a release store that is remembered, and an SC load after one is a
//! fence and an acquire load. Two threads that each store and then load get what Dekker's algorithm
//! needs; a weaker access on either side loses it. The language promises as much for the accesses
//! themselves. The model is stronger in one way: the fences also order other accesses before and
//! after, as `xchg` does.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, *};
use std::time::Duration;

use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Condvar, Mutex};

use undercroft_wire::command::{CommandWords, Word};

/// Kinds of access to a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Load,
    /// Of a number.
    Store,
    /// Of this value, to a word that has a meaning for each.
    StoreOf(u32),
    Add,
    /// Of this value, to the word that counts claims.
    AddOf(u32),
}

/// Defects of the memory or the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    Nothing,
    /// Accesses of this kind have the second memory order instead of the first.
    Order(Access, Word, Ordering, Ordering),
    /// Sleepers on this word are not woken.
    Wake(Word),
}

/// A word and its sleepers.
struct Place {
    value: AtomicU32,
    /// Locked as the kernel locks the queue of a futex. True: every time limit has passed.
    queue: Mutex<bool>,
    bell: Condvar,
}

/// The command page.
pub(crate) struct Page {
    places: Vec<Place>,
    broken: Broken,
}

/// An access of the protocol: what, to which word, with which memory order.
pub(crate) type Made = (Access, Word, Ordering);

thread_local! {
    /// Accesses made by the models of this thread, each once. (`loom` runs all threads of a model
    /// on one.)
    static MADE: RefCell<Vec<Made>> = const { RefCell::new(Vec::new()) };
}

/// The accesses made by models that ran on this thread.
pub(crate) fn accesses_made() -> Vec<Made> {
    MADE.take()
}

const WORDS: usize = Word::Heard as usize + 1;

impl Page {
    /// All zero.
    pub(crate) fn new(broken: Broken) -> Arc<Page> {
        let place = |_| Place {
            value: AtomicU32::new(0),
            queue: Mutex::new(false),
            bell: Condvar::new(),
        };
        let places = (0..WORDS).map(place).collect();
        Arc::new(Page { places, broken })
    }

    /// The view of one thread, which makes it.
    pub(crate) fn side(self: &Arc<Page>) -> Side {
        Side {
            page: self.clone(),
            unfenced: Cell::new(false),
        }
    }
}

/// A thread's view of the page.
pub(crate) struct Side {
    page: Arc<Page>,
    /// Whether it made a sequentially consistent store, and no such load since.
    unfenced: Cell<bool>,
}

impl Side {
    fn place(&self, word: Word) -> &Place {
        &self.page.places[word as usize]
    }

    /// The memory order that the access has, perhaps broken.
    fn order(&self, access: Access, word: Word, order: Ordering) -> Ordering {
        match self.page.broken {
            Broken::Nothing => MADE.with_borrow_mut(|made| {
                if !made.contains(&(access, word, order)) {
                    made.push((access, word, order));
                }
            }),
            Broken::Order(broken, of, from, to) if (broken, of, from) == (access, word, order) => {
                return to;
            }
            _ => (),
        }
        order
    }

    /// The kernel writes the agent's thread id at its start. At its end it writes 0 and wakes the
    /// sleepers.
    pub(crate) fn agent_is(&self, thread: u32) {
        self.place(Word::Agent).value.store(thread, Release);
        if thread == 0 {
            self.wake(Word::Agent, 1);
        }
    }

    /// Ends every wait with a limit on `word`, under way or to come.
    pub(crate) fn time_passes(&self, word: Word) {
        let place = self.place(word);
        *place
            .queue
            .lock()
            .expect("no thread of a model panics and goes on") = true;
        place.bell.notify_all();
    }
}

impl CommandWords for Side {
    fn load(&self, word: Word, order: Ordering) -> u32 {
        match self.order(Access::Load, word, order) {
            SeqCst => {
                if self.unfenced.replace(false) {
                    fence(SeqCst);
                }
                self.place(word).value.load(Acquire)
            }
            order => self.place(word).value.load(order),
        }
    }

    fn store(&self, word: Word, value: u32, order: Ordering) {
        let access = match word {
            Word::Busy | Word::ReaderWants | Word::InHand | Word::Ready => Access::StoreOf(value),
            _ => Access::Store,
        };
        match self.order(access, word, order) {
            SeqCst => {
                self.place(word).value.store(value, Release);
                self.unfenced.set(true);
            }
            order => self.place(word).value.store(value, order),
        }
    }

    fn add(&self, word: Word, value: u32) {
        let access = match word {
            Word::InHand => Access::AddOf(value),
            _ => Access::Add,
        };
        match self.order(access, word, SeqCst) {
            SeqCst => {
                self.place(word).value.fetch_add(value, AcqRel);
                self.unfenced.set(true);
            }
            order => {
                self.place(word).value.fetch_add(value, order);
            }
        }
    }

    /// A limit never passes by itself. So a thread that only a limit would save is never woken
    /// here.
    fn wait(&self, word: Word, expected: u32, limit: Option<Duration>) {
        let place = self.place(word);
        let late = place
            .queue
            .lock()
            .expect("no thread of a model panics and goes on");
        fence(SeqCst);
        self.unfenced.set(false);
        if place.value.load(Relaxed) != expected {
            return;
        }
        if limit.is_some() && *late {
            drop(late);
            loom::thread::yield_now();
            return;
        }
        drop(place.bell.wait(late));
    }

    fn wake(&self, word: Word, count: u32) {
        if self.page.broken == Broken::Wake(word) {
            return;
        }
        let place = self.place(word);
        fence(SeqCst);
        self.unfenced.set(false);
        let _queue = place
            .queue
            .lock()
            .expect("no thread of a model panics and goes on");
        match count {
            1 => place.bell.notify_one(),
            _ => place.bell.notify_all(),
        }
    }

    fn pause(&self, _long: bool) {
        loom::thread::yield_now();
    }

    fn looks(_most: u32) -> u32 {
        1
    }
}
