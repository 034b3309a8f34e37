//! The fault threads: read a message, decide, load; then validate, install and finish under the
//! layout lock.

use undercroft_base::{
    BASE_PAGE_BYTES, Loaded, PageKey, PageSize, PageState, ThreadId, Tier, TierId, VirtPage,
};
use undercroft_engine::{Fault, FaultAnswer, Install, LoadItem, LoadPlan};
use undercroft_model::{Content, FakeTier, NotInstalled};

use super::meddler::Plugin;
use super::program::LOWEST_END;
use super::setup::Sabotage;
use super::work::{Flight, Got};
use super::world::{LayoutEvent, Message, World};

impl World {
    /// Whether a plan in progress reads the slot.
    pub fn is_loading(&self, tier: TierId, slot: undercroft_base::Slot) -> bool {
        self.flights.iter().flatten().any(|flight| {
            let mut items = flight.plan.items.iter();
            items.any(|item| (item.tier, item.slot) == (tier, slot))
        })
    }

    /// Takes one step of one fault thread. False if there was nothing to do.
    pub fn fault_step(&mut self) -> bool {
        let at = self.random.index(self.flights.len());
        if self.flights[at].is_some() {
            self.advance_flight(at);
            return true;
        }
        // The manager reads messages first, but another thread may load pages meanwhile.
        let ahead = self.steps.is_multiple_of(4) && self.load_ahead(at);
        ahead || self.read_message(at) || self.load_ahead(at)
    }

    /// Fault thread `at` loads pages that a plugin wants in memory. False if there are none.
    fn load_ahead(&mut self, at: usize) -> bool {
        let wanted = self.plugin.as_ref().and_then(Plugin::loads);
        let Some((space, pages)) = wanted.filter(|_| !self.calm) else {
            return false;
        };
        let room = self.engine.books().room();
        let mut plan = LoadPlan::default();
        let proc = self.proc_of(space);
        let done = match proc {
            Some(_) => self.engine.faults().prefetch(space, &pages, &mut plan),
            None => 1,
        };
        if let Some(plugin) = &mut self.plugin {
            plugin.loaded(done);
        }
        self.log(|| format!("load ahead of {pages:?}: {:?}", plan.items));
        let Some(proc) = proc.filter(|_| !plan.items.is_empty()) else {
            self.saw("loads for a plugin: none");
            return true;
        };
        self.saw("loads for a plugin");
        let books = self.engine.books();
        assert!(
            books.room() >= 0 && !books.reclaim_wanted(),
            "pages had to leave for one that a plugin wanted: room for {room} before"
        );
        self.check_admission();
        let ordered = plan.items.is_sorted_by(|one, next| one.page < next.page);
        let wanted = |item: &LoadItem| pages.contains(&item.page) && !item.demanded && !item.fresh;
        assert!(ordered && plan.items.iter().all(wanted), "{:?}", plan.items);
        self.fly(at, proc, plan);
        true
    }

    /// Fault thread `at` begins to load the pages of a plan.
    fn fly(&mut self, at: usize, proc: usize, plan: LoadPlan) {
        let got = plan.items.iter().map(|_| Got::Not).collect();
        let stalled = self.stall();
        if self.sabotaged(Sabotage::FreeEarly) {
            self.free_early(&plan);
        }
        self.flights[at] = Some(Flight {
            proc,
            plan,
            got,
            stalled,
        });
    }

    fn read_message(&mut self, at: usize) -> bool {
        let Some(proc) = self.a_proc() else {
            return false;
        };
        let Some(message) = self.procs[proc].messages.pop_front() else {
            return false;
        };
        if self.calm || self.random.chance(15, 16) {
            self.decide(at, proc, message);
        } else {
            self.procs[proc].messages.push_back(message);
        }
        true
    }

    /// Fault thread `at` decides a fault whose message it has read.
    pub fn decide(&mut self, at: usize, proc: usize, message: Message) {
        let space = self.procs[proc].space;
        let mut plan = LoadPlan::default();
        let fault = Fault {
            space,
            page: message.page,
            write: message.write,
            thread: ThreadId(message.thread as u32),
            urgent: false,
        };
        let entry = self.engine.books().entry(fault.space, fault.page);
        if self.procs[proc].short && entry.state == PageState::Untouched {
            self.saw("refused for want of room: unknown");
            let mm = self.procs[proc].mm;
            if self.memory.poison(mm, message.page).is_ok() {
                self.oracle.damage(mm, message.page);
            }
            return self.wake(proc, message.page);
        }
        let answer = self.engine.faults().answer(fault, &mut plan);
        self.log(|| {
            let pages: Vec<_> = plan.items.iter().map(|item| item.page.0).collect();
            format!("fault p{proc} {} -> {answer:?} {pages:?}", message.page.0)
        });
        self.saw(match answer {
            FaultAnswer::Load => "fault loads",
            FaultAnswer::Wake => "fault of a resident page",
            FaultAnswer::Wait => "fault waits",
            FaultAnswer::NoRoom => "fault finds no room",
            FaultAnswer::Lost => "fault of a lost page",
            FaultAnswer::Unmanaged => "fault with a full ledger",
        });
        self.kick_evictor();
        match answer {
            FaultAnswer::Load => {
                self.check_admission();
                self.check_order(&plan);
                self.fly(at, proc, plan);
            }
            FaultAnswer::Wake => self.heal(proc, message.page),
            FaultAnswer::Wait | FaultAnswer::NoRoom => {}
            FaultAnswer::Lost => {
                let mm = self.procs[proc].mm;
                _ = self.memory.poison(mm, message.page);
                self.wake(proc, message.page);
            }
            FaultAnswer::Unmanaged => {
                let mm = self.procs[proc].mm;
                _ = self.install(mm, message.page, Content::ZERO);
                self.procs[proc].unmanaged_ok = true;
                self.wake(proc, message.page);
            }
        }
    }

    /// The pages of a plan are in the order of addresses, each once, and one of them has faulted.
    fn check_order(&mut self, plan: &LoadPlan) {
        let ordered = plan.items.is_sorted_by(|one, next| one.page < next.page);
        assert!(ordered, "no order: {:?}", plan.items);
        let demanded = plan.items.iter().filter(|item| item.demanded);
        let demanded: Vec<_> = demanded.map(|item| item.page).collect();
        assert_eq!(demanded, [plan.fault.page]);
        let ends = [plan.items.first(), plan.items.last()];
        let inside = ends.iter().flatten().all(|item| !item.demanded);
        if inside && self.setup.beside && !self.setup.links {
            self.saw("neighbours come along");
        }
    }

    /// The engine has the page as resident. If it is not (a late zap after an acknowledged REMOVE,
    /// a guard page), zeros are right, and only they let the thread continue.
    fn heal(&mut self, proc: usize, page: VirtPage) {
        let (mm, space) = (self.procs[proc].mm, self.procs[proc].space);
        if self.engine.books().entry(space, page).state == PageState::Resident
            && self.install(mm, page, Content::ZERO).is_ok()
        {
            self.saw("resident page healed");
        }
        self.wake(proc, page);
    }

    /// How many turns the next piece of work misses: rarely any, then many.
    pub(super) fn stall(&mut self) -> u64 {
        if !self.calm && self.random.chance(1, 200) {
            50 + self.random.below(300)
        } else {
            0
        }
    }

    /// Fault thread `at` takes the next step of its work.
    pub fn advance_flight(&mut self, at: usize) {
        let flight = self.flights[at].as_mut().expect("in flight");
        if flight.stalled > 0 && !self.calm {
            flight.stalled -= 1;
            return;
        }
        let missing: Vec<usize> = (0..flight.got.len())
            .filter(|item| matches!(flight.got[*item], Got::Not | Got::Reading { .. }))
            .collect();
        let from: Vec<TierId> = missing
            .iter()
            .map(|at| flight.plan.items[*at].tier)
            .collect();
        if from.into_iter().any(|tier| self.hangs(tier)) {
            return;
        }
        if missing.is_empty() {
            return self.commit(at);
        }
        // Most loads come in runs; sometimes one at a time.
        let count = if self.calm || self.random.chance(1, 2) {
            missing.len()
        } else {
            1
        };
        for item in missing.into_iter().take(count) {
            let flight = self.flights[at].as_ref().expect("in flight");
            let load = flight.plan.items[item];
            let got = match (load.tier, flight.got[item]) {
                (TierId::FILL, _) => Got::Content(Content::fill(load.slot.0 as u32)),
                (_, Got::Reading { offset, again }) => self.read_done(load, offset, again),
                _ => self.load(load, false),
            };
            self.flights[at].as_mut().expect("in flight").got[item] = got;
        }
    }

    /// Loads one page as the fault threads do, or says where it is to be read.
    ///
    /// * `again`: the first copy did not verify.
    fn load(&mut self, item: LoadItem, again: bool) -> Got {
        let from = self.tier_of(item);
        let mut page = vec![0; BASE_PAGE_BYTES];
        match from.load(item.slot, item.stamp, &mut page) {
            Ok(Loaded::Read { offset, .. }) => Got::Reading { offset, again },
            Ok(Loaded::Fetch) => Got::Reading {
                offset: item.slot.0 * BASE_PAGE_BYTES as u64,
                again,
            },
            loaded => self.got(item, &page, loaded.is_ok(), again),
        }
    }

    /// A read of the device has ended. Its bytes count if they have the tier's checksum.
    fn read_done(&mut self, item: LoadItem, offset: u64, again: bool) -> Got {
        let from = self.tier_of(item);
        let mut page = vec![0; BASE_PAGE_BYTES];
        let read = from.read(offset, &mut page).is_ok();
        if !read && from.info().facts.remote {
            self.saw("load: late");
            return Got::Again; // its thread faults again
        }
        let sum = from.checksum(item.slot, item.stamp);
        let verified = read
            && from.unpack(item.slot, &mut page)
            && sum == Some(PageKey::KNOWN.checksum(&page, item.stamp));
        let packs = self.setup.tiers[usize::from(item.tier.0)].packs;
        self.saw(if packs {
            "load: read from the device, with others"
        } else {
            "load: read from the device"
        });
        self.got(item, &page, verified, again)
    }

    /// The tier of an item that is being loaded, and so owns its slot.
    fn tier_of(&self, item: LoadItem) -> &FakeTier {
        let from = &self.tiers[usize::from(item.tier.0)];
        assert!(
            from.is_live(item.slot) && from.checksum(item.slot, item.stamp).is_some(),
            "{item:?}: its slot was freed under the load"
        );
        from
    }

    /// Result of bytes that were loaded. A copy in a file that does not verify is loaded once
    /// more; a copy in RAM or a mapping does not change.
    fn got(&mut self, item: LoadItem, page: &[u8], verified: bool, again: bool) -> Got {
        if self.setup.sabotage == Some(Sabotage::SkipChecksum) {
            return Got::Content(Content::of(page).unwrap_or(Content::ZERO));
        }
        if verified {
            if again {
                self.saw("load: right at the second try");
            }
            let content = Content::of(page);
            return Got::Content(content.expect("a verified copy is some page's content"));
        }
        let from = &self.tiers[usize::from(item.tier.0)];
        assert!(
            from.was_made_to_fail(),
            "{item:?}: a good copy did not verify"
        );
        let is_file = from.info().facts.is_local_device();
        if is_file && !again {
            return self.load(item, true);
        }
        let is_remote = from.info().facts.remote;
        if !(is_file || is_remote) || item.demanded {
            Got::Lost
        } else {
            Got::Again
        }
    }

    /// Validates, installs, finishes; no layout event is read meanwhile. Sometimes it does so for a
    /// part of the plan only.
    fn commit(&mut self, at: usize) {
        let mut flight = self.flights[at].take().expect("in flight");
        let (proc, fault) = (flight.proc, flight.plan.fault);
        let count = if !self.calm && self.random.chance(1, 4) {
            1 + self.random.index(flight.plan.items.len())
        } else {
            flight.plan.items.len()
        };
        let spared = self.engine.upsets().spare(&flight.plan);
        let items = &mut flight.plan.items[..count];
        self.engine.faults().validate(items);
        assert!(
            !spared || items.iter().all(|item| item.valid),
            "a load was upset, and that was not counted"
        );
        if self.sabotaged(Sabotage::InstallUnvalidated) {
            items.iter_mut().for_each(|item| item.valid = true);
        }
        self.install_loaded(proc, items, &flight.got);
        self.finish(proc, fault, items);
        let done: Vec<_> = items
            .iter()
            .map(|item| (item.page, item.valid && item.install == Install::Done))
            .collect();
        flight.plan.items.drain(..count);
        flight.got.drain(..count);
        if !flight.plan.items.is_empty() {
            self.flights[at] = Some(flight);
        }
        for (page, installed) in done {
            if installed {
                self.wake(proc, page) // COPY wakes the thread
            } else {
                self.wake_all(vec![(fault.space, page)])
            }
        }
    }

    /// Installs the items that were loaded and are still expected, and sets their `install`.
    fn install_loaded(&mut self, proc: usize, items: &mut [LoadItem], got: &[Got]) {
        let mm = self.procs[proc].mm;
        for (item, got) in items.iter_mut().zip(got) {
            if !item.valid {
                self.saw("dropped while loading");
                continue;
            }
            if self.procs[proc].size == PageSize::Large {
                self.saw(if item.fresh {
                    "large: first touch"
                } else {
                    "large: came back"
                });
            }
            item.install = match got {
                Got::Content(content) => match self.install(mm, item.page, *content) {
                    Ok(()) => {
                        if !item.fresh && item.page < LOWEST_END {
                            self.saw("a page in the lowest arena was evicted and came back");
                        }
                        Install::Done
                    }
                    // Not ours: an acknowledged REMOVE may be about to drop it.
                    Err(NotInstalled::Exists) if item.fresh => Install::NotYet,
                    Err(NotInstalled::Exists) => panic!("stored page {item:?} is present"),
                    Err(_) => Install::NotYet,
                },
                Got::Lost => Install::Lost,
                Got::Not | Got::Reading { .. } | Got::Again => Install::NotYet,
            };
        }
    }

    /// Reports the items to the engine. The program will miss the bytes of those that are lost.
    fn finish(&mut self, proc: usize, fault: Fault, items: &mut [LoadItem]) {
        let lost = |item: &&LoadItem| item.valid && item.install == Install::Lost;
        let lost: Vec<VirtPage> = items.iter().filter(lost).map(|item| item.page).collect();
        if !lost.is_empty() {
            // The manager must not die here: only the ledger would know whether the page is lost
            // already.
            self.ledger.disarm();
        }
        self.engine.faults().finish(fault, items);
        for page in lost {
            self.damaged(proc, page);
        }
        self.operations += if self.calm { 0 } else { items.len() as u64 };
        self.log(|| {
            let told = items.iter();
            let told = told.map(|item| (item.page.0, item.valid, item.install));
            format!("finish p{proc} {:?}", told.collect::<Vec<_>>())
        });
        for item in items {
            self.saw(match item.install {
                Install::NotYet => "install: not yet",
                Install::Done => "install: done",
                Install::Lost => "install: lost",
            });
        }
    }

    /// No copy of the page verifies. The unread events say where the page is by now, and which
    /// other spaces have it.
    fn damaged(&mut self, proc: usize, page: VirtPage) {
        let mut page = page;
        let mut children = Vec::new();
        for event in &self.procs[proc].events {
            match event {
                LayoutEvent::Remap { from, to, .. } if from.contains(page) => {
                    page = to.plus(page.0 - from.start.0);
                }
                LayoutEvent::Remap { from, to, .. }
                    if to.0 <= page.0 && page.0 < to.0 + from.count().0 =>
                {
                    return;
                }
                LayoutEvent::Unmap(range) if range.contains(page) => return,
                LayoutEvent::Fork {
                    child,
                    wiped,
                    dropped,
                } if !wiped.iter().chain(dropped).any(|r| r.contains(page)) => {
                    children.push((*child, page));
                }
                _ => {}
            }
        }
        let mm = self.procs[proc].mm;
        for (mm, page) in children.into_iter().chain([(mm, page)]) {
            self.oracle.damage(mm, page);
        }
    }

    /// A bug on purpose: the slots of the plan are freed before they are loaded.
    fn free_early(&mut self, plan: &LoadPlan) {
        for item in plan.items.iter().filter(|item| item.tier != TierId::FILL) {
            let tier = &self.tiers[item.tier.0 as usize];
            if tier.is_live(item.slot) {
                tier.free(&[item.slot]);
            }
        }
    }
}
