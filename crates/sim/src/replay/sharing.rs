//! Many clients under one budget of DRAM, in virtual time: who is admitted, and who has how much.
//!
//! What decides is `undercroft-qos`, as in the daemon: [`admit`] for bounds,
//! [`shares::unprotected`] for protection, [`shares::targets`] for limits, [`Curves`] for what
//! memory is worth. What differs is that no answer is awaited: a client that gives memory has given
//! it before another gets it.

use undercroft_base::{Bytes, CHUNK_PAGES, Nanos, PAGE_BYTES, PageCount};
use undercroft_device::{Time, profiles};
use undercroft_qos::shares::{self, Waits, Want};
use undercroft_qos::{Capacity, Curves, Demand, LatencyBound, admit};

use super::client::Client;
use super::host::Host;
use super::tiers::ReplayTier;
use crate::setup::{SetupError, SimRoom};
use crate::sharing::{Refusal, Sharing, Terms};

/// Whether a client has come.
#[derive(Clone, Debug, PartialEq)]
enum Place {
    Awaited,
    Here,
    Gone,
    Refused(Refusal),
}

/// One client.
struct Member {
    terms: Terms,
    place: Place,
    limit: Bytes,
    target: Bytes,
    curves: Curves,
    /// When its limit was set, and the faults and the waiting until then.
    set: (Time, u64, f64),
    /// When it was heard last, and its waiting until then.
    heard: (Time, f64),
    waits: bool,
    /// Limit times seconds.
    held: f64,
    held_at: Time,
    /// Pages of the buffer that are kept for its bound.
    reserved: u64,
    left: Time,
}

/// The budget, and its clients in the order of the trace.
pub(super) struct Division {
    memory: Bytes,
    by_curves: bool,
    pub(super) every: Time,
    members: Vec<Member>,
}

/// Seconds that a client has waited for its pages.
fn waited(client: &Client<'_>) -> f64 {
    (client.spent.total() - client.spent.reference).seconds()
}

fn time(nanos: Nanos) -> Time {
    Time(nanos.0 * 1000)
}

impl Division {
    /// Before any client has come.
    pub(super) fn new(sharing: &Sharing, memory: Bytes) -> Division {
        let member = |terms: &Terms| Member {
            terms: terms.clone(),
            place: Place::Awaited,
            limit: Bytes(0),
            target: Bytes(0),
            curves: Curves::default(),
            set: (Time::default(), 0, 0.0),
            heard: (Time::default(), 0.0),
            waits: false,
            held: 0.0,
            held_at: Time::default(),
            reserved: 0,
            left: Time::default(),
        };
        Division {
            memory,
            by_curves: sharing.by_curves,
            every: time(sharing.every),
            members: sharing.terms.iter().map(member).collect(),
        }
    }

    /// When a client comes.
    pub(super) fn comes(&self, at: usize) -> Time {
        time(self.members[at].terms.comes)
    }

    /// Time of each reference of a client.
    pub(super) fn reference_time(&self, at: usize) -> Time {
        time(self.members[at].terms.reference_time)
    }

    /// Whether a client was admitted and has not left.
    pub(super) fn is_here(&self, at: usize) -> bool {
        self.members[at].place == Place::Here
    }

    /// Why a client was refused.
    pub(super) fn refusal(&self, at: usize) -> Option<&Refusal> {
        match &self.members[at].place {
            Place::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// The mean limit of a client while it was here.
    pub(super) fn mean_limit(&self, at: usize) -> Bytes {
        let member = &self.members[at];
        let here = (member.left - time(member.terms.comes)).seconds();
        Bytes((member.held / here.max(1e-9)) as u64)
    }

    /// A client comes. False: it is refused.
    pub(super) fn admit(
        &mut self,
        clients: &mut [Client<'_>],
        host: &mut Host,
        at: usize,
        now: Time,
    ) -> Result<bool, SetupError> {
        if let Some(refusal) = self.refuses(&clients[at], host, at) {
            self.members[at].place = Place::Refused(refusal);
            return Ok(false);
        }
        self.members[at].place = Place::Here;
        (self.members[at].held_at, self.members[at].heard.0) = (now, now);
        self.plan(clients, host, now, true)?;
        let least = self.members[at].terms.least.max(shares::STEP_MIN);
        if self.members[at].limit < least {
            self.members[at].limit = Bytes(0);
            let could = Bytes(self.free());
            self.members[at].place = Place::Refused(Refusal::Memory { could });
            self.plan(clients, host, now, true)?;
            return Ok(false);
        }
        if let (Some(bounds), Some(bound)) = (&mut host.bounds, self.members[at].terms.bound) {
            bounds.join(at, bound);
        }
        Ok(true)
    }

    /// Whether a client's bound or protection cannot be kept.
    fn refuses(&mut self, client: &Client<'_>, host: &Host, at: usize) -> Option<Refusal> {
        let terms = &self.members[at].terms;
        if let Some(bound) = terms.bound {
            let out = client.stream.footprint();
            let out = out.saturating_sub(terms.least.0 / PAGE_BYTES as u64);
            match self.refuses_bound(host, bound, out) {
                Ok(reserved) => self.members[at].reserved = reserved,
                Err(refusal) => return Some(refusal),
            }
        }
        let here = self.wants(None);
        let could = shares::unprotected(self.memory, &here);
        (could < self.members[at].terms.least).then_some(Refusal::Protection { could })
    }

    /// * `out`: its pages that may be out of memory at once.
    ///
    /// Returns the pages of the buffer that are kept for it.
    fn refuses_bound(&self, host: &Host, bound: LatencyBound, out: u64) -> Result<u64, Refusal> {
        let reserved: u64 = self.here().map(|at| self.members[at].reserved).sum();
        let last = host.tiers.len() - 1;
        // The path depends on the tier, so it counts as a part of the read.
        let read = |tier: &ReplayTier| {
            let Some(device) = tier.device() else {
                return Nanos(tier.load_ns());
            };
            let (profile, setup) = (device.profile(), &host.setup);
            let software = setup.software.of(profile.attach, profiles::SOFTWARE_NS);
            let switches = setup.context_switch;
            let switches = switches.of(profile.attach, profiles::CONTEXT_SWITCH_NS);
            Nanos((profile.read.time(setup.page_bytes) + software + switches).0 / 1000)
        };
        let capacity = |(place, tier): (usize, &ReplayTier)| Capacity {
            read: read(tier),
            pages: match place {
                0 if last > 0 => (tier.held() + tier.free_pages()).saturating_sub(reserved),
                _ => tier.held().saturating_add(tier.free_pages()),
            },
        };
        let tiers: Vec<Capacity> = host.tiers.iter().enumerate().map(capacity).collect();
        let demand = Demand {
            path: Nanos(0),
            pages: Some(out),
        };
        match admit(bound, demand, &tiers) {
            Err(refused) => Err(Refusal::Bound {
                could: refused.least,
            }),
            // The last tier alone would do, while it is idle.
            Ok(()) if admit(bound, demand, &tiers[last..]).is_ok() => Ok(0),
            Ok(()) => Ok(out),
        }
    }

    /// A client has come to its end: what it had goes to the others.
    pub(super) fn leave(
        &mut self,
        clients: &mut [Client<'_>],
        host: &mut Host,
        at: usize,
    ) -> Result<(), SetupError> {
        let client = &mut clients[at];
        let now = client.clock;
        host.drop_all(client)?;
        self.count(at, now);
        let member = &mut self.members[at];
        (member.place, member.left, member.limit) = (Place::Gone, now, Bytes(0));
        if let Some(bounds) = &mut host.bounds {
            bounds.leave(at);
        }
        self.plan(clients, host, now, true)
    }

    /// Takes the figures of all clients, and divides anew if that pays.
    pub(super) fn tick(
        &mut self,
        clients: &mut [Client<'_>],
        host: &mut Host,
        now: Time,
    ) -> Result<(), SetupError> {
        for client in clients.iter_mut() {
            if self.is_here(client.index) {
                let tiers = host.tiers_now(client);
                client.follow_pages(&tiers);
                self.members[client.index].hear(client, now);
            }
        }
        self.plan(clients, host, now, false)
    }

    fn here(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.members.len()).filter(|at| self.is_here(*at))
    }

    fn free(&self) -> u64 {
        let held: u64 = self.here().map(|at| self.members[at].limit.0).sum();
        self.memory.0 - held
    }

    /// * `clients`: to know what they use; `None`: only their protection matters.
    fn wants(&self, clients: Option<&[Client<'_>]>) -> Vec<Want> {
        let of = |at: usize| {
            let member = &self.members[at];
            let pages = clients.map_or(0, |clients| clients[at].engine.books().resident().0);
            let blind = !self.by_curves || pages == 0;
            let most = member.terms.most;
            Want {
                weight: member.terms.weight,
                least: member.terms.least.min(most),
                most,
                enough: if blind {
                    most
                } else {
                    shares::enough(Bytes(pages * PAGE_BYTES as u64))
                },
                waits: member.waits,
                curve: if self.by_curves {
                    member.curves.mean()
                } else {
                    Vec::new()
                },
            }
        };
        self.here().map(of).collect()
    }

    fn plan(
        &mut self,
        clients: &mut [Client<'_>],
        host: &mut Host,
        now: Time,
        stirred: bool,
    ) -> Result<(), SetupError> {
        let mut here: Vec<usize> = self.here().collect();
        let wants = self.wants(Some(clients));
        let limits: Vec<Bytes> = here.iter().map(|at| self.members[*at].limit).collect();
        // Protections fit: no client is admitted otherwise.
        let targets = shares::targets(self.memory, &wants, &limits, stirred).ok();
        let Some(targets) = targets.flatten() else {
            return Ok(());
        };
        let comes = limits.contains(&Bytes(0));
        for (at, target) in here.iter().zip(targets) {
            self.members[*at].target = target;
        }
        for at in &here {
            let (limit, target) = (self.members[*at].limit, self.members[*at].target);
            if shares::gives(limit, target, comes) {
                self.set_limit(&mut clients[*at], *at, target, now);
                host.reclaim(&mut clients[*at])?;
                host.have_room(&mut clients[*at], 0)?;
            }
        }
        let mut free = self.free();
        // As in the daemon, those that wait come before those that shall have more.
        here.sort_by_key(|at| self.members[*at].limit.0 > 0);
        for at in &here {
            let (limit, target) = (self.members[*at].limit, self.members[*at].target);
            let more = target.0.saturating_sub(limit.0).min(free);
            if more >= shares::STEP_MIN.0 {
                free -= more;
                self.set_limit(&mut clients[*at], *at, Bytes(limit.0 + more), now);
            }
        }
        Ok(())
    }

    fn count(&mut self, at: usize, now: Time) {
        let member = &mut self.members[at];
        let now = now.max(member.held_at);
        member.held += member.limit.0 as f64 * (now - member.held_at).seconds();
        member.held_at = now;
    }

    fn set_limit(&mut self, client: &mut Client<'_>, at: usize, limit: Bytes, now: Time) {
        self.count(at, now);
        let tick = (now, client.seen.loads, waited(client));
        (self.members[at].limit, self.members[at].set) = (limit, tick);
        client.frames = limit.0 / PAGE_BYTES as u64;
        client.engine.set_limit(limit);
        if let Some(following) = &mut client.following {
            following.set_limit(PageCount(client.frames));
        }
    }
}

impl Member {
    /// Takes a client's figures.
    fn hear(&mut self, client: &Client<'_>, now: Time) {
        let all = waited(client);
        let passed = (now - self.heard.0).seconds();
        self.waits = shares::is_waiting(all - self.heard.1, passed);
        self.heard = (now, all);
        let (since, loads, stall) = self.set;
        let seconds = (now - since).seconds();
        let faults = client.seen.loads - loads;
        if client.engine.books().stats().pages_swapped_out == 0 || faults == 0 || seconds <= 0.0 {
            return;
        }
        let each = (all - stall) / faults as f64;
        let Some(following) = &client.following else {
            return;
        };
        let curve = following.curve(faults);
        let points = curve.points.iter().map(|point| Waits {
            limit: point.limit,
            stall: point.faults * each / seconds,
        });
        self.curves
            .note(points.collect(), seconds, Nanos(now.0 / 1000));
    }
}

impl Host {
    /// Forgets every page of a client.
    fn drop_all(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        if self.setup.room != SimRoom::AfterPlan {
            self.let_go(client)?;
        }
        for first in (0..client.stream.numbers).step_by(CHUNK_PAGES as usize) {
            self.drop_pages(client, first, CHUNK_PAGES)?;
        }
        Ok(())
    }
}
