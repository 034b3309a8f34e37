//! Opens what keeps the bytes of a tier, and makes the tier over it. Two processes may do that: one
//! opens and hands the descriptors over, the other makes the tier.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use undercroft_base::{Bytes, Slot, Tier};
use undercroft_sys::mapping::SharedMemory;

use crate::file::{Backing, BackingError, FileTier, FileTierError, Room};
use crate::nvm::{NvmBacking, NvmError, NvmTier, NvmTierError};
use crate::profile::Profile;
use crate::ram::{RamPool, RamPoolError};
use crate::remote::{Claimed, RemoteError, RemoteTier};
use crate::shape::{Shape, Shaped};
use crate::shared_device::{SharedDevice, SharedDeviceError};
use crate::spec::TierSpec;

/// Why a tier cannot be opened or made. The text has the fix, where there is one.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No memory or descriptor for a pool or a table.
    #[error("memory for a tier: {0}")]
    Memory(#[from] io::Error),
    /// The file or device cannot be used.
    #[error(transparent)]
    Backing(#[from] BackingError),
    /// The file or device cannot be used as memory.
    #[error(transparent)]
    Nvm(#[from] NvmError),
    /// It cannot be mapped.
    #[error(transparent)]
    NvmTier(#[from] NvmTierError),
    /// The pool refused its memory.
    #[error(transparent)]
    Pool(#[from] RamPoolError),
    /// The file tier refused its slot table.
    #[error(transparent)]
    File(#[from] FileTierError),
    /// The cluster cannot be used.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// What was handed over does not fit the options: a defect.
    #[error("tier {0} was handed over without its file")]
    NotInherited(String),
    /// A device was given that is none, or another.
    #[error(transparent)]
    Device(#[from] SharedDeviceError),
    /// A device was given to a tier that is as fast as it is.
    #[error("tier {0} has no shape, and was given the device of one")]
    NoShape(String),
    /// No manager takes over such a tier yet.
    #[error("tier {0} cannot be taken over from a dead manager")]
    NotTakenOver(String),
}

/// What keeps the bytes of a tier, besides its memory.
#[derive(Debug)]
enum Below {
    /// The tier's memory itself.
    Memory,
    Nvm(NvmBacking),
    File(Backing),
    /// The claim stays with the process that made it.
    Remote(Option<Box<Claimed>>),
}

/// A tier's memory, file, device or cluster.
#[derive(Debug)]
pub struct OpenTier {
    memory: SharedMemory,
    below: Below,
    /// Whose times it is given, if others use that device, too.
    device: Option<SharedDevice>,
    /// What it rings when half of what its quota leaves is full.
    bell: Option<OwnedFd>,
    /// What was measured of its device before.
    profile: Option<Profile>,
}

/// A file or device as it is handed over: descriptor, name, usable bytes.
pub type Handed<D> = (D, String, Bytes);

/// A tier by its kind. Its speed is not emulated yet.
pub enum MadeTier {
    /// Compressed memory.
    Ram(Box<RamPool>),
    /// Mapped memory.
    Nvm(Box<NvmTier>),
    /// A file or device.
    File(Box<FileTier>),
    /// A cluster.
    Remote(Box<RemoteTier>),
}

impl OpenTier {
    /// Opens the tier that `spec` describes.
    ///
    /// * `pool`: the capacity of a pool.
    ///
    /// Errors: no memory, or the file or device cannot be used.
    pub fn open(spec: &TierSpec, pool: Bytes) -> Result<OpenTier, OpenError> {
        let (table, below) = match spec {
            TierSpec::Ram(_) => {
                let reserve = RamPool::reserve_for(pool).0 as usize;
                return Ok(OpenTier {
                    memory: SharedMemory::create("uc-ram-tier", reserve)?,
                    below: Below::Memory,
                    device: None,
                    bell: None,
                    profile: None,
                });
            }
            TierSpec::Nvm(nvm) => {
                let backing = NvmBacking::open(&nvm.path, nvm.size)?;
                (NvmTier::table_bytes(backing.bytes()), Below::Nvm(backing))
            }
            TierSpec::File(file) => {
                let backing = Backing::open(&file.path, file.size)?;
                (FileTier::table_bytes(backing.bytes()), Below::File(backing))
            }
            TierSpec::Remote(remote) => {
                let table = RemoteTier::table_bytes(remote.size);
                let memory = SharedMemory::create("uc-slot-table", table)?;
                let below = Below::Remote(Some(Box::new(Claimed::new(remote, &memory)?)));
                return Ok(OpenTier {
                    memory,
                    below,
                    device: None,
                    bell: None,
                    profile: None,
                });
            }
        };
        let memory = SharedMemory::create("uc-slot-table", table)?;
        Ok(OpenTier {
            memory,
            below,
            device: None,
            bell: None,
            profile: None,
        })
    }

    /// What another process opened for `spec`, and handed over.
    ///
    /// Errors: `NotInherited` without the file that this kind needs.
    pub fn inherit(
        spec: &TierSpec,
        memory: SharedMemory,
        below: Option<Handed<OwnedFd>>,
    ) -> Result<OpenTier, OpenError> {
        let below = match (spec, below) {
            (TierSpec::Ram(_), _) => Below::Memory,
            (TierSpec::Remote(_), _) => Below::Remote(None),
            (TierSpec::Nvm(_), Some((fd, name, bytes))) => {
                Below::Nvm(NvmBacking::inherit(fd, name, bytes))
            }
            (TierSpec::File(_), Some((fd, name, bytes))) => {
                Below::File(Backing::inherit(fd, name, bytes)?)
            }
            (TierSpec::Nvm(_) | TierSpec::File(_), None) => {
                return Err(OpenError::NotInherited(spec.to_string()));
            }
        };
        Ok(OpenTier {
            memory,
            below,
            device: None,
            bell: None,
            profile: None,
        })
    }

    /// Gives it the times of a device that others use, too.
    ///
    /// Errors: `memory` is not the device of its `shape=`.
    pub fn share_device(&mut self, spec: &TierSpec, memory: OwnedFd) -> Result<(), OpenError> {
        let Some(name) = spec.shape() else {
            return Err(OpenError::NoShape(spec.to_string()));
        };
        self.device = Some(SharedDevice::open(name, memory)?);
        Ok(())
    }

    /// What was measured of its device before.
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// Its device was measured before.
    pub fn give_profile(&mut self, profile: Option<Profile>) {
        self.profile = profile;
    }

    /// An eventfd: a file rings it when half of what its quota left is full. See [`Room`].
    pub fn give_bell(&mut self, bell: OwnedFd) {
        self.bell = Some(bell);
    }

    /// The same, to hand over.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(AsFd::as_fd)
    }

    /// The memory of the device that it shares with others, to hand over.
    pub fn device(&self) -> Option<BorrowedFd<'_>> {
        self.device.as_ref().map(SharedDevice::memory)
    }

    /// The device whose times `spec` gives it: the one that it shares, or its own.
    pub fn take_shape(&mut self, spec: &TierSpec) -> Option<Shape> {
        let name = spec.shape()?;
        Some(match self.device.take() {
            Some(shared) => Shape::over(name, shared),
            None => Shape::new(name),
        })
    }

    /// By which its quota is changed while it is used; `None`: it is no file, or a whole device.
    ///
    /// Errors: no descriptor, or no address space.
    pub fn room(&self) -> io::Result<Option<Room>> {
        match &self.below {
            Below::File(backing) if !backing.is_block_device() => {
                Room::over(self.memory.as_fd(), backing.bytes()).map(Some)
            }
            Below::File(_) | Below::Nvm(_) | Below::Memory | Below::Remote(_) => Ok(None),
        }
    }

    /// Its memory: the pool, or the slot table.
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Its file or device, to hand over; `None` for a pool or a cluster.
    pub fn below(&self) -> Option<Handed<BorrowedFd<'_>>> {
        match &self.below {
            Below::Memory | Below::Remote(_) => None,
            Below::Nvm(b) => Some((b.as_fd(), b.name().to_owned(), b.bytes())),
            Below::File(b) => Some((b.as_fd(), b.name().to_owned(), b.bytes())),
        }
    }

    /// True if the tier's file is in a memory file system, so that it saves no memory.
    pub fn is_in_memory(&self) -> bool {
        match &self.below {
            Below::Memory | Below::Remote(_) => false,
            Below::Nvm(backing) => backing.is_in_memory(),
            Below::File(backing) => backing.is_in_memory(),
        }
    }

    /// What the user should know of the tier before the run.
    pub fn warning(&self) -> Option<&'static str> {
        match &self.below {
            Below::Remote(Some(claimed)) => claimed.warning(),
            _ if self.is_in_memory() => {
                Some("a tier's file lies in a memory file system, so it saves no memory")
            }
            _ => None,
        }
    }

    /// Makes the tier, which is empty. `spec` and `pool`: as it was opened.
    pub fn make(self, spec: &TierSpec, pool: Bytes) -> Result<MadeTier, OpenError> {
        self.made(spec, pool, false)
    }

    /// The tier that a dead process had made of the same memory and file, with every copy in it.
    /// The caller frees slots that nothing names: see [`MadeTier::slots`].
    pub fn recover(self, spec: &TierSpec, pool: Bytes) -> Result<MadeTier, OpenError> {
        self.made(spec, pool, true)
    }

    fn made(self, spec: &TierSpec, pool: Bytes, again: bool) -> Result<MadeTier, OpenError> {
        Ok(match self.below {
            Below::Memory => {
                let TierSpec::Ram(ram) = spec else {
                    return Err(OpenError::NotInherited(spec.to_string()));
                };
                let make = if again {
                    RamPool::recover
                } else {
                    RamPool::new
                };
                MadeTier::Ram(Box::new(make(self.memory, ram.compressor, pool)?))
            }
            Below::Nvm(backing) => {
                let make = if again {
                    NvmTier::recover
                } else {
                    NvmTier::new
                };
                MadeTier::Nvm(Box::new(make(backing, self.memory)?))
            }
            Below::Remote(claimed) => {
                let TierSpec::Remote(remote) = spec else {
                    return Err(OpenError::NotInherited(spec.to_string()));
                };
                if again {
                    return Err(OpenError::NotTakenOver(spec.to_string()));
                }
                let tier = RemoteTier::new(remote, self.memory, claimed.map(|it| *it))?;
                MadeTier::Remote(Box::new(tier))
            }
            Below::File(backing) => {
                let make = if again {
                    FileTier::recover
                } else {
                    FileTier::new
                };
                let tier = make(backing, self.memory)?;
                MadeTier::File(Box::new(tier.with_bell(self.bell)))
            }
        })
    }
}

impl MadeTier {
    /// The tier, as fast as it is, also if it has a shape.
    pub fn tier(&self) -> &dyn Tier {
        match self {
            MadeTier::Ram(pool) => pool.as_ref(),
            MadeTier::Nvm(tier) => tier.as_ref(),
            MadeTier::File(tier) => tier.as_ref(),
            MadeTier::Remote(tier) => tier.as_ref(),
        }
    }

    /// Every slot in use. No thread may store or free meanwhile.
    pub fn slots(&self) -> Vec<Slot> {
        let mut slots = Vec::new();
        let visit = |slot| slots.push(slot);
        match self {
            MadeTier::Ram(pool) => pool.for_each_slot(visit),
            MadeTier::Nvm(tier) => tier.for_each_slot(visit),
            MadeTier::File(tier) => tier.for_each_slot(visit),
            MadeTier::Remote(_) => {} // none is taken over
        }
        slots
    }

    /// The tier, as slow as its device, if it is given one.
    pub fn shaped(self, shape: Option<Shape>) -> Box<dyn Tier> {
        match (self, shape) {
            (MadeTier::Ram(pool), Some(shape)) => Box::new(Shaped::new(*pool, shape)),
            (MadeTier::Ram(pool), None) => pool,
            (MadeTier::Nvm(tier), Some(shape)) => Box::new(Shaped::new(*tier, shape)),
            (MadeTier::Nvm(tier), None) => tier,
            (MadeTier::File(tier), Some(shape)) => Box::new(tier.shaped(shape)),
            (MadeTier::File(tier), None) => tier,
            (MadeTier::Remote(tier), _) => tier,
        }
    }
}
