//! Where each part of the slot table begins. The layout is drawn in `file/mod.rs`.

use std::sync::atomic::Ordering::Relaxed;

use undercroft_base::Bytes;
use undercroft_sys::mapping::SharedMemory;

use super::parts::PACKED_BYTES_MAX;
use super::room::Quota;
use super::slabs::Bitmaps;
use super::{
    Backing, FileTier, FileTierError, GRANT_WORD, PAGE_WORDS, QUOTA_WORD, SIZE_MAX, behind,
    slab_bytes,
};

pub(super) fn checked_slabs(backing: &Backing, table: &SharedMemory) -> Result<u32, FileTierError> {
    let size = backing.bytes();
    let most = if backing.packs() {
        PACKED_BYTES_MAX
    } else {
        SIZE_MAX
    };
    if size.0 > most {
        return Err(FileTierError::TooLarge(size, Bytes(most)));
    }
    let needed = FileTier::table_bytes(backing);
    if table.len() < needed {
        return Err(FileTierError::Table(
            Bytes(table.len() as u64),
            Bytes(needed as u64),
        ));
    }
    Ok((size.0 / slab_bytes(backing.page())) as u32)
}

/// * `slots`: of one slab.
pub(super) fn bitmaps_of(table: &SharedMemory, slabs: u32, slots: u32) -> Bitmaps<'_> {
    let (words, slabs) = (table.words(), slabs as usize);
    let space = space_word(slabs, slots);
    Bitmaps {
        slab_slots: slots,
        slots: &words[PAGE_WORDS..PAGE_WORDS + slabs * slots as usize / 64],
        space: &words[space..space + slabs.div_ceil(64)],
        quota: quota_of(table),
        grant: words[GRANT_WORD].load(Relaxed),
    }
}

pub(super) fn quota_of(table: &SharedMemory) -> Quota<'_> {
    Quota(&table.words()[QUOTA_WORD])
}

fn space_word(slabs: usize, slots: u32) -> usize {
    PAGE_WORDS + (slabs * slots as usize / 64).next_multiple_of(PAGE_WORDS)
}

pub(super) fn checksums_word(slabs: usize, slots: u32) -> usize {
    space_word(slabs, slots) + slabs.div_ceil(64).next_multiple_of(PAGE_WORDS)
}

pub(super) fn behind_word(slabs: usize, slots: u32) -> usize {
    checksums_word(slabs, slots) + (slabs * slots as usize).next_multiple_of(PAGE_WORDS)
}

pub(super) fn parts_word(slabs: usize, slots: u32) -> usize {
    behind_word(slabs, slots) + behind::WORDS
}
