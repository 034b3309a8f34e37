//! A process among those that it was forked from, and that were forked from it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use undercroft_base::{SpaceId, VirtPage};

use crate::space::trail::Trail;

/// The number by which a fork child is to announce itself, and the thread that may do so.
pub(crate) struct Ticket {
    pub nonce: u64,
    pub thread: u32,
}

/// The part of a process that only forks need.
pub(crate) struct Relatives {
    /// The address space from which it was forked under management: its books are a copy of the
    /// parent's.
    pub parent: Option<SpaceId>,
    /// The first address space of its tree of forks. Processes of one family may share frames.
    pub family: SpaceId,
    /// A page that is always missing. Its fault shows which userfaultfd a fork child has.
    pub beacon: VirtPage,
    pub trail: Trail,
    /// The books of this fork child have been corrected by its own mappings.
    pub corrected: AtomicBool,
    /// Held while they are corrected.
    pub correction: Mutex<()>,
    /// The only thread of this fork child: its memory held the number on the beacon.
    pub proven: OnceLock<u32>,
    /// Its mappings cannot be read, so its books stay wrong.
    pub unreadable: AtomicBool,
    /// Valid for one announcement.
    pub ticket: Mutex<Option<Ticket>>,
}

impl Relatives {
    /// * `family`: that of the process that forked it, or its own number.
    pub(crate) fn new(beacon: VirtPage, parent: Option<SpaceId>, family: SpaceId) -> Relatives {
        Relatives {
            parent,
            family,
            beacon,
            trail: Trail::default(),
            corrected: AtomicBool::new(false),
            correction: Mutex::default(),
            proven: OnceLock::new(),
            unreadable: AtomicBool::new(false),
            ticket: Mutex::default(),
        }
    }

    /// False for a fork child whose books may still be those of its parent.
    pub(crate) fn is_corrected(&self) -> bool {
        self.parent.is_none() || self.corrected.load(Ordering::Acquire)
    }
}
