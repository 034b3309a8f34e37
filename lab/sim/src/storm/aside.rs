//! Agents that are late with a command: the group is set aside, and other batches leave meanwhile.

use std::collections::BTreeSet;

use undercroft_base::SpaceId;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{GROUPS, Taken};
use undercroft_seeded::mix;

use super::evictor::batches;
use super::setup::Sabotage;
use super::work::Eviction;
use super::world::World;

impl World {
    /// Whether agents may be late in this storm: in a third of all storms.
    fn agents_are_late(&self) -> bool {
        mix(self.setup.seed ^ 0xa51d).is_multiple_of(3) || self.sabotaged(Sabotage::SettleAside)
    }

    /// Takes one step of a late agent, or with a group that was set aside; false when there was
    /// none.
    pub(super) fn late_step(&mut self) -> bool {
        if self.calm {
            return !self.aside.is_empty() && self.aside_step();
        }
        if !self.agents_are_late() {
            return false;
        }
        match self.random.below(24) {
            0..2 => self.set_group_aside(),
            2..8 if !self.aside.is_empty() => self.aside_step(),
            _ => false,
        }
    }

    /// No further page of the batch may be moved. Pages that were moved stay moved.
    pub(super) fn cancel_batches(&mut self) {
        self.evictions_mut()
            .for_each(|batch| batch.cancelled = true);
    }

    /// All that the evictor has under way.
    pub(super) fn evictions(&self) -> impl Iterator<Item = &Eviction> {
        self.batch.iter().chain(&self.others).chain(&self.aside)
    }

    pub(super) fn evictions_mut(&mut self) -> impl Iterator<Item = &mut Eviction> {
        let batches = self.batch.iter_mut().chain(&mut self.others);
        batches.chain(&mut self.aside)
    }

    /// Groups of places that are in use. What a successor has in hand may be several.
    pub(super) fn groups(&self) -> usize {
        let items = self.evictions().flat_map(Eviction::unfinished_items);
        let groups = items.map(|item| item.at.place() / EVICT_PAGES_MAX);
        groups.collect::<BTreeSet<_>>().len()
    }

    /// Goes on with another batch, or with none, so that one more may begin.
    pub(super) fn turn_to_another_batch(&mut self) {
        if batches(self.setup.seed) == 1 || self.is_down() {
            return;
        }
        if self.others.is_empty() || self.random.chance(1, 4) {
            if self.groups() < GROUPS && self.random.chance(1, 2) {
                self.others.extend(self.batch.take());
            }
        } else {
            let next = self
                .others
                .swap_remove(self.random.index(self.others.len()));
            self.others.extend(self.batch.replace(next));
        }
    }

    /// Whether no page of the space may be chosen.
    pub(super) fn is_aside(&self, space: SpaceId) -> bool {
        self.aside.iter().any(|group| group.items[0].space == space)
    }

    /// Gives up the command for the next undecided group of the batch.
    fn set_group_aside(&mut self) -> bool {
        let groups = self.groups();
        let Some(batch) = &mut self.batch else {
            return false;
        };
        let start = batch.next;
        if groups >= GROUPS
            || start >= batch.items.len()
            || start > 0 && batch.items[start - 1].space == batch.items[start].space
            || batch.cancelled
        {
            return false;
        }
        let space = batch.items[start].space;
        let count = batch.items[start..]
            .iter()
            .take_while(|item| item.space == space)
            .count();
        let mut items = batch.items[start..start + count].to_vec();
        batch.next += count;
        self.saw("set aside");
        self.log(|| format!("aside {count} pages of {space:?}"));
        if self.sabotaged(Sabotage::SettleAside) {
            let mut wake = Vec::new();
            for item in &items {
                self.engine
                    .evictions()
                    .settle(item.at, Taken::NotTried, &mut wake);
            }
            self.wake_all(wake);
            if let Some(proc) = self.proc_of(space) {
                let _ = self.memory.move_out(self.procs[proc].mm, items[0].page);
            }
            return true;
        }
        self.engine.evictions().set_aside(&mut items);
        self.aside.push(Eviction {
            items,
            next: 0,
            cancelled: false,
            held: Vec::new(),
            back: Vec::new(),
            stalled: self.random.below(200),
            ended: None,
        });
        true
    }

    /// Takes one step of a late agent, or of the evictor with the pages it moved.
    fn aside_step(&mut self) -> bool {
        let at = self.random.index(self.aside.len());
        let mut group = self.aside.swap_remove(at);
        let space = group.items[0].space;
        let places: Vec<usize> = group.items.iter().map(|item| item.place.into()).collect();
        if group.next < group.items.len() && !group.cancelled && self.random.chance(1, 3) {
            group.cancelled = true; // it sees that the command was given up
            self.saw("set aside: cancelled");
        }
        let other = self.batch.replace(group);
        let done = self.batch_step();
        match std::mem::replace(&mut self.batch, other) {
            Some(group) => self.aside.push(group),
            None => {
                self.saw("set aside: settled");
                if !self.has_no_agent(space) && !self.is_aside(space) {
                    self.engine.evictions().pass_over(space, false);
                    while self.engine.evictions().take_back(space, 16) {}
                }
                self.holding
                    .retain(|(owner, place), _| *owner != space || !places.contains(place));
            }
        }
        done
    }
}
