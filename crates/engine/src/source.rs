//! Memory of several spaces that begins as the same file: the machines of one snapshot. What one of
//! them has needed, the others need, too.
//!
//! A page of the file is known once a thread of some space waited for it. A fault on a known page
//! brings known pages along, in the order in which they became known. Each is brought to a space
//! once. About a page that was not known, the prefetch policy is asked.
//! Source: REAP (ASPLOS 2021). Differs: there, the pages of the first machine are written down, and
//! come before a later machine starts. Here the list grows while machines run.

use std::collections::BTreeMap;

use undercroft_base::{PageNo, PageState, SpaceId, TierId, VirtPage};

use crate::ledger::Ledger;
use crate::limits::{KNOWN_LOOKS, KNOWN_MAX, KNOWN_REGIONS};
use crate::{Engine, Fault, LoadPlan};

/// The pages of the file, and which of them are known.
pub(crate) struct Source {
    tier: TierId,
    pages: u64,
    /// A bit a page: it is in `order`.
    known: Vec<u64>,
    /// The known pages, in the order of their first fault.
    order: Vec<u32>,
    /// How many of `order` were looked at for a region of a space, which the region's start names.
    looked_at: BTreeMap<(SpaceId, VirtPage), usize>,
}

impl Source {
    /// A file of `pages` pages, whose copies are in `tier`: slot `n` is page `n` modulo `pages`.
    pub(crate) fn new(tier: TierId, pages: u64) -> Source {
        Source {
            tier,
            pages: pages.max(1),
            known: vec![0; pages.div_ceil(u64::BITS.into()) as usize],
            order: Vec::with_capacity(pages.min(KNOWN_MAX) as usize),
            looked_at: BTreeMap::new(),
        }
    }

    /// Notes a page that a thread waits for. Whether it was known.
    fn note(&mut self, page: u64) -> bool {
        let at = (page / u64::from(u64::BITS)) as usize;
        let bit = 1 << (page % u64::from(u64::BITS));
        let was = self.known[at] & bit != 0;
        if let Ok(number) = u32::try_from(page)
            && !was
            && self.order.len() < self.order.capacity()
        {
            self.known[at] |= bit;
            self.order.push(number);
        }
        was
    }

    /// The space has ended.
    pub(crate) fn forget(&mut self, space: SpaceId) {
        let (first, last) = ((space, VirtPage(0)), (space, VirtPage(u64::MAX)));
        while let Some((place, _)) = self.looked_at.range(first..=last).next() {
            let place = *place;
            self.looked_at.remove(&place);
        }
    }
}

impl<L: Ledger> Engine<L> {
    /// Notes the page of `fault`, the only one in `plan` yet. If it was known, adds known pages of
    /// its region that were not looked at yet, as many as leave a quarter of the room free. False
    /// if it was not, or is none of the file's.
    ///
    /// * `no`: the page.
    ///
    /// Cost: O(`KNOWN_LOOKS`), and one look into a tree.
    #[inline(never)]
    pub(crate) fn plan_known(&mut self, plan: &mut LoadPlan, fault: Fault, no: PageNo) -> bool {
        let Some(mut source) = self.source.take() else {
            return false;
        };
        let (tier, slot) = (plan.items[0].tier, plan.items[0].slot.0);
        let known = tier == source.tier && source.note(slot % source.pages);
        if known && self.prefetch.is_some() {
            self.plan_of(&mut source, plan, fault, slot, no);
        }
        self.source = Some(source);
        known
    }

    fn plan_of(
        &mut self,
        source: &mut Source,
        plan: &mut LoadPlan,
        fault: Fault,
        slot: u64,
        no: PageNo,
    ) {
        let mut most = self.along_max(no);
        let region = self.table.region_around(fault.space, fault.page);
        let place = (fault.space, region.start);
        let (first, last) = (VirtPage(0), VirtPage(u64::MAX));
        let regions = (source.looked_at).range((fault.space, first)..=(fault.space, last));
        if regions.count() >= KNOWN_REGIONS && !source.looked_at.contains_key(&place) {
            return;
        }
        let looked_at = source.looked_at.entry(place).or_default();
        for _ in 0..KNOWN_LOOKS {
            let Some(known) = source.order.get(*looked_at).filter(|_| most > 0) else {
                break;
            };
            *looked_at += 1;
            let away = i64::from(*known) - (slot % source.pages) as i64;
            let Some(page) = fault.page.0.checked_add_signed(away).map(VirtPage) else {
                continue;
            };
            let Some(no) = self.table.find(fault.space, page) else {
                continue;
            };
            let entry = self.table.entry(no);
            let is_it = slot.checked_add_signed(away) == Some(entry.slot.0);
            let of_file = entry.tier == source.tier && is_it && region.contains(page);
            if entry.state == PageState::Stored && of_file {
                most -= 1;
                self.plan_page(plan, no, page, entry, false);
            }
        }
        plan.items.sort_unstable_by_key(|item| item.page);
    }
}
