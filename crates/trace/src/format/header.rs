//! The header of a trace, before its first reference, and its bytes.

use std::fmt;

use super::{
    GRANULARITY_MAX, HEADER_BYTES, HEADER_TEXT_BYTES_MAX, MAGIC, VERSION, checksum, u16_at, u32_at,
};
use crate::error::{TraceError, WriteError};
use crate::reference::Movement;

/// The unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeUnit {
    /// A nanosecond of the recorder's clock, or of a generator's.
    Nanoseconds,
    /// A reference of the program, before any filter.
    References,
    /// An instruction of the program.
    Instructions,
}

impl TimeUnit {
    fn code(self) -> u8 {
        match self {
            TimeUnit::Nanoseconds => 0,
            TimeUnit::References => 1,
            TimeUnit::Instructions => 2,
        }
    }

    fn from_code(code: u8) -> Option<TimeUnit> {
        [
            TimeUnit::Nanoseconds,
            TimeUnit::References,
            TimeUnit::Instructions,
        ]
        .into_iter()
        .find(|unit| unit.code() == code)
    }
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TimeUnit::Nanoseconds => "nanoseconds",
            TimeUnit::References => "references",
            TimeUnit::Instructions => "instructions",
        })
    }
}

/// The header of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// log2 of the bytes of a granule; every address is a multiple of it. 0 = bytes; at most
    /// [`GRANULARITY_MAX`].
    pub granularity: u8,
    /// Meaning of a step of [`crate::Reference::time`].
    pub time_unit: TimeUnit,
    /// The references passed a model of a processor's cache. The program's other references are not
    /// here.
    pub filtered: bool,
    /// A generator made it, no program.
    pub synthetic: bool,
    /// A live manager saw it: the references are page faults, not every touch of memory.
    pub live: bool,
    /// There are movements of pages between the references.
    pub movements: bool,
    /// Among them are uses of pages in memory ([`crate::Movement::Accessed`]); only where there are
    /// movements.
    pub accesses: bool,
    /// Among them are pages that may not leave ([`crate::Movement::Locked`]); only where there are
    /// movements.
    pub locks: bool,
    /// Movements say which clients are fork children, which pages clients had of others before, and
    /// which clients have ended ([`crate::Movement::Forked`], [`crate::Movement::Shared`],
    /// [`crate::Movement::Ended`]); only where there are movements.
    pub forks: bool,
    /// The program and its arguments; empty when there was none.
    pub command: Vec<String>,
    /// A name for each client, at least one; a reference's `client` is an index into it.
    pub clients: Vec<String>,
    /// The recorder and its options. For people; the simulator takes the options of a live run from
    /// it.
    pub source: String,
}

impl Default for Header {
    /// Byte-granular, one nameless client, time in references.
    fn default() -> Header {
        Header {
            granularity: 0,
            time_unit: TimeUnit::References,
            filtered: false,
            synthetic: false,
            live: false,
            movements: false,
            accesses: false,
            locks: false,
            forks: false,
            command: Vec::new(),
            clients: vec![String::new()],
            source: String::new(),
        }
    }
}

const FILTERED: u32 = 1;
const SYNTHETIC: u32 = 2;
const LIVE: u32 = 4;
const MOVEMENTS: u32 = 8;
const ACCESSES: u32 = 16;
const LOCKS: u32 = 32;
const FORKS: u32 = 256;
/// Features that mean nothing without [`MOVEMENTS`].
const OF_MOVEMENTS: u32 = ACCESSES | LOCKS | FORKS;
/// Features of live traces before replays decided anew which pages leave. Their kinds of movements
/// had other numbers.
const EARLIER: u32 = 64 | 128;

/// The flag that announces a movement.
fn flag_of(movement: Movement) -> u32 {
    match movement {
        Movement::Accessed => ACCESSES,
        Movement::Locked => LOCKS,
        Movement::Forked | Movement::Ended | Movement::Shared => FORKS,
        _ => MOVEMENTS,
    }
}

/// How many counts of movements a header's flags put into the end block: those of the first kinds
/// of [`Movement::ALL`], up to the last that is announced.
pub(crate) fn movement_kinds(flags: u32) -> usize {
    let mut kinds = Movement::ALL.iter();
    let last = kinds.rposition(|kind| flags & MOVEMENTS != 0 && flags & flag_of(*kind) != 0);
    last.map_or(0, |last| last + 1)
}

impl Header {
    /// Bytes of a granule.
    pub fn granule_bytes(&self) -> u64 {
        1 << self.granularity
    }

    /// Whether there may be such movements.
    #[inline]
    pub(crate) fn announces(&self, movement: Movement) -> bool {
        match movement {
            Movement::Accessed => self.accesses,
            Movement::Locked => self.locks,
            Movement::Forked | Movement::Ended | Movement::Shared => self.forks,
            _ => self.movements,
        }
    }

    /// See [`movement_kinds`].
    pub(crate) fn movement_kinds(&self) -> usize {
        movement_kinds(self.flags())
    }

    fn flags(&self) -> u32 {
        [
            (self.filtered, FILTERED),
            (self.synthetic, SYNTHETIC),
            (self.live, LIVE),
            (self.movements, MOVEMENTS),
            (self.accesses, ACCESSES),
            (self.locks, LOCKS),
            (self.forks, FORKS),
        ]
        .into_iter()
        .fold(0, |flags, (set, bit)| flags | (u32::from(set) * bit))
    }

    /// The header's bytes with its checksum, and that checksum.
    /// Errors: [`WriteError::Header`] when it is larger than the format allows.
    pub(crate) fn encode(&self) -> Result<(Vec<u8>, u32), WriteError> {
        if self.granularity > GRANULARITY_MAX {
            return Err(WriteError::Header("the granularity is larger than 1 GiB"));
        }
        if self.clients.is_empty() {
            return Err(WriteError::Header("it names no client"));
        }
        if self.flags() & OF_MOVEMENTS != 0 && !self.movements {
            return Err(WriteError::Header(
                "it announces uses of pages, locked pages or forks, and no movements",
            ));
        }
        let mut text = Vec::new();
        for list in [&self.command, &self.clients] {
            put_length(&mut text, list.len())?;
            for word in list {
                put_text(&mut text, word)?;
            }
        }
        put_text(&mut text, &self.source)?;
        if text.len() > HEADER_TEXT_BYTES_MAX as usize {
            return Err(WriteError::Header("its texts are longer than 1 MiB"));
        }
        let mut bytes = Vec::with_capacity(HEADER_BYTES + text.len() + 4);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([self.granularity, self.time_unit.code()]);
        bytes.extend(self.flags().to_le_bytes());
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text);
        let sum = checksum(0, &[&bytes]);
        bytes.extend(sum.to_le_bytes());
        Ok((bytes, sum))
    }

    /// Bytes of texts that follow `fixed`. Refuses anything but a trace of this version before it
    /// reads more.
    pub(crate) fn text_bytes(fixed: &[u8; HEADER_BYTES]) -> Result<usize, TraceError> {
        if let Some(offset) = (0..MAGIC.len()).find(|at| fixed[*at] != MAGIC[*at]) {
            return Err(not_a_trace(offset, &fixed[..MAGIC.len()]));
        }
        let found = u16_at(fixed, 8);
        if found != VERSION {
            return Err(TraceError::Version {
                offset: 8,
                found,
                known: VERSION,
            });
        }
        let length = u32_at(fixed, 16);
        if length > HEADER_TEXT_BYTES_MAX {
            return Err(corrupt(
                16,
                format!("the header's texts claim {length} bytes"),
            ));
        }
        Ok(length as usize)
    }

    /// The header of `fixed` and its `text`, whose checksum has been checked.
    pub(crate) fn decode(fixed: &[u8; HEADER_BYTES], text: &[u8]) -> Result<Header, TraceError> {
        let granularity = fixed[10];
        if granularity > GRANULARITY_MAX {
            return Err(corrupt(10, format!("granularity 2^{granularity}")));
        }
        let time_unit = TimeUnit::from_code(fixed[11])
            .ok_or_else(|| corrupt(11, format!("time unit {} is unknown", fixed[11])))?;
        let flags = u32_at(fixed, 12);
        if flags & EARLIER != 0 {
            return Err(TraceError::Earlier { offset: 12 });
        }
        let known = FILTERED | SYNTHETIC | LIVE | MOVEMENTS | OF_MOVEMENTS;
        let alone = flags & MOVEMENTS == 0 && flags & OF_MOVEMENTS != 0;
        if flags & !known != 0 || alone {
            return Err(corrupt(12, format!("flags {flags:#x} are unknown")));
        }
        let mut texts = Texts { text, at: 0 };
        let command = texts.list()?;
        let clients = texts.list()?;
        let source = texts.word()?;
        if clients.is_empty() {
            return Err(corrupt(
                HEADER_BYTES as u64,
                "the header names no client".to_owned(),
            ));
        }
        if texts.at != text.len() {
            return Err(texts.corrupt("bytes after the header's last text"));
        }
        Ok(Header {
            granularity,
            time_unit,
            filtered: flags & FILTERED != 0,
            synthetic: flags & SYNTHETIC != 0,
            live: flags & LIVE != 0,
            movements: flags & MOVEMENTS != 0,
            accesses: flags & ACCESSES != 0,
            locks: flags & LOCKS != 0,
            forks: flags & FORKS != 0,
            command,
            clients,
            source,
        })
    }
}

/// The refusal of a file whose first bytes are `found`; byte `offset` is wrong.
pub(crate) fn not_a_trace(offset: usize, found: &[u8]) -> TraceError {
    TraceError::NotATrace {
        offset: offset as u64,
        found: match found {
            [] => "nothing: it is empty".to_owned(),
            _ => format!("\"{}\"", found.escape_ascii()),
        },
    }
}

pub(crate) fn corrupt(offset: u64, why: String) -> TraceError {
    TraceError::Corrupt { offset, why }
}

fn put_length(out: &mut Vec<u8>, length: usize) -> Result<(), WriteError> {
    let length = u16::try_from(length)
        .map_err(|_| WriteError::Header("a text, or a list of them, is longer than 65535"))?;
    out.extend(length.to_le_bytes());
    Ok(())
}

fn put_text(out: &mut Vec<u8>, text: &str) -> Result<(), WriteError> {
    put_length(out, text.len())?;
    out.extend(text.as_bytes());
    Ok(())
}

/// Reads the header's texts. Every length is checked against the bytes there are.
struct Texts<'a> {
    text: &'a [u8],
    at: usize,
}

impl Texts<'_> {
    fn corrupt(&self, why: &str) -> TraceError {
        corrupt((HEADER_BYTES + self.at) as u64, why.to_owned())
    }

    fn length(&mut self) -> Result<usize, TraceError> {
        if self.text.len() - self.at < 2 {
            return Err(self.corrupt("the header's texts end inside a length"));
        }
        let length = u16_at(self.text, self.at);
        self.at += 2;
        Ok(usize::from(length))
    }

    fn word(&mut self) -> Result<String, TraceError> {
        let length = self.length()?;
        let bytes = self
            .text
            .get(self.at..self.at + length)
            .ok_or_else(|| self.corrupt("a text of the header is longer than all of them"))?;
        let word = std::str::from_utf8(bytes)
            .map_err(|_| self.corrupt("a text of the header is not UTF-8"))?
            .to_owned();
        self.at += length;
        Ok(word)
    }

    fn list(&mut self) -> Result<Vec<String>, TraceError> {
        let count = self.length()?;
        (0..count).map(|_| self.word()).collect()
    }
}
