//! Pages that a plugin wants in memory before they are needed: no thread waits for them, and no
//! page leaves for them.

use undercroft_base::{PageState, SpaceId, ThreadId, VirtPage};

use crate::ledger::Ledger;
use crate::limits::LOAD_PAGES_MAX;
use crate::{Engine, Fault, Faults, LoadPlan};

impl<L: Ledger> Faults<'_, L> {
    /// Plans those of `pages` that are out of memory, as far as they leave the reserve free and no
    /// thread waits for room. They end as pages that come along with a fault. Nothing is to be done
    /// if the plan is empty.
    ///
    /// * `pages`: any numbers, in any order.
    ///
    /// Returns how many of them were dealt with: as many as one plan can, at least one. Cost:
    /// O(pages), no allocation.
    /// Source: FlexSwap §4.2. Differs: what finds no room is dropped, and does not wait for it.
    pub fn prefetch(&mut self, space: SpaceId, pages: &[VirtPage], plan: &mut LoadPlan) -> usize {
        plan.items.clear();
        for (at, page) in pages.iter().enumerate() {
            let Some(no) = self.engine.find_named(space, *page) else {
                continue;
            };
            let entry = self.engine.table.entry(no);
            let needed = self.engine.table.base_pages(no) as i64;
            if entry.state != PageState::Stored || self.engine.room_ahead() < needed {
                continue;
            }
            if plan.items.is_empty() {
                plan.fault = Fault {
                    space,
                    page: *page,
                    write: false,
                    thread: ThreadId(0),
                    urgent: false,
                };
            }
            let most = self.engine.table.size(no).at_once(LOAD_PAGES_MAX);
            let region = self.engine.table.region_around(space, plan.fault.page);
            if plan.items.len() >= most || !region.contains(*page) {
                self.engine.end_prefetch(plan);
                return at;
            }
            self.engine.plan_page(plan, no, *page, entry, false);
        }
        self.engine.end_prefetch(plan);
        pages.len()
    }
}

impl<L: Ledger> Engine<L> {
    /// Pages that may come before they are needed: what is free beyond the reserve.
    fn room_ahead(&self) -> i64 {
        if self.waiters.is_empty() {
            self.room_to_come() - self.reserve()
        } else {
            0
        }
    }

    fn end_prefetch(&mut self, plan: &mut LoadPlan) {
        plan.items.sort_unstable_by_key(|item| item.page);
        self.see_plan(plan);
    }
}
