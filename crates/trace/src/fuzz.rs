//! The promises that must hold for hostile bytes. The fuzz target checks them, and tests check them
//! over mutated traces.

use crate::format::header::movement_kinds;
use crate::format::{
    BLOCK_BYTES, BLOCK_TAG, END_BYTES, END_TAG, HEADER_BYTES, block, checksum, u32_at,
};
use crate::reader::TraceReader;
use crate::reference::{Event, Reference};
use crate::writer::TraceWriter;

/// Reads `bytes` as a trace, as a trace with corrected checksums, and as the columns of a block.
/// Panics if a promise is broken: the two ways of reading must agree, and a trace that was read
/// without an error must be the same after it is written and read again. Returns how many entries
/// were read without an error.
pub fn trace(bytes: &[u8]) -> u64 {
    columns(bytes) + whole(bytes) + whole(&mended(bytes))
}

/// Reads `bytes` as a trace.
fn whole(bytes: &[u8]) -> u64 {
    let Ok(reader) = TraceReader::new(bytes) else {
        return 0;
    };
    let header = reader.header().clone();
    let one_by_one: Result<Vec<Reference>, _> = reader.collect();
    let Ok(mut blocks) = TraceReader::new(bytes) else {
        panic!("the same header was read and then refused");
    };
    let mut references = Vec::new();
    let whole = loop {
        match blocks.next_block(&mut references) {
            Ok(true) => {}
            Ok(false) => break true,
            Err(error) => {
                assert!(
                    error.offset() <= bytes.len() as u64,
                    "{error}: behind the end"
                );
                break false;
            }
        }
    };
    assert_eq!(one_by_one.is_ok(), whole);
    let Ok(one_by_one) = one_by_one else {
        return 0;
    };
    assert_eq!(one_by_one, references);
    let totals = *blocks.totals().expect("the end was read");
    assert_eq!(totals.references(), references.len() as u64);
    let events = events(bytes);
    assert_eq!(totals.entries(), events.len() as u64);
    assert!(events.iter().filter_map(|e| e.reference()).eq(references));
    let mut writer = TraceWriter::new(Vec::new(), header).expect("a header that was read");
    for event in &events {
        writer.write_event(*event).expect("an entry that was read");
    }
    let (again, written) = writer.finish(totals.time_end).expect("memory takes all");
    assert_eq!(again.movements, totals.movements);
    assert_eq!(self::events(&written), events);
    totals.entries()
}

/// Every entry of a good trace.
fn events(bytes: &[u8]) -> Vec<Event> {
    let mut reader = TraceReader::new(bytes).expect("a header that was read or written");
    let mut events = Vec::new();
    while reader
        .next_events(&mut events)
        .expect("blocks that were read or written")
    {}
    events
}

/// `bytes` with correct checksums wherever a part can be found, so that the code behind them is
/// reached.
pub fn mended(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut chain = 0;
    let mut begin = 0;
    let movements = if bytes.len() >= HEADER_BYTES {
        movement_kinds(u32_at(&bytes, 12))
    } else {
        0
    };
    while let Some(rest) = bytes.get(begin..) {
        let length = match rest {
            _ if begin == 0 && rest.len() >= HEADER_BYTES => {
                HEADER_BYTES + u32_at(rest, 16) as usize
            }
            _ if rest.starts_with(&BLOCK_TAG) && rest.len() >= BLOCK_BYTES => {
                BLOCK_BYTES + u32_at(rest, 12) as usize
            }
            _ if rest.starts_with(&END_TAG) => END_BYTES + 8 * movements - 4,
            _ => break,
        };
        let (part, sum) = (begin..begin + length, begin + length..begin + length + 4);
        if sum.end > bytes.len() {
            break;
        }
        chain = checksum(chain, &[&bytes[part]]);
        bytes[sum.clone()].copy_from_slice(&chain.to_le_bytes());
        begin = sum.end;
    }
    bytes
}

/// Decodes `bytes` as columns, past the checksums and the compression that keep a fuzzer away from
/// them.
fn columns(bytes: &[u8]) -> u64 {
    let Some((&count, columns)) = bytes.split_first() else {
        return 0;
    };
    let mut claims = block::Claims {
        count: usize::from(count) + 1,
        first_time: 0,
        last_time: 0,
        granularity: 6,
        clients: 2,
    };
    // The time steps say when the last reference is, as far as they can be read.
    if let Some(steps) = columns.get(claims.count..) {
        claims.last_time = steps
            .iter()
            .take(claims.count)
            .fold(0, |sum, step| sum + u64::from(step & 0x7f));
    }
    let mut out: Vec<Event> = Vec::new();
    if block::decode(columns, &claims, &mut out).is_err() {
        return 0;
    }
    let mut again = Vec::new();
    block::encode(&out, claims.granularity, &mut again);
    let mut back = Vec::new();
    block::decode(&again, &claims, &mut back).expect("columns that were encoded");
    assert_eq!(out, back);
    // If no movements are announced, the first movement is an error, and everything else is the
    // same.
    let mut references: Vec<Reference> = Vec::new();
    let only: Option<Vec<Reference>> = out.iter().map(|event| event.reference()).collect();
    let whole = block::decode(columns, &claims, &mut references).is_ok();
    assert_eq!(whole.then_some(references), only);
    out.len() as u64
}
