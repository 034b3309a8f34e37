//! Evicts the groups of a batch. All are asked for before the first is taken: the agents of several
//! processes move pages at the same time. With helpers, the groups of the next batch are asked for
//! before those of the last are stored, so that pages move while others are compressed. A group is
//! pending when it was asked for and is not taken.

use std::sync::Arc;

use undercroft_base::PageSize;
use undercroft_engine::EvictItem;

use super::wayout::Way;
use super::{Batch, Evictor};
use crate::space::port::{Answered, Asked, Begun};
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::space::still;
use crate::sync::read;

/// Most groups that are pending: a page that a thread may want is away until its group is stored.
const PENDING_MAX: usize = 16;

/// A group that was asked for.
pub(super) struct Pending {
    process: Arc<Process>,
    items: Vec<EvictItem>,
    asked: Asked,
    answered: Option<Answered>,
    /// The batch that ends with this group.
    batch: Option<Batch>,
}

impl Pending {
    /// Waits for the answer, if it was not seen yet.
    fn answer(&mut self, shared: &Shared) -> Answered {
        let way = || Way::of(shared, &self.process).expect("a group began by it");
        let answered = (self.answered.take()).unwrap_or_else(|| way().out().wait(self.asked));
        *self.answered.insert(answered)
    }
}

impl Evictor {
    /// Evicts items. Some may be pending afterwards. The batch, if they are one, ends with the last
    /// of them.
    pub(super) fn evict_groups(&mut self, items: &[EvictItem], batch: Option<Batch>) {
        let mut older = self.pending.len();
        // The buffer has room for one large page.
        let goes_along = |one: &EvictItem, next: &EvictItem| {
            one.space == next.space && one.size == PageSize::Base
        };
        for group in items.chunk_by(goes_along) {
            if self.pending.len() >= PENDING_MAX {
                self.finish_first();
                older = older.saturating_sub(1);
            }
            self.ask_for(group);
            self.wake();
        }
        match (self.pending.back_mut(), batch) {
            (Some(last), Some(_)) if last.batch.is_none() => last.batch = batch,
            (_, Some(batch)) => self.batch_ended(batch),
            (_, None) => {}
        }
        if self.overlaps {
            (0..older).for_each(|_| self.finish_first());
        } else {
            self.finish_all();
        }
    }

    /// Asks for a group. An agent has one command at a time, so the answer to the last one comes
    /// first.
    fn ask_for(&mut self, group: &[EvictItem]) {
        let shared = self.shared.clone();
        let space = group[0].space;
        let mut newest = self.pending.iter_mut().rev();
        let last = newest.find(|last| last.process.space == space);
        let late = last.is_some_and(|last| matches!(last.answer(&shared), Answered::Late(_)));
        match shared.processes.get(space) {
            Some(process) if !late => self.begin(&process, group),
            _ => self.leave(group),
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
                self.pending.push_back(Pending {
                    process: process.clone(),
                    items: group.to_vec(),
                    asked,
                    answered: None,
                    batch: None,
                });
            }
            Begun::NotNow => {
                self.pass_over(process);
                self.leave(group);
            }
            Begun::No => {
                let hosted = process.hosted.as_ref();
                if hosted.is_some_and(|of| of.guest.doubts_views()) {
                    self.shared.signals.kick_control(); // it looks what a program has unmapped
                }
                self.leave(group);
            }
        }
    }

    /// Takes, stores and publishes the group that was asked for first. The caller has `storing`.
    fn finish_first(&mut self) {
        let Some(mut first) = self.pending.pop_front() else {
            return;
        };
        let shared = self.shared.clone();
        let answered = first.answer(&shared);
        let (process, items) = (&first.process, &first.items[..]);
        let way = Way::of(&shared, process).expect("a group began by it");
        let took = way.out().take(answered, items, &mut self.buffer);
        match self.go_on(process, way.out(), items, took) {
            Some(waits) => self.set_aside(process, items, waits),
            None => way.out().end(items),
        }
        self.wake();
        if let Some(batch) = first.batch {
            self.batch_ended(batch);
        }
    }

    /// Finishes the groups that are pending. The caller has `storing`.
    pub(super) fn finish_all(&mut self) {
        while !self.pending.is_empty() {
            self.finish_first();
        }
    }

    /// Finishes the groups that are pending, if there are any.
    pub(super) fn finish_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let shared = self.shared.clone();
        let storing = read(&shared.books.storing);
        self.finish_all();
        shared.books.free_released();
        drop(storing);
        shared.books.follow_pages();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};

    use super::*;
    use crate::fault::model_tests::{options, shared};
    use crate::space::model::ModelMemory;
    use crate::space::port::{Space, Wake};
    use crate::sync::lock;

    /// Processes whose pages came in turns.
    struct Several {
        evictor: Evictor,
        memories: Vec<Arc<ModelMemory>>,
        /// Pages of all batches.
        chosen: usize,
    }

    impl Several {
        fn new(overlaps: bool, count: usize) -> Several {
            let mut evictor = Evictor::new(shared(options("ram"))).expect("an evictor");
            evictor.overlaps = overlaps;
            let range = VirtRange::new(VirtPage(0), VirtPage(200 / count as u64));
            let steps = Arc::default();
            let memories = std::iter::repeat_with(|| {
                let mut memory = ModelMemory::new(range);
                memory.steps = Arc::clone(&steps);
                Arc::new(memory)
            });
            let memories: Vec<_> = memories.take(count).collect();
            let spaces = memories.iter().map(|memory| {
                for page in range.pages() {
                    let put = memory.install(page, &[7; BASE_PAGE_BYTES], Wake::Later);
                    put.expect("the page is missing");
                }
                let shared = &evictor.shared;
                let space = shared.books.engine().layout().add_space();
                shared.books.engine().layout().attached(space, range);
                let (row, beacon) = (shared.books.row(space), VirtPage(1 << 20));
                let process = Process::new(space, memory.clone(), beacon, None, None, row);
                shared.add_process(&Arc::new(process));
                space
            });
            let spaces: Vec<_> = spaces.collect();
            let mut engine = evictor.shared.books.engine();
            for page in range.pages() {
                for &space in &spaces {
                    (engine.discovery()).found_resident(space, VirtRange::one(page));
                }
            }
            drop(engine);
            Several {
                evictor,
                memories,
                chosen: 0,
            }
        }

        /// Evicts a batch of `want` pages of all processes; returns the calls of the memories.
        fn batch(&mut self, want: usize) -> Vec<&'static str> {
            let mut items = Vec::new();
            let any = (self.evictor.shared.books.engine().evictions()).select(want, &mut items);
            assert!(any);
            self.chosen += items.len();
            self.evictor.evict_groups(&items, None);
            self.steps()
        }

        fn steps(&mut self) -> Vec<&'static str> {
            std::mem::take(&mut *lock(&self.memories[0].steps))
        }
    }

    #[test]
    fn all_processes_of_a_batch_are_asked_before_the_first_is_waited_for() {
        let mut some = Several::new(false, 2);
        let steps = ["begin", "begin", "wait", "take", "wait", "take"];
        assert_eq!(some.batch(4), steps);
        assert!(some.evictor.pending.is_empty());
    }

    #[test]
    fn the_next_batch_is_asked_for_before_the_last_is_stored() {
        let mut some = Several::new(true, 2);
        assert_eq!(some.batch(4), ["begin", "begin"]);
        let next = ["wait", "begin", "wait", "begin", "take", "take"];
        assert_eq!(some.batch(4), next);
        assert_eq!(some.evictor.pending.len(), 2);
        some.evictor.finish_pending();
        assert_eq!(some.steps(), ["wait", "take", "wait", "take"]);
        for memory in &some.memories {
            assert_eq!(memory.left.load(Ordering::Relaxed), 4);
        }
    }

    #[test]
    fn no_more_than_a_few_groups_are_pending_and_none_is_forgotten() {
        let mut some = Several::new(true, 34);
        assert_eq!(some.batch(64), ["begin"; PENDING_MAX]);
        // From then on each that is asked for has the oldest finished before.
        let steps = some.batch(64);
        assert_eq!(steps, ["wait", "take", "begin"].repeat(PENDING_MAX));
        assert_eq!(some.evictor.pending.len(), PENDING_MAX);
        some.evictor.finish_pending();
        let left = some
            .memories
            .iter()
            .map(|of| of.left.load(Ordering::Relaxed));
        assert_eq!(left.sum::<u32>() as usize, some.chosen);
    }
}
