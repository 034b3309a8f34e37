//! The evictor of a storm: does what the reclaim machine of the engine says, one step at a time,
//! and tells it how each batch ended. Time passes with the steps of the storm.

use undercroft_base::{Nanos, SpaceId, VirtPage, VirtRange};
use undercroft_engine::reclaim::{Ended, Goes, Now, Step, Turned};
use undercroft_policy::place::Migration;

use super::evictor::Evictor;
use super::meddler::Plugin;
use super::setup::FullAction;
use super::work::Got;
use super::world::World;

impl World {
    /// The evictor has no batch: it sleeps or rests on, or takes the machine's next step. False if
    /// it sleeps, and no thread had waited for room.
    pub(super) fn evictor_turn(&mut self) -> bool {
        if self.demotes_for_evictor() {
            return self.demotion_step();
        }
        if self.clock < self.evictor.until {
            let sleeps = self.evictor.sleeps;
            // The engine cannot tell who asks for a batch.
            return !self.calm && sleeps && self.random.chance(1, 50) && self.start_batch(64, None);
        }
        if std::mem::replace(&mut self.evictor.sleeps, false) {
            self.evictor.machine.slept(false);
        }
        self.update_pool();
        let now = self.evictor_now();
        let step = self.evictor.machine.step(&mut self.engine, now);
        self.log(|| format!("reclaim: {step:?}"));
        match step {
            Step::Sleep(most) => {
                self.rest(most);
                self.evictor.sleeps = true;
                return self.take_waiters();
            }
            Step::Demote(migration) => self.demote(migration),
            Step::Yield(most) => {
                self.saw("reclaim: lets reads go first");
                self.rest(most);
            }
            Step::Choose(pages) | Step::Named(pages) => {
                let named = matches!(step, Step::Named(_));
                let ended = Ended {
                    asked: pages,
                    freed: 0,
                    refused: false,
                    unfit: false,
                    answer_due: false,
                };
                let wishes = self.plugin.as_mut().map_or_else(Vec::new, Plugin::take_now);
                let begun = if named && !wishes.is_empty() {
                    self.saw("reclaim: pages of a plugin leave although there is room");
                    self.start_wished(&wishes, pages, ended)
                } else if named {
                    self.saw("reclaim: named pages leave although there is room");
                    self.evictor.named -= 1;
                    self.start_named(Some(ended))
                } else {
                    self.start_batch(pages, Some(ended))
                };
                if !begun {
                    self.batch_ended(ended);
                }
            }
            Step::Rest(time) => {
                self.saw("reclaim: rests");
                self.rest(time);
                self.take_waiters();
            }
            Step::Full(time) => {
                self.everything_full();
                self.rest(time);
                self.take_waiters();
            }
            Step::Enough => _ = self.take_waiters(),
            Step::Wait => return false,
        }
        true
    }

    /// A fault has used the reserve. The kick may be lost: the sleep ends anyway.
    pub(super) fn kick_evictor(&mut self) {
        if !self.engine.books().reclaim_wanted() || !self.evictor.sleeps {
            return;
        }
        if self.fails(100) {
            self.saw("wake-up lost: the evictor's, until its nap is over")
        } else {
            self.evictor.machine.slept(true);
            (self.evictor.sleeps, self.evictor.until) = (false, self.clock);
        }
    }

    /// In a calm world where nothing else happens, the evictor's sleep or rest passes.
    pub(super) fn let_time_pass(&mut self) {
        self.clock = self.clock.max(self.evictor.until);
    }

    /// A batch that the machine asked for has ended.
    pub(super) fn batch_ended(&mut self, ended: Ended) {
        let ended = Ended {
            answer_due: !self.aside.is_empty() && !self.calm,
            ..ended
        };
        let before = self.engine.books().over_limit();
        let Evictor { machine, .. } = &mut self.evictor;
        machine.ended(&mut self.engine, self.clock, ended);
        if self.engine.books().over_limit() > before {
            self.saw("reclaim: lends");
        }
        if ended.refused && ended.unfit {
            self.saw("reclaim: pages that do not compress");
        }
        self.take_waiters();
    }

    /// Latency control turns its knobs, or a user names pages that are to leave.
    pub(super) fn turn_knobs(&mut self) {
        if self.setup.seed % 4 == 1 && self.random.chance(1, 2) {
            self.evictor.named += 4;
            return;
        }
        let goes = [Goes::AsPlaced, Goes::ToDevice, Goes::ToBuffer][self.random.index(3)];
        let batch = 1 + self.random.index(64);
        let on = self.random.chance(1, 2);
        self.engine.turn(on.then_some(Turned { batch, goes }));
    }

    fn evictor_now(&self) -> Now {
        let reads = |got: &Got| matches!(got, Got::Reading { .. });
        let mut got = self.flights.iter().flatten().flat_map(|flight| &flight.got);
        Now {
            time: self.clock,
            limit: self.evictor.asked.unwrap_or(self.engine.books().limit()),
            paused: false,
            calm: self.calm,
            reads: got.any(reads),
            named: self.evictor.named > 0 || self.plugin.as_ref().is_some_and(Plugin::wants_now),
        }
    }

    fn rest(&mut self, time: Nanos) {
        self.evictor.until = Nanos(self.clock.0 + time.0);
    }

    /// Begins a batch of up to `most` pages. False if none can be chosen.
    fn start_batch(&mut self, most: usize, ended: Option<Ended>) -> bool {
        let want = 1 + self.random.index(most);
        let any = self.select(want);
        if let Some(batch) = &mut self.batch {
            batch.ended = ended;
        }
        any
    }

    /// Begins a batch of pages that a user has named, anywhere in an address space. False if none
    /// of them can leave.
    fn start_named(&mut self, ended: Option<Ended>) -> bool {
        let of = self.random.index(self.procs.len());
        let space = self.procs[of].space;
        let ranges: Vec<VirtRange> = (0..=self.random.below(3))
            .map(|_| {
                let count = 1 + self.random.below(64);
                let start = self.free_place(count);
                VirtRange::new(start, start.plus(count))
            })
            .collect();
        let any =
            self.begin_batch(|mut evictions, items| evictions.select_these(space, &ranges, items));
        if let Some(batch) = &mut self.batch {
            batch.ended = ended;
        }
        any
    }

    /// Begins a batch with pages that a plugin wants to leave although there may be room. As the
    /// manager does, it takes those that may leave, and there may be none.
    fn start_wished(&mut self, wishes: &[(SpaceId, VirtPage)], most: usize, ended: Ended) -> bool {
        let room = self.engine.books().room();
        let any = self.begin_batch(|mut evictions, items| {
            let mut may = wishes.to_vec();
            may.retain(|(space, page)| evictions.may_leave(*space, *page));
            let any = evictions.select_wished(&mut wishes.to_vec(), most, items);
            assert_eq!(any, !may.is_empty(), "{wishes:?}, room for {room}");
            assert!(
                items
                    .iter()
                    .all(|item| may.contains(&(item.space, item.page)))
            );
            any
        });
        if let Some(batch) = &mut self.batch {
            batch.ended = Some(ended);
        }
        any
    }

    /// The limit is reached, and no tier has room.
    fn everything_full(&mut self) {
        match self.setup.when_full {
            FullAction::Stay => {
                self.saw("reclaim: exceeds the limit");
                self.evictor.machine.exceed(&mut self.engine);
            }
            // The control thread does that a little later.
            FullAction::Kill if self.calm || self.random.chance(1, 8) => {
                self.saw("everything full: the client is ended");
                self.exit_all();
            }
            FullAction::Kill => {}
        }
    }

    /// Begins a demotion that the evictor waits for.
    fn demote(&mut self, migration: Migration) {
        let begun = self.demotion.is_none() && self.start_demotion(migration);
        match &mut self.demotion {
            Some(demotion) if begun => demotion.for_evictor = Some(0),
            _ => self.evictor.machine.moved_none(),
        }
    }

    fn demotes_for_evictor(&self) -> bool {
        let mut moves = self.demotion.iter().chain(&self.second_demotion);
        moves.any(|demotion| demotion.for_evictor.is_some())
    }

    /// A demotion is over.
    pub(super) fn demotion_ended(&mut self) {
        let ended = self.demotion.take();
        if ended.and_then(|demotion| demotion.for_evictor) == Some(0) {
            self.saw("reclaim: moves no page");
            self.evictor.machine.moved_none();
        }
    }
}
