//! Memory that the shim maps for itself in the program. It stays mapped as long as the address
//! space lives.

use crate::raw::{PAGE, call3, call6, nr};

const READ_WRITE: usize = 3;
const SHARED: usize = 1;
const PRIVATE_ANONYMOUS: usize = 0x22;

/// A mapping of the shim's own, whole.
pub(crate) struct Mapping {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Mapping {
    /// The first page of a file, shared with its other mappings. `None`: the kernel refused.
    pub(crate) fn page_of(file: usize) -> Option<Mapping> {
        Mapping::new(PAGE, SHARED, file)
    }

    /// Fresh memory. `None`: the kernel refused.
    pub(crate) fn private(bytes: usize) -> Option<Mapping> {
        Mapping::new(bytes, PRIVATE_ANONYMOUS, usize::MAX)
    }

    fn new(bytes: usize, flags: usize, file: usize) -> Option<Mapping> {
        // SAFETY: a new mapping, at an address that the kernel chooses, takes no other's place.
        let start = unsafe { call6(nr::MMAP, 0, bytes, READ_WRITE, flags, file, 0) };
        let start = usize::try_from(start).ok()?;
        Some(Mapping { start, bytes })
    }

    pub(crate) fn end(&self) -> usize {
        self.start + self.bytes
    }

    /// Advises the kernel about all of it; see madvise(2).
    pub(crate) fn advise(&self, advice: usize) {
        // SAFETY: the shim's own, and not in use yet: no reference points into it.
        unsafe { call3(nr::MADVISE, self.start, self.bytes, advice) };
    }

    /// Unlocks it and drops its contents. A program that locks all it maps has locked and filled
    /// it.
    pub(crate) fn empty(&self) {
        // SAFETY: the shim's own; the contents stay.
        unsafe { call3(nr::MUNLOCK, self.start, self.bytes, 0) };
        self.advise(crate::raw::advice::DONTNEED);
    }
}
