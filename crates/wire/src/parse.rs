//! The shim's messages as the manager takes them: bytes from a client, parsed once.

use undercroft_wire::protocol as wire;
use wire::{KIND_FORK, KIND_START, MAGIC, STAGING_PAGES};

/// What a shim says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub kind: u32,
    pub nonce: u64,
}

/// What a shim has set up; addresses are page-aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    pub staging: u64,
    pub private_end: u64,
    pub beacon: u64,
}

/// Most that may lie behind the holding area: the agent's stack.
const STACK_MAX: u64 = 1 << 20;

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let bytes = bytes.get(index * 8..index * 8 + 8)?;
    Some(u64::from_ne_bytes(bytes.try_into().ok()?))
}

impl Hello {
    pub const BYTES: usize = size_of::<wire::Hello>();

    /// `None` for anything but a well-formed message: what comes from a client is hostile until it has a type.
    pub fn parse(bytes: &[u8]) -> Option<Hello> {
        let (head, nonce) = (word(bytes, 0)?, word(bytes, 1)?);
        let (magic, kind) = (head as u32, (head >> 32) as u32);
        let known = magic == MAGIC && (kind == KIND_START || kind == KIND_FORK);
        (bytes.len() == Hello::BYTES && known).then_some(Hello { kind, nonce })
    }
}

impl Ready {
    pub const BYTES: usize = size_of::<wire::Ready>();

    /// `None` for anything but a well-formed message with sane addresses.
    pub fn parse(bytes: &[u8]) -> Option<Ready> {
        let ready = Ready {
            staging: word(bytes, 1)?,
            private_end: word(bytes, 2)?,
            beacon: word(bytes, 3)?,
        };
        let page = undercroft_base::PAGE_BYTES as u64;
        let aligned = [ready.staging, ready.private_end, ready.beacon]
            .iter()
            .all(|address| *address % page == 0 && *address > 0 && *address < 1 << 56);
        let room = ready.staging.checked_add(2 * STAGING_PAGES as u64 * page)?;
        let magic = word(bytes, 0)? as u32 == MAGIC;
        // What is the shim's is not managed: that must not be most of the program.
        let sized = room <= ready.private_end && ready.private_end - room <= STACK_MAX;
        let shaped = bytes.len() == Ready::BYTES && aligned && sized;
        (magic && shaped).then_some(ready)
    }
}

/// The bytes of an answer: Welcome and Go.
pub(crate) fn answer(refused: bool) -> [u8; 8] {
    (u64::from(MAGIC) | u64::from(refused) << 32).to_ne_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_messages_are_refused() {
        assert_eq!(Hello::parse(&[]), None);
        assert_eq!(Hello::parse(&[0xff; 16]), None);
        assert_eq!(Hello::parse(&[0xff; 17]), None);
        let mut ready = [0u8; 32];
        ready[..4].copy_from_slice(&MAGIC.to_ne_bytes());
        assert_eq!(Ready::parse(&ready), None, "null addresses");
        ready[8..32].fill(0x10);
        assert_eq!(Ready::parse(&ready), None, "unaligned addresses");
        let sized = |staging: u64, private_end: u64| {
            let mut ready = ready;
            ready[8..16].copy_from_slice(&staging.to_ne_bytes());
            ready[16..24].copy_from_slice(&private_end.to_ne_bytes());
            ready[24..32].copy_from_slice(&4096u64.to_ne_bytes());
            Ready::parse(&ready).is_some()
        };
        let areas = 2 * STAGING_PAGES as u64 * 4096;
        assert!(sized(1 << 30, (1 << 30) + areas + 4096));
        assert!(!sized(1 << 30, (1 << 30) + areas - 4096), "too small");
        assert!(!sized(1 << 30, (1 << 40) + areas), "most of the program");
        assert!(!sized(1 << 40, 1 << 30), "ends before it begins");
        assert!(!sized((1 << 56) - 4096, !4095), "beyond the end");
    }
}
