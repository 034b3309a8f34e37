//! Tests of the file tier with a quota.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::tests::{directory, pages, stored, subject};
use super::*;
use undercroft_model::contract::{self, Page, Pages, store_all};

/// Bytes that the file system may count besides, for its own books.
const BOOKS: u64 = 64 << 10;

/// Space that the file has.
fn space(tier: &FileTier) -> u64 {
    let blocks = tier.backing().file().metadata().unwrap().blocks();
    (blocks * 512).saturating_sub(BOOKS)
}

/// Pages of a program become fewer and change at random. Those that lie scattered are stored again,
/// as `uc-migrate` does. The file has no more space than it should, and every byte is right.
#[test]
fn file_gives_space_back_when_what_is_left_is_stored_together() {
    let directory = directory();
    let backing = Backing::open(directory.path(), Some(Bytes(1 << 30))).unwrap();
    let table = FileTier::table_bytes(&backing);
    let table = SharedMemory::create("test-slots", table).unwrap();
    let tier = FileTier::new(backing, table, &undercroft_base::PageKey::KNOWN)
        .unwrap()
        .write_behind(256);
    let idle_work = || ();
    let subject = subject(&tier, &idle_work);
    let mut random = Pages::new(61);
    let mut live: Vec<(Slot, Page, Stamp)> = Vec::new();
    let (mut passes, mut moved) = (0, 0);
    for (round, keep) in [40_000, 9_000, 1_500, 20_000, 3_000, 0]
        .into_iter()
        .enumerate()
    {
        while live.len() < keep {
            let some = pages(&mut random, 200);
            let slots = stored(&tier, &some).into_iter().zip(some);
            live.extend(slots.map(|(slot, (page, stamp))| (slot, page, stamp)));
        }
        while live.len() > keep {
            let at = random.below(live.len() as u64) as usize;
            let (slot, ..) = live.swap_remove(at);
            tier.free(&[slot]);
        }
        for _ in 0..400 {
            tier.tidy();
            let ranges = tier.scattered();
            passes += u32::from(!ranges.is_empty());
            for (slot, page, stamp) in &mut live {
                // Some stay: they are on their way into memory.
                if ranges.iter().any(|of| of.contains(slot)) && random.below(20) != 0 {
                    let new = stored(&tier, &[(*page, *stamp)])[0];
                    tier.free(&[std::mem::replace(slot, new)]);
                    moved += 1;
                }
            }
            tier.gathered();
        }
        let (has, should) = (
            space(&tier),
            space_max(tier.usage().logical, PageSize::Base).0,
        );
        println!(
            "round {round}: {keep} pages, {} MiB of {} MiB",
            has >> 20,
            should >> 20
        );
        assert!(has <= should, "round {round}: {has} B of {should} B");
        for (slot, page, stamp) in &live {
            assert!(
                *subject.load(*slot, *stamp).unwrap() == *page,
                "round {round}"
            );
        }
    }
    println!("{moved} pages moved in {passes} passes");
    assert!(passes >= 2 && moved > 1000);
}

/// A file of 64 MiB of which `quota` may be used, and what changes that.
fn with_quota(directory: &Path, quota: u64) -> (FileTier, Room) {
    let backing = Backing::open(directory, Some(Bytes(64 << 20))).unwrap();
    let table = FileTier::table_bytes(&backing);
    let table = SharedMemory::create("test-slots", table).unwrap();
    let room = Room::over(table.as_fd(), backing.bytes(), PageSize::Base).unwrap();
    room.begin(Bytes(quota * SLAB_BYTES));
    (
        FileTier::new(backing, table, &PageKey::KNOWN).unwrap(),
        room,
    )
}

#[test]
fn file_passes_the_tier_contract_within_a_quota() {
    let directory = directory();
    let (tier, _room) = with_quota(directory.path(), 24);
    assert_eq!(tier.capacity(), Bytes(24 << 20));
    contract::check(&subject(&tier, &|| tier.trim()), 51);
    contract::fills_and_recovers(&subject(&tier, &|| tier.trim()), 52, 25 * 256);
}

/// The file rings once at each mark, before it is full, and again once its keeper has looked.
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

/// A thread stores, loads and frees, and another raises and lowers the quota. The space that the
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
        tier = FileTier::recover(backing, table, &PageKey::KNOWN).unwrap();
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
