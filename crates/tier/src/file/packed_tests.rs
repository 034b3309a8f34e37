//! Tests of packed tiers: several compressed pages in one block.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use undercroft_base::FailKind;
use undercroft_model::contract::{self, Page, Pages, store_all};

use super::parts::PARTS_MAX;
use super::tests::{directory, pages, stored, subject};
use super::*;

const PAGE: u64 = BASE_PAGE_BYTES as u64;

fn over(backing: Backing) -> FileTier {
    let table = FileTier::table_bytes(&backing);
    let table = SharedMemory::create("test-slots", table).unwrap();
    FileTier::new(backing, table, &PageKey::KNOWN).unwrap()
}

fn packed(path: &std::path::Path, bytes: u64) -> FileTier {
    over(
        Backing::open(path, Some(Bytes(bytes)))
            .unwrap()
            .packing(true),
    )
}

/// Pages that compress to some 1,100 bytes, so that three are in a block.
fn thirds(seed: u64, count: usize) -> Vec<(Page, Stamp)> {
    let mut random = Pages::new(seed);
    let mut third = || {
        let mut page = random.noise();
        page[1060..].fill(7);
        page
    };
    (0..count).map(|at| (third(), Stamp(at as u16))).collect()
}

fn check_all(tier: &FileTier, slots: &[Slot], pages: &[(Page, Stamp)]) {
    let idle_work = || ();
    let subject = subject(tier, &idle_work);
    for (slot, (page, stamp)) in slots.iter().zip(pages) {
        assert!(*subject.load(*slot, *stamp).unwrap() == *page, "{slot:?}");
    }
}

/// As a successor of a manager that died: another descriptor, and the table as it is.
fn succeed(old: FileTier, waiting: usize) -> FileTier {
    let FileTier { backing, table, .. } = old;
    let fd = backing.file().try_clone().unwrap().into();
    let again = Backing::inherit(fd, backing.name().to_owned(), backing.bytes()).unwrap();
    let tier = FileTier::recover(again.packing(true), table, &PageKey::KNOWN).unwrap();
    tier.write_behind(waiting)
}

#[test]
fn packed_file_passes_the_tier_contract() {
    for waiting in [0, 128, 256] {
        let directory = directory();
        let tier = packed(directory.path(), 64 << 20).write_behind(waiting);
        contract::check(&subject(&tier, &|| tier.trim()), 51 + waiting as u64);
    }
}

/// A block whose last page is not freed is not free. So fewer pages fit than at first, but never
/// fewer than without packing.
#[test]
fn packed_file_at_its_size_is_full_and_takes_as_many_pages_as_it_has_blocks_or_more() {
    let directory = directory();
    let tier = packed(directory.path(), 3 << 20);
    let mut random = Pages::new(52);
    let mut live = Vec::new();
    for round in 0..20 {
        loop {
            let results = store_all(&tier, &thirds(random.number(), 48));
            live.extend(results.iter().filter_map(|result| result.ok()));
            if results.contains(&Err(StoreError::Full)) {
                break;
            }
        }
        let usage = tier.usage();
        assert_eq!(usage.stored, Bytes(3 << 20), "round {round}");
        assert_eq!(usage.logical, Bytes(live.len() as u64 * PAGE));
        assert!(live.len() >= 768, "round {round}: {}", live.len());
        assert!(round > 0 || live.len() == 3 * 768, "{}", live.len());
        for _ in 0..live.len() / 2 {
            let at = random.below(live.len() as u64) as usize;
            tier.free(&[live.swap_remove(at)]);
        }
    }
}

#[test]
fn pages_of_a_batch_share_blocks_and_are_written_and_counted_as_such() {
    let directory = directory();
    let tier = packed(directory.path(), 8 << 20);
    let pages = thirds(53, 66);
    let slots = stored(&tier, &pages);
    let counts = tier.meter().read();
    assert_eq!((counts.writes, counts.bytes_written), (1, 22 * PAGE));
    let usage = tier.usage();
    assert_eq!(
        (usage.logical, usage.stored),
        (Bytes(66 * PAGE), Bytes(22 * PAGE))
    );
    // Neighbours are in the same block, and the blocks follow each other.
    let blocks: Vec<u64> = slots.iter().map(|slot| tier.block_of(*slot)).collect();
    assert_eq!(
        blocks,
        (0..66).map(|at| blocks[0] + at / 3).collect::<Vec<_>>()
    );
    check_all(&tier, &slots, &pages);
    // A block is free when its last page is.
    tier.free(&[slots[0], slots[2], slots[3]]);
    assert_eq!(tier.usage().stored, Bytes(22 * PAGE));
    tier.free(&[slots[1]]);
    assert_eq!(tier.usage().stored, Bytes(21 * PAGE));
    assert_eq!(tier.usage().logical, Bytes(62 * PAGE));
    assert_eq!(
        tier.checksum(slots[3], Stamp(3)),
        None,
        "freed, but its block is not"
    );
    check_all(&tier, &slots[4..], &pages[4..]);
    tier.free(&slots[4..]);
    assert_eq!(tier.usage().logical, Bytes(0));
}

#[test]
#[should_panic = "free already"]
fn a_part_that_is_free_cannot_be_freed_again() {
    let directory = directory();
    let tier = packed(directory.path(), 1 << 20);
    let slots = stored(&tier, &thirds(54, 3));
    tier.free(&slots[..1]);
    tier.free(&slots[..1]);
}

/// Noise, and a short page that has no other beside it, cost no decompression.
#[test]
fn pages_that_have_a_block_for_themselves_are_in_it_as_they_are() {
    let directory = directory();
    let tier = packed(directory.path(), 1 << 20);
    let mut random = Pages::new(55);
    let mut batch: Vec<_> = (0..9).map(|at| (random.noise(), Stamp(at))).collect();
    batch.insert(4, (thirds(55, 1)[0].0, Stamp(9)));
    let slots = stored(&tier, &batch);
    for (slot, (page, stamp)) in slots.iter().zip(&batch) {
        let mut bytes = vec![0; BASE_PAGE_BYTES];
        let Ok(Loaded::Read { offset, .. }) = tier.load(*slot, *stamp, &mut bytes) else {
            panic!("it is on the device");
        };
        buffered(&tier).read_exact_at(&mut bytes, offset).unwrap();
        assert!(bytes == page, "{slot:?}");
    }
    assert_eq!(tier.usage().stored, tier.usage().logical);
}

/// A buffered descriptor of the tier's file, as another program would open it.
fn buffered(tier: &FileTier) -> std::fs::File {
    let path = format!("/proc/self/fd/{}", tier.backing().file().as_raw_fd());
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

/// A page that does not compress is tried no more after some of its kind, and compressible ones
/// are noticed again.
#[test]
fn noise_is_tried_only_now_and_then() {
    let mut evidence = parts::Evidence::default();
    let noise = Pages::new(56).noise();
    for _ in 0..1001 {
        assert!(evidence.compress(&noise, |_| ()).is_none());
    }
    let short = thirds(56, 1)[0].0;
    let first = (0..100).position(|_| evidence.compress(&short, |_| ()).is_some());
    assert!((1..8).contains(&first.unwrap()), "{first:?}");
    assert!((0..100).all(|_| evidence.compress(&short, |_| ()).is_some()));
}

/// Whatever the device gives, a load is `Corrupt` or right.
#[test]
fn damaged_blocks_are_corrupt_and_never_wrong_bytes() {
    let directory = directory();
    let tier = packed(directory.path(), 1 << 20);
    let pages = thirds(57, 6);
    let slots = stored(&tier, &pages);
    let file = buffered(&tier);
    let idle_work = || ();
    let subject = subject(&tier, &idle_work);
    let mut good = vec![0; 2 * BASE_PAGE_BYTES];
    file.read_exact_at(&mut good, 0).unwrap();
    let mut random = Pages::new(57);
    let (mut right, mut corrupt) = (0, 0);
    for round in 0..3000 {
        let mut bytes = good.clone();
        match round % 4 {
            0 => {
                let at = random.below(2 * PAGE) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
            // The head says other lengths.
            1 => {
                let at = random.below(2 * PARTS_MAX as u64) as usize;
                bytes[at] = random.number() as u8;
            }
            2 => bytes[..BASE_PAGE_BYTES].copy_from_slice(&random.noise()),
            // The blocks have changed places.
            _ => bytes.rotate_left(BASE_PAGE_BYTES),
        }
        file.write_all_at(&bytes, 0).unwrap();
        for (slot, (page, stamp)) in slots.iter().zip(&pages) {
            match subject.load(*slot, *stamp) {
                Ok(loaded) => {
                    assert!(*loaded == *page, "round {round}: wrong bytes");
                    right += 1;
                }
                Err(error) => {
                    assert_eq!(error, LoadError::Corrupt);
                    corrupt += 1;
                }
            }
        }
    }
    assert!(right > 1000 && corrupt > 1000, "{right} {corrupt}");
    file.write_all_at(&good, 0).unwrap();
    check_all(&tier, &slots, &pages);
}

#[test]
fn any_bytes_are_unpacked_without_a_panic() {
    let mut random = Pages::new(58);
    for round in 0..20_000 {
        let mut block = random.mixed();
        if round % 2 == 0 {
            let head = block.iter_mut().take(2 * PARTS_MAX);
            head.for_each(|byte| *byte = random.number() as u8 & 0x0f);
        }
        let part = random.below(1 + PARTS_MAX as u64) as u8;
        let _ = parts::unpack(Parts::slot(3, part), &mut block);
    }
}

#[test]
fn packed_file_that_refuses_writes_fails_pages_and_takes_no_blocks() {
    for waiting in [0, 256] {
        let directory = directory();
        let path = directory.path().join("read-only");
        std::fs::write(&path, vec![0; 2 << 20]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let backing = Backing::inherit(file.into(), "file:test".to_owned(), Bytes(2 << 20));
        let tier = over(backing.unwrap().packing(true)).write_behind(waiting);
        let failed = Err(StoreError::Failed(FailKind::Io));
        // Three in a block: the last of these make the waiting ones 192 and more.
        let early = if waiting == 0 {
            vec![]
        } else {
            thirds(59, 570)
        };
        let slots: Vec<_> = early
            .chunks(30)
            .flat_map(|part| stored(&tier, part))
            .collect();
        let results = store_all(&tier, &thirds(60, 30));
        assert!(
            results.iter().all(|result| *result == failed),
            "{results:?}"
        );
        let usage = tier.usage();
        assert_eq!(usage.logical, Bytes(early.len() as u64 * PAGE));
        assert_eq!(usage.stored, Bytes(early.len() as u64 / 3 * PAGE));
        check_all(&tier, &slots, &early);
        assert_eq!(tier.meter().read().pages_failed, 30);
    }
}

#[test]
fn a_tier_that_is_not_packed_is_no_successor_of_one_that_is() {
    for packs in [false, true] {
        let directory = directory();
        let old = Backing::open(directory.path(), Some(Bytes(1 << 20))).unwrap();
        let FileTier { backing, .. } = over(old.packing(packs));
        // A table that is long enough for both.
        let table = SharedMemory::create("test-slots", 2 << 20).unwrap();
        let copy = SharedMemory::from_fd(table.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let fd = || backing.file().try_clone().unwrap().into();
        let again = |packs| {
            let again = Backing::inherit(fd(), "file:test".to_owned(), backing.bytes());
            again.unwrap().packing(packs)
        };
        drop(FileTier::new(again(packs), table, &PageKey::KNOWN).unwrap());
        let refused = FileTier::recover(again(!packs), copy, &PageKey::KNOWN);
        assert!(matches!(refused, Err(FileTierError::NotASlotTable)));
    }
}

#[test]
fn a_packed_tier_of_more_slots_than_an_entry_can_name_is_refused() {
    let large = |bytes: u64, packs| {
        let file = tempfile::tempfile().unwrap();
        let backing = Backing::inherit(file.into(), "file:test".to_owned(), Bytes(bytes)).unwrap();
        let table = SharedMemory::create("test-slots", 4096).unwrap();
        FileTier::new(backing.packing(packs), table, &PageKey::KNOWN)
            .err()
            .unwrap()
    };
    let text = large(5 << 40, true).to_string();
    assert!(text.contains("4.0 TiB"), "{text}");
    assert!(matches!(large(5 << 40, false), FileTierError::Table(..)));
    assert!(matches!(large(4 << 40, true), FileTierError::Table(..)));
}

type Oracle = BTreeMap<Slot, (Page, Stamp)>;

/// Pages are stored, loaded and freed at random, and managers die. What an entry would name is
/// there, every byte of it; the successor frees the rest.
#[test]
fn pages_outlive_managers_that_die_at_random() {
    for seed in 0..6 {
        let directory = directory();
        let waiting = [0, 256][seed as usize % 2];
        let mut tier = packed(directory.path(), 16 << 20).write_behind(waiting);
        let mut random = Pages::new(6000 + seed);
        let mut oracle = Oracle::new();
        for _ in 0..300 {
            let batch = match random.below(3) {
                0 => pages(&mut random, 40),
                1 => thirds(random.number(), 64),
                _ => thirds(random.number(), 1 + random.below(5) as usize),
            };
            for (slot, page) in stored(&tier, &batch).into_iter().zip(batch) {
                assert!(
                    oracle.insert(slot, page).is_none(),
                    "seed {seed}: given twice"
                );
            }
            while oracle.len() > 1500 {
                free_any(&tier, &mut oracle, &mut random);
            }
            assert_eq!(tier.usage().logical, Bytes(oracle.len() as u64 * PAGE));
            assert!(tier.usage().stored <= tier.usage().logical);
            if random.below(10) == 0 {
                tier = die(tier, waiting, &oracle, &mut random);
            }
        }
        let (slots, pages): (Vec<_>, Vec<_>) = oracle.into_iter().unzip();
        check_all(&tier, &slots, &pages);
        tier.free(&slots);
        let usage = tier.usage();
        assert_eq!(
            (usage.logical, usage.stored),
            (Bytes(0), Bytes(0)),
            "seed {seed}"
        );
    }
}

fn free_any(tier: &FileTier, oracle: &mut Oracle, random: &mut Pages) {
    let at = random.below(oracle.len() as u64) as usize;
    let slot = *oracle.keys().nth(at).expect("one of them");
    oracle.remove(&slot);
    tier.free(&[slot]);
}

/// A manager dies after it stored pages that no entry names yet, and perhaps between the bits of a
/// block and those of its parts. Returns the tier of its successor.
fn die(tier: FileTier, waiting: usize, oracle: &Oracle, random: &mut Pages) -> FileTier {
    let unnamed = stored(&tier, &thirds(random.number(), 20));
    let parts = tier.parts.as_ref().expect("it packs");
    if random.below(2) == 0 {
        // A block that was taken, and none of its parts.
        let mut blocks = Vec::new();
        tier.lock_slabs().alloc(tier.bitmaps(), 3, &mut blocks);
        // Parts that were freed, and not their block.
        let block = tier.block_of(unnamed[0]);
        for slot in unnamed.iter().filter(|slot| tier.block_of(**slot) == block) {
            parts.free(&tier.table, *slot);
        }
    }
    let tier = succeed(tier, waiting);
    let mut found = Vec::new();
    tier.for_each_slot(|slot| found.push(slot));
    found.retain(|slot| !oracle.contains_key(slot));
    tier.free(&found);
    assert!((1..=20).contains(&found.len()));
    let mut left = Vec::new();
    tier.for_each_slot(|slot| left.push(slot));
    assert!(left.iter().eq(oracle.keys()));
    let blocks = left.iter().map(|slot| tier.block_of(*slot));
    let blocks = blocks.collect::<std::collections::BTreeSet<_>>();
    assert_eq!(tier.usage().stored, Bytes(blocks.len() as u64 * PAGE));
    tier
}

/// Pages are replaced one by one at random, so that most blocks have few of theirs left: the tier
/// takes no more space than one of whole pages may.
#[test]
fn space_stays_within_its_bound_when_blocks_lose_their_pages() {
    let directory = directory();
    let tier = packed(directory.path(), 1 << 30);
    let mut random = Pages::new(61);
    let mut live = Vec::new();
    for batch in 0..600 {
        live.extend(stored(&tier, &thirds(batch, 64)));
        while live.len() > 12_000 {
            let at = random.below(live.len() as u64) as usize;
            tier.free(&[live.swap_remove(at)]);
        }
        let usage = tier.usage();
        assert!(usage.stored <= usage.logical);
        assert!(
            usage.held <= space_max(usage.stored, PageSize::Base),
            "{usage:?}"
        );
    }
    let usage = tier.usage();
    println!("{usage:?}");
    // Three pages that leave at random keep their block for 11/6 of their time each.
    let fill = usage.logical.0 as f64 / usage.stored.0 as f64;
    assert!((1.5..1.8).contains(&fill), "{fill}");
}

/// Most pages are freed: the tier says which slabs are to be emptied, by the slots of their parts.
#[test]
fn slabs_that_are_to_be_emptied_are_named_by_the_slots_of_their_parts() {
    let directory = directory();
    let tier = packed(directory.path(), 1 << 30);
    let mut random = Pages::new(62);
    let mut live = Vec::new();
    for batch in 0..1200 {
        live.extend(stored(&tier, &thirds(batch, 64)));
    }
    while live.len() > 400 {
        let at = random.below(live.len() as u64) as usize;
        tier.free(&[live.swap_remove(at)]);
    }
    while tier.tidy() {} // slabs that are empty go first
    assert!(tier.lock_slabs().has_excess(), "{:?}", tier.usage());
    let ranges = tier.scattered();
    assert!(
        live.iter()
            .any(|slot| ranges.iter().any(|range| range.contains(slot)))
    );
}
