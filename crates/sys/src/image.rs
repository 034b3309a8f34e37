//! Tells from a file how the kernel would run it: which loader brings libraries in, if one does.
//!
//! The file is the user's, so any bytes have an answer. At most [`HEADERS_MAX`] program headers are
//! read, as the kernel does.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;

/// The kernel reads this much to see what a file is.
const HEAD_BYTES: usize = 256;
/// Size of a program header. The kernel takes no other.
const HEADER_BYTES: u16 = 56;
/// The kernel takes 64 KiB of program headers at most.
const HEADERS_MAX: u16 = (65_536 / HEADER_BYTES as u32) as u16;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;

/// Kinds of program file, by how they are loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// An x86-64 ELF program with a loader.
    Dynamic,
    /// An x86-64 ELF program that relocates itself: linked statically, or the loader itself.
    Relocates,
    /// An x86-64 ELF program without a loader.
    Static,
    /// An ELF file of another machine or word size.
    Foreign,
    /// A script: run by this interpreter.
    Script(OsString),
    /// None of these. A shell would try it as its own script; the kernel refuses it.
    Unknown,
}

impl Image {
    /// Errors: the file cannot be read, or its program headers lie behind its end.
    pub fn of(file: &File) -> io::Result<Image> {
        Image::read(|at, bytes| file.read_at(bytes, at))
    }

    /// * `read`: reads at a place; it may give less than asked for, as read(2).
    pub(crate) fn read(
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Image> {
        let mut head = [0u8; HEAD_BYTES];
        let got = fill(&mut read, 0, &mut head)?;
        let head = &head[..got];
        if let Some(line) = head.strip_prefix(b"#!") {
            return Ok(script(line));
        }
        let (Some(class), Some(order)) = (head.get(4), head.get(5)) else {
            return Ok(Image::Unknown);
        };
        let half = |at: usize| {
            let bytes = head.get(at..at + 2)?.first_chunk()?;
            Some(u16::from_le_bytes(*bytes))
        };
        let (Some(machine), Some(size), Some(count)) = (half(18), half(54), half(56)) else {
            return Ok(Image::Unknown);
        };
        if !head.starts_with(b"\x7fELF") {
            return Ok(Image::Unknown);
        }
        if *class != CLASS_64 || *order != LITTLE_ENDIAN || machine != MACHINE_X86_64 {
            return Ok(Image::Foreign);
        }
        if size != HEADER_BYTES || count == 0 || count > HEADERS_MAX {
            return Ok(Image::Unknown);
        }
        let first = head.get(32..40).and_then(<[u8]>::first_chunk);
        let first = first.map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let mut relocates = false;
        for number in 0..u64::from(count) {
            let mut kind = [0u8; 4];
            let at = first.saturating_add(number * u64::from(size));
            if fill(&mut read, at, &mut kind)? < kind.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match u32::from_le_bytes(kind) {
                PT_INTERP => return Ok(Image::Dynamic),
                PT_DYNAMIC => relocates = true,
                _ => {}
            }
        }
        Ok(if relocates {
            Image::Relocates
        } else {
            Image::Static
        })
    }
}

/// * `line`: what follows `#!`.
fn script(line: &[u8]) -> Image {
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| *byte == b' ' || *byte == b'\t');
    let interpreter = words.find(|word| !word.is_empty());
    interpreter.map_or(Image::Unknown, |word| {
        Image::Script(OsString::from_vec(word.to_vec()))
    })
}

/// Reads until `bytes` is full or the file ends. Returns how much was read.
fn fill(
    read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    at: u64,
    bytes: &mut [u8],
) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match read(at.saturating_add(got as u64), &mut bytes[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> io::Result<Image> {
        Image::read(|at, to| {
            let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
            let rest = rest.unwrap_or_default();
            let got = to.len().min(rest.len()).min(100); // short reads
            to[..got].copy_from_slice(&rest[..got]);
            Ok(got)
        })
    }

    /// An ELF header, then program headers of these types.
    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + 56 * kinds.len()];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&62u16.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&(kinds.len() as u16).to_le_bytes());
        for (at, kind) in kinds.iter().enumerate() {
            bytes[64 + 56 * at..][..4].copy_from_slice(&kind.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn program_headers_tell_how_a_program_is_linked() {
        let kind = |kinds: &[u32]| of(&elf(kinds)).expect("readable");
        assert_eq!(kind(&[6, 3, 1, 2]), Image::Dynamic);
        assert_eq!(kind(&[1, 2]), Image::Relocates);
        assert_eq!(kind(&[1, 1]), Image::Static);
        assert_eq!(kind(&[]), Image::Unknown, "the kernel refuses it");
    }

    #[test]
    fn headers_that_the_kernel_refuses_are_no_program() {
        let with = |at: usize, to: u16| {
            let mut bytes = elf(&[3]);
            bytes[at..at + 2].copy_from_slice(&to.to_le_bytes());
            of(&bytes)
        };
        assert_eq!(with(54, 32).ok(), Some(Image::Unknown), "size of a header");
        assert_eq!(with(56, 1171).ok(), Some(Image::Unknown), "too many");
        assert_eq!(with(18, 183).ok(), Some(Image::Foreign), "another machine");
        let far = with(34, 1).expect_err("headers behind the end");
        assert_eq!(far.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_script_names_its_interpreter() {
        let script = |line: &[u8]| of(line).expect("readable");
        let sh = || Image::Script("/bin/sh".into());
        assert_eq!(script(b"#!/bin/sh -e\n"), sh());
        assert_eq!(script(b"#! \t/bin/sh"), sh());
        assert_eq!(script(b"#!  \n/bin/sh"), Image::Unknown);
        assert_eq!(script(b""), Image::Unknown);
    }
}
