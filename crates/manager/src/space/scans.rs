//! Finds of the scans of Accessed bits for the run's policy file, if it asks for them.
//!
//! One thread scans, for the built-in policies and for the file, because a scan clears the bits. So
//! what is found between two tellings adds up, and the file hears it at the interval that it asked
//! for, by the same queue as all other events. It hears of a space from the second scan on: at the
//! first, a bit may be of long ago.

use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::{SpaceId, VirtPage};
use undercroft_plugin::Found;

use crate::advice::Advice;
use crate::space::shared::Shared;

/// Events put into the queue under one hold of the engine's lock: some 5 us.
const EVENTS_A_HOLD: usize = 512;

/// Finds for one policy file.
#[derive(Default)]
pub(super) struct ForPolicy {
    /// The file's, and when it was told last, or began to ask.
    of: Option<(Arc<Advice>, Instant)>,
    found: Found,
}

impl ForPolicy {
    /// When the file that is in force now is to be told next. `None`: it does not ask.
    pub(super) fn due(&mut self, shared: &Shared) -> Option<Instant> {
        let advice = shared
            .books
            .advice()
            .filter(|of| of.scan_interval().is_some());
        let same = match (&self.of, &advice) {
            (Some((one, _)), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        };
        if !same {
            *self = ForPolicy {
                of: advice.map(|of| (of, Instant::now())),
                found: Found::default(),
            };
        }
        let (advice, told) = self.of.as_ref()?;
        Some(*told + advice.scan_interval().unwrap_or(Duration::ZERO))
    }

    /// A scan of a space has ended.
    ///
    /// * `again`: another was before it.
    pub(super) fn note(&mut self, space: SpaceId, used: &[VirtPage], again: bool) {
        if self.of.is_some() {
            used.iter().for_each(|page| self.found.add(space, *page));
            if again {
                self.found.scanned(space);
            }
        }
    }

    /// Tells the file, if it is time.
    pub(super) fn tell(&mut self, shared: &Shared) {
        let now = Instant::now();
        if self.due(shared).is_none_or(|due| due > now) {
            return;
        }
        let Some((advice, told)) = &mut self.of else {
            return;
        };
        *told = now;
        let events = self.found.take(shared.elapsed().as_millis() as u64);
        for some in events.chunks(EVENTS_A_HOLD) {
            let _one_at_a_time = shared.books.engine();
            some.iter().for_each(|event| advice.ears.put(event));
        }
    }

    /// Bytes of what is remembered.
    pub(super) fn bytes(&self) -> u64 {
        self.found.bytes()
    }
}
