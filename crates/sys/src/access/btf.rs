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
    /// Bytes of the strings.
    strings_len: usize,
}

/// Types of a module begin where the kernel's end, and so do their strings.
type Base<'a> = Option<&'a Types>;

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

    /// The types of a module, beside the kernel's. `None`: it has none of its own.
    pub(super) fn of_module(name: &str) -> Option<Types> {
        Types::parse(std::fs::read(format!("/sys/kernel/btf/{name}")).ok()?)
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
        let strings_len = word(&bytes, 20)? as usize;
        Some(Types {
            bytes,
            starts,
            strings,
            strings_len,
        })
    }

    fn kind(&self, start: usize) -> Option<u32> {
        Some(word(&self.bytes, start + 4)? >> 24 & 0x1f)
    }

    fn is_named(&self, base: Base<'_>, at: usize, name: &str) -> bool {
        let offset = word(&self.bytes, at).unwrap_or(0) as usize;
        let (of, offset) = match base {
            Some(base) if offset < base.strings_len => (base, offset),
            _ => (self, offset - base.map_or(0, |base| base.strings_len)),
        };
        let found = of.bytes.get(of.strings.saturating_add(offset)..);
        found.is_some_and(|found| {
            found.starts_with(name.as_bytes()) && found.get(name.len()) == Some(&0)
        })
    }

    fn find(&self, base: Base<'_>, kind: u32, name: &str) -> Option<usize> {
        self.starts.iter().position(|start| {
            let start = *start as usize;
            self.kind(start) == Some(kind) && self.is_named(base, start, name)
        })
    }

    /// The number of a function.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        Some(self.find(None, FUNCTION, name)? as u32 + 1)
    }

    /// The offset of a member in a structure. Members of unnamed structures inside it count too.
    pub(super) fn member(&self, structure: &str, name: &str) -> Option<u32> {
        let start = self.starts[self.find(None, STRUCT, structure)?] as usize;
        self.member_of(None, start, name, DEPTH_MAX)
    }

    /// As [`Types::member`], of a module's structure.
    pub(super) fn member_with(&self, base: &Types, structure: &str, name: &str) -> Option<u32> {
        let start = self.starts[self.find(Some(base), STRUCT, structure)?] as usize;
        self.member_of(Some(base), start, name, DEPTH_MAX)
    }

    fn member_of(&self, base: Base<'_>, start: usize, name: &str, depth: u32) -> Option<u32> {
        let info = word(&self.bytes, start + 4)?;
        // If the top bit is set, a member's word has the size of a bit field above its offset.
        let mask = if info >> 31 == 1 { 0xff_ffff } else { u32::MAX };
        for entry in 0..(info & 0xffff) as usize {
            let at = start + 12 + entry * 12;
            let offset = (word(&self.bytes, at + 8)? & mask) / 8;
            if self.is_named(base, at, name) {
                return Some(offset);
            }
            if word(&self.bytes, at)? == 0 && depth > 0 {
                let inner = word(&self.bytes, at + 4)?.checked_sub(1)? as usize;
                let (of, base, inner) = match base {
                    Some(base) if inner < base.starts.len() => (base, None, inner),
                    _ => (self, base, inner - base.map_or(0, |base| base.starts.len())),
                };
                let inner = *of.starts.get(inner)? as usize;
                if matches!(of.kind(inner)?, STRUCT | UNION)
                    && let Some(deeper) = of.member_of(base, inner, name, depth - 1)
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
        description(types, strings)
    }

    fn description(types: &[u32], strings: &[u8]) -> Vec<u8> {
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

    /// `struct vcpu { struct { int b; int c; }; struct { int d; }; }`: the first of the kernel's
    /// types, the second of the module's own.
    fn module(base: &Types) -> Types {
        let kernel = base.strings_len as u32;
        let strings = b"\0vcpu\0d\0";
        let types: &[u32] = &[
            0,
            4 << 24 | 1,
            4,
            kernel + 6,
            1,
            0, // 5: the inner one
            kernel + 1,
            4 << 24 | 2,
            12,
            0,
            2,
            0,
            0,
            5,
            64, // 6: vcpu
        ];
        Types::parse(description(types, strings)).expect("a description")
    }

    #[test]
    fn members_of_a_modules_structures_are_found_by_its_types_and_the_kernels() {
        let base = Types::parse(sample()).expect("a description");
        let module = module(&base);
        let member = |name| module.member_with(&base, "vcpu", name);
        assert_eq!(
            ["b", "c", "d", "a"].map(member),
            [Some(0), Some(4), Some(8), None]
        );
        assert_eq!(module.member_with(&base, "outer", "a"), None);
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
