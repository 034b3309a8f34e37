//! The bytes of a trace, version 1: constants and layout. Drawn in docs/formats/trace.md.
//!
//! A trace is a header, blocks of entries, and an end block. Entries are references and, if the
//! header announces them, movements of pages. Each checksum is the CRC-32 of its part, begun from
//! the checksum before it. So a block that is missing, doubled or foreign is found as surely as a
//! damaged one.

pub(crate) mod block;
pub(crate) mod header;
pub(crate) mod totals;
pub(crate) mod varint;

/// First bytes of every trace.
pub const MAGIC: [u8; 8] = *b"UCTRACE\n";
/// The version that is written, and the only one that can be read.
pub const VERSION: u16 = 1;
/// First bytes of a block of entries.
pub const BLOCK_TAG: [u8; 4] = *b"REFS";
/// First bytes of the end block.
pub const END_TAG: [u8; 4] = *b"END.";
/// Most entries of a block. It bounds a reader's memory to about 4 MiB.
pub const BLOCK_REFERENCES_MAX: u32 = 1 << 16;
/// Most bytes of the header's texts.
pub const HEADER_TEXT_BYTES_MAX: u32 = 1 << 20;
/// Largest granularity: 1 GiB.
pub const GRANULARITY_MAX: u8 = 30;

/// Bytes of the header before its texts.
pub(crate) const HEADER_BYTES: usize = 20;
/// Bytes of a block before its zstd frame, without its checksum, which follows the frame.
pub(crate) const BLOCK_BYTES: usize = 32;
/// Bytes of the end block with its checksum.
pub(crate) const END_BYTES: usize = 60;
/// Most bytes of the end block's movement counts, before its checksum: one count for each kind that
/// the header announces.
pub(crate) const END_MOVEMENTS_BYTES: usize = 8 * crate::reference::Movement::ALL.len();
/// Most bytes of the columns of one entry: kind, time, address, client, thread.
pub(crate) const REFERENCE_BYTES_MAX: usize = 1 + 2 * varint::VARINT_BYTES_MAX + 3 + 3;

/// The checksum of `parts`, in the chain after `before`.
pub(crate) fn checksum(before: u32, parts: &[&[u8]]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(before);
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize()
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
