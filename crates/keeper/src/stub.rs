//! The stub that 32-bit programs load in place of the shim: a shared object that does nothing.
//! Without it, their loaders would complain of the shim on the program's standard error.
//!
//! ```text
//! 0     ELF header                     212   table of strings: ""
//! 52    program headers: LOAD,         216   hash table: one bucket, one symbol
//!       DYNAMIC, GNU_STACK             232   dynamic section
//! 148   table of symbols: none but     288   end
//!       the empty first one
//! ```
//! The segment is writable: older loaders relocate the dynamic section in place. Without GNU_STACK,
//! they would make the program's stack executable.

const HEADERS_AT: u32 = 52;
const HEADER: u32 = 32;
const SYMBOLS_AT: u32 = HEADERS_AT + 3 * HEADER;
const SYMBOL: u32 = 16;
const STRINGS_AT: u32 = 212;
const HASH_AT: u32 = 216;
const DYNAMIC_AT: u32 = 232;
/// Six entries and the last, of two words each.
const DYNAMIC: u32 = 7 * 8;
const END: u32 = DYNAMIC_AT + DYNAMIC;

const _: () = assert!(SYMBOLS_AT + SYMBOL <= STRINGS_AT);

/// The bytes of the file.
pub(super) fn stub() -> Vec<u8> {
    const LOAD: u32 = 1;
    const DYNAMIC_SEGMENT: u32 = 2;
    const GNU_STACK: u32 = 0x6474_e551;
    const READ_WRITE: u32 = 6;
    const PAGE: u32 = 4096;
    // Class 1: 32 bits. Data 1: little-endian. Version 1.
    let mut bytes = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let words = |bytes: &mut Vec<u8>, words: &[u32]| {
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    };
    // A shared object (3) of the 80386 (3), version 1; no entry point; no sections, no flags. Then
    // halves: the sizes of this header and of a program header, their number, and no sections.
    words(&mut bytes, &[0x0003_0003, 1, 0, HEADERS_AT, 0, 0]);
    let halves = [HEADERS_AT as u16, HEADER as u16, 3, 40, 0, 0];
    bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    words(&mut bytes, &[LOAD, 0, 0, 0, END, END, READ_WRITE, PAGE]);
    let (at, size) = (DYNAMIC_AT, DYNAMIC);
    words(
        &mut bytes,
        &[DYNAMIC_SEGMENT, at, at, at, size, size, READ_WRITE, 4],
    );
    words(&mut bytes, &[GNU_STACK, 0, 0, 0, 0, 0, READ_WRITE, 16]);
    bytes.resize(HASH_AT as usize, 0);
    words(&mut bytes, &[1, 1, 0, 0]);
    // HASH, STRTAB, SYMTAB, STRSZ, SYMENT, FLAGS, and the end.
    words(
        &mut bytes,
        &[4, HASH_AT, 5, STRINGS_AT, 6, SYMBOLS_AT, 10, 1, 11, SYMBOL],
    );
    words(&mut bytes, &[30, 0, 0, 0]);
    assert_eq!(bytes.len(), END as usize, "the stub is as drawn");
    bytes
}
