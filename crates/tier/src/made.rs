//! Between a description and a tier: what keeps its bytes ([`Below`]), and the tier over it
//! ([`MadeTier`]). Each kind implements both (`spec/KIND.rs`).

use std::error::Error;
use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use undercroft_base::{Bytes, PageKey, PageSize, Slot, Tier};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::nvm::MappedAs;

use crate::file::{FileMeter, Room};
use crate::shape::Shape;
use crate::shared_device::SharedDeviceError;

/// Why a tier cannot be opened or made. The text has the fix, where there is one.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No memory or descriptor for a pool or a table.
    #[error("memory for a tier: {0}")]
    Memory(#[from] io::Error),
    /// Its file, device, cluster or memory cannot be used.
    #[error(transparent)]
    Refused(Box<dyn Error + Send + Sync>),
    /// The part below that was handed over does not fit the options: a defect.
    #[error("tier {0} was handed over without its file")]
    NotInherited(String),
    /// A device was given that is none, or another.
    #[error(transparent)]
    Device(#[from] SharedDeviceError),
    /// A device was given to a tier that is as fast as it is.
    #[error("tier {0} has no shape, and was given the device of one")]
    NoShape(String),
    /// Its kind keeps pages of 4 KiB alone.
    #[error("tier {0} keeps no pages of {1}; use ram, nvm or file, or leave --page-size out")]
    PageSize(String, PageSize),
    /// No manager takes over such a tier yet.
    #[error("tier {0} cannot be taken over from a dead manager")]
    NotTakenOver(String),
}

impl OpenError {
    /// As a kind says why.
    pub(crate) fn of(why: impl Error + Send + Sync + 'static) -> OpenError {
        OpenError::Refused(Box::new(why))
    }
}

/// A file or device as it is handed over: descriptor, name, usable bytes.
pub type Handed<D> = (D, String, Bytes);

/// Warns that a file or device is DRAM.
pub(crate) const IN_MEMORY: &str = "a tier's file or device lies in memory, so it saves none and \
                                    no limit counts it; name one on a disk (--tier file:PATH, or \
                                    UNDERCROFT_DIR)";

/// A tier's file, device or cluster, besides its memory.
pub(crate) trait Below: Debug + Send {
    /// The file or device, to hand over.
    fn handed(&self) -> Option<Handed<BorrowedFd<'_>>> {
        None
    }

    /// The [`Room`] by which its quota is changed while it is used, if it has one. `table`: its
    /// memory.
    fn room(&self, _table: BorrowedFd<'_>) -> io::Result<Option<Room>> {
        Ok(None)
    }

    /// Warnings for the user before the run.
    fn warnings(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// The tier over it.
    fn make(self: Box<Self>, with: With<'_>) -> Result<Box<dyn MadeTier>, OpenError>;
}

/// Parts that a tier is made of, besides what is below it.
pub(crate) struct With<'a> {
    /// The pool, or the slot table.
    pub(crate) memory: SharedMemory,
    /// Capacity of a pool.
    pub(crate) pool: Bytes,
    /// Of the run.
    pub(crate) key: &'a PageKey,
    /// Eventfd for [`Room`].
    pub(crate) bell: Option<OwnedFd>,
    /// The tier has the copies of a process that died.
    pub(crate) again: bool,
}

/// A tier before it is given the times of a device, with what its port does not have.
pub trait MadeTier: Tier {
    /// Calls `visit` with every slot in use, if another process may have made the copies. No thread
    /// may store or free meanwhile.
    fn for_each_slot(&self, _visit: &mut dyn FnMut(Slot)) {}

    /// The counts of its file; none if it has no file.
    fn file_meter(&self) -> Option<FileMeter> {
        None
    }

    /// How it is mapped; none if it is not.
    fn mapping(&self) -> Option<MappedAs> {
        None
    }

    /// The tier as it is used.
    ///
    /// * `shape`: the device whose times it is given.
    /// * `waiting`: pages that may wait in DRAM until they are written, if it writes to a device.
    fn finish(self: Box<Self>, shape: Option<Shape>, waiting: usize) -> Box<dyn Tier>;
}
