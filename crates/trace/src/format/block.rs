//! The columns of one block of entries: encoded for compression, and decoded from untrusted bytes.
//!
//! Columns, one after the other: kinds (a byte an entry), times, addresses, owners. An address is
//! the difference to the last one of the same kind in this block, in granules, because
//! instructions, reads, writes and each kind of movement have addresses of their own. A block can
//! be read without the blocks before it.

use super::totals::Totals;
use super::{REFERENCE_BYTES_MAX, varint};
use crate::reference::{Access, Event, Kind, Movement, Reference};

/// Bits of a kind: the access, or [`MOVEMENT`].
const ACCESS: u8 = 0b011;
/// Instead of an access: the entry is a movement, and the bits from [`WHAT_SHIFT`] on say which.
const MOVEMENT: u8 = 3;
/// Bit of a kind: client and thread are not those of the entry before; they are in the owners'
/// column.
const OWNER: u8 = 0b100;
/// Place of the movement's bits.
const WHAT_SHIFT: u8 = 3;
/// Room for the last address of each kind: a power of two, so that the index needs no check.
const WAYS: usize = 16;
const _: () = assert!(MOVEMENT as usize + Movement::ALL.len() <= WAYS);

/// The bits of a kind, without [`OWNER`].
fn code(kind: Kind) -> u8 {
    match kind {
        Kind::Access(Access::Instruction) => 0,
        Kind::Access(Access::Read) => 1,
        Kind::Access(Access::Write) => 2,
        Kind::Movement(movement) => MOVEMENT | (movement as u8) << WHAT_SHIFT,
    }
}

/// The kind of a byte of the kinds' column. Errors: the reason why it is none.
#[inline]
fn kind_of(byte: u8) -> Result<Kind, &'static str> {
    let what = usize::from(byte >> WHAT_SHIFT);
    let access = match byte & ACCESS {
        MOVEMENT => {
            let movement = Movement::ALL.get(what);
            let movement = movement.ok_or("this kind of movement is unknown")?;
            return Ok(Kind::Movement(*movement));
        }
        0 => Access::Instruction,
        1 => Access::Read,
        _ => Access::Write,
    };
    match what {
        0 => Ok(Kind::Access(access)),
        _ => Err("this kind of reference is unknown"),
    }
}

/// Why a byte of the kinds' column is no reference.
#[cold]
fn refusal(byte: u8) -> &'static str {
    match kind_of(byte) {
        Ok(_) => "a movement, and the header does not announce any",
        Err(why) => why,
    }
}

/// Which of the last addresses belongs to a valid byte of the kinds' column.
#[inline]
fn way(byte: u8) -> usize {
    usize::from((byte & ACCESS) + (byte >> WHAT_SHIFT)) % WAYS
}

/// The entries that a block decodes to: all, or references alone if the header announces nothing
/// else.
pub(crate) trait Entry: Copy {
    /// An entry without its place and owner, from its byte of the kinds' column without [`OWNER`].
    /// Errors: what is wrong with it.
    fn new(time: u64, byte: u8) -> Result<Self, &'static str>;
    /// Which of the last addresses belongs to it; `byte` is the byte from which it was made.
    fn way(&self, byte: u8) -> usize;
    fn time(&self) -> u64;
    fn set_address(&mut self, address: u64);
    fn set_owner(&mut self, owner: (u16, u16));
}

/// The fields that both kinds of entries have.
macro_rules! same_fields {
    () => {
        fn time(&self) -> u64 {
            self.time
        }

        fn set_address(&mut self, address: u64) {
            self.address = address;
        }

        fn set_owner(&mut self, owner: (u16, u16)) {
            (self.client, self.thread) = owner;
        }
    };
}

impl Entry for Reference {
    #[inline]
    fn new(time: u64, byte: u8) -> Result<Reference, &'static str> {
        let access = match byte {
            0 => Access::Instruction,
            1 => Access::Read,
            2 => Access::Write,
            _ => return Err(refusal(byte)),
        };
        Ok(Reference {
            time,
            address: 0,
            access,
            client: 0,
            thread: 0,
        })
    }

    #[inline]
    fn way(&self, _: u8) -> usize {
        self.access as usize
    }

    same_fields!();
}

impl Entry for Event {
    #[inline]
    fn new(time: u64, byte: u8) -> Result<Event, &'static str> {
        Ok(Event {
            time,
            address: 0,
            kind: kind_of(byte)?,
            client: 0,
            thread: 0,
        })
    }

    #[inline]
    fn way(&self, byte: u8) -> usize {
        way(byte)
    }

    same_fields!();
}

/// Appends the columns of `entries` (not empty, times in order, addresses multiples of the granule)
/// to `out`.
pub(crate) fn encode(entries: &[Event], granularity: u8, out: &mut Vec<u8>) {
    out.reserve(entries.len() * 6);
    let mut owner = (0, 0);
    for entry in entries {
        let changed = (entry.client, entry.thread) != owner;
        owner = (entry.client, entry.thread);
        out.push(code(entry.kind) | if changed { OWNER } else { 0 });
    }
    let mut last = entries.first().map_or(0, |entry| entry.time);
    for entry in entries {
        varint::put(out, entry.time - last);
        last = entry.time;
    }
    let mut before = [0u64; WAYS];
    for entry in entries {
        let granule = entry.address >> granularity;
        let before = &mut before[way(code(entry.kind))];
        varint::put(out, varint::zigzag(granule.wrapping_sub(*before) as i64));
        *before = granule;
    }
    let mut owner = (0, 0);
    for entry in entries {
        if (entry.client, entry.thread) != owner {
            owner = (entry.client, entry.thread);
            varint::put(out, u64::from(owner.0));
            varint::put(out, u64::from(owner.1));
        }
    }
}

/// Most bytes the columns of `count` entries can have.
pub(crate) fn columns_bytes_max(count: u32) -> usize {
    count as usize * REFERENCE_BYTES_MAX
}

/// The facts about a block's columns in the block's header.
pub(crate) struct Claims {
    /// Entries in the block, at least 1.
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

/// Appends the entries of `columns` to `out`. Errors: (byte of the columns, reason); the new part
/// of `out` is then meaningless. Cost: a few ns an entry.
pub(crate) fn decode<T: Entry>(
    columns: &[u8],
    claims: &Claims,
    out: &mut Vec<T>,
) -> Result<(), (usize, &'static str)> {
    let kinds = columns
        .get(..claims.count)
        .ok_or((columns.len(), "the columns end among the kinds"))?;
    let begin = out.len();
    let mut at = claims.count;
    let mut time = claims.first_time;
    for (index, &kind) in kinds.iter().enumerate() {
        let step = varint::get(columns, &mut at).map_err(|why| (at, why))?;
        time = time
            .checked_add(step)
            .ok_or((at, "time is larger than 64 bits"))?;
        out.push(T::new(time, kind & !OWNER).map_err(|why| (index, why))?);
    }
    if out[begin].time() != claims.first_time || time != claims.last_time {
        return Err((at, "the times are not those the block claims"));
    }
    let largest = u64::MAX >> claims.granularity;
    let mut before = [0u64; WAYS];
    for (entry, &kind) in out[begin..].iter_mut().zip(kinds) {
        let step = varint::get(columns, &mut at).map_err(|why| (at, why))?;
        let before = &mut before[entry.way(kind & !OWNER)];
        let granule = before.wrapping_add(varint::unzigzag(step) as u64);
        if granule > largest {
            return Err((at, "an address is larger than 64 bits"));
        }
        *before = granule;
        entry.set_address(granule << claims.granularity);
    }
    let mut owner = (0u16, 0u16);
    for (entry, &kind) in out[begin..].iter_mut().zip(kinds) {
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
        entry.set_owner(owner);
    }
    if at != columns.len() {
        return Err((at, "bytes after the last column"));
    }
    Ok(())
}

/// Adds the entries of a column of kinds that has been decoded. Runs over it a few times, with
/// vector instructions. A branch for each entry would be mispredicted for many, because reads and
/// writes alternate irregularly.
pub(crate) fn count(kinds: &[u8], totals: &mut Totals) {
    let of = |what: u8| kinds.iter().filter(|kind| **kind & !OWNER == what).count() as u64;
    let accesses = [0, 1, 2].map(of);
    totals.instructions += accesses[0];
    totals.reads += accesses[1];
    totals.writes += accesses[2];
    if accesses.iter().sum::<u64>() < kinds.len() as u64 {
        for movement in Movement::ALL {
            totals.movements[movement as usize] += of(code(Kind::Movement(movement)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_that_nobody_writes_are_refused_with_their_byte() {
        let claims = Claims {
            count: 2,
            first_time: 0,
            last_time: 0,
            granularity: 0,
            clients: 1,
        };
        for kind in 0..=u8::MAX {
            if kind & OWNER != 0 {
                continue;
            }
            let columns = [0, kind, 0, 0, 5, 6];
            let mut events: Vec<Event> = Vec::new();
            let result = decode(&columns, &claims, &mut events);
            let known = [0, 1, 2, 3, 11, 19, 27, 35, 43, 51, 59, 67, 75, 83].contains(&kind);
            match result {
                Ok(()) => assert!(known && code(events[1].kind) == kind),
                Err((at, why)) => assert!(!known && at == 1, "{kind}: byte {at}: {why}"),
            }
            let mut references: Vec<Reference> = Vec::new();
            let result = decode(&columns, &claims, &mut references);
            assert_eq!(result.is_ok(), kind < 3, "{kind}: {result:?}");
        }
    }
}
