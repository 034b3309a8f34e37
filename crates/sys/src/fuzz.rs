//! The promises that must hold for whatever a program wrote into what is parsed here: names in the
//! texts of /proc and in side-band records, and its own file. The fuzz targets check them, and the
//! tests below check them over mutated samples.

use std::io;

use undercroft_base::VirtRange;

use crate::image::Image;
use crate::procfs::{Sizes, Status, Vma, flagged, stat_field, status_line};
use crate::sideband::{self, Record};
use crate::{cgroup, procfs};

/// Flags that are asked for in smaps.
const FLAGS: [&str; 3] = ["lo", "wf", "sh"];

/// Reads `bytes` as each text of /proc. Panics if a promise is broken: a mapping that is read says
/// what its line says, a mapping with a flag is one of the mappings, and a field of `stat` has no
/// ASCII white space. Returns how much was found.
pub fn procfs(bytes: &[u8]) -> u64 {
    let mut text = String::new();
    let mut file = bytes;
    procfs::read_text(&mut file, &mut text).expect("memory is readable");
    if let Ok(same) = std::str::from_utf8(bytes) {
        assert_eq!(text, same);
    }
    let vmas: Vec<Vma<'_>> = text.lines().filter_map(Vma::parse).collect();
    vmas.iter().for_each(says_what_its_line_says);
    let mut lists = FLAGS.map(|_| Vec::<VirtRange>::new());
    let mut wanted = lists.iter_mut().zip(FLAGS).map(|(list, flag)| (flag, list));
    let mut wanted: [_; FLAGS.len()] = std::array::from_fn(|_| wanted.next().expect("a list each"));
    flagged(&text, &mut wanted);
    let is_mapped = |range: &VirtRange| vmas.iter().any(|vma| vma.range == *range);
    assert!(lists.iter().flatten().all(is_mapped));
    let numbers = ["VmLck", "Threads", "PPid"].map(|key| status_line(&text, key));
    for number in numbers.iter().flatten() {
        assert!(text.contains(number));
    }
    let fields = [3, 14, 15, 39].map(|number| stat_field(bytes, number));
    for field in fields.iter().flatten() {
        assert!(!field.is_empty() && !field.contains(|c: char| c.is_ascii_whitespace()));
    }
    let sizes = Sizes::parse(bytes) != Sizes::default();
    let limit = cgroup::limit_of(&text, |path| {
        path.len().is_multiple_of(3).then(|| text.clone())
    });
    let found = [
        vmas.len(),
        lists.iter().map(Vec::len).sum(),
        numbers.iter().flatten().count(),
        fields.iter().flatten().count(),
        usize::from(Status::parse(&text).is_some()),
        usize::from(sizes),
        usize::from(limit.is_some()),
    ];
    found.iter().map(|count| *count as u64).sum()
}

/// A mapping, written as the kernel writes it and read again.
fn says_what_its_line_says(vma: &Vma<'_>) {
    assert!(vma.range.start <= vma.range.end);
    let letter = |is: bool, letter| if is { letter } else { '-' };
    let line = format!(
        "{:x}-{:x} {}{}{}{} 0 00:00 {} {}",
        vma.range.start.address(),
        vma.range.end.address(),
        letter(vma.read, 'r'),
        letter(vma.write, 'w'),
        letter(vma.exec, 'x'),
        if vma.shared { 's' } else { 'p' },
        vma.inode,
        vma.name
    );
    assert_eq!(Vma::parse(&line), Some(*vma), "{line}");
    let file = vma.inode != 0 || vma.name.starts_with('/');
    assert!(!(vma.is_private_anonymous() && (vma.shared || file)));
}

/// Reads `bytes` as a side-band record. Panics if a promise is broken: a record is no shorter than
/// its kind, a range does not wrap, a name is part of the bytes, and what is behind the record does
/// not matter. True if it is a record.
pub fn sideband(bytes: &[u8]) -> bool {
    let Some(record) = sideband::parse(bytes) else {
        return false;
    };
    let with = |more: &[u8]| [bytes, more].concat();
    match record {
        Record::Mmap { range, name, .. } => {
            assert!(bytes.len() >= 72 && range.start <= range.end);
            assert!(!name.contains(&0) && bytes[72..].starts_with(name));
            // The kernel ends each name with a zero.
            assert_eq!(sideband::parse(&with(b"\0behind")), Some(record));
        }
        Record::Fork { .. } | Record::Exit { .. } => assert!(bytes.len() >= 24),
        Record::Exec { .. } => assert!(bytes.len() >= 12),
        Record::Lost(_) => assert!(bytes.len() >= 24),
    }
    if !matches!(record, Record::Mmap { .. }) {
        assert_eq!(sideband::parse(&with(b"behind")), Some(record));
    }
    true
}

/// Reads `bytes` as a program. Panics if a promise is broken: reading ends, two ways of reading
/// agree, and only a file that names a loader is dynamic. True if it is a program or a script.
pub fn image(bytes: &[u8]) -> bool {
    let mut reads = 0u32;
    let mut of = |step: usize| {
        Image::read(|at, to| {
            reads += 1;
            assert!(reads < 20_000, "reading does not end");
            let at = usize::try_from(at).map_err(|_| io::ErrorKind::InvalidInput)?;
            let rest = bytes.get(at..).unwrap_or_default();
            let got = to.len().min(rest.len()).min(step);
            to[..got].copy_from_slice(&rest[..got]);
            Ok(got)
        })
    };
    let (whole, torn) = (of(usize::MAX).ok(), of(3).ok());
    assert_eq!(whole, torn);
    if whole == Some(Image::Dynamic) {
        let loader = 3u32.to_le_bytes();
        assert!(bytes.windows(4).any(|word| word == loader));
    }
    if let Some(Image::Script(interpreter)) = &whole {
        assert!(!interpreter.is_empty() && bytes.starts_with(b"#!"));
    }
    whole.is_some_and(|image| image != Image::Unknown)
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;

    const SAMPLES: [&[u8]; 5] = [
        b"7f0000000000-7f0000002000 rw-p 00000000 00:00 0 \n\
          Size: 8 kB\nLocked: 8 kB\nVmFlags: rd wr mr mw me lo ac \n\
          5600000000-5600007000 r-xp 00001000 fe:00 1234      /usr/bin/a b\n\
          VmFlags: rd ex mr mw me wf \n\
          7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0      [stack]\n",
        b"Name:\tcaf\xe9 \\n\nState:\tS (sleeping)\nPPid:\t1\nVmLck:\t      64 kB\nThreads:\t3\n\
          Seccomp_filters:\t1\n",
        b"7 (a) b) c) S 1 7 7 0 -1 4194560 97 0 0 0 12 34 0 0 20 0 1 0 5 6 7 8 9 10 11 12 13 14 \
          15 16 17 18 19 20 21 22 23 24 25 26 27\n",
        b"1000 200 30 4 0 5 0\n",
        b"5:cpu,cpuacct:/x\n4:memory:/job\n0::/a/b\n",
    ];

    /// Changes, removes, repeats and inserts bytes.
    fn mutated(random: &mut Random, sample: &[u8]) -> Vec<u8> {
        let mut bytes = sample.to_vec();
        for _ in 0..random.below(6) {
            let at = random.index(bytes.len().max(1));
            let to = (at + random.index(16)).min(bytes.len());
            match random.below(5) {
                _ if bytes.is_empty() => bytes.push(random.bits() as u8),
                0 => bytes[at] = random.bits() as u8,
                1 => bytes[at] ^= 1 << random.below(8),
                2 => drop(bytes.drain(at..to)),
                3 => {
                    let again = bytes[at..to].to_vec();
                    drop(bytes.splice(at..at, again));
                }
                _ => bytes.insert(at, b" \n-:0\xff"[random.index(6)]),
            }
        }
        bytes
    }

    #[test]
    fn mutated_texts_of_proc_keep_every_promise() {
        let mut random = Random::new(11);
        let mut found = 0;
        for round in 0..60_000 {
            found += procfs(&mutated(&mut random, SAMPLES[round % SAMPLES.len()]));
        }
        assert!(found > 100_000, "{found} prove nothing");
    }

    #[test]
    fn mutated_records_keep_every_promise() {
        let mut random = Random::new(12);
        let mut records = 0;
        for round in 0..100_000u64 {
            let kind = [10, 7, 4, 3, 2][round as usize % 5];
            let mut bytes = u32::to_ne_bytes(kind).to_vec();
            bytes.extend((u16::from(round % 2 == 0) << 13).to_ne_bytes());
            bytes.extend([0; 2]);
            for _ in 0..8 {
                bytes.extend((random.bits() >> random.below(60)).to_ne_bytes());
            }
            bytes.extend(b"//anon\0\0");
            records += u64::from(sideband(&mutated(&mut random, &bytes)));
        }
        assert!(records > 50_000, "{records} prove nothing");
    }

    #[test]
    fn mutated_programs_keep_every_promise() {
        let own = std::fs::read("/proc/self/exe").expect("the test's own file");
        let samples: [&[u8]; 3] = [&own[..2048], b"#! /bin/sh -e\necho\n", b"\x7fELF\x02\x01"];
        let (mut random, mut taken) = (Random::new(13), 0);
        for round in 0..60_000 {
            let mut bytes = mutated(&mut random, samples[round % 3]);
            if round % 2 == 0 && bytes.len() > 64 {
                let at = [4, 18, 32, 33, 54, 56, 57, 64, 120][random.index(9)];
                bytes[at] = random.bits() as u8;
            }
            taken += u64::from(image(&bytes));
        }
        assert!(taken > 15_000, "{taken} prove nothing");
    }
}
