//! The checks: slots against references, memory against the engine, and that every stopped thread
//! continues.

use std::collections::BTreeMap;

use undercroft_base::{
    Entry, Flags, PageCount, PageSize, PageState, Slot, SpaceId, Tier, TierId, VirtPage,
};
use undercroft_engine::Outcome;
use undercroft_model::oracle::Expect;
use undercroft_model::{Content, Mm};

use super::evictor::step_time;
use super::world::{Doing, Proc, World};

/// Number of steps in which a calm world must have finished everything.
const CALM_STEPS_MAX: usize = 200_000;

/// Calm steps in a row in which no page comes or goes, before reclaim counts as stuck.
const FRUITLESS_MAX: u32 = 2000;

impl World {
    pub(super) fn entries(&self) -> Vec<(usize, VirtPage, Entry)> {
        let mut all = Vec::new();
        for (at, proc) in self.procs.iter().enumerate().filter(|(_, p)| p.alive) {
            for (page, _) in self.memory.pages(proc.mm) {
                let entry = self.engine.books().entry(proc.space, page);
                if entry != Entry::UNTOUCHED {
                    all.push((at, page, entry));
                }
            }
        }
        all
    }

    /// Pages that the books have in memory. Call it while no event waits.
    pub(super) fn in_memory(&self) -> impl Iterator<Item = (SpaceId, VirtPage, Entry)> {
        self.entries()
            .into_iter()
            .map(|(proc, page, entry)| (self.procs[proc].space, page, entry))
            .filter(|(_, _, entry)| entry.state == PageState::Resident)
    }

    /// Checks that the listener knows what is in memory. It may miss inherited pages: the event of
    /// a page that stays does not say which children share it.
    pub(super) fn check_heard(&self) {
        let heard = self.heard.pages();
        for (space, page, entry) in self.in_memory() {
            let told = heard.contains(&(space, page));
            let inherited = entry.flags.has(Flags::INHERITED);
            assert!(
                told || inherited,
                "nothing told that {space:?} {page:?} came"
            );
        }
        for (space, page) in heard.iter() {
            let state = self.engine.books().entry(*space, *page).state;
            assert_eq!(
                state,
                PageState::Resident,
                "nothing told that {space:?} {page:?} left"
            );
        }
    }

    /// Every slot that a tier holds is known, and every known slot is held. While an event waits,
    /// the engine knows pages by their old addresses, so this check waits, too.
    pub fn check_slots(&mut self) {
        if self.is_down() {
            return;
        }
        self.engine.books().audit();
        let flights = self.flights.iter().flatten();
        assert_eq!(
            self.engine.books().unfinished_loads(),
            flights.map(|flight| flight.plan.items.len()).sum::<usize>(),
            "each item of a plan is loading or upset"
        );
        if self.procs.iter().any(|proc| !proc.events.is_empty()) {
            return;
        }
        self.check_heard();
        self.engine.take_freed(&mut self.freed);
        let mut claims: BTreeMap<(TierId, Slot), Vec<String>> = BTreeMap::new();
        let mut claim = |tier: TierId, slot: Slot, who: String| {
            if tier != TierId::FILL {
                claims.entry((tier, slot)).or_default().push(who);
            }
        };
        for (proc, page, entry) in self.entries() {
            if entry.state == PageState::Stored || entry.flags.has(Flags::RETAINED) {
                let (tier, size) = (entry.tier, self.procs[proc].size);
                let fits =
                    tier == TierId::FILL || self.setup.tiers[usize::from(tier.0)].page == size;
                assert!(fits, "p{proc} {}: a page of {size} is in {tier:?}", page.0);
                claim(tier, entry.slot, format!("p{proc} {}", page.0));
            }
        }
        if self.setup.sabotage == Some(super::setup::Sabotage::FreeEarly) {
            return; // the wrong bytes must show this bug, too
        }
        for item in self.flights.iter().flatten().flat_map(|f| &f.plan.items) {
            claim(item.tier, item.slot, format!("plan {}", item.page.0));
        }
        for held in self.evictions().flat_map(|batch| &batch.held) {
            if let Some(Outcome::Stored(tier, slot)) = held.outcome {
                claim(tier, slot, format!("batch {}", held.at.place()));
            }
        }
        let demotions = self.demotion.iter().chain(&self.second_demotion);
        for (item, tier, slot) in demotions.filter_map(|demotion| demotion.stored) {
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

    /// Checks the pages that this step touched: those in memory have the oracle's bytes.
    pub(super) fn check_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        for (mm, page) in touched.drain(..) {
            self.check_present(mm, page);
        }
        self.touched = touched;
    }

    fn check_present(&self, mm: Mm, page: VirtPage) {
        if let Some(found) = self.memory.peek(mm, page) {
            let expected = self.oracle.expect(mm, page);
            assert_eq!(
                Expect::Reads(found),
                expected,
                "WRONG BYTES in memory: {mm:?} page {}",
                page.0
            );
        }
    }

    /// Checks the bytes of every page, wherever they are: in memory, in a tier, in the holding
    /// area, or nowhere because the page reads as zeros. While an event waits, the books have the
    /// old addresses, so only memory is checked.
    pub(super) fn check_bytes(&mut self) {
        let mut looked_at = 0;
        for proc in self.procs.iter().filter(|proc| proc.alive) {
            let settled =
                proc.events.is_empty() && proc.intake.is_none() && self.down_for.is_none();
            for (page, _) in self.memory.pages(proc.mm) {
                self.check_present(proc.mm, page);
                looked_at += 1;
                if settled && self.memory.is_absent(proc.mm, page) {
                    self.check_absent(proc, page);
                }
            }
        }
        if looked_at > 0 {
            self.saw("checked every byte");
        }
    }

    /// The bytes that the copy of a page has which is not in memory.
    pub(super) fn copy_of(&self, entry: &Entry) -> Option<Content> {
        match entry.tier {
            TierId::FILL => Some(Content::fill(entry.slot.0 as u32)),
            tier => self.tiers[tier.0 as usize].content(entry.slot, entry.stamp),
        }
    }

    fn check_absent(&self, proc: &Proc, page: VirtPage) {
        let (space, mm) = (proc.space, proc.mm);
        let entry = self.engine.books().entry(space, page);
        if proc.short && entry.state == PageState::Untouched {
            return; // a touch is refused: it reads as nothing
        }
        let found = match (entry.state, entry.tier) {
            // Resident in the books, but absent: dropped without an event.
            (PageState::Untouched | PageState::Resident, _) => Some(Content::ZERO),
            (PageState::Stored | PageState::Loading, _) => self.copy_of(&entry),
            (PageState::Evicting, _) => None, // checked when it is published
            (PageState::Lost, _) => {
                let expected = self.oracle.expect(mm, page);
                assert_eq!(expected, Expect::Error, "{space:?} {} is lost", page.0);
                None
            }
        };
        if let Some(found) = found {
            assert_eq!(
                Expect::Reads(found),
                self.oracle.expect(mm, page),
                "WRONG BYTES to come: {space:?} page {} is {entry:?}",
                page.0
            );
        }
    }

    /// Failures stop, and threads start nothing new. All work in progress must end, and every
    /// stopped thread must continue.
    pub fn calm_down(&mut self) {
        self.set_failures(false);
        self.calm = true;
        self.end_drain();
        if self.is_down() {
            self.take_over();
        }
        self.find_agents();
        let (mut idle, mut fruitless, mut done) = (0, 0, 0);
        for step in 0.. {
            assert!(
                step < CALM_STEPS_MAX,
                "no end in {step} calm steps: {idle} idle, {fruitless} fruitless, {} evictions, \
                 demoting: {}, full: {}, stopped: {:?}",
                self.evictions().count(),
                self.demotes(),
                self.engine.books().is_full(),
                self.stopped()
            );
            let busy = self.calm_step();
            idle = if busy { 0 } else { idle + 1 };
            let stats = self.engine.books().stats();
            let now = stats.pages_swapped_out + stats.swap_in + stats.first_touch + stats.demoted;
            fruitless = if now == done { fruitless + 1 } else { 0 };
            done = now;
            let full =
                fruitless > FRUITLESS_MAX && self.evictions().next().is_none() && !self.demotes();
            if idle < 50 && !full {
                continue;
            }
            assert!(
                self.stopped().is_empty(),
                "a thread is stopped and nobody will wake it: {:?}",
                self.stopped()
            );
            // All pages are pinned or locked, or the tiers are full.
            if full && self.engine.books().is_full() {
                self.check_none_could_leave();
            }
            break;
        }
        assert!(self.evictions().next().is_none() && !self.demotes());
        self.check_memory();
        self.check_slots();
        self.check_bytes();
        self.calm = false;
        self.set_failures(true);
    }

    /// Whether a demotion is under way.
    pub(super) fn demotes(&self) -> bool {
        self.demotion.is_some() || self.second_demotion.is_some()
    }

    /// A step of each part of the manager. False if nothing was to be done.
    fn calm_step(&mut self) -> bool {
        let mut busy = self.event_step() | self.zap_step();
        for _ in 0..self.flights.len() {
            busy |= self.fault_step();
        }
        if !busy {
            self.let_time_pass();
        }
        self.clock.0 += step_time(&self.setup).0;
        busy |= self.evict_step();
        if self.demotes() || self.engine.books().is_full() {
            busy |= self.demotion_step();
        }
        self.give_back_freed();
        while self.send_a_wake() {}
        busy
    }

    /// Checks, while there is no room and no page leaves, that none could.
    fn check_none_could_leave(&self) {
        let Some(page) = self.could_leave() else {
            return;
        };
        let books = self.engine.books();
        panic!(
            "no page leaves, though {page:?} could; room {}, resident {:?}, used {}, limit {}",
            books.room(),
            books.resident(),
            books.dram_used(),
            books.limit(),
        );
    }

    /// A fault was admitted: there is room below the limit, or as much is allowed or lent above it.
    /// The limit is raised for no more than pages that cannot leave.
    pub(super) fn check_admission(&self) {
        let books = self.engine.books();
        let (used, limit, raised) = (books.dram_used(), books.limit(), books.raised());
        let over = books.over_limit();
        assert!(
            used.0 <= limit.0 + raised.0 + over.bytes().0,
            "a fault broke the limit: {used} of {limit}, raised by {raised}, {over:?} over"
        );
        // While an event waits, locked pages have other addresses in the books.
        if raised.0 == 0 || self.procs.iter().any(|proc| !proc.events.is_empty()) {
            return;
        }
        let locked = |(_, _, entry): &(usize, VirtPage, Entry)| entry.flags.has(Flags::LOCKED);
        let locked = self.entries().iter().filter(|page| locked(page)).count() as u64;
        let refused = self.seen.get("not taken: busy").copied().unwrap_or(0) / 2;
        let immovable = books.immovable();
        let page = if self.setup.large {
            PageSize::Large
        } else {
            PageSize::Base
        };
        let most = PageCount((locked + refused) * page.base_pages());
        assert!(
            raised <= immovable && immovable <= most.bytes(),
            "the limit is raised by {raised} for {immovable}: {locked} locked, {refused} refused twice"
        );
    }

    /// Every process exits.
    pub(super) fn exit_all(&mut self) {
        for proc in 0..self.procs.len() {
            if self.procs[proc].alive {
                self.exit(proc);
            }
        }
    }

    /// A page that could be evicted, if the last tier of its size has room.
    fn could_leave(&self) -> Option<(usize, VirtPage, Entry)> {
        let takes = |page: PageSize| {
            let mut tiers = self.tiers.iter().rev();
            let last = tiers.find(|tier| tier.info().page == page);
            last.is_some_and(|last| {
                let used = last.usage().logical.0 + page.bytes() as u64;
                !last.is_gone() && used <= last.capacity().0
            })
        };
        let takes = PageSize::ALL.map(takes);
        self.entries().into_iter().find(|(proc, page, entry)| {
            let mm = self.procs[*proc].mm;
            let bound = Flags::LOCKED.with(Flags::INHERITED);
            entry.state == PageState::Resident
                && entry.flags.0 & bound.0 == 0
                && takes[usize::from(self.procs[*proc].size == PageSize::Large)]
                && self.memory.is_present(mm, *page)
                && !self.memory.is_pinned(mm, *page)
        })
    }

    fn stopped(&self) -> Vec<(usize, Doing, Entry)> {
        let of = |thread: &super::world::Thread| match thread.doing {
            Doing::Running => None,
            Doing::Stopped { page, .. } => {
                let space = self.procs[thread.proc].space;
                Some((
                    thread.proc,
                    thread.doing,
                    self.engine.books().entry(space, page),
                ))
            }
        };
        self.threads.iter().filter_map(of).collect()
    }

    /// Checks, with nothing in flight, that the engine's states are those of the kernel.
    fn check_memory(&mut self) {
        for at in 0..self.procs.len() {
            let proc = &self.procs[at];
            if !proc.alive {
                continue;
            }
            for (page, advice) in self.memory.pages(proc.mm) {
                let entry = self.engine.books().entry(proc.space, page);
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

    /// Every process exits. Nothing may be left anywhere.
    pub fn end(&mut self) {
        self.ledger.disarm();
        self.calm_down();
        self.set_failures(false);
        self.exit_all();
        self.calm_down();
        self.set_failures(false);
        self.give_back_freed();
        for tier in &self.tiers {
            assert_eq!(tier.live(), [], "slots are left");
        }
        assert_eq!(self.engine.books().resident().0, 0);
        assert_eq!(self.memory.frames_used(), 0);
        self.engine.books().audit();
    }
}
