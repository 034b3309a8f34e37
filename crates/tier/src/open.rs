//! Opens what keeps the bytes of a tier, and makes the tier over it. Two processes may do that: one
//! opens and hands the descriptors over, the other makes the tier.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use undercroft_base::{Bytes, PageKey, PageSize};
use undercroft_sys::mapping::SharedMemory;

use crate::file::Room;
use crate::made::{Below, With};
pub use crate::made::{Handed, MadeTier, OpenError};
use crate::profile::Profile;
use crate::shape::Shape;
use crate::shared_device::SharedDevice;
use crate::spec::TierSpec;

/// A tier's memory, file, device or cluster.
#[derive(Debug)]
pub struct OpenTier {
    memory: SharedMemory,
    below: Box<dyn Below>,
    /// Whose times it is given, if others use that device, too.
    device: Option<SharedDevice>,
    /// An eventfd: a file rings it when half of what its quota left is full. See [`Room`].
    pub bell: Option<OwnedFd>,
    /// Figures of its device, measured before.
    pub profile: Option<Profile>,
}

impl OpenTier {
    fn new(memory: SharedMemory, below: Box<dyn Below>) -> OpenTier {
        OpenTier {
            memory,
            below,
            device: None,
            bell: None,
            profile: None,
        }
    }

    /// Opens the tier that `spec` describes.
    ///
    /// * `page`: size of the pages of its copies.   * `pool`: the capacity of a pool.
    ///
    /// Errors: no memory, or the file or device cannot be used. Its kind has no pages of this size.
    pub fn open(spec: &TierSpec, page: PageSize, pool: Bytes) -> Result<OpenTier, OpenError> {
        let (memory, below) = (spec.kind().open)(spec, page, pool)?;
        Ok(OpenTier::new(memory, below))
    }

    /// A tier that another process opened for `spec`, and handed over.
    ///
    /// Errors: `NotInherited` without the file that this kind needs.
    pub fn inherit(
        spec: &TierSpec,
        page: PageSize,
        memory: SharedMemory,
        below: Option<Handed<OwnedFd>>,
    ) -> Result<OpenTier, OpenError> {
        let below = (spec.kind().inherit)(spec, page, below)?;
        Ok(OpenTier::new(memory, below))
    }

    /// Gives it the times of a device that others use, too.
    ///
    /// Errors: `memory` is not the device of its `shape=`.
    pub fn share_device(&mut self, spec: &TierSpec, memory: OwnedFd) -> Result<(), OpenError> {
        let Some(name) = spec.shape else {
            return Err(OpenError::NoShape(spec.to_string()));
        };
        self.device = Some(SharedDevice::open(name, memory)?);
        Ok(())
    }

    /// The memory of the device that it shares with others, to hand over.
    pub fn device(&self) -> Option<BorrowedFd<'_>> {
        self.device.as_ref().map(SharedDevice::memory)
    }

    /// The device whose times `spec` gives it: the one that it shares, or its own.
    pub fn take_shape(&mut self, spec: &TierSpec) -> Option<Shape> {
        let name = spec.shape?;
        Some(match self.device.take() {
            Some(shared) => Shape::over(name, shared),
            None => Shape::new(name),
        })
    }

    /// The [`Room`] by which its quota is changed while it is used; `None`: it is no file, or a
    /// whole device.
    ///
    /// Errors: no descriptor, or no address space.
    pub fn room(&self) -> io::Result<Option<Room>> {
        self.below.room(self.memory.as_fd())
    }

    /// Its memory: the pool, or the slot table.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Its file or device, to hand over; `None` for a pool or a cluster.
    pub fn below(&self) -> Option<Handed<BorrowedFd<'_>>> {
        self.below.handed()
    }

    /// Warnings on the tier for the user before the run.
    pub fn warnings(&self) -> Vec<&'static str> {
        self.below.warnings()
    }

    /// Makes the tier, which is empty. `pool`: as it was opened. `key`: of the run.
    pub fn make(self, pool: Bytes, key: &PageKey) -> Result<Box<dyn MadeTier>, OpenError> {
        self.made(pool, key, false)
    }

    /// The tier that a dead process had made of the same memory and file, with every copy in it.
    /// The caller frees slots that nothing names: see [`MadeTier::for_each_slot`].
    pub fn recover(self, pool: Bytes, key: &PageKey) -> Result<Box<dyn MadeTier>, OpenError> {
        self.made(pool, key, true)
    }

    fn made(self, pool: Bytes, key: &PageKey, again: bool) -> Result<Box<dyn MadeTier>, OpenError> {
        let (memory, bell) = (self.memory, self.bell);
        self.below.make(With {
            memory,
            pool,
            key,
            bell,
            again,
        })
    }
}
