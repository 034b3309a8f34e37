//! Active and inactive lists (RapidSwap §3.1) with activation by refault distance. The default.

use undercroft_base::{PageCount, PageNo};

use super::lists::{List, PageLists};
use super::{Arrival, Reclaim, Verdict};

const INACTIVE: List = List::A;
const ACTIVE: List = List::B;

const USED: u8 = 1;

/// See the module.
#[derive(Default)]
pub struct ActiveInactive {
    lists: PageLists,
}

impl ActiveInactive {
    /// Empty.
    pub fn new() -> ActiveInactive {
        ActiveInactive::default()
    }

    /// Moves the active front into the inactive back while active is above its share.
    fn shrink_active(&mut self, most: usize) {
        for _ in 0..most {
            let active = self.lists.len(ACTIVE).0;
            let Some(page) = self.lists.front(ACTIVE) else {
                return;
            };
            if active * 10 <= self.lists.total().0 * 8 {
                return;
            }
            let used = self.lists.mark(page) == USED;
            self.lists.set_mark(page, 0);
            self.lists
                .move_to_back(if used { ACTIVE } else { INACTIVE }, page);
        }
    }

    fn look(
        &mut self,
        list: List,
        wanted: &mut usize,
        looks: &mut usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        for _ in 0..self.lists.len(list).0 {
            let Some(page) = self.lists.front(list) else {
                return;
            };
            if *wanted == 0 || *looks == 0 {
                return;
            }
            *looks -= 1;
            self.lists.move_to_back(list, page);
            if verdict(page) == Verdict::Take {
                out.push(page);
                *wanted -= 1;
            }
        }
    }
}

impl Reclaim for ActiveInactive {
    fn insert(&mut self, page: PageNo, arrival: Arrival) {
        let list = match arrival {
            Arrival::FirstTouch | Arrival::Prefetch => INACTIVE,
            Arrival::SwapIn { distance } if distance.0 <= self.lists.total().0 => ACTIVE,
            Arrival::SwapIn { .. } => INACTIVE,
            Arrival::Returned => ACTIVE,
        };
        self.lists.push_back(list, page);
        self.lists.set_mark(page, 0);
        self.shrink_active(2);
    }

    fn remove(&mut self, page: PageNo) {
        self.lists.remove(page);
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        match self.lists.list(page) {
            Some(INACTIVE) if self.lists.mark(page) == USED => {
                self.lists.set_mark(page, 0);
                self.lists.move_to_back(ACTIVE, page);
                self.shrink_active(2);
            }
            Some(_) => self.lists.set_mark(page, USED),
            None => {}
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let (mut wanted, mut looks) = (want, scan_max);
        self.shrink_active(scan_max);
        self.look(INACTIVE, &mut wanted, &mut looks, verdict, out);
        self.look(ACTIVE, &mut wanted, &mut looks, verdict, out);
    }

    fn len(&self) -> PageCount {
        self.lists.total()
    }

    fn name(&self) -> &'static str {
        "active_inactive"
    }
}
