//! The memory and the kernel of the model: atomics that may read stale, futexes, and one thing at a
//! time that is broken on purpose.
//!
//! `loom` takes sequentially consistent accesses for acquire and release only, but knows such
//! *fences*. So an SC store is a release store that is remembered, and an SC load after one is a
//! fence and an acquire load: two threads that each store and then load get what Dekker's needs,
//! and what is weakened on either side loses it. That is no more than the language promises for the
//! accesses themselves. It is more in one way: the fences also order what other accesses did before
//! and after, as `xchg` does.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, *};
use std::time::Duration;

use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Condvar, Mutex};

use undercroft_wire::command::{Shared, Word};

/// What is done to a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Load,
    /// Of a number.
    Store,
    /// Of this value, to a word that has a meaning for each.
    StoreOf(u32),
    Add,
}

/// What is wrong with the memory or the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    Nothing,
    /// Accesses of this kind with the first order have the second.
    Order(Access, Word, Ordering, Ordering),
    /// Who sleeps on this word is not woken.
    Wake(Word),
}

/// One word and those who sleep on it.
struct Place {
    value: AtomicU32,
    /// Locked as the kernel locks the queue of a futex. True: all limits have passed.
    queue: Mutex<bool>,
    bell: Condvar,
}

/// The command page.
pub(crate) struct Page {
    places: Vec<Place>,
    broken: Broken,
}

/// An access of the protocol's: what, to which word, in which order.
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

const WORDS: usize = Word::Ready as usize + 1;

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

/// What one thread sees of the page.
pub(crate) struct Side {
    page: Arc<Page>,
    /// It made a sequentially consistent store, and no such load since.
    unfenced: Cell<bool>,
}

impl Side {
    fn place(&self, word: Word) -> &Place {
        &self.page.places[word as usize]
    }

    /// The order that the access has, perhaps broken.
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

    /// The kernel writes the agent's thread id at its start, and 0 at its end, which it tells.
    pub(crate) fn agent_is(&self, thread: u32) {
        self.place(Word::Agent).value.store(thread, Release);
        if thread == 0 {
            self.wake(Word::Agent, 1);
        }
    }

    /// Ends every wait with a limit that is under way on `word`, and those to come.
    pub(crate) fn time_passes(&self, word: Word) {
        let place = self.place(word);
        *place
            .queue
            .lock()
            .expect("no thread of a model panics and goes on") = true;
        place.bell.notify_all();
    }
}

impl Shared for Side {
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
        match self.order(Access::Add, word, SeqCst) {
            SeqCst => {
                self.place(word).value.fetch_add(value, AcqRel);
                self.unfenced.set(true);
            }
            order => {
                self.place(word).value.fetch_add(value, order);
            }
        }
    }

    /// A limit never passes by itself: who would be woken late only because a limit saves it is
    /// never woken here.
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
