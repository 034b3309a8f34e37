//! The two queues between a run and its plugin's thread.

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::{BookEvent, Journal};

use crate::event::Event;
use crate::ring::Ring;

/// Events that may wait: as many as a CPU makes in some tens of milliseconds. 2 MiB.
const EVENTS_MAX: usize = 1 << 16;
/// Wishes that may wait.
const WISHES_MAX: usize = 1 << 12;

/// Hears the engine, and keeps what a plugin is to hear. It is called with the engine locked, so
/// one thread puts in at a time. Cost of an event: some nanoseconds; no lock, no system call.
pub struct Ears(Ring);

impl Default for Ears {
    fn default() -> Ears {
        Ears(Ring::new(EVENTS_MAX))
    }
}

impl Ears {
    /// Takes the oldest event. One thread does that.
    pub fn next(&self) -> Option<Event> {
        self.0.pop().and_then(Event::from_words)
    }

    /// Events that did not fit so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }
}

impl Journal for Ears {
    #[inline]
    fn note(&self, event: BookEvent) {
        if let Some(event) = Event::of(event) {
            self.0.push(event.words());
        }
    }
}

/// A page that a plugin wants to leave first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The address space. There may be none of this number.
    pub space: SpaceId,
    /// The page. There may be none of this number.
    pub page: VirtPage,
}

/// Wishes on their way to the thread that chooses victims.
pub struct Wishes(Ring);

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes(Ring::new(WISHES_MAX))
    }
}

impl Wishes {
    /// Adds a wish. False if there is no room: it is dropped and counted. One thread does that.
    pub fn add(&self, wish: Wish) -> bool {
        self.0.push([u64::from(wish.space.0), wish.page.0, 0, 0])
    }

    /// Takes the oldest wish. One thread does that.
    pub fn next(&self) -> Option<Wish> {
        let [space, page, ..] = self.0.pop()?;
        Some(Wish {
            space: SpaceId(space as u32),
            page: VirtPage(page),
        })
    }

    /// Wishes that did not fit so far.
    pub fn dropped(&self) -> u64 {
        self.0.dropped()
    }
}
