//! The shared part of a simulation: serves a client's faults, evicts for it, and moves pages
//! between tiers.

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, Nanos, PageCount, PageNo, PageSize, Slot, SpaceId, ThreadId, TierId,
    VirtPage,
};
use undercroft_device::{Attach, Time, profiles};
use undercroft_engine::reclaim::{Ended, MOVES_A_SECOND, Now, Pace, Step};
use undercroft_engine::{
    DemoteItem, EvictItem, Fault, FaultAnswer, Install, LoadItem, Mover, Outcome, Taken,
};

use undercroft_policy::mrc::Tiers;
use undercroft_policy::place::{Migration, TIERS_MAX, TierState, pool_percent};

use super::bound::Bounds;
use super::client::{AHEAD, Client, DIRTY, KNOWN, LENT, SCANNED, SHARED, USED, WRITTEN};
use super::tiers::{ReplayTier, tier_id};
use crate::setup::{FaultTouch, Initial, Setup, SetupError, SimRoom, TierModel};

/// Most pages of one read for a move.
const READ_PAGES: usize = 16;

/// Most pages moved in the background before the budget is looked at.
const MOVED_AT_ONCE: usize = 16;

/// The budget of this much time may be used at once: a replay moves only at faults.
const MOVE_SAVED: Nanos = Nanos(1_000_000_000);

/// Devices and tiers, which the clients of a replay share.
pub(super) struct Host {
    /// The simulation's rules.
    pub setup: Setup,
    /// The tiers, fastest first.
    pub tiers: Vec<ReplayTier>,
    freed: Vec<(TierId, Slot)>,
    /// Threads to wake. No thread waits in a simulation, but the engine names some.
    pub wake: Vec<(SpaceId, VirtPage)>,
    demotions: Vec<DemoteItem>,
    /// Of moves in the background, as in a live run.
    pace: Pace,
    requests: Vec<Request>,
    /// A tier lies inside the memory limit.
    pub has_pool: bool,
    /// The clients' latency bounds, if they have any.
    pub bounds: Option<Bounds>,
}

impl Host {
    /// * `homes`: as [`ReplayTier::new`] has them.
    pub(super) fn new(setup: &Setup, homes: Option<u64>, bounds: Option<Bounds>) -> Host {
        let tiers = setup.tiers.iter();
        Host {
            tiers: tiers
                .map(|spec| ReplayTier::new(spec, setup.page_bytes, homes))
                .collect(),
            freed: Vec::new(),
            wake: Vec::new(),
            demotions: Vec::new(),
            pace: Pace::new(MOVE_SAVED),
            requests: Vec::new(),
            has_pool: setup
                .tiers
                .iter()
                .any(|tier| matches!(tier.kind, TierModel::Pool { .. })),
            setup: setup.clone(),
            bounds,
        }
    }

    /// Bounds the queue of the last tier as the control of latency bounds says.
    pub(super) fn bound_queue(&mut self) {
        let slots = self.bounds.as_ref().and_then(Bounds::slots);
        let channels = self.bounds.as_ref().is_some_and(Bounds::counts_channels);
        match (slots, self.tiers.last_mut()) {
            (Some(slots), Some(last)) if channels => last.set_write_channels(slots),
            (Some(slots), Some(last)) => last.set_write_slots(slots),
            _ => {}
        }
    }

    /// As [`Host::serve`], and keeps the wait.
    pub(super) fn serve_noted(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
        write: bool,
    ) -> Result<(), SetupError> {
        let from = (client.at as u64, client.clock);
        self.serve(client, no, write)?;
        client.note_wait(from);
        Ok(())
    }

    /// Every clock is at `now` or later.
    pub(super) fn forget(&mut self, now: Time) {
        self.tiers.iter_mut().for_each(|tier| tier.forget(now));
    }

    /// Serves the reference at which a client stopped: loads its page, or waits for it.
    fn serve(
        &mut self,
        client: &mut Client<'_>,
        no: PageNo,
        write: bool,
    ) -> Result<(), SetupError> {
        let page = VirtPage(u64::from(no.0));
        let fault = Fault {
            space: client.space,
            page,
            write,
            thread: ThreadId(0),
            urgent: false,
        };
        client.at += 1;
        client.control_stall();
        if client.plugin.is_some() {
            client.tell_plugin();
        }
        if write && client.marks[no.0 as usize] & SHARED != 0 && self.write_shared(client, no)? {
            return Ok(());
        }
        if self.setup.room != SimRoom::AfterPlan {
            self.have_room(client, 1)?;
        }
        match client.engine.faults().answer(fault, &mut client.plan) {
            FaultAnswer::Load => {}
            FaultAnswer::Wake => {
                // Prefetched, and perhaps still on its way.
                let late = client.ahead_until - client.clock;
                client.ahead_until = Time::default();
                client.clock += late;
                client.spent.ahead += late;
                client.marks[no.0 as usize] |= u8::from(write) * (DIRTY | WRITTEN);
                return Ok(());
            }
            other => unreachable!("a fault is answered {other:?} with no other under way"),
        }
        client.seen.misses += 1;
        client.missed = client.at;
        let mark = &mut client.marks[no.0 as usize];
        client.seen.first_touches += u64::from(*mark & KNOWN == 0);
        *mark |= KNOWN;
        let start = client.clock;
        self.have_room(client, 0)?;
        let loads = self.load(client);
        let mark = &mut client.marks[no.0 as usize];
        *mark &= !AHEAD;
        *mark |= u8::from(write) * (DIRTY | WRITTEN);
        let touch = match self.setup.fault_touch {
            FaultTouch::None => false,
            FaultTouch::Write => write,
            FaultTouch::All => true,
        };
        if touch {
            client.engine.uses().touch(no, write);
        }
        if loads {
            self.note_load(client, start);
        }
        if client.is_scan_due() {
            client.follow_pages(&self.tiers_now(client));
        }
        self.reclaim(client)?;
        if client.plugin.is_some() {
            self.leave_now(client)?;
            self.load_ahead(client);
        }
        Ok(())
    }

    /// Counts a fault that read a tier, from `start` to now.
    fn note_load(&mut self, client: &mut Client<'_>, start: Time) {
        client.seen.loads += 1;
        let nanos = (client.clock - start).0 / 1000;
        client.latency.saturating_record(nanos.max(1));
        self.note_page_in(client, Nanos(nanos));
    }

    /// Restores the reserve, if there is one and it was used, as the reclaim machine says.
    #[inline]
    pub(super) fn reclaim(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        let sleeps = client.reclaimer.is_asleep() && !client.engine.books().reclaim_wanted();
        if sleeps || self.setup.room != SimRoom::Ahead || client.clock < client.rests_until {
            return Ok(());
        }
        self.take_steps(client)
    }

    /// Takes steps of the machine until it sleeps or rests: the program goes on then. A recorded
    /// program faulted while a batch left. So once the reserve is there, its next batch comes with
    /// the next fault.
    #[inline(never)]
    fn take_steps(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        let recorded = !client.stream.moved.is_empty();
        loop {
            if self.tiers.len() > 1 {
                self.tell_tiers(client);
            }
            self.turn_knobs(client);
            let now = Now {
                time: client.now(),
                limit: client.engine.books().limit(),
                paused: false,
                calm: false,
                reads: false,
                named: false,
            };
            match client.reclaimer.step(&mut client.engine, now) {
                Step::Choose(pages) => self.evict_asked(client, pages)?,
                Step::Demote(migration) => {
                    if self.demote(client, migration) == 0 {
                        client.reclaimer.moved_none();
                    }
                }
                Step::Rest(time) | Step::Full(time) => {
                    client.rests_until = client.clock + Time(time.0 * 1000);
                    return Ok(());
                }
                Step::Sleep(_) | Step::Enough => return Ok(()),
                Step::Yield(_) | Step::Wait | Step::Named(_) => {
                    unreachable!("no read and no batch is under way, and no page is named")
                }
            }
            if recorded && !client.engine.books().reclaim_wanted() {
                return Ok(());
            }
        }
    }

    /// Evicts a batch that the machine has asked for.
    fn evict_asked(&mut self, client: &mut Client<'_>, pages: usize) -> Result<(), SetupError> {
        let left = self.evict(client, pages)?;
        let ended = Ended {
            asked: pages,
            freed: left as u64,
            refused: false,
            unfit: false,
            answer_due: false,
        };
        let time = client.now();
        client.reclaimer.ended(&mut client.engine, time, ended);
        Ok(())
    }

    /// Has the client's engine follow latency control.
    fn turn_knobs(&self, client: &mut Client<'_>) {
        if let Some(bounds) = &self.bounds {
            client.engine.turn(Some(bounds.turned(client.index)));
        }
    }

    /// Exceeds the limit, because no page can leave. The pages that are not locked may be in a
    /// compressed pool as large as the rest of the limit. The live manager exceeds it then, too,
    /// once no page can leave.
    #[cold]
    fn exceed(&mut self, client: &mut Client<'_>) {
        assert!(
            client.locked > 0 || self.has_pool,
            "{} names no victim among {:?}",
            self.setup.reclaim,
            client.engine.books().resident()
        );
        client.engine.faults().set_over_limit(PageCount(1 << 40));
    }

    /// Reads a client's plan and installs it. Returns whether the faulting page came from a tier.
    pub(super) fn load(&mut self, client: &mut Client<'_>) -> bool {
        let from_tier = match &client.plan.items[..] {
            // Zeros, and no other page.
            [item] if item.tier == TierId::FILL => false,
            _ => self.read_plan(client),
        };
        for item in &mut client.plan.items {
            item.install = Install::Done;
            let mark = &mut client.marks[item.no.0 as usize];
            *mark &= !DIRTY;
            // A zero page beside the faulting one is no page that was read ahead.
            if !item.demanded {
                *mark |= if item.fresh { KNOWN } else { AHEAD };
            }
        }
        client
            .engine
            .faults()
            .finish(client.plan.fault, &mut client.plan.items);
        self.collect(client);
        from_tier
    }

    /// Reads a client's plan. Returns whether the faulting page comes from a tier.
    fn read_plan(&mut self, client: &mut Client<'_>) -> bool {
        let items = &client.plan.items[..];
        let demanded = items.iter().find(|item| item.demanded);
        let from = demanded.map(|item| item.tier);
        let from = from.filter(|tier| *tier != TierId::FILL);
        if let Some(from) = from {
            let attach = self.tiers[usize::from(from.0)]
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
        requests(&self.tiers, items, &mut self.requests);
        for read in self.requests.iter().copied() {
            let tier = &mut self.tiers[usize::from(read.tier.0)];
            let end = tier.read(client.clock, read.first, read.pages);
            let took = end - client.clock;
            let is_demanded = read.demanded;
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
        from.is_some()
    }

    /// Evicts until `pages` fit. `pages` is 0 once a fault is planned. It is 1 ahead of a fault, if
    /// the limit is too small for a reserve, or smaller than in the live run.
    #[inline]
    pub(super) fn have_room(
        &mut self,
        client: &mut Client<'_>,
        pages: i64,
    ) -> Result<(), SetupError> {
        if client.engine.books().room() < pages {
            self.make_room(client, pages)
        } else {
            Ok(())
        }
    }

    #[inline(never)]
    fn make_room(&mut self, client: &mut Client<'_>, pages: i64) -> Result<(), SetupError> {
        loop {
            if self.evict(client, 1)? == 0 {
                self.exceed(client);
                return Ok(());
            }
            if client.engine.books().room() >= pages {
                return Ok(());
            }
        }
    }

    /// Evicts up to `want` pages. Returns how many: 0 only if no page may
    /// leave.
    #[inline(always)] // on the fault path
    fn evict(&mut self, client: &mut Client<'_>, want: usize) -> Result<usize, SetupError> {
        let chosen = self.choose(client, want);
        for index in 0..chosen {
            self.evict_one(client, index)?;
        }
        if self.has_pool {
            self.collect(client);
        }
        Ok(chosen)
    }

    /// Has the policy name up to `want` pages. Returns how many: 0 only if no page may leave.
    #[inline(always)] // on the fault path
    pub(super) fn choose(&mut self, client: &mut Client<'_>, want: usize) -> usize {
        self.turn_knobs(client);
        self.migrate(client);
        if !client.leave_next.is_empty() {
            let heirs = self.choose_heirs(client);
            if heirs > 0 {
                return heirs;
            }
        }
        let mut wishes = client.take_wishes();
        let mut tries = 0;
        while !client
            .engine
            .evictions()
            .select_ahead(&mut wishes, want, &mut client.batch)
        {
            // A policy scans a bounded number of pages a call; two laps find a victim.
            tries += 1;
            if tries > 4 + client.engine.books().resident().0 {
                return 0;
            }
        }
        client.batch.len()
    }

    /// Evicts page `index` of the batch at hand.
    #[inline(always)] // on the fault path
    pub(super) fn evict_one(
        &mut self,
        client: &mut Client<'_>,
        index: usize,
    ) -> Result<(), SetupError> {
        let EvictItem { at, no, .. } = client.batch[index];
        client
            .engine
            .evictions()
            .settle(at, Taken::Moved, &mut self.wake);
        let mark = client.marks[no.0 as usize];
        if mark & LENT != 0 {
            self.lend_on(client, index);
        }
        let copy = client.batch[index].retained;
        let copy = copy.filter(|(tier, ..)| self.copy_is_good(client, *tier));
        let outcome = if mark & DIRTY == 0 && copy.is_some() {
            Outcome::Clean
        } else if mark & WRITTEN == 0 && self.setup.initial == Initial::Zero {
            Outcome::Fill(0)
        } else {
            self.store(client, index)?
        };
        client.marks[no.0 as usize] &= !(DIRTY | AHEAD | LENT | USED | SCANNED);
        client
            .engine
            .evictions()
            .publish(at, outcome, &mut self.wake);
        Ok(())
    }

    /// Writes page `index` of the batch at hand to the first tier that takes it.
    ///
    /// Errors: no tier takes it; [`super::Replay::run`] fills in the references done.
    fn store(&mut self, client: &mut Client<'_>, index: usize) -> Result<Outcome, SetupError> {
        let EvictItem {
            at, no, retained, ..
        } = client.batch[index];
        let order = client.engine.evictions().tiers_for(at);
        for tier in order.iter() {
            let place = usize::from(tier.0);
            if !self.takes(client, place) {
                continue;
            }
            let home = client.home + u64::from(no.0);
            let over = retained.is_some_and(|(tier, slot, _)| {
                (tier, slot) == (tier_id(place), Slot(home))
                    && !client.engine.books().is_shared_slot(tier, slot)
            });
            let slot = self.tiers[place].take(home, over);
            client.held[place] += 1;
            self.write(client, place, slot, None);
            client.seen.writes += 1;
            return Ok(Outcome::Stored(tier_id(place), slot));
        }
        Err(SetupError::TiersFull { references: 0 })
    }

    /// Stores the selected page in the last tier that the policy offers it to, at no cost.
    pub(super) fn store_far(&mut self, client: &mut Client<'_>) -> Result<(), SetupError> {
        let EvictItem { at, no, .. } = client.batch[0];
        client
            .engine
            .evictions()
            .settle(at, Taken::Moved, &mut self.wake);
        let offered = client.engine.evictions().tiers_for(at).iter().last();
        let last = offered.map(|tier| usize::from(tier.0));
        let Some(last) = last.filter(|last| self.tiers[*last].has_room()) else {
            return Err(SetupError::TiersFull { references: 0 });
        };
        let home = client.home + u64::from(no.0);
        let slot = self.tiers[last].take(home, false);
        client.held[last] += 1;
        let outcome = Outcome::Stored(tier_id(last), slot);
        client
            .engine
            .evictions()
            .publish(at, outcome, &mut self.wake);
        Ok(())
    }

    /// * `mover`: who moves the page; `None`: it leaves memory.
    fn write(&mut self, client: &mut Client<'_>, place: usize, slot: Slot, mover: Option<Mover>) {
        let tier = &mut self.tiers[place];
        let leaves = mover.is_none().then_some(client.index);
        let end = tier.write(client.clock, slot, leaves);
        let took = end - client.clock;
        if tier.device().is_none() {
            client.spent.compression += took
        } else {
            client.spent.write += took
        }
        client.clock = end;
        if place + 1 == self.tiers.len()
            && let Some(bounds) = &mut self.bounds
        {
            let waits = mover != Some(Mover::Background);
            bounds.note_write(if waits { took } else { Time::default() });
        }
    }

    /// Whether a tier has room for one more page of the client.
    pub(super) fn takes(&self, client: &Client<'_>, place: usize) -> bool {
        let tier = &self.tiers[place];
        let TierModel::Pool { ratio, .. } = tier.spec.kind else {
            return tier.has_room();
        };
        let held = (client.held[place] + 1) as f64 / ratio;
        tier.has_room() && held <= client.frames as f64 * self.pool_percent(place) / 100.0
    }

    /// The share of the limit, in percent, that the pool at `place` may take.
    fn pool_percent(&self, place: usize) -> f64 {
        let TierModel::Pool { max_percent, .. } = self.tiers[place].spec.kind else {
            return 0.0;
        };
        let last = place + 1 == self.tiers.len();
        max_percent.unwrap_or_else(|| f64::from(pool_percent(last)))
    }

    /// The engine's view of a tier. A page of the simulation is a page of the engine, whatever its
    /// size.
    fn state(&self, client: &Client<'_>, place: usize) -> TierState {
        let tier = &self.tiers[place];
        let bytes = |pages: f64| Bytes((pages * BASE_PAGE_BYTES as f64) as u64);
        let free = tier.free_pages() as f64;
        match tier.spec.kind {
            TierModel::Pool { ratio, .. } => {
                let held = client.held[place] as f64 / ratio;
                let share = client.frames as f64 * self.pool_percent(place) / 100.0;
                TierState {
                    page: PageSize::Base,
                    capacity: bytes(share.min(held + free / ratio)),
                    held: bytes(held),
                    dram: bytes(held),
                    copies: PageCount(client.held[place]),
                    packed: bytes(held),
                    load_ns: tier.load_ns(),
                    latency: tier.spec.kind.latency(),
                    demotes: false, // the engine knows
                }
            }
            TierModel::Device { .. } => TierState {
                page: PageSize::Base,
                capacity: bytes(tier.held() as f64 + free),
                held: bytes(tier.held() as f64),
                dram: Bytes(0),
                copies: PageCount(tier.held()),
                packed: bytes(tier.held() as f64),
                load_ns: tier.load_ns(),
                latency: tier.spec.kind.latency(),
                demotes: false,
            },
        }
    }

    /// The tiers, as the estimator of the miss-ratio curve wants them.
    pub(super) fn tiers_now(&self, client: &Client<'_>) -> Tiers {
        let states: Vec<_> = (0..self.tiers.len())
            .map(|place| self.state(client, place))
            .collect();
        Tiers::new(&states, client.engine.books().stats().clean_part())
    }

    /// Moves pages between tiers before a batch leaves, as the placement policy decides.
    #[inline]
    pub(super) fn migrate(&mut self, client: &mut Client<'_>) {
        if self.tiers.len() > 1 {
            self.migrate_all(client);
        }
    }

    /// As [`Host::migrate`]: until the policy asks for no more, or nothing can move. Then what is
    /// moved in the background, as far as its budget goes by now.
    #[inline(never)]
    fn migrate_all(&mut self, client: &mut Client<'_>) {
        loop {
            self.tell_tiers(client);
            match client.engine.migrations().wanted(Mover::Evictor) {
                Some(migration) if self.demote(client, migration) > 0 => {}
                _ => break,
            }
        }
        let now = client.now();
        while self.pace.next() < now {
            let moved = self.move_beside(client);
            if moved == 0 {
                break;
            }
            let bytes = Bytes(moved * self.setup.page_bytes);
            self.pace.moved(now, bytes, MOVES_A_SECOND);
            self.tell_tiers(client);
        }
    }

    /// Moves what is to move in the background, by a thread of its own: the devices are busy, and
    /// the client goes on. A few pages at a time, because a page-in waits for them, and not while
    /// the queue of the device below is full. Returns how many moved.
    fn move_beside(&mut self, client: &mut Client<'_>) -> u64 {
        if client.beside.items.is_empty() {
            self.select_beside(client);
        }
        let to = client.beside.to;
        let left = &mut client.beside.items;
        if left.is_empty() || !self.tiers[usize::from(to.0)].queue_has_room(client.clock) {
            return 0;
        }
        let rest = left.len().saturating_sub(MOVED_AT_ONCE);
        self.demotions.clear();
        self.demotions.extend(left.drain(rest..).rev());
        self.carry_out(client, to, Mover::Background)
    }

    /// Selects what is to move next in the background.
    fn select_beside(&mut self, client: &mut Client<'_>) {
        let now = client.now();
        let items = &mut client.beside.items;
        let mut migrations = client.engine.migrations();
        if let Some(migration) = migrations.wanted(Mover::Background) {
            let pages = (migration.pages.0 as usize).min(MOVED_AT_ONCE);
            migrations.select(migration.from, pages, items);
            client.beside.to = migration.to;
        } else if let Some(rule) = &client.locality {
            rule.tell_time(now);
        }
        if client.beside.items.is_empty() {
            self.select_wished(client);
        }
        client.beside.items.reverse();
    }

    /// Gives the engine the state of every tier.
    pub(super) fn tell_tiers(&self, client: &mut Client<'_>) {
        let mut states = [None; TIERS_MAX];
        for (place, state) in states.iter_mut().enumerate().take(self.tiers.len()) {
            *state = Some(self.state(client, place));
        }
        client
            .engine
            .migrations()
            .set_tiers(states.into_iter().flatten());
    }

    /// Moves the client's oldest pages of a tier to another. Returns how many.
    fn demote(&mut self, client: &mut Client<'_>, migration: Migration) -> u64 {
        let want = migration.pages.0 as usize;
        self.demotions.clear();
        client
            .engine
            .migrations()
            .select(migration.from, want, &mut self.demotions);
        self.carry_out(client, migration.to, Mover::Evictor)
    }

    /// Moves the selected pages. Neighbours on a device are read together. Returns how many moved.
    ///
    /// In the background, all requests are made now: a device that was asked for something later
    /// would serve the client only after that.
    fn carry_out(&mut self, client: &mut Client<'_>, to: TierId, mover: Mover) -> u64 {
        let below = usize::from(to.0);
        let items = std::mem::take(&mut self.demotions);
        let (clock, spent) = (client.clock, client.spent);
        let (mut moved, mut read) = (0, 0);
        for (at, item) in items.iter().enumerate() {
            if mover == Mover::Background {
                (client.clock, client.spent) = (clock, spent);
            }
            if !self.takes(client, below) {
                client.engine.migrations().failed(*item);
                continue;
            }
            if read <= at {
                let place = usize::from(item.tier.0);
                let follows = |pair: &&[DemoteItem]| pair[0].slot.0 + 1 == pair[1].slot.0;
                let more = if self.tiers[place].merges() {
                    items[at..].windows(2).take_while(follows).count()
                } else {
                    0
                };
                let pages = 1 + more.min(READ_PAGES - 1);
                read = at + pages;
                let end = self.tiers[place].read(client.clock, item.slot, pages as u64);
                let took = end - client.clock;
                match self.tiers[place].device() {
                    None => client.spent.compression += took,
                    Some(_) => client.spent.write += took,
                }
                client.clock = end;
            }
            let slot = self.tiers[below].take(client.home + u64::from(item.no.0), false);
            client.held[below] += 1;
            self.write(client, below, slot, Some(mover));
            client.engine.migrations().demoted(*item, to, slot);
            moved += 1;
        }
        if mover == Mover::Background {
            (client.clock, client.spent) = (clock, spent);
        }
        self.demotions = items;
        self.collect(client);
        moved
    }

    /// Frees slots, and reports to the engine what the pool holds.
    #[inline]
    pub(super) fn collect(&mut self, client: &mut Client<'_>) {
        client.engine.take_freed(&mut self.freed);
        if !self.freed.is_empty() || self.has_pool {
            self.give_back(client);
        }
    }

    #[inline(never)]
    fn give_back(&mut self, client: &mut Client<'_>) {
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
        let held = Bytes((pool * BASE_PAGE_BYTES as f64) as u64);
        client.engine.migrations().set_pool_held(held);
    }
}

/// A read of a plan: pages that follow each other in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    tier: TierId,
    first: Slot,
    pages: u64,
    /// The faulting page is among them.
    demanded: bool,
}

/// The reads of a plan, that of the faulting page first. Neighbours on a device with its own engine
/// are one read, as the kernel's block layer makes of them. Pages that are not read are in none.
fn requests(tiers: &[ReplayTier], items: &[LoadItem], out: &mut Vec<Request>) {
    out.clear();
    let stored = items.iter().filter(|item| item.tier != TierId::FILL);
    out.extend(stored.map(|item| Request {
        tier: item.tier,
        first: item.slot,
        pages: 1,
        demanded: item.demanded,
    }));
    if out.len() > 1 {
        out.sort_unstable_by_key(|read| (read.tier.0, read.first.0));
        out.dedup_by(|next, read| {
            let follows = next.tier == read.tier && next.first.0 == read.first.0 + read.pages;
            let merges = follows && tiers[usize::from(read.tier.0)].merges();
            if merges {
                read.pages += next.pages;
                read.demanded |= next.demanded;
            }
            merges
        });
        out.sort_by_key(|read| !read.demanded);
    }
}
