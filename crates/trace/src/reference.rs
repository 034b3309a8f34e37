//! One memory reference of a trace.

/// What a reference does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// Reads an instruction.
    Instruction,
    /// Reads data.
    Read,
    /// Writes data.
    Write,
}

impl Access {
    /// Whether memory is different afterwards.
    pub fn is_write(self) -> bool {
        self == Access::Write
    }
}

/// One reference, as a recorder saw it or a generator made it.
///
/// * `time`: nanoseconds of virtual time since the trace began; never goes back. Where a recorder has no clock it counts
///   what it has (references, instructions) and the trace's header says so.
/// * `address`: first byte; in a page-granular trace a multiple of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// When.
    pub time: u64,
    /// Where.
    pub address: u64,
    /// What it does.
    pub access: Access,
    /// Which client of the trace, from 0.
    pub client: u16,
    /// Which thread of that client, from 0.
    pub thread: u16,
}
