//! Moves pages between tiers in the background (`uc-migrate`): out of devices, whose copies have to
//! be read first, groups up and down, and all pages of a tier that is drained. Pages that lie
//! scattered in a file move together (`gather.rs`). No fault and no eviction waits for it.
//!
//! A move is: select (the engine) -> read (`copies.rs`) -> store below -> publish (the engine). The
//! page stays loadable at its old place until it is published. If it comes back or is dropped
//! meanwhile, the new copy is freed.
//!
//! At most 32 MiB a second move, 128 for a drain, and none while a page-in waits for the same
//! device. A drain asks no policy. What the engine checks before it publishes is the same for the
//! evictor's moves: the page is still stored there, with the same stamp. Bytes read from a device
//! are verified first.

mod copies;
mod gather;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use undercroft_base::{Bytes, Nanos, PageCount, PageNo, Store, StoreError, TierId};
use undercroft_engine::limits::DEMOTE_PAGES_MAX;
use undercroft_engine::reclaim::{DRAINS_A_SECOND, GROUPS_ASKED, MOVES_NAP, Pace};
use undercroft_engine::{DemoteItem, Mover};
use undercroft_policy::place::{LatencyClass, TIERS_MAX, TierState};
use undercroft_sys::process;

pub(crate) use self::copies::READS_AT_ONCE;
use self::copies::{Copies, pause_for_page_ins};
use self::gather::Gather;
use crate::books::metered::MeteredTier;
use crate::space::shared::Shared;

/// Time between two looks where only gathering is its work, and while nothing is to gather.
const SELDOM: Nanos = Nanos(1_000_000_000);

/// Pages that are stored at a time: a page-in waits for the write that it meets.
const STORE_PAGES: usize = 64;

/// Pages that are published at a time: the engine is locked meanwhile.
const PUBLISH_PAGES: usize = 64;

/// The thread's state.
pub(crate) struct Migrator {
    shared: Arc<Shared>,
    states: Vec<TierState>,
    items: Vec<DemoteItem>,
    copies: Copies,
    gather: Gather,
    pace: Pace,
    /// The tier that is drained, and where that goes on.
    drained: Option<TierId>,
    drained_to: PageNo,
    /// The drain moved a page in this round over the ledger.
    drain_helps: bool,
    /// The drain could not move a page in this round.
    drain_fails: bool,
    /// Pages of this round that could not be read.
    drain_unreadable: u64,
    /// Pages of the last move that could not be read.
    unreadable: u64,
}

impl Migrator {
    /// Whether there may be work for it: a tier is below a device, or a plugin
    /// moves copies.
    pub(crate) fn is_needed(shared: &Shared) -> bool {
        let mut above_others: Vec<&MeteredTier> = shared.books.tiers.ranked().collect();
        above_others.pop();
        if !above_others.is_empty() && shared.books.advice().is_some_and(|of| of.moves()) {
            return true;
        }
        let device = |tier: &&MeteredTier| tier.latency() == LatencyClass::Device;
        above_others.iter().any(device)
    }

    /// Whether it is started with the run: there may be work for it, or a plugin, whose wishes are
    /// not known yet, has tiers to choose from.
    pub(crate) fn begins(shared: &Shared) -> bool {
        let tiers = shared.books.tiers.ranks().count();
        Migrator::is_needed(shared) || tiers > 1 && shared.books.advice().is_some()
    }

    /// Starts the thread.
    pub(crate) fn start(shared: &Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
        let migrator = Migrator::new(shared.clone())?;
        let thread = Builder::new().name("uc-migrate".into());
        thread.spawn(move || migrator.run())
    }

    fn new(shared: Arc<Shared>) -> std::io::Result<Migrator> {
        Ok(Migrator {
            drained: None,
            drained_to: PageNo(0),
            drain_helps: false,
            drain_fails: false,
            drain_unreadable: 0,
            unreadable: 0,
            copies: Copies::new(&shared.books.key, shared.options.page_size)?,
            shared,
            states: Vec::with_capacity(TIERS_MAX),
            items: Vec::with_capacity(DEMOTE_PAGES_MAX),
            gather: Gather::default(),
            pace: Pace::new(Nanos(0)),
        })
    }

    /// Works until the run ends.
    fn run(mut self) {
        self.shared.cpu_plan.set_migrator(process::thread_id());
        while !self.shared.signals.stopped() {
            if self.shared.gauges.is_paused() {
                std::thread::sleep(Duration::from_nanos(MOVES_NAP.0));
                continue;
            }
            self.shared.cpu_plan.follow();
            let begun = self.shared.now();
            self.items.clear();
            self.shared.books.remove_drained();
            let drain = self.shared.books.to_drain();
            let (mut moved, mut rate) = (0, DRAINS_A_SECOND);
            if let Some(tier) = drain {
                moved = self.drain_some(tier);
            }
            if moved == 0 {
                self.items.clear();
                (moved, rate) = (self.move_next(), self.shared.options.rights.moves);
            }
            if moved == 0 && drain.is_none() {
                self.items.clear();
                moved = self.gather_some();
            }
            let bytes = self.bytes();
            match moved {
                0 if drain.is_none() && !Migrator::is_needed(&self.shared) => {
                    self.pace.rests(begun, SELDOM);
                }
                0 => self.pace.rests(begun, MOVES_NAP),
                _ => self.pace.moved(begun, bytes, rate),
            }
            let rest = self.pace.next().since(self.shared.now());
            std::thread::sleep(Duration::from_nanos(rest.0));
        }
    }

    /// Bytes of the copies that were moved last: all are of one tier.
    fn bytes(&self) -> Bytes {
        let tiers = &self.shared.books.tiers;
        let from = self.items.first();
        let from = from.and_then(|item| tiers.get(usize::from(item.tier.0)));
        let each = from.map_or(0, |from| from.tier.info().page.bytes());
        Bytes((self.items.len() * each) as u64)
    }

    /// Moves the next pages of a closed tier away. Returns how many. 0 at the end of the ledger:
    /// the pages that were on their way are found in the next round.
    fn drain_some(&mut self, tier: TierId) -> usize {
        if self.drained.replace(tier) != Some(tier) {
            (self.drained_to, self.drain_unreadable) = (PageNo(0), 0);
            (self.drain_helps, self.drain_fails) = (false, false);
        }
        loop {
            let next = {
                let mut engine = self.shared.books.engine_for_many();
                let mut migrations = engine.migrations();
                migrations.select_all(tier, self.drained_to, &mut self.items)
            };
            self.shared.books.free_released(); // second copies were given up
            self.drained_to = next.unwrap_or(PageNo(0));
            if !self.items.is_empty() {
                let moved = self.find_refuge(tier);
                self.drain_helps |= moved > 0;
                self.drain_fails |= moved == 0;
                self.drain_unreadable += std::mem::take(&mut self.unreadable);
                if moved > 0 || next.is_some() {
                    return moved;
                }
            }
            if next.is_none() {
                self.end_round(tier);
                return 0;
            }
        }
    }

    /// The ledger was read to its end. If no page moved, only those are left that have no room or
    /// cannot be read.
    fn end_round(&mut self, tier: TierId) {
        let helps = std::mem::take(&mut self.drain_helps);
        let stuck = std::mem::take(&mut self.drain_fails) && !helps;
        let unreadable = std::mem::take(&mut self.drain_unreadable);
        let books = &self.shared.books;
        books.free_all_late();
        books.drains.stuck.store(stuck, Ordering::Relaxed);
        let known = if stuck { unreadable } else { 0 };
        let new = books.note_unreadable(tier, PageCount(known));
        let errors = &books.tiers[usize::from(tier.0)].errors;
        errors.fetch_add(new, Ordering::Relaxed);
    }

    /// Moves the selected pages to where there is room. Returns how many.
    fn find_refuge(&mut self, tier: TierId) -> usize {
        self.states.clear();
        let tiers = self.shared.books.tiers.iter();
        self.states.extend(tiers.map(MeteredTier::state));
        let to = {
            let mut engine = self.shared.books.engine();
            engine.migrations().set_tiers(self.states.iter().copied());
            engine.migrations().refuge_from(tier)
        };
        to.map_or(0, |to| self.carry_out(tier, to))
    }

    /// Moves what the policy wants moved next. Returns how many pages.
    fn move_next(&mut self) -> usize {
        self.states.clear();
        let tiers = self.shared.books.tiers.iter();
        self.states.extend(tiers.map(MeteredTier::state));
        let migration = {
            let advice = self.shared.books.advice();
            let mut engine = self.shared.books.engine();
            engine.migrations().set_tiers(self.states.iter().copied());
            if let Some(advice) = advice {
                advice.note_tiers(engine.books().ranked_tiers());
            }
            let mut migrations = engine.migrations();
            let migration = migrations.wanted(Mover::Background);
            if let Some(migration) = migration {
                let want = migration.pages.0 as usize;
                migrations.select(migration.from, want, &mut self.items);
            }
            migration
        };
        match migration {
            Some(migration) => self.move_from(migration.from, migration.to),
            None => self.move_wished(),
        }
    }

    /// Moves what a plugin wishes to be moved next, if any of it is where the plugin says. Returns
    /// how many pages.
    fn move_wished(&mut self) -> usize {
        let Some(advice) = self.shared.books.advice() else {
            return 0;
        };
        let mut wishes = Vec::new();
        for _ in 0..GROUPS_ASKED {
            advice.wishes.next_moves(&mut wishes);
            if wishes.is_empty() {
                break;
            }
            let tiers = {
                let mut engine = self.shared.books.engine();
                self.items.clear();
                (engine.migrations()).select_wished(&wishes, &mut self.items)
            };
            let moved = tiers.map_or(0, |(from, to)| self.move_from(from, to));
            advice.note_moves(wishes.iter().map(|wish| wish.pages).sum(), moved);
            if moved > 0 {
                return moved;
            }
        }
        0
    }

    /// As [`Migrator::carry_out`], and counts the pages that could not be read.
    fn move_from(&mut self, from: TierId, to: TierId) -> usize {
        let moved = self.carry_out(from, to);
        let errors = &self.shared.books.tiers[usize::from(from.0)].errors;
        let unreadable = std::mem::take(&mut self.unreadable);
        errors.fetch_add(unreadable, Ordering::Relaxed);
        moved
    }

    /// Moves the selected pages. Returns how many. Adds those that could not be read to
    /// `unreadable`.
    fn carry_out(&mut self, from: TierId, to: TierId) -> usize {
        let tiers = &self.shared.books.tiers;
        let (from, below) = (&tiers[usize::from(from.0)], &tiers[usize::from(to.0)]);
        self.copies.read(from, &self.items);
        let mut batch: Vec<Store<'_>> = (self.items.iter().enumerate())
            .filter_map(|(at, item)| {
                let (page, checksum) = self.copies.get(at)?;
                Some(Store {
                    page,
                    stamp: item.stamp,
                    checksum,
                    result: Err(StoreError::Full),
                })
            })
            .collect();
        for part in batch.chunks_mut(STORE_PAGES) {
            pause_for_page_ins(below);
            below.tier.store(part);
        }
        let mut stored = batch.iter().map(|store| store.result.ok());
        let (mut moved, mut bad) = (0, 0);
        for (part, items) in self.items.chunks(PUBLISH_PAGES).enumerate() {
            let mut engine = self.shared.books.engine();
            for (at, item) in items.iter().enumerate() {
                let read = self.copies.get(part * PUBLISH_PAGES + at);
                match read.and_then(|_| stored.next().flatten()) {
                    Some(slot) => {
                        moved += 1;
                        engine.migrations().demoted(*item, to, slot);
                    }
                    None => {
                        let stays = engine.migrations().failed(*item);
                        bad += u64::from(stays && self.copies.is_bad(part * PUBLISH_PAGES + at));
                    }
                }
            }
        }
        self.unreadable += bad;
        below.writes.fetch_add(moved as u64, Ordering::Relaxed);
        self.shared.books.free_released();
        moved
    }
}
