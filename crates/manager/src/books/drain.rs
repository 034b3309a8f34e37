//! Tiers that are being emptied, or are (`undercroft tiers drain`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use undercroft_base::{Bytes, PageCount, TierId};

use super::Books;
use crate::report::Drain;
use crate::sync::lock;

/// The drain of one tier.
#[derive(Clone, Copy, Debug)]
struct Begun {
    at: Instant,
    pages: PageCount,
    ended: Option<Instant>,
}

/// The drains of a run.
#[derive(Default)]
pub(crate) struct Drains {
    begun: Mutex<Vec<Option<Begun>>>,
    /// No tier takes what is left at the moment.
    pub stuck: AtomicBool,
}

impl Books {
    /// Closes a tier and has it emptied. Again: changes nothing.
    ///
    /// Errors: why not; nothing is changed. For the user.
    pub(crate) fn drain(&self, tier: TierId) -> Result<(), String> {
        let at = usize::from(tier.0);
        let Some(metered) = self.tiers.get(at) else {
            let count = self.tiers.len();
            return Err(format!("there is no tier {}; the run has {count}", at + 1));
        };
        let mut begun = lock(&self.drains.begun);
        begun.resize(self.tiers.len(), None);
        if begun[at].is_some() {
            return Ok(());
        }
        let is_open = |other: &usize| *other != at && begun[*other].is_none();
        let open: Vec<usize> = (0..self.tiers.len()).filter(is_open).collect();
        if open.is_empty() {
            return Err("it is the only tier in use; pages would have nowhere to go".to_owned());
        }
        let needed = metered.tier.usage().logical;
        let room = open.iter().map(|at| self.tiers[*at].state().headroom().0);
        let room = Bytes(room.fold(0, u64::saturating_add));
        if room < needed {
            return Err(format!(
                "it holds pages of {needed}, and the other tiers have room for {room}"
            ));
        }
        begun[at] = Some(Begun {
            at: Instant::now(),
            pages: needed.pages_floor(),
            ended: None,
        });
        drop(begun);
        self.engine().migrations().close(tier);
        Ok(())
    }

    /// The first tier that is closed and not empty.
    pub(crate) fn to_drain(&self) -> Option<TierId> {
        let mut begun = lock(&self.drains.begun);
        for (at, begun) in begun.iter_mut().enumerate() {
            let Some(begun) = begun else { continue };
            if self.tiers[at].tier.usage().logical > Bytes(0) {
                return Some(TierId(at as u8));
            }
            begun.ended.get_or_insert_with(Instant::now);
        }
        None
    }

    /// How far the drain of a tier is; `None`: it has none.
    pub(crate) fn drain_of(&self, at: usize) -> Option<Drain> {
        let begun = (*lock(&self.drains.begun).get(at)?)?;
        let left = self.tiers[at].tier.usage().logical.pages_floor();
        let end = begun.ended.unwrap_or_else(Instant::now);
        let seconds = end.saturating_duration_since(begun.at).as_secs_f64();
        let moved = begun.pages.0.saturating_sub(left.0);
        let stuck = left.0 > 0 && self.drains.stuck.load(Ordering::Relaxed);
        let rate = moved as f64 / seconds;
        Some(Drain {
            pages: begun.pages.0,
            pages_left: left.0,
            seconds,
            seconds_left: (rate > 0.0 && !stuck).then(|| left.0 as f64 / rate),
            stuck,
        })
    }
}
