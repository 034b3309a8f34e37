//! An entry of a trace: a memory reference of a program or, in live traces, the movement of a
//! page.

/// Kind of a reference.
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

/// A reference, as a recorder saw it or a generator made it.
///
/// * `time`: nanoseconds of virtual time since the trace began; never decreases. A recorder without
///   a clock counts references or instructions, and the trace's header says so.
/// * `address`: first byte; in a page-granular trace a multiple of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// Virtual time since the trace began.
    pub time: u64,
    /// First byte.
    pub address: u64,
    /// Its kind.
    pub access: Access,
    /// Which client of the trace, from 0.
    pub client: u16,
    /// Which thread of that client, from 0.
    pub thread: u16,
}

/// In the thread's place of a page **locked**: only until its process runs again. The policy had
/// chosen it, and has forgotten it.
pub const PASSED_OVER: u16 = 1;
/// The same place: the process runs again, and the policy knows the page again, as one that was
/// chosen and stayed.
pub const TAKEN_BACK: u16 = 2;

/// How a page came into memory or left it without a reference of the program. It never counts as a
/// reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Movement {
    /// The page was evicted.
    Evicted,
    /// The page was in memory when the manager first saw its mapping. Or fork relatives shared it,
    /// and from now on it counts as this process's own page: it was copied, or the relative that
    /// was charged for the frame has released it.
    Found,
    /// The page was prefetched with a page that was faulted on.
    Ahead,
    /// The page came back: it had been evicted and could not be stored. Or its mapping was moved to
    /// here.
    Returned,
    /// The page has no content any more, in memory or out: the program dropped, unmapped or moved
    /// it.
    Dropped,
    /// The page is out, and was not written since it came: at its eviction its bytes were those of
    /// the stored copy.
    Clean,
    /// The page stayed in memory and was used since the last scan: its Accessed bit was set.
    Accessed,
    /// The page may not leave from now on, in memory or not: by the manager's decision or the
    /// program's; or for a while ([`PASSED_OVER`], [`TAKEN_BACK`]).
    Locked,
    /// No page: the client is a fork child. It has what the client with the number in
    /// [`Event::thread`] has now.
    Forked,
    /// No page: the client has ended with all its pages. A later client with its number is another
    /// one.
    Ended,
    /// The page was in memory when the manager first saw its mapping, in a frame that fork
    /// relatives share and that one of them is charged for.
    Shared,
}

impl Movement {
    /// All of them, in the order of their codes and of the end block.
    pub const ALL: [Movement; 11] = [
        Movement::Evicted,
        Movement::Found,
        Movement::Ahead,
        Movement::Returned,
        Movement::Dropped,
        Movement::Clean,
        Movement::Accessed,
        Movement::Locked,
        Movement::Forked,
        Movement::Ended,
        Movement::Shared,
    ];

    /// Whether the page is in memory afterwards.
    pub fn is_arrival(self) -> bool {
        use Movement::{Ahead, Found, Returned, Shared};
        matches!(self, Found | Ahead | Returned | Shared)
    }
}

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A reference.
    Access(Access),
    /// A movement.
    Movement(Movement),
}

/// An entry of a trace, with the fields of [`Reference`]. The thread of a movement means nothing,
/// except for locked ([`PASSED_OVER`], [`TAKEN_BACK`]) and forked ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Virtual time since the trace began.
    pub time: u64,
    /// First byte.
    pub address: u64,
    /// The event.
    pub kind: Kind,
    /// Which client.
    pub client: u16,
    /// Which thread.
    pub thread: u16,
}

impl Event {
    /// The reference, if it is one.
    pub fn reference(self) -> Option<Reference> {
        match self.kind {
            Kind::Access(access) => Some(Reference {
                time: self.time,
                address: self.address,
                access,
                client: self.client,
                thread: self.thread,
            }),
            Kind::Movement(_) => None,
        }
    }
}

impl From<Reference> for Event {
    fn from(reference: Reference) -> Event {
        Event {
            time: reference.time,
            address: reference.address,
            kind: Kind::Access(reference.access),
            client: reference.client,
            thread: reference.thread,
        }
    }
}
