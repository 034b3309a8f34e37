//! The value of a copy in the cluster: a head of 4 bytes, and the page, compressed if that helps.
//!
//! ```text
//! | version 2 | how: 0 raw, 1 LZ4 | stamp, 2 bytes | bytes |
//! ```
//! The checksum stays on this machine: the program may be able to read the cluster, and
//! checksums of pages that it knows would help it to find the run's key.

use std::cell::RefCell;

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use undercroft_base::{BASE_PAGE_BYTES, PageKey, Stamp};

use super::table::SlotInUse;

const VERSION: u8 = 2;
const RAW: u8 = 0;
const LZ4: u8 = 1;
const HEAD: usize = 4;

thread_local! {
    static SCRATCH: RefCell<(CompressTable, Vec<u8>)> = RefCell::new((
        CompressTable::small(),
        vec![0; get_maximum_output_size(BASE_PAGE_BYTES)],
    ));
}

/// The value of a page.
pub(super) fn encode(page: &[u8], stamp: Stamp) -> Vec<u8> {
    SCRATCH.with_borrow_mut(|(table, output)| {
        let bytes = compress_into_with_table(page, output, table);
        let (how, bytes) = match bytes {
            Ok(bytes) if bytes < page.len() => (LZ4, &output[..bytes]),
            _ => (RAW, page),
        };
        let mut value = Vec::with_capacity(HEAD + bytes.len());
        value.extend([VERSION, how]);
        value.extend(stamp.0.to_le_bytes());
        value.extend(bytes);
        value
    })
}

/// The page of a value. `None`: these are not the bytes that were stored for this row.
pub(super) fn decode(value: &[u8], key: &PageKey, row: &SlotInUse) -> Option<Box<[u8]>> {
    let (head, bytes) = value.split_at_checked(HEAD)?;
    if head[0] != VERSION || head[2..4] != row.stamp.0.to_le_bytes() {
        return None;
    }
    let mut page = vec![0; BASE_PAGE_BYTES].into_boxed_slice();
    match head[1] {
        RAW if bytes.len() == BASE_PAGE_BYTES => page.copy_from_slice(bytes),
        LZ4 => {
            let written = lz4_flex::block::decompress_into(bytes, &mut page).ok()?;
            if written != BASE_PAGE_BYTES {
                return None;
            }
        }
        _ => return None,
    }
    (key.checksum(&page, row.stamp) == row.checksum).then_some(page)
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Pages;

    use super::super::table::Copies;
    use super::*;

    fn row(stamp: Stamp, checksum: u64) -> SlotInUse {
        let (number, tags) = (1, [0, 1]);
        SlotInUse {
            checksum,
            place: Copies { number, tags },
            stamp,
            bytes: 0,
        }
    }

    #[test]
    fn values_give_their_page_and_nothing_else_does() {
        let mut random = Pages::new(5);
        for round in 0..200 {
            let (page, stamp) = (random.mixed(), Stamp(round));
            let sum = PageKey::KNOWN.checksum(&page, stamp);
            let decode = |value: &[u8], row: &SlotInUse| super::decode(value, &PageKey::KNOWN, row);
            let value = encode(&page, stamp);
            assert!(value.len() <= HEAD + BASE_PAGE_BYTES);
            assert_eq!(decode(&value, &row(stamp, sum)).as_deref(), Some(&page[..]));
            assert_eq!(decode(&value, &row(Stamp(round ^ 1), sum)), None);
            assert_eq!(decode(&value, &row(stamp, sum ^ 1)), None);
            let mut wrong = value.clone();
            let at = random.below(value.len() as u64) as usize;
            wrong[at] ^= 1 << random.below(8);
            if let Some(same) = decode(&wrong, &row(stamp, sum)) {
                assert_eq!(&same[..], &page[..], "a changed value passed");
            }
            wrong.truncate(at);
            assert_eq!(decode(&wrong, &row(stamp, sum)), None);
        }
    }
}
