//! The value of a copy in the cluster: a head of 12 bytes, and the page, compressed if that helps.
//!
//! ```text
//! | version 1 | how: 0 raw, 1 LZ4 | stamp, 2 bytes | checksum of the page, 8 bytes | bytes |
//! ```

use std::cell::RefCell;

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use undercroft_base::{PAGE_BYTES, Stamp, page_checksum};

const VERSION: u8 = 1;
const RAW: u8 = 0;
const LZ4: u8 = 1;
const HEAD: usize = 12;

thread_local! {
    static SCRATCH: RefCell<(CompressTable, Vec<u8>)> = RefCell::new((
        CompressTable::small(),
        vec![0; get_maximum_output_size(PAGE_BYTES)],
    ));
}

/// The value of a page.
pub(super) fn encode(page: &[u8], stamp: Stamp, checksum: u64) -> Vec<u8> {
    SCRATCH.with_borrow_mut(|(table, output)| {
        let bytes = compress_into_with_table(page, output, table);
        let (how, bytes) = match bytes {
            Ok(bytes) if bytes < page.len() => (LZ4, &output[..bytes]),
            _ => (RAW, page),
        };
        let mut value = Vec::with_capacity(HEAD + bytes.len());
        value.extend([VERSION, how]);
        value.extend(stamp.0.to_le_bytes());
        value.extend(checksum.to_le_bytes());
        value.extend(bytes);
        value
    })
}

/// The page of a value. `None`: these are not the bytes that were stored with this stamp and
/// checksum.
pub(super) fn decode(value: &[u8], stamp: Stamp, checksum: u64) -> Option<Box<[u8]>> {
    let (head, bytes) = value.split_at_checked(HEAD)?;
    if head[0] != VERSION || head[2..4] != stamp.0.to_le_bytes() {
        return None;
    }
    let mut page = vec![0; PAGE_BYTES].into_boxed_slice();
    match head[1] {
        RAW if bytes.len() == PAGE_BYTES => page.copy_from_slice(bytes),
        LZ4 => {
            let written = lz4_flex::block::decompress_into(bytes, &mut page).ok()?;
            if written != PAGE_BYTES {
                return None;
            }
        }
        _ => return None,
    }
    // The checksum of the head is for people who look; the one that counts never left this machine.
    (page_checksum(&page, stamp) == checksum).then_some(page)
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Pages;

    use super::*;

    #[test]
    fn values_give_their_page_and_nothing_else_does() {
        let mut random = Pages::new(5);
        for round in 0..200 {
            let (page, stamp) = (random.mixed(), Stamp(round));
            let sum = page_checksum(&page, stamp);
            let value = encode(&page, stamp, sum);
            assert!(value.len() <= HEAD + PAGE_BYTES);
            assert_eq!(decode(&value, stamp, sum).as_deref(), Some(&page[..]));
            assert_eq!(decode(&value, Stamp(round ^ 1), sum), None);
            assert_eq!(decode(&value, stamp, sum ^ 1), None);
            let mut wrong = value.clone();
            let at = random.below(value.len() as u64) as usize;
            wrong[at] ^= 1 << random.below(8);
            if let Some(same) = decode(&wrong, stamp, sum) {
                assert_eq!(&same[..], &page[..], "a changed value passed");
            }
            wrong.truncate(at);
            assert_eq!(decode(&wrong, stamp, sum), None);
        }
    }
}
