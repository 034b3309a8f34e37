//! Many clients under one budget of DRAM, in virtual time: who is admitted, and who has how much.
//!
//! What decides is `undercroft-qos`, as in the daemon: [`admit_one`] for bounds,
//! [`shares::unprotected`] for protection, [`shares::targets`] for limits, [`Curves`] for what
//! memory is worth. What differs is that no answer is awaited: a client that gives memory has given
//! it before another gets it.

use undercroft_base::{BASE_PAGE_BYTES, Bytes, CHUNK_PAGES, Nanos, PageCount};
use undercroft_device::{Time, profiles};
use undercroft_qos::shares::{self, Waits, Want};
use undercroft_qos::{Asks, Could, Curves, Devices, Load, Service, admit_one};

use super::client::Client;
use super::host::Host;
use super::tiers::ReplayTier;
use crate::setup::SetupError;
use crate::sharing::{NotAdmitted, Sharing, Terms};

/// Whether a client has come.
#[derive(Clone, Debug, PartialEq)]
enum Presence {
    Awaited,
    Here,
    Gone,
    Refused(NotAdmitted),
}

/// A client.
struct Member {
    terms: Terms,
    place: Presence,
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
    /// When its load began to be measured, and its page-ins and page-outs until then.
    measured: (Time, u64, u64),
    /// Load that it asked for lately; before that, what it said.
    load: Load,
    /// Admission has found that the device cannot keep its bound.
    buffered: bool,
    left: Time,
}

/// The budget, and its clients in the order of the trace.
pub(super) struct Division {
    memory: Bytes,
    by_curves: bool,
    pub(super) every: Time,
    admission: bool,
    members: Vec<Member>,
}

/// Seconds that a client has waited for its pages.
fn waited(client: &Client<'_>) -> f64 {
    (client.spent.total() - client.spent.reference).seconds()
}

/// Load of a client, by what it says.
fn declared(terms: &Terms) -> Load {
    let by_bound = || terms.bound.map(|bound| Load::of_bound(bound.limit));
    terms.demand.or_else(by_bound).unwrap_or_default()
}

/// A load is measured for this long at least.
const MEASURED_MIN: Time = Time(1_000_000_000_000); // a second

fn time(nanos: Nanos) -> Time {
    Time(nanos.0 * 1000)
}

impl Division {
    /// Before any client has come.
    pub(super) fn new(sharing: &Sharing, memory: Bytes) -> Division {
        let member = |terms: &Terms| Member {
            terms: terms.clone(),
            place: Presence::Awaited,
            limit: Bytes(0),
            target: Bytes(0),
            curves: Curves::default(),
            set: (Time::default(), 0, 0.0),
            heard: (Time::default(), 0.0),
            waits: false,
            held: 0.0,
            held_at: Time::default(),
            measured: (Time::default(), 0, 0),
            load: declared(terms),
            buffered: false,
            left: Time::default(),
        };
        Division {
            memory,
            by_curves: sharing.by_curves,
            every: time(sharing.every),
            admission: sharing.admission,
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
        self.members[at].place == Presence::Here
    }

    /// Why a client was refused.
    pub(super) fn refusal(&self, at: usize) -> Option<&NotAdmitted> {
        match &self.members[at].place {
            Presence::Refused(refusal) => Some(refusal),
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
        if let Some(refusal) = self.refuses(clients, host, at, now) {
            self.members[at].place = Presence::Refused(refusal);
            return Ok(false);
        }
        self.members[at].place = Presence::Here;
        (self.members[at].held_at, self.members[at].heard.0) = (now, now);
        self.plan(clients, host, now, true)?;
        let least = self.members[at].terms.least.max(shares::STEP_MIN);
        if self.members[at].limit < least {
            self.members[at].limit = Bytes(0);
            let could = Bytes(self.free());
            self.members[at].place = Presence::Refused(NotAdmitted::Memory { could });
            self.plan(clients, host, now, true)?;
            return Ok(false);
        }
        if let (Some(bounds), Some(bound)) = (&mut host.bounds, self.members[at].terms.bound) {
            bounds.join(at, bound);
        }
        self.place_all(clients, host);
        host.fill_buffer_with_all(&mut clients[at]);
        self.members[at].measured.0 = clients[at].clock;
        Ok(true)
    }

    /// Whether a client's bound or protection cannot be kept.
    fn refuses(
        &mut self,
        clients: &[Client<'_>],
        host: &Host,
        at: usize,
        now: Time,
    ) -> Option<NotAdmitted> {
        let placed = match self.refuses_load(clients, host, at, now) {
            Ok(placed) => placed,
            Err(refusal) => return Some(refusal),
        };
        let here = self.wants(None);
        let could = shares::unprotected(self.memory, here.iter().map(|want| want.least));
        if could < self.members[at].terms.least {
            return Some(NotAdmitted::Protection { could });
        }
        let all: Vec<usize> = self.here().chain([at]).collect();
        for (at, buffered) in all.into_iter().zip(placed) {
            self.members[at].buffered = buffered;
        }
        None
    }

    /// Whether the devices can serve a client beside the others. Returns whose pages go to the
    /// buffer: of each client that is here, and of this one.
    fn refuses_load(
        &mut self,
        clients: &[Client<'_>],
        host: &Host,
        at: usize,
        now: Time,
    ) -> Result<Vec<bool>, NotAdmitted> {
        let here: Vec<usize> = self.here().collect();
        let mut set = Vec::new();
        for at in &here {
            self.members[*at].measure(&clients[*at], now);
            set.push(self.members[*at].asks(&clients[*at]));
        }
        let new = self.members[at].asks(&clients[at]);
        match admit_one(&set, new, &host.devices()) {
            Ok(placed) => Ok(placed),
            Err(_) if !self.admission => Ok(Vec::new()),
            Err(Could::Limit(could)) => Err(NotAdmitted::Bound { could }),
            Err(Could::Part(part)) => Err(NotAdmitted::Load {
                could: (new.load.reads * part) as u64,
            }),
        }
    }

    /// Tells control where admission has placed all clients, and what the writes of those at the
    /// device will need.
    fn place_all(&self, clients: &[Client<'_>], host: &mut Host) {
        let Some(bounds) = &mut host.bounds else {
            return;
        };
        let mut writes = 0.0;
        for at in self
            .here()
            .filter(|at| self.members[*at].terms.bound.is_some())
        {
            let buffered = self.members[at].buffered;
            bounds.place(at, buffered, clients[at].stream.footprint());
        }
        for at in self.here().filter(|at| !self.members[*at].buffered) {
            writes += self.members[at].load.writes;
        }
        bounds.expect_writes(writes);
        host.bound_queue();
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
        (member.place, member.left, member.limit) = (Presence::Gone, now, Bytes(0));
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
                    shares::enough(Bytes(pages * BASE_PAGE_BYTES as u64))
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
        client.frames = limit.0 / BASE_PAGE_BYTES as u64;
        client.engine.set_limit(limit);
        if let Some(following) = &mut client.following {
            following.set_limit(PageCount(client.frames));
        }
    }
}

impl Member {
    /// Demands of a client, for admission.
    fn asks(&self, client: &Client<'_>) -> Asks {
        Asks {
            bound: self.terms.bound,
            load: self.load,
            // A page in memory keeps its copy in the tier, while it is clean.
            pages: client.stream.footprint(),
        }
    }

    /// Measures its load, if it is time.
    fn measure(&mut self, client: &Client<'_>, now: Time) {
        let (since, reads, writes) = self.measured;
        if now - since < MEASURED_MIN {
            return;
        }
        let seconds = (now - since).seconds();
        self.load = Load {
            reads: (client.seen.loads - reads) as f64 / seconds,
            writes: (client.seen.writes - writes) as f64 / seconds,
        };
        self.measured = (now, client.seen.loads, client.seen.writes);
    }

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

/// Part of the buffer, in percent, that is given to clients: a page on its way to memory still has
/// its place.
const BUFFER_PERCENT: u64 = 90;

impl Host {
    /// First and last tier, as their models say.
    pub(super) fn devices(&self) -> Devices {
        let service = |tier: &ReplayTier| {
            let Some(device) = tier.device() else {
                let read = Nanos(tier.load_ns());
                return Service {
                    path: Nanos(0),
                    read,
                    write: read,
                    beside: 1.0,
                    channels: 1,
                };
            };
            let (profile, setup) = (device.profile(), &self.setup);
            let software = setup.software.of(profile.attach, profiles::SOFTWARE_NS);
            let switches = setup.context_switch;
            let switches = switches.of(profile.attach, profiles::CONTEXT_SWITCH_NS);
            Service {
                path: Nanos((software + switches).0 / 1000),
                read: Nanos(profile.read.time(setup.page_bytes).0 / 1000),
                write: Nanos(profile.write.time(setup.page_bytes).0 / 1000),
                beside: profile.read_beside_write,
                channels: profile.channels.max(1),
            }
        };
        let pages = |tier: &ReplayTier| {
            let all = tier.held().saturating_add(tier.free_pages());
            (u128::from(all) * u128::from(BUFFER_PERCENT) / 100) as u64
        };
        let (first, last) = (&self.tiers[0], &self.tiers[self.tiers.len() - 1]);
        Devices {
            device: service(last),
            buffer: (self.tiers.len() > 1).then(|| (service(first), pages(first))),
        }
    }

    /// Bounds are those of clients that come and go.
    pub(super) fn share_devices(&mut self) {
        let devices = self.devices();
        if let Some(bounds) = &mut self.bounds {
            bounds.share(devices.device, devices.buffer.map(|(_, pages)| pages));
        }
    }

    /// Forgets every page of a client.
    fn drop_all(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        for first in (0..client.stream.numbers).step_by(CHUNK_PAGES as usize) {
            self.drop_pages(client, first, CHUNK_PAGES)?;
        }
        Ok(())
    }
}
