//! Gives events to a policy, and takes its wishes. Counts what it does wrong.

use crate::ears::{MovesFree, Wish};
use crate::event::{Event, Kind};
use crate::guest::Guest;
use crate::host::{Host, Memory, Parameter, Tier};
use crate::{Failure, Policy};

/// A policy that has failed so often is not asked again.
pub const FAILURES_MAX: u64 = 8;

/// Milliseconds between two ticks.
const TICK_MS: u64 = 100;

/// Counts of a policy so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events that it heard.
    pub events: u64,
    /// Events at which it failed.
    pub failures: u64,
    /// Wishes of any kind that were refused, because one event had too many.
    pub flooded: u64,
    /// Scans that it heard of: each space that was scanned is one.
    pub scans: u64,
    /// The policy is not asked again.
    pub dismissed: bool,
}

/// A policy at work.
pub struct Desk {
    policy: Box<dyn Policy>,
    host: Host,
    counts: Counts,
    last_failure: Option<Failure>,
    ticked_ms: u64,
    limit: Option<u64>,
}

impl Desk {
    /// For a policy that has heard nothing.
    pub fn new(policy: Box<dyn Policy>) -> Desk {
        Desk::with_host(policy, Host::default())
    }

    /// For a policy that has heard nothing, with the host that has its parameters.
    pub fn with_host(policy: Box<dyn Policy>, host: Host) -> Desk {
        Desk {
            policy,
            host,
            counts: Counts::default(),
            last_failure: None,
            ticked_ms: 0,
            limit: None,
        }
    }

    /// Tells the policy what the memory of the run is now, and that time passes. Before events.
    pub fn at(&mut self, memory: Memory, now_ms: u64, wish: &mut dyn FnMut(Wish)) {
        self.host.set_memory(memory);
        if self.limit != Some(memory.limit) {
            self.limit = Some(memory.limit);
            self.hear(&Event::plain(Kind::Limit, memory.limit), wish);
        }
        if now_ms >= self.ticked_ms + TICK_MS {
            self.ticked_ms = now_ms;
            self.hear(&Event::plain(Kind::Tick, now_ms), wish);
        }
    }

    /// Tells the policy what the tiers are now, fastest first, and how many pages more moves may
    /// have. Before events.
    pub fn tiers(&mut self, tiers: impl Iterator<Item = Tier>, free: MovesFree) {
        self.host.set_tiers(tiers, free);
    }

    /// Has the policy hear one event, and passes its wishes on.
    pub fn hear(&mut self, event: &Event, wish: &mut dyn FnMut(Wish)) {
        if self.counts.dismissed {
            return;
        }
        self.host.begin(event);
        self.counts.events += 1;
        self.counts.scans += u64::from(event.kind == Kind::Scanned);
        if let Err(failure) = self.policy.hear(event, &mut self.host) {
            self.counts.failures += 1;
            self.counts.dismissed = self.counts.failures >= FAILURES_MAX;
            self.last_failure = Some(failure);
        }
        self.host.wishes().iter().for_each(|it| wish(*it));
    }

    /// Its counts so far.
    pub fn counts(&self) -> Counts {
        Counts {
            flooded: self.host.flooded(),
            ..self.counts
        }
    }

    /// Milliseconds between two scans that it asks for; 0: it asks for none.
    pub fn scan_ms(&self) -> u64 {
        if self.counts.dismissed {
            return 0;
        }
        self.host.scan_ms()
    }

    /// Its last failure, if it failed.
    pub fn last_failure(&self) -> Option<&Failure> {
        self.last_failure.as_ref()
    }

    /// Gives a parameter another value, which the policy sees at its next event. False if there is
    /// none of this name.
    pub fn set(&mut self, name: &str, value: i64) -> bool {
        self.host.set(name, value)
    }

    /// Whether it asks which instructions fault.
    pub fn asks_instructions(&self) -> bool {
        self.host.asks_instructions()
    }

    /// Whether it asks about addresses in a guest, and none was shown to it.
    pub fn lacks_guest(&self) -> bool {
        self.host.lacks_guest()
    }

    /// Lets it ask about the run's guest.
    pub fn show_guest(&mut self, guest: Guest) {
        self.host.show_guest(guest);
    }

    /// Whether it asks where copies are, or wishes that.
    pub fn asks_tiers(&self) -> bool {
        self.host.asks_tiers()
    }

    /// Numbers and values of parameters to which it has given one since this was called last.
    pub fn take_shown(&mut self) -> Vec<(usize, i64)> {
        self.host.take_shown()
    }

    /// Its parameters.
    pub fn parameters(&self) -> &[Parameter] {
        self.host.parameters()
    }
}
