//! The two queues between a run and its plugin's thread.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::{BookEvent, Journal};

use crate::event::{Event, Kind};
use crate::ring::Ring;

/// Events that may wait: as many as a CPU makes in some tens of milliseconds. 2 MiB.
const EVENTS_MAX: usize = 1 << 16;
/// Wishes of a kind that may wait.
const WISHES_MAX: usize = 1 << 12;

/// Hears the engine, and keeps what a plugin is to hear. It is called with the engine locked, so
/// one thread puts in at a time. Cost of an event: some nanoseconds; no lock, no system call.
pub struct Ears {
    ring: Ring,
    /// Uses come by the scans that the plugin asks for, not one by one.
    by_scans: AtomicBool,
    /// Instructions of faults that are being served, if the plugin asks for those.
    instructions: OnceLock<Instructions>,
}

/// The newest instruction for each of some sets of pages: of page and address. Fault threads put
/// them in without a lock. Of two faults at once on pages of one set, one may have none or, seldom,
/// that of the other: a plugin wishes, so that does no harm.
struct Instructions(Box<[[AtomicU64; 2]]>);

/// More than threads that fault at once.
const INSTRUCTIONS: u64 = 1 << 12;

impl Instructions {
    fn place(&self, space: SpaceId, page: VirtPage) -> (&[AtomicU64; 2], u64) {
        let key = page.0 ^ u64::from(space.0) << 40;
        (&self.0[(key % INSTRUCTIONS) as usize], key)
    }

    fn put(&self, space: SpaceId, page: VirtPage, address: u64) {
        let (place, key) = self.place(space, page);
        place[1].store(address, Ordering::Relaxed);
        place[0].store(key, Ordering::Release);
    }

    /// 0: it is not known.
    fn take(&self, space: SpaceId, page: VirtPage) -> u64 {
        let (place, key) = self.place(space, page);
        if place[0].load(Ordering::Acquire) == key {
            place[1].swap(0, Ordering::Relaxed)
        } else {
            0
        }
    }
}

impl Default for Ears {
    fn default() -> Ears {
        Ears {
            ring: Ring::new(EVENTS_MAX),
            by_scans: AtomicBool::new(false),
            instructions: OnceLock::new(),
        }
    }
}

impl Ears {
    /// Takes the oldest event. One thread does that.
    pub fn next(&self) -> Option<Event> {
        self.ring.pop().and_then(Event::from_words)
    }

    /// Events that did not fit so far.
    pub fn dropped(&self) -> u64 {
        self.ring.dropped()
    }

    /// Puts an event in that the engine does not tell. As [`Ears::note`], with the engine locked.
    pub fn put(&self, event: &Event) {
        self.ring.push(event.words());
    }

    /// The plugin asks which instructions fault.
    pub fn ask_instructions(&self) {
        let made = || (0..INSTRUCTIONS).map(|_| Default::default()).collect();
        self.instructions.get_or_init(|| Instructions(made()));
    }

    /// Whether it does.
    pub fn asks_instructions(&self) -> bool {
        self.instructions.get().is_some()
    }

    /// The instruction at an address has faulted on a page, and is told when the page has come.
    pub fn faults_at(&self, space: SpaceId, page: VirtPage, address: u64) {
        if let Some(all) = self.instructions.get() {
            all.put(space, page, address);
        }
    }

    /// Whether uses of pages come by scans that the plugin asks for, and not one by one.
    pub fn by_scans(&self, whether: bool) {
        self.by_scans.store(whether, Ordering::Relaxed);
    }
}

impl Journal for Ears {
    #[inline]
    fn note(&self, event: BookEvent) {
        if let Some(mut event) = Event::of(event)
            && !(event.kind == Kind::Used && self.by_scans.load(Ordering::Relaxed))
        {
            if event.kind == Kind::Fault
                && let Some(all) = self.instructions.get()
            {
                event.at = all.take(event.space, VirtPage(event.page));
            }
            self.put(&event);
        }
    }
}

/// The wish of a plugin for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The page shall leave first, when room is needed.
    Reclaim,
    /// The page shall leave, although there may be room.
    ReclaimNow,
    /// The page shall come into memory, if there is room.
    Prefetch,
}

/// A page, and the plugin's wish for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The wish.
    pub what: What,
    /// The address space. There may be none of this number.
    pub space: SpaceId,
    /// The page. There may be none of this number.
    pub page: VirtPage,
}

/// Wishes on their way: some to the thread that chooses victims, others to those that load pages.
pub struct Wishes {
    reclaim: Ring,
    now: Ring,
    prefetch: Ring,
}

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes {
            reclaim: Ring::new(WISHES_MAX),
            now: Ring::new(WISHES_MAX),
            prefetch: Ring::new(WISHES_MAX),
        }
    }
}

impl Wishes {
    fn of(&self, what: What) -> &Ring {
        match what {
            What::Reclaim => &self.reclaim,
            What::ReclaimNow => &self.now,
            What::Prefetch => &self.prefetch,
        }
    }

    /// Adds a wish. False if there is no room: it is dropped and counted. One thread does that.
    pub fn add(&self, wish: Wish) -> bool {
        let record = [u64::from(wish.space.0), wish.page.0, 0, 0];
        self.of(wish.what).push(record)
    }

    /// Takes the page of the oldest wish of a kind. One thread does that at a time.
    pub fn next(&self, what: What) -> Option<(SpaceId, VirtPage)> {
        let [space, page, ..] = self.of(what).pop()?;
        Some((SpaceId(space as u32), VirtPage(page)))
    }

    /// Wishes that did not fit so far.
    pub fn dropped(&self) -> u64 {
        self.reclaim.dropped() + self.now.dropped() + self.prefetch.dropped()
    }
}
