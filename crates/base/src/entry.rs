//! The page entry: all that the ledger knows of a page, in one 64-bit word. It survives the
//! manager.
//!
//! ```text
//! 63            48 47                               15 14  12 11     3 2    0
//! +---------------+-----------------------------------+------+--------+------+
//! | stamp 16      | slot 33                           |tier 3|flags 9 |state3|
//! +---------------+-----------------------------------+------+--------+------+
//! ```
//! All zero bits = `Untouched`, so fresh ledger memory needs no initialisation.

use crate::ids::{Slot, Stamp, TierId};

/// The state of a page. Only the client's engine writes it.
///
/// `Untouched -> Resident -> Evicting -> Stored -> Loading -> Resident`. Also `Evicting ->
/// Resident` when the page is touched or refused, `Loading -> Lost` when no copy verifies, and any
/// state `-> Untouched` when the program drops the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// Never touched, or dropped by the program: reads as zeros.
    Untouched = 0,
    /// Mapped in the client's memory.
    Resident = 1,
    /// Being evicted: its bytes are in the client or in the evictor's hands.
    Evicting = 2,
    /// Not in memory; the tier slot holds its bytes.
    Stored = 3,
    /// Being loaded: the slot still holds its bytes.
    Loading = 4,
    /// No copy could be verified. A touch is an error that the client sees; it never gets wrong
    /// bytes.
    Lost = 5,
}

/// The state of each number. A number without a state is `Lost`.
const STATES: [PageState; 8] = [
    PageState::Untouched,
    PageState::Resident,
    PageState::Evicting,
    PageState::Stored,
    PageState::Loading,
    PageState::Lost,
    PageState::Lost,
    PageState::Lost,
];

/// Facts besides the state; nine bits, of which four have no meaning yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u16);

impl Flags {
    /// Never evict: thread control blocks, pages a device or the user has pinned.
    pub const LOCKED: Flags = Flags(1);
    /// Resident, and the slot still holds what was loaded. If the page is unchanged, eviction
    /// writes nothing.
    pub const RETAINED: Flags = Flags(2);
    /// Installed by prefetch and not yet known to be used.
    pub const PREFETCHED: Flags = Flags(4);
    /// A fork relative refers to the same slot: the engine's reference counts tell when it is free.
    pub const SHARED: Flags = Flags(8);
    /// Resident, in a frame that a fork relative is charged for: it costs no memory of its own yet.
    pub const INHERITED: Flags = Flags(16);

    /// The flags above.
    pub const KNOWN: Flags = Flags(31);

    /// True when every bit of `other` is set.
    #[inline]
    pub fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags and those of `other`.
    #[inline]
    pub fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// These flags without those of `other`.
    #[inline]
    pub fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }
}

/// All bits of the flags.
const FLAGS: u16 = 0x1ff;

/// A page's entry, unpacked. Fields that a state does not use are zero, except LOCKED. A resident
/// page without a copy has the tier `FILL` if it [has left](Entry::has_left).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where the page is.
    pub state: PageState,
    /// Facts besides the state.
    pub flags: Flags,
    /// Tier of the stored copy (Stored, Loading, or RETAINED).
    pub tier: TierId,
    /// Slot of the stored copy, or the fill word for `TierId::FILL`.
    pub slot: Slot,
    /// Generation of the stored copy.
    pub stamp: Stamp,
}

impl Entry {
    /// A page that was never touched.
    pub const UNTOUCHED: Entry = Entry {
        state: PageState::Untouched,
        flags: Flags(0),
        tier: TierId(0),
        slot: Slot(0),
        stamp: Stamp(0),
    };

    /// Packs into the ledger word. Panics if the slot needs more than 33 bits: a tier's bug, and
    /// the word would point at another page's bytes.
    #[inline]
    pub fn pack(self) -> u64 {
        assert!(
            self.slot.0 < Slot::LIMIT,
            "slot {:?} does not fit an entry",
            self.slot
        );
        self.state as u64
            | (u64::from(self.flags.0 & FLAGS) << 3)
            | (u64::from(self.tier.0 & 7) << 12)
            | (self.slot.0 << 15)
            | (u64::from(self.stamp.0) << 48)
    }

    /// Whether this resident page was out of memory since it last came as zeros, or may have been.
    /// A page that was chosen to leave, and that the agent refused to take, was not.
    #[inline]
    pub fn has_left(self) -> bool {
        self.flags.has(Flags::RETAINED) || self.tier == TierId::FILL
    }

    /// This resident page, which was out of memory.
    #[inline]
    pub fn that_left(self) -> Entry {
        let keeps = self.flags.has(Flags::RETAINED);
        let tier = if keeps { self.tier } else { TierId::FILL };
        Entry { tier, ..self }
    }

    /// The same ledger word with another state.
    #[inline]
    pub fn with_state(word: u64, state: PageState) -> u64 {
        word & !7 | state as u64
    }

    /// Unpacks a ledger word. An unknown state (a corrupt ledger) reads as `Lost`, never as good
    /// data.
    #[inline]
    pub fn unpack(word: u64) -> Entry {
        Entry {
            state: STATES[(word & 7) as usize],
            flags: Flags((word >> 3) as u16 & FLAGS),
            tier: TierId((word >> 12) as u8 & 7),
            slot: Slot((word >> 15) & (Slot::LIMIT - 1)),
            stamp: Stamp((word >> 48) as u16),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_pack_unpack_keeps_every_field() {
        for state in [
            PageState::Untouched,
            PageState::Resident,
            PageState::Evicting,
            PageState::Stored,
            PageState::Loading,
            PageState::Lost,
        ] {
            for flags in 0..=FLAGS {
                for (tier, slot, stamp) in
                    [(0, 0, 0), (6, Slot::LIMIT - 1, 0xffff), (3, 0x12345, 7)]
                {
                    let entry = Entry {
                        state,
                        flags: Flags(flags),
                        tier: TierId(tier),
                        slot: Slot(slot),
                        stamp: Stamp(stamp),
                    };
                    assert_eq!(Entry::unpack(entry.pack()), entry);
                }
            }
        }
    }

    #[test]
    fn entry_of_a_page_that_left_keeps_its_copy_and_says_so() {
        let fresh = Entry {
            state: PageState::Resident,
            ..Entry::UNTOUCHED
        };
        assert!(!fresh.has_left() && fresh.that_left().has_left());
        let kept = Entry {
            flags: Flags::RETAINED,
            tier: TierId(1),
            slot: Slot(9),
            ..fresh
        };
        assert!(kept.has_left());
        assert_eq!(kept.that_left(), kept);
    }

    #[test]
    fn entry_zero_word_is_untouched() {
        assert_eq!(Entry::unpack(0), Entry::UNTOUCHED);
    }
}
