//! Replays a trace through the engine: one engine a client, devices shared, time virtual.
//!
//! Clients run on their own clocks; whoever faults first in virtual time is served first. A hit costs one look into the page
//! table and one call of the policy. A fault: the engine plans; pages are evicted until the plan fits (a dirty one is written,
//! a clean one whose copy is kept below is dropped: the engine decides, told only whether the bytes changed); the plan is
//! read from the tiers and installed. Every client has a processor to itself.
//!
//! With [`Room::Ahead`] pages leave as they do live: in batches, after a fault that broke into the reserve, until a reserve and
//! a half is free. Only in no time: the live evictor works while the program goes on.
//!
//! Where a live trace says so, pages are found in memory, as they were when the recording began, or dropped by the program (`follow.rs`).
//! So are forks and the ends of processes (`forks.rs`): all address spaces of a live run are pages of one client, whose engine takes them
//! for one. Evictions that it tells (`leaving.rs`), and pages brought along (`traced.rs`), are followed only when that is asked for
//! ([`Room::Traced`]): otherwise the policies under test decide.

mod client;
mod follow;
mod forks;
mod leaving;
pub mod tiers;
mod traced;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use undercroft_base::{
    Bytes, PAGE_BYTES, PageCount, PageNo, Slot, Stamp, ThreadId, TierId, VirtPage,
};
use undercroft_engine::limits::{DEMOTE_PAGES_MAX, EVICT_PAGES_MAX};
use undercroft_engine::{DemoteItem, Fault, FaultAnswer, Install, LoadItem, Outcome, Taken};
use undercroft_model::device::{Attach, Device, Time, profiles};

use crate::page_stream::PageStream;
use crate::setup::{FaultTouch, Initial, Memory, Room, Setup, SetupError, TierKind};
use crate::spaces::Spaces;

use client::{AHEAD, DIRTY, KNOWN, LENT, SHARED, WRITTEN};
pub use client::{Client, Seen, Spent, Stop};
use tiers::{Tier, tier_id};

/// References between two calls of the progress function.
const STRETCH: usize = 1 << 20;

/// A compressed pool over another tier holds at most this part of the limit, and this one alone: as the live manager.
const POOL_PERCENT_ABOVE: f64 = 50.0;
const POOL_PERCENT_ALONE: f64 = 95.0;

/// One simulation at work.
pub struct Replay<'a> {
    setup: Setup,
    /// The clients.
    pub clients: Vec<Client<'a>>,
    /// The tiers, fastest first.
    pub tiers: Vec<Tier>,
    freed: Vec<(TierId, Slot)>,
    wake: Vec<(undercroft_base::SpaceId, VirtPage)>,
    demotions: Vec<DemoteItem>,
    requests: Vec<(usize, usize)>,
    /// A tier lies inside the memory limit.
    has_pool: bool,
}

impl<'a> Replay<'a> {
    /// Everything before the first reference; with [`Initial::Stored`] every page lies in the last tier.
    ///
    /// Errors: an impossible setup for this trace.
    pub fn new(streams: &'a [PageStream], setup: &Setup) -> Result<Replay<'a>, SetupError> {
        setup.check()?;
        let footprint: u64 = streams.iter().map(PageStream::footprint).sum();
        if footprint == 0 {
            return Err(SetupError::EmptyTrace(String::new()));
        }
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
            // A percentage is each client's own; anything else is shared out so that nothing is left over.
            let upto = |pages: u64| u128::from(frames) * u128::from(pages) / u128::from(footprint);
            let before = upto(so_far);
            so_far += stream.footprint();
            let share = match setup.memory {
                Memory::Percent(percent) => part(percent, stream.footprint()),
                _ => (upto(so_far) - before) as u64,
            };
            let share = share.max(1);
            let seed = setup.seed.wrapping_add(at as u64);
            clients.push(Client::new(stream, setup, share, home, seed)?);
            home += u64::from(stream.numbers);
        }
        let spaces = streams.iter().filter_map(|stream| stream.spaces.as_ref());
        let homes = spaces.clone().any(Spaces::are_related).then_some(home);
        let tiers = setup.tiers.iter();
        let mut replay = Replay {
            clients,
            tiers: tiers
                .map(|spec| Tier::new(spec, setup.page_bytes, homes))
                .collect(),
            freed: Vec::new(),
            wake: Vec::new(),
            demotions: Vec::new(),
            requests: Vec::new(),
            has_pool: setup
                .tiers
                .iter()
                .any(|tier| matches!(tier.kind, TierKind::Pool { .. })),
            setup: setup.clone(),
        };
        if setup.initial == Initial::Stored {
            replay.store_everything()?;
        }
        for client in &mut replay.clients {
            client.before = *client.engine.stats();
        }
        for tier in &mut replay.tiers {
            tier.start();
        }
        Ok(replay)
    }

    /// Runs to the end of the trace. * `progress`: told the references done, now and then.
    pub fn run(&mut self, progress: &mut dyn FnMut(u64)) -> Result<(), SetupError> {
        let per_reference = Time(self.setup.reference_time.0 * 1000);
        // (time of its next fault, client)
        let mut queue = BinaryHeap::new();
        let mut done = 0u64;
        for at in 0..self.clients.len() {
            queue.push(Reverse((Time::default(), at)));
        }
        let mut faults: Vec<Option<(PageNo, bool)>> = vec![None; self.clients.len()];
        while let Some(Reverse((_, at))) = queue.pop() {
            // One client alone need not be put aside between its faults.
            let alone = queue.is_empty();
            loop {
                let before = self.clients[at].at;
                if let Some((no, write)) = faults[at].take() {
                    self.serve(at, no, write)?;
                }
                let stop = self.clients[at].run(STRETCH);
                let client = &mut self.clients[at];
                done += (client.at - before) as u64;
                if done >= STRETCH as u64 {
                    progress(std::mem::take(&mut done));
                }
                match stop {
                    Stop::Fault(no, write) => {
                        client.tell_time(per_reference);
                        faults[at] = Some((no, write));
                        if !alone {
                            queue.push(Reverse((client.clock, at)));
                            break;
                        }
                    }
                    Stop::Moved => self.follow(at)?,
                    Stop::Paused => {}
                    Stop::End => {
                        client.tell_time(per_reference);
                        self.let_go(at)?;
                        break;
                    }
                }
            }
        }
        progress(done);
        Ok(())
    }

    /// The reference a client stopped at: its page is brought in, or waited for.
    fn serve(&mut self, at: usize, no: PageNo, write: bool) -> Result<(), SetupError> {
        let client = &mut self.clients[at];
        let page = VirtPage(u64::from(no.0));
        let fault = Fault {
            space: client.space,
            page,
            write,
            thread: ThreadId(0),
        };
        client.at += 1;
        if write && client.marks[no.0 as usize] & SHARED != 0 && self.write_shared(at, no)? {
            return Ok(());
        }
        let client = &mut self.clients[at];
        // What is put back needs no room, and brings nothing along.
        let recalled = client.recalled_at == client.at && client.on_its_way(no).is_some();
        if !recalled {
            if self.setup.room != Room::AfterPlan {
                self.have_room(at, 1)?;
                self.let_one_go(at, no)?;
            }
            self.expect_window(at, no)?;
        }
        let client = &mut self.clients[at];
        match client.engine.fault(fault, &mut client.plan) {
            FaultAnswer::Load => {}
            FaultAnswer::Wake => {
                // Brought along and maybe still on its way.
                let late = client.ahead_until - client.clock;
                client.ahead_until = Time::default();
                client.clock += late;
                client.spent.ahead += late;
                client.marks[no.0 as usize] |= u8::from(write) * (DIRTY | WRITTEN);
                return Ok(());
            }
            FaultAnswer::Wait => return self.recall(at, no, write),
            other => unreachable!("a fault is answered {other:?} with no other under way"),
        }
        client.seen.misses += 1;
        client.missed = client.at;
        let mark = &mut client.marks[no.0 as usize];
        client.seen.first_touches += u64::from(*mark & KNOWN == 0);
        *mark |= KNOWN;
        let start = client.clock;
        self.have_room(at, 0)?;
        let loads = self.load(at);
        let client = &mut self.clients[at];
        let mark = &mut client.marks[no.0 as usize];
        *mark &= !AHEAD;
        *mark |= u8::from(write) * (DIRTY | WRITTEN);
        let touch = match self.setup.fault_touch {
            FaultTouch::None => false,
            FaultTouch::Write => write,
            FaultTouch::All => true,
        };
        if touch {
            client.engine.touch(no, write);
        }
        if loads {
            client.seen.loads += 1;
            let nanos = (client.clock - start).0 / 1000;
            client.latency.saturating_record(nanos.max(1));
        }
        self.reclaim(at)
    }

    /// Makes the reserve whole again, where there is one and it was broken into.
    #[inline]
    fn reclaim(&mut self, at: usize) -> Result<(), SetupError> {
        match self.setup.room == Room::Ahead && self.clients[at].engine.reclaim_wanted() {
            true => self.evict_to_reserve(at),
            false => Ok(()),
        }
    }

    #[inline(never)]
    fn evict_to_reserve(&mut self, at: usize) -> Result<(), SetupError> {
        while self.clients[at].engine.reclaim_unfinished() {
            if self.evict(at, EVICT_PAGES_MAX)? == 0 {
                break; // locked pages, and the newest ones: live it would try later
            }
        }
        Ok(())
    }

    /// Nothing can leave: what is not locked may lie in a compressed pool as large as the rest of the limit. Live it is exceeded, too.
    /// Where something can leave, it goes on leaving first.
    #[cold]
    fn exceed(&mut self, at: usize) {
        let client = &mut self.clients[at];
        assert!(
            client.locked > 0 || self.has_pool,
            "{} names no victim among {:?}",
            self.setup.reclaim,
            client.engine.resident()
        );
        client.engine.set_over_limit(PageCount(1 << 40));
    }

    /// Reads the plan of a client and installs it; whether the faulting page came from a tier.
    fn load(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        let from_tier = match &client.plan.items[..] {
            // Zeros, and nothing along.
            [item] if item.tier == TierId::FILL => false,
            _ => self.read_plan(at),
        };
        let client = &mut self.clients[at];
        for item in &mut client.plan.items {
            item.install = Install::Done;
            let mark = &mut client.marks[item.no.0 as usize];
            *mark &= !DIRTY;
            if !item.demanded {
                *mark |= AHEAD;
            }
        }
        client.engine.finish(client.space, &mut client.plan.items);
        self.collect(at);
        from_tier
    }

    /// Reads the plan of a client; whether the faulting page comes from a tier.
    fn read_plan(&mut self, at: usize) -> bool {
        let client = &mut self.clients[at];
        let items = &client.plan.items[..];
        let demanded = items.iter().position(|item| item.demanded).unwrap_or(0);
        let from_tier = items[demanded].tier != TierId::FILL;
        if from_tier {
            let attach = self.tiers[items[demanded].tier.0 as usize]
                .device()
                .map_or(Attach::Memory, |device| device.profile().attach);
            let software = self.setup.software.of(attach, profiles::SOFTWARE_NS);
            let switches = self
                .setup
                .context_switch
                .of(attach, profiles::CONTEXT_SWITCH_NS);
            client.spent.software += software;
            client.spent.context_switch += switches;
            client.clock += software + switches;
        }
        requests(&self.tiers, items, demanded, &mut self.requests);
        for (from, to) in self.requests.iter().copied() {
            let tier = &mut self.tiers[items[from].tier.0 as usize];
            let end = tier.read(client.clock, items[from].slot, (to - from) as u64);
            let took = end - client.clock;
            let is_demanded = (from..to).contains(&demanded);
            let waits = tier
                .device()
                .is_none_or(|device| device.profile().attach == Attach::Memory);
            match (is_demanded, waits, tier.device().is_none()) {
                (_, _, true) => client.spent.compression += took,
                (true, _, _) => client.spent.read += took,
                (false, true, _) => client.spent.ahead += took,
                (false, false, _) => {
                    client.ahead_until = client.ahead_until.max(end);
                    continue;
                }
            }
            client.clock = end;
        }
        from_tier
    }

    /// Evicts until `pages` fit: none once a fault is planned; one ahead of it, where the limit is too small for a reserve, or
    /// smaller than that of the live run.
    #[inline]
    fn have_room(&mut self, at: usize, pages: i64) -> Result<(), SetupError> {
        if self.clients[at].engine.room() < pages {
            self.let_go(at)?;
        }
        while self.clients[at].engine.room() < pages {
            if self.evict(at, 1)? == 0 {
                self.exceed(at);
                break;
            }
            self.clients[at].forced += 1;
        }
        Ok(())
    }

    /// Evicts up to `want` pages; how many: none only where no page may leave.
    fn evict(&mut self, at: usize, want: usize) -> Result<usize, SetupError> {
        self.let_go(at)?;
        let chosen = self.choose(at, want);
        for index in 0..chosen {
            self.evict_one(at, index)?;
        }
        if self.has_pool {
            self.collect(at);
        }
        Ok(chosen)
    }

    /// Has the policy name up to `want` pages; how many: none only where no page may leave.
    #[inline]
    fn choose(&mut self, at: usize, want: usize) -> usize {
        if !self.clients[at].leave_next.is_empty() {
            let heirs = self.choose_heirs(at);
            if heirs > 0 {
                return heirs;
            }
        }
        let client = &mut self.clients[at];
        let mut tries = 0;
        while !client.engine.select(want, &mut client.batch) {
            // A policy looks at a bounded number of pages a call; two laps find somebody.
            tries += 1;
            if tries > 4 + client.engine.resident().0 {
                return 0;
            }
        }
        client.batch.len()
    }

    /// Evicts page `index` of the batch at hand.
    #[inline(always)] // on the way of every fault
    fn evict_one(&mut self, at: usize, index: usize) -> Result<(), SetupError> {
        let client = &mut self.clients[at];
        let item = client.batch[index];
        client.engine.settle(index, Taken::Moved, &mut self.wake);
        let mark = client.marks[item.no.0 as usize];
        if mark & LENT != 0 {
            self.lend_on(at, index);
        }
        let outcome = if item.retained.is_some() && mark & DIRTY == 0 {
            Outcome::Clean
        } else if mark & WRITTEN == 0 && self.setup.initial == Initial::Zero {
            Outcome::Fill(0)
        } else {
            self.store(at, item.no, item.retained)?
        };
        let client = &mut self.clients[at];
        client.marks[item.no.0 as usize] &= !(DIRTY | AHEAD | LENT);
        client.engine.publish(index, outcome, &mut self.wake);
        Ok(())
    }

    /// Writes a page to the first tier that takes it. * `kept`: the copy it has below.
    fn store(
        &mut self,
        at: usize,
        no: PageNo,
        kept: Option<(TierId, Slot, Stamp)>,
    ) -> Result<Outcome, SetupError> {
        for place in 0..self.tiers.len() {
            if !self.takes(at, place) {
                if place + 1 < self.tiers.len() {
                    self.demote(at, place);
                }
                if !self.takes(at, place) {
                    continue;
                }
            }
            let client = &self.clients[at];
            let home = client.home + u64::from(no.0);
            let over = kept.is_some_and(|(tier, slot, _)| {
                (tier, slot) == (tier_id(place), Slot(home))
                    && !client.engine.is_shared_slot(tier, slot)
            });
            let slot = self.tiers[place].take(home, over);
            self.clients[at].held[place] += 1;
            self.write(at, place, slot);
            return Ok(Outcome::Stored(tier_id(place), slot));
        }
        let references = self.clients.iter().map(|client| client.at as u64).sum();
        Err(SetupError::TiersFull { references })
    }

    fn write(&mut self, at: usize, place: usize, slot: Slot) {
        let client = &mut self.clients[at];
        let tier = &mut self.tiers[place];
        let end = tier.write(client.clock, slot);
        let took = end - client.clock;
        match tier.device().is_none() {
            true => client.spent.compression += took,
            false => client.spent.write += took,
        }
        client.clock = end;
    }

    /// Whether a tier has room for one more page of the client.
    fn takes(&self, at: usize, place: usize) -> bool {
        let tier = &self.tiers[place];
        let TierKind::Pool { ratio, max_percent } = tier.spec.kind else {
            return tier.has_room();
        };
        let client = &self.clients[at];
        let below = place + 1 < self.tiers.len();
        let percent = max_percent.unwrap_or(match below {
            true => POOL_PERCENT_ABOVE,
            false => POOL_PERCENT_ALONE,
        });
        let held = (client.held[place] + 1) as f64 / ratio;
        tier.has_room() && held <= client.frames as f64 * percent / 100.0
    }

    /// Moves the client's oldest pages one tier down, as many as the live manager would at most and an eighth of what is there.
    fn demote(&mut self, at: usize, place: usize) {
        let want = (self.clients[at].held[place] as usize / 8).clamp(1, DEMOTE_PAGES_MAX);
        let mut items = std::mem::take(&mut self.demotions);
        items.clear();
        self.clients[at]
            .engine
            .select_demotions(tier_id(place), want, &mut items);
        for item in &items {
            let below = place + 1;
            if !self.takes(at, below) {
                self.clients[at].engine.demotion_failed(*item);
                continue;
            }
            let client = &mut self.clients[at];
            let end = self.tiers[place].read(client.clock, item.slot, 1);
            let took = end - client.clock;
            match self.tiers[place].device() {
                None => client.spent.compression += took,
                Some(_) => client.spent.write += took,
            }
            client.clock = end;
            let slot = self.tiers[below].take(client.home + u64::from(item.no.0), false);
            client.held[below] += 1;
            self.write(at, below, slot);
            self.clients[at].engine.demoted(*item, tier_id(below), slot);
        }
        self.demotions = items;
        self.collect(at);
    }

    /// Gives freed slots back, and tells the engine what the pool holds.
    #[inline]
    fn collect(&mut self, at: usize) {
        self.clients[at].engine.take_freed(&mut self.freed);
        if !self.freed.is_empty() || self.has_pool {
            self.give_back(at);
        }
    }

    #[inline(never)]
    fn give_back(&mut self, at: usize) {
        let client = &mut self.clients[at];
        for (tier, slot) in self.freed.drain(..) {
            self.tiers[tier.0 as usize].free(slot);
            client.held[tier.0 as usize] -= 1;
        }
        if !self.has_pool {
            return;
        }
        let mut pool = 0.0;
        for (place, tier) in self.tiers.iter().enumerate() {
            if let Some(ratio) = tier.ratio() {
                pool += client.held[place] as f64 / ratio;
            }
        }
        let held = Bytes((pool * PAGE_BYTES as f64) as u64);
        client.engine.set_pool_held(held);
    }

    /// Every page is brought into being and swapped out to the last tier, before time begins.
    fn store_everything(&mut self) -> Result<(), SetupError> {
        let last = self.tiers.len() - 1;
        let full = SetupError::TiersFull { references: 0 };
        for at in 0..self.clients.len() {
            for number in &self.clients[at].stream.touched {
                let client = &mut self.clients[at];
                let fault = Fault {
                    space: client.space,
                    page: VirtPage(u64::from(*number)),
                    write: true,
                    thread: ThreadId(0),
                };
                if client.engine.fault(fault, &mut client.plan) != FaultAnswer::Load {
                    continue; // brought along
                }
                for item in &mut client.plan.items {
                    item.install = match item.demanded {
                        true => Install::Done,
                        false => Install::NotYet,
                    };
                }
                client.engine.finish(client.space, &mut client.plan.items);
                while client.engine.resident().0 > 0 {
                    if !client.engine.select(1, &mut client.batch) {
                        continue;
                    }
                    client.engine.settle(0, Taken::Moved, &mut self.wake);
                    if !self.tiers[last].has_room() {
                        return Err(full);
                    }
                    let home = client.home + u64::from(client.batch[0].no.0);
                    let slot = self.tiers[last].take(home, false);
                    client.held[last] += 1;
                    let outcome = Outcome::Stored(tier_id(last), slot);
                    client.engine.publish(0, outcome, &mut self.wake);
                }
            }
            self.collect(at);
        }
        Ok(())
    }

    /// When everything is done, writes put aside included; the longest of the clients' own times beside it.
    pub fn finish(&mut self) -> (Time, Time) {
        let clients = self.clients.iter().map(|client| client.clock);
        let elapsed = clients.max().unwrap_or_default();
        let idle = self.tiers.iter_mut().map(Tier::settle).max();
        (elapsed, idle.unwrap_or_default().max(elapsed))
    }

    /// The device of each tier that is one.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.tiers.iter().filter_map(Tier::device)
    }
}

/// Which pages of a plan are read by one request: those next to each other on a device with its own engine. Leaves half-open
/// ranges of `items` in `out`, the one with the faulting page first; pages that are read from nowhere are in none.
fn requests(tiers: &[Tier], items: &[LoadItem], demanded: usize, out: &mut Vec<(usize, usize)>) {
    out.clear();
    if let [item] = items {
        // Without a window, which is most often.
        if item.tier != TierId::FILL {
            out.push((0, 1));
        }
        return;
    }
    let mut from = 0;
    while from < items.len() {
        let tier = items[from].tier;
        let mut to = from + 1;
        if tier != TierId::FILL && tiers[tier.0 as usize].merges() {
            while to < items.len()
                && items[to].tier == tier
                && items[to].slot.0 == items[to - 1].slot.0 + 1
            {
                to += 1;
            }
        }
        if tier != TierId::FILL {
            match (from..to).contains(&demanded) {
                true => out.insert(0, (from, to)),
                false => out.push((from, to)),
            }
        }
        from = to;
    }
}

/// More pages than any trace touches; so many bytes fit 63 bits.
const FRAMES_MAX: u64 = 1 << 40;

/// Frames of all clients together. Errors: none at all.
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
