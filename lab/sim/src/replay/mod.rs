//! Replays a trace through the engine: one engine a client, devices shared, time virtual.
//!
//! Clients run on their own clocks, and the earliest fault in virtual time is served first. Every
//! client has its own processor. A hit costs one access to the page table and one call of the
//! policy. At a fault the engine plans. Pages are evicted until the plan fits: a dirty page is
//! written, and a clean page with a copy in a tier is dropped. The engine decides that; the replay
//! only tells whether the bytes changed. Then the plan is read from the tiers and installed.
//!
//! With [`SimRoom::Ahead`](crate::setup::SimRoom::Ahead) pages leave as in the live run: in
//! batches, after a fault that used the reserve, until one and a half reserves are free. Here that
//! takes no time; the live evictor works while the program continues. So of a recorded run, each
//! batch beyond the reserve comes with the next fault.
//!
//! A live trace also records other events. Pages that were found in memory or dropped by the
//! program are followed (`follow.rs`). So are forks and ends of processes (`forks.rs`): all address
//! spaces of a live run are pages of one client and one engine. Which pages leave or are prefetched
//! is not followed: the policies under test decide.

mod advised;
mod bound;
mod buffer;
mod client;
mod follow;
mod following;
mod forks;
mod host;
pub mod page_outs;
mod sharing;
pub mod tiers;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use undercroft_base::{ThreadId, VirtPage};
use undercroft_device::{Device, Time};
use undercroft_engine::{Fault, FaultAnswer, Install};
use undercroft_qos::Monitor;

use crate::page_stream::PageStream;
use crate::setup::{Initial, Memory, Setup, SetupError};
use crate::sharing::SharedOutcome;
use crate::spaces::Spaces;

use bound::Bounds;
pub use bound::WindowOutcome;
pub use client::{Client, Seen, Spent, Stop, Wait};
use host::Host;
use sharing::Division;
use tiers::ReplayTier;

/// References between two calls of the progress function.
const STRETCH: usize = 1 << 20;

/// A simulation.
pub struct Replay<'a> {
    /// The clients.
    pub clients: Vec<Client<'a>>,
    /// The devices and tiers that they share.
    host: Host,
    /// The budget of DRAM that they share, if they come and go.
    sharing: Option<Division>,
}

/// Gives the clients their stall bounds.
///
/// Errors: more than one bound, and not as many as clients.
fn bound_stalls(setup: &Setup, clients: &mut [Client<'_>]) -> Result<(), SetupError> {
    let count = setup.stall.len();
    if count > 1 && count != clients.len() {
        return Err(SetupError::option(
            "--stall-max",
            &format!("{count} bounds"),
            format!("the trace has {} client(s)", clients.len()),
            "give one bound for all, or one for each client",
        ));
    }
    for (client, bound) in clients.iter_mut().zip(setup.stall.iter().cycle()) {
        if let Some(bound) = bound {
            client.bound_stall(*bound);
        }
    }
    Ok(())
}

impl<'a> Replay<'a> {
    /// Everything before the first reference. With [`Initial::Stored`] every page is in the last
    /// tier.
    ///
    /// Errors: an impossible setup for this trace.
    pub fn new(streams: &'a [PageStream], setup: &Setup) -> Result<Replay<'a>, SetupError> {
        setup.check()?;
        let footprint: u64 = streams.iter().map(PageStream::footprint).sum();
        if footprint == 0 {
            return Err(SetupError::EmptyTrace(String::new()));
        }
        setup.check_sharing(streams.len())?;
        let frames = frames(setup, footprint)?;
        if frames < streams.len() as u64 {
            return Err(SetupError::option(
                "--memory",
                &setup.memory.to_string(),
                format!(
                    "{frames} pages of {} bytes do not give each of {} clients one",
                    setup.page_bytes,
                    streams.len()
                ),
                "give more, or use smaller pages",
            ));
        }
        let (mut clients, mut home) = (Vec::new(), 0);
        let mut so_far = 0;
        for (at, stream) in streams.iter().enumerate() {
            // A percentage is each client's own. Any other amount is divided so that no page is
            // left over.
            let upto = |pages: u64| u128::from(frames) * u128::from(pages) / u128::from(footprint);
            let before = upto(so_far);
            so_far += stream.footprint();
            let share = match setup.memory {
                Memory::Percent(percent) => part(percent, stream.footprint()),
                _ => (upto(so_far) - before) as u64,
            };
            let share = share.max(1);
            let seed = setup.seed.wrapping_add(at as u64);
            let mut client = Client::new(stream, setup, share, home, seed)?;
            client.index = at;
            clients.push(client);
            home += u64::from(stream.numbers);
        }
        let spaces = streams.iter().filter_map(|stream| stream.spaces.as_ref());
        let homes = spaces.clone().any(Spaces::are_related).then_some(home);
        let bounds = Bounds::new(setup, clients.len())?;
        bound_stalls(setup, &mut clients)?;
        let mut replay = Replay {
            clients,
            host: Host::new(setup, homes, bounds),
            sharing: division_of(setup),
        };
        for client in &mut replay.clients {
            let sharing = replay.sharing.as_ref();
            client.came = sharing.map_or(Time::default(), |of| of.comes(client.index));
            client.clock = client.came;
            replay.host.tell_tiers(client);
        }
        if setup.initial == Initial::Stored {
            replay.store_everything()?;
        }
        for client in &mut replay.clients {
            client.before = *client.engine.books().stats();
            if let Some(following) = &client.following {
                following.begin(&mut client.engine);
            }
        }
        replay.start();
        Ok(replay)
    }

    /// The simulation proper begins: devices are idle, and what was counted does not count.
    fn start(&mut self) {
        let unordered = self.sharing.is_some() || self.host.setup.unordered;
        for tier in &mut self.host.tiers {
            if unordered {
                tier.set_unordered();
            }
            tier.start();
        }
        if self.sharing.is_some() {
            self.host.share_devices();
        }
        self.host.bound_queue();
    }

    /// Runs to the end of the trace.
    ///
    /// * `progress`: gets the number of references done, now and then.
    ///
    /// Errors: the tiers are full.
    pub fn run(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), SetupError> {
        self.run_clients(progress).map_err(|error| match error {
            SetupError::TiersFull { .. } => SetupError::TiersFull {
                references: self.clients.iter().map(|client| client.at as u64).sum(),
            },
            other => other,
        })
    }

    fn run_clients(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), SetupError> {
        let Replay {
            clients,
            host,
            sharing,
        } = self;
        let mut done = 0u64;
        // (time of its next fault, client)
        let starts = clients.iter().map(|of| Reverse((of.clock, of.index)));
        let mut queue: BinaryHeap<_> = starts.collect();
        // Instead of a client: memory is divided anew.
        let divide = clients.len();
        queue.extend(sharing.as_ref().map(|of| Reverse((of.every, divide))));
        while let Some(Reverse((now, at))) = queue.pop() {
            host.forget(now);
            let Some(per_reference) = go_on(sharing, clients, host, (at, now))? else {
                let next = sharing
                    .as_ref()
                    .filter(|_| at == divide && !queue.is_empty());
                queue.extend(next.map(|of| Reverse((now + of.every, divide))));
                continue;
            };
            if let (Some(sharing), true) = (sharing.as_mut(), clients[at].is_done()) {
                sharing.leave(clients, host, at)?;
                continue;
            }
            // Alone it need not return to the queue, unless devices must be told the time.
            let alone = queue.is_empty() && !host.setup.unordered;
            let client = &mut clients[at];
            let mut told = client.at;
            let mut fault = client.fault.take();
            loop {
                if let Some((no, write)) = fault.take() {
                    host.serve_noted(client, no, write)?;
                }
                match client.run(client.until_scan(STRETCH, per_reference)) {
                    Stop::Fault(no, write) => {
                        client.advance_clock(per_reference);
                        fault = Some((no, write));
                        if !alone {
                            client.fault = fault;
                            queue.push(Reverse((client.clock, at)));
                            break;
                        }
                    }
                    Stop::Moved => host.follow(client)?,
                    Stop::Paused => host.pause(client, per_reference)?,
                    Stop::End => {
                        client.advance_clock(per_reference);
                        client.follow_pages(&host.tiers_now(client));
                        break;
                    }
                }
                if client.at - told >= STRETCH {
                    progress((client.at - told) as u64);
                    told = client.at;
                }
            }
            done += (client.at - told) as u64;
            if sharing.is_some() && client.is_done() {
                queue.push(Reverse((client.clock, at))); // it leaves then
            }
            if done >= STRETCH as u64 {
                progress(std::mem::take(&mut done));
            }
        }
        progress(done);
        Ok(())
    }

    /// Creates every page and evicts it to the tier that the policy offers last, before time
    /// begins.
    fn store_everything(&mut self) -> Result<(), SetupError> {
        let Replay { clients, host, .. } = self;
        for client in clients {
            for number in &client.stream.touched {
                let fault = Fault {
                    space: client.space,
                    page: VirtPage(u64::from(*number)),
                    write: true,
                    thread: ThreadId(0),
                    urgent: false,
                };
                if client.engine.faults().answer(fault, &mut client.plan) != FaultAnswer::Load {
                    continue; // prefetched
                }
                for item in &mut client.plan.items {
                    item.install = if item.demanded {
                        Install::Done
                    } else {
                        Install::NotYet
                    };
                }
                client
                    .engine
                    .faults()
                    .finish(client.plan.fault, &mut client.plan.items);
                while client.engine.books().resident().0 > 0 {
                    if client.engine.evictions().select(1, &mut client.batch) {
                        host.store_far(client)?;
                    }
                }
            }
            host.collect(client);
        }
        Ok(())
    }

    /// When everything was done, deferred writes included; and the longest of the clients' own
    /// times.
    pub fn finish(&mut self) -> (Time, Time) {
        self.host.bounds.iter_mut().for_each(Bounds::finish);
        let clients = self.clients.iter().map(|client| client.clock);
        let elapsed = clients.max().unwrap_or_default();
        let idle = self
            .host
            .tiers
            .iter_mut()
            .map(ReplayTier::finish_writes)
            .max();
        (elapsed, idle.unwrap_or_default().max(elapsed))
    }

    /// The page-ins of a client by windows, if it has a latency bound.
    pub fn monitor(&self, client: usize) -> Option<&Monitor> {
        self.host.bounds.as_ref()?.monitor(client)
    }

    /// The windows of a client in order, if it has a latency bound.
    pub fn windows(&self, client: usize) -> &[WindowOutcome] {
        let bounds = self.host.bounds.as_ref();
        bounds.map_or(&[], |bounds| bounds.windows(client))
    }

    /// Fate of a client under the shared budget, if there is one.
    pub fn shared(&self, client: usize) -> Option<SharedOutcome> {
        let sharing = self.sharing.as_ref()?;
        let spent = &self.clients[client].spent;
        Some(SharedOutcome {
            refused: sharing.refusal(client).cloned(),
            mean_limit_bytes: sharing.mean_limit(client).0,
            stall_seconds: (spent.total() - spent.reference).seconds(),
        })
    }

    /// The tiers, fastest first.
    pub fn tiers(&self) -> &[ReplayTier] {
        &self.host.tiers
    }

    /// The device of each tier that has one.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.host.tiers.iter().filter_map(ReplayTier::device)
    }
}

/// The time of each reference of a client that goes on. `None`: it is refused, or no client but the
/// number after the last, which stands for a division of memory.
fn go_on(
    sharing: &mut Option<Division>,
    clients: &mut [Client<'_>],
    host: &mut Host,
    (at, now): (usize, Time),
) -> Result<Option<Time>, SetupError> {
    let Some(sharing) = sharing else {
        return Ok(Some(Time(host.setup.reference_time.0 * 1000)));
    };
    if at == clients.len() {
        sharing.tick(clients, host, now)?;
        return Ok(None);
    }
    let here = sharing.is_here(at) || sharing.admit(clients, host, at, now)?;
    Ok(here.then(|| sharing.reference_time(at)))
}

/// The budget that clients share, if they do.
fn division_of(setup: &Setup) -> Option<Division> {
    match (&setup.sharing, setup.memory) {
        (Some(sharing), Memory::Bytes(memory)) => Some(Division::new(sharing, memory)),
        _ => None,
    }
}

/// More pages than any trace touches. Their bytes fit 63 bits.
const FRAMES_MAX: u64 = 1 << 40;

/// Frames of all clients together. Errors: there are none.
fn frames(setup: &Setup, footprint: u64) -> Result<u64, SetupError> {
    let frames = match setup.memory {
        Memory::Bytes(bytes) => bytes.0 / setup.page_bytes,
        Memory::Pages(pages) => pages,
        Memory::Percent(percent) => part(percent, footprint),
    };
    if frames == 0 {
        return Err(SetupError::option(
            "--memory",
            &setup.memory.to_string(),
            format!(
                "a page of {} bytes is larger than the memory, which is that part of {footprint} pages",
                setup.page_bytes
            ),
            "give more memory, or use a smaller --page-size",
        ));
    }
    Ok(frames.min(FRAMES_MAX))
}

fn part(percent: f64, pages: u64) -> u64 {
    (pages as f64 * percent / 100.0).round() as u64
}
