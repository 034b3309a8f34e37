//! Reads the copies that are to move, many at a time. Step 2 of 3 of a move in the background.
//!
//! A copy on a device is read by this thread's own io_uring, one on another machine is fetched. A
//! page-in that waits for the same device goes first.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{Fetched, Inbox, LoadError, Loaded, Nanos, PageKey, PageSize};
use undercroft_engine::DemoteItem;
use undercroft_engine::limits::DEMOTE_PAGES_MAX;
use undercroft_sys::ring::PageRing;
use undercroft_tier::mailbox::Mailbox;
use undercroft_tier::read_run::ReadRun;

use crate::books::metered::MeteredTier;

/// Reads in flight. A page-in waits for this many at most.
pub(crate) const READS_AT_ONCE: usize = 2;

/// Fetches in flight.
const FETCHES_AT_ONCE: usize = 32;

/// Longest wait for a fetch; tiers have a shorter deadline.
const FETCH_MAX: Duration = Duration::from_secs(10);

/// Most pages of one read: 64 KiB.
const READ_PAGES: usize = 16;

/// Longest pause for page-ins. A device that is never idle is read all the same.
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Time between two looks whether one still waits.
const PAUSE: Duration = Duration::from_micros(200);

// A token has 16 bits for the first page of a read, and 16 for how many.
const _: () = assert!(DEMOTE_PAGES_MAX <= 0xffff && READ_PAGES <= 0xffff);

/// State of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The copy is not there.
    Gone,
    /// The copy was read twice and does not verify. It stays where it is.
    Bad,
    /// Its bytes must have this checksum.
    Reading { sum: u64, again: bool },
    /// Its bytes are there and have this checksum, which goes along with them.
    Ready(u64),
}

/// Buffers for [`DEMOTE_PAGES_MAX`] copies, and the ring that fills them.
pub(super) struct Copies {
    /// Of the run.
    key: PageKey,
    ring: PageRing,
    states: Vec<State>,
    /// In which copy's page the block arrives that a copy is in.
    block_at: Vec<usize>,
    reaped: Vec<(u64, Result<usize, i32>)>,
    to_retry: Vec<usize>,
    fetched: Arc<Mailbox>,
    fetches: usize,
}

impl Copies {
    /// * `page`: size of the pages of all tiers.
    pub(super) fn new(key: &PageKey, page: PageSize) -> std::io::Result<Copies> {
        let pages = page.at_once(DEMOTE_PAGES_MAX);
        Ok(Copies {
            key: key.clone(),
            ring: PageRing::new(READS_AT_ONCE as u32, pages, page)?,
            states: Vec::with_capacity(DEMOTE_PAGES_MAX),
            block_at: Vec::with_capacity(DEMOTE_PAGES_MAX),
            reaped: Vec::with_capacity(READS_AT_ONCE),
            to_retry: Vec::new(),
            fetched: Arc::default(),
            fetches: 0,
        })
    }

    /// Reads the copies of `items`. Each may be freed meanwhile: the engine is asked afterwards.
    ///
    /// Bytes that were read from a device are verified. Otherwise one wrong read, which a fault
    /// would repeat, would cost the page. They are read once more, and then left where they are.
    pub(super) fn read(&mut self, from: &MeteredTier, items: &[DemoteItem]) {
        assert!(
            items.len() <= self.ring.arena().len(),
            "more copies than buffers"
        );
        self.states.clear();
        self.block_at.clear();
        let mut run: Option<ReadRun> = None;
        for (at, item) in items.iter().enumerate() {
            self.states.push(State::Gone);
            self.block_at.push(at);
            let Some(place) = self.begin(from, at, item, false) else {
                continue;
            };
            let bytes = self.ring.arena().bytes(1) as u64;
            let join = |run: &mut ReadRun| run.join(place, at, bytes, READ_PAGES);
            match run.as_mut().and_then(join) {
                Some(block) => self.block_at[at] = block,
                None => {
                    if let Some(run) = run.replace(ReadRun::of(place.0, place.1, at)) {
                        self.start(from, items, run);
                    }
                }
            }
        }
        if let Some(run) = run {
            self.start(from, items, run);
        }
        self.complete_all(from, items);
        for at in std::mem::take(&mut self.to_retry) {
            if let Some((fd, offset)) = self.begin(from, at, &items[at], true) {
                self.block_at[at] = at;
                self.start(from, items, ReadRun::of(fd, offset, at));
            }
        }
        self.complete_all(from, items);
    }

    /// The bytes of copy `at` of the last call of [`Copies::read`], with their checksum. `None`: it
    /// stays where it is.
    pub(super) fn get(&self, at: usize) -> Option<(&[u8], u64)> {
        match self.states[at] {
            State::Ready(sum) => Some((self.ring.arena().pages(at, at + 1)?, sum)),
            State::Gone | State::Bad | State::Reading { .. } => None,
        }
    }

    /// Whether copy `at` was read and did not verify. If its slot was given to another page
    /// meanwhile, that is no error.
    pub(super) fn is_bad(&self, at: usize) -> bool {
        self.states[at] == State::Bad
    }

    /// Takes a copy from memory, or says where to read it.
    fn begin(
        &mut self,
        from: &MeteredTier,
        at: usize,
        item: &DemoteItem,
        again: bool,
    ) -> Option<(RawFd, u64)> {
        let sum = from.tier.checksum(item.slot, item.stamp)?;
        let page = self.ring.arena_mut().page_mut(at)?;
        let loaded = from.tier.load(item.slot, item.stamp, page);
        let (state, place) = match loaded {
            Ok(Loaded::Done) => (State::Ready(sum), None),
            Ok(Loaded::Read { fd, offset }) => (State::Reading { sum, again }, Some((fd, offset))),
            Ok(Loaded::Fetch) => (State::Reading { sum, again }, None),
            Err(LoadError::Late) => (State::Gone, None),
            Err(LoadError::Corrupt | LoadError::Failed(_)) => (State::Bad, None),
        };
        self.states[at] = state;
        if loaded == Ok(Loaded::Fetch) {
            self.fetch(from, at, item);
        }
        place
    }

    fn fetch(&mut self, from: &MeteredTier, at: usize, item: &DemoteItem) {
        pause_for_page_ins(from);
        while self.fetches >= FETCHES_AT_ONCE {
            self.take_fetched();
        }
        let inbox: Arc<dyn Inbox> = self.fetched.clone();
        self.fetches += 1;
        let token = at as u64;
        from.tier.fetch(item.slot, item.stamp, token, &inbox);
    }

    fn start(&mut self, from: &MeteredTier, items: &[DemoteItem], run: ReadRun) {
        pause_for_page_ins(from);
        while self.ring.in_flight() >= READS_AT_ONCE {
            self.complete(from, items);
        }
        let (first, end) = (run.pages().start, run.pages().end);
        let token = (run.first as u64) << 16 | run.items as u64;
        let bytes = self.ring.arena().bytes(run.blocks) as u64;
        let started = match from.tier.reading(run.offset, bytes) {
            Nanos(0) => self.ring.read(run.fd, run.offset, first, end, token),
            Nanos(ns) => {
                let least = Duration::from_nanos(ns);
                let place = (run.fd, run.offset);
                self.ring.read_slowly(place, first, end, token, least)
            }
        };
        assert!(
            started.is_ok(),
            "an operation was free, and these pages idle"
        );
        let _ = self.ring.submit(0);
    }

    /// Waits for at least one fetch. Those that came were verified by the tier.
    fn take_fetched(&mut self) {
        let mut arrivals = self.fetched.wait(FETCH_MAX);
        if arrivals.is_empty() {
            // This process, and the tier's threads with it, may have been stopped for so long.
            arrivals = self.fetched.wait(FETCH_MAX);
        }
        assert!(!arrivals.is_empty(), "a tier broke its deadline");
        for Fetched { token, page } in arrivals {
            self.fetches -= 1;
            let at = token as usize;
            let State::Reading { sum, .. } = self.states[at] else {
                continue;
            };
            self.states[at] = match (page, self.ring.arena_mut().page_mut(at)) {
                (Ok(bytes), Some(page)) => {
                    page.copy_from_slice(&bytes);
                    State::Ready(sum)
                }
                (Err(LoadError::Late), _) | (_, None) => State::Gone,
                (Err(_), _) => State::Bad,
            };
        }
    }

    fn complete_all(&mut self, from: &MeteredTier, items: &[DemoteItem]) {
        while self.fetches > 0 {
            self.take_fetched();
        }
        while self.ring.in_flight() > 0 {
            self.complete(from, items);
        }
    }

    /// Waits for at least one read, and verifies what has been read.
    fn complete(&mut self, from: &MeteredTier, items: &[DemoteItem]) {
        let _ = self.ring.submit(1);
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.clear();
        self.ring.reap(|token, result| reaped.push((token, result)));
        for (token, result) in &reaped {
            let (first, count) = ((token >> 16) as usize, (token & 0xffff) as usize);
            let got = result.unwrap_or(0) / self.ring.arena().bytes(1);
            for at in ReadRun::order(first, count) {
                let whole = self.block_at[at] - first < got;
                self.read_done(from, at, &items[at], whole);
            }
        }
        self.reaped = reaped;
    }

    /// * `whole`: all its bytes came.
    fn read_done(&mut self, from: &MeteredTier, at: usize, item: &DemoteItem, whole: bool) {
        let State::Reading { sum, again } = self.states[at] else {
            return;
        };
        let arena = self.ring.arena_mut();
        let verified = whole
            && arena.copy(self.block_at[at], at)
            && arena.page_mut(at).is_some_and(|page| {
                from.tier.unpack(item.slot, page) && self.key.checksum(page, item.stamp) == sum
            });
        self.states[at] = if verified {
            State::Ready(sum)
        } else {
            State::Bad
        };
        if self.states[at] == State::Bad && !again {
            self.to_retry.push(at);
        }
    }
}

/// A page-in that waits for the same device goes first, for a while.
pub(super) fn pause_for_page_ins(tier: &MeteredTier) {
    let until = Instant::now() + PAUSE_MAX;
    while tier.page_ins.load(Ordering::Relaxed) > 0 && Instant::now() < until {
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageNo, Stamp, Store, StoreError, Tier, TierId};
    use undercroft_model::content::Content;
    use undercroft_model::tier::{CLUSTER, FakeTier};
    use undercroft_sys::mapping::SharedMemory;
    use undercroft_tier::file::{Backing, FileTier};

    use super::*;

    const STAMP: Stamp = Stamp(3);
    const PAGES: usize = 100;

    fn page(no: usize) -> Vec<u8> {
        (0..BASE_PAGE_BYTES)
            .map(|at| (at / 64 + no) as u8)
            .collect()
    }

    /// Stores pages.
    fn stored<B: AsRef<[u8]>>(tier: &dyn Tier, bytes_of: impl Fn(usize) -> B) -> Vec<DemoteItem> {
        let store = |no: usize| {
            let bytes = bytes_of(no);
            let mut batch = [Store {
                page: bytes.as_ref(),
                stamp: STAMP,
                checksum: PageKey::KNOWN.checksum(bytes.as_ref(), STAMP),
                result: Err(StoreError::Full),
            }];
            tier.store(&mut batch);
            DemoteItem {
                no: PageNo(no as u32),
                tier: TierId(0),
                slot: batch[0].result.expect("room for a page"),
                stamp: STAMP,
                selected: 0,
            }
        };
        (0..PAGES).map(store).collect()
    }

    /// A file with pages; `waiting` of them may wait in memory.
    fn file(folder: &std::path::Path, waiting: usize) -> (MeteredTier, Vec<DemoteItem>) {
        let tier = empty(folder, waiting, false);
        let items = stored(&tier, page);
        (MeteredTier::new(Box::new(tier), None), items)
    }

    fn empty(folder: &std::path::Path, waiting: usize, packs: bool) -> FileTier {
        let path = folder.join("tier");
        let backing = Backing::open(&path, Some(Bytes(8 << 20))).expect("a file");
        let backing = backing.packing(packs);
        let table = FileTier::table_bytes(&backing);
        let memory = SharedMemory::create("uc-test-table", table).expect("a memfd");
        let tier = FileTier::new(backing, memory, &PageKey::KNOWN).expect("an empty tier");
        tier.write_behind(waiting)
    }

    /// Copies in few blocks: a damaged block costs all of its pages, and no others.
    #[test]
    fn copies_that_share_blocks_are_read_in_any_order() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let tier = empty(folder.path(), 0, true);
        let pages: Vec<_> = (0..PAGES).map(page).collect();
        let mut batch: Vec<_> = pages
            .iter()
            .map(|page| Store {
                page,
                stamp: STAMP,
                checksum: PageKey::KNOWN.checksum(page, STAMP),
                result: Err(StoreError::Full),
            })
            .collect();
        tier.store(&mut batch);
        let item = |(no, store): (usize, &Store<'_>)| DemoteItem {
            no: PageNo(no as u32),
            tier: TierId(0),
            slot: store.result.expect("room for a page"),
            stamp: STAMP,
            selected: 0,
        };
        let mut items: Vec<_> = batch.iter().enumerate().map(item).collect();
        let tier = MeteredTier::new(Box::new(tier), None);
        let place = |item: &DemoteItem| tier.tier.load(item.slot, STAMP, &mut []).expect("a place");
        assert!(tier.tier.usage().stored.0 * 3 < tier.tier.usage().logical.0);
        let bad = place(&items[50]);
        damage(&tier, &items[50]);
        items.swap(3, 70);
        items[20..40].reverse();
        let mut copies = Copies::new(&PageKey::KNOWN, PageSize::Base).expect("a ring");
        for _ in 0..3 {
            copies.read(&tier, &items);
            for (at, item) in items.iter().enumerate() {
                match copies.get(at) {
                    None => assert_eq!(place(item), bad, "copy {at} is not there"),
                    Some((bytes, _)) => assert_eq!(bytes, pages[item.no.0 as usize], "copy {at}"),
                }
            }
            assert!((2..=7).contains(&(0..PAGES).filter(|at| copies.is_bad(*at)).count()));
        }
    }

    /// Changes a byte of a copy. The file has no name any more.
    fn damage(tier: &MeteredTier, item: &DemoteItem) {
        let loaded = tier.tier.load(item.slot, STAMP, &mut []);
        let Ok(Loaded::Read { fd, offset }) = loaded else {
            panic!("{loaded:?} of a page on a device");
        };
        let path = format!("/proc/self/fd/{fd}");
        let mut file = std::fs::File::options().write(true).open(path).expect("it");
        file.seek(SeekFrom::Start(offset)).expect("a place");
        file.write_all(&[0xee]).expect("a byte");
    }

    /// Every copy comes with its bytes, in any order, but not one that is damaged or gone.
    #[test]
    fn copies_of_a_device_are_read_and_verified_or_left() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let (tier, mut items) = file(folder.path(), 0);
        items.swap(3, 70);
        damage(&tier, &items[10]);
        tier.tier.free(&[items[20].slot]);
        let mut copies = Copies::new(&PageKey::KNOWN, PageSize::Base).expect("a ring");
        for _ in 0..3 {
            copies.read(&tier, &items);
            for (at, item) in items.iter().enumerate() {
                let expected = page(item.no.0 as usize);
                match copies.get(at) {
                    None => assert!([10, 20].contains(&at), "copy {at} is not there"),
                    Some((bytes, sum)) => {
                        assert_eq!(bytes, expected, "copy {at}");
                        assert_eq!(sum, PageKey::KNOWN.checksum(bytes, STAMP));
                        assert!(![10, 20].contains(&at), "copy {at} is there");
                    }
                }
            }
            assert!(copies.is_bad(10) && !copies.is_bad(20), "one is gone");
        }
    }

    /// Pages that wait to be written are taken from memory.
    #[test]
    fn copies_that_wait_to_be_written_are_not_read() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let (tier, items) = file(folder.path(), 256);
        let mut first = vec![0; BASE_PAGE_BYTES];
        let loaded = tier.tier.load(items[0].slot, STAMP, &mut first);
        assert_eq!(loaded, Ok(Loaded::Done), "it waits");
        let mut copies = Copies::new(&PageKey::KNOWN, PageSize::Base).expect("a ring");
        copies.read(&tier, &items);
        for (at, item) in items.iter().enumerate() {
            let (bytes, _) = copies.get(at).expect("a copy");
            assert_eq!(bytes, page(item.no.0 as usize));
        }
    }

    /// Copies on another machine are fetched; one that is gone is not had.
    #[test]
    fn copies_on_another_machine_are_fetched() {
        let capacity = Bytes(8 << 20);
        let tier = FakeTier::new("elsewhere", &CLUSTER, capacity, 1);
        let items = stored(&tier, |no| Content::numbered(no as u64 + 1).bytes());
        tier.free(&[items[20].slot]);
        let tier = MeteredTier::new(Box::new(tier), None);
        let mut copies = Copies::new(&PageKey::KNOWN, PageSize::Base).expect("a ring");
        for _ in 0..3 {
            copies.read(&tier, &items);
            for (at, item) in items.iter().enumerate() {
                let expected = Content::numbered(u64::from(item.no.0) + 1).bytes();
                let got = copies.get(at).map(|(bytes, _)| bytes);
                assert_eq!(got, (at != 20).then_some(&expected[..]), "copy {at}");
            }
        }
    }

    /// A read waits while a page-in does, but not for ever.
    #[test]
    fn page_ins_go_first_for_a_while() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let (tier, items) = file(folder.path(), 0);
        tier.page_ins.store(1, Ordering::Relaxed);
        let mut copies = Copies::new(&PageKey::KNOWN, PageSize::Base).expect("a ring");
        let begun = Instant::now();
        copies.read(&tier, &items[..1]);
        assert!(begun.elapsed() >= PAUSE_MAX, "{:?}", begun.elapsed());
        assert!(copies.get(0).is_some());
    }
}
