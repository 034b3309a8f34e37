//! The protocol by which a daemon restores a machine of Cloud Hypervisor, as its main branch had it
//! in August 2026: that of its migrations on one host (`vm-migration/src/protocol.rs`).
//!
//! Cloud Hypervisor listens (`receive-migration`, `memory_mode=postcopy`), and is called twice.
//! Numbers are little-endian. A header is a command or a status (2 bytes), 6 bytes of zeros, and
//! the number of bytes that follow (8).
//!
//! ```text
//! first call    we: Start                                            it: Ok
//!               we: MemoryFd + slot (4 bytes) with a memfd           it: Ok     for each slot
//!               we: Config + text                                    it: Ok
//! second call   we: 2 (2 bytes): it asks for pages here
//! first call    we: State + bytes                                    it: Ok
//!               we: Complete or CompletePaused                       it: Ok
//! second call   it: PageFault + guest address and bytes (8 each)     we: Ok     for each page
//! ```
//! The memfds are empty. A page that is asked for is put there before the answer. Cloud Hypervisor
//! asks for what threads touch, and meanwhile for all others, each once. Then it ends the second
//! call.

use serde::Deserialize;
use undercroft_base::{BASE_PAGE_BYTES, PageCount, VirtPage, VirtRange};

use super::{Handover, REGIONS_MAX, Refused, Said, first_overlap};

/// Bytes of a header.
pub const HEADER: usize = 16;

/// Bytes that follow the header of a page fault.
pub const FAULT: usize = 16;

/// The first bytes of the second call.
pub const ROLE: [u8; 2] = 2u16.to_le_bytes();

/// The first page behind the memory of a machine, and behind that of a memfd.
const BEYOND: u64 = 1 << (52 - 12);

const PAGE: u64 = BASE_PAGE_BYTES as u64;

/// The commands that we give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs, reason = "the protocol's names")]
pub enum Command {
    Start = 1,
    Config = 2,
    State = 3,
    Complete = 5,
    MemoryFd = 7,
    CompletePaused = 8,
}

impl Command {
    /// The header; `bytes` bytes follow.
    pub fn header(self, bytes: u64) -> [u8; HEADER] {
        header(self as u16, bytes)
    }
}

fn header(word: u16, bytes: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..2].copy_from_slice(&word.to_le_bytes());
    header[8..].copy_from_slice(&bytes.to_le_bytes());
    header
}

fn parts(header: &[u8; HEADER]) -> (u16, u64) {
    let [first, second, _, _, _, _, _, _, bytes @ ..] = *header;
    (
        u16::from_le_bytes([first, second]),
        u64::from_le_bytes(bytes),
    )
}

const OK: u16 = 1;
const ERROR: u16 = 2;
const ABANDON: u16 = 6;
const PAGE_FAULT: u16 = 9;

/// The answer to a page fault.
///
/// * `is_there`: the pages are in the memfd.
pub fn answer(is_there: bool) -> [u8; HEADER] {
    header(if is_there { OK } else { ERROR }, 0)
}

/// Why a machine cannot be restored, or not go on. For the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// The snapshot's configuration is no JSON text, or has no list of memory.
    #[error("its configuration is not understood: {0}")]
    Config(String),
    /// No slots, or too many.
    #[error("it has {0} slots of memory; 1 to {REGIONS_MAX} can be served")]
    Count(usize),
    /// Addresses and sizes are of whole pages.
    #[error("slot {0} has an address or a size that is none of whole pages")]
    Unaligned(u32),
    /// Empty, or with an end above all addresses.
    #[error("slot {0} is empty, or too large")]
    Nowhere(u32),
    /// Two slots.
    #[error("two slots have the number {0}")]
    SameNumber(u32),
    /// Two slots.
    #[error("two slots have the same memory, at guest address {0:#x}")]
    Overlap(u64),
    /// A status other than Ok.
    #[error("it answers with status {0}: its own log says why")]
    Status(u16),
    /// Bytes that follow an answer.
    #[error("it answers with {0} bytes where none are expected")]
    Payload(u64),
    /// A command that is not heard on the second call.
    #[error("it gives command {0} where it may ask for pages")]
    Command(u16),
    /// A page fault whose length is another.
    #[error("it asks for pages with {0} bytes; {FAULT} are expected")]
    Length(u64),
    /// No whole pages, or not those of one slot.
    #[error("it asks for {bytes} bytes at guest address {gpa:#x}, which are no pages of one slot")]
    Range {
        /// The guest address.
        gpa: u64,
        /// How many bytes.
        bytes: u64,
    },
}

/// Whether a command was obeyed.
pub fn heard(answer: &[u8; HEADER]) -> Result<(), Wrong> {
    match parts(answer) {
        (OK, 0) => Ok(()),
        (OK, bytes) => Err(Wrong::Payload(bytes)),
        (status, _) => Err(Wrong::Status(status)),
    }
}

/// A request on the second call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// The pages of a range ([`Slots::pages`]), which follows.
    Pages,
    /// No more.
    Abandon,
}

/// The request that a header on the second call begins.
pub fn asks(header: &[u8; HEADER]) -> Result<Asks, Wrong> {
    match parts(header) {
        (PAGE_FAULT, bytes) if bytes == FAULT as u64 => Ok(Asks::Pages),
        (PAGE_FAULT, bytes) => Err(Wrong::Length(bytes)),
        (ABANDON, 0) => Ok(Asks::Abandon),
        (command, _) => Err(Wrong::Command(command)),
    }
}

/// A part of a machine's memory, with a memfd of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Number by which Cloud Hypervisor knows it.
    pub number: u32,
    /// Where the guest has it, in pages.
    pub guest: VirtRange,
    /// Pages of the memfd before its own.
    pub before: PageCount,
    /// The page of the file with the first page's contents; the others follow it.
    pub at: u64,
}

/// The memory of one machine: some slots, in order of their numbers, none of which has memory of
/// another. Their contents follow one another in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slots(Vec<Slot>);

#[derive(Deserialize)]
struct Config {
    memory_manager_data: MemoryData,
}

#[derive(Deserialize)]
struct MemoryData {
    guest_ram_mappings: Vec<Mapping>,
}

#[derive(Deserialize)]
struct Mapping {
    slot: u32,
    gpa: u64,
    size: u64,
    file_offset: u64,
}

impl Slots {
    /// The slots that the configuration of a snapshot names (`migration_config.json`).
    pub fn parse(config: &[u8]) -> Result<Slots, Wrong> {
        let config: Config =
            serde_json::from_slice(config).map_err(|why| Wrong::Config(why.to_string()))?;
        let mut all = config.memory_manager_data.guest_ram_mappings;
        if all.is_empty() || all.len() > REGIONS_MAX {
            return Err(Wrong::Count(all.len()));
        }
        all.sort_by_key(|mapping| mapping.slot);
        let (mut slots, mut at): (Vec<Slot>, u64) = (Vec::new(), 0);
        for mapping in all {
            let slot = slot(&mapping, at)?;
            if slots.last().is_some_and(|last| last.number == slot.number) {
                return Err(Wrong::SameNumber(slot.number));
            }
            at += slot.guest.count().0; // 512 of them do not overflow
            slots.push(slot);
        }
        let mut ranges: Vec<VirtRange> = slots.iter().map(|slot| slot.guest).collect();
        ranges.sort_by_key(|range| range.start);
        match first_overlap(ranges.into_iter()) {
            Some(page) => Err(Wrong::Overlap(page.address())),
            None => Ok(Slots(slots)),
        }
    }

    /// The slots, in order of their numbers.
    pub fn all(&self) -> &[Slot] {
        &self.0
    }

    /// The pages of all slots.
    pub fn pages(&self) -> PageCount {
        PageCount(self.0.iter().map(|slot| slot.guest.count().0).sum())
    }

    /// The hand-over of memory that this process has mapped, with the contents of all slots.
    ///
    /// * `starts`: where each slot is mapped.
    pub fn handover(&self, starts: impl Iterator<Item = VirtPage>) -> Result<Handover, Refused> {
        let said = |(slot, start): (&Slot, VirtPage)| Said {
            address: start.address(),
            bytes: slot.guest.count().bytes().0,
            offset: PageCount(slot.at).bytes().0,
        };
        let said: Vec<Said> = self.0.iter().zip(starts).map(said).collect();
        Handover::checked(&said, self.pages().bytes())
    }

    /// The pages that a machine asks for: which of the slots, and its pages, from 0 on.
    pub fn asked(&self, fault: &[u8; FAULT]) -> Result<(usize, VirtRange), Wrong> {
        let (gpa, bytes) = fault.split_at(8);
        let number = |bytes: &[u8]| {
            bytes
                .iter()
                .rfold(0, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let (gpa, bytes) = (number(gpa), number(bytes));
        let (first, pages) = (gpa / PAGE, bytes / PAGE);
        let is_whole = gpa.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE) && pages > 0;
        // The sum does not overflow: they are pages.
        let range = VirtRange::new(VirtPage(first), VirtPage(first + pages));
        let has = |slot: &Slot| slot.guest.intersect(range) == range;
        let found = self.0.iter().position(has).filter(|_| is_whole);
        let found = found.ok_or(Wrong::Range { gpa, bytes })?;
        let start = self.0[found].guest.start.0;
        let of_slot = |page: VirtPage| VirtPage(page.0 - start);
        Ok((
            found,
            VirtRange::new(of_slot(range.start), of_slot(range.end)),
        ))
    }
}

fn slot(mapping: &Mapping, at: u64) -> Result<Slot, Wrong> {
    let Mapping {
        slot,
        gpa,
        size,
        file_offset,
    } = *mapping;
    if [gpa, size, file_offset].iter().any(|of| of % PAGE != 0) {
        return Err(Wrong::Unaligned(slot));
    }
    let (start, pages, before) = (gpa / PAGE, size / PAGE, file_offset / PAGE);
    // No sum overflows: they are pages.
    if pages == 0 || start + pages > BEYOND || before + pages > BEYOND {
        return Err(Wrong::Nowhere(slot));
    }
    Ok(Slot {
        number: slot,
        guest: VirtRange::new(VirtPage(start), VirtPage(start + pages)),
        before: PageCount(before),
        at,
    })
}

/// Checks what must hold of every configuration and of every request, whatever bytes came. For the
/// fuzz target and its test. True if the bytes are a configuration that is accepted.
#[cfg(any(test, fuzzing))]
pub fn check(bytes: &[u8]) -> bool {
    let (header, rest) = bytes.split_first_chunk().unwrap_or((&[0; HEADER], bytes));
    let _ = (heard(header), asks(header));
    let slots = Slots::parse(bytes);
    let fixed = br#"{"memory_manager_data": {"guest_ram_mappings": [
        {"slot": 0, "gpa": 0, "size": 8192, "file_offset": 0},
        {"slot": 3, "gpa": 65536, "size": 4096, "file_offset": 4096}]}}"#;
    let known = slots.clone().or_else(|_| Slots::parse(fixed));
    let Ok(known) = known else { unreachable!() };
    let mut at = 0;
    for slot in known.all() {
        assert!(slot.at == at && !slot.guest.is_empty() && slot.guest.end.0 <= BEYOND);
        at += slot.guest.count().0;
        let others = known.all().iter().filter(|other| *other != slot);
        for other in others {
            assert!(other.number != slot.number && other.guest.intersect(slot.guest).is_empty());
        }
    }
    assert_eq!(known.pages(), PageCount(at));
    if let Some((fault, _)) = rest.split_first_chunk::<FAULT>()
        && let Ok((found, range)) = known.asked(fault)
    {
        let count = known.all()[found].guest.count().0;
        assert!(!range.is_empty() && range.end.0 <= count);
    }
    slots.is_ok()
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;

    fn mapping(slot: u64, gpa: u64, size: u64, file_offset: u64) -> String {
        format!(
            r#"{{"slot": {slot}, "gpa": {gpa}, "size": {size}, "zone_id": "mem0",
                "virtio_mem": false, "file_offset": {file_offset}}}"#
        )
    }

    fn config(mappings: &[String]) -> String {
        format!(
            r#"{{"vm_config": {{}}, "memory_manager_data": {{"boot_ram": 1,
                "guest_ram_mappings": [{}]}}}}"#,
            mappings.join(",")
        )
    }

    fn parsed(mappings: &[String]) -> Result<Slots, Wrong> {
        Slots::parse(config(mappings).as_bytes())
    }

    fn fault(gpa: u64, bytes: u64) -> [u8; FAULT] {
        let mut fault = [0; FAULT];
        fault[..8].copy_from_slice(&gpa.to_le_bytes());
        fault[8..].copy_from_slice(&bytes.to_le_bytes());
        fault
    }

    #[test]
    fn slots_follow_one_another_in_the_file_in_order_of_their_numbers() {
        let (high, low) = (
            mapping(7, 1 << 32, 8192, 3 << 30),
            mapping(2, 0, 3 << 30, 0),
        );
        let slots = parsed(&[high, low]).expect("good");
        let pages = 3 << 18;
        let range = |start, count| VirtRange::new(VirtPage(start), VirtPage(start + count));
        let slot = |number, guest, before, at| Slot {
            number,
            guest,
            before: PageCount(before),
            at,
        };
        let all = [
            slot(2, range(0, pages), 0, 0),
            slot(7, range(1 << 20, 2), pages, pages),
        ];
        assert_eq!(slots.all(), all);
        assert_eq!(slots.pages(), PageCount(pages + 2));
        assert_eq!(
            slots.asked(&fault((1 << 32) + 4096, 4096)),
            Ok((1, range(1, 1)))
        );
        assert_eq!(slots.asked(&fault(4096, 2 << 20)), Ok((0, range(1, 512))));
        let starts = [VirtPage(1 << 30), VirtPage(1 << 20)];
        let handover = slots.handover(starts.into_iter()).expect("good");
        let regions: Vec<_> = handover
            .regions()
            .iter()
            .map(|of| (of.range, of.at))
            .collect();
        assert_eq!(
            regions,
            [(range(1 << 20, 2), pages), (range(1 << 30, pages), 0)]
        );
    }

    #[test]
    fn a_configuration_that_cannot_be_served_is_refused_with_the_reason() {
        for (mappings, why) in [
            (vec![], Wrong::Count(0)),
            (vec![mapping(1, 1, 4096, 0)], Wrong::Unaligned(1)),
            (vec![mapping(1, 0, 4097, 0)], Wrong::Unaligned(1)),
            (vec![mapping(1, 0, 4096, 512)], Wrong::Unaligned(1)),
            (vec![mapping(1, 0, 0, 0)], Wrong::Nowhere(1)),
            (vec![mapping(1, !4095, 4096, 0)], Wrong::Nowhere(1)),
            (vec![mapping(1, 0, !4095, 0)], Wrong::Nowhere(1)),
            (vec![mapping(1, 0, 4096, !4095)], Wrong::Nowhere(1)),
            (
                vec![mapping(1, 0, 4096, 0), mapping(1, 8192, 4096, 0)],
                Wrong::SameNumber(1),
            ),
            (
                vec![mapping(1, 4096, 8192, 0), mapping(0, 0, 8192, 0)],
                Wrong::Overlap(4096),
            ),
            (
                (0..=REGIONS_MAX as u64)
                    .map(|at| mapping(at, at << 20, 4096, 0))
                    .collect(),
                Wrong::Count(REGIONS_MAX + 1),
            ),
        ] {
            assert_eq!(parsed(&mappings), Err(why), "{mappings:?}");
        }
        let other = config(&[mapping(1 << 32, 0, 4096, 0)]);
        for text in ["", "[]", "{}", "{\"memory_manager_data\": {}}", &other] {
            let refused = Slots::parse(text.as_bytes());
            assert!(matches!(refused, Err(Wrong::Config(_))), "{text}");
        }
    }

    #[test]
    fn what_is_no_request_for_pages_of_one_slot_is_refused() {
        let slots = parsed(&[mapping(0, 4096, 8192, 0), mapping(1, 12288, 4096, 0)]).expect("good");
        for (gpa, bytes) in [
            (0, 4096),
            (4096, 0),
            (4096, 100),
            (4097, 4096),
            (4096, 12288),
            (12288, 8192),
            (!4095, 8192),
            (4096, !4095),
        ] {
            let refused = slots.asked(&fault(gpa, bytes));
            assert_eq!(refused, Err(Wrong::Range { gpa, bytes }));
        }
        assert_eq!(asks(&header(9, 16)), Ok(Asks::Pages));
        assert_eq!(asks(&header(6, 0)), Ok(Asks::Abandon));
        assert_eq!(asks(&header(9, 17)), Err(Wrong::Length(17)));
        assert_eq!(asks(&header(4, 16)), Err(Wrong::Command(4)));
        assert_eq!(heard(&answer(true)), Ok(()));
        assert_eq!(heard(&answer(false)), Err(Wrong::Status(2)));
        assert_eq!(heard(&header(1, 5)), Err(Wrong::Payload(5)));
        let start = Command::Config.header(0x0102);
        assert_eq!(start, [2, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
    }

    /// Bytes change, in configurations and requests.
    #[test]
    fn mutated_bytes_keep_every_promise() {
        let mut random = Random::new(58);
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let slots = (0..1 + random.below(3)).map(|of| {
                let pages = 1 + random.below(4);
                mapping(of, 4096 * random.below(12), 4096 * pages, 0)
            });
            let slots: Vec<_> = slots.collect();
            let mut bytes = config(&slots).into_bytes();
            for _ in 0..random.below(2) {
                let at = random.index(bytes.len());
                bytes[at] = b"0123456789\"{}"[random.index(13)];
            }
            if check(&bytes) {
                taken += 1;
            } else {
                refused += 1;
            }
            let bytes: [u8; HEADER + FAULT] = std::array::from_fn(|at| match at % 8 {
                0 | 1 => 4 * random.below(64) as u8,
                _ => 0,
            });
            check(&bytes);
        }
        assert!(taken > 2_000 && refused > 2_000, "{taken}, {refused}");
    }
}
