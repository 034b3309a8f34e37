//! `undercroft core`: copies the core that the kernel writes into a pipe, after the pages of its
//! process have been brought in.
//!
//! The kernel begins to write before we can ask, and it does not wait at pages that are out: it
//! goes past them until the pipe is full of others. So any zeros in the core may be a page that has
//! come since. Each page of zeros is looked up in the process's memory, which lasts until the pipe
//! is read; with `kernel.core_pipe_limit`, until we end.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use undercroft_proto::messages::Answered;
use undercroft_terminal::{Failure, status};

use crate::live;

/// Longest time for bringing all pages in. A process may name a run that is none, and so hold a
/// handler of its own core for as long.
const PATIENCE: Duration = Duration::from_secs(600);

const PAGE: usize = 4096;

/// Bytes that are read at a time.
const BLOCK: usize = 64 * PAGE;

/// Longest list of parts, in bytes: of a program with a million mappings.
const LIST_BYTES_MAX: usize = 64 << 20;

/// A part of the core: where it is there, and in the process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    offset: u64,
    address: u64,
    bytes: u64,
}

pub(crate) fn core(pid: u32) -> Result<u8, Failure> {
    let failed = |what: &str, why: String| {
        let fix = "it is a handler of cores: `undercroft core --help` has an example";
        Failure::new(status::FAILED, what.to_owned(), why, fix)
    };
    let (mut from, mut to) = (io::stdin().lock(), io::stdout().lock());
    if io::stdin().is_terminal() {
        let why = "standard input is a terminal, and no core".to_owned();
        return Err(failed("there is nothing to copy", why));
    }
    // First: the process may end when the pipe has been read.
    let memory = File::open(format!("/proc/{pid}/mem"));
    let brought = live::bring_home(pid, PATIENCE);
    let read = |address: u64, page: &mut [u8]| match (&brought, &memory) {
        (Some(_), Ok(memory)) => memory.read_exact_at(page, address).is_ok(),
        _ => false,
    };
    let copied = copy(&mut from, &mut to, read);
    copied.map_err(|error| failed("the core is not whole", error.to_string()))?;
    match brought {
        Some(Answered::Refused(why)) => Err(failed("the core has zeros for some pages", why)),
        Some(Answered::Yes) | None => Ok(0),
    }
}

/// Copies a core. A page of zeros is replaced by what `read` finds at its address, if it can.
fn copy(
    from: &mut impl Read,
    to: &mut impl Write,
    read: impl Fn(u64, &mut [u8]) -> bool,
) -> io::Result<()> {
    let (mut list, mut offset) = (List::Begun(Vec::new()), 0);
    let mut block = vec![0; BLOCK];
    loop {
        let mut got = 0;
        while got < BLOCK {
            match from.read(&mut block[got..])? {
                0 => break,
                more => got += more,
            }
        }
        list.hear(&block[..got]);
        for page in block[..got].chunks_exact_mut(PAGE) {
            let zeros = page.iter().all(|byte| *byte == 0);
            if let Some(address) = list.address(offset).filter(|_| zeros) {
                let mut bytes = [0; PAGE];
                if read(address, &mut bytes) {
                    page.copy_from_slice(&bytes);
                }
            }
            offset += PAGE as u64;
        }
        to.write_all(&block[..got])?;
        if got < BLOCK {
            return to.flush();
        }
    }
}

/// The parts of a core's memory, which it lists at its beginning, in order.
enum List {
    /// The bytes so far.
    Begun(Vec<u8>),
    /// The parts that are not behind the place that was asked for last.
    Whole(std::collections::VecDeque<Segment>),
}

impl List {
    /// The next bytes of the core.
    fn hear(&mut self, bytes: &[u8]) {
        let List::Begun(so_far) = self else { return };
        so_far.extend_from_slice(bytes);
        let is_core = so_far.starts_with(b"\x7fELF\x02\x01");
        if !is_core || so_far.len() > LIST_BYTES_MAX {
            *self = List::Whole(Default::default());
        } else if let Some(segments) = segments(so_far) {
            *self = List::Whole(segments.into());
        }
    }

    /// The address of the page at `offset` of the core. Offsets ascend from call to call.
    fn address(&mut self, offset: u64) -> Option<u64> {
        let List::Whole(segments) = self else {
            return None;
        };
        while let Some(first) = segments.front() {
            if offset < first.offset {
                return None;
            }
            let at = offset - first.offset;
            if at < first.bytes {
                return first.address.checked_add(at);
            }
            segments.pop_front();
        }
        None
    }
}

/// The parts of the memory that a 64-bit core says to have. `None`: the list is not whole yet.
fn segments(core: &[u8]) -> Option<Vec<Segment>> {
    const LOAD: u64 = 1;
    const ENTRY_BYTES: usize = 56;
    /// The count is elsewhere: then the first part, the notes, begins where the list ends.
    const COUNT_ELSEWHERE: u64 = 0xffff;
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(core.get(at..at.checked_add(bytes)?)?);
        Some(u64::from_le_bytes(word))
    };
    let (first, size, count) = (number(32, 8)? as usize, number(54, 2)?, number(56, 2)?);
    let end = match count {
        COUNT_ELSEWHERE => number(first.checked_add(8)?, 8)? as usize,
        count => first.checked_add(count as usize * ENTRY_BYTES)?,
    };
    let Some(list) = core.get(first..end).filter(|_| size == ENTRY_BYTES as u64) else {
        return (core.len() >= end || size != ENTRY_BYTES as u64).then(Vec::new);
    };
    let word = |entry: &[u8], at: usize| {
        u64::from_le_bytes(entry[at..at + 8].try_into().unwrap_or_default())
    };
    let mut parts: Vec<Segment> = list
        .chunks_exact(ENTRY_BYTES)
        .filter(|entry| word(entry, 0) & 0xffff_ffff == LOAD)
        .map(|entry| Segment {
            offset: word(entry, 8),
            address: word(entry, 16),
            bytes: word(entry, 32),
        })
        .collect();
    parts.sort_by_key(|part| part.offset);
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A core of seven pages: headers, a page of memory, four pages of another part, and an end.
    /// Its memory is zeros but for the last page of the part.
    fn whole() -> Vec<u8> {
        let mut core = vec![0; 7 * PAGE];
        core[..6].copy_from_slice(b"\x7fELF\x02\x01");
        core[32..40].copy_from_slice(&64u64.to_le_bytes());
        core[54..56].copy_from_slice(&56u16.to_le_bytes());
        core[56..58].copy_from_slice(&4u16.to_le_bytes());
        let page = PAGE as u64;
        let entries = [
            (4u32, 64 + 4 * 56, 0, 9),
            (1, page, 0x7000, page),
            (1, 2 * page, 0x8000, 0), // not in the core
            (1, 2 * page, 0x9000, 4 * page),
        ];
        for (at, (kind, offset, address, bytes)) in entries.into_iter().enumerate() {
            let entry = &mut core[64 + 56 * at..][..56];
            entry[..4].copy_from_slice(&kind.to_le_bytes());
            for (place, number) in [(8, offset), (16, address), (32, bytes)] {
                entry[place..place + 8].copy_from_slice(&u64::to_le_bytes(number));
            }
        }
        core[5 * PAGE..6 * PAGE].fill(1);
        core
    }

    /// Copies with a memory whose pages have their number in every byte.
    fn copied(core: &[u8], readable: bool) -> Vec<u8> {
        let mut to = Vec::new();
        let read = |address: u64, page: &mut [u8]| {
            page.fill((address >> 12) as u8);
            readable
        };
        copy(&mut &core[..], &mut to, read).expect("memory");
        to
    }

    #[test]
    fn pages_of_zeros_get_the_bytes_of_the_memory() {
        let core = whole();
        let to = copied(&core, true);
        assert_eq!(to.len(), core.len());
        assert_eq!(to[..PAGE], core[..PAGE], "headers and notes stay");
        let bytes = [7, 9, 10, 11, 1, 0];
        for (page, byte) in to[PAGE..].chunks(PAGE).zip(bytes) {
            assert!(page.iter().all(|other| *other == byte), "{byte}");
        }
        assert_eq!(copied(&core, false), core, "what cannot be read stays");
    }

    #[test]
    fn a_list_whose_count_is_elsewhere_ends_at_the_first_part() {
        let mut core = whole();
        let to = copied(&core, true);
        core[56..58].fill(0xff);
        assert_eq!(copied(&core, true)[PAGE..], to[PAGE..]);
    }

    #[test]
    fn no_bytes_are_too_strange_to_be_copied() {
        let core = whole();
        for length in 0..600 {
            assert_eq!(copied(&core[..length], true), core[..length]);
        }
        let mut random = undercroft_seeded::Random::new(7);
        for _ in 0..500 {
            let mut core = core.clone();
            for _ in 0..8 {
                let at = random.below(300) as usize;
                core[at] = random.below(256) as u8;
            }
            assert_eq!(copied(&core, true).len(), core.len());
        }
    }
}
