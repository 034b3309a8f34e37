//! Latency bounds of a replay: the control of `undercroft-qos` in virtual time.
//!
//! The regular zone is the last tier, and its queue is the device's deferred writes. The buffer is
//! the first tier, if there is more than one. A page of a client that uses the regular zone goes to
//! the last tier first; a page of a client that uses the buffer goes to the first (`buffer.rs`).

use undercroft_base::Nanos;
use undercroft_device::Time;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_policy::place::{LatencyClass, TierOrder};
use undercroft_qos::{Control, LatencyBound, Monitor, Out, QueueLimits};

use crate::setup::{Setup, SetupError, TierModel};

/// The control of all clients, and its next window.
pub(super) struct Bounds {
    control: Control,
    /// False: page-ins are only measured.
    turns: bool,
    /// How fast the first tier is.
    first: LatencyClass,
    window: Time,
    window_end: Time,
}

impl Bounds {
    /// Before time begins. `None`: no client has a bound.
    ///
    /// Errors: more than one bound, and not as many as clients.
    pub(super) fn new(setup: &Setup, clients: usize) -> Result<Option<Bounds>, SetupError> {
        let given = &setup.latency.bounds;
        let shares = setup.sharing.as_ref();
        let promised = shares.is_some_and(|of| of.terms.iter().any(|of| of.bound.is_some()));
        let bounds: Vec<Option<LatencyBound>> = match given[..] {
            // Clients join as they come.
            [] if promised => vec![None; clients],
            [] => return Ok(None),
            [one] => vec![Some(one); clients],
            _ if given.len() == clients => given.iter().copied().map(Some).collect(),
            _ => {
                return Err(SetupError::option(
                    "--latency",
                    &format!("{} bounds", given.len()),
                    format!("the trace has {clients} client(s)"),
                    "give one bound for all, or one for each client",
                ));
            }
        };
        let has_buffer = setup.tiers.len() > 1;
        let channels = match setup.tiers.last().map(|tier| &tier.kind) {
            Some(TierModel::Device { profile, .. }) => profile.channels,
            _ => 1,
        };
        let limits = QueueLimits::of_device(channels, has_buffer);
        let window = Time(setup.latency.window.0 * 1000);
        Ok(Some(Bounds {
            control: Control::new(limits, &bounds, has_buffer),
            turns: setup.latency.control,
            first: setup.tiers[0].kind.latency(),
            window,
            window_end: window,
        }))
    }

    /// A client with a bound comes.
    pub(super) fn join(&mut self, client: usize, bound: LatencyBound) {
        self.control.join(client, bound);
    }

    /// A client goes.
    pub(super) fn leave(&mut self, client: usize) {
        self.control.leave(client);
    }

    /// A page-in of a client ended at `now`. True if a window ended before it, so that knobs may
    /// have changed.
    ///
    /// * `queued`: it came from the last tier.
    pub(super) fn note(&mut self, client: usize, now: Time, took: Nanos, queued: bool) -> bool {
        let ended = now >= self.window_end;
        if ended {
            self.control.end_windows();
            while self.window_end <= now {
                self.window_end += self.window;
            }
        }
        if let Some(monitor) = self.control.monitor_mut(client) {
            monitor.add(took);
        }
        if queued {
            self.control.add_queued(took);
        }
        ended && self.turns
    }

    /// Ends the last window.
    pub(super) fn finish(&mut self) {
        self.control.end_windows();
    }

    /// The page-ins of a client.
    pub(super) fn monitor(&self, client: usize) -> Option<&Monitor> {
        self.control.monitor(client)
    }

    /// Requests that may be in the queue. `None`: nothing bounds it.
    pub(super) fn slots(&self) -> Option<u32> {
        self.turns.then(|| self.control.slots())
    }

    /// Pages of one reclaim batch.
    pub(super) fn batch(&self) -> usize {
        let batch = self.control.batch() as usize;
        if self.turns {
            batch.clamp(1, EVICT_PAGES_MAX)
        } else {
            EVICT_PAGES_MAX
        }
    }

    /// Whether the pages of a client go to the buffer. Never if bounds are only measured: then
    /// there is no buffer, as in the paper's kernel without NVSwap.
    pub(super) fn uses_buffer(&self, client: usize) -> bool {
        self.turns && self.control.out(client) == Out::Buffer
    }

    /// Whether the pages of a client are kept out of the buffer, also if bounds are only measured.
    pub(super) fn spares_buffer(&self, client: usize) -> bool {
        self.first.is_spared() && !self.uses_buffer(client)
    }

    /// The tiers that a page of a client is offered to, where the policy would offer it to `order`.
    pub(super) fn order(&self, client: usize, order: TierOrder) -> TierOrder {
        if self.uses_buffer(client) {
            order
        } else {
            order.spares_buffer(self.first)
        }
    }
}
