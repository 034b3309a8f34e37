//! Stores the pages of a group in the tiers that they are offered to. Step 3 of 4 of an eviction.

use std::sync::atomic::Ordering;

use undercroft_base::{PageSize, Slot, Store, StoreError, TierId, fill_word};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{EvictItem, Outcome};
use undercroft_policy::place::TierOrder;
use undercroft_sys::mapping::PageBuf;

use super::Evictor;
use super::compressors::Compressors;
use super::publish::Turn;
use super::wayout::places;
use crate::books::{Books, page_of};

/// Pages that one thread compresses at a time; they are published when every thread is done. Bounds
/// how long a page that is touched meanwhile waits.
const COMPRESS_PAGES: usize = 8;

/// Pages that are written and published at a time if the first tier is a device: one write of all
/// takes little longer than a write of one page.
const WRITE_PAGES: usize = EVICT_PAGES_MAX;

const _: () = assert!(COMPRESS_PAGES <= EVICT_PAGES_MAX && WRITE_PAGES <= EVICT_PAGES_MAX);

/// Fate of a page that was taken out.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// A tier is to take it. If none does, it is put back.
    ToStore,
    /// This outcome is to be published.
    Is(Outcome),
}

/// The fates of pages that were offered to the tiers.
#[derive(Clone, Copy, Debug, Default)]
struct Offered {
    /// Pages that no tier took.
    left: u64,
    /// A page did not compress.
    unfit: bool,
}

/// A turn of a group, as the threads that store it see it.
struct Storing<'a> {
    books: &'a Books,
    helpers: &'a Compressors,
    group: &'a [EvictItem],
    buffer: &'a PageBuf,
    orders: &'a [TierOrder; EVICT_PAGES_MAX],
    alive: u64,
    kept: u64,
    /// The tier whose copies are not used.
    behind: Option<TierId>,
    /// Pages that are stored at a time by one thread.
    at_a_time: usize,
}

impl Evictor {
    /// Pages that are stored at a time if `first` is tried first.
    pub(super) fn store_pages(&self, first: Option<TierId>) -> usize {
        if self.is_compressed(first) {
            (self.helpers.count() * COMPRESS_PAGES).min(EVICT_PAGES_MAX)
        } else {
            WRITE_PAGES
        }
    }

    fn is_compressed(&self, first: Option<TierId>) -> bool {
        first.is_none_or(|tier| self.shared.books.tiers[usize::from(tier.0)].is_memory())
    }

    /// Stores the next pages of the group; they are published later. Returns those that no tier
    /// took.
    ///
    /// * `kept`: pages that are as the copies that tiers keep of them. Their bytes are not there.
    pub(super) fn store(&mut self, group: &[EvictItem], turn: &Turn, kept: u64) -> u64 {
        let pages = turn.next;
        let mut fates = [Fate::ToStore; EVICT_PAGES_MAX];
        let first = places(pages & turn.alive).next();
        let first = first.and_then(|at| self.orders[at].get(0));
        let storing = Storing {
            books: &self.shared.books,
            helpers: &self.helpers,
            group,
            buffer: &self.buffer,
            orders: &self.orders,
            alive: turn.alive,
            kept,
            behind: turn.behind,
            at_a_time: if self.is_compressed(first) {
                COMPRESS_PAGES
            } else {
                WRITE_PAGES
            },
        };
        let offered = storing.store(pages, (0, &mut fates));
        self.unfit |= offered.unfit;
        for at in places(pages) {
            if let Fate::Is(outcome) = fates[at] {
                self.stored.push((group[at].at, outcome));
            }
        }
        offered.left
    }
}

impl Storing<'_> {
    /// Stores `pages`, whose fates begin with that of place `first`.
    fn store(&self, pages: u64, (first, fates): (usize, &mut [Fate])) -> Offered {
        let count = pages.count_ones() as usize;
        let middle = (count > self.at_a_time).then(|| places(pages).nth(count / 2));
        let Some(middle) = middle.flatten() else {
            return self.store_part(pages, (first, fates));
        };
        let (low, high) = fates.split_at_mut(middle - first);
        let upper = pages & u64::MAX << middle;
        let (one, other) = self.helpers.both(
            || self.store(pages & !upper, (first, low)),
            || self.store(upper, (middle, high)),
        );
        Offered {
            left: one.left | other.left,
            unfit: one.unfit | other.unfit,
        }
    }

    /// As [`Storing::store`], on this thread.
    fn store_part(&self, pages: u64, (first, fates): (usize, &mut [Fate])) -> Offered {
        let mut sums = [0u64; EVICT_PAGES_MAX];
        let mut left = pages;
        for at in places(pages) {
            let item = &self.group[at];
            let page = page_of(self.buffer, item.size, at);
            let is_kept = self.kept >> at & 1 == 1;
            fates[at - first] = match self.alive >> at & 1 {
                0 => Fate::Is(Outcome::Fill(0)), // no process will read it
                _ if is_kept => kept_already(self.books, item),
                _ => known_already(self.books, item, page, self.behind),
            };
            match fates[at - first] {
                Fate::ToStore if is_kept => {} // it is put back
                Fate::ToStore => sums[at] = self.books.key.checksum(page, self.group[at].stamp),
                Fate::Is(_) => left &= !(1 << at),
            }
        }
        let tiers = self.books.tiers.len();
        let mut unfit = false;
        for (rank, tier) in (0..tiers).flat_map(|rank| (0..tiers).map(move |tier| (rank, tier))) {
            let id = TierId(tier as u8);
            let offered =
                places(left & !self.kept).filter(|at| self.orders[*at].get(rank) == Some(id));
            let offered = offered.map(|at| 1 << at).sum();
            if offered != 0 {
                let mut part = Part {
                    pages: offered,
                    sums: &sums,
                    first,
                    fates,
                };
                left &= !self.offer(id, &mut part, &mut unfit);
            }
        }
        Offered { left, unfit }
    }

    /// Changes the copies that a tier keeps of the part's pages in place, if it can. Returns which
    /// of them.
    fn update(&self, tier: TierId, part: &mut Part<'_>) -> u64 {
        let (group, pages) = (self.group, part.pages);
        let metered = &self.books.tiers[usize::from(tier.0)];
        let keeps = |at: &usize| group[*at].retained.is_some_and(|(of, ..)| of == tier);
        if !metered.updates_copies() || !places(pages).any(|at| keeps(&at)) {
            return 0;
        }
        let copies: Vec<(usize, Slot)> = {
            let mut engine = self.books.engine();
            let mut evictions = engine.evictions();
            let mut take = |at: usize| evictions.take_retained(group[at].at);
            let owned = places(pages).filter(keeps);
            owned.filter_map(|at| Some((at, take(at)?.1))).collect()
        };
        let mut done = 0;
        for (at, slot) in copies {
            if metered.update(slot, &self.to_store(at, part.sums)) {
                part.is_stored(at, tier, slot);
                done |= 1 << at;
            } else {
                metered.tier.free(&[slot]);
            }
        }
        done
    }

    fn to_store(&self, at: usize, sums: &[u64; EVICT_PAGES_MAX]) -> Store<'_> {
        Store {
            page: page_of(self.buffer, self.group[at].size, at),
            stamp: self.group[at].stamp,
            checksum: sums[at],
            result: Err(StoreError::Full),
        }
    }

    /// Offers the part's pages to a tier. Returns those that it took.
    fn offer(&self, tier: TierId, part: &mut Part<'_>, unfit: &mut bool) -> u64 {
        let mut taken = self.update(tier, part);
        let pages = part.pages & !taken;
        let mut batch: Vec<Store<'_>> = places(pages)
            .map(|at| self.to_store(at, part.sums))
            .collect();
        let metered = &self.books.tiers[usize::from(tier.0)];
        if !batch.is_empty() {
            metered.tier.store(&mut batch);
        }
        for (at, store) in places(pages).zip(&batch) {
            match store.result {
                Ok(slot) => {
                    metered.writes.fetch_add(1, Ordering::Relaxed);
                    part.is_stored(at, tier, slot);
                    taken |= 1 << at;
                }
                Err(StoreError::Failed(_)) => {
                    metered.errors.fetch_add(1, Ordering::Relaxed);
                }
                Err(StoreError::Incompressible) => *unfit = true,
                Err(StoreError::Full) => {}
            }
        }
        taken
    }
}

/// Pages of a turn that one thread offers to a tier.
struct Part<'a> {
    pages: u64,
    /// Checksums, by place in the group.
    sums: &'a [u64; EVICT_PAGES_MAX],
    /// The place of the first of `fates`.
    first: usize,
    fates: &'a mut [Fate],
}

impl Part<'_> {
    fn is_stored(&mut self, at: usize, tier: TierId, slot: Slot) {
        self.fates[at - self.first] = Fate::Is(Outcome::Stored(tier, slot));
    }
}

/// The fate of a page that is as the copy that its tier keeps, and is not read.
fn kept_already(books: &Books, item: &EvictItem) -> Fate {
    let copy = item.retained;
    let has = |(tier, slot, stamp): (TierId, Slot, _)| {
        let tier = &books.tiers[usize::from(tier.0)].tier;
        tier.checksum(slot, stamp).is_some()
    };
    if copy.is_some_and(has) {
        Fate::Is(Outcome::Clean)
    } else {
        Fate::ToStore
    }
}

/// The fate of a page that may need no new copy: its bytes are one word repeated, or equal to the
/// retained copy.
/// * `behind`: the tier whose copies are not used.
fn known_already(books: &Books, item: &EvictItem, bytes: &[u8], behind: Option<TierId>) -> Fate {
    if let Some(word) = fill_word(bytes) {
        return Fate::Is(Outcome::Fill(word));
    }
    // A large page whose bytes may be equal was not read: see `kept_already`.
    if item.size == PageSize::Base
        && let Some((tier, copy, stamp)) = item.retained
        && behind != Some(tier)
    {
        let kept = books.tiers[tier.0 as usize].tier.checksum(copy, stamp);
        if kept == Some(books.key.checksum(bytes, stamp)) {
            return Fate::Is(Outcome::Clean);
        }
    }
    Fate::ToStore
}

#[cfg(test)]
mod tests {
    use undercroft_base::{BASE_PAGE_BYTES, Stamp, VirtPage, VirtRange};
    use undercroft_model::contract::Pages;

    use super::super::wayout::all_of;
    use super::*;
    use crate::fault::model_tests::{options, shared};

    /// A page by two words of XXH3's default secret: those of lane 0 in its first two stripes.
    fn crafted(stamp: u64, even: u64, odd: u64) -> Vec<u8> {
        let mut page = vec![0x5a; BASE_PAGE_BYTES];
        let low = [
            0xbe4b_a423_396c_feb8_u64.wrapping_add(stamp),
            0x1cad_21f7_2c81_017c - stamp,
        ];
        for (at, (high, low)) in [even, odd].into_iter().zip(low).enumerate() {
            let word = high << 32 | low & 0xffff_ffff;
            page[64 * at..64 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        page
    }

    /// Adds a space of 200 pages, all in memory, and chooses up to `most` of them to leave.
    fn chosen(books: &Books, most: usize) -> Vec<EvictItem> {
        let mut items = Vec::new();
        let mut engine = books.engine();
        let space = engine.layout().add_space();
        let range = VirtRange::new(VirtPage(0), VirtPage(200));
        engine.layout().attached(space, range);
        engine.discovery().found_resident(space, range);
        assert!(engine.evictions().select(most, &mut items));
        items
    }

    #[test]
    fn a_page_crafted_to_look_unchanged_is_stored() {
        let evictor = Evictor::new(shared(options("ram"))).expect("an evictor");
        let books = &evictor.shared.books;
        let items = chosen(books, 1);
        for stamp in [0, 1, 300] {
            let [before, after] =
                [(1000, 2000), (1001, 1999)].map(|(even, odd)| crafted(stamp, even, odd));
            let stamp = Stamp(stamp as u16);
            let mut batch = [Store {
                page: &before,
                stamp,
                checksum: books.key.checksum(&before, stamp),
                result: Err(StoreError::Full),
            }];
            books.tiers[0].tier.store(&mut batch);
            let slot = batch[0].result.expect("room for a page");
            let item = EvictItem {
                stamp,
                retained: Some((TierId(0), slot, stamp)),
                ..items[0]
            };
            let fate = |page: &[u8]| known_already(books, &item, page, None);
            assert!(
                matches!(fate(&before), Fate::Is(Outcome::Clean)),
                "unchanged"
            );
            assert!(matches!(fate(&after), Fate::ToStore), "the write is lost");
        }
    }

    /// Pages of all kinds, stored by several threads: each has the fate that it has alone, and its
    /// bytes are in the tier.
    #[test]
    fn pages_that_several_threads_store_have_their_own_bytes() {
        let mut evictor = Evictor::new(shared(options("ram"))).expect("an evictor");
        evictor.helpers = Compressors::start(Some(4));
        assert_eq!(evictor.helpers.count(), 4);
        let shared = evictor.shared.clone();
        let books = &shared.books;
        let mut random = Pages::new(7);
        for round in 0..50 {
            let items = chosen(books, EVICT_PAGES_MAX);
            let pages: Vec<_> = items.iter().map(|_| random.mixed()).collect();
            for (at, page) in pages.iter().enumerate() {
                evictor.buffer[at * BASE_PAGE_BYTES..][..BASE_PAGE_BYTES].copy_from_slice(page);
            }
            let dropped = 1 << (round % EVICT_PAGES_MAX);
            let turn = Turn {
                back: 0,
                next: all_of(&items),
                alive: !dropped,
                had: 0,
                behind: None,
            };
            evictor.orders.fill(TierOrder::downwards(1));
            let left = evictor.store(&items, &turn, 0);
            assert_eq!(
                evictor.stored.len() + left.count_ones() as usize,
                items.len()
            );
            let stored = std::mem::take(&mut evictor.stored);
            for (index, outcome) in &stored {
                let at = items.iter().position(|item| item.at == *index);
                let at = at.expect("an item of the group");
                match outcome {
                    Outcome::Fill(0) if dropped >> at & 1 == 1 => {}
                    Outcome::Fill(word) => assert_eq!(fill_word(&pages[at]), Some(*word)),
                    Outcome::Stored(tier, slot) => {
                        let mut bytes = vec![0; BASE_PAGE_BYTES];
                        let tier = &books.tiers[usize::from(tier.0)].tier;
                        let loaded = tier.load(*slot, items[at].stamp, &mut bytes);
                        assert!(loaded.is_ok() && bytes == pages[at], "page {at}");
                        tier.free(&[*slot]);
                    }
                    other => panic!("page {at}: {other:?}"),
                }
            }
            for at in places(left) {
                assert!(
                    fill_word(&pages[at]).is_none(),
                    "page {at} is kept in its entry"
                );
            }
            let mut wakes = Vec::new();
            let mut engine = books.engine();
            for item in &items {
                engine
                    .evictions()
                    .publish(item.at, Outcome::Lost, &mut wakes);
            }
        }
    }
}
