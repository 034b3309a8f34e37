//! Parses side-band records. Any bytes give a record or nothing.

use undercroft_base::VirtRange;

/// A side-band record. Ids are those of the namespace in which the watch was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// A mapping was made, grown by `brk`, or given another protection. `range` is the whole
    /// mapping at that time, merged neighbours included. It may be gone already.
    Mmap {
        /// Process.
        pid: u32,
        /// Thread that did it.
        tid: u32,
        /// The mapping.
        range: VirtRange,
        /// Private and of no file: what can be managed (the heap included; stacks not).
        anonymous: bool,
        /// Readable and writable.
        writable: bool,
        /// Path, `//anon`, `[heap]`, `[stack]`...
        name: &'a [u8],
    },
    /// A process (`pid != ppid`) or a thread was started.
    Fork {
        /// Process of the new thread.
        pid: u32,
        /// Process of the thread that started it.
        ppid: u32,
        /// The new thread.
        tid: u32,
        /// The thread that started it.
        ptid: u32,
    },
    /// A thread ended. The process ended if `tid == pid` and no other thread is left.
    Exit {
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
    },
    /// The process runs another program now, in a new address space that has no userfaultfd.
    Exec {
        /// Process.
        pid: u32,
    },
    /// This many records were lost, so all must be scanned again. 0: the ring was full, so some may
    /// be lost.
    Lost(u64),
}

const LOST: u32 = 2;
const COMM: u32 = 3;
const EXIT: u32 = 4;
const FORK: u32 = 7;
const MMAP2: u32 = 10;
const MISC_COMM_EXEC: u16 = 1 << 13;

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn u32(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*word))
    }

    fn u64(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*word))
    }

    fn text(self) -> &'a [u8] {
        let end = self.0.iter().position(|byte| *byte == 0);
        &self.0[..end.unwrap_or(self.0.len())]
    }
}

/// Parses one record with its header. `None` for other kinds, and for bytes too short for a record.
pub fn parse(bytes: &[u8]) -> Option<Record<'_>> {
    let (header, body) = bytes.split_first_chunk::<8>()?;
    let kind = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
    let misc = u16::from_ne_bytes([header[4], header[5]]);
    let mut body = Reader(body);
    match kind {
        MMAP2 => mmap(body),
        FORK | EXIT => {
            let (pid, ppid) = (body.u32()?, body.u32()?);
            let (tid, ptid) = (body.u32()?, body.u32()?);
            Some(match kind {
                FORK => Record::Fork {
                    pid,
                    ppid,
                    tid,
                    ptid,
                },
                _ => Record::Exit { pid, tid },
            })
        }
        COMM if misc & MISC_COMM_EXEC != 0 => Some(Record::Exec { pid: body.u32()? }),
        LOST => {
            let _id = body.u64()?;
            Some(Record::Lost(body.u64()?))
        }
        _ => None,
    }
}

fn mmap(mut body: Reader<'_>) -> Option<Record<'_>> {
    let (pid, tid) = (body.u32()?, body.u32()?);
    let (start, len) = (body.u64()?, body.u64()?);
    let _offset = body.u64()?;
    let (_device, inode, _generation) = (body.u64()?, body.u64()?, body.u64()?);
    let (prot, flags) = (body.u32()? as i32, body.u32()? as i32);
    let name = body.text();
    let private = flags & libc::MAP_PRIVATE != 0;
    let plain = name == b"//anon" || name == b"[heap]" || name.starts_with(b"[anon:");
    Some(Record::Mmap {
        pid,
        tid,
        range: VirtRange::of_addresses(start, start.checked_add(len)?),
        anonymous: private && inode == 0 && plain,
        writable: prot & (libc::PROT_READ | libc::PROT_WRITE) == libc::PROT_READ | libc::PROT_WRITE,
        name,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel writes records, but names in them are the program's. Fixed seed.
    #[test]
    fn any_bytes_are_a_record_or_none() {
        let mut state = 5u64;
        let mut told = 0;
        for round in 0..100_000usize {
            let mut random = vec![0u8; round % 120];
            for byte in &mut random {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(99);
                *byte = (state >> 56) as u8;
            }
            if let Some(kind) = random.get_mut(..4) {
                let kinds = [MMAP2, FORK, EXIT, COMM, LOST];
                kind.copy_from_slice(&kinds[round % 5].to_ne_bytes());
            }
            told += u32::from(parse(&random).is_some());
        }
        assert!(told > 20_000, "{told} prove nothing");
    }

    fn bytes(kind: u32, misc: u16, words: &[u32], name: &[u8]) -> Vec<u8> {
        let mut out = kind.to_ne_bytes().to_vec();
        out.extend(misc.to_ne_bytes());
        out.extend((8 + words.len() as u16 * 4 + name.len() as u16).to_ne_bytes());
        out.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        out.extend(name);
        out
    }

    #[test]
    fn mmap_record_gives_range_and_kind() {
        let words = [7, 8, 0x4000, 0, 0x3000, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0x22];
        let record = bytes(10, 0, &words, b"//anon\0\0");
        let Some(Record::Mmap {
            pid,
            tid,
            range,
            anonymous,
            writable,
            name,
        }) = parse(&record)
        else {
            panic!("not a mapping");
        };
        assert_eq!((pid, tid, name), (7, 8, &b"//anon"[..]));
        assert_eq!(range, VirtRange::of_addresses(0x4000, 0x7000));
        assert!(anonymous && writable);
        let stack = bytes(10, 0, &words, b"[stack]\0");
        assert!(matches!(
            parse(&stack),
            Some(Record::Mmap {
                anonymous: false,
                ..
            })
        ));
    }

    #[test]
    fn only_a_comm_of_exec_is_an_exec() {
        assert_eq!(parse(&bytes(3, 0, &[7, 7], b"name\0\0\0\0")), None);
        let exec = bytes(3, 1 << 13, &[7, 7], b"name\0\0\0\0");
        assert_eq!(parse(&exec), Some(Record::Exec { pid: 7 }));
    }

    #[test]
    fn short_odd_and_hostile_bytes_are_no_record_and_no_panic() {
        let words = [u32::MAX; 16];
        for kind in 0..24 {
            let whole = bytes(kind, u16::MAX, &words, b"x");
            for len in 0..whole.len() {
                let _ = parse(&whole[..len]);
            }
        }
        let wraps = bytes(10, 0, &words, b"//anon");
        assert_eq!(parse(&wraps), None, "a range beyond the address space");
    }
}
