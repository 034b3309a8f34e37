//! Events that a plugin hears. The numbers are part of the interface.

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::{BookEvent, PageEvent};

/// The kind of an event. Part of ABI 1: a number never changes its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A fault brought the page in. Detail: bit 0 is 1 for a write, the other bits are the thread.
    Fault = 1,
    /// The page came in with a fault on another page.
    CameAlong = 2,
    /// The page was chosen, and leaves memory.
    Left = 3,
    /// The page was chosen, and stays or was put back.
    Stayed = 4,
    /// A scan of access bits found the page used.
    Used = 5,
    /// The page is in memory, and was not known.
    Found = 6,
    /// The program dropped what it had in the range.
    Dropped = 7,
    /// The range moved. Detail: the page with which its new place begins.
    Moved = 8,
    /// The space is a fork child, and has what its parent has. Detail: the parent.
    Forked = 9,
    /// The space is gone.
    Ended = 10,
    /// The limit was set. Detail: bytes.
    Limit = 11,
    /// Time passes. Detail: milliseconds since the start.
    Tick = 12,
    /// Events were dropped, because the plugin was late. Detail: how many.
    Lost = 13,
    /// Some of the 64 pages from `page` on were used since the last scan. Detail: a bit for each,
    /// that of the first page is the lowest.
    Accessed = 14,
    /// All uses that a scan found in the space have been told. Pages: how many they are. Detail:
    /// milliseconds since the start.
    Scanned = 15,
    /// A copy of the page was written. Detail: bit 0 is 1 if it moved between tiers, and 0 if the
    /// page left memory; the other bits are the tier where it is.
    Stored = 16,
    /// A thread waited for the page, which came from a tier. Detail: the tier. It follows
    /// [`Kind::Fault`].
    Loaded = 17,
}

const KINDS: [Kind; 17] = [
    Kind::Fault,
    Kind::CameAlong,
    Kind::Left,
    Kind::Stayed,
    Kind::Used,
    Kind::Found,
    Kind::Dropped,
    Kind::Moved,
    Kind::Forked,
    Kind::Ended,
    Kind::Limit,
    Kind::Tick,
    Kind::Lost,
    Kind::Accessed,
    Kind::Scanned,
    Kind::Stored,
    Kind::Loaded,
];

impl Kind {
    /// The kinds of events that have a space.
    pub fn of_spaces() -> impl Iterator<Item = Kind> {
        let plain = |kind: &Kind| matches!(kind, Kind::Limit | Kind::Tick | Kind::Lost);
        KINDS.into_iter().filter(move |kind| !plain(kind))
    }

    /// Whether only a plugin that asks for tiers hears of it.
    pub fn is_of_tiers(self) -> bool {
        matches!(self, Kind::Stored | Kind::Loaded)
    }
}

/// Bits of the detail of a fault: a thread, and whether it wrote. The page of a table of page
/// tables is above them in an event's words: those of a guest of up to 8 TiB.
const FAULT_BITS: u32 = 33;

/// An event. Pages are numbers: the address divided by the size of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The kind.
    pub kind: Kind,
    /// The address space; 0 where there is none.
    pub space: SpaceId,
    /// The first page.
    pub page: u64,
    /// How many pages.
    pub pages: u64,
    /// By kind.
    pub detail: u64,
    /// Of a fault: the address of the instruction, if it is known and asked for; otherwise 0.
    pub at: u64,
    /// Of a fault of a guest: the address of its top page table, likewise.
    pub cr3: u64,
}

impl Event {
    /// An event of no page.
    pub fn plain(kind: Kind, detail: u64) -> Event {
        Event {
            kind,
            space: SpaceId(0),
            page: 0,
            pages: 0,
            detail,
            at: 0,
            cr3: 0,
        }
    }

    /// The event that a plugin hears of a change of the books; `None`: nothing.
    pub fn of(event: BookEvent) -> Option<Event> {
        let on = |kind, space, range: VirtRange, detail| {
            Some(Event {
                kind,
                space,
                page: range.start.0,
                pages: range.count().0,
                detail,
                at: 0,
                cr3: 0,
            })
        };
        let of_tier = |kind, space, page: VirtPage, detail| {
            let range = VirtRange::new(page, page.plus(1));
            on(kind, space, range, detail)
        };
        match event {
            BookEvent::Stored(space, page, tier) => {
                of_tier(Kind::Stored, space, page, u64::from(tier.0) << 1)
            }
            BookEvent::Migrated(space, page, tier) => {
                of_tier(Kind::Stored, space, page, u64::from(tier.0) << 1 | 1)
            }
            BookEvent::Loaded(space, page, tier) => {
                of_tier(Kind::Loaded, space, page, u64::from(tier.0))
            }
            BookEvent::Faulted(fault) => {
                let range = VirtRange::new(fault.page, fault.page.plus(1));
                let detail = u64::from(fault.thread.0) << 1 | u64::from(fault.write);
                on(Kind::Fault, fault.space, range, detail)
            }
            BookEvent::Page(space, page, what) => {
                let range = VirtRange::new(page, page.plus(1));
                let kind = match what {
                    PageEvent::CameAlong => Kind::CameAlong,
                    PageEvent::Chosen => Kind::Left,
                    PageEvent::Stayed | PageEvent::PutBack => Kind::Stayed,
                    PageEvent::Found | PageEvent::FoundShared => Kind::Found,
                    PageEvent::Used => Kind::Used,
                    PageEvent::LeftClean | PageEvent::Kept | PageEvent::TakenBack => return None,
                };
                on(kind, space, range, 0)
            }
            BookEvent::Dropped(space, range) => on(Kind::Dropped, space, range, 0),
            BookEvent::Moved(space, from, to) => on(Kind::Moved, space, from, to.0),
            BookEvent::Forked { parent, child } => Some(Event {
                space: child,
                ..Event::plain(Kind::Forked, u64::from(parent.0))
            }),
            BookEvent::Ended(space) => Some(Event {
                space,
                ..Event::plain(Kind::Ended, 0)
            }),
            BookEvent::Waits(_) | BookEvent::BatchBegan | BookEvent::Locked(..) => None,
        }
    }

    pub(crate) fn words(&self) -> [u64; 4] {
        let head = u64::from(self.space.0) << 8 | self.kind as u64;
        // A fault is of one page, and its detail is short.
        let table = Some(self.cr3 >> 12).filter(|page| page >> (64 - FAULT_BITS) == 0);
        let table = table.unwrap_or(0);
        let (third, fourth) = match self.kind {
            Kind::Fault => (self.at, self.detail | table << FAULT_BITS),
            _ => (self.pages, self.detail),
        };
        [head, self.page, third, fourth]
    }

    /// The event of these words; `None`: they are none.
    pub(crate) fn from_words([head, page, third, fourth]: [u64; 4]) -> Option<Event> {
        let kind = KINDS.get((head as u8).checked_sub(1)? as usize)?;
        let (pages, at, detail, cr3) = match kind {
            Kind::Fault => {
                let detail = fourth & ((1 << FAULT_BITS) - 1);
                (1, third, detail, fourth >> FAULT_BITS << 12)
            }
            _ => (third, 0, fourth, 0),
        };
        Some(Event {
            kind: *kind,
            space: SpaceId((head >> 8) as u32),
            page,
            pages,
            detail,
            at,
            cr3,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_comes_back_from_its_words() {
        for (at, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, at + 1);
            let event = Event {
                kind,
                space: SpaceId(u32::MAX),
                page: u64::MAX,
                pages: if kind == Kind::Fault { 1 } else { 7 },
                detail: 1 << 40,
                at: 0,
                cr3: 0,
            };
            let event = match kind {
                Kind::Fault => Event {
                    detail: (1 << 33) - 1,
                    at: u64::MAX,
                    cr3: 0x7ff_ffff_f000,
                    ..event
                },
                _ => event,
            };
            assert_eq!(Event::from_words(event.words()), Some(event));
        }
        assert_eq!(Event::from_words([0; 4]), None);
        assert_eq!(Event::from_words([18, 0, 0, 0]), None);
    }
}
