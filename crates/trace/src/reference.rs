//! One entry of a trace: a memory reference of a program or, in live traces, the movement of a page
//! between memory and below.

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
/// * `time`: nanoseconds of virtual time since the trace began; never goes back. Where a recorder
///   has no clock it counts what it has (references, instructions) and the trace's header says so.
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

/// How a page came into memory or left it without a reference of the program. Never counted as a
/// reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Movement {
    /// Left: taken out by the manager.
    Evicted,
    /// Was there when the manager first looked at its mapping; or fork relatives share it, and from
    /// now on it counts as a page of its own here: it has been copied, or who was charged for the
    /// frame has let go of it.
    Found,
    /// Came: brought along with a page that was faulted on.
    Ahead,
    /// Came back: it had been evicted, and could not be stored; or it is where its mapping has
    /// moved to.
    Returned,
    /// Has no content any more, in memory or out: the program dropped, unmapped or moved it.
    Dropped,
    /// Is out, and was not written since it came: its bytes were those of the copy below when it
    /// was evicted.
    Clean,
    /// Stayed where it is, in memory, and was used since the look before: its Accessed bit was set.
    Accessed,
    /// May not leave from now on, whether it is in memory or not: the manager's own decision, or
    /// the program's.
    Locked,
    /// Left, as [`Movement::Evicted`], but named by the manager itself and not by its policy.
    Named,
    /// Had been evicted, and is not out yet: the next entry is a fault on it, which was served by
    /// putting it back.
    Recalled,
    /// No page: the client is a fork child, and has what the client has whose number is in
    /// [`Event::thread`], as it is there now.
    Forked,
    /// No page: the client has ended, and nothing it had is left. What has its number from now on
    /// is another.
    Ended,
    /// Was there when the manager first looked at its mapping, in a frame that it shares with fork
    /// relatives and that one of them is charged for.
    Shared,
}

impl Movement {
    /// All of them, in the order of their codes and of the end block.
    pub const ALL: [Movement; 13] = [
        Movement::Evicted,
        Movement::Found,
        Movement::Ahead,
        Movement::Returned,
        Movement::Dropped,
        Movement::Clean,
        Movement::Accessed,
        Movement::Locked,
        Movement::Named,
        Movement::Recalled,
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

/// What an entry of a trace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A reference.
    Access(Access),
    /// A movement.
    Movement(Movement),
}

/// One entry of a trace; fields as those of [`Reference`]. The thread of a movement means nothing,
/// but of [`Movement::Forked`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// When.
    pub time: u64,
    /// Where.
    pub address: u64,
    /// What.
    pub kind: Kind,
    /// Which client.
    pub client: u16,
    /// Which thread.
    pub thread: u16,
}

impl Event {
    /// The reference it is; `None` of a movement.
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
