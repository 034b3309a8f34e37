//! Tests of the file tier beyond the shared contract.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::write::{PAUSE_FIRST, PAUSE_MAX};
use super::*;
use undercroft_base::FailKind;
use undercroft_model::contract::{self, Page, Pages, Subject, store_all};

/// A temporary directory on a disk if possible: this tier is not made for tmpfs.
pub(super) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

fn tier_over(backing: Backing) -> FileTier {
    let table = FileTier::table_bytes(&backing);
    let table = SharedMemory::create("test-slots", table).unwrap();
    FileTier::new(backing, table, &PageKey::KNOWN).unwrap()
}

fn tier(path: &Path, bytes: u64) -> FileTier {
    tier_over(Backing::open(path, Some(Bytes(bytes))).unwrap())
}

pub(super) fn subject<'a>(tier: &'a FileTier, idle_work: &'a (dyn Fn() + Sync)) -> Subject<'a> {
    Subject {
        tier,
        idle_work,
        held_empty: Bytes(0),
    }
}

/// A new file of 2 MiB that refuses writes.
fn read_only(path: &Path) -> Backing {
    std::fs::write(path, vec![0; 2 << 20]).unwrap();
    let file = std::fs::File::open(path).unwrap();
    Backing::inherit(file.into(), "file:test".to_owned(), Bytes(2 << 20)).unwrap()
}

pub(super) fn pages(random: &mut Pages, count: usize) -> Vec<(Page, Stamp)> {
    (0..count)
        .map(|n| (random.mixed(), Stamp(n as u16)))
        .collect()
}

#[test]
fn file_passes_the_tier_contract_and_leaves_nothing_behind() {
    let directory = directory();
    let tier = tier(&directory.path().join("swap"), 64 << 20);
    println!(
        "direct: {}, in memory: {}",
        tier.backing().is_direct(),
        tier.backing().is_in_memory()
    );
    contract::check(&subject(&tier, &|| tier.trim()), 31);
    println!("{:?}", tier.meter().read());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    use std::os::unix::fs::MetadataExt;
    let metadata = tier.backing().file().metadata().unwrap();
    if tier.meter().read().discards_failed == 0 {
        assert_eq!(metadata.blocks(), 0, "discarded slabs still take space");
    } else {
        println!("SKIPPED: this file system does not punch holes");
    }
}

#[test]
fn file_takes_its_space_in_large_pieces_and_gives_the_rest_back() {
    use std::os::unix::fs::MetadataExt;
    let directory = directory();
    let tier = tier(directory.path(), 64 << 20);
    let held = || tier.backing().file().metadata().unwrap().blocks() * 512 / SLAB_BYTES;
    let mut random = Pages::new(35);
    let one = |random: &mut Pages| assert!(store_all(&tier, &pages(random, 1))[0].is_ok());
    one(&mut random);
    if held() == 0 {
        println!("SKIPPED: this file system reserves no space");
        return;
    }
    // Ten slabs, and the first page of another. Eight were reserved slab by slab; later pieces
    // are a quarter of what there was.
    for _ in 1..10 * slab_slots(PageSize::Base) + 1 {
        one(&mut random);
    }
    assert_eq!(held(), 12);
    tier.tidy();
    assert_eq!(held(), 11, "unused space is given back");
    for _ in 0..slab_slots(PageSize::Base) {
        one(&mut random);
    }
    assert_eq!(held(), 13, "and asked for again");
}

#[test]
fn file_at_its_size_is_full_and_recovers() {
    let directory = directory();
    let tier = tier(directory.path(), 3 << 20);
    contract::fills_and_recovers(&subject(&tier, &|| tier.trim()), 32, 2000);
}

#[test]
fn file_batch_is_one_write() {
    let directory = directory();
    let tier = tier(directory.path(), 8 << 20);
    let mut random = Pages::new(33);
    for _ in 0..4 {
        let results = store_all(&tier, &pages(&mut random, 64));
        assert!(results.iter().all(Result::is_ok));
    }
    assert_eq!(tier.meter().read().writes, 4);
}

#[test]
fn file_damaged_or_cut_off_is_noticed() {
    let directory = directory();
    let tier = tier(directory.path(), 2 << 20);
    let idle_work = || ();
    let subject = subject(&tier, &idle_work);
    let pages = pages(&mut Pages::new(34), 8);
    let slots: Vec<_> = store_all(&tier, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    // A buffered descriptor of the same file: another program would damage it like this.
    let path = format!("/proc/self/fd/{}", tier.backing().file().as_raw_fd());
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let offset = slots[3].0 * BASE_PAGE_BYTES as u64 + 77;
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
    for (at, (page, stamp)) in pages.iter().enumerate() {
        match subject.load(slots[at], *stamp) {
            Ok(loaded) => assert!(at != 3 && *loaded == *page),
            Err(error) => assert_eq!((at, error), (3, LoadError::Corrupt)),
        }
    }
    file.set_len(BASE_PAGE_BYTES as u64).unwrap();
    assert!(subject.load(slots[0], pages[0].1).is_ok());
    let error = subject.load(slots[1], pages[1].1).err();
    assert_eq!(error, Some(LoadError::Failed(FailKind::Io)));
}

#[test]
fn file_that_refuses_writes_fails_pages_and_takes_no_slots() {
    let directory = directory();
    let path = directory.path().join("read-only");
    let backing = read_only(&path);
    let tier = tier_over(backing);
    let pages = pages(&mut Pages::new(35), 100);
    let failed = Err(StoreError::Failed(FailKind::Io));
    assert!(
        store_all(&tier, &pages)
            .iter()
            .all(|result| *result == failed)
    );
    assert_eq!(tier.usage().logical, Bytes(0));
    // Again at once: answered without touching the device.
    let results = store_all(&tier, &pages);
    assert!(
        results
            .iter()
            .all(|result| *result == Err(StoreError::Full))
    );
    let counters = tier.meter().read();
    assert_eq!((counters.pages_failed, counters.pages_paused), (100, 100));
    std::thread::sleep(PAUSE_FIRST);
    assert!(
        store_all(&tier, &pages)
            .iter()
            .all(|result| *result == failed)
    );
}

#[test]
fn large_pages_take_slots_of_their_size_and_are_read_and_recovered_whole() {
    let directory = directory();
    let backing = Backing::open(directory.path(), Some(Bytes(300 << 20))).unwrap();
    let tier = tier_over(backing.of_pages(PageSize::Large)).write_behind(WAITING_PAGES_MAX);
    assert_eq!(tier.capacity(), Bytes(256 << 20), "two slabs of 64 pages");
    contract::few_pages(&subject(&tier, &|| tier.trim()), 41, 300);
    let page: Vec<u8> = (0..2 << 20).map(|at| (at % 251) as u8).collect();
    let stamp = Stamp(7);
    let checksum = PageKey::KNOWN.checksum(&page, stamp);
    let store = |tier: &FileTier| {
        let mut item = [Store {
            page: &page,
            stamp,
            checksum,
            result: Err(StoreError::Full),
        }];
        tier.store(&mut item);
        item[0].result
    };
    let slots: Vec<_> = (0..128).map(|_| store(&tier).unwrap()).collect();
    assert_eq!(store(&tier), Err(StoreError::Full));
    tier.free(&slots[..100]);
    let FileTier { backing, table, .. } = tier;
    let fd = backing.file().try_clone().unwrap().into();
    let backing = Backing::inherit(fd, backing.name().to_owned(), backing.bytes()).unwrap();
    let backing = backing.of_pages(PageSize::Large);
    let tier = FileTier::recover(backing, table, &PageKey::KNOWN).unwrap();
    let mut found = Vec::new();
    tier.for_each_slot(|slot| found.push(slot));
    assert_eq!(found, slots[100..]);
    assert_eq!(tier.usage().logical, Bytes(28 << 21));
    let Ok(Loaded::Read { offset, .. }) = tier.load(slots[127], stamp, &mut []) else {
        panic!("it is on the device");
    };
    let mut read = PageBuf::new(1, PageSize::Large).unwrap();
    let file = tier.backing().file();
    file.read_exact_at(&mut read, offset).unwrap();
    assert!(read[..] == page[..]);
    assert_eq!(tier.checksum(slots[127], stamp), Some(checksum));
}

#[test]
fn file_is_recovered_from_its_table_and_descriptor() {
    let directory = directory();
    let old = tier(directory.path(), 4 << 20);
    let mut random = Pages::new(36);
    let pages = pages(&mut random, 600);
    let slots: Vec<_> = store_all(&old, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    old.free(&slots[..300]);
    let FileTier { backing, table, .. } = old;
    let fd = backing.file().try_clone().unwrap().into();
    let backing = Backing::inherit(fd, backing.name().to_owned(), backing.bytes()).unwrap();
    let new = FileTier::recover(backing, table, &PageKey::KNOWN).unwrap();
    assert_eq!(new.usage().logical, Bytes(300 * BASE_PAGE_BYTES as u64));
    let idle_work = || new.trim();
    let subject = subject(&new, &idle_work);
    let check = |when: &str| {
        for (slot, (page, stamp)) in slots.iter().zip(&pages).skip(300) {
            assert!(*subject.load(*slot, *stamp).unwrap() == *page, "{when}");
        }
    };
    check("after recovery");
    let mut found = Vec::new();
    new.for_each_slot(|slot| found.push(slot));
    assert_eq!(found, &slots[300..]);
    // The first writes reserve space before that of the old pages.
    found.push(store_all(&new, &self::pages(&mut random, 1))[0].unwrap());
    new.tidy();
    check("after idle work");
    for result in store_all(&new, &self::pages(&mut random, 723)) {
        let slot = result.unwrap();
        assert!(!slots[300..].contains(&slot));
        found.push(slot);
    }
    assert_eq!(store_all(&new, &pages[..1]), [Err(StoreError::Full)]);
    new.free(&found);
    contract::becomes_empty(&subject);
}

#[test]
fn file_backing_refuses_what_it_would_overwrite_or_cannot_use() {
    let directory = directory();
    let existing = directory.path().join("precious");
    std::fs::write(&existing, b"data").unwrap();
    let open = |path: &Path, bytes| Backing::open(path, Some(Bytes(bytes))).unwrap_err();
    assert!(matches!(open(&existing, 1 << 20), BackingError::Exists(_)));
    assert_eq!(std::fs::read(&existing).unwrap(), b"data");
    assert!(matches!(
        open(Path::new("/dev/null"), 1 << 20),
        BackingError::Kind(_)
    ));
    let missing = directory.path().join("no/such/directory");
    assert!(matches!(
        open(&missing, 1 << 20),
        BackingError::System { .. }
    ));
    assert!(matches!(
        open(directory.path(), 4096),
        BackingError::TooSmall { .. }
    ));
    let backing = Backing::open(directory.path(), Some(Bytes(1 << 20))).unwrap();
    let table = SharedMemory::create("small", 4096).unwrap();
    assert!(matches!(
        FileTier::new(backing, table, &PageKey::KNOWN),
        Err(FileTierError::Table(..))
    ));
    assert!(Backing::open(directory.path(), None).unwrap().bytes().0 >= SLAB_BYTES);
}

/// A file system of 2 MiB in a mount namespace of its own, and a tier of 16 MiB in it.
#[test]
fn file_on_a_full_file_system_keeps_what_it_has() {
    let directory = directory();
    let script = "mount -t tmpfs -o size=2m none \"$1\" && exec \"$2\" --ignored --nocapture \
                  --exact file::tests::full_file_system_inner";
    let mut outcome = None;
    for flags in ["-m", "-rm"] {
        let output = Command::new("unshare")
            .args([flags, "sh", "-c", script, "sh"])
            .arg(directory.path())
            .arg(std::env::current_exe().unwrap())
            .env("UNDERCROFT_TEST_FULL", directory.path())
            .output();
        let Ok(output) = output else { continue };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains("running 1 test") {
            outcome = Some((output.status.success(), text, output.stderr));
            break;
        }
    }
    let Some((passed, text, errors)) = outcome else {
        println!("SKIPPED: no permission to mount a small tmpfs");
        return;
    };
    println!("{text}");
    assert!(passed, "{}", String::from_utf8_lossy(&errors));
}

#[test]
#[ignore = "run by file_on_a_full_file_system_keeps_what_it_has in a small mount"]
fn full_file_system_inner() {
    let Some(path) = std::env::var_os("UNDERCROFT_TEST_FULL").map(PathBuf::from) else {
        println!("SKIPPED: not in the small mount");
        return;
    };
    for most in [0, 256] {
        keeps_what_it_has(&tier(&path, 16 << 20).write_behind(most), most);
    }
}

/// * `most`: how many pages may wait, besides those that fit the file system.
fn keeps_what_it_has(tier: &FileTier, most: usize) {
    let idle_work = || tier.trim();
    let subject = subject(tier, &idle_work);
    println!(
        "direct: {}, in memory: {}",
        tier.backing().is_direct(),
        tier.backing().is_in_memory()
    );
    assert!(tier.backing().is_in_memory());
    let pages = pages(&mut Pages::new(37), 900);
    let (mut kept, mut no_space) = (Vec::new(), 0);
    for part in pages.chunks(100) {
        for ((page, stamp), result) in part.iter().zip(store_all(tier, part)) {
            match result {
                Ok(slot) => kept.push((slot, page, *stamp)),
                Err(StoreError::Failed(FailKind::NoSpace)) => no_space += 1,
                Err(error) => assert_eq!(error, StoreError::Full),
            }
        }
    }
    let counters = tier.meter().read();
    println!(
        "{} kept, {no_space} without space, {counters:?}",
        kept.len()
    );
    assert!((400..=512 + most).contains(&kept.len()));
    assert!(no_space > 0 && counters.pages_paused > 0);
    assert_eq!(
        tier.usage().logical,
        Bytes((kept.len() * BASE_PAGE_BYTES) as u64)
    );
    for (slot, page, stamp) in &kept {
        assert!(*subject.load(*slot, *stamp).unwrap() == **page);
    }
    // Room made on the file system is used again after the pause.
    tier.free(&kept.iter().map(|(slot, ..)| *slot).collect::<Vec<_>>());
    tier.trim();
    std::thread::sleep(PAUSE_MAX.min(PAUSE_FIRST * 32));
    assert!(store_all(tier, &pages[..200]).iter().all(Result::is_ok));
}

/// As the manager reads: O_DIRECT through a ring into its arena, then the checksum.
#[test]
fn file_pages_are_read_directly_through_a_ring() {
    let directory = directory();
    let tier = tier(directory.path(), 2 << 20);
    let pages = pages(&mut Pages::new(38), 16);
    let slots: Vec<_> = store_all(&tier, &pages)
        .into_iter()
        .map(Result::unwrap)
        .collect();
    let mut ring = undercroft_sys::ring::PageRing::new(16, 16, PageSize::Base).unwrap();
    for (at, (slot, (_, stamp))) in slots.iter().zip(&pages).enumerate() {
        let loaded = tier.load(*slot, *stamp, &mut [0; BASE_PAGE_BYTES]).unwrap();
        let Loaded::Read { fd, offset } = loaded else {
            panic!("a file tier answers where to read");
        };
        ring.read(fd, offset, at, at + 1, at as u64).unwrap();
    }
    ring.submit(16).unwrap();
    let mut read = 0;
    ring.reap(|_, result| read += u32::from(result == Ok(BASE_PAGE_BYTES)));
    assert_eq!(read, 16);
    for (at, (slot, (page, stamp))) in slots.iter().zip(&pages).enumerate() {
        let bytes = ring.arena().pages(at, at + 1).unwrap();
        assert!(bytes == page);
        let kept = tier.checksum(*slot, *stamp);
        assert_eq!(kept, Some(PageKey::KNOWN.checksum(bytes, *stamp)));
    }
}

/// Checks that all pages have their bytes, wherever they are. Returns how many wait.
fn waiting(subject: &Subject<'_>, slots: &[Slot], pages: &[(Page, Stamp)]) -> usize {
    let mut waiting = 0;
    for (slot, (page, stamp)) in slots.iter().zip(pages) {
        assert!(*subject.load(*slot, *stamp).unwrap() == *page);
        let loaded = subject.tier.load(*slot, *stamp, &mut [0; BASE_PAGE_BYTES]);
        waiting += usize::from(loaded == Ok(Loaded::Done));
    }
    waiting
}

pub(super) fn stored(tier: &FileTier, pages: &[(Page, Stamp)]) -> Vec<Slot> {
    let results = store_all(tier, pages).into_iter();
    results.map(Result::unwrap).collect()
}

#[test]
fn file_that_writes_behind_passes_the_tier_contract() {
    for most in [128, 200, 256] {
        let directory = directory();
        let tier = tier(directory.path(), 64 << 20).write_behind(most);
        contract::check(&subject(&tier, &|| tier.trim()), 41 + most as u64);
        assert!(tier.dram().0 <= (most * BASE_PAGE_BYTES) as u64);
        assert!(tier.dram().0 > 0, "nothing ever waited");
    }
}

#[test]
fn file_pages_wait_in_memory_until_they_are_written_at_once() {
    let directory = directory();
    let tier = tier(directory.path(), 4 << 20).write_behind(256);
    let pages = pages(&mut Pages::new(42), 320);
    let idle_work = || ();
    let subject = subject(&tier, &idle_work);
    let mut slots = stored(&tier, &pages[..64]);
    slots.extend(stored(&tier, &pages[64..192]));
    assert_eq!(tier.meter().read().writes, 0);
    assert_eq!(tier.dram(), Bytes(192 * BASE_PAGE_BYTES as u64));
    assert_eq!(waiting(&subject, &slots, &pages), 192);
    // When fewer than 64 places are left, all are written.
    slots.extend(stored(&tier, &pages[192..193]));
    assert_eq!(tier.meter().read().writes, 1);
    assert_eq!(waiting(&subject, &slots, &pages), 0);
    // A batch without enough places waits behind the others.
    slots.extend(stored(&tier, &pages[193..313]));
    assert_eq!(waiting(&subject, &slots, &pages), 120);
    // A page that was freed while it waited is not written, and its slot may be reused at once.
    tier.free(&slots[193..303]);
    slots.truncate(193);
    let more = stored(&tier, &pages[193..320]);
    assert_eq!(waiting(&subject, &slots, &pages), 0);
    assert_eq!(waiting(&subject, &more, &pages[193..]), 0);
    assert_eq!(tier.usage().logical, Bytes(330 * BASE_PAGE_BYTES as u64));
}

/// A file of one slab: freed slots are reused at once, those of waiting pages too.
#[test]
fn file_slots_are_used_again_while_their_pages_wait() {
    let directory = directory();
    let tier = tier(directory.path(), 1 << 20).write_behind(256);
    let idle_work = || tier.trim();
    let subject = subject(&tier, &idle_work);
    let mut random = Pages::new(43);
    let mut kept: Vec<(Slot, Page, Stamp)> = Vec::new();
    let (mut waited, mut steps) = (0, 0);
    while steps < 600 {
        let new = pages(&mut random, 1 + steps % 61);
        steps += 1;
        for ((page, stamp), result) in new.iter().zip(store_all(&tier, &new)) {
            if let Ok(slot) = result {
                kept.push((slot, *page, *stamp));
            }
        }
        for (slot, page, stamp) in &kept {
            assert!(
                *subject.load(*slot, *stamp).unwrap() == *page,
                "step {steps}"
            );
        }
        waited += usize::from(tier.behind.waiting(&tier.table).next().is_some());
        while kept.len() > 100 {
            let at = random.below(kept.len() as u64) as usize;
            tier.free(&[kept.swap_remove(at).0]);
        }
    }
    assert!(waited > 100, "pages waited at the end of {waited} steps");
}

#[test]
fn file_that_refuses_writes_keeps_what_waits_and_writes_it_later() {
    let directory = directory();
    let path = directory.path().join("file");
    let backing = read_only(&path);
    let mut tier = tier_over(backing).write_behind(256);
    let idle_work = || ();
    let pages = pages(&mut Pages::new(44), 500);
    let failed = Err(StoreError::Failed(FailKind::Io));
    let slots = stored(&tier, &pages[..190]);
    let refused = store_all(&tier, &pages[190..250]);
    assert!(
        refused.iter().all(|result| *result == failed),
        "{refused:?}"
    );
    assert_eq!(tier.usage().logical, Bytes(190 * BASE_PAGE_BYTES as u64));
    assert_eq!(waiting(&subject(&tier, &idle_work), &slots, &pages), 190);
    let paused = store_all(&tier, &pages[190..191]);
    assert_eq!(paused, [Err(StoreError::Full)]);
    std::thread::sleep(PAUSE_FIRST);
    assert_eq!(store_all(&tier, &pages[190..191]), [failed]);
    assert_eq!(tier.meter().read().pages_failed, 61);
    assert_eq!(waiting(&subject(&tier, &idle_work), &slots, &pages), 190);
    tier.free(&slots[..50]);
    // Now the device accepts writes.
    let writable = OpenOptions::new().read(true).write(true).open(&path);
    let fd = writable.unwrap().into();
    tier.backing = Backing::inherit(fd, "file:test".to_owned(), Bytes(2 << 20)).unwrap();
    std::thread::sleep(2 * PAUSE_FIRST);
    let more = stored(&tier, &pages[190..400]);
    assert_eq!(
        waiting(&subject(&tier, &idle_work), &slots[50..], &pages[50..]),
        0
    );
    assert_eq!(
        waiting(&subject(&tier, &idle_work), &more, &pages[190..]),
        0
    );
    assert_eq!(tier.usage().logical, Bytes(350 * BASE_PAGE_BYTES as u64));
}

#[test]
fn file_is_recovered_with_the_pages_that_wait() {
    let directory = directory();
    let old = tier(directory.path(), 1 << 20).write_behind(256);
    let pages = pages(&mut Pages::new(45), 300);
    let slots = stored(&old, &pages[..150]);
    old.free(&slots[..10]);
    let FileTier { backing, table, .. } = old;
    let fd = backing.file().try_clone().unwrap().into();
    let backing = Backing::inherit(fd, backing.name().to_owned(), backing.bytes()).unwrap();
    let new = FileTier::recover(backing, table, &PageKey::KNOWN).unwrap();
    let idle_work = || ();
    let subject = subject(&new, &idle_work);
    assert_eq!(waiting(&subject, &slots[10..], &pages[10..]), 140);
    // Every other slot is used for pages that do not wait, also the slots of freed waiting pages.
    let more = stored(&new, &pages[150..266]);
    assert_eq!(waiting(&subject, &more, &pages[150..]), 0);
    assert_eq!(waiting(&subject, &slots[10..], &pages[10..]), 140);
    new.free(&slots[10..20]);
    let last = stored(&new, &pages[290..]);
    assert_eq!(waiting(&subject, &last, &pages[290..]), 0);
}

/// Places change pages as fast as possible, while two threads read the newest pages.
#[test]
fn file_pages_are_read_while_their_places_change_hands() {
    let directory = directory();
    let tier = tier(directory.path(), 64 << 20).write_behind(128);
    let random = pages(&mut Pages::new(46), 512);
    let newest = std::sync::Mutex::new(Vec::<(Slot, usize)>::new());
    let (end, waited) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut page = [0; BASE_PAGE_BYTES];
                while end.load(Relaxed) == 0 {
                    let last = newest.lock().unwrap().clone();
                    for (slot, at) in last.iter().rev() {
                        let loaded = tier.load(*slot, random[*at].1, &mut page);
                        let loaded = loaded.unwrap_or_else(|e| panic!("page {at}: {e}"));
                        if loaded == Loaded::Done {
                            waited.fetch_add(1, Relaxed);
                            assert!(page == random[*at].0, "page {at}");
                        }
                    }
                }
            });
        }
        let begun = Instant::now();
        let mut kept: Vec<(Slot, usize)> = Vec::new();
        while begun.elapsed() < Duration::from_secs(2) && kept.len() < 16_000 {
            let at = kept.len() % 512;
            let slots = stored(&tier, &random[at..at + 8]);
            let new: Vec<_> = slots.into_iter().zip(at..).collect();
            kept.extend(&new);
            *newest.lock().unwrap() = new;
        }
        end.store(1, Relaxed);
        println!("{} stored", kept.len());
    });
    assert!(waited.into_inner() > 100);
}

/// Half of the file refuses writes. Pages that wait for a place there stay, and the other half is
/// still used.
#[test]
fn file_with_a_bad_part_stays_open_to_pages_that_fit_elsewhere() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("half", flags).unwrap();
    ftruncate(&file, SLAB_BYTES).unwrap();
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    let backing = Backing::inherit(file, "file:test".to_owned(), Bytes(2 * SLAB_BYTES)).unwrap();
    let tier = tier_over(backing).write_behind(256);
    let idle_work = || ();
    let subject = subject(&tier, &idle_work);
    let pages = pages(&mut Pages::new(47), 400);
    let good = stored(&tier, &pages[..250]);
    assert_eq!(waiting(&subject, &good, &pages), 0);
    let stuck = stored(&tier, &pages[250..400]);
    assert_eq!(waiting(&subject, &stuck, &pages[250..]), 150);
    // Six of these fit. The device refuses the rest; 144 of them came before and stay.
    let failed = Err(StoreError::Failed(FailKind::Io));
    assert_eq!(store_all(&tier, &pages[..60]), [failed; 60]);
    assert_eq!(waiting(&subject, &stuck, &pages[250..]), 144);
    tier.free(&good[..100]);
    let begun = Instant::now();
    let later = loop {
        std::thread::sleep(PAUSE_FIRST);
        let results = store_all(&tier, &pages[..60]);
        if let Ok(slots) = results.into_iter().collect::<Result<Vec<_>, _>>() {
            break slots;
        }
        assert!(begun.elapsed() < 4 * PAUSE_MAX, "the tier stays closed");
    };
    assert_eq!(waiting(&subject, &later, &pages), 0);
    assert_eq!(waiting(&subject, &stuck, &pages[250..]), 144);
    assert_eq!(waiting(&subject, &good[100..], &pages[100..]), 0);
}

#[test]
fn file_gives_space_back_at_leisure_or_when_half_of_it_is_empty() {
    let directory = directory();
    let tier = tier(directory.path(), 200 << 20);
    let one = pages(&mut Pages::new(48), 256);
    let slabs: Vec<Vec<Slot>> = (0..100).map(|_| stored(&tier, &one)).collect();
    let discards = || tier.meter().read().slabs_discarded + tier.meter().read().discards_failed;
    // 45 of 100 are empty. While busy, the tier keeps them; when idle, it discards two at a time.
    slabs[..45].iter().for_each(|slots| tier.free(slots));
    let more = stored(&tier, &one[..10]);
    assert_eq!(discards(), 0);
    tier.tidy();
    assert_eq!(discards(), 2);
    // More than half.
    slabs[45..80].iter().for_each(|slots| tier.free(slots));
    tier.free(&stored(&tier, &one[..10]));
    assert_eq!(discards(), 4);
    for _ in 0..100 {
        tier.tidy();
    }
    let held = tier.usage().held.0 / SLAB_BYTES;
    assert!(
        (20..=21 + DIRTY_SLABS_KEPT as u64).contains(&held),
        "{held} MiB held"
    );
    tier.free(&more);
}
