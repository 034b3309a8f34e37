//! Copies of large pages: compressed as a whole, and cut into objects that the classes have.
//!
//! ```text
//! root:  | header | compressed bytes 4 | handles of the parts, 4 bytes each |
//! part:  | header: its checksum is root << 32 | number | compressed bytes ... |
//! ```
//! The slot of a copy is the handle of its root. A part names its root, so a damaged root frees no
//! part of another. Parts that no root has are freed when the pool is recovered: the manager died
//! while it stored or freed them.

use super::*;
use compressor::decompress;

/// The compressor of a part's header: it is no copy.
pub(super) const PART: u8 = 15;
/// Compressed bytes of a part.
const PART_BYTES: usize = OBJECT_BYTES_MAX - HEADER_BYTES;
/// Bytes of a root that stand before its handles.
const LIST_AT: usize = 4;
/// Most parts of a copy. A page that needs more is incompressible.
const PARTS_MAX: usize = 512;

const _: () = assert!(LIST_AT + PARTS_MAX * 4 <= PART_BYTES);

/// The parts of a copy, in order, and the bytes that they have together.
struct Parts {
    bytes: usize,
    handles: Vec<u32>,
}

impl Parts {
    fn of(root: &[u8]) -> Option<Parts> {
        let (words, rest) = root.as_chunks::<4>();
        let (first, list) = words.split_first()?;
        let bytes = u32::from_le_bytes(*first) as usize;
        let fits = rest.is_empty() && bytes.div_ceil(PART_BYTES) == list.len();
        let handles = list.iter().map(|word| u32::from_le_bytes(*word)).collect();
        fits.then_some(Parts { bytes, handles })
    }

    fn root(&self) -> Vec<u8> {
        let bytes = (self.bytes as u32).to_le_bytes();
        let handles = self.handles.iter().flat_map(|handle| handle.to_le_bytes());
        bytes.into_iter().chain(handles).collect()
    }
}

fn tag(root: u32, number: usize) -> u64 {
    u64::from(root) << 32 | number as u64
}

impl RamPool {
    /// Keeps copies of pages of this size. The pool is empty.
    pub fn of_pages(mut self, page: PageSize) -> RamPool {
        self.memory.words()[SIZE_WORD].store(page.base_pages(), Relaxed);
        self.info.page = page;
        self
    }

    pub(super) fn store_large(&self, item: &mut Store<'_>, scratch: &mut Scratch) {
        scratch.reserve(self.compressor, 0);
        let length = scratch.compress_large(self.compressor, item.page);
        let most = PARTS_MAX * PART_BYTES;
        let Some(length) = length.filter(|length| *length <= most) else {
            item.result = Err(StoreError::Incompressible);
            return;
        };
        self.lock().storing += 1;
        item.result = match self.put_all(item, &scratch.large[..length]) {
            Some(root) => Ok(Slot(root.into())),
            None => Err(StoreError::Full),
        };
        let sparse = {
            let mut places = self.lock();
            places.storing -= 1;
            places.heap.is_sparse(IDLE_SHARE)
        };
        if sparse {
            self.compact(EVACUATIONS_PER_STORE);
        }
    }

    /// Stores a copy in parts, the root first: its handle is in each part. `None`: there is no
    /// room, and nothing of it is left.
    fn put_all(&self, item: &Store<'_>, bytes: &[u8]) -> Option<u32> {
        let count = bytes.len().div_ceil(PART_BYTES);
        let mut parts = Parts {
            bytes: bytes.len(),
            handles: vec![0; count],
        };
        let header = Header {
            checksum: item.checksum,
            stamp: item.stamp,
            length: (LIST_AT + 4 * count) as u16,
            code: self.compressor.code(),
            handle: 0,
        };
        let root = self.put(header, &parts.root())?;
        for (number, part) in bytes.chunks(PART_BYTES).enumerate() {
            let header = Header {
                checksum: tag(root, number),
                length: part.len() as u16,
                code: PART,
                ..header
            };
            let Some(handle) = self.put(header, part) else {
                parts.handles.truncate(number);
                parts.handles.push(root);
                let slots: Vec<_> = parts.handles.iter().map(|it| Slot((*it).into())).collect();
                self.free_objects(&slots);
                return None;
            };
            parts.handles[number] = handle;
        }
        let location = self.table().location(root.into())?;
        (self.memory).bytes_in(offset_of(location) + HEADER_BYTES, &parts.root());
        self.logical.fetch_add(item.page.len() as u64, Relaxed);
        Some(root)
    }

    /// Stores one object. The caller keeps objects from being moved meanwhile.
    fn put(&self, header: Header, bytes: &[u8]) -> Option<u32> {
        let class = class_of(HEADER_BYTES + bytes.len())?;
        let handle = self.place(class).or_else(|| {
            self.trim();
            self.place(class)
        })?;
        let mut object = [0; OBJECT_BYTES_MAX];
        object[..HEADER_BYTES].copy_from_slice(&Header { handle, ..header }.to_bytes());
        object[HEADER_BYTES..][..bytes.len()].copy_from_slice(bytes);
        let location = self.table().location(handle.into())?;
        (self.memory).bytes_in(offset_of(location), &object[..HEADER_BYTES + bytes.len()]);
        self.stored.fetch_add(bytes.len() as u64, Relaxed);
        Some(handle)
    }

    fn place(&self, class: usize) -> Option<u32> {
        let mut places = self.lock();
        let handle = self.take_place(&mut places, class);
        self.publish(&places);
        handle
    }

    /// Copies what an object of this handle and stamp has to the end of `out`, and returns its
    /// header. It is read again if it was moved meanwhile.
    fn read(&self, handle: u32, stamp: Stamp, out: &mut Vec<u8>) -> Option<Header> {
        let start = out.len();
        loop {
            let location = self.table().location(handle.into())?;
            let found = self.find(Slot(handle.into()), stamp);
            if let Some((at, header)) = found {
                out.resize(start + usize::from(header.length), 0);
                (self.memory).bytes_out(offset_of(at) + HEADER_BYTES, &mut out[start..]);
            }
            fence(Acquire);
            if self.table().location(handle.into()) == Some(location) {
                return found.map(|(_, header)| header);
            }
            out.truncate(start);
        }
    }

    /// As `load_once`.
    pub(super) fn load_large(&self, slot: Slot, stamp: Stamp, dst: &mut [u8]) -> Option<()> {
        let root = u32::try_from(slot.0).ok()?;
        with_scratch(|scratch| {
            let bytes = &mut scratch.large;
            bytes.clear();
            let header = self.read(root, stamp, bytes)?;
            let compressor = Compressor::from_code(header.code)?;
            let parts = Parts::of(bytes)?;
            bytes.clear();
            for (number, handle) in parts.handles.iter().enumerate() {
                let part = self.read(*handle, stamp, bytes)?;
                if (part.code, part.checksum) != (PART, tag(root, number)) {
                    return None;
                }
            }
            let whole = bytes.len() == parts.bytes
                && decompress(&mut scratch.zstd, compressor, bytes, dst)
                && self.key.checksum(dst, stamp) == header.checksum;
            whole.then_some(())
        })
    }

    /// Frees a copy: its root, and the parts that name it.
    pub(super) fn free_large(&self, slot: Slot) {
        let mut slots = self.parts_of(slot);
        slots.push(slot);
        self.free_objects(&slots);
        subtract(&self.logical, self.info.page.bytes() as u64);
    }

    fn parts_of(&self, slot: Slot) -> Vec<Slot> {
        let header = |slot: Slot| self.header_at(self.table().location(slot.0)?);
        let mut bytes = Vec::new();
        let parts = header(slot).and_then(|root| self.read(slot.0 as u32, root.stamp, &mut bytes));
        let parts = parts.and_then(|_| Parts::of(&bytes));
        let handles = parts.map_or(Vec::new(), |parts| parts.handles);
        let mine = |(number, handle): (usize, u32)| {
            let part = header(Slot(handle.into()))?;
            let named = part.code == PART && part.checksum == tag(slot.0 as u32, number);
            (named && part.handle == handle).then_some(Slot(handle.into()))
        };
        handles.into_iter().enumerate().filter_map(mine).collect()
    }

    /// Whether the slot is that of a copy, and no part of one.
    pub(super) fn is_copy(&self, slot: Slot) -> bool {
        let location = self.table().location(slot.0);
        let header = location.and_then(|location| self.header_at(location));
        location.is_some() && header.is_none_or(|header| header.code != PART)
    }

    /// Frees the parts that no root has, and counts the copies. For recovery.
    pub(super) fn drop_strays(&self) {
        let used = u64::from(self.lock().handles.used());
        let exists = |slot: &Slot| self.table().location(slot.0).is_some();
        let all: Vec<Slot> = (0..used).map(Slot).filter(exists).collect();
        let (roots, parts): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|slot| self.is_copy(*slot));
        let mut named: Vec<_> = roots.iter().flat_map(|root| self.parts_of(*root)).collect();
        named.sort_unstable();
        let strays: Vec<_> = parts
            .into_iter()
            .filter(|it| named.binary_search(it).is_err())
            .collect();
        self.free_objects(&strays);
        let bytes = roots.len() as u64 * self.info.page.bytes() as u64;
        self.logical.store(bytes, Relaxed);
    }
}
