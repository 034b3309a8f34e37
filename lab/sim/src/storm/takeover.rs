//! A manager dies between any two words it writes, and a successor takes over from its ledger.
//!
//! All that it had in progress is gone: plans, the batch, slots to free, faults that it had read,
//! wake-ups that it had not sent. The kernel's side, the tiers, the ledger, the last event read and
//! the holding areas are left, and the agents with their last command.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use undercroft_base::{PageState, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{BatchIndex, Engine, Found, HeldPage, Here, Recovered};
use undercroft_model::{Content, Memory};

use super::evictor::Evictor;
use super::heard::Heard;
use super::ledger::Killed;
use super::setup::Sabotage;
use super::work::{Eviction, TakenOut};
use super::world::{Doing, LayoutEvent, Proc, World, config_of, policies};

/// Most words a manager still writes once its time has come.
const LAST_WORDS: u64 = 60;

/// Longest time without a manager, in steps.
const DOWN_MAX: u64 = 80;

impl World {
    /// True while the manager is dead.
    pub fn is_down(&self) -> bool {
        self.down_for.is_some()
    }

    /// Now and then kills the manager: at once, or some words later.
    pub(super) fn maybe_kill(&mut self) {
        if self.is_down() || self.setup.kills == 0 {
            return;
        }
        if self.random.chance(self.setup.kills, 10_000) {
            match self.random.below(LAST_WORDS) {
                0 => self.killed(),
                words => self.ledger.arm(words),
            }
        }
    }

    /// Does something that the manager may not survive.
    pub(super) fn survive(&mut self, act: impl FnOnce(&mut World)) {
        let done = catch_unwind(AssertUnwindSafe(|| act(self)));
        match done {
            Ok(()) => {}
            Err(payload) if payload.is::<Killed>() => {
                self.saw("manager killed between two words");
                self.killed();
            }
            Err(payload) => resume_unwind(payload),
        }
    }

    /// The manager is dead.
    pub fn killed(&mut self) {
        self.ledger.disarm();
        self.log(|| "the manager is killed".to_owned());
        self.saw("manager killed");
        for (flag, what) in [
            (self.flights.iter().any(Option::is_some), "killed: loading"),
            (self.batch.is_some(), "killed: evicting"),
            (!self.others.is_empty(), "killed: several batches"),
            (!self.aside.is_empty(), "killed: a group aside"),
            (!self.holding.is_empty(), "killed: pages in hand"),
            (self.demotes(), "killed: demoting"),
            (
                self.procs.iter().any(|p| p.intake.is_some()),
                "killed: inside an event",
            ),
        ] {
            if flag {
                self.saw(what);
            }
        }
        let batch = self.batch.take().into_iter();
        let batches = batch.chain(std::mem::take(&mut self.others));
        for batch in batches.chain(std::mem::take(&mut self.aside)) {
            if batch.cancelled {
                continue;
            }
            // The agent of each batch has a command, and carries it out.
            let space = batch.items.get(batch.next).map(|item| item.space);
            for at in batch.next..batch.items.len() {
                let item = batch.items[at];
                if Some(item.space) == space {
                    self.commands
                        .push((item.space, item.place.into(), item.page));
                }
            }
        }
        self.commands.reverse();
        self.flights.iter_mut().for_each(|flight| *flight = None);
        self.demotion = None;
        self.second_demotion = None;
        self.drain = None;
        self.removed = None;
        self.freed.clear();
        self.wakes.clear();
        self.evictor = Evictor::new(self.setup.seed);
        self.calm = false;
        self.down_for = Some(self.random.below(DOWN_MAX));
        // Pages that were installed but not finished no longer belong to a plan.
        self.procs.iter_mut().for_each(|p| p.unmanaged_ok = true);
    }

    /// The client, its kernel and its agents go on.
    pub(super) fn step_without_manager(&mut self, left: u64) {
        if left == 0 {
            return self.take_over();
        }
        self.down_for = Some(left - 1);
        match self.random.below(100) {
            0..70 => _ = self.program_step(),
            70..80 => self.carry_out_a_command(),
            80..90 => _ = self.zap_step(),
            90..92 => self.pin_or_swap_some(),
            92 => self.leader_dies_unseen(),
            _ => {
                if self.random.chance(self.setup.layout, 10) {
                    self.layout_step();
                }
            }
        }
    }

    fn carry_out_a_command(&mut self) {
        let Some((owner, place, page)) = self.commands.pop() else {
            return;
        };
        if let Some(proc) = self.proc_of(owner)
            && let Ok(content) = self.memory.move_out(self.procs[proc].mm, page)
        {
            self.saw("agent goes on without its manager");
            self.holding.insert((owner, place), content);
            // The program has dropped it, and the kernel would drop it a moment later. The page is
            // not put back for that moment.
            let Proc { mm, intake, .. } = &self.procs[proc];
            if let Some(intake) = intake
                && let LayoutEvent::Remove(range) = intake.event
                && range.contains(page)
            {
                self.oracle.zero(*mm, page);
            }
        }
    }

    /// A successor takes over; its death meanwhile is survived too.
    pub fn take_over(&mut self) {
        if !self.calm && self.random.chance(self.setup.kills.min(40), 100) {
            let words = self.random.below(300);
            self.ledger.arm(words);
        }
        self.commands.clear(); // it stops the agents
        self.expect_loads_again();
        let living = self.procs.iter().filter(|proc| proc.alive);
        let sizes: Vec<_> = living.map(|proc| (proc.space, proc.size)).collect();
        let ledger = self.ledger.reopen().expect("the ledger it left");
        let engine = Engine::recover(
            ledger,
            policies::reclaim(&self.setup),
            policies::prefetch(&self.setup),
            config_of(&self.setup),
            &sizes,
        );
        (self.engine, _) = engine.expect("the ledger it left");
        policies::link(&self.setup, &mut self.engine);
        policies::number_spaces(&self.setup, &mut self.engine);
        self.down_for = None;
        self.update_pool();
        self.catch_up();
        let recovered = self.reconcile();
        let pages = self.in_memory().map(|(space, page, _)| (space, page));
        self.heard = Arc::new(Heard::of(pages.collect()));
        self.engine.add_journal(self.heard.clone());
        self.plugin = (self.plugin.as_ref()).map(|plugin| plugin.again(&mut self.engine));
        self.pass_agentless_over();
        self.log(|| format!("taken over: {recovered:?}"));
        self.free_unclaimed(&recovered);
        self.resume_batch(&recovered);
        for (space, page) in &recovered.lost {
            if let Some(proc) = self.proc_of(*space) {
                self.oracle.damage(self.procs[proc].mm, *page);
            }
            self.saw("takeover: lost with the process that had it");
        }
        for (count, what) in [
            (recovered.in_hand.len() as u64, "takeover: pages in hand"),
            (recovered.installed, "takeover: installed and not finished"),
            (recovered.returned, "takeover: chosen and not gone"),
            (recovered.vanished, "takeover: vanished"),
        ] {
            *self.seen.entry(what).or_default() += count;
        }
        self.seen.retain(|_, times| *times > 0);
        self.ledger.disarm();
        self.register_regions();
        self.engine.books().audit();
        if !self.sabotaged(Sabotage::ForgetWakeAtTakeover) {
            self.wake_everyone();
        }
        self.saw("taken over");
        self.check_slots();
        self.check_bytes();
    }

    /// Applies the event its predecessor had read, and all that wait.
    fn catch_up(&mut self) {
        for proc in 0..self.procs.len() {
            if !self.procs[proc].alive {
                continue;
            }
            if self.sabotaged(Sabotage::ForgetEventsAtTakeover) {
                self.procs[proc].intake = None
            } else {
                if self.procs[proc].intake.is_some() {
                    self.saw("takeover: an event of its predecessor's");
                }
                self.apply_intake(proc);
            }
            while self.procs[proc].alive && !self.procs[proc].events.is_empty() {
                self.read_event(proc);
            }
        }
    }

    fn reconcile(&mut self) -> Recovered {
        let forget = self.sabotaged(Sabotage::ForgetHolding);
        let swap_is_absent = self.sabotaged(Sabotage::SwapIsAbsent);
        let in_place = self.in_flight_in_place();
        let mut kernel = Kernel {
            memory: &self.memory,
            procs: &self.procs,
            holding: &self.holding,
            forget,
            swap_is_absent,
            gone: false,
        };
        let recovered = self.engine.reconcile(&mut kernel);
        let excused = kernel.gone;
        assert!(
            recovered.lost.is_empty() || excused,
            "pages were lost by taking over: {recovered:?}"
        );
        assert_eq!(
            recovered.strays, 0,
            "pages known where nothing is managed: an event went unheard"
        );
        for (space, page, swapped) in in_place {
            let entry = self.engine.books().entry(space, page);
            assert_eq!(
                entry.state,
                PageState::Resident,
                "{space:?} page {} is in memory (swapped: {swapped}): {entry:?}",
                page.0
            );
            if swapped {
                self.saw("kernel swap: chosen and not gone");
            }
        }
        recovered
    }

    /// Pages that are on their way out by the books, and in memory, perhaps in the kernel's swap.
    fn in_flight_in_place(&mut self) -> Vec<(SpaceId, VirtPage, bool)> {
        let mut found = Vec::new();
        for (space, page) in self.engine.in_flight() {
            let proc = self.procs.iter().find(|p| p.alive && p.space == space);
            let mm = proc.map(|proc| proc.mm);
            if let Some(mm) = mm.filter(|mm| self.memory.is_present(*mm, page)) {
                found.push((space, page, self.memory.is_swapped(mm, page)));
            }
        }
        found
    }

    fn free_unclaimed(&mut self, recovered: &Recovered) {
        let mut claims: BTreeMap<TierId, BTreeSet<Slot>> = BTreeMap::new();
        for (tier, slot) in recovered.claims.iter() {
            assert!(
                self.tiers[tier.0 as usize].is_live(slot),
                "{tier:?} {slot:?} is gone, and the ledger refers to it"
            );
            claims.entry(tier).or_default().insert(slot);
        }
        for at in 0..self.tiers.len() {
            let wanted = claims.remove(&TierId(at as u8)).unwrap_or_default();
            if self.tiers[at].retain_only(&wanted) > 0 {
                self.saw("takeover: slots freed that nobody refers to");
            }
        }
        self.update_pool();
    }

    /// The pages in hand are a batch that was taken out.
    fn resume_batch(&mut self, recovered: &Recovered) {
        let Some(last) = recovered.in_hand.last() else {
            return;
        };
        let mut items = vec![last.item; last.item.at.place() + 1];
        let mut held = Vec::new();
        for page in &recovered.in_hand {
            items[page.item.at.place()] = page.item;
            let content = self.holding[&(page.owner, page.place)];
            self.expect_again(page.item.at, content);
            held.push(TakenOut {
                at: page.item.at,
                content,
                outcome: None,
            });
        }
        self.batch = Some(Eviction {
            next: items.len(),
            items,
            cancelled: false,
            held,
            back: Vec::new(),
            stalled: 0,
            ended: None,
        });
    }

    /// A page in hand that the predecessor had put back, and that a late zap dropped. A successor
    /// cannot know that, and puts it back again. Bytes written after the REMOVE was acknowledged
    /// may as well have been written after the zap.
    fn expect_again(&mut self, at: BatchIndex, content: Content) {
        let mut places = Vec::new();
        self.engine.evictions().places_of(at, &mut places);
        for (space, page) in places {
            if let Some(proc) = self.proc_of(space)
                && self.oracle.returned(self.procs[proc].mm, page, content)
            {
                self.saw("takeover: put back, dropped, and in hand again");
            }
        }
    }

    /// The same of pages whose load was not published. A successor has their copies still.
    fn expect_loads_again(&mut self) {
        for (mm, page, content) in self.oracle.returning() {
            let space = self.procs.iter().find(|proc| proc.alive && proc.mm == mm);
            let entry = space.map(|proc| self.engine.books().entry(proc.space, page));
            if entry.is_some_and(|entry| entry.state == PageState::Loading)
                && self.oracle.returned(mm, page, content)
            {
                self.saw("takeover: loaded, dropped, and a copy again");
            }
        }
    }

    /// Managed ranges, as `/proc/PID/maps` shows them.
    fn register_regions(&mut self) {
        for at in 0..self.procs.len() {
            let proc = &self.procs[at];
            if !proc.alive {
                continue;
            }
            let mut ranges: Vec<VirtRange> = Vec::new();
            for (page, advice) in self.memory.pages(proc.mm) {
                match ranges.last_mut() {
                    _ if !advice.registered => {}
                    Some(last) if last.end == page => last.end = page.plus(1),
                    _ => ranges.push(VirtRange::new(page, page.plus(1))),
                }
            }
            for range in ranges {
                self.engine.layout().attached(proc.space, range);
            }
        }
    }

    fn wake_everyone(&mut self) {
        for at in 0..self.threads.len() {
            // Waking one thread may let others run, or end them.
            let Some(thread) = self.threads.get(at) else {
                break;
            };
            let stopped = matches!(thread.doing, Doing::Stopped { .. });
            if let (Doing::Stopped { page, .. }, proc) = (thread.doing, thread.proc) {
                let space = self.procs[proc].space;
                let unread = self.procs[proc].messages.iter().any(|m| m.page == page);
                if stopped
                    && !unread
                    && self.engine.books().entry(space, page).state != PageState::Resident
                {
                    self.saw("takeover: a thread whose fault had been read");
                }
                self.wake(proc, page);
            }
        }
    }
}

/// Kernel as a successor finds it.
struct Kernel<'a> {
    memory: &'a Memory,
    procs: &'a [Proc],
    holding: &'a BTreeMap<(SpaceId, usize), Content>,
    forget: bool,
    swap_is_absent: bool,
    /// True once it was asked for bytes that were lost with their process.
    gone: bool,
}

impl Kernel<'_> {
    fn proc(&self, space: SpaceId) -> Option<&Proc> {
        self.procs.iter().find(|p| p.space == space && p.alive)
    }
}

impl Found for Kernel<'_> {
    fn page(&mut self, space: SpaceId, page: VirtPage) -> Here {
        let Some(proc) = self.proc(space) else {
            return Here::NotManaged;
        };
        let registered = self
            .memory
            .advice(proc.mm, page)
            .is_some_and(|a| a.registered);
        match self.memory.is_present(proc.mm, page) {
            _ if !registered => Here::NotManaged,
            false => Here::Absent,
            true if !self.memory.is_swapped(proc.mm, page) => Here::Present,
            true if self.swap_is_absent => Here::Absent,
            true => Here::Swapped,
        }
    }

    fn held(&mut self, owner: SpaceId, place: usize) -> HeldPage {
        let held = self.holding.contains_key(&(owner, place)) && !self.forget;
        match (held, self.proc(owner)) {
            (true, _) => HeldPage::Here,
            (false, Some(_)) => HeldPage::NotMoved,
            (false, None) => {
                self.gone = true;
                HeldPage::OwnerGone
            }
        }
    }
}
