//! Writes: each page goes to two masters at once, all pages of a batch together. A copy whose
//! master does not take it goes to another master.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use redis::cmd;
use undercroft_base::{BASE_PAGE_BYTES, FailKind, Slot, Store, StoreError};

use super::Shared;
use super::net::{Answer, Gather, Role};
use super::table::{Copies, SlotInUse};
use super::value;

/// Pages that are written together.
const BATCH_PAGES: usize = 64;

/// Longest wait for the answers of a batch. A master that did not answer by then is passed over.
const WAIT: Duration = Duration::from_millis(250);

/// From this time on, one copy of each page is enough to go on: the other copies go elsewhere.
const SOON: Duration = Duration::from_millis(30);

/// How often a copy is tried.
const ROUNDS: u32 = 3;

/// Bytes that the cluster keeps of a key and its value besides their own, about.
const KEY_BYTES: u64 = 128;

/// After a batch of which a page has no copy, `store` answers `Full` at once for this long. Doubled
/// with each further failure.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// While `store` refuses at once: until when, and how many failures in a row there were.
pub(super) type Pause = Option<(Instant, u32)>;

/// Bytes that a value takes in the cluster, both copies counted.
pub(super) fn cost(value_bytes: u32) -> u64 {
    2 * (u64::from(value_bytes) + KEY_BYTES)
}

/// A page that is being written.
struct Item {
    slot: u64,
    number: u64,
    value: Vec<u8>,
    /// Tags of the copies that are stored.
    stored: Vec<u16>,
    full: bool,
}

/// A write that was sent.
struct Sent {
    item: usize,
    tag: u16,
}

/// Stores a batch. See `Tier::store`.
pub(super) fn store(shared: &Shared, batch: &mut [Store<'_>]) {
    let open = shared.open.read().unwrap_or_else(PoisonError::into_inner);
    for part in batch.chunks_mut(BATCH_PAGES) {
        for store in part.iter_mut() {
            assert_eq!(
                store.page.len(),
                BASE_PAGE_BYTES,
                "a page to store is not one"
            );
            store.result = Err(StoreError::Full);
        }
        let paused = *shared.pause();
        if !*open || paused.is_some_and(|(until, _)| Instant::now() < until) {
            continue;
        }
        let mut items = begin(shared, part);
        write(shared, &mut items);
        finish(shared, part, items);
    }
}

/// Takes room, a slot and a number for as many pages as possible.
fn begin(shared: &Shared, part: &[Store<'_>]) -> Vec<Item> {
    let capacity = shared.info.capacity.0;
    let mut slots = Vec::with_capacity(part.len());
    shared.table.take(part.len(), &mut slots);
    let mut items = Vec::with_capacity(slots.len());
    for (store, slot) in part.iter().zip(&slots) {
        let value = value::encode(store.page, store.stamp);
        let more = cost(value.len() as u32);
        let fits = |held: u64| (held + more <= capacity).then_some(held + more);
        let taken = shared.held.fetch_update(Relaxed, Relaxed, fits);
        let (Ok(_), Some(number)) = (taken, shared.table.number()) else {
            break;
        };
        items.push(Item {
            slot: *slot,
            number,
            value,
            stored: Vec::with_capacity(2),
            full: false,
        });
    }
    shared.table.give_back(slots[items.len()..].iter().copied());
    items
}

/// Writes until each item has two copies, or no master takes more.
fn write(shared: &Shared, items: &mut [Item]) {
    let mut failed = Vec::new();
    for _ in 0..ROUNDS {
        let map = shared.net.map();
        let (mut sent, mut requests) = (Vec::new(), Vec::new());
        for (at, item) in items.iter().enumerate() {
            let stored = item.stored.iter();
            let mut copies: Vec<usize> = stored.filter_map(|tag| map.master_of(*tag)).collect();
            for _ in item.stored.len()..2 {
                let Some(tag) = shared.net.pick(&map, &failed, &copies) else {
                    break;
                };
                copies.extend(map.master_of(tag));
                let key = shared.keys.copy(tag, item.number);
                let set = cmd("SET")
                    .arg(key)
                    .arg(&item.value[..])
                    .get_packed_command();
                requests.push((tag, set));
                sent.push(Sent { item: at, tag });
            }
        }
        if sent.is_empty() {
            return;
        }
        let gather = Gather::send(&shared.net, Role::Write, requests);
        let now = Instant::now();
        let one_each = |answers: &[Answer]| {
            let mut has: Vec<bool> = items.iter().map(|it| !it.stored.is_empty()).collect();
            for (answer, sent) in answers.iter().zip(&sent) {
                has[sent.item] |= answer.is_ok();
            }
            has.into_iter().all(|has| has)
        };
        let answers = gather.wait(now + SOON, now + WAIT, one_each);
        for (answer, Sent { item, tag }) in answers.into_iter().zip(sent) {
            if answer.is_ok() {
                items[item].stored.push(tag);
                continue;
            }
            items[item].full |= answer.is_full();
            // It may have been written, or be written later.
            shared.chores.unlink(tag, items[item].number);
            if let Some(master) = map.master_of(tag).filter(|at| !failed.contains(at)) {
                failed.push(master);
            }
        }
        if items.iter().all(|item| item.stored.len() == 2) {
            return;
        }
    }
}

/// Fills the rows and the results. Pages without a copy give back what they took.
fn finish(shared: &Shared, part: &mut [Store<'_>], items: Vec<Item>) {
    let mut failure = None;
    for (store, item) in part.iter_mut().zip(items) {
        let bytes = item.value.len() as u32;
        let tags = match item.stored[..] {
            [first, second, ..] => [first, second],
            [only] => [only, only],
            [] => {
                let kind = if item.full {
                    FailKind::NoSpace
                } else {
                    FailKind::Io
                };
                store.result = Err(StoreError::Failed(kind));
                failure = Some(kind);
                shared.held.fetch_sub(cost(bytes), Relaxed);
                shared.table.give_back([item.slot].into_iter());
                continue;
            }
        };
        let place = Copies {
            number: item.number,
            tags,
        };
        shared.table.set(
            item.slot,
            &SlotInUse {
                checksum: store.checksum,
                place,
                stamp: store.stamp,
                bytes,
            },
        );
        shared.logical.fetch_add(BASE_PAGE_BYTES as u64, Relaxed);
        shared.stored.fetch_add(u64::from(bytes), Relaxed);
        if place.is_single() {
            shared.counters.single.fetch_add(1, Relaxed);
            shared.chores.mend(item.slot);
        }
        store.result = Ok(Slot(item.slot));
    }
    let mut pause = shared.pause();
    let times = pause.map_or(0, |(_, times)| times);
    *pause = failure.map(|_| {
        let length = PAUSE_FIRST.saturating_mul(1 << times.min(10));
        (Instant::now() + length.min(PAUSE_MAX), times + 1)
    });
}

/// Frees slots. See `Tier::free`.
pub(super) fn free(shared: &Shared, slots: &[Slot]) {
    for slot in slots {
        let row = shared.table.empty(slot.0);
        let row = row.unwrap_or_else(|| panic!("{slot:?} is free already"));
        shared.held.fetch_sub(cost(row.bytes), Relaxed);
        shared.logical.fetch_sub(BASE_PAGE_BYTES as u64, Relaxed);
        shared.stored.fetch_sub(u64::from(row.bytes), Relaxed);
        shared.chores.unlink_both(row.place);
        if row.place.is_single() {
            shared.counters.single.fetch_sub(1, Relaxed);
        }
    }
    shared.table.give_back(slots.iter().map(|slot| slot.0));
}
