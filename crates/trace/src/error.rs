//! Why a trace cannot be read or written; every variant of reading names the byte of the file.

use std::io;

/// Why a trace cannot be read. `offset` is a byte of the file, counted from 0.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The source of bytes failed.
    #[error("byte {offset}: cannot be read: {source}")]
    Io {
        /// Where the read began.
        offset: u64,
        /// Error of the system.
        source: io::Error,
    },
    /// The file does not begin as a trace does.
    #[error("byte {offset}: this is not an Undercroft trace; it begins with {found}")]
    NotATrace {
        /// First byte that differs from the magic.
        offset: u64,
        /// The first bytes, readable.
        found: String,
    },
    /// A trace, but of a version this program does not know.
    #[error("byte {offset}: trace format version {found}; this program reads version {known}")]
    Version {
        /// Where the version is.
        offset: u64,
        /// The version in the file.
        found: u16,
        /// The version that can be read.
        known: u16,
    },
    /// A live trace of a version that recorded batches of evictions for exact replays.
    #[error("byte {offset}: a live run recorded by an earlier version; record the run again")]
    Earlier {
        /// Where the flags are.
        offset: u64,
    },
    /// The file ends before its end block: the recorder was stopped, or the file was cut.
    #[error(
        "byte {offset}: the trace ends here, inside {inside} that begins at byte {begin}: it is truncated"
    )]
    Truncated {
        /// Length of the file.
        offset: u64,
        /// The part that was being read.
        inside: &'static str,
        /// Where that begins.
        begin: u64,
    },
    /// A checksum does not fit the bytes it covers.
    #[error(
        "byte {offset}: the checksum of {of} that begins at byte {begin} is {stored:#010x}, its \
         bytes give {computed:#010x}: the file is corrupt"
    )]
    Checksum {
        /// Where the checksum is stored.
        offset: u64,
        /// The part that it covers.
        of: &'static str,
        /// Where that begins.
        begin: u64,
        /// The checksum in the file.
        stored: u32,
        /// The checksum of the bytes.
        computed: u32,
    },
    /// A value that no writer writes.
    #[error("byte {offset}: {why}: the file is corrupt")]
    Corrupt {
        /// The value's place, or the beginning of the block it is in.
        offset: u64,
        /// The reason.
        why: String,
    },
}

impl TraceError {
    /// The byte of the file the error is about.
    pub fn offset(&self) -> u64 {
        match self {
            TraceError::Io { offset, .. }
            | TraceError::NotATrace { offset, .. }
            | TraceError::Version { offset, .. }
            | TraceError::Earlier { offset }
            | TraceError::Truncated { offset, .. }
            | TraceError::Checksum { offset, .. }
            | TraceError::Corrupt { offset, .. } => *offset,
        }
    }
}

/// Why a reference or a header cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The sink of bytes failed.
    #[error("the trace cannot be written: {0}")]
    Io(#[from] io::Error),
    /// A header that cannot be stored.
    #[error("the trace's header cannot be stored: {0}")]
    Header(&'static str),
    /// Time goes back.
    #[error("entry {index}: time {time} comes after time {last}")]
    TimeGoesBack {
        /// Which entry, from 0.
        index: u64,
        /// Its time.
        time: u64,
        /// The latest time written.
        last: u64,
    },
    /// The address is not a multiple of the header's granularity.
    #[error("entry {index}: address {address:#x} is no multiple of the granularity {granule}")]
    Misaligned {
        /// Which entry, from 0.
        index: u64,
        /// Its address.
        address: u64,
        /// Bytes of a granule.
        granule: u64,
    },
    /// The header names fewer clients.
    #[error("entry {index}: client {client}, but the header names {clients}")]
    UnknownClient {
        /// Which entry, from 0.
        index: u64,
        /// Its client.
        client: u16,
        /// How many the header names.
        clients: usize,
    },
    /// A movement, and the header does not announce any.
    #[error("entry {index}: a movement or a use of a page, which the header does not announce")]
    Unannounced {
        /// Which entry, from 0.
        index: u64,
    },
}
