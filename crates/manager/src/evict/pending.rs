//! Evicts groups one after the other. With helpers, the evictor asks for the next group before it
//! stores the one before: the agent moves pages while others are compressed. So one group is
//! pending, which was asked for and is not taken.

use std::sync::Arc;

use undercroft_engine::EvictItem;

use super::wayout::Way;
use super::{Batch, Evictor};
use crate::space::port::{Answered, Asked, Begun};
use crate::space::process::Process;
use crate::space::still;
use crate::sync::read;

/// A group that was asked for.
pub(super) struct Pending {
    process: Arc<Process>,
    items: Vec<EvictItem>,
    asked: Asked,
    /// The batch that ends with this group.
    pub batch: Option<Batch>,
}

impl Evictor {
    /// Evicts items of the batch, all of one address space. They may be pending afterwards.
    pub(super) fn evict_group(&mut self, group: &[EvictItem]) {
        let shared = self.shared.clone();
        let process = shared.processes.get(group[0].space);
        // An agent has one command at a time, so its answer comes first.
        let before = self.pending.take().map(|pending| {
            let answered = self.wait_for(&pending);
            (pending, answered)
        });
        let late = before.as_ref().is_some_and(|(of, answered)| {
            matches!(answered, Answered::Late(_)) && of.process.space == group[0].space
        });
        match process.filter(|_| !late) {
            Some(process) => self.begin(&process, group),
            None => self.leave(group),
        }
        self.wake();
        if let Some((pending, answered)) = before {
            self.finish(pending, answered);
        }
        if !self.overlaps {
            self.finish_next();
        }
    }

    fn begin(&mut self, process: &Arc<Process>, group: &[EvictItem]) {
        let shared = self.shared.clone();
        let Some(way) = Way::of(&shared, process) else {
            still::no_way_out(&shared, process);
            return self.leave(group);
        };
        // From here on fork() in the program waits, until the last page is published.
        match way.out().begin(group) {
            Begun::Yes(asked) => {
                self.pending = Some(Pending {
                    process: process.clone(),
                    items: group.to_vec(),
                    asked,
                    batch: None,
                });
            }
            Begun::NotNow => {
                self.pass_over(process);
                self.leave(group);
            }
            Begun::No => self.leave(group),
        }
    }

    fn wait_for(&self, pending: &Pending) -> Answered {
        let way = Way::of(&self.shared, &pending.process).expect("a group began by it");
        way.out().wait(pending.asked)
    }

    /// Takes, stores and publishes a group that was asked for.
    fn finish(&mut self, pending: Pending, answered: Answered) {
        let (process, items) = (&pending.process, &pending.items[..]);
        let shared = self.shared.clone();
        let way = Way::of(&shared, process).expect("a group began by it");
        let took = way.out().take(answered, items, &mut self.buffer);
        match self.go_on(process, way.out(), items, took) {
            Some(waits) => self.set_aside(process, items, waits),
            None => way.out().end(items),
        }
        self.wake();
        if let Some(batch) = pending.batch {
            self.batch_ended(batch);
        }
    }

    /// Finishes the group that is pending, if there is one. The caller has `storing`.
    pub(super) fn finish_next(&mut self) {
        if let Some(pending) = self.pending.take() {
            let answered = self.wait_for(&pending);
            self.finish(pending, answered);
        }
    }

    /// Finishes the group that is pending, if there is one.
    pub(super) fn finish_pending(&mut self) {
        if self.pending.is_none() {
            return;
        }
        let shared = self.shared.clone();
        let storing = read(&shared.books.storing);
        self.finish_next();
        shared.books.free_released();
        drop(storing);
        shared.books.follow_pages();
    }
}
