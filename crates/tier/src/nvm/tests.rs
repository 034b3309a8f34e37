//! Tests of the nvm tier beyond the shared contract. No machine here has such memory: files on a
//! disk and in tmpfs stand for it.

use std::os::unix::fs::MetadataExt;

use super::*;
use undercroft_model::contract::{self, Page, Pages, Subject, store_all};

fn directories() -> Vec<tempfile::TempDir> {
    let places = ["/var/tmp", "/dev/shm"];
    let made = places.iter().filter_map(|at| tempfile::tempdir_in(at).ok());
    let made: Vec<_> = made.collect();
    assert!(!made.is_empty(), "neither {places:?} can be written");
    made
}

fn tier_over(backing: NvmBacking) -> NvmTier {
    let table = SharedMemory::create("test-slots", NvmTier::table_bytes(&backing)).unwrap();
    NvmTier::new(backing, table, &PageKey::KNOWN).unwrap()
}

fn tier(path: &std::path::Path, bytes: u64) -> NvmTier {
    tier_over(NvmBacking::open(path, Some(Bytes(bytes))).unwrap())
}

fn subject(tier: &NvmTier) -> Subject<'_> {
    Subject {
        tier,
        idle_work: &|| (),
        held_empty: Bytes(0),
    }
}

fn pages(random: &mut Pages, count: usize) -> Vec<(Page, Stamp)> {
    (0..count)
        .map(|n| (random.mixed(), Stamp(n as u16)))
        .collect()
}

fn stored(tier: &NvmTier, pages: &[(Page, Stamp)]) -> Vec<Slot> {
    let results = store_all(tier, pages).into_iter();
    results.map(Result::unwrap).collect()
}

#[test]
fn nvm_passes_the_tier_contract_and_leaves_nothing_behind() {
    for (at, directory) in directories().iter().enumerate() {
        let tier = tier(&directory.path().join("nvm"), 32 << 20);
        println!("{}: {:?}", directory.path().display(), tier.mapped_as());
        assert_eq!(
            tier.info().emulated,
            tier.mapped_as() != MappedAs::Sync,
            "what is not MAP_SYNC only stands for such memory"
        );
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let blocks = tier.mapped.file().metadata().unwrap().blocks();
        assert!(blocks * 512 >= 32 << 20, "all space is taken before use");
        contract::check(&subject(&tier), 71 + at as u64);
        assert_eq!(tier.dram(), Bytes(0));
    }
}

#[test]
fn nvm_that_is_full_says_so_and_uses_freed_slots_again() {
    for directory in directories() {
        let tier = tier(directory.path(), 2 << 20);
        contract::fills_and_recovers(&subject(&tier), 73, 600);
        let all = pages(&mut Pages::new(74), 520);
        let results = store_all(&tier, &all);
        assert!(results[..512].iter().all(Result::is_ok));
        assert!(
            results[512..]
                .iter()
                .all(|result| *result == Err(StoreError::Full))
        );
        assert_eq!(tier.usage().held, tier.info().capacity);
    }
}

/// Another process with root's rights can reach the file through /proc and cut it short. The pages
/// beyond its end are lost, and the tier says so; the others are whole.
#[test]
fn nvm_whose_file_is_cut_short_has_io_errors_and_keeps_the_rest() {
    for directory in directories() {
        let tier = tier(directory.path(), 2 << 20);
        let subject = subject(&tier);
        let kept = pages(&mut Pages::new(75), 400);
        let slots = stored(&tier, &kept);
        let other = format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(tier.mapped.file())
        );
        let other = std::fs::File::options().write(true).open(other).unwrap();
        other.set_len(1 << 20).unwrap();
        let lost = Err(LoadError::Failed(FailKind::Io));
        for (slot, (page, stamp)) in slots.iter().zip(&kept) {
            let loaded = subject.load(*slot, *stamp);
            if slot.0 < 256 {
                assert!(*loaded.unwrap() == *page, "{slot:?}");
            } else {
                assert_eq!(loaded.map(|_| ()), lost, "{slot:?}");
            }
        }
        // The free slots are beyond the end, too. What is refused takes no slot.
        let failed = Err(StoreError::Failed(FailKind::Io));
        let more = pages(&mut Pages::new(76), 50);
        assert_eq!(store_all(&tier, &more), vec![failed; 50]);
        assert_eq!(tier.usage().logical, Bytes(400 * BASE_PAGE_BYTES as u64));
        // Its old bytes do not come back with its length.
        other.set_len(2 << 20).unwrap();
        let loaded = subject.load(slots[300], kept[300].1);
        assert_eq!(loaded.map(|_| ()), Err(LoadError::Corrupt));
        tier.free(&slots);
        assert_eq!(stored(&tier, &kept).len(), 400);
    }
}

#[test]
fn nvm_is_recovered_with_its_pages() {
    let directory = &directories()[0];
    let old = tier(directory.path(), 1 << 20);
    let kept = pages(&mut Pages::new(77), 200);
    let slots = stored(&old, &kept);
    old.free(&slots[..10]);
    let again = || {
        let fd = old.mapped.file().try_clone().unwrap().into();
        NvmBacking::inherit(fd, "nvm:test".to_owned(), Bytes(1 << 20))
    };
    let table = std::os::fd::AsFd::as_fd(&old.table).try_clone_to_owned();
    let table = SharedMemory::from_fd(table.unwrap()).unwrap();
    let new = NvmTier::recover(again(), table, &PageKey::KNOWN).unwrap();
    let mut found = Vec::new();
    new.for_each_slot(|slot| found.push(slot));
    assert_eq!(found, slots[10..]);
    let subject = subject(&new);
    for (slot, (page, stamp)) in slots.iter().zip(&kept).skip(10) {
        assert!(*subject.load(*slot, *stamp).unwrap() == *page);
    }
    assert_eq!(new.usage().logical, Bytes(190 * BASE_PAGE_BYTES as u64));
    let empty = SharedMemory::create("empty", NvmTier::table_bytes(&again())).unwrap();
    let refused = NvmTier::recover(again(), empty, &PageKey::KNOWN)
        .err()
        .unwrap();
    assert!(matches!(refused, NvmTierError::NotASlotTable), "{refused}");
}

#[test]
fn large_pages_take_slots_of_their_size_and_are_recovered() {
    let directory = &directories()[0];
    let large = |backing: NvmBacking| backing.of_pages(PageSize::Large);
    let backing = NvmBacking::open(directory.path(), Some(Bytes(200 << 20))).unwrap();
    let old = tier_over(large(backing));
    assert_eq!(old.info().capacity, Bytes(128 << 20), "a word of slots");
    contract::few_pages(&subject(&old), 73, 200);
    let mut page = vec![3; 2 << 20];
    let store = |page: &[u8], stamp| {
        let mut item = [store_of(page, stamp)];
        old.store(&mut item);
        item[0].result
    };
    let slots: Vec<_> = (0..64).map(|at| store(&page, Stamp(at)).unwrap()).collect();
    assert_eq!(store(&page, Stamp(0)), Err(StoreError::Full));
    old.free(&slots[1..]);
    for at in [0, 4095, 4096, 1 << 20] {
        page[at] = 9;
    }
    let written = old.update(slots[0], &store_of(&page, Stamp(5))).unwrap();
    assert_eq!(written, Ok(Bytes(4 * 512)), "the sectors that differ");
    let fd = old.mapped.file().try_clone().unwrap().into();
    let backing = large(NvmBacking::inherit(
        fd,
        "nvm:test".to_owned(),
        Bytes(200 << 20),
    ));
    let table = std::os::fd::AsFd::as_fd(&old.table).try_clone_to_owned();
    let table = SharedMemory::from_fd(table.unwrap()).unwrap();
    let new = NvmTier::recover(backing, table, &PageKey::KNOWN).unwrap();
    let mut loaded = vec![0; 2 << 20];
    assert_eq!(new.load(slots[0], Stamp(5), &mut loaded), Ok(Loaded::Done));
    assert!(loaded == page);
    assert_eq!(new.usage().logical, Bytes(2 << 20));
}

fn store_of<'a>(page: &'a [u8], stamp: Stamp) -> Store<'a> {
    Store {
        page,
        stamp,
        checksum: PageKey::KNOWN.checksum(page, stamp),
        result: Err(StoreError::Full),
    }
}

/// Only sectors that differ are written, and the copy has the new bytes, stamp and checksum. The
/// old stamp does not verify any more, and neighbours stay as they are.
#[test]
fn nvm_copy_that_is_changed_in_place_has_the_new_bytes_and_writes_what_differs() {
    for folder in directories() {
        let tier = tier(folder.path(), 1 << 20);
        let mut random = Pages::new(7);
        let old = pages(&mut random, 3);
        let slots = stored(&tier, &old);
        let mut dst = [0; BASE_PAGE_BYTES];
        for (round, changed) in [
            vec![],
            vec![0],
            vec![7, 8],
            (0..4096).step_by(512).collect(),
        ]
        .into_iter()
        .enumerate()
        {
            let now = Stamp(100 + round as u16);
            let mut page = old[1].0.to_vec();
            changed.iter().for_each(|at: &usize| page[*at] ^= 0xff);
            let before = tier.load(slots[1], tier_stamp(round), &mut dst);
            assert_eq!(before, Ok(Loaded::Done));
            let sectors = |at: &usize| dst[at * 512..][..512] != page[at * 512..][..512];
            let expected = (0..8).filter(sectors).count() as u64 * 512;
            let updated = tier.update(slots[1], &store_of(&page, now));
            assert_eq!(updated, Some(Ok(Bytes(expected))), "round {round}");
            assert_eq!(tier.load(slots[1], now, &mut dst), Ok(Loaded::Done));
            assert_eq!(dst[..], page[..]);
            let before = tier.load(slots[1], tier_stamp(round), &mut dst);
            assert_eq!(before, Err(LoadError::Corrupt));
        }
        for at in [0, 2] {
            assert_eq!(tier.load(slots[at], old[at].1, &mut dst), Ok(Loaded::Done));
            assert_eq!(dst[..], old[at].0[..]);
        }
        tier.free(&slots);
        let page = old[0].0.to_vec();
        assert_eq!(
            tier.update(slots[0], &store_of(&page, Stamp(0))),
            None,
            "free"
        );
    }
}

/// The stamp of the copy before this round of the test above.
fn tier_stamp(round: usize) -> Stamp {
    match round {
        0 => Stamp(1),
        _ => Stamp(99 + round as u16),
    }
}

/// Cost of a change in place to the processor, against a whole store: for docs/design/0032.
#[test]
#[ignore = "measures; run by hand with --release --nocapture"]
fn nvm_update_costs() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a scratch folder");
    let tier = tier(folder.path(), 16 << 20); // all of it is in use
    let pages = pages(&mut Pages::new(7), 4096);
    let slots = stored(&tier, &pages);
    for sectors in [0, 1, 2, 4, 8] {
        let mut least = f64::MAX;
        for round in 0..5u8 {
            let mut changed: Vec<Vec<u8>> = pages.iter().map(|(page, _)| page.to_vec()).collect();
            for page in &mut changed {
                (0..sectors).for_each(|at| page[at * 512] ^= 1 + 2 * round);
            }
            let begun = std::time::Instant::now();
            for (slot, page) in slots.iter().zip(&changed) {
                let item = store_of(page, Stamp(9));
                assert!(matches!(tier.update(*slot, &item), Some(Ok(_))));
            }
            least = least.min(begun.elapsed().as_nanos() as f64 / slots.len() as f64);
        }
        println!("{sectors} of 8 sectors changed, with its checksum: {least:.0} ns a page");
    }
    let mut least = f64::MAX;
    for _ in 0..5 {
        tier.free(&slots);
        let begun = std::time::Instant::now();
        for (page, _) in &pages {
            let mut item = [store_of(&page[..], Stamp(9))];
            tier.store(&mut item);
            assert!(item[0].result.is_ok());
        }
        least = least.min(begun.elapsed().as_nanos() as f64 / slots.len() as f64);
    }
    println!("whole stores, with their checksums: {least:.0} ns a page");
}

#[test]
fn nvm_refuses_what_it_cannot_have_and_says_how_to_do_better() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("mine");
    std::fs::write(&file, "precious").unwrap();
    let missing = directory.path().join("no/such");
    let mib = Some(Bytes(1 << 20));
    for (path, size, why) in [
        (file.as_path(), mib, "may be in use by another program"),
        (std::path::Path::new("/dev/null"), mib, "DAX device"),
        (directory.path(), None, "needs a size"),
        (directory.path(), Some(Bytes(4096)), "at least 1.0 MiB"),
        (directory.path(), Some(Bytes(1 << 43)), "has no room for"),
        (&missing, mib, "No such file"),
    ] {
        let error = NvmBacking::open(path, size).unwrap_err().to_string();
        assert!(error.contains(why), "{}: {error}", path.display());
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

/// Four threads store, load and free pages whose slots change hands, and no load takes the bytes
/// of another page for its own.
#[test]
fn nvm_slots_change_hands_between_threads_without_mixing_bytes() {
    let directory = &directories()[0];
    let tier = tier(directory.path(), 1 << 20);
    let stale = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (tier, stale) = (&tier, &stale);
            scope.spawn(move || {
                // A slot with the same stamp would be the same copy: each thread has its own.
                let mut mine = pages(&mut Pages::new(80 + thread), 48);
                mine.iter_mut()
                    .for_each(|page| page.1.0 += 100 * thread as u16);
                for round in 0..200 {
                    let slots = stored(tier, &mine);
                    for (slot, (page, stamp)) in slots.iter().zip(&mine) {
                        let loaded = subject(tier).load(*slot, *stamp);
                        assert!(*loaded.unwrap() == *page, "round {round}: {slot:?}");
                    }
                    tier.free(&slots);
                    for (slot, (page, stamp)) in slots.iter().zip(&mine) {
                        match subject(tier).load(*slot, *stamp) {
                            Ok(loaded) => assert!(*loaded == *page, "{slot:?}"),
                            Err(_) => _ = stale.fetch_add(1, Relaxed),
                        }
                    }
                }
            });
        }
    });
    assert_eq!(tier.usage().logical, Bytes(0));
    assert!(stale.into_inner() > 100);
}
