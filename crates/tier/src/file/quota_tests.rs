//! Tests of the file tier with a quota.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::tests::{directory, pages, stored, subject};
use super::*;
use crate::contract::{self, Page, Pages, store_all};

/// What the file system may count besides, for its own books.
const BOOKS: u64 = 64 << 10;

/// Space that the file has.
fn space(tier: &FileTier) -> u64 {
    let blocks = tier.backing().file().metadata().unwrap().blocks();
    (blocks * 512).saturating_sub(BOOKS)
}

/// A file of 64 MiB of which `quota` may be used, and what changes that.
fn with_quota(directory: &Path, quota: u64) -> (FileTier, Room) {
    let backing = Backing::open(directory, Some(Bytes(64 << 20))).unwrap();
    let table = FileTier::table_bytes(backing.bytes());
    let table = SharedMemory::create("test-slots", table).unwrap();
    let room = Room::over(table.as_fd(), backing.bytes()).unwrap();
    room.begin(Bytes(quota * SLAB_BYTES));
    (FileTier::new(backing, table).unwrap(), room)
}

#[test]
fn file_passes_the_tier_contract_within_a_quota() {
    let directory = directory();
    let (tier, _room) = with_quota(directory.path(), 24);
    assert_eq!(tier.capacity(), Bytes(24 << 20));
    contract::check(&subject(&tier, &|| tier.trim()), 51);
    contract::fills_and_recovers(&subject(&tier, &|| tier.trim()), 52, 25 * 256);
}

/// It rings once at each mark, before it is full, and again once its keeper has looked.
#[test]
fn file_rings_when_half_of_what_is_left_is_full() {
    use rustix::event::{EventfdFlags, eventfd};
    let directory = directory();
    let (tier, room) = with_quota(directory.path(), 8);
    let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let tier = tier.with_bell(Some(bell.try_clone().unwrap()));
    let rung = || {
        let mut count = [0; 8];
        rustix::io::read(&bell, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    let mut random = Pages::new(57);
    let mut store = |count| stored(&tier, &pages(&mut random, count)).len();
    store(4 * 256 - 1);
    assert_eq!(rung(), 0);
    store(1);
    assert_eq!(rung(), 1);
    store(3 * 256);
    assert_eq!(rung(), 0, "its keeper has not looked");
    room.read();
    store(127);
    assert_eq!(rung(), 0);
    store(1);
    assert_eq!(rung(), 1, "an eighth was left, and half of it is full");
    room.set(Bytes(32 << 20));
    store(12 * 256);
    assert_eq!(rung(), 0);
    store(64);
    assert_eq!(rung(), 1);
}

#[test]
fn file_that_was_closed_has_no_quota_and_gets_none() {
    let directory = directory();
    let (tier, room) = with_quota(directory.path(), 3);
    let slots = stored(&tier, &pages(&mut Pages::new(53), 300));
    let taken = room.read();
    assert_eq!((taken.quota, taken.held), (Bytes(3 << 20), Bytes(2 << 20)));
    assert_eq!(taken.used, Bytes(300 * 4096));
    tier.free(&slots);
    tier.close();
    assert_eq!(room.set(Bytes(5 << 20)), Taken::default());
    assert_eq!(room.read(), Taken::default());
}

/// One thread stores, loads and frees, and another raises and lowers the quota. The space that the
/// file has is never more than the answer allows, and every byte is right.
#[test]
fn file_keeps_to_a_quota_that_another_thread_moves() {
    use std::sync::atomic::AtomicBool;
    let directory = directory();
    let (tier, room) = with_quota(directory.path(), 8);
    let (done, mut random) = (AtomicBool::new(false), Pages::new(54));
    std::thread::scope(|scope| {
        let keeper = scope.spawn(|| {
            let mut random = Pages::new(55);
            let (mut looks, mut over, mut most) = (0, 0, 0);
            while !done.load(Relaxed) {
                let taken = room.set(Bytes((1 + random.below(40)) * SLAB_BYTES));
                let bound = taken.quota.max(taken.held);
                over += u64::from(taken.held > taken.quota);
                for _ in 0..random.below(400) {
                    let (space, held) = (space(&tier), room.read().held);
                    assert!(
                        space <= bound.0 && held <= bound,
                        "{space}, {held:?}, {taken:?}"
                    );
                    most = most.max(held.0);
                    looks += 1;
                }
            }
            println!("{looks} looks, {over} quotas below what was held, at most {most} B");
            assert!(looks > 1000 && over > 10 && most > 16 * SLAB_BYTES);
        });
        let mut live: Vec<(Slot, Page, Stamp)> = Vec::new();
        let idle_work = || ();
        let subject = subject(&tier, &idle_work);
        for round in 0..1500 {
            let some = pages(&mut random, 1 + random_count(round));
            for (result, (page, stamp)) in store_all(&tier, &some).into_iter().zip(some) {
                live.extend(result.ok().map(|slot| (slot, page, stamp)));
            }
            for _ in 0..random.below(90).min(live.len() as u64) {
                let (slot, page, stamp) =
                    live.swap_remove(random.below(live.len() as u64) as usize);
                assert!(*subject.load(slot, stamp).unwrap() == page, "round {round}");
                tier.free(&[slot]);
            }
            if round % 5 == 0 {
                tier.tidy();
            }
        }
        for (slot, page, stamp) in &live {
            assert!(*subject.load(*slot, *stamp).unwrap() == *page, "at the end");
        }
        done.store(true, Relaxed);
        keeper.join().unwrap();
        // What is free goes back as soon as the quota is low.
        live.drain(..).for_each(|(slot, ..)| tier.free(&[slot]));
        room.set(Bytes(SLAB_BYTES));
        for _ in 0..8 {
            tier.tidy();
        }
        assert_eq!(room.read().used, Bytes(0));
        assert!(space(&tier) <= SLAB_BYTES, "{} B", space(&tier));
    });
}

/// Batches of 1 to 160 pages.
fn random_count(round: usize) -> usize {
    round * 7919 % 160
}

/// A manager dies between any two steps. The next one knows what space there is, and the quota that
/// was set meanwhile holds.
#[test]
fn file_is_recovered_with_its_quota_and_all_its_space() {
    let directory = directory();
    let (mut tier, room) = with_quota(directory.path(), 30);
    let mut random = Pages::new(56);
    let mut live: Vec<(Slot, Page, Stamp)> = Vec::new();
    for round in 0..30 {
        let some = pages(&mut random, 200 + random_count(round));
        for (result, (page, stamp)) in store_all(&tier, &some).into_iter().zip(some) {
            live.extend(result.ok().map(|slot| (slot, page, stamp)));
        }
        let keep = live.len() - random.below(live.len() as u64 / 2) as usize;
        live.split_off(keep)
            .iter()
            .for_each(|(slot, ..)| tier.free(&[*slot]));
        if round % 3 == 0 {
            tier.tidy();
        }
        let before = room.read();
        let FileTier { backing, table, .. } = tier;
        let taken = room.set(Bytes((10 + random.below(40)) * SLAB_BYTES));
        assert_eq!(taken.held, before.held, "nothing changes without a manager");
        let fd = backing.file().try_clone().unwrap().into();
        let backing = Backing::inherit(fd, backing.name().to_owned(), backing.bytes()).unwrap();
        tier = FileTier::recover(backing, table).unwrap();
        let space = space(&tier);
        let now = room.read();
        assert_eq!(
            (now.quota, now.held, now.used),
            (taken.quota, taken.held, before.used)
        );
        assert!(space <= now.held.0, "{space} B of {now:?}");
        assert_eq!(tier.capacity(), taken.quota);
        let idle_work = || ();
        let subject = subject(&tier, &idle_work);
        for (slot, page, stamp) in &live {
            assert!(
                *subject.load(*slot, *stamp).unwrap() == *page,
                "round {round}"
            );
        }
    }
}
