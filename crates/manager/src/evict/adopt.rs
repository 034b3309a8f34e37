//! Pages that a dead manager had taken out and not published: the evictor of its successor begins
//! with them. They are a batch that was taken out ([`undercroft_engine::Recovered`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::BASE_PAGE_BYTES;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{EvictItem, InHand};

use super::Evictor;
use super::aside::{PLACE_AFTER, Waits};
use super::wayout::{Way, all_of};
use crate::space::process::Process;

/// Pause between two attempts to put pages back.
const RETRY: Duration = Duration::from_millis(1);

impl Evictor {
    /// Stores these pages, or puts them back. Then fork() in the program goes on.
    pub(crate) fn adopt(&mut self, in_hand: &[InHand]) {
        for process in self.shared.processes.all() {
            let Some(agent) = process.agent.get() else {
                continue;
            };
            let of = in_hand.iter().filter(|page| page.owner == process.space);
            let of: Vec<InHand> = of.copied().collect();
            for group in of.chunks(EVICT_PAGES_MAX) {
                self.adopt_group(&process, group);
            }
            agent.ends_all_groups();
        }
        self.shared.books.free_released();
    }

    fn adopt_group(&mut self, process: &Arc<Process>, group: &[InHand]) {
        let Some(agent) = process.agent.get() else {
            return;
        };
        let done = agent.result();
        let mut moved = 0u64;
        for (at, page) in group.iter().enumerate() {
            let bytes = &mut self.buffer[at * BASE_PAGE_BYTES..][..BASE_PAGE_BYTES];
            moved |= u64::from(agent.read_one(done, page.place, bytes)) << at;
        }
        let items: Vec<EvictItem> = group.iter().map(|page| page.item).collect();
        // The group is no piece of a batch, so it is not set aside. Nothing else leaves meanwhile.
        let began = Instant::now();
        let mut gone = all_of(&items) & !moved; // the process has ended meanwhile
        while gone != 0 {
            gone = self.lose(&items, gone);
            if gone != 0 {
                std::thread::sleep(RETRY);
            }
            if gone != 0 && began.elapsed() > PLACE_AFTER {
                process.end("its pages cannot be marked as lost");
            }
        }
        let shared = self.shared.clone();
        let Some(way) = Way::of(&shared, process) else {
            return;
        };
        let mut waits = self.store_all(way.out(), &items, moved, 0);
        while let Some(Waits::Place(pages)) = waits {
            std::thread::sleep(RETRY);
            let age = began.elapsed();
            waits = self.put_back_again(&items, pages, age);
            if age > PLACE_AFTER && waits.is_some() {
                process.end("its pages cannot be put back");
            }
        }
        self.wake();
    }
}
