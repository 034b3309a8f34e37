//! Measures a tier: what one page takes to be read, written and freed, how many bytes a second pass
//! in sequence, and how many reads a device serves at once. Source: RapidSwap §3.3, which measures
//! a device when it is registered.
//!
//! It measures the tier, not the device alone: compression, checksums and slots are part of it, and
//! so are the times of `shape=`. What a fault or an eviction costs besides is not. The tier is its
//! own, empty at first; nothing is left behind.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use undercroft_base::{
    BASE_PAGE_BYTES, Bytes, FailKind, Inbox, LoadError, Loaded, Nanos, PageKey, PageSize, Slot,
    Stamp, Store, StoreError, Tier,
};
use undercroft_sys::mapping::PageBuf;
use undercroft_sys::ring::PageRing;

use crate::mailbox::Mailbox;
use crate::open::{OpenError, OpenTier};
use crate::profile::{Profile, Times};
use crate::read_run::ReadRun;
use crate::spec::{Limit, TierSpec};

/// Pages that are written, read and freed one by one; fewer if the tier is small or slow.
const PAGES: usize = 4000;
/// At least this many, however slow the tier is.
const PAGES_MIN: usize = 64;
/// Pages of [`load_time`].
const LOADS: u64 = 512;
/// Time after which one kind of operation ends.
const LONGEST: Duration = Duration::from_secs(2);
/// Bytes that pass in sequence; fewer if the tier is small or slow.
const SEQUENCE_BYTES: u64 = 128 << 20;
/// Pages of one sequential write. As many are read at once, in several reads; the ring has
/// as many operations.
pub const RUN_PAGES: usize = 256;
/// Pages of one sequential read: as many as a fault brings along at most.
const READ_PAGES: usize = 64;
/// Reads in flight at once, of which the best rate counts.
const DEPTHS: [usize; 6] = [2, 4, 8, 16, 32, 64];
/// Time of one of them.
const RATE_TIME: Duration = Duration::from_millis(150);
/// A pool without a size in bytes.
const POOL_BYTES: Bytes = Bytes(128 << 20);

fn times(mut each: Vec<u64>) -> Times {
    each.sort_unstable();
    let at = |part: usize| each[(each.len() * part / 100).min(each.len() - 1)] as f64 / 1e9;
    Times {
        p50: at(50),
        p99: at(99),
    }
}

/// Why a tier could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The tier cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No ring to read with.
    #[error("cannot measure: {0}")]
    System(#[from] std::io::Error),
    /// A page was not stored.
    #[error("a page could not be written: {0}")]
    Store(#[from] StoreError),
    /// A page did not come back.
    #[error("a page could not be read: {0}")]
    Load(#[from] LoadError),
}

/// Measures the tier that `spec` describes. Takes some seconds, and up to 256 MiB of it.
///
/// Errors: it cannot be opened, or a page does not come back as it was.
pub fn measure(spec: &TierSpec) -> Result<Profile, MeasureError> {
    let tier = open(spec)?;
    let mut bench = Bench {
        tier: tier.as_ref(),
        key: &PageKey::KNOWN,
        ring: PageRing::new(RUN_PAGES as u32, RUN_PAGES, PageSize::Base)?,
    };
    let capacity = bench.tier.info().capacity;
    let pages_max = (capacity.0 / BASE_PAGE_BYTES as u64) as usize / 2;
    // Once round, so that no first touch of memory is measured.
    let warm = bench.write_each(pages_max.min(PAGES))?.1;
    bench.tier.free(&warm);
    let (write, slots) = bench.write_each(pages_max.min(PAGES))?;
    let read = bench.read_each(&slots)?;
    let channels = bench.channels(&slots)?;
    let free = bench.free_each(&slots);
    let sequence = (pages_max / 2).min((SEQUENCE_BYTES / BASE_PAGE_BYTES as u64) as usize);
    // As in a run that goes on: as much stays in use as is freed, so nothing is discarded, and what
    // is written has its space.
    let stays = bench.write_all(sequence)?.1;
    let fresh = bench.write_all(sequence)?.1;
    bench.tier.free(&fresh);
    let (written, slots) = bench.write_all(sequence)?;
    let read_all = bench.read_all(&slots)?;
    bench.tier.free(&slots);
    bench.tier.free(&stays);
    let speed = |took: Duration| (slots.len() * BASE_PAGE_BYTES) as f64 / took.as_secs_f64();
    let info = bench.tier.info();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(Profile {
        name: spec.to_string(),
        kind: info.facts.kind.to_owned(),
        emulated: info.emulated,
        capacity_bytes: capacity.0,
        read_seconds: read,
        write_seconds: write,
        free_seconds: free,
        read_bytes_per_second: speed(read_all),
        write_bytes_per_second: speed(written),
        channels,
        measured_at: now.map_or(0, |since| since.as_secs()),
    })
}

/// The time that half of the reads of one page take at most, in random order. Writes 2 MiB, or half
/// of a small tier, and frees it. At most some seconds.
///
/// * `key`: of the tier.
///
/// Errors: a page does not come back as it was.
pub fn load_time(tier: &dyn Tier, key: &PageKey) -> Result<Nanos, MeasureError> {
    let pages = (tier.info().capacity.0 / BASE_PAGE_BYTES as u64 / 2).min(LOADS) as usize;
    let mut bench = Bench {
        tier,
        key,
        ring: PageRing::new(RUN_PAGES as u32, RUN_PAGES, PageSize::Base)?,
    };
    let (_, slots) = bench.write_all(pages)?;
    let read = bench.read_each(&slots);
    bench.tier.free(&slots);
    Ok(Nanos((read?.p50 * 1e9) as u64))
}

fn open(spec: &TierSpec) -> Result<Box<dyn Tier>, OpenError> {
    let pool = match spec.max {
        Some(Limit::Bytes(bytes)) => bytes,
        Some(Limit::PercentOfMemoryMax(_)) | None => POOL_BYTES,
    };
    let mut opened = OpenTier::open(spec, PageSize::Base, pool)?;
    let shape = opened.take_shape(spec);
    Ok(opened.make(pool, &PageKey::KNOWN)?.finish(shape, 0))
}

/// Page `number`: a quarter of its words are random, so it compresses as a heap does.
fn fill(number: usize, page: &mut [u8]) {
    let mut state = number as u64 + 1;
    for (at, word) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let value = if at % 4 == 0 { state } else { at as u64 };
        *word = value.to_ne_bytes();
    }
}

fn stamp(number: usize) -> Stamp {
    Stamp(number as u16)
}

struct Bench<'a> {
    tier: &'a dyn Tier,
    key: &'a PageKey,
    ring: PageRing,
}

impl Bench<'_> {
    /// Writes up to `count` pages, one by one.
    fn write_each(&mut self, count: usize) -> Result<(Times, Vec<Slot>), MeasureError> {
        let (mut each, mut slots) = (Vec::new(), Vec::new());
        let (mut page, begun) = ([0; BASE_PAGE_BYTES], Instant::now());
        for number in 0..count {
            if number >= PAGES_MIN && begun.elapsed() > LONGEST {
                break;
            }
            fill(number, &mut page);
            let mut item = [Store {
                page: &page,
                stamp: stamp(number),
                checksum: self.key.checksum(&page, stamp(number)),
                result: Err(StoreError::Full),
            }];
            let one = Instant::now();
            self.tier.store(&mut item);
            each.push(one.elapsed().as_nanos() as u64);
            slots.push(item[0].result?);
        }
        Ok((times(each), slots))
    }

    /// Reads the pages in a random order.
    fn read_each(&mut self, slots: &[Slot]) -> Result<Times, MeasureError> {
        let (mut each, begun) = (Vec::new(), Instant::now());
        let mut number = 0;
        for at in 0..slots.len() {
            if at >= PAGES_MIN && begun.elapsed() > LONGEST {
                break;
            }
            // A step that shares no factor with the count visits each page once.
            number = (number + 7919) % slots.len();
            let one = Instant::now();
            self.read_run(&slots[number..=number], number)?;
            each.push(one.elapsed().as_nanos() as u64);
        }
        Ok(times(each))
    }

    /// How many reads are served at the same time: the best rate that is seen with more and more of
    /// them in flight, over the rate of one at a time. `None`: no device is read.
    fn channels(&mut self, slots: &[Slot]) -> Result<Option<u32>, MeasureError> {
        let Some(mut alone) = self.read_rate(slots, 1)? else {
            return Ok(None);
        };
        let mut best = alone;
        for depth in DEPTHS {
            if let Some(rate) = self.read_rate(slots, depth)? {
                best = best.max(rate);
            }
        }
        // The machine may have been busy at first.
        alone = self.read_rate(slots, 1)?.unwrap_or(alone).max(alone);
        let most = DEPTHS[DEPTHS.len() - 1] as f64;
        Ok(Some((best / alone).round().clamp(1.0, most) as u32))
    }

    /// The rate of reads of one page, in random order, with `depth` of them in flight: reads a
    /// second. `None`: no device is read.
    fn read_rate(&mut self, slots: &[Slot], depth: usize) -> Result<Option<f64>, MeasureError> {
        // Each depth begins elsewhere: what is below may remember what it read.
        let (begun, mut done, mut number) = (Instant::now(), 0, depth * 101 % slots.len());
        let mut failed = None;
        let mut idle: Vec<usize> = (0..depth).collect();
        loop {
            let goes_on = begun.elapsed() < RATE_TIME;
            if !goes_on && self.ring.in_flight() == 0 {
                break;
            }
            while let Some(at) = idle.pop_if(|_| goes_on) {
                number = (number + 7919) % slots.len();
                let page = self.ring.arena_mut().page_mut(at).expect("an idle page");
                let loaded = self.tier.load(slots[number], stamp(number), page)?;
                let Loaded::Read { fd, offset } = loaded else {
                    return Ok(None);
                };
                let least =
                    Duration::from_nanos(self.tier.reading(offset, BASE_PAGE_BYTES as u64).0);
                let place = (fd, offset);
                let started = (self.ring).read_slowly(place, at, at + 1, at as u64, least);
                started.expect("as many operations as pages");
            }
            self.ring.submit(1)?;
            self.ring.reap(|at, read| {
                idle.push(at as usize);
                done += 1;
                if read != Ok(BASE_PAGE_BYTES) {
                    failed = Some(LoadError::Failed(FailKind::Io));
                }
            });
        }
        if let Some(error) = failed {
            return Err(error.into());
        }
        Ok(Some(f64::from(done) / begun.elapsed().as_secs_f64()))
    }

    fn free_each(&mut self, slots: &[Slot]) -> Times {
        let free = |slot: &Slot| {
            let one = Instant::now();
            self.tier.free(std::slice::from_ref(slot));
            one.elapsed().as_nanos() as u64
        };
        times(slots.iter().map(free).collect())
    }

    /// Writes up to `count` pages, 1 MiB at a time.
    fn write_all(&mut self, count: usize) -> Result<(Duration, Vec<Slot>), MeasureError> {
        let mut took = Duration::ZERO;
        let mut slots = Vec::new();
        let mut pages = PageBuf::new(RUN_PAGES, PageSize::Base)?;
        while slots.len() < count && (slots.is_empty() || took < LONGEST) {
            let run = RUN_PAGES.min(count - slots.len());
            let numbers = slots.len()..slots.len() + run;
            for (at, number) in numbers.clone().enumerate() {
                fill(number, pages.page_mut(at));
            }
            let mut batch: Vec<_> = numbers
                .enumerate()
                .map(|(at, number)| Store {
                    page: pages.page(at),
                    stamp: stamp(number),
                    checksum: self.key.checksum(pages.page(at), stamp(number)),
                    result: Err(StoreError::Full),
                })
                .collect();
            let one = Instant::now();
            self.tier.store(&mut batch);
            took += one.elapsed();
            for item in &batch {
                slots.push(item.result?);
            }
        }
        Ok((took, slots))
    }

    /// Reads all of them in their order, up to 1 MiB at a time.
    fn read_all(&mut self, slots: &[Slot]) -> Result<Duration, MeasureError> {
        let begun = Instant::now();
        for (at, run) in slots.chunks(RUN_PAGES).enumerate() {
            self.read_run(run, at * RUN_PAGES)?;
        }
        Ok(begun.elapsed())
    }

    /// Reads pages that were written one after the other, the first of them number `first`: on a
    /// device neighbours are one request, as for a fault. All bytes are verified.
    fn read_run(&mut self, slots: &[Slot], first: usize) -> Result<(), MeasureError> {
        let mut reads: Vec<ReadRun> = Vec::new();
        let mut block_at: Vec<usize> = (0..slots.len()).collect();
        let (mailbox, mut fetched) = (Arc::new(Mailbox::default()), 0);
        for (at, slot) in slots.iter().enumerate() {
            let page = self.ring.arena_mut().page_mut(at).expect("an idle page");
            match self.tier.load(*slot, stamp(first + at), page)? {
                Loaded::Done => {}
                Loaded::Read { fd, offset } => {
                    let bytes = BASE_PAGE_BYTES as u64;
                    let join = |run: &mut ReadRun| run.join((fd, offset), at, bytes, READ_PAGES);
                    match reads.last_mut().and_then(join) {
                        Some(block) => block_at[at] = block,
                        None => reads.push(ReadRun::of(fd, offset, at)),
                    }
                }
                Loaded::Fetch => {
                    let inbox: Arc<dyn Inbox> = mailbox.clone();
                    (self.tier).fetch(*slot, stamp(first + at), at as u64, &inbox);
                    fetched += 1;
                }
            }
        }
        for run in &reads {
            let (place, pages) = ((run.fd, run.offset), run.pages());
            let bytes = (run.blocks * BASE_PAGE_BYTES) as u64;
            let least = Duration::from_nanos(self.tier.reading(run.offset, bytes).0);
            let token = run.first as u64;
            let started = (self.ring).read_slowly(place, pages.start, pages.end, token, least);
            started.expect("as many operations as pages");
        }
        while self.ring.in_flight() > 0 {
            self.ring.submit(1)?;
            self.ring.reap(|_, _| {});
        }
        while fetched > 0 {
            for arrival in mailbox.wait(Duration::from_secs(1)) {
                arrival.page?; // verified
                fetched -= 1;
            }
        }
        let order = |run: &ReadRun| ReadRun::order(run.first, run.items);
        for at in reads.iter().flat_map(order) {
            let arena = self.ring.arena_mut();
            assert!(arena.copy(block_at[at], at), "all reads have ended");
            let page = arena.page_mut(at).expect("an idle page");
            if !self.tier.unpack(slots[at], page) {
                return Err(LoadError::Corrupt.into());
            }
            let kept = self.tier.checksum(slots[at], stamp(first + at));
            if kept != Some(self.key.checksum(page, stamp(first + at))) {
                return Err(LoadError::Corrupt.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(spec: &str) -> Profile {
        let found = measure(&spec.parse().unwrap()).unwrap();
        println!("{found:?}");
        assert!(found.read_seconds.p50 <= found.read_seconds.p99 && found.read_seconds.p50 > 0.0);
        assert!(found.write_seconds.p50 <= found.write_seconds.p99);
        assert!(found.write_seconds.p50 > 0.0);
        assert!(found.free_seconds.p50 <= found.free_seconds.p99);
        assert!(found.read_bytes_per_second > 0.0 && found.write_bytes_per_second > 0.0);
        found
    }

    #[test]
    fn every_kind_is_measured_and_a_shape_makes_it_as_slow_as_its_device() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = folder.path().display();
        let ram = measured("ram,max=8M");
        assert!(!ram.emulated && ram.capacity_bytes == 8 << 20);
        assert!(measured(&format!("nvm:{path},size=8M")).emulated);
        assert!(!measured(&format!("file:{path},size=8M")).emulated);
        assert_eq!(ram.channels, None);
        let channels = |name: &str| undercroft_device::by_name(name).unwrap().channels;
        for (spec, least_us, shape) in [
            ("ram,max=8M,shape=optane-ssd".to_owned(), 9.0, None),
            (format!("nvm:{path},size=8M,shape=hdd-7200"), 30.0, None),
            (
                format!("file:{path},size=8M,shape=nvme"),
                80.0,
                Some("nvme"),
            ),
            (
                format!("file:{path},size=8M,shape=sata-ssd"),
                85.0,
                Some("sata-ssd"),
            ),
        ] {
            let slow = measured(&spec);
            assert!(slow.emulated, "{spec}");
            assert!(slow.read_seconds.p50 >= least_us / 1e6, "{spec}");
            assert_eq!(slow.channels.is_some(), shape.is_some(), "{spec}");
            // A busy machine or a slow disk may serve fewer; never more than there are, but for
            // noise.
            if let (Some(found), Some(shape)) = (slow.channels, shape) {
                let most = channels(shape);
                assert!(
                    (2..=most + most / 4 + 1).contains(&found),
                    "{spec}: {found} of {most}"
                );
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_cannot_be_opened_is_not_measured() {
        for spec in ["nvm:/dev/null,size=1M", "file:/no/such/place/x,size=1M"] {
            let error = measure(&spec.parse().unwrap()).unwrap_err().to_string();
            assert!(
                error.contains(spec.split([':', ',']).nth(1).unwrap()),
                "{error}"
            );
        }
    }
}
