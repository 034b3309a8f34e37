//! The running kernel's description of its own types: numbers of functions, offsets of fields.
//!
//! Format: `Documentation/bpf/btf.rst`. Cost: one pass over 5 MB, freed afterwards.

const MAGIC: u16 = 0xeb9f;

const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;

/// Deepest nesting of unnamed structures.
const DEPTH_MAX: u32 = 8;

/// The kernel's types.
const PATH: &str = "/sys/kernel/btf/vmlinux";

pub(super) struct Types {
    bytes: Vec<u8>,
    /// The offset of each type, from number 1 on.
    starts: Vec<u32>,
    strings: usize,
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(
        bytes.get(at..at.checked_add(2)?)?.try_into().ok()?,
    ))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}

/// Bytes that follow the 12 of a type. `None` for a future kind, whose length is unknown.
fn tail(kind: u32, entries: usize) -> Option<usize> {
    Some(match kind {
        1 | 14 | 17 => 4,
        3 => 12,
        4 | 5 | 15 | 19 => entries * 12,
        6 | 13 => entries * 8,
        2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

impl Types {
    pub(super) fn read() -> std::io::Result<Types> {
        let bytes = std::fs::read(PATH)?;
        Types::parse(bytes).ok_or_else(|| std::io::Error::other("its format is unknown"))
    }

    fn parse(bytes: Vec<u8>) -> Option<Types> {
        if half(&bytes, 0)? != MAGIC {
            return None;
        }
        let header = word(&bytes, 4)? as usize;
        let mut at = header.checked_add(word(&bytes, 8)? as usize)?;
        let end = at.checked_add(word(&bytes, 12)? as usize)?;
        let strings = header.checked_add(word(&bytes, 16)? as usize)?;
        let mut starts = Vec::new();
        while at < end {
            starts.push(at as u32);
            let info = word(&bytes, at + 4)?;
            at += 12 + tail(info >> 24 & 0x1f, (info & 0xffff) as usize)?;
        }
        Some(Types {
            bytes,
            starts,
            strings,
        })
    }

    fn kind(&self, start: usize) -> Option<u32> {
        Some(word(&self.bytes, start + 4)? >> 24 & 0x1f)
    }

    fn is_named(&self, at: usize, name: &str) -> bool {
        let offset = word(&self.bytes, at).unwrap_or(0) as usize;
        let found = self.bytes.get(self.strings + offset..);
        found.is_some_and(|found| {
            found.starts_with(name.as_bytes()) && found.get(name.len()) == Some(&0)
        })
    }

    fn find(&self, kind: u32, name: &str) -> Option<usize> {
        self.starts.iter().position(|start| {
            let start = *start as usize;
            self.kind(start) == Some(kind) && self.is_named(start, name)
        })
    }

    /// The number of a function.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        Some(self.find(FUNCTION, name)? as u32 + 1)
    }

    /// The offset of a member in a structure. Members of unnamed structures inside it count too.
    pub(super) fn member(&self, structure: &str, name: &str) -> Option<u32> {
        let start = self.starts[self.find(STRUCT, structure)?] as usize;
        self.member_of(start, name, DEPTH_MAX)
    }

    fn member_of(&self, start: usize, name: &str, depth: u32) -> Option<u32> {
        let info = word(&self.bytes, start + 4)?;
        // If the top bit is set, a member's word has the size of a bit field above its offset.
        let mask = if info >> 31 == 1 { 0xff_ffff } else { u32::MAX };
        for entry in 0..(info & 0xffff) as usize {
            let at = start + 12 + entry * 12;
            let offset = (word(&self.bytes, at + 8)? & mask) / 8;
            if self.is_named(at, name) {
                return Some(offset);
            }
            if word(&self.bytes, at)? == 0 && depth > 0 {
                let inner = word(&self.bytes, at + 4)?.checked_sub(1)?;
                let inner = *self.starts.get(inner as usize)? as usize;
                if matches!(self.kind(inner)?, STRUCT | UNION)
                    && let Some(deeper) = self.member_of(inner, name, depth - 1)
                {
                    return Some(offset + deeper);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct outer { int a; struct { int b; int c; }; }`, then `func f`.
    fn sample() -> Vec<u8> {
        let strings = b"\0outer\0a\0b\0c\0f\0int\0";
        let types: &[u32] = &[
            15,
            1 << 24,
            4,
            0, // 1: int
            0,
            4 << 24 | 2,
            8,
            9,
            1,
            0,
            11,
            1,
            32, // 2: the inner one
            1,
            4 << 24 | 2,
            12,
            7,
            1,
            0,
            0,
            2,
            32, // 3: outer
            13,
            12 << 24,
            1, // 4: f
        ];
        let mut bytes = Vec::new();
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend([1, 0]);
        let types_len = types.len() as u32 * 4;
        for word in [24, 0, types_len, types_len, strings.len() as u32] {
            bytes.extend(u32::to_le_bytes(word));
        }
        bytes.extend(types.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn members_of_nameless_structures_are_found_and_functions_numbered() {
        let types = Types::parse(sample()).unwrap();
        let member = |name| types.member("outer", name);
        assert_eq!(
            [member("a"), member("b"), member("c"), member("d")],
            [Some(0), Some(4), Some(8), None]
        );
        assert_eq!(types.function("f"), Some(4));
        assert_eq!(types.function("outer"), None);
    }

    #[test]
    fn cut_descriptions_are_refused_or_miss_things_but_do_not_panic() {
        let whole = sample();
        for end in 0..whole.len() {
            if let Some(types) = Types::parse(whole[..end].to_vec()) {
                let _ = (types.member("outer", "c"), types.function("f"));
            }
        }
    }
}
