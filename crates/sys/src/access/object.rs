//! Takes the program out of its ELF object and fills in its maps. Understands only what `bpf/build`
//! makes.

use std::os::fd::{AsFd, AsRawFd};

/// Offsets of the section header fields that are used.
const HEADERS_AT: usize = 40;
const HEADER_BYTES: usize = 64;
const COUNT_AT: usize = 60;
const NAMES_AT: usize = 62;

/// `BPF_PSEUDO_MAP_FD`: a 64-bit load whose value is a descriptor of a map.
const MAP_FD: u8 = 1;
const LOAD_64: u8 = 0x18;

fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(size)?)?;
    Some(
        field
            .iter()
            .rev()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    )
}

struct Section<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

fn text(bytes: &[u8], at: usize) -> Option<&str> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

fn sections(object: &[u8]) -> Option<Vec<Section<'_>>> {
    let table = number(object, HEADERS_AT, 8)? as usize;
    let count = number(object, COUNT_AT, 2)? as usize;
    let header = |index: usize| {
        object
            .get(table + index * HEADER_BYTES..)?
            .get(..HEADER_BYTES)
    };
    let bytes = |index: usize| {
        let header = header(index)?;
        let start = number(header, 24, 8)? as usize;
        object.get(start..start.checked_add(number(header, 32, 8)? as usize)?)
    };
    let names = bytes(number(object, NAMES_AT, 2)? as usize)?;
    (1..count)
        .map(|index| {
            let name = text(names, number(header(index)?, 0, 4)? as usize)?;
            Some(Section {
                name,
                bytes: bytes(index)?,
            })
        })
        .collect()
}

/// The instructions, with the maps' descriptors filled in. `None` if `bpf/build` did not make the
/// object.
///
/// * `code`: the section that has them.
pub(super) fn link(object: &[u8], code: &str, maps: &[(&str, &impl AsFd)]) -> Option<Vec<u64>> {
    let sections = sections(object)?;
    let find = |name: &str| sections.iter().find(|section| section.name == name);
    let relocated = format!(".rel{code}");
    let mut code = find(code)?.bytes.to_vec();
    let (symbols, names) = (find(".symtab")?.bytes, find(".strtab")?.bytes);
    let (relocations, _) = find(&relocated)?.bytes.as_chunks::<16>();
    for relocation in relocations {
        let at = number(relocation, 0, 8)? as usize;
        let symbol = number(relocation, 12, 4)? as usize;
        let name = text(names, number(symbols, symbol * 24, 4)? as usize)?;
        let (_, map) = maps.iter().find(|(known, _)| *known == name)?;
        let instruction = code.get_mut(at..at.checked_add(8)?)?;
        if instruction[0] != LOAD_64 {
            return None;
        }
        instruction[1] = instruction[1] & 0x0f | MAP_FD << 4;
        instruction[4..8].copy_from_slice(&map.as_fd().as_raw_fd().to_le_bytes());
    }
    let (instructions, rest) = code.as_chunks::<8>();
    rest.is_empty().then(|| {
        instructions
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMemory;

    #[test]
    fn the_object_links_both_maps_and_a_cut_one_is_refused() {
        let object = super::super::OBJECT;
        let map = SharedMemory::create("map", 1).unwrap();
        let maps = [("control", &map), ("tables", &map)];
        let code = link(object, "iter/task", &maps).unwrap();
        let loads = code
            .iter()
            .filter(|word| **word & 0xf0ff == u64::from(LOAD_64) | 0x1000);
        assert_eq!(loads.count(), 2);
        assert_eq!(
            link(object, "iter/task", &maps[..1]),
            None,
            "a map without a descriptor"
        );
        for end in 0..object.len() {
            let _ = link(&object[..end], "iter/task", &maps); // no panic; mostly None
        }
    }
}
