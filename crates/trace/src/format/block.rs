//! The columns of one block of references: encoded for compression, and decoded from bytes that nobody vouches for.
//!
//! Columns, one after the other: kinds (a byte a reference), times, addresses, owners. An address is the difference to the
//! last one of the same access in this block, in granules, because instructions, reads and writes each go their own
//! way. A block needs nothing of the blocks before it.

use super::{REFERENCE_BYTES_MAX, varint};
use crate::reference::{Access, Reference};

/// Bits of a kind: the access.
const ACCESS: u8 = 0b011;
/// Bit of a kind: client and thread are not those of the reference before; they are in the owners' column.
const OWNER: u8 = 0b100;

fn code(access: Access) -> u8 {
    match access {
        Access::Instruction => 0,
        Access::Read => 1,
        Access::Write => 2,
    }
}

/// Appends the columns of `references` (not empty, times in order, addresses multiples of the granule) to `out`.
pub(crate) fn encode(references: &[Reference], granularity: u8, out: &mut Vec<u8>) {
    out.reserve(references.len() * 6);
    let mut owner = (0, 0);
    for reference in references {
        let changed = (reference.client, reference.thread) != owner;
        owner = (reference.client, reference.thread);
        out.push(code(reference.access) | if changed { OWNER } else { 0 });
    }
    let mut last = references.first().map_or(0, |reference| reference.time);
    for reference in references {
        varint::put(out, reference.time - last);
        last = reference.time;
    }
    let mut before = [0u64; 3];
    for reference in references {
        let granule = reference.address >> granularity;
        let before = &mut before[usize::from(code(reference.access))];
        varint::put(out, varint::zigzag(granule.wrapping_sub(*before) as i64));
        *before = granule;
    }
    let mut owner = (0, 0);
    for reference in references {
        if (reference.client, reference.thread) != owner {
            owner = (reference.client, reference.thread);
            varint::put(out, u64::from(owner.0));
            varint::put(out, u64::from(owner.1));
        }
    }
}

/// Most bytes the columns of `count` references can have.
pub(crate) fn columns_bytes_max(count: u32) -> usize {
    count as usize * REFERENCE_BYTES_MAX
}

/// What a block's own header says of its columns.
pub(crate) struct Claims {
    /// References in the block, at least 1.
    pub count: usize,
    /// Time of the first.
    pub first_time: u64,
    /// Time of the last.
    pub last_time: u64,
    /// From the trace's header.
    pub granularity: u8,
    /// Clients the trace's header names.
    pub clients: usize,
}

/// Appends the references of `columns` to `out`. Errors: (byte of the columns, what is wrong there); `out` then holds
/// nothing of use. Cost: a few ns a reference.
pub(crate) fn decode(
    columns: &[u8],
    claims: &Claims,
    out: &mut Vec<Reference>,
) -> Result<(), (usize, &'static str)> {
    let kinds = columns
        .get(..claims.count)
        .ok_or((columns.len(), "the columns end among the kinds"))?;
    let begin = out.len();
    let mut at = claims.count;
    let mut time = claims.first_time;
    for (index, &kind) in kinds.iter().enumerate() {
        let access = match kind & ACCESS {
            0 => Access::Instruction,
            1 => Access::Read,
            2 => Access::Write,
            _ => return Err((index, "this kind of access is unknown")),
        };
        if kind & !(ACCESS | OWNER) != 0 {
            return Err((index, "this kind of reference is unknown"));
        }
        let step = varint::get(columns, &mut at).map_err(|why| (at, why))?;
        time = time
            .checked_add(step)
            .ok_or((at, "time is larger than 64 bits"))?;
        out.push(Reference {
            time,
            address: 0,
            access,
            client: 0,
            thread: 0,
        });
    }
    if out[begin].time != claims.first_time || time != claims.last_time {
        return Err((at, "the times are not those the block claims"));
    }
    let largest = u64::MAX >> claims.granularity;
    let mut before = [0u64; 3];
    for reference in &mut out[begin..] {
        let step = varint::get(columns, &mut at).map_err(|why| (at, why))?;
        let before = &mut before[usize::from(code(reference.access))];
        let granule = before.wrapping_add(varint::unzigzag(step) as u64);
        if granule > largest {
            return Err((at, "an address is larger than 64 bits"));
        }
        *before = granule;
        reference.address = granule << claims.granularity;
    }
    let mut owner = (0u16, 0u16);
    for (reference, &kind) in out[begin..].iter_mut().zip(kinds) {
        if kind & OWNER != 0 {
            let place = at;
            let mut word = || {
                let number = varint::get(columns, &mut at).map_err(|why| (place, why))?;
                u16::try_from(number).map_err(|_| (place, "a client or thread is above 65535"))
            };
            owner = (word()?, word()?);
            if usize::from(owner.0) >= claims.clients {
                return Err((place, "the header does not name this client"));
            }
        }
        (reference.client, reference.thread) = owner;
    }
    if at != columns.len() {
        return Err((at, "bytes after the last column"));
    }
    Ok(())
}
