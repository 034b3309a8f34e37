//! The evictor and the demoter: select, take out, store, publish, with other steps between.

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, Loaded, PageCount, PageKey, PageNo, Slot, SpaceId, Stamp, Store,
    StoreError, Tier, TierId, VirtPage, fill_word,
};
use undercroft_engine::{DemoteItem, EvictItem, Evictions, GROUPS, Missing, Mover, Outcome, Taken};
use undercroft_model::{Content, MoveRefusal, NotInstalled};

use undercroft_policy::place::Migration;

use super::ledger::StormLedger;
use super::meddler::Plugin;
use super::setup::Sabotage;
use super::work::{Demotion, DeviceRead, Eviction, TakenOut, half_of};
use super::world::World;

/// The result of moving a page out.
#[derive(Debug)]
enum MovedOut {
    /// The agent has its bytes. `copied`: relatives may still have its frame.
    Yes { content: Content, copied: bool },
    /// The page stays.
    Not(Taken),
    /// There is no page.
    Vanished,
}

/// The result of putting a page back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Back {
    /// The page is there, in every space that has it.
    Everywhere,
    /// Events of a space must be read first.
    AfterEvents,
    /// A space refused for now.
    Again,
}

impl World {
    /// Takes one step of the evictor. False if there was nothing to do.
    pub fn evict_step(&mut self) -> bool {
        if self.late_step() {
            return true;
        }
        self.turn_to_another_batch();
        if self.batch.is_none() && self.groups() < GROUPS && self.evictor_turn() {
            return true;
        }
        if self.batch.is_none() {
            self.batch = self.others.pop();
        }
        self.batch.is_some() && self.batch_step()
    }

    /// Takes one step with the batch; false when that has to wait.
    pub(super) fn batch_step(&mut self) -> bool {
        let calm = self.calm;
        let batch = self.batch.as_mut().expect("a batch");
        if batch.stalled > 0 && !calm {
            batch.stalled -= 1;
            return true;
        }
        if batch.next < batch.items.len() {
            let stalled = self.stall();
            self.batch.as_mut().expect("a batch").stalled = stalled;
            // The agent takes several pages at a time.
            for _ in 0..1 + self.random.index(8) {
                self.take_next();
            }
            return true;
        }
        if batch.held.is_empty() {
            let ended = self.batch.take().and_then(|batch| batch.ended);
            match ended {
                Some(ended) => self.batch_ended(ended),
                None => _ = self.take_waiters(),
            }
            return true;
        }
        let at = self.random.index(batch.held.len());
        match batch.held[at].outcome {
            None => self.store_held(at),
            Some(outcome) => return self.publish_held(at, outcome),
        }
        true
    }

    /// Selects up to `want` pages. False if none can be selected.
    pub fn select(&mut self, want: usize) -> bool {
        let now_ms = self.clock.0 / 1_000_000;
        let plugin = self.plugin.as_mut();
        let mut wishes = plugin.map_or_else(Vec::new, |of| of.wishes(&self.engine, now_ms));
        self.note_places();
        let wished = self.engine.books().stats().wished;
        let any = self
            .begin_batch(|mut evictions, items| evictions.select_ahead(&mut wishes, want, items));
        if self.engine.books().stats().wished > wished {
            self.saw("victims that a plugin named");
        }
        let scans = |of: &mut Plugin| std::mem::take(&mut of.scans);
        if self.plugin.as_mut().map_or(0, scans) > 0 {
            self.saw("scans for a plugin");
        }
        any
    }

    /// Starts a batch with the pages that `select` chooses.
    pub(super) fn begin_batch(
        &mut self,
        select: impl FnOnce(Evictions<'_, StormLedger>, &mut Vec<EvictItem>) -> bool,
    ) -> bool {
        let mut items = Vec::new();
        let busy: Vec<_> = self.evictions().flat_map(Eviction::unfinished).collect();
        self.holding
            .retain(|(owner, place), _| busy.contains(&(*owner, half_of(*place))));
        self.oracle.forget_returning();
        let any = select(self.engine.evictions(), &mut items);
        for item in &items {
            assert!(
                self.proc_of(item.space).is_some(),
                "{item:?} is of no live space"
            );
            assert!(
                !self.is_aside(item.space) && !self.has_no_agent(item.space),
                "{item:?} is of one passed over"
            );
            assert!(
                !busy.contains(&(item.space, half_of(item.place.into()))),
                "{item:?} has a place of another batch"
            );
            assert!(
                !self
                    .engine
                    .books()
                    .entry(item.space, item.page)
                    .flags
                    .has(undercroft_base::Flags::LOCKED),
                "a locked page was selected"
            );
        }
        self.log(|| {
            let pages: Vec<_> = items.iter().map(|i| (i.space.0, i.page.0)).collect();
            format!("select {pages:?}")
        });
        if any && !busy.is_empty() {
            self.saw("several batches in flight");
        }
        if (items.iter()).any(|item| busy.iter().any(|(space, _)| *space == item.space)) {
            self.saw("several batches of one space");
        }
        let stalled = self.stall();
        self.batch = any.then_some(Eviction {
            stalled,
            items,
            next: 0,
            cancelled: false,
            held: Vec::new(),
            back: Vec::new(),
            ended: None,
        });
        any
    }

    /// The agent moves the next page of the batch out, if it can.
    pub fn take_next(&mut self) {
        let batch = self.batch.as_ref().expect("a batch");
        let at = batch.next;
        let (Some(item), cancelled) = (batch.items.get(at).copied(), batch.cancelled) else {
            return;
        };
        let moved = if cancelled {
            MovedOut::Not(Taken::NotTried)
        } else {
            self.try_to_move(item)
        };
        self.log(|| format!("take {at} {} -> {moved:?}", item.page.0));
        self.batch.as_mut().expect("a batch").next += 1;
        let mut wake = Vec::new();
        match moved {
            MovedOut::Yes { content, copied } => {
                let taken = Taken::Moved;
                self.hold(item, content);
                self.engine.evictions().settle(item.at, taken, &mut wake);
                if copied {
                    self.leave_frame(item);
                }
            }
            MovedOut::Not(taken) => self.stay(item, taken, &mut wake),
            MovedOut::Vanished => {
                self.stay(item, Taken::NotTried, &mut wake);
                let dropped = Missing::Dropped; // by the program: the model has zeros there
                (self.engine.discovery()).vanished(item.space, item.page, dropped);
            }
        }
        self.wake_all(wake);
    }

    /// The agent moves a page, and may break the sharing of its frame for that.
    fn try_to_move(&mut self, item: EvictItem) -> MovedOut {
        let Some(proc) = self.proc_of(item.space) else {
            panic!("{item:?}: its space went without a cancel");
        };
        let mm = self.procs[proc].mm;
        let mut moved = if self.fails(self.space_rates.move_again) {
            self.saw("space: EAGAIN of a move");
            Err(MoveRefusal::LayoutChanging)
        } else {
            self.memory.move_out(mm, item.page)
        };
        let mut copied = false;
        if moved == Err(MoveRefusal::Busy) && (self.calm || self.random.chance(3, 4)) {
            copied = self.memory.is_shared(mm, item.page);
            self.memory.break_sharing(mm, item.page);
            moved = self.memory.move_out(mm, item.page);
        }
        match moved {
            Ok(content) => MovedOut::Yes { content, copied },
            Err(MoveRefusal::Busy) => MovedOut::Not(Taken::Busy),
            Err(MoveRefusal::LayoutChanging) => MovedOut::Not(Taken::NotTried),
            Err(MoveRefusal::Missing) => MovedOut::Vanished,
            Err(MoveRefusal::NotMapped) => panic!("{item:?} is not mapped"),
        }
    }

    /// Item `at` of the batch has been moved out, into its agent's holding area.
    fn hold(&mut self, item: EvictItem, content: Content) {
        let batch = self.batch.as_mut().expect("a batch");
        batch.held.push(TakenOut {
            at: item.at,
            content,
            outcome: None,
        });
        self.holding
            .insert((item.space, item.place.into()), content);
    }

    /// The manager mostly notices that relatives still have the frame of an item, and leaves it to
    /// them.
    fn leave_frame(&mut self, item: EvictItem) {
        if !self.random.chance(3, 4) {
            return;
        }
        let relatives = self.relatives(item.space);
        let heir = self.engine.evictions().leave_frame(item.at, &relatives);
        if heir.is_some() {
            self.saw("left its frame to an heir");
        }
    }

    /// An item was not taken out.
    fn stay(&mut self, item: EvictItem, taken: Taken, wake: &mut Vec<(SpaceId, VirtPage)>) {
        let mut places = Vec::new();
        self.engine.evictions().places_of(item.at, &mut places);
        if places.len() > 1 {
            self.saw("not taken, shared by a fork");
        }
        self.engine.evictions().settle(item.at, taken, wake);
        self.saw(match taken {
            Taken::Busy => "not taken: busy",
            _ => "not taken: cancelled",
        });
    }

    /// Stores one page that was taken out, unless a tier hangs.
    pub fn store_held(&mut self, held_at: usize) {
        if (0..self.tiers.len()).any(|at| self.hangs(TierId(at as u8))) {
            return;
        }
        let batch = self.batch.as_ref().expect("a batch");
        let held = batch.held[held_at];
        let item = batch.item(held.at);
        let outcome = match self.engine.evictions().alive_mask(&[item]) {
            0 if self.random.chance(1, 2) => Outcome::PutBack,
            _ if self.engine.evictions().wanted_mask(&[item]) != 0 => Outcome::PutBack,
            _ => self.place(item, held.content),
        };
        self.log(|| {
            format!(
                "store {} {} {:?} -> {outcome:?}",
                held.at.place(),
                item.page.0,
                held.content
            )
        });
        self.batch.as_mut().expect("a batch").held[held_at].outcome = Some(outcome);
    }

    fn place(&mut self, item: EvictItem, content: Content) -> Outcome {
        let bytes = content.bytes();
        if let Some(word) = fill_word(&bytes) {
            return Outcome::Fill(word);
        }
        if let Some((tier, slot, stamp)) = item.retained {
            let below = match tier {
                TierId::FILL => None,
                tier => self.tiers[tier.0 as usize].checksum(slot, stamp),
            };
            let behind = self.engine.evictions().leaves_copies_in() == Some(tier);
            if behind {
                self.saw("reclaim: a copy is left behind");
            } else if below == Some(PageKey::KNOWN.checksum(&bytes, stamp)) {
                return Outcome::Clean;
            }
        }
        self.update_pool();
        let sum = PageKey::KNOWN.checksum(&bytes, item.stamp);
        let mut order = self.tiers_for(item.at).iter();
        let placed = order.find_map(|tier| {
            let updated = self.update_in(tier, item, &bytes, sum);
            updated.or_else(|| self.store_in(tier, &bytes, item.stamp, sum))
        });
        match placed {
            Some((tier, slot)) => Outcome::Stored(tier, slot),
            None => Outcome::PutBack,
        }
    }

    /// Changes the copy that a tier keeps of the page in place, if it can.
    fn update_in(
        &mut self,
        to: TierId,
        item: EvictItem,
        bytes: &[u8],
        checksum: u64,
    ) -> Option<(TierId, Slot)> {
        let keeps = item.retained.is_some_and(|(of, ..)| of == to);
        let tier = &self.tiers[usize::from(to.0)];
        if !keeps || !tier.info().facts.updates_copies {
            return None;
        }
        let (_, slot) = self.engine.evictions().take_retained(item.at)?;
        let store = Store {
            page: bytes,
            stamp: item.stamp,
            checksum,
            result: Err(StoreError::Full),
        };
        if matches!(tier.update(slot, &store), Some(Ok(_))) {
            self.saw("updated in place");
            return Some((to, slot));
        }
        tier.free(&[slot]);
        self.saw("update in place failed");
        None
    }

    fn store_in(
        &mut self,
        to: TierId,
        bytes: &[u8],
        stamp: Stamp,
        checksum: u64,
    ) -> Option<(TierId, Slot)> {
        let mut batch = [Store {
            page: bytes,
            stamp,
            checksum,
            result: Err(StoreError::Full),
        }];
        self.tiers[usize::from(to.0)].store(&mut batch);
        if let (Err(StoreError::Incompressible), Some(batch)) = (batch[0].result, &mut self.batch)
            && let Some(ended) = &mut batch.ended
        {
            ended.unfit = true;
        }
        let slot = batch[0].result.ok()?;
        self.update_pool();
        Some((to, slot))
    }

    /// Publishes one page that was stored, or puts it back. False if that has to wait.
    pub fn publish_held(&mut self, held_at: usize, outcome: Outcome) -> bool {
        let batch = self.batch.as_ref().expect("a batch");
        let held = batch.held[held_at];
        let item = batch.item(held.at);
        let outcome = self.outcome_now(item, outcome);
        let mut woken = Vec::new();
        if outcome == Outcome::PutBack {
            let back = self.put_back(&held);
            if back != Back::Everywhere {
                self.batch.as_mut().expect("a batch").held[held_at].outcome = Some(outcome);
                return back == Back::Again;
            }
            self.engine.evictions().places_of(held.at, &mut woken);
        }
        self.saw_published(item, outcome);
        let before = *self.engine.books().stats();
        self.engine
            .evictions()
            .publish(held.at, outcome, &mut woken);
        let after = self.engine.books().stats();
        let freed = after.base_pages_freed - before.base_pages_freed;
        let refused = after.refused_store != before.refused_store;
        if let Some(ended) = self.batch.as_mut().and_then(|batch| batch.ended.as_mut()) {
            ended.freed += freed;
            ended.refused |= refused;
        }
        self.log(|| format!("publish {} {outcome:?}", held.at.place()));
        self.batch.as_mut().expect("a batch").held.remove(held_at);
        if !self.sabotaged(Sabotage::ForgetEvictorWake) {
            self.wake_all(woken);
        }
        true
    }

    /// A page that was stored may be put back instead, if a thread wants it by now.
    fn outcome_now(&mut self, item: EvictItem, outcome: Outcome) -> Outcome {
        if let Outcome::Stored(tier, slot) = outcome
            && self.engine.evictions().wanted_mask(&[item]) != 0
            && !self.calm
            && self.random.chance(1, 3)
        {
            self.tiers[tier.0 as usize].free(&[slot]);
            self.update_pool();
            return Outcome::PutBack;
        }
        outcome
    }

    /// Installs a page where it came from, in each space that has it.
    fn put_back(&mut self, held: &TakenOut) -> Back {
        let mut places = Vec::new();
        self.engine.evictions().places_of(held.at, &mut places);
        let at: Vec<_> = places
            .iter()
            .map(|(space, page)| (self.proc_of(*space).expect("a live space"), *page))
            .collect();
        let waits = |(proc, _): &(usize, _)| self.memory.is_changing(self.procs[*proc].mm);
        if at.iter().any(waits) {
            return Back::AfterEvents;
        }
        let mut back = Back::Everywhere;
        for ((proc, page), (space, _)) in at.iter().zip(&places) {
            let place = (held.at, *space, *page);
            if self
                .batch
                .as_ref()
                .is_some_and(|batch| batch.back.contains(&place))
            {
                continue; // the program may have put a guard there since
            }
            let mm = self.procs[*proc].mm;
            match self.install(mm, *page, held.content) {
                Ok(()) | Err(NotInstalled::Exists) => {
                    let batch = self.batch.as_mut().expect("a batch");
                    batch.back.push(place);
                }
                Err(_) => back = Back::Again,
            }
        }
        back
    }

    /// Counts the case of this publication.
    fn saw_published(&mut self, item: EvictItem, outcome: Outcome) {
        if self.engine.evictions().alive_mask(&[item]) == 0 {
            self.saw("published: dropped");
        }
        let mut places = Vec::new();
        self.engine.evictions().places_of(item.at, &mut places);
        if places.len() > 1 {
            self.saw("published: shared by a fork");
        }
        if places.len() == 1 && places[0].0 != item.space {
            self.saw("published: only a fork child has it");
        }
        if places.len() == 1 && places[0] != (item.space, item.page) {
            self.saw("published: moved since selected");
        }
        self.saw(match (outcome, places.len()) {
            (Outcome::Stored(..), _) => "published: stored",
            (Outcome::Clean, 0..2) => "published: clean",
            (Outcome::Clean, _) => "published: clean, shared",
            (Outcome::Fill(_), _) => "published: fill",
            (Outcome::PutBack, 0..2) => "published: put back",
            (Outcome::PutBack, _) => "published: put back, shared",
            (Outcome::Lost, _) => "published: lost",
        });
    }

    /// Starts a migration. False if there is nothing to move.
    pub fn start_demotion(&mut self, migration: Migration) -> bool {
        let mut items = Vec::new();
        let want = migration.pages.0 as usize;
        self.engine
            .migrations()
            .select(migration.from, want, &mut items);
        self.start_move(items, migration.to)
    }

    /// Starts to move some copies inside their tier, as a file does whose space is scattered. False
    /// if there is none.
    fn start_gather(&mut self) -> bool {
        if !self.random.chance(1, 4) {
            return false;
        }
        let tier = TierId(self.random.index(self.tiers.len()) as u8);
        let first = self.random.index(64) as u64;
        let slots = [Slot(first)..Slot(first + 16)];
        let mut items = Vec::new();
        let mut migrations = self.engine.migrations();
        migrations.select_slots(tier, &slots, PageNo(0), &mut items);
        let starts = self.start_move(items, tier);
        if starts {
            self.saw("gather: begun");
        }
        starts
    }

    pub(super) fn start_move(&mut self, items: Vec<DemoteItem>, to: TierId) -> bool {
        if items.is_empty() {
            return false;
        }
        self.log(|| format!("move {items:?} to {to:?}"));
        let stalled = self.stall();
        self.demotion = Some(Demotion {
            to,
            stalled,
            items,
            reading: None,
            loaded: None,
            stored: None,
            for_evictor: None,
        });
        true
    }

    /// Takes one step of a demotion. False if there was nothing to do. Two may be under way: one
    /// of the evictor, and one of the thread that reads devices.
    pub fn demotion_step(&mut self) -> bool {
        if (0..self.tiers.len()).any(|at| self.hangs(TierId(at as u8))) {
            return true;
        }
        let other = if self.calm {
            self.demotion.is_none()
        } else {
            self.setup.tiers.len() > 2 && self.random.chance(1, 2)
        };
        if other {
            std::mem::swap(&mut self.demotion, &mut self.second_demotion);
        }
        let calm = self.calm;
        let Some(demotion) = &mut self.demotion else {
            if !calm && self.drain_step() {
                return true;
            }
            let next = self.next_migration();
            return next.is_some_and(|next| self.start_demotion(next))
                || self.start_wished_move()
                || (!calm && self.start_gather());
        };
        if demotion.stalled > 0 && !calm {
            demotion.stalled -= 1;
            return true;
        }
        if let Some((item, to, slot)) = demotion.stored.take() {
            self.publish_demoted(item, to, slot);
        } else if let Some((item, bytes, checksum)) = demotion.loaded.take() {
            let to = demotion.to;
            match self.store_in(to, &bytes, item.stamp, checksum) {
                Some((tier, slot)) => {
                    self.demotion.as_mut().expect("going on").stored = Some((item, tier, slot));
                }
                None => _ = self.engine.migrations().failed(item),
            }
        } else if let Some(read) = demotion.reading.take() {
            self.read_to_demote(read);
        } else if let Some(item) = demotion.items.pop() {
            self.load_to_demote(item, false);
        } else {
            self.demotion_ended();
        }
        true
    }

    /// Begins a drain, or goes on with it. False if nothing of it is to be moved now.
    fn drain_step(&mut self) -> bool {
        if self.removed.is_some() {
            if self.random.chance(1, 40) {
                self.add_removed();
            }
            return false;
        }
        let Some((tier, from)) = self.drain else {
            if self.tiers.len() > 1 && self.random.chance(1, 40) {
                let tier = TierId(self.random.index(self.tiers.len()) as u8);
                self.begin_drain(tier);
            }
            return false;
        };
        if self.tiers[usize::from(tier.0)].usage().logical == Bytes(0) {
            self.saw("drain: the tier is empty");
            if self.random.chance(1, 20) {
                self.drained += 1;
                if self.drained.is_multiple_of(2) || !self.remove_drained(tier) {
                    self.end_drain();
                }
            }
            return false;
        }
        if self.random.chance(1, 200) {
            self.end_drain();
            return false;
        }
        self.drain_some(tier, from)
    }

    /// Closes a tier.
    pub fn begin_drain(&mut self, tier: TierId) {
        self.log(|| format!("drain {tier:?}"));
        self.engine.migrations().close(tier);
        self.drain = Some((tier, PageNo(0)));
    }

    /// Takes a tier out that is closed and empty. False: copies are on their way to it.
    fn remove_drained(&mut self, tier: TierId) -> bool {
        let moves = [&self.demotion, &self.second_demotion];
        if moves.into_iter().flatten().any(|of| of.to == tier) {
            return false;
        }
        self.log(|| format!("remove {tier:?}"));
        self.saw("drain: the tier was removed");
        self.engine.migrations().remove(tier);
        self.drain = None;
        self.removed = Some(tier);
        true
    }

    /// Takes the tier that was removed into use again, at any place in the order.
    fn add_removed(&mut self) {
        let Some(tier) = self.removed.take() else {
            return;
        };
        let latency = self.tiers[usize::from(tier.0)].info().facts.class;
        let rank = self.steps as usize % self.tiers.len();
        self.log(|| format!("add {tier:?} at rank {rank}"));
        self.saw("drain: a tier was added");
        self.engine.migrations().add(tier, latency, rank);
        self.update_pool();
        for rank in 0..self.tiers.len() {
            let of = self.engine.migrations().ranks()[rank];
            let mut from = Some(PageNo(0));
            while let Some(next) = from {
                from = self.engine.migrations().note_ages(of, next);
            }
        }
    }

    /// Every tier is used again.
    pub fn end_drain(&mut self) {
        self.add_removed();
        if let Some((tier, _)) = self.drain.take() {
            self.engine.migrations().reopen(tier);
        }
    }

    /// Starts to move the next pages of a closed tier. False if there is none, or no room.
    pub fn drain_some(&mut self, tier: TierId, from: PageNo) -> bool {
        self.update_pool();
        let mut items = Vec::new();
        let next = self.engine.migrations().select_all(tier, from, &mut items);
        self.drain = Some((tier, next.unwrap_or(PageNo(0))));
        let to = self.engine.migrations().refuge_from(tier);
        to.is_some_and(|to| self.start_move(items, to))
    }

    /// The move that is next, if anything.
    fn next_migration(&mut self) -> Option<Migration> {
        self.update_pool();
        // Only a part: the engine is asked again, after other steps.
        let part = PageCount(1 + self.random.index(12) as u64);
        let mut movers = [Mover::Evictor, Mover::Background];
        movers.rotate_left(self.random.index(2));
        let mut asked = movers.into_iter();
        let asked = asked.find_map(|mover| self.engine.migrations().wanted(mover));
        let asked = asked.map(|asked| Migration {
            pages: asked.pages.min(part),
            ..asked
        });
        // Now and then a page moves although the engine did not ask. The engine cannot tell, and
        // may move it back: not while all work is to end.
        let from = self.random.index(self.tiers.len());
        let there = self.removed != Some(TierId(from as u8 + 1));
        let any = from + 1 < self.tiers.len() && !self.calm && self.random.chance(1, 20) && there;
        let page = |at: usize| self.setup.tiers[at].page;
        let any = any && page(from) == page(from + 1);
        let any = any.then(|| Migration {
            from: TierId(from as u8),
            to: TierId(from as u8 + 1),
            pages: part,
        });
        asked.or(any)
    }

    fn publish_demoted(&mut self, item: DemoteItem, to: TierId, slot: Slot) {
        let before = self.engine.books().stats().demoted;
        let from = &self.setup.tiers[usize::from(item.tier.0)];
        let (facts, reads) = (from.facts, from.reads);
        let drains = self.drain.is_some_and(|(tier, _)| tier == item.tier);
        let shared = self.engine.books().is_shared_slot(item.tier, item.slot);
        self.engine.migrations().demoted(item, to, slot);
        let moves = self
            .demotion
            .as_mut()
            .map(|demotion| &mut demotion.for_evictor);
        if let Some(Some(moved)) = moves {
            *moved += 1;
        }
        if to == item.tier {
            return self.saw("gather: published");
        }
        self.saw(if self.engine.books().stats().demoted == before {
            "demotion: too late"
        } else if drains && shared {
            "drain: out of a shared slot"
        } else if drains {
            "drain: moved"
        } else if facts.updates_copies {
            "demotion: done, out of nvm"
        } else if facts.remote {
            "demotion: done, out of a cluster"
        } else if reads {
            "demotion: done, out of a device"
        } else {
            "demotion: done"
        });
        self.log(|| format!("demoted {item:?} to {to:?} {slot:?}"));
    }

    /// Loads a copy, or says where it is to be read. Its checksum goes along with it.
    ///
    /// * `again`: the first copy that was read did not verify.
    fn load_to_demote(&mut self, item: DemoteItem, again: bool) {
        let from = &self.tiers[usize::from(item.tier.0)];
        let sum = from.checksum(item.slot, item.stamp);
        let mut page = vec![0; BASE_PAGE_BYTES];
        let loaded = from.load(item.slot, item.stamp, &mut page);
        let stalled = self.stall() / 10;
        match (sum, loaded) {
            (Some(sum), Ok(Loaded::Done)) => {
                let demotion = self.demotion.as_mut().expect("going on");
                demotion.loaded = Some((item, page.into(), sum));
                demotion.stalled = stalled;
            }
            (Some(checksum), Ok(read @ (Loaded::Read { .. } | Loaded::Fetch))) => {
                let offset = match read {
                    Loaded::Read { offset, .. } => offset,
                    _ => item.slot.0 * BASE_PAGE_BYTES as u64,
                };
                let demotion = self.demotion.as_mut().expect("going on");
                demotion.reading = Some(DeviceRead {
                    item,
                    offset,
                    checksum,
                    again,
                });
                demotion.stalled = stalled;
            }
            (None, _) | (_, Err(_)) => {
                self.engine.migrations().failed(item);
                self.saw("demotion: copy gone or damaged");
            }
        }
    }

    /// A read for a demotion has ended. Bytes that do not verify are read once more, and then left
    /// where they are: a later read may be right.
    fn read_to_demote(&mut self, read: DeviceRead) {
        let DeviceRead { item, .. } = read;
        let from = &self.tiers[usize::from(item.tier.0)];
        let mut page = vec![0; BASE_PAGE_BYTES];
        let done = from.read(read.offset, &mut page).is_ok() && from.unpack(item.slot, &mut page);
        let found = PageKey::KNOWN.checksum(&page, item.stamp);
        let hash_again = self.sabotaged(Sabotage::HashAgain);
        if done && (found == read.checksum || hash_again) {
            let demotion = self.demotion.as_mut().expect("going on");
            demotion.loaded = Some((item, page.into(), found));
            if read.again {
                self.saw("demotion: right at the second try");
            }
        } else if !read.again {
            self.load_to_demote(item, true);
        } else {
            self.engine.migrations().failed(item);
            self.saw("demotion: read twice in vain");
        }
    }
}
