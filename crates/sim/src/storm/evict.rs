//! The evictor and the demoter: select, take out, store, publish, with a step between any two.

use undercroft_base::{
    PAGE_BYTES, Slot, Stamp, Store, StoreError, Tier, TierId, TierKind, fill_word, page_checksum,
};
use undercroft_engine::{DemoteItem, EvictItem, Outcome, Taken};
use undercroft_model::{Content, MoveRefusal};

use super::world::World;

/// A page that is with the evictor.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub at: usize,
    pub content: Content,
    pub outcome: Option<Outcome>,
}

#[derive(Debug)]
pub struct Batch {
    pub items: Vec<EvictItem>,
    /// The next item to take out.
    pub next: usize,
    pub cancelled: bool,
    pub held: Vec<Held>,
    pub stalled: u64,
}

#[derive(Debug)]
pub struct Demotion {
    pub items: Vec<DemoteItem>,
    pub loaded: Option<(DemoteItem, Box<[u8]>)>,
    pub stored: Option<(DemoteItem, TierId, Slot)>,
    pub stalled: u64,
}

impl World {
    /// Lets the evictor do one thing; false when there was nothing to do.
    pub fn evict_step(&mut self) -> bool {
        let calm = self.calm;
        let Some(batch) = &mut self.batch else {
            let wanted = self.engine.reclaim_unfinished() || self.random.chance(1, 100);
            return wanted && self.start_batch();
        };
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
            self.batch = None;
            return true;
        }
        let at = self.random.index(batch.held.len());
        match batch.held[at].outcome {
            None => self.store_held(at),
            Some(outcome) => return self.publish_held(at, outcome),
        }
        true
    }

    fn start_batch(&mut self) -> bool {
        let want = 1 + self.random.index(64);
        self.select(want)
    }

    pub fn select(&mut self, want: usize) -> bool {
        let mut items = Vec::new();
        let any = self.engine.select(want, &mut items);
        for item in &items {
            assert!(
                self.proc_of(item.space).is_some(),
                "{item:?} is of no live space"
            );
            assert!(
                !self
                    .engine
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
        let stalled = self.stall();
        self.batch = any.then_some(Batch {
            stalled,
            items,
            next: 0,
            cancelled: false,
            held: Vec::new(),
        });
        any
    }

    pub fn take_next(&mut self) {
        let batch = self.batch.as_ref().expect("a batch");
        let at = batch.next;
        let (Some(item), cancelled) = (batch.items.get(at).copied(), batch.cancelled) else {
            return;
        };
        let mut wake = Vec::new();
        let mut vanished = false;
        let taken = match (cancelled, self.proc_of(item.space)) {
            (true, _) => Err(Taken::NotTried),
            (false, None) => panic!("{item:?}: its space went without a cancel"),
            (false, Some(proc)) => {
                let mm = self.procs[proc].mm;
                let mut moved = self.memory.move_out(mm, item.page);
                if moved == Err(MoveRefusal::Busy) && (self.calm || self.random.chance(3, 4)) {
                    self.memory.break_sharing(mm, item.page);
                    moved = self.memory.move_out(mm, item.page);
                }
                match moved {
                    Ok(content) => Ok(content),
                    Err(MoveRefusal::Busy) => Err(Taken::Busy),
                    Err(MoveRefusal::LayoutChanging) => Err(Taken::NotTried),
                    Err(MoveRefusal::Missing) => {
                        vanished = true;
                        Err(Taken::NotTried)
                    }
                    Err(MoveRefusal::NotMapped) => panic!("{item:?} is not mapped"),
                }
            }
        };
        self.log(|| format!("take {at} {} -> {taken:?}", item.page.0));
        let batch = self.batch.as_mut().expect("a batch");
        batch.next += 1;
        match taken {
            Ok(content) => {
                batch.held.push(Held {
                    at,
                    content,
                    outcome: None,
                });
                self.engine.settle(at, Taken::Moved, &mut wake);
            }
            Err(taken) => {
                let mut places = Vec::new();
                self.engine.places_of(at, &mut places);
                if places.len() > 1 {
                    self.saw("not taken, shared by a fork");
                }
                self.engine.settle(at, taken, &mut wake);
                self.saw(match taken {
                    Taken::Busy => "not taken: busy",
                    _ => "not taken: cancelled",
                });
            }
        }
        if vanished {
            self.engine.vanished(item.space, item.page);
        }
        self.wake_all(wake);
    }

    pub fn store_held(&mut self, held_at: usize) {
        let batch = self.batch.as_ref().expect("a batch");
        let held = batch.held[held_at];
        let item = batch.items[held.at];
        let outcome = match self.engine.alive(held.at) {
            false if self.random.chance(1, 2) => Outcome::PutBack,
            _ if self.engine.wanted(held.at) => Outcome::PutBack,
            _ => self.place(item, held.content),
        };
        self.log(|| {
            format!(
                "store {} {} {:?} -> {outcome:?}",
                held.at, item.page.0, held.content
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
            if below == Some(page_checksum(&bytes, stamp)) {
                return Outcome::Clean;
            }
        }
        match (0..self.tiers.len()).find_map(|at| self.store_in(at, &bytes, item.stamp)) {
            Some((tier, slot)) => Outcome::Stored(tier, slot),
            None => Outcome::PutBack,
        }
    }

    fn store_in(&mut self, at: usize, bytes: &[u8], stamp: Stamp) -> Option<(TierId, Slot)> {
        let mut batch = [Store {
            page: bytes,
            stamp,
            checksum: page_checksum(bytes, stamp),
            result: Err(StoreError::Full),
        }];
        self.tiers[at].store(&mut batch);
        let slot = batch[0].result.ok()?;
        self.update_pool();
        Some((TierId(at as u8), slot))
    }

    pub fn publish_held(&mut self, held_at: usize, outcome: Outcome) -> bool {
        let batch = self.batch.as_ref().expect("a batch");
        let held = batch.held[held_at];
        let mut outcome = outcome;
        if let Outcome::Stored(tier, slot) = outcome
            && self.engine.wanted(held.at)
            && !self.calm
            && self.random.chance(1, 3)
        {
            // Stored, but a thread came to want it: putting it back is allowed too.
            self.tiers[tier.0 as usize].free(&[slot]);
            self.update_pool();
            outcome = Outcome::PutBack;
        }
        let mut woken = Vec::new();
        if outcome == Outcome::PutBack {
            let mut places = Vec::new();
            self.engine.places_of(held.at, &mut places);
            let at: Vec<_> = places
                .iter()
                .map(|(space, page)| (self.proc_of(*space).expect("a live space"), *page))
                .collect();
            let waits = |(proc, _): &(usize, _)| self.memory.is_changing(self.procs[*proc].mm);
            if at.iter().any(waits) {
                self.batch.as_mut().expect("a batch").held[held_at].outcome = Some(outcome);
                return false; // the event is read first
            }
            for (proc, page) in &at {
                let mm = self.procs[*proc].mm;
                let done = self.memory.install(mm, *page, held.content);
                assert_eq!(done, Ok(()), "putting back p{proc} {page:?}");
            }
            woken = places;
        }
        if !self.engine.alive(held.at) {
            self.saw("published: dropped");
        }
        let mut places = Vec::new();
        self.engine.places_of(held.at, &mut places);
        let item = self.batch.as_ref().expect("a batch").items[held.at];
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
        });
        self.engine.publish(held.at, outcome, &mut woken);
        self.log(|| format!("publish {} {outcome:?}", held.at));
        self.batch.as_mut().expect("a batch").held.remove(held_at);
        self.wake_all(woken);
        true
    }

    /// Starts a demotion of up to `want` pages; false when there is none.
    pub fn select_demotions(&mut self, from: usize, want: usize) -> bool {
        let mut items = Vec::new();
        self.engine
            .select_demotions(TierId(from as u8), want, &mut items);
        if items.is_empty() {
            return false;
        }
        self.log(|| format!("demote {items:?}"));
        let stalled = self.stall();
        self.demotion = Some(Demotion {
            stalled,
            items,
            loaded: None,
            stored: None,
        });
        true
    }

    /// Lets the demoter do one thing; false when there was nothing to do.
    pub fn demotion_step(&mut self) -> bool {
        let calm = self.calm;
        let Some(demotion) = &mut self.demotion else {
            let from = self.random.index(self.tiers.len());
            let want = 1 + self.random.index(12);
            let usage = self.tiers[from].usage().logical;
            let full = usage.0 * 2 > self.tiers[from].info().capacity.0;
            let squeezed = self.engine.room() < 2 && self.tiers[from].info().kind == TierKind::Ram;
            return from + 1 < self.tiers.len()
                && (full || squeezed || self.random.chance(1, 20))
                && self.select_demotions(from, want);
        };
        if demotion.stalled > 0 && !calm {
            demotion.stalled -= 1;
            return true;
        }
        if let Some((item, to, slot)) = demotion.stored.take() {
            let before = self.engine.stats().demoted;
            self.engine.demoted(item, to, slot);
            self.saw(match self.engine.stats().demoted == before {
                true => "demotion: too late",
                false => "demotion: done",
            });
            self.log(|| format!("demoted {item:?} to {to:?} {slot:?}"));
        } else if let Some((item, bytes)) = demotion.loaded.take() {
            let to = item.tier.0 as usize + 1;
            match self.store_in(to, &bytes, item.stamp) {
                Some((tier, slot)) => {
                    self.demotion.as_mut().expect("going on").stored = Some((item, tier, slot));
                }
                None => self.engine.demotion_failed(item),
            }
        } else if let Some(item) = demotion.items.pop() {
            let mut page = vec![0; PAGE_BYTES];
            match self.tiers[item.tier.0 as usize].load(item.slot, item.stamp, &mut page) {
                Ok(_) => {
                    demotion.loaded = Some((item, page.into()));
                    let stalled = self.stall() / 10;
                    self.demotion.as_mut().expect("going on").stalled = stalled;
                }
                Err(_) => {
                    self.engine.demotion_failed(item);
                    self.saw("demotion: copy gone or damaged");
                }
            }
        } else {
            self.demotion = None;
        }
        true
    }
}
