//! Latency bounds of a replay: the control of `undercroft-qos` in virtual time.
//!
//! The regular zone is the last tier, and its queue is the device's deferred writes. The buffer is
//! the first tier, if there is more than one. A page of a client that uses the regular zone goes to
//! the last tier first; a page of a client that uses the buffer goes to the first (`buffer.rs`).
//!
//! Clients that come and go under one budget share a device that may be anything from idle to
//! overloaded. There S(t) is the number of channels that write, between what writes need and all of
//! them, and the buffer is shared by bounds.

use undercroft_base::Nanos;
use undercroft_device::Time;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::reclaim::{Goes, Turned};
use undercroft_qos::{
    Judged, LatencyBound, LatencyControl, Monitor, Out, QueueLimits, Service, Window,
};

use crate::setup::{BoundChange, Setup, SetupError, TierModel};

/// A window of a client with a latency bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowOutcome {
    /// Virtual time at its end.
    pub end_seconds: f64,
    /// The bound that held.
    pub bound: LatencyBound,
    /// Its page-ins, and whether it kept the bound.
    pub window: Window,
    /// Page-ins that came from the last tier.
    pub from_last_tier: u64,
}

impl WindowOutcome {
    /// Whether it kept the bound.
    pub fn is_kept(&self) -> bool {
        self.window.judged == Judged::Kept
    }
}

/// The control of all clients, and its next window.
pub(super) struct Bounds {
    control: LatencyControl,
    /// Bounds that are set later, the next one last.
    changes: Vec<BoundChange>,
    /// Of each client.
    history: Vec<History>,
    /// False: page-ins are only measured.
    turns: bool,
    window: Time,
    window_end: Time,
    /// Writes to the last tier in the window in progress; `None`: they are not counted.
    writes: Option<Writes>,
}

/// The windows of one client.
#[derive(Clone, Default)]
struct History {
    ended: Vec<WindowOutcome>,
    /// How many of them had the bound that holds now.
    of_bound: u64,
    /// Page-ins from the last tier since then.
    queued: u64,
}

impl History {
    /// Another bound holds.
    fn begin(&mut self) {
        (self.of_bound, self.queued) = (0, 0);
    }

    /// Notes the window that ended, if one did.
    fn note(&mut self, monitor: &Monitor, end: Time) {
        let (kept, missed) = monitor.windows();
        if let (Some(window), true) = (monitor.last(), kept + missed > self.of_bound) {
            self.of_bound = kept + missed;
            self.ended.push(WindowOutcome {
                end_seconds: end.seconds(),
                bound: monitor.bound(),
                window,
                from_last_tier: std::mem::take(&mut self.queued),
            });
        }
    }
}

/// Writes of one window.
struct Writes {
    /// Of the last tier.
    service: Service,
    count: u64,
    /// Time that clients waited for them.
    waited: Time,
    since: Time,
}

/// Writes wait for slots if clients have waited for them for this part of a window, all together.
const WAITED: f64 = 0.5;

impl Writes {
    /// Ends the window: slots that were needed, and whether there were too few.
    fn end(&mut self, now: Time) -> (u32, bool) {
        let seconds = (now - self.since).seconds().max(1e-9);
        let least = self.service.write_channels(self.count as f64 / seconds);
        let waited = self.waited.seconds() > seconds * WAITED;
        (self.count, self.waited, self.since) = (0, Time::default(), now);
        (least, waited)
    }
}

impl Bounds {
    /// Before time begins. `None`: no client has a bound.
    ///
    /// Errors: more than one bound, and not as many as clients; a bound of no client is changed.
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
        let mut changes = setup.latency.changes.clone();
        changes.sort_by_key(|change| change.at.0);
        changes.reverse();
        if let Some(change) = changes.iter().find(|change| change.client >= clients) {
            return Err(SetupError::option(
                "--latency",
                &change.bound.to_string(),
                format!("the bound of client {} is changed", change.client),
                format!("the trace has {clients} client(s), from 0"),
            ));
        }
        let has_buffer = setup.tiers.len() > 1;
        let channels = match setup.tiers.last().map(|tier| &tier.kind) {
            Some(TierModel::Device { profile, .. }) => profile.channels,
            _ => 1,
        };
        let limits = QueueLimits::of_device(channels, has_buffer);
        let window = Time(setup.latency.window.0 * 1000);
        Ok(Some(Bounds {
            control: LatencyControl::new(limits, &bounds, has_buffer),
            changes,
            history: vec![History::default(); clients],
            turns: setup.latency.control,
            window,
            window_end: window,
            writes: None,
        }))
    }

    /// Clients come and go: the buffer is shared, and writes use only the channels that they need.
    ///
    /// * `service`: of the last tier. * `buffer`: pages of the first, if there is another.
    pub(super) fn share(&mut self, service: Service, buffer: Option<u64>) {
        let limits = QueueLimits {
            min: 1,
            max: service.channels.max(1),
            ..QueueLimits::of_channels(service.channels)
        };
        let clients = self.control.clients();
        self.control = LatencyControl::new(limits, &vec![None; clients], buffer.is_some());
        if let Some(pages) = buffer {
            self.control.set_buffer(pages);
        }
        self.writes = Some(Writes {
            service,
            count: 0,
            waited: Time::default(),
            since: Time::default(),
        });
    }

    /// A client with a bound comes.
    pub(super) fn join(&mut self, client: usize, bound: LatencyBound) {
        self.control.join(client, bound);
        self.history[client].begin();
    }

    /// Sets the bounds whose time has come, as the daemon does.
    fn change_bounds(&mut self, now: Time) {
        while let Some(change) = self.changes.pop_if(|of| of.at.0 * 1000 <= now.0) {
            if self.control.change_bound(change.client, change.bound) {
                self.history[change.client].begin();
            }
        }
    }

    /// Ends the window of every client.
    fn end_windows(&mut self) {
        self.control.end_windows();
        for (client, history) in self.history.iter_mut().enumerate() {
            if let Some(monitor) = self.control.monitor(client) {
                history.note(monitor, self.window_end);
            }
        }
    }

    /// Where admission places a client; see [`LatencyControl::place`].
    pub(super) fn place(&mut self, client: usize, always: bool, pages: u64) {
        self.control.place(client, always, pages);
    }

    /// All clients will write this many pages a second, with one that comes now.
    pub(super) fn expect_writes(&mut self, each_second: f64) {
        if let Some(writes) = &self.writes {
            let slots = writes.service.write_channels(each_second);
            self.control.expect_writes(slots);
        }
    }

    /// A page was written to the last tier, and a client waited for it.
    pub(super) fn note_write(&mut self, waited: Time) {
        if let Some(writes) = &mut self.writes {
            writes.count += 1;
            writes.waited += waited;
        }
    }

    /// S(t) is the number of channels that write.
    pub(super) fn counts_channels(&self) -> bool {
        self.writes.is_some()
    }

    /// A client goes.
    pub(super) fn leave(&mut self, client: usize) {
        self.control.leave(client);
    }

    /// A page-in of a client ended at `now`. True if knobs may have changed: a window ended before
    /// it, or is lost by it.
    ///
    /// * `queued`: it came from the last tier.
    pub(super) fn note(&mut self, client: usize, now: Time, took: Nanos, queued: bool) -> bool {
        let ended = now >= self.window_end;
        if ended {
            if let Some((least, waited)) = self.writes.as_mut().map(|of| of.end(now)) {
                self.control.note_writes(least, waited);
            }
            self.end_windows();
            while self.window_end <= now {
                self.window_end += self.window;
            }
        }
        self.change_bounds(now);
        if let Some(monitor) = self.control.monitor_mut(client) {
            monitor.add(took);
        }
        if queued {
            self.control.add_queued(client, took);
            self.history[client].queued += 1;
        }
        let cut = self.control.cut_short(client);
        (ended || cut) && self.turns
    }

    /// Ends the last window.
    pub(super) fn finish(&mut self) {
        self.end_windows();
    }

    /// The windows of a client, in order.
    pub(super) fn windows(&self, client: usize) -> &[WindowOutcome] {
        &self.history[client].ended
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
        if self.turns && self.writes.is_none() {
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

    /// How the knobs of a client are turned. Its pages are kept out of the buffer also if bounds
    /// are only measured.
    pub(super) fn turned(&self, client: usize) -> Turned {
        Turned {
            batch: self.batch(),
            goes: if self.uses_buffer(client) {
                Goes::ToBuffer
            } else {
                Goes::ToDevice
            },
        }
    }
}
