//! The latency bounds of all clients: one control for the device that they share, by the same
//! `undercroft_qos::LatencyControl` as in the simulation (docs/design/0038). No I/O.
//!
//! ```text
//!            begin                    end
//!   window     |---- a second --------|
//!   daemon   Tell to all with bounds   ends the windows, Turn to all
//!   clients       Figures, page-ins    obey for three seconds
//! ```
//!
//! The device is the last tier. The buffer is the first, if it is another; each client has a grant
//! of it, so it has room for all. S(t) is the queue of all clients: each that uses the device has
//! its part of it as the size of its batches.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use undercroft_proto::grant::{Bound, Goes, MemberLatency, PageIns, Turn};
use undercroft_qos::{Asks, LatencyControl, Out, QueueLimits, place};
use undercroft_tier::profile::channels;

use crate::config::Budget;
use crate::load;

/// Time of a window, as in a run.
const WINDOW: Duration = Duration::from_secs(1);

/// A window ends without figures that are later than this.
const LATE: Duration = Duration::from_millis(400);

/// The bounds of clients, by the numbers of their connections.
pub(crate) struct Bounds {
    control: LatencyControl,
    /// Where each client with a bound is in the control.
    places: BTreeMap<u64, usize>,
    /// Clients have come or gone since they were placed.
    stirred: bool,
    /// When the next window may begin.
    next: Duration,
    /// The window in progress: since when, and whose figures are awaited.
    window: Option<(Duration, BTreeSet<u64>)>,
}

impl Bounds {
    /// `None`: clients have no device in common.
    pub(crate) fn new(tiers: &[Budget]) -> Option<Bounds> {
        let last = tiers.last()?;
        if last.spec.facts().charged_to_limit {
            return None;
        }
        let channels = channels(last.spec.shape, last.profile.as_ref());
        let has_buffer = tiers.len() > 1;
        let limits = QueueLimits::of_device(channels, has_buffer);
        Some(Bounds {
            control: LatencyControl::new(limits, &[], has_buffer),
            places: BTreeMap::new(),
            stirred: false,
            next: Duration::ZERO,
            window: None,
        })
    }

    /// Whether a client has a bound here.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.places.contains_key(&id)
    }

    /// Whether any client has one.
    pub(crate) fn are_any(&self) -> bool {
        !self.places.is_empty()
    }

    /// A client has answered.
    pub(crate) fn heard(&mut self, id: u64) {
        if let Some((_, awaited)) = &mut self.window {
            awaited.remove(&id);
        }
    }

    /// A client tells its page-ins, or that it has no bound.
    pub(crate) fn note(&mut self, id: u64, page_ins: Option<&PageIns>) {
        let Some(page_ins) = page_ins else {
            return self.leave(id);
        };
        let at = self.place_of(id, page_ins.bound);
        let mut sum = 0;
        if let Some(monitor) = self.control.monitor_mut(at) {
            for (bucket, count) in page_ins.all.each() {
                monitor.add_many(bucket, count);
                sum += u64::from(count);
            }
            monitor.add_over(page_ins.over.min(sum));
        }
        for (bucket, count) in page_ins.device.each() {
            self.control.add_queued_many(at, bucket, count);
        }
    }

    /// Where a client with this bound is in the control. It begins anew if its bound is another.
    fn place_of(&mut self, id: u64, bound: Bound) -> usize {
        let known = self.places.get(&id).copied();
        let at = known.unwrap_or_else(|| {
            let taken: BTreeSet<usize> = self.places.values().copied().collect();
            (0..).find(|at| !taken.contains(at)).unwrap_or_default()
        });
        self.control.make_room(at + 1);
        match known {
            Some(_) => self.stirred |= self.control.change_bound(at, bound.0),
            None => {
                self.control.join(at, bound.0);
                self.places.insert(id, at);
                self.stirred = true;
            }
        }
        at
    }

    /// A client has no bound any more, or is gone.
    pub(crate) fn leave(&mut self, id: u64) {
        self.heard(id);
        if let Some(at) = self.places.remove(&id) {
            self.control.leave(at);
            self.stirred = true;
        }
    }

    /// Whether the figures of all clients with bounds are to be asked for: a window begins.
    ///
    /// * `is_active`: one of them has page-ins.
    pub(crate) fn begins(&mut self, now: Duration, is_active: bool) -> bool {
        if self.window.is_some() || now < self.next || !is_active {
            return false;
        }
        self.next = now + WINDOW;
        self.window = Some((now, self.places.keys().copied().collect()));
        true
    }

    /// Ends the window if all figures are here, or too late. True: knobs may have changed.
    ///
    /// * `asks`: what each client asks for, if it is known what the devices can serve.
    pub(crate) fn ends(
        &mut self,
        now: Duration,
        tiers: &[Budget],
        asks: impl Fn() -> BTreeMap<u64, Asks>,
    ) -> bool {
        let Some((begun, awaited)) = &self.window else {
            return false;
        };
        if !awaited.is_empty() && now < *begun + LATE {
            return false;
        }
        self.window = None;
        if self.places.is_empty() {
            return false;
        }
        self.control.end_windows();
        if std::mem::take(&mut self.stirred) {
            self.place(tiers, &asks());
        }
        true
    }

    /// Tells the control which clients the device cannot serve, as admission weighs it.
    fn place(&mut self, tiers: &[Budget], asks: &BTreeMap<u64, Asks>) {
        let Some(devices) = load::devices(tiers) else {
            return;
        };
        // A run may have another bound than its class.
        let bound_of = |id: &u64| Some(self.control.monitor(*self.places.get(id)?)?.bound());
        let set = asks.iter().map(|(id, asks)| Asks {
            bound: bound_of(id),
            ..*asks
        });
        let set: Vec<Asks> = set.collect();
        // A bound that cannot be kept is kept as well as it can be.
        let Ok(buffered) = place(&set, &devices) else {
            return;
        };
        for (id, buffered) in asks.keys().zip(buffered) {
            if let Some(at) = self.places.get(id) {
                self.control.place(*at, buffered, 0);
            }
        }
    }

    /// How the knobs of a client are to be turned.
    ///
    /// * `at_device`: clients that page in now and whose pages go to the device, or may.
    pub(crate) fn turn(&self, id: u64, at_device: u32) -> Turn {
        let goes = match self.places.get(&id).map(|at| self.control.out(*at)) {
            None => Goes::AsPlaced,
            Some(Out::Regular) => Goes::ToDevice,
            Some(Out::Buffer) => Goes::ToBuffer,
        };
        let part = self.control.batch() / at_device.max(1);
        Turn {
            batch: part.max(1),
            goes,
        }
    }

    /// The state of a client's bound, for a user.
    pub(crate) fn status(&self, id: u64, at_device: u32) -> Option<MemberLatency> {
        let monitor = self.control.monitor(*self.places.get(&id)?)?;
        let (windows_kept, windows_missed) = monitor.windows();
        Some(MemberLatency {
            bound: Bound(monitor.bound()),
            windows_kept,
            windows_missed,
            turn: self.turn(id, at_device),
        })
    }
}

#[cfg(test)]
#[path = "bounds_tests.rs"]
mod tests;
