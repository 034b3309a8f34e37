//! The books of address spaces that are gone and of ranges that were cut off, until all of their
//! pages are forgotten. `parts.rs` forgets them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use undercroft_base::{SpaceId, VirtRange};

use super::process::Process;
use crate::sync::lock;

/// Books that are still to be forgotten.
pub(super) struct Dead {
    pub space: SpaceId,
    /// `None`: a range that was cut off, and not a whole address space.
    pub process: Option<Arc<Process>>,
    pub relatives: Vec<SpaceId>,
    /// Some of it is forgotten already.
    pub began: bool,
    /// The part that is not forgotten yet.
    pub left: VirtRange,
    pub cancel_batch: bool,
}

/// All books that are still to be forgotten, the oldest first.
#[derive(Default)]
pub(crate) struct Graves(Mutex<VecDeque<Dead>>);

impl Graves {
    pub(super) fn push(&self, dead: Dead) {
        lock(&self.0).push_back(dead);
    }

    pub(super) fn pop(&self) -> Option<Dead> {
        lock(&self.0).pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }
}
