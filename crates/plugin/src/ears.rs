//! The two queues between a run and its plugin's thread.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use undercroft_base::{SpaceId, TierId, VirtPage};
use undercroft_engine::limits::DEMOTE_PAGES_MAX;
use undercroft_engine::{BookEvent, Journal, Placing, WishedMove};

use crate::event::{Event, Kind};
use crate::ring::Ring;

/// Events that may wait: as many as a CPU makes in some tens of milliseconds. 2 MiB.
const EVENTS_MAX: usize = 1 << 16;
/// Wishes of a kind that may wait.
const WISHES_MAX: usize = 1 << 12;
/// Pages of one move.
pub const MOVE_PAGES_MAX: u64 = DEMOTE_PAGES_MAX as u64;
/// Pages of moves that may wait, up and down each: half a second's worth. What waited longer would
/// be decided by what is past. A move has a page at least, so the queues have room.
const MOVED_MAX: u64 = WISHES_MAX as u64;

/// Hears the engine, and keeps what a plugin is to hear. It is called with the engine locked, so
/// one thread puts in at a time. Cost of an event: some nanoseconds; no lock, no system call.
pub struct Ears {
    ring: Ring,
    /// Uses come by the scans that the plugin asks for, not one by one.
    by_scans: AtomicBool,
    /// Instructions of faults that are being served, if the plugin asks for those.
    instructions: OnceLock<Instructions>,
    /// The plugin asks where copies are.
    tiers: AtomicBool,
}

/// The newest instruction for each of some sets of pages: of page, address, and the top page table
/// of a guest. Fault threads put them in without a lock. Of two faults at once on pages of one set,
/// one may have none or, seldom, that of the other: a plugin wishes, so that does no harm.
struct Instructions(Box<[[AtomicU64; 3]]>);

/// More than threads that fault at once.
const INSTRUCTIONS: u64 = 1 << 12;

impl Instructions {
    fn place(&self, space: SpaceId, page: VirtPage) -> (&[AtomicU64; 3], u64) {
        let key = page.0 ^ u64::from(space.0) << 40;
        (&self.0[(key % INSTRUCTIONS) as usize], key)
    }

    fn put(&self, space: SpaceId, page: VirtPage, address: u64, cr3: u64) {
        let (place, key) = self.place(space, page);
        place[1].store(address, Ordering::Relaxed);
        place[2].store(cr3, Ordering::Relaxed);
        place[0].store(key, Ordering::Release);
    }

    /// Address and table. 0: it is not known.
    fn take(&self, space: SpaceId, page: VirtPage) -> (u64, u64) {
        let (place, key) = self.place(space, page);
        if place[0].load(Ordering::Acquire) == key {
            let [_, at, cr3] = place;
            (
                at.swap(0, Ordering::Relaxed),
                cr3.swap(0, Ordering::Relaxed),
            )
        } else {
            (0, 0)
        }
    }
}

impl Default for Ears {
    fn default() -> Ears {
        Ears {
            ring: Ring::new(EVENTS_MAX),
            by_scans: AtomicBool::new(false),
            instructions: OnceLock::new(),
            tiers: AtomicBool::new(false),
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
    ///
    /// * `cr3`: of a guest, the address of its top page table; 0: it is not known.
    pub fn faults_at(&self, space: SpaceId, page: VirtPage, address: u64, cr3: u64) {
        if let Some(all) = self.instructions.get() {
            all.put(space, page, address, cr3);
        }
    }

    /// The plugin asks where copies are, or wishes that.
    pub fn ask_tiers(&self) {
        self.tiers.store(true, Ordering::Relaxed);
    }

    /// Whether it does.
    pub fn asks_tiers(&self) -> bool {
        self.tiers.load(Ordering::Relaxed)
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
            && (!event.kind.is_of_tiers() || self.asks_tiers())
        {
            if event.kind == Kind::Fault
                && let Some(all) = self.instructions.get()
            {
                (event.at, event.cr3) = all.take(event.space, VirtPage(event.page));
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
    /// When the page next leaves, a new copy of it shall be in this tier.
    Place(TierId),
    /// When a thread waits for the page, this one of its space shall come along, and what comes
    /// with that. The page itself: none.
    Link(VirtPage),
    /// The copies of some pages, from the page on, shall move from one tier to another.
    Move {
        /// How many; [`MOVE_PAGES_MAX`](crate::MOVE_PAGES_MAX) at most.
        pages: u64,
        /// Where they are.
        from: TierId,
        /// Where they shall go.
        to: TierId,
    },
}

/// A page, and the plugin's wish for it. All numbers may be of nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The wish.
    pub what: What,
    /// The address space.
    pub space: SpaceId,
    /// The page.
    pub page: VirtPage,
}

/// Pages that more moves may have: those to a faster tier, for whose pages a thread may wait, and
/// the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovesFree {
    /// Of moves up.
    pub up: u64,
    /// Of the others.
    pub down: u64,
}

/// Moves that wait, and how many pages they have.
struct Moves {
    ring: Ring,
    pages: AtomicU64,
}

impl Default for Moves {
    fn default() -> Moves {
        Moves {
            ring: Ring::new(WISHES_MAX),
            pages: AtomicU64::new(0),
        }
    }
}

impl Moves {
    fn free(&self) -> u64 {
        MOVED_MAX.saturating_sub(self.pages.load(Ordering::Acquire))
    }

    fn push(&self, [space, page, pages, tiers]: [u64; 4]) -> bool {
        if pages == 0 || pages > self.free() {
            self.ring.refuse();
            return false;
        }
        self.pages.fetch_add(pages, Ordering::AcqRel);
        self.ring.push([space, page, pages, tiers])
    }

    /// Takes the oldest moves between the same tiers, as many as are made together.
    fn take(&self, out: &mut Vec<WishedMove>) {
        let mut left = MOVE_PAGES_MAX;
        while let Some([space, page, pages, tiers]) = self.ring.peek() {
            let wish = WishedMove {
                space: SpaceId(space as u32),
                page: VirtPage(page),
                pages,
                from: TierId((tiers >> 8) as u8),
                to: TierId(tiers as u8),
            };
            let other = |of: &WishedMove| (of.from, of.to) != (wish.from, wish.to);
            if pages > left || out.first().is_some_and(other) {
                break;
            }
            self.ring.pop();
            self.pages.fetch_sub(pages, Ordering::AcqRel);
            left -= pages;
            out.push(wish);
        }
    }
}

/// Wishes on their way: to the thread that chooses victims, to those that load pages, and to that
/// which moves copies.
pub struct Wishes {
    reclaim: Ring,
    now: Ring,
    prefetch: Ring,
    places: Ring,
    up: Moves,
    down: Moves,
}

impl Default for Wishes {
    fn default() -> Wishes {
        Wishes {
            reclaim: Ring::new(WISHES_MAX),
            now: Ring::new(WISHES_MAX),
            prefetch: Ring::new(WISHES_MAX),
            places: Ring::new(WISHES_MAX),
            up: Moves::default(),
            down: Moves::default(),
        }
    }
}

impl Wishes {
    fn of(&self, what: What) -> Option<&Ring> {
        match what {
            What::Reclaim => Some(&self.reclaim),
            What::ReclaimNow => Some(&self.now),
            What::Prefetch => Some(&self.prefetch),
            What::Place(_) | What::Link(_) => Some(&self.places),
            What::Move { .. } => None,
        }
    }

    /// Adds a wish. False if there is no room: it is dropped and counted. One thread does that.
    pub fn add(&self, wish: Wish) -> bool {
        let (space, page) = (u64::from(wish.space.0), wish.page.0);
        match wish.what {
            What::Move { pages, from, to } => {
                let moves = if to < from { &self.up } else { &self.down };
                moves.push([space, page, pages, u64::from(from.0) << 8 | u64::from(to.0)])
            }
            What::Place(tier) => self.places.push([space, page, tier.0.into(), 0]),
            What::Link(next) => self.places.push([space, page, next.0, 1]),
            what => self
                .of(what)
                .is_some_and(|ring| ring.push([space, page, 0, 0])),
        }
    }

    /// Takes the page of the oldest wish of a kind. One thread does that at a time.
    pub fn next(&self, what: What) -> Option<(SpaceId, VirtPage)> {
        let [space, page, ..] = self.of(what)?.pop()?;
        Some((SpaceId(space as u32), VirtPage(page)))
    }

    /// Takes the oldest page for which a tier or a companion is wished. One thread does that at a
    /// time.
    pub fn next_place(&self) -> Option<(SpaceId, VirtPage, Placing)> {
        let [space, page, which, is_link] = self.places.pop()?;
        let placing = match is_link {
            0 => Placing::In(TierId(which as u8)),
            _ => Placing::With(VirtPage(which)),
        };
        Some((SpaceId(space as u32), VirtPage(page), placing))
    }

    /// Takes the oldest moves between the same two tiers, as many as are made together; those to a
    /// faster tier come first. One thread does that at a time.
    pub fn next_moves(&self, out: &mut Vec<WishedMove>) {
        out.clear();
        self.up.take(out);
        if out.is_empty() {
            self.down.take(out);
        }
    }

    /// How many pages more moves may have.
    pub fn moves_free(&self) -> MovesFree {
        MovesFree {
            up: self.up.free(),
            down: self.down.free(),
        }
    }

    /// Wishes that did not fit so far.
    pub fn dropped(&self) -> u64 {
        let pages = [&self.reclaim, &self.now, &self.prefetch, &self.places];
        let all = pages.into_iter().chain([&self.up.ring, &self.down.ring]);
        all.map(Ring::dropped).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that was written before there were tiers hears what it heard then.
    #[test]
    fn a_policy_that_does_not_ask_for_tiers_hears_nothing_of_them() {
        let all = |ears: &Ears| {
            ears.note(BookEvent::Stored(SpaceId(1), VirtPage(5), TierId(2)));
            ears.note(BookEvent::Migrated(SpaceId(1), VirtPage(5), TierId(0)));
            ears.note(BookEvent::Loaded(SpaceId(1), VirtPage(5), TierId(3)));
            let next = std::iter::from_fn(|| ears.next());
            next.map(|of| (of.kind, of.page, of.detail))
                .collect::<Vec<_>>()
        };
        let ears = Ears::default();
        assert_eq!(all(&ears), []);
        ears.ask_tiers();
        let told = [
            (Kind::Stored, 5, 4),
            (Kind::Stored, 5, 1),
            (Kind::Loaded, 5, 3),
        ];
        assert_eq!(all(&ears), told);
    }

    /// Of moves the queue is short, those up come first, and the queue says how many fit.
    #[test]
    fn moves_wait_in_short_queues_and_those_up_come_first() {
        let wishes = Wishes::default();
        let wish = |page, from, to| Wish {
            what: What::Move {
                pages: 9,
                from: TierId(from),
                to: TierId(to),
            },
            space: SpaceId(3),
            page: VirtPage(page),
        };
        assert!((0..4096 / 9).all(|page| wishes.add(wish(page, 0, 1))));
        assert!(!wishes.add(wish(64, 0, 1)), "the queue has a bound");
        assert!(wishes.add(wish(70, 2, 0)) && wishes.add(wish(71, 3, 0)));
        let free = MovesFree {
            up: 4096 - 18,
            down: 1,
        };
        assert_eq!((wishes.moves_free(), wishes.dropped()), (free, 1));
        let mut next = Vec::new();
        let mut all = std::iter::repeat_with(|| {
            wishes.next_moves(&mut next);
            let first = next
                .first()
                .map(|of| (of.page.0, of.pages, of.from.0, of.to.0));
            (next.len(), first)
        });
        assert_eq!(all.next(), Some((1, Some((70, 9, 2, 0)))));
        assert_eq!(
            all.next(),
            Some((1, Some((71, 9, 3, 0)))),
            "it is from another tier"
        );
        // 28 times 9 pages move together.
        assert_eq!(all.next(), Some((28, Some((0, 9, 0, 1)))));
        let rest = all
            .take_while(|(count, _)| *count > 0)
            .map(|(count, _)| count);
        assert_eq!(rest.sum::<usize>(), 4096 / 9 - 28);
        let free = MovesFree {
            up: 4096,
            down: 4096,
        };
        assert_eq!(wishes.moves_free(), free);
        let place = Wish {
            what: What::Place(TierId(4)),
            ..wish(5, 0, 0)
        };
        let link = Wish {
            what: What::Link(VirtPage(u64::MAX)),
            ..place
        };
        assert!(wishes.add(place) && wishes.add(link));
        let of = |placing| Some((SpaceId(3), VirtPage(5), placing));
        let next = [(); 3].map(|()| wishes.next_place());
        let in_turn = [Placing::In(TierId(4)), Placing::With(VirtPage(u64::MAX))].map(of);
        assert_eq!(next, [in_turn[0], in_turn[1], None]);
    }
}
