//! The tiers of a simulation: slots, space, and the device behind them.

use undercroft_base::{Bytes, Slot, TierId};
use undercroft_device::{Attach, Device, Time, profiles};

use super::page_outs::PageOuts;
use crate::setup::{DeviceLayout, SimTier, TierModel, WriteOut};

/// Reads that the mean time of a read remembers.
const LOADS: f64 = 64.0;

/// Counts of a tier, besides its device's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TierCounters {
    /// Pages read back.
    pub pages_read: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Most pages held at once.
    pub pages_peak: u64,
    /// Most slabs, of 256 neighbouring slots, that had a page at once.
    pub slabs_peak: u64,
    /// Writes to the slot written most.
    pub slot_writes_max: u32,
}

/// A tier at work.
pub struct ReplayTier {
    /// As it was described.
    pub spec: SimTier,
    /// Its counts.
    pub counters: TierCounters,
    /// How long page-outs to it took.
    pub page_outs: PageOuts,
    device: Option<Device>,
    page_bytes: u64,
    pages_max: u64,
    held: u64,
    slabs: Slabs,
    slots: Slots,
    homes: Option<Homes>,
    wear: Vec<u32>,
    /// Nanoseconds of a read lately; 0 before the first.
    load_ns: f64,
}

impl ReplayTier {
    /// An empty tier for pages of `page_bytes`.
    ///
    /// * `homes`: how many places belong to pages. A page may be here twice: a fork child's, as it
    ///   was at the fork, and its parent's.
    pub fn new(spec: &SimTier, page_bytes: u64, homes: Option<u64>) -> ReplayTier {
        let device = match &spec.kind {
            TierModel::Pool { .. } => None,
            TierModel::Device { profile, .. } => {
                let mut device = Device::new((**profile).clone());
                if let Some(queue) = spec.queue {
                    device.set_write_slots(queue);
                }
                Some(device)
            }
        };
        let is_disk = device
            .as_ref()
            .is_some_and(|device: &Device| device.profile().disk.is_some());
        ReplayTier {
            counters: TierCounters::default(),
            page_outs: PageOuts::default(),
            device,
            page_bytes,
            pages_max: spec.size.map_or(u64::MAX, |size| size.0 / page_bytes),
            held: 0,
            slabs: Slabs::default(),
            slots: Slots::in_slabs(is_disk),
            homes: homes.map(Homes::new),
            wear: Vec::new(),
            load_ns: 0.0,
            spec: spec.clone(),
        }
    }

    /// The device, if it is one.
    pub fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Bytes of pages in a byte of memory. `None` for a device.
    pub fn ratio(&self) -> Option<f64> {
        match self.spec.kind {
            TierModel::Pool { ratio, .. } => Some(ratio),
            TierModel::Device { .. } => None,
        }
    }

    /// Whether neighbouring pages are read in one request.
    pub fn merges(&self) -> bool {
        let device = self.device.as_ref();
        device.is_some_and(|device| device.profile().attach == Attach::Block)
    }

    /// Pages held now.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Most bytes of pages held.
    pub fn peak(&self) -> Bytes {
        Bytes(self.counters.pages_peak * self.page_bytes)
    }

    /// Whether one more page fits.
    pub fn has_room(&self) -> bool {
        self.held < self.pages_max
    }

    /// How many more pages fit.
    pub fn free_pages(&self) -> u64 {
        self.pages_max.saturating_sub(self.held)
    }

    /// Takes a place for one page.
    ///
    /// * `home`: the page's own place.
    /// * `over`: the place holds only a copy of the page that is about to go.
    pub fn take(&mut self, home: u64, over: bool) -> Slot {
        self.held += 1;
        self.counters.pages_peak = self.counters.pages_peak.max(self.held);
        let slot = match self.spec.kind {
            TierModel::Device {
                layout: DeviceLayout::Log,
                ..
            } => self.slots.take(),
            _ => (self.homes.as_mut()).map_or(home, |homes| homes.take(home, over)),
        };
        self.slabs.take(slot);
        self.counters.slabs_peak = self.counters.slabs_peak.max(self.slabs.held);
        Slot(slot)
    }

    /// The page is no longer here.
    pub fn free(&mut self, slot: Slot) {
        assert!(self.held > 0, "more pages left the tier than came");
        self.held -= 1;
        self.slabs.free(slot.0);
        if let TierModel::Device {
            layout: DeviceLayout::Log,
            ..
        } = self.spec.kind
        {
            self.slots.free(slot.0);
        } else if let Some(homes) = &mut self.homes {
            homes.free(slot.0);
        }
    }

    /// Writes one page, requested at `now`. Returns when the requester may continue.
    ///
    /// * `client`: the client whose page leaves memory by this write; `None`: the page moves.
    pub fn write(&mut self, now: Time, slot: Slot, client: Option<usize>) -> Time {
        self.counters.pages_written += 1;
        let at = slot.0 as usize;
        if at >= self.wear.len() {
            self.wear.resize(at + 1, 0);
        }
        self.wear[at] += 1;
        self.counters.slot_writes_max = self.counters.slot_writes_max.max(self.wear[at]);
        let (offset, bytes) = (slot.0 * self.page_bytes, self.page_bytes);
        let behind = matches!(
            self.spec.kind,
            TierModel::Device {
                write_out: WriteOut::Behind,
                ..
            }
        );
        let end = match &mut self.device {
            None => now + Time::from_ns(profiles::COMPRESS_NS_PER_BYTE * bytes as f64),
            Some(device) if behind => {
                let writer = client.map(|client| client as u32);
                let until = device.write_behind(now, offset, bytes, writer);
                self.note_written();
                return until;
            }
            Some(device) => device.write(now, offset, bytes).end,
        };
        if let Some(client) = client {
            self.page_outs.add(client, end - now);
        }
        end
    }

    /// Counts the page-outs that the device has completed.
    fn note_written(&mut self) {
        let written = self.device.iter_mut().flat_map(Device::take_written);
        for done in written {
            self.page_outs.add(done.writer as usize, done.took);
        }
    }

    /// Reads `pages` neighbouring pages in one request. Returns when they are in memory.
    pub fn read(&mut self, now: Time, slot: Slot, pages: u64) -> Time {
        self.counters.pages_read += pages;
        let (offset, bytes) = (slot.0 * self.page_bytes, pages * self.page_bytes);
        let end = match &mut self.device {
            None => now + Time::from_ns(profiles::DECOMPRESS_NS_PER_BYTE * bytes as f64),
            Some(device) => device.read(now, offset, bytes).end,
        };
        let took = (end - now).ns();
        self.load_ns += match self.load_ns {
            0.0 => took,
            mean => (took - mean) / LOADS,
        };
        end
    }

    /// Nanoseconds of a read lately; 0 before the first.
    pub fn load_ns(&self) -> u64 {
        self.load_ns as u64
    }

    /// Whether a write at `now` would not have to wait: there is no queue, or it has room.
    pub fn queue_has_room(&mut self, now: Time) -> bool {
        let device = self.device.as_mut();
        device.is_none_or(|device| device.write_slots_free(now) > 0)
    }

    /// Bounds the queue of deferred writes; see [`Device::set_write_slots`].
    pub fn set_write_slots(&mut self, slots: u32) {
        if let Some(device) = &mut self.device {
            device.set_write_slots(slots);
        }
    }

    /// Bounds the channels of deferred writes; see [`Device::set_write_channels`].
    pub fn set_write_channels(&mut self, channels: u32) {
        if let Some(device) = &mut self.device {
            device.set_write_channels(channels);
        }
    }

    /// Its clients' clocks may be far apart. Before the first request.
    pub fn set_unordered(&mut self) {
        if let Some(device) = &mut self.device {
            device.set_unordered();
        }
    }

    /// No request comes for a time before `now` any more.
    pub fn forget(&mut self, now: Time) {
        if let Some(device) = &mut self.device {
            device.forget(now);
            self.note_written();
        }
    }

    /// Resets the counts, and keeps the pages: the simulation proper starts here.
    pub fn start(&mut self) {
        self.counters = TierCounters {
            pages_peak: self.held,
            slabs_peak: self.slabs.held,
            ..TierCounters::default()
        };
        self.wear.fill(0);
    }

    /// Finishes deferred work. Returns when the device is idle.
    pub fn finish_writes(&mut self) -> Time {
        let device = self.device.as_mut();
        let end = device.map_or(Time::default(), Device::finish_writes);
        self.note_written();
        end
    }
}

/// The engine's number of the tier at a place.
pub fn tier_id(at: usize) -> TierId {
    TierId(at as u8)
}

/// Slabs that have pages.
#[derive(Default)]
struct Slabs {
    pages: Vec<u32>,
    held: u64,
}

impl Slabs {
    fn take(&mut self, slot: u64) {
        let slab = slot as usize / SLAB_PAGES;
        if slab >= self.pages.len() {
            self.pages.resize(slab + 1, 0);
        }
        self.held += u64::from(self.pages[slab] == 0);
        self.pages[slab] += 1;
    }

    fn free(&mut self, slot: u64) {
        let pages = &mut self.pages[slot as usize / SLAB_PAGES];
        *pages -= 1;
        self.held -= u64::from(*pages == 0);
    }
}

/// Places that belong to pages, and more behind them for pages whose own place is taken.
struct Homes {
    /// Copies at each place: two while one is overwritten.
    taken: Vec<u8>,
    more: Slots,
}

impl Homes {
    fn new(homes: u64) -> Homes {
        Homes {
            taken: vec![0; homes as usize],
            more: Slots::default(),
        }
    }

    fn take(&mut self, home: u64, over: bool) -> u64 {
        let taken = &mut self.taken[home as usize];
        if *taken > 0 && !over {
            return self.taken.len() as u64 + self.more.take();
        }
        *taken += 1;
        home
    }

    fn free(&mut self, slot: u64) {
        match slot.checked_sub(self.taken.len() as u64) {
            None => self.taken[slot as usize] -= 1,
            Some(more) => self.more.free(more),
        }
    }
}

/// Pages of a slab: 1 MiB of small ones, as in a live run.
const SLAB_PAGES: usize = 256;

/// Places of a log: the next free one, cyclically. On a disk, slabs that are free as a whole are
/// filled one after the other, so that what is written together lies together.
#[derive(Default)]
struct Slots {
    taken: Vec<bool>,
    free: usize,
    cursor: usize,
    /// Places taken in each slab, and the slabs that are free; of a disk.
    slabs: Option<(Vec<u16>, Vec<usize>)>,
}

impl Slots {
    fn in_slabs(yes: bool) -> Slots {
        Slots {
            slabs: yes.then(Default::default),
            ..Slots::default()
        }
    }

    fn take(&mut self) -> u64 {
        if let Some((taken, free)) = &mut self.slabs {
            if self.cursor.is_multiple_of(SLAB_PAGES) {
                let slab = free.pop().unwrap_or_else(|| {
                    taken.push(0);
                    taken.len() - 1
                });
                self.cursor = slab * SLAB_PAGES;
            }
            let slot = self.cursor;
            taken[slot / SLAB_PAGES] += 1;
            self.cursor += 1;
            return slot as u64;
        }
        // Grown before it is full, so that a search is short.
        if self.free * 8 <= self.taken.len() {
            let more = (self.taken.len() / 4).max(64);
            self.taken.resize(self.taken.len() + more, false);
            self.free += more;
        }
        while self.taken[self.cursor] {
            self.cursor = (self.cursor + 1) % self.taken.len();
        }
        self.taken[self.cursor] = true;
        self.free -= 1;
        self.cursor as u64
    }

    fn free(&mut self, slot: u64) {
        if let Some((taken, free)) = &mut self.slabs {
            let slab = slot as usize / SLAB_PAGES;
            taken[slab] -= 1;
            let filling =
                !self.cursor.is_multiple_of(SLAB_PAGES) && self.cursor / SLAB_PAGES == slab;
            if taken[slab] == 0 && !filling {
                free.push(slab);
            }
            return;
        }
        assert!(self.taken[slot as usize], "a place is freed twice");
        self.taken[slot as usize] = false;
        self.free += 1;
    }
}
