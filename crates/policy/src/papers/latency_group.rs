//! NVSwap §III: a buffer above the regular zone, and groups of pages that left one after the other.
//!
//! ```text
//! page-out -> buffer, while it has room -- whole groups, in the background --> regular zone
//!                 ^                                                                |
//!                 +---- the rest of a page's group, when a thread waited for it ---+
//! ```
//! The buffer is the fastest tier below DRAM, the regular zone the next one. A page that needs a
//! new copy joins the open group, in the order of eviction. A group of 64 is full: the next page
//! opens another. When less than an eighth of the buffer is free, the group that waits longest
//! goes to the regular zone. Until it is there, pages that leave pass a full buffer. A fault in the
//! regular zone has the pages of its group that are there move to the buffer, not to DRAM: no fault
//! waits for that, and no page in memory has to leave for it.
//!
//! Who uses the buffer is decided by latency control, which is not here (`undercroft-qos`). It
//! turns the order of tiers round for a client that does not need the buffer, and then nothing
//! moves up.
//!
//! Differs: a policy is of one client, so all its groups have one bound. Groups of several clients
//! are not ordered. There is no NV-zone (in-situ paging): all of the tier is the buffer, and it
//! needs no rule for its size. A prefetched page is moved, not copied. Other tiers follow
//! `waterfall`, and so does the buffer for pages that are in no waiting group.

use std::collections::VecDeque;

use undercroft_base::{PageCount, PageNo, TierId};
use undercroft_policy_core::place::{
    Ask, BATCH_PAGES, LatencyClass, Loaded, Migration, Place, Shown, TIERS_MAX, TierOrder,
    TierState, waterfall,
};

/// Pages of a group.
const GROUP_PAGES: u64 = BATCH_PAGES;

/// Groups go down when less than this part of the buffer is free. They move up while half as much
/// is: the rest is for page-outs.
const FREE_PART: u64 = 8;

/// Groups that wait to move up. If there are more, the oldest wait for their next fault.
const LIFTS_MAX: usize = 16;

/// No page, or no group.
const NONE: u32 = u32::MAX;

/// The record of a page: 8 bytes. A page that is in memory again, with its copy kept, stays in its
/// group, and so does one that was dropped: only what is stored moves.
#[derive(Clone, Copy, Debug)]
struct Page {
    group: u32,
    /// The page that left next.
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Group {
    first: u32,
    last: u32,
    pages: u32,
    /// Its turn to go down; 0 = it does not wait.
    turn: u32,
    /// Whether it waits to move up.
    lifts: bool,
}

const EMPTY: Group = Group {
    first: NONE,
    last: NONE,
    pages: 0,
    turn: 0,
    lifts: false,
};

/// The groups, wherever their pages are.
#[derive(Clone, Debug, Default)]
pub struct LatencyGroup {
    pages: Vec<Page>,
    groups: Vec<Group>,
    /// Groups without pages.
    unused: Vec<u32>,
    /// The group that pages join.
    open: Option<u32>,
    /// Groups that go down, the next one first, with their turns. Old turns are passed over.
    waiting: VecDeque<(u32, u32)>,
    turn: u32,
    /// Groups that move up, the newest last, with the tiers of the faults.
    lifts: VecDeque<(u32, TierId)>,
}

/// The buffer; `None` without a tier below it.
fn buffer(tiers: &[TierState]) -> Option<usize> {
    let below = |tier: &TierState| tier.latency != LatencyClass::Memory;
    let buffer = tiers.iter().position(below)?;
    (buffer + 1 < tiers.len()).then_some(buffer)
}

fn takes(tier: &TierState) -> bool {
    tier.headroom() >= PageCount(GROUP_PAGES).bytes()
}

/// Whether groups have to go down, so that page-outs find room.
fn is_short(buffer: &TierState) -> bool {
    let wanted = waterfall::wanted(buffer).0;
    buffer.headroom().0 < (buffer.capacity.0 / FREE_PART).max(wanted)
}

impl LatencyGroup {
    fn page(&mut self, no: PageNo) -> &mut Page {
        let at = no.0 as usize;
        if at >= self.pages.len() {
            let of_none = Page {
                group: NONE,
                next: NONE,
            };
            self.pages.resize(at + 1, of_none);
        }
        &mut self.pages[at]
    }

    /// The page joins the open group.
    fn join(&mut self, no: PageNo) {
        self.part(no);
        let open = self.open.unwrap_or_else(|| self.unused());
        self.open = Some(open);
        *self.page(no) = Page {
            group: open,
            next: NONE,
        };
        let group = &mut self.groups[open as usize];
        let last = std::mem::replace(&mut group.last, no.0);
        group.pages += 1;
        if group.pages == 1 {
            group.first = no.0;
        } else {
            self.pages[last as usize].next = no.0;
        }
        if u64::from(self.groups[open as usize].pages) == GROUP_PAGES {
            self.open = None;
            self.wait(open);
        }
    }

    /// The page leaves its group, if it is in one. O(pages of a group).
    fn part(&mut self, no: PageNo) {
        let Page { group: of, next } = *self.page(no);
        if of == NONE {
            return;
        }
        self.page(no).group = NONE;
        let group = &mut self.groups[of as usize];
        group.pages -= 1;
        if group.first == no.0 {
            group.first = next;
        } else {
            let mut before = group.first;
            while self.pages[before as usize].next != no.0 {
                before = self.pages[before as usize].next;
            }
            self.pages[before as usize].next = next;
            if group.last == no.0 {
                group.last = before;
            }
        }
        self.release(of);
    }

    /// A group without pages.
    fn unused(&mut self) -> u32 {
        self.unused.pop().unwrap_or_else(|| {
            self.groups.push(EMPTY);
            self.groups.len() as u32 - 1
        })
    }

    /// The group is used for others if it has no page and waits for nothing.
    fn release(&mut self, of: u32) {
        let group = &mut self.groups[of as usize];
        if group.pages == 0 && group.turn == 0 && !group.lifts && self.open != Some(of) {
            *group = EMPTY;
            self.unused.push(of);
        }
    }

    /// The group is the last to go down.
    fn wait(&mut self, of: u32) {
        self.turn = self.turn.wrapping_add(1).max(1);
        self.groups[of as usize].turn = self.turn;
        self.waiting.push_back((of, self.turn));
        if self.waiting.len() > 2 * self.groups.len() + LIFTS_MAX {
            let groups = &self.groups;
            self.waiting
                .retain(|(of, turn)| groups[*of as usize].turn == *turn);
        }
    }

    /// Appends the pages of a group, in the order in which they left.
    fn list(&self, of: u32, out: &mut Vec<PageNo>) {
        let mut no = self.groups[of as usize].first;
        for _ in 0..self.groups[of as usize].pages {
            out.push(PageNo(no));
            no = self.pages[no as usize].next;
        }
    }

    /// The group of the newest fault that moves up. It is the last to go down again.
    fn lift(&mut self, buffer: usize, tiers: &[TierState]) -> Option<(u32, TierId, TierId)> {
        while let Some((of, from)) = self.lifts.pop_back() {
            self.groups[of as usize].lifts = false;
            let below = (buffer + 1..tiers.len()).contains(&usize::from(from.0));
            let to = &tiers[buffer];
            let spare = to.headroom().0 >= to.capacity.0 / (2 * FREE_PART);
            if below && spare && takes(to) && self.groups[of as usize].pages > 0 {
                self.wait(of);
                return Some((of, from, TierId(buffer as u8)));
            }
            self.release(of);
        }
        None
    }

    /// The group that goes down next, if the buffer is short of room.
    fn destage(&mut self, buffer: usize, tiers: &[TierState]) -> Option<(u32, TierId, TierId)> {
        if !tiers[buffer].demotes || !is_short(&tiers[buffer]) {
            return None;
        }
        let zone = buffer + 1 + tiers[buffer + 1..].iter().position(takes)?;
        while let Some((of, turn)) = self.waiting.pop_front() {
            if self.groups[of as usize].turn != turn {
                continue;
            }
            self.groups[of as usize].turn = 0;
            if self.groups[of as usize].pages > 0 {
                return Some((of, TierId(buffer as u8), TierId(zone as u8)));
            }
            self.release(of);
        }
        None
    }

    /// A thread waited for page `no`, which came from `tier`: the rest of its group is to move up.
    fn came_back(&mut self, no: PageNo, tier: TierId) {
        let of = self.page(no).group;
        if tier.0 == 0 || of == NONE || self.open == Some(of) || self.groups[of as usize].lifts {
            return;
        }
        if self.lifts.len() == LIFTS_MAX
            && let Some((oldest, _)) = self.lifts.pop_front()
        {
            self.groups[oldest as usize].lifts = false;
            self.release(oldest);
        }
        self.groups[of as usize].lifts = true;
        self.lifts.push_back((of, tier));
    }

    /// As `waterfall`, but the buffer waits for its groups to go down, if there are any.
    fn relieves(&self, tiers: &[TierState]) -> Option<Migration> {
        let Some(buffer) = buffer(tiers).filter(|_| !self.waiting.is_empty()) else {
            return waterfall::relieves(tiers);
        };
        let mut others = [TierState::empty(LatencyClass::Device); TIERS_MAX];
        let others = &mut others[..tiers.len()];
        others.copy_from_slice(tiers);
        others[buffer].demotes = false;
        waterfall::relieves(others)
    }
}

impl Place for LatencyGroup {
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder {
        if buffer(tiers).is_some() {
            self.join(no);
        }
        TierOrder::downwards(tiers.len())
    }

    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        if page.waited > 0 {
            self.came_back(page.no, page.from);
        }
        page.tier.keeps_copies()
    }

    fn next_move(&mut self, ask: Ask<'_>, tiers: &[TierState]) -> Option<Migration> {
        let Ask::Group(_, out) = ask else {
            return self.relieves(tiers);
        };
        let buffer = buffer(tiers)?;
        let next = self.lift(buffer, tiers);
        let (of, from, to) = next.or_else(|| self.destage(buffer, tiers))?;
        self.list(of, out);
        let pages = PageCount(u64::from(self.groups[of as usize].pages));
        Some(Migration { from, to, pages })
    }

    fn shown(&self, _: usize) -> Shown {
        Shown {
            moves_groups: true,
            ..Shown::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::{Bytes, Nanos};

    const MIB: u64 = 1 << 20;

    fn tier(latency: LatencyClass, held: u64) -> TierState {
        TierState {
            capacity: Bytes(64 * MIB),
            held: Bytes(held),
            packed: Bytes(held),
            demotes: latency == LatencyClass::Nvm,
            ..TierState::empty(latency)
        }
    }

    /// A buffer that holds so much, over an SSD.
    fn two(held: u64) -> [TierState; 2] {
        [tier(LatencyClass::Nvm, held), tier(LatencyClass::Device, 0)]
    }

    /// Short of room, by a byte.
    const SHORT: u64 = 56 * MIB + 1;

    fn leave(of: &mut LatencyGroup, pages: impl IntoIterator<Item = u32>) {
        for no in pages {
            let order = of.order(PageNo(no), &two(0));
            assert_eq!(order.get(0), Some(TierId(0)), "the buffer comes first");
        }
    }

    /// The next move: from, to, and the pages.
    fn next(of: &mut LatencyGroup, tiers: &[TierState]) -> Option<(u8, u8, Vec<u32>)> {
        let mut pages = Vec::new();
        let Migration { from, to, .. } = of.next_move(Ask::Group(Nanos(0), &mut pages), tiers)?;
        Some((from.0, to.0, pages.iter().map(|no| no.0).collect()))
    }

    /// Page 7 leaves again, so it is of the second group. The third is not full.
    #[test]
    fn full_groups_go_down_in_the_order_of_eviction_when_the_buffer_is_short() {
        let mut of = LatencyGroup::default();
        leave(
            &mut of,
            (0..64).rev().chain([7]).chain(100..163).chain(200..210),
        );
        assert_eq!(next(&mut of, &two(SHORT - 1)), None, "an eighth is free");
        let first = (0..64).rev().filter(|no| *no != 7).collect();
        assert_eq!(next(&mut of, &two(SHORT)), Some((0, 1, first)));
        let second = std::iter::once(7).chain(100..163).collect();
        assert_eq!(next(&mut of, &two(SHORT)), Some((0, 1, second)));
        assert_eq!(next(&mut of, &two(SHORT)), None, "the third is open");
        leave(&mut of, 210..264);
        let third = (200..264).collect();
        assert_eq!(next(&mut of, &two(SHORT)), Some((0, 1, third)));
    }

    #[test]
    fn a_fault_in_the_regular_zone_has_its_group_move_up_once_and_go_down_last() {
        let mut of = LatencyGroup::default();
        leave(&mut of, 0..192);
        let groups: Vec<Vec<u32>> = (0..3).map(|at| (64 * at..64 * at + 64).collect()).collect();
        assert_eq!(next(&mut of, &two(SHORT)), Some((0, 1, groups[0].clone())));
        for no in [3, 3, 40] {
            of.came_back(PageNo(no), TierId(1));
        }
        of.came_back(PageNo(70), TierId(0));
        assert_eq!(next(&mut of, &two(0)), Some((1, 0, groups[0].clone())));
        assert_eq!(next(&mut of, &two(0)), None, "page 70 was in the buffer");
        for at in [1, 2, 0] {
            let expected = Some((0, 1, groups[at].clone()));
            assert_eq!(next(&mut of, &two(SHORT)), expected);
        }
    }

    /// A group that waits for its turn moves up, and then its turn is a new one.
    #[test]
    fn a_lift_gives_a_waiting_group_a_new_turn() {
        let mut of = LatencyGroup::default();
        leave(&mut of, 0..128);
        of.came_back(PageNo(5), TierId(1));
        assert_eq!(next(&mut of, &two(0)).map(|it| it.2[0]), Some(0));
        assert_eq!(next(&mut of, &two(SHORT)).map(|it| it.2[0]), Some(64));
        assert_eq!(next(&mut of, &two(SHORT)).map(|it| it.2[0]), Some(0));
        assert_eq!(next(&mut of, &two(SHORT)), None);
    }

    #[test]
    fn nothing_moves_to_where_no_room_is() {
        let full = 64 * MIB - 63 * 4096;
        let mut of = LatencyGroup::default();
        leave(&mut of, 0..64);
        let below = [two(SHORT)[0], tier(LatencyClass::Device, full)];
        assert_eq!(next(&mut of, &below), None, "the group goes on waiting");
        let last = [below[0], below[1], tier(LatencyClass::Device, 0)];
        assert_eq!(next(&mut of, &last).map(|it| (it.0, it.1)), Some((0, 2)));
        for held in [60 * MIB + 1, full] {
            of.came_back(PageNo(1), TierId(1));
            assert_eq!(next(&mut of, &two(held)), None, "page-outs need the room");
        }
        let closed = TierState {
            demotes: false,
            capacity: Bytes(0),
            ..two(0)[0]
        };
        of.came_back(PageNo(1), TierId(1));
        assert_eq!(next(&mut of, &[closed, two(0)[1]]), None);
    }

    /// The pool is not below DRAM, and a device alone has no buffer.
    #[test]
    fn the_buffer_is_the_fastest_tier_below_memory_that_has_another_below_it() {
        let pool = tier(LatencyClass::Memory, 0);
        let mut of = LatencyGroup::default();
        leave(&mut of, 0..64);
        of.came_back(PageNo(1), TierId(2));
        let three = [pool, two(0)[0], two(0)[1]];
        assert_eq!(next(&mut of, &three).map(|it| (it.0, it.1)), Some((2, 1)));
        of.came_back(PageNo(1), TierId(1));
        assert_eq!(next(&mut of, &[pool, two(0)[1]]), None);
        let mut alone = LatencyGroup::default();
        alone.order(PageNo(0), &[pool, two(0)[1]]);
        assert!(alone.pages.is_empty(), "nothing is noted");
    }

    /// Pages that left without a new copy since are in no waiting group: `waterfall` moves them.
    #[test]
    fn a_full_buffer_waits_for_its_groups_and_follows_waterfall_without_them() {
        let full = two(64 * MIB);
        let mut of = LatencyGroup::default();
        assert!(of.relieves(&full).is_some());
        leave(&mut of, 0..64);
        assert_eq!(of.relieves(&full), None);
        assert!(next(&mut of, &full).is_some());
        assert!(of.relieves(&full).is_some());
    }

    /// Any pages leave and come back: each is in one group at most, in order, and what is kept is
    /// bounded by the pages.
    #[test]
    fn groups_hold_each_page_once_and_are_used_again() {
        let mut random = undercroft_seeded::Random::new(34);
        let mut of = LatencyGroup::default();
        for _ in 0..20_000 {
            let no = random.below(500) as u32;
            match random.below(4) {
                0 => of.came_back(PageNo(no), TierId(random.below(2) as u8)),
                1 => _ = next(&mut of, &two(random.below(64) * MIB)),
                _ => leave(&mut of, [no]),
            }
        }
        let mut seen = Vec::new();
        for group in 0..of.groups.len() as u32 {
            let from = seen.len();
            of.list(group, &mut seen);
            let of_it = |no: &PageNo| of.pages[no.0 as usize].group == group;
            assert!(seen[from..].iter().all(of_it));
            assert!(seen.len() - from <= GROUP_PAGES as usize);
        }
        let total = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!((total, seen.len()), (500, 500));
        assert!(of.groups.len() <= 500 + LIFTS_MAX, "{}", of.groups.len());
        assert!(of.waiting.len() <= 2 * of.groups.len() + LIFTS_MAX);
        assert!(of.lifts.len() <= LIFTS_MAX);
    }
}
