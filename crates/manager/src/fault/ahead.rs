//! Loads pages that the user's policy wants in memory before they are needed: between faults, a few
//! at a time, while there is room and most lanes are idle. No thread waits for these pages.

use std::time::Instant;

use undercroft_base::{Nanos, VirtPage};

use super::{FaultThread, LANES};

/// Pages between two looks for faults: a fault waits for these loads at most.
const PAGES_A_TURN: usize = 16;

impl FaultThread {
    /// Whether the policy may want pages, and there are lanes for them.
    pub(super) fn may_load_ahead(&self) -> bool {
        self.asked_ahead && self.idle.len() > LANES / 2
    }

    /// Loads the pages that the policy has wanted for longest, as many as one plan can have.
    pub(super) fn load_ahead(&mut self) {
        let Some(advice) = self.shared.books.advice() else {
            self.asked_ahead = false;
            return self.ahead.clear();
        };
        if self.ahead.is_empty() {
            self.ahead.extend(advice.take_loads(PAGES_A_TURN));
        }
        let Some(&(space, _)) = self.ahead.front() else {
            self.asked_ahead = false;
            return;
        };
        let same = self.ahead.iter().take_while(|(of, _)| *of == space);
        let pages: Vec<VirtPage> = same.map(|(_, page)| *page).collect();
        let process = self.shared.processes.get(space);
        // A fork child's books are correct only after its first fault.
        let Some(process) = process.filter(|process| process.is_corrected()) else {
            self.ahead.drain(..pages.len());
            return;
        };
        let began = Instant::now();
        let lane = self.take_lane();
        self.lanes[lane].waited = Nanos(0);
        let plan = &mut self.lanes[lane].loads.plan;
        let held = self.shared.books.pool_held();
        let mut engine = self.shared.books.engine();
        engine.migrations().set_pool_held(held);
        let done = engine.faults().prefetch(space, &pages, plan);
        drop(engine);
        self.ahead.drain(..done);
        let begun = plan.items.len();
        advice.note_loads(begun);
        if begun == 0 {
            self.idle.push(lane);
        } else {
            self.carry_out(lane, &process, [began, began, Instant::now()]);
        }
    }
}
