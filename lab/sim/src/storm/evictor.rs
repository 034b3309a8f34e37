//! The evictor of a storm: the reclaim machine, and how long it sleeps.

use undercroft_base::{Bytes, Nanos};
use undercroft_engine::reclaim::Reclaimer;
use undercroft_seeded::mix;

use super::setup::StormSetup;

/// Batches that may be in flight: one in half of all storms, like a manager on few CPUs.
pub(super) fn batches(seed: u64) -> usize {
    [1, 1, 2, 3][(mix(seed ^ 0xba7c) % 4) as usize]
}

/// The machine, and what the evictor does by its word.
#[derive(Debug)]
pub struct Evictor {
    pub(super) machine: Reclaimer,
    /// The evictor sleeps or rests until then.
    pub(super) until: Nanos,
    /// The evictor sleeps, and a kick wakes it.
    pub(super) sleeps: bool,
    /// The limit that is approached.
    pub(super) asked: Option<Bytes>,
    /// Batches of pages that a user has named.
    pub(super) named: u32,
}

impl Evictor {
    pub(super) fn new(seed: u64) -> Evictor {
        Evictor {
            machine: Reclaimer::new(batches(seed)),
            until: Nanos(0),
            sleeps: false,
            asked: None,
            named: 0,
        }
    }
}

/// Time of a step: rests are a few steps in some storms, and many in others.
pub(super) fn step_time(setup: &StormSetup) -> Nanos {
    let micros = [200, 1000, 5000][(mix(setup.seed ^ 0x71e) % 3) as usize];
    Nanos(micros * 1000)
}
