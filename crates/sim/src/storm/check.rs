//! The checks: slots against references, memory against the engine, and that every stopped thread goes on.

use std::collections::BTreeMap;

use undercroft_base::{Entry, Flags, PageState, Slot, Tier, TierId, VirtPage};
use undercroft_engine::Outcome;

use super::world::{Doing, World};

/// Steps in which a calm world must have finished everything.
const CALM_STEPS_MAX: usize = 200_000;

impl World {
    fn entries(&self) -> Vec<(usize, VirtPage, Entry)> {
        let mut all = Vec::new();
        for (at, proc) in self.procs.iter().enumerate().filter(|(_, p)| p.alive) {
            for (page, _) in self.memory.pages(proc.mm) {
                let entry = self.engine.entry(proc.space, page);
                if entry != Entry::UNTOUCHED {
                    all.push((at, page, entry));
                }
            }
        }
        all
    }

    /// Every slot a tier holds is known to someone, and every slot someone knows is held. While an event waits the
    /// engine still knows pages by their old addresses, so this waits too.
    pub fn check_slots(&mut self) {
        self.engine.audit();
        if self.procs.iter().any(|proc| !proc.events.is_empty()) {
            return;
        }
        self.engine.take_freed(&mut self.freed);
        let mut claims: BTreeMap<(TierId, Slot), Vec<String>> = BTreeMap::new();
        let mut claim = |tier: TierId, slot: Slot, who: String| {
            if tier != TierId::FILL {
                claims.entry((tier, slot)).or_default().push(who);
            }
        };
        for (proc, page, entry) in self.entries() {
            if entry.state == PageState::Stored || entry.flags.has(Flags::RETAINED) {
                claim(entry.tier, entry.slot, format!("p{proc} {}", page.0));
            }
        }
        for item in self.flights.iter().flatten().flat_map(|f| &f.plan.items) {
            claim(item.tier, item.slot, format!("plan {}", item.page.0));
        }
        for held in self.batch.iter().flat_map(|batch| &batch.held) {
            if let Some(Outcome::Stored(tier, slot)) = held.outcome {
                claim(tier, slot, format!("batch {}", held.at));
            }
        }
        if let Some((item, tier, slot)) = self.demotion.as_ref().and_then(|d| d.stored) {
            claim(tier, slot, format!("demotion {item:?}"));
        }
        for (tier, slot) in &self.freed {
            let who = claims.insert((*tier, *slot), vec!["freed".to_owned()]);
            assert_eq!(who, None, "{tier:?} {slot:?} is freed while referred to");
        }
        for (at, tier) in self.tiers.iter().enumerate() {
            let tier_id = TierId(at as u8);
            let known: Vec<Slot> = claims
                .keys()
                .filter(|(of, _)| *of == tier_id)
                .map(|(_, slot)| *slot)
                .collect();
            let live = tier.live();
            let leaked: Vec<_> = live.iter().filter(|s| !known.contains(s)).collect();
            assert!(leaked.is_empty(), "{tier_id:?} leaked {leaked:?}");
            for slot in known {
                assert!(
                    live.binary_search(&slot).is_ok(),
                    "{tier_id:?} {slot:?} is gone but {:?} refer to it",
                    claims[&(tier_id, slot)]
                );
            }
        }
    }

    /// Failures stop, no thread starts anything new: everything in progress must end, every stopped thread go on.
    pub fn calm_down(&mut self) {
        self.set_failures(false);
        self.calm = true;
        let (mut idle, mut fruitless, mut done) = (0, 0, 0);
        for step in 0.. {
            assert!(step < CALM_STEPS_MAX, "no end in {step} calm steps");
            let mut busy = self.event_step() | self.zap_step();
            for _ in 0..self.flights.len() {
                busy |= self.fault_step();
            }
            if self.batch.is_some() || self.engine.reclaim_unfinished() {
                busy |= self.evict_step();
            }
            if self.demotion.is_some() || self.engine.room() < 1 {
                busy |= self.demotion_step();
            }
            self.give_back_freed();
            busy |= self.take_waiters();
            idle = if busy { 0 } else { idle + 1 };
            let stats = self.engine.stats();
            let now = stats.pages_swapped_out + stats.swap_in + stats.first_touch + stats.demoted;
            fruitless = if now == done { fruitless + 1 } else { 0 };
            done = now;
            let full = fruitless > 400 && self.batch.is_none() && self.demotion.is_none();
            if idle < 50 && !full {
                continue;
            }
            let stopped = self.threads.iter().any(|t| t.doing != Doing::Running);
            if !stopped {
                break;
            }
            if let Some(page) = self.could_leave() {
                panic!(
                    "threads wait for room, but nobody evicts {page:?}: room {}, resident {:?}, used {}, limit {}, full {full}",
                    self.engine.room(),
                    self.engine.resident(),
                    self.engine.dram_used(),
                    self.engine.limit(),
                );
            }
            // Nothing can leave: all is pinned, locked, or below is full.
            self.engine
                .set_over_limit(undercroft_base::PageCount(1 << 40));
            self.over_limit = true;
            fruitless = 0;
            assert!(
                self.take_waiters() || full,
                "a thread is stopped and nobody will wake it: {:?}",
                self.stopped()
            );
            idle = 0;
        }
        assert!(self.batch.is_none() && self.demotion.is_none());
        self.engine.set_over_limit(undercroft_base::PageCount(0));
        self.over_limit = false;
        self.check_memory();
        self.check_slots();
        self.calm = false;
        self.set_failures(true);
    }

    /// A page that could be evicted, when the last tier has room.
    fn could_leave(&self) -> Option<(usize, VirtPage, Entry)> {
        let last = self.tiers.last().expect("a tier");
        if last.usage().logical.0 + super::world::PAGE > last.info().capacity.0 {
            return None;
        }
        self.entries().into_iter().find(|(proc, page, entry)| {
            let mm = self.procs[*proc].mm;
            let bound = Flags::LOCKED.with(Flags::INHERITED);
            entry.state == PageState::Resident
                && entry.flags.0 & bound.0 == 0
                && self.memory.is_present(mm, *page)
                && !self.memory.is_pinned(mm, *page)
        })
    }

    fn stopped(&self) -> Vec<(usize, Doing, Entry)> {
        let of = |thread: &super::world::Thread| match thread.doing {
            Doing::Running => None,
            Doing::Stopped { page, .. } => {
                let space = self.procs[thread.proc].space;
                Some((thread.proc, thread.doing, self.engine.entry(space, page)))
            }
        };
        self.threads.iter().filter_map(of).collect()
    }

    /// With nothing in flight, the engine's states are those of the kernel.
    fn check_memory(&mut self) {
        for at in 0..self.procs.len() {
            let proc = &self.procs[at];
            if !proc.alive {
                continue;
            }
            for (page, advice) in self.memory.pages(proc.mm) {
                let entry = self.engine.entry(proc.space, page);
                let present = self.memory.is_present(proc.mm, page);
                match entry.state {
                    PageState::Untouched => assert!(
                        !present || !advice.registered || proc.unmanaged_ok,
                        "p{at} {} is present and not counted",
                        page.0
                    ),
                    PageState::Resident => assert!(advice.registered),
                    PageState::Stored | PageState::Lost => {
                        assert!(
                            !present,
                            "p{at} {} is {:?} and present",
                            page.0, entry.state
                        );
                    }
                    PageState::Evicting | PageState::Loading => {
                        panic!(
                            "p{at} {} is {:?} with nothing in flight",
                            page.0, entry.state
                        )
                    }
                }
            }
        }
    }

    /// Every process exits: nothing may be left anywhere.
    pub fn end(&mut self) {
        self.calm_down();
        self.set_failures(false);
        for proc in 0..self.procs.len() {
            if self.procs[proc].alive {
                self.exit(proc);
            }
        }
        self.calm_down();
        self.set_failures(false);
        self.give_back_freed();
        for tier in &self.tiers {
            assert_eq!(tier.live(), [], "slots are left");
        }
        assert_eq!(self.engine.resident().0, 0);
        assert_eq!(self.memory.frames_used(), 0);
        self.engine.audit();
    }
}
