//! Memory of virtual machines that their monitors hand over: what they say, parsed once.
//!
//! A monitor that restores a snapshot maps memory, makes a userfaultfd for it, and sends both to a
//! socket. Each says it in a form of its own ([`Form`]), and [`parse`] makes a [`Handover`] of all
//! of them. What a monitor says is hostile until it has that type. Numbers of its descriptors are
//! not in it: the kernel hands those over, and says which process they are of.
//!
//! The process that listens passes it on to the manager as an [`Order`].
//!
//! Cloud Hypervisor hands no userfaultfd over: it is called, and asks for pages
//! ([`cloud_hypervisor`]). The process that calls it hands over memory of its own, by an order.

pub mod cloud_hypervisor;
pub mod firecracker;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, VirtPage, VirtRange};

/// Most regions of one machine. Firecracker has one or two, and one for each slot of memory that is
/// plugged in.
pub const REGIONS_MAX: usize = 512;

/// Most bytes of a message, and of an [`Order`].
pub const MESSAGE_MAX: usize = 128 << 10;

/// The first page that no program can map.
const BEYOND: u64 = 1 << (47 - 12);

/// A part of a machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where the monitor has mapped it.
    pub range: VirtRange,
    /// The page of the file with the first page's contents; the others follow it.
    pub at: u64,
}

impl Region {
    /// The region's pages in the file.
    fn in_file(&self) -> VirtRange {
        VirtRange::new(
            VirtPage(self.at),
            VirtPage(self.at).plus(self.range.count().0),
        )
    }
}

/// The memory of one machine: some regions, in order, none of which has a page of another, in
/// memory or in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handover {
    regions: Vec<Region>,
}

/// The form in which a monitor speaks. Its first byte tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// [`firecracker`]. It waits for no answer.
    Firecracker,
    /// An [`Order`], of `undercroft restore`. It waits for the answer, a [`Taken`].
    Order,
}

impl Form {
    /// The form of what has come so far. `None`: too little.
    pub fn of(bytes: &[u8]) -> Result<Option<Form>, Refused> {
        match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
            None if bytes.len() < MESSAGE_MAX => Ok(None),
            Some(b'[') => Ok(Some(Form::Firecracker)),
            Some(b'{') => Ok(Some(Form::Order)),
            Some(0..b' ' | 0x7f..) => Err(Refused::Binary),
            _ => Err(Refused::Unknown("it is no JSON array".to_owned())),
        }
    }
}

/// Parses what has come so far, whatever its form. `None`: it has no end yet.
///
/// * `file`: bytes of the file with the contents.
pub fn parse(bytes: &[u8], file: Bytes) -> Result<Option<Handover>, Refused> {
    match Form::of(bytes)? {
        None => Ok(None),
        Some(Form::Firecracker) => firecracker::parse(bytes, file),
        Some(Form::Order) => Order::parse_some(bytes, file),
    }
}

/// The one JSON value of what has come so far. `None`: it has no end yet.
fn whole<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<T>, Refused> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<T>();
    let value = match values.next() {
        Some(Ok(value)) => value,
        Some(Err(error)) if error.is_eof() && bytes.len() < MESSAGE_MAX => return Ok(None),
        Some(Err(error)) if error.is_eof() => return Err(Refused::TooLong),
        Some(Err(error)) => return Err(Refused::Unknown(error.to_string())),
        None => return Ok(None),
    };
    let rest = &bytes[values.byte_offset()..];
    if !rest.iter().all(u8::is_ascii_whitespace) {
        return Err(Refused::More);
    }
    Ok(Some(value))
}

/// Why what a monitor says cannot be used. For the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No text of the form, or a field is missing.
    #[error("its message is not understood: {0}")]
    Unknown(String),
    /// Bytes that no text begins with.
    #[error(
        "its message is no text: Cloud Hypervisor is not heard here, but called by `undercroft restore`"
    )]
    Binary,
    /// A form whose fields are not settled.
    #[error("it hands memory over as Cloud Hypervisor's #8657 proposes, which has no form yet")]
    Proposed,
    /// Longer than any that makes sense.
    #[error("its message has more than {}", Bytes(MESSAGE_MAX as u64))]
    TooLong,
    /// Something follows its end.
    #[error("it says more than one list of regions")]
    More,
    /// No regions, or too many.
    #[error("it has {0} regions; 1 to {REGIONS_MAX} can be served")]
    Count(usize),
    /// Bytes of a page.
    #[error("its pages have {0} bytes; only pages of {BASE_PAGE_BYTES} can be served")]
    PageSize(u64),
    /// Addresses, sizes and offsets are of whole pages.
    #[error("region {0} has an address, a size or an offset that is none of whole pages")]
    Unaligned(usize),
    /// Empty, or with an end above all addresses.
    #[error("region {0} is not within the addresses of a program")]
    Nowhere(usize),
    /// Its place in the file.
    #[error("region {at} ends at byte {end} of the snapshot's memory, which has {file}")]
    BeyondFile {
        /// Which, from 0.
        at: usize,
        /// Where it ends.
        end: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// Two regions.
    #[error("two regions have the same pages, at address {0:#x}")]
    Overlap(u64),
    /// Two regions.
    #[error("two regions have the same contents, at byte {0} of the snapshot's memory")]
    SameContents(u64),
}

/// A region as a monitor says it: bytes, unchecked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
}

impl Handover {
    /// Its regions, in order of their addresses.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The pages of all regions.
    pub fn pages(&self) -> PageCount {
        let each = self.regions.iter().map(|region| region.range.count().0);
        PageCount(each.sum())
    }

    /// Checks regions.
    ///
    /// * `file`: bytes of the file with the contents.
    fn checked(said: &[Said], file: Bytes) -> Result<Handover, Refused> {
        if said.is_empty() || said.len() > REGIONS_MAX {
            return Err(Refused::Count(said.len()));
        }
        let each = said.iter().enumerate();
        let regions: Result<Vec<_>, _> = each.map(|(at, said)| region(at, *said, file)).collect();
        let mut regions = regions?;
        regions.sort_by_key(|region| region.at);
        if let Some(at) = first_overlap(regions.iter().map(Region::in_file)) {
            return Err(Refused::SameContents(at.address()));
        }
        regions.sort_by_key(|region| region.range.start);
        if let Some(at) = first_overlap(regions.iter().map(|region| region.range)) {
            return Err(Refused::Overlap(at.address()));
        }
        Ok(Handover { regions })
    }
}

fn region(at: usize, said: Said, file: Bytes) -> Result<Region, Refused> {
    let Said {
        address,
        bytes,
        offset,
    } = said;
    let page = BASE_PAGE_BYTES as u64;
    if [address, bytes, offset].iter().any(|of| of % page != 0) {
        return Err(Refused::Unaligned(at));
    }
    let (start, pages) = (address / page, bytes / page);
    // Neither sum overflows: they are pages.
    if pages == 0 || start + pages > BEYOND {
        return Err(Refused::Nowhere(at));
    }
    let end = offset / page + pages;
    if end > file.pages_floor().0 {
        return Err(Refused::BeyondFile {
            at,
            end: end.saturating_mul(page),
            file: file.0,
        });
    }
    Ok(Region {
        range: VirtRange::new(VirtPage(start), VirtPage(start + pages)),
        at: offset / page,
    })
}

/// Where a range begins that has a page of the one before it.
fn first_overlap(mut ranges: impl Iterator<Item = VirtRange>) -> Option<VirtPage> {
    let mut before = ranges.next()?;
    for range in ranges {
        if range.start < before.end {
            return Some(range.start);
        }
        before = range;
    }
    None
}

/// A handover for the manager. Its userfaultfd, the pidfd of its monitor and the monitor's page map
/// come along, in this order.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    /// Address, bytes and place in the file of each region.
    regions: Vec<(u64, u64, u64)>,
}

impl Order {
    /// The message.
    pub fn bytes(handover: &Handover) -> Vec<u8> {
        let bytes = |page: u64| page * BASE_PAGE_BYTES as u64;
        let each = handover.regions.iter().map(|region| {
            let size = region.range.count().bytes().0;
            (region.range.start.address(), size, bytes(region.at))
        });
        let order = Order {
            regions: each.collect(),
        };
        serde_json::to_vec(&order).unwrap_or_default() // numbers alone
    }

    /// Whether a message to a manager can be one.
    pub fn is_one(bytes: &[u8]) -> bool {
        bytes.first() == Some(&b'{')
    }

    /// The handover that a message has. As hostile as what the monitor says.
    ///
    /// * `file`: bytes of the file with the contents.
    pub fn parse(bytes: &[u8], file: Bytes) -> Result<Handover, Refused> {
        let order: Order =
            serde_json::from_slice(bytes).map_err(|why| Refused::Unknown(why.to_string()))?;
        order.checked(file)
    }

    /// As [`Order::parse`], of what has come so far. `None`: it has no end yet.
    fn parse_some(bytes: &[u8], file: Bytes) -> Result<Option<Handover>, Refused> {
        match whole::<Kind>(bytes)? {
            None => return Ok(None),
            Some(Kind { kind: Some(kind) }) if kind == "handoff" => return Err(Refused::Proposed),
            Some(_) => {}
        }
        let order: Option<Order> = whole(bytes)?;
        order.map(|order| order.checked(file)).transpose()
    }

    fn checked(&self, file: Bytes) -> Result<Handover, Refused> {
        let said = |(address, bytes, offset): &(u64, u64, u64)| Said {
            address: *address,
            bytes: *bytes,
            offset: *offset,
        };
        let said: Vec<Said> = self.regions.iter().map(said).collect();
        Handover::checked(&said, file)
    }
}

/// The word by which Cloud Hypervisor's #8657 tells its messages from others.
#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// The answer to an [`Order`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Taken {
    /// Its pages are served from now on.
    Yes,
    /// The memory of this process is served already: a manager that died has taken it.
    Already,
    /// Why it cannot be served.
    Refused(String),
}

/// Checks what must hold of every message, whatever bytes came and in which form: what is accepted
/// keeps every promise of [`Handover`], and is the same after it was passed on. For the fuzz target
/// and its test. True if the bytes are a whole message that is accepted.
#[cfg(any(test, fuzzing))]
pub fn check(bytes: &[u8]) -> bool {
    let file = Bytes(1 << 30);
    let Ok(Some(handover)) = parse(bytes, file) else {
        return false;
    };
    let mut before = VirtPage(0);
    for region in handover.regions() {
        assert!(region.range.start >= before && !region.range.is_empty());
        assert!(region.range.end.0 <= BEYOND);
        assert!(region.in_file().end.0 <= file.pages_floor().0);
        before = region.range.end;
    }
    let order = Order::bytes(&handover);
    assert!(Order::is_one(&order) && order.len() <= MESSAGE_MAX);
    assert_eq!(Order::parse(&order, file), Ok(handover));
    true
}
