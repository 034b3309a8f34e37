//! The shim's messages as the manager takes them: bytes from a client, parsed once.

use crate::protocol::{
    self as wire, KIND_FORK, KIND_GIVE_WAY, KIND_JOIN, KIND_PASS_ON, KIND_START, KIND_VIEW, MAGIC,
    STAGING_PAGES,
};

/// The first message of a shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// `KIND_*`.
    pub kind: u32,
    /// The word in a fork child's beacon page; 0: the child of a process that was not managed.
    pub nonce: u64,
}

/// The memory that a shim has set up; addresses are page-aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// Staging area; the holding area follows, and the agent's stack.
    pub staging: u64,
    /// End of the shim's mapping.
    pub private_end: u64,
    /// The page that only fork children touch.
    pub beacon: u64,
}

const BASE_PAGE_BYTES: u64 = 4096;

/// Most that may lie behind the holding area: the agent's stack.
const STACK_MAX: u64 = 1 << 20;

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    let bytes = bytes.get(index * 8..index * 8 + 8)?;
    Some(u64::from_ne_bytes(bytes.try_into().ok()?))
}

impl Hello {
    /// Length of the message.
    pub const BYTES: usize = size_of::<wire::Hello>();

    /// `None` for anything but a well-formed message: what a client says is hostile until it has a
    /// type.
    pub fn parse(bytes: &[u8]) -> Option<Hello> {
        let (head, nonce) = (word(bytes, 0)?, word(bytes, 1)?);
        let (magic, kind) = (head as u32, (head >> 32) as u32);
        let known = magic == MAGIC && (kind == KIND_START || kind == KIND_FORK);
        (bytes.len() == Hello::BYTES && known).then_some(Hello { kind, nonce })
    }
}

impl Ready {
    /// Length of the message.
    pub const BYTES: usize = size_of::<wire::Ready>();

    /// `None` for anything but a well-formed message with sane addresses.
    pub fn parse(bytes: &[u8]) -> Option<Ready> {
        let ready = Ready {
            staging: word(bytes, 1)?,
            private_end: word(bytes, 2)?,
            beacon: word(bytes, 3)?,
        };
        let page = BASE_PAGE_BYTES;
        let aligned = [ready.staging, ready.private_end, ready.beacon]
            .iter()
            .all(|address| *address % page == 0 && *address > 0 && *address < 1 << 56);
        let room = ready.staging.checked_add(2 * STAGING_PAGES as u64 * page)?;
        let magic = word(bytes, 0)? as u32 == MAGIC;
        // The shim's own memory is not managed. So it must not be most of the program's.
        let sized = room <= ready.private_end && ready.private_end - room <= STACK_MAX;
        let shaped = bytes.len() == Ready::BYTES && aligned && sized;
        (magic && shaped).then_some(ready)
    }
}

/// A range that the program wants for a userfaultfd of its own; page-aligned and not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiveWay {
    /// First address.
    pub start: u64,
    /// End.
    pub end: u64,
}

impl GiveWay {
    /// Length of the message.
    pub const BYTES: usize = size_of::<wire::GiveWay>();

    /// `None` for anything but a well-formed message with sane addresses.
    pub fn parse(bytes: &[u8]) -> Option<GiveWay> {
        let (start, end) = range(bytes, KIND_GIVE_WAY)?;
        Some(GiveWay { start, end })
    }
}

/// A range where the program maps memory of its machine; page-aligned and not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// First address.
    pub start: u64,
    /// End.
    pub end: u64,
}

impl View {
    /// `None` for anything but a well-formed message with sane addresses.
    pub fn parse(bytes: &[u8]) -> Option<View> {
        let (start, end) = range(bytes, KIND_VIEW)?;
        Some(View { start, end })
    }
}

/// The range of a message that has nothing else.
fn range(bytes: &[u8], kind: u32) -> Option<(u64, u64)> {
    let (head, start, end) = (word(bytes, 0)?, word(bytes, 1)?, word(bytes, 2)?);
    let known = head == u64::from(MAGIC) | u64::from(kind) << 32;
    let aligned = start.is_multiple_of(BASE_PAGE_BYTES) && end.is_multiple_of(BASE_PAGE_BYTES);
    let shaped = bytes.len() == GiveWay::BYTES && aligned && start < end && end < 1 << 56;
    (known && shaped).then_some((start, end))
}

/// The message of a process that wants to map the memory of a machine.
pub const JOIN: [u8; Hello::BYTES] = bare(KIND_JOIN);

/// The message of a process that sends a descriptor of that memory to another.
pub const PASS_ON: [u8; Hello::BYTES] = bare(KIND_PASS_ON);

/// A message that says its kind alone.
const fn bare(kind: u32) -> [u8; Hello::BYTES] {
    let head = (MAGIC as u64 | (kind as u64) << 32).to_ne_bytes();
    let mut bytes = [0; Hello::BYTES];
    let mut at = 0;
    while at < head.len() {
        bytes[at] = head[at];
        at += 1;
    }
    bytes
}

/// The bytes of an answer: Welcome and Go.
pub fn answer(refused: bool) -> [u8; 8] {
    answer_with(u32::from(refused))
}

/// The same with a value of [`wire::Answer::refused`].
pub fn answer_with(refused: u32) -> [u8; 8] {
    (u64::from(MAGIC) | u64::from(refused) << 32).to_ne_bytes()
}

/// That value of an answer. `None`: it is none.
pub fn refused(bytes: &[u8]) -> Option<u32> {
    let head = word(bytes, 0)?;
    (bytes.len() == size_of::<wire::Answer>() && head as u32 == MAGIC)
        .then_some((head >> 32) as u32)
}

/// Checks what must hold of every accepted message: it says what its bytes say, its addresses lie
/// below the end of an address space, and no byte more or less would be accepted. The fuzz target
/// and its test use it.
#[cfg(any(test, fuzzing))]
pub fn check(bytes: &[u8]) -> bool {
    let (hello, ready) = (Hello::parse(bytes), Ready::parse(bytes));
    let (asked, view) = (GiveWay::parse(bytes), View::parse(bytes));
    let all = [
        hello.is_some(),
        ready.is_some(),
        asked.is_some(),
        view.is_some(),
        bytes == JOIN,
        bytes == PASS_ON,
    ];
    assert!(
        all.iter().filter(|is| **is).count() < 2,
        "two messages at once"
    );
    let asked = asked.map(|of| (of.start, of.end));
    for (start, end) in asked.into_iter().chain(view.map(|of| (of.start, of.end))) {
        assert_eq!(bytes.len(), GiveWay::BYTES);
        assert!(start < end && end < 1 << 56);
    }
    if let Some(hello) = hello {
        assert_eq!(bytes.len(), Hello::BYTES);
        assert!(hello.kind == KIND_START || hello.kind == KIND_FORK);
    }
    if let Some(ready) = ready {
        assert_eq!(bytes.len(), Ready::BYTES);
        let room = 2 * STAGING_PAGES as u64 * BASE_PAGE_BYTES;
        assert!(ready.staging + room <= ready.private_end);
        assert!(ready.private_end < 1 << 56 && ready.beacon < 1 << 56);
    }
    all.contains(&true)
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;

    /// Random words in the shape of messages; a fixed seed, so that a failure comes again.
    #[test]
    fn whatever_is_taken_for_a_message_is_one() {
        let mut random = Random::new(7);
        let mut dice = || random.bits();
        let mut taken = 0;
        for _ in 0..200_000 {
            let mut bytes = [0u8; 40];
            let head = u64::from(MAGIC) | (dice() % 6) << 32;
            let base = (dice() >> 7) & !4095;
            let end = base + (dice() % 200) * 4096 + (dice() % 2) * (dice() % 8);
            let words = [head, base, end, (dice() >> 7) & !4095, dice()];
            for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
                to.copy_from_slice(&word.to_ne_bytes());
            }
            for length in [16, 24, 32, dice() as usize % 41] {
                taken += u32::from(check(&bytes[..length]));
            }
        }
        assert!(taken > 50_000, "{taken} prove nothing");
    }

    #[test]
    fn an_answer_has_its_code_and_nothing_else_is_one() {
        for code in [0, 1, wire::NO_MACHINE_YET] {
            assert_eq!(refused(&answer_with(code)), Some(code));
        }
        assert_eq!(refused(&[]), None);
        assert_eq!(refused(&[0; 8]), None);
        assert_eq!(refused(&JOIN), None);
        assert!(check(&JOIN) && check(&PASS_ON));
    }

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
