//! The file or DAX device under an nvm tier. It is opened so that no other process can change it
//! or cut it short, and so that nothing is left behind.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use undercroft_base::{Bytes, PageSize};

use super::unit_bytes;
use crate::dram;

const UNIT: u64 = unit_bytes(PageSize::Base);

/// A DAX device is mapped in whole huge pages.
const DEVICE_UNIT_BYTES: u64 = 2 << 20;

/// The file or device that keeps a tier's bytes. All of its space is its own already.
#[derive(Debug)]
pub struct NvmBacking {
    file: File,
    name: String,
    bytes: u64,
    page: PageSize,
}

/// Why a file or device cannot be used; the text names the fix.
#[derive(Debug, thiserror::Error)]
pub enum NvmError {
    /// A file of this name exists, and its contents may matter or be in use.
    #[error(
        "{0} exists already, and may be in use by another program; name a new file, a directory or a DAX device"
    )]
    Exists(PathBuf),
    /// Another run uses the device.
    #[error("{0} is in use by another run of undercroft; choose another")]
    InUse(PathBuf),
    /// Not something that can be mapped as memory.
    #[error(
        "{0} is neither a new file, a directory nor a DAX device (/dev/dax0.0); for a block device use file:{0}"
    )]
    Kind(PathBuf),
    /// A file without a size.
    #[error(
        "{0} is no DAX device, so it needs a size: its space is taken at once; give nvm:{0},size=1G"
    )]
    SizeMissing(PathBuf),
    /// The device is smaller than what was asked for.
    #[error("{path} has only {has}, not {wanted}; give a smaller size=, or none to use all of it")]
    TooLarge {
        /// The device.
        path: PathBuf,
        /// The size asked for.
        wanted: Bytes,
        /// Its size.
        has: Bytes,
    },
    /// The file system has less free space than that.
    #[error("{path}: the file system has no room for {wanted}; give a smaller size=")]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// The size asked for.
        wanted: Bytes,
    },
    /// The file system cannot promise space.
    #[error("{0} is on a file system that cannot promise space (fallocate); choose another")]
    NoPromise(PathBuf),
    /// The place has no room for one unit.
    #[error("{path} has room for {room}, an nvm tier needs at least {least}", least = Bytes(UNIT))]
    TooSmall {
        /// The file, device or directory to use.
        path: PathBuf,
        /// Its room.
        room: Bytes,
    },
    /// The system refused.
    #[error("cannot use {path} as a tier: {source}")]
    System {
        /// The file, device or directory to use.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
}

impl NvmBacking {
    /// Opens `path`, and takes all of its space.
    ///
    /// * A name that does not exist is created and unlinked at once: no other process can open it,
    ///   so none can cut it short. In a directory, a nameless file is made.
    /// * A DAX device is locked against other runs (flock): all of it, or its first `size` bytes.
    ///
    /// `size`: rounded down to 1 MiB, for a device to 2 MiB. A file needs it.
    pub fn open(path: &Path, size: Option<Bytes>) -> Result<NvmBacking, NvmError> {
        let system = |source: io::Error| NvmError::System {
            path: path.to_owned(),
            source,
        };
        let kind = match std::fs::metadata(path) {
            Ok(metadata) => Some(metadata.file_type()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(system(error)),
        };
        if kind.is_some_and(|kind| kind.is_char_device()) {
            return NvmBacking::device(path, size);
        }
        match kind {
            Some(kind) if kind.is_file() => return Err(NvmError::Exists(path.to_owned())),
            Some(kind) if !kind.is_dir() => return Err(NvmError::Kind(path.to_owned())),
            _ => {}
        }
        let wanted = size.ok_or_else(|| NvmError::SizeMissing(path.to_owned()))?;
        let bytes = whole_units(path, wanted, UNIT)?;
        let flags = match kind {
            Some(_) => OFlags::TMPFILE,
            None => OFlags::CREATE | OFlags::EXCL,
        };
        let file = open(path, flags).map_err(|errno| system(errno.into()))?;
        if kind.is_none() {
            std::fs::remove_file(path).map_err(system)?;
        }
        let no_room = || NvmError::NoRoom {
            path: path.to_owned(),
            wanted,
        };
        // Asked first: a file system may fill itself up before it refuses.
        let free = rustix::fs::fstatvfs(&file).map_err(|errno| system(errno.into()))?;
        if free.f_bavail.saturating_mul(free.f_frsize) < bytes {
            return Err(no_room());
        }
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => return Err(no_room()),
            Err(Errno::OPNOTSUPP) => return Err(NvmError::NoPromise(path.to_owned())),
            Err(errno) => return Err(system(errno.into())),
        }
        Ok(NvmBacking {
            name: format!("nvm:{}", path.display()),
            file,
            bytes,
            page: PageSize::Base,
        })
    }

    fn device(path: &Path, size: Option<Bytes>) -> Result<NvmBacking, NvmError> {
        let system = |source: io::Error| NvmError::System {
            path: path.to_owned(),
            source,
        };
        let file = open(path, OFlags::empty()).map_err(|errno| system(errno.into()))?;
        let number = file.metadata().map_err(system)?.rdev();
        let has = dax_bytes(number).ok_or_else(|| NvmError::Kind(path.to_owned()))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(NvmError::InUse(path.to_owned())),
            Err(errno) => return Err(system(errno.into())),
        }
        let wanted = size.unwrap_or(has);
        if wanted > has {
            return Err(NvmError::TooLarge {
                path: path.to_owned(),
                wanted,
                has,
            });
        }
        Ok(NvmBacking {
            bytes: whole_units(path, wanted, DEVICE_UNIT_BYTES)?,
            name: format!("nvm:{}", path.display()),
            file,
            page: PageSize::Base,
        })
    }

    /// Backing that an earlier process opened with [`NvmBacking::open`] and kept: same file,
    /// `bytes` and `name`.
    pub fn inherit(fd: OwnedFd, name: String, bytes: Bytes) -> NvmBacking {
        NvmBacking {
            file: File::from(fd),
            name,
            bytes: bytes.0 / UNIT * UNIT,
            page: PageSize::Base,
        }
    }

    /// Keeps copies of pages of this size, in whole units of 64 large pages.
    pub fn of_pages(mut self, page: PageSize) -> NvmBacking {
        self.page = page;
        self.bytes = self.bytes / unit_bytes(page) * unit_bytes(page);
        self
    }

    pub(super) fn page(&self) -> PageSize {
        self.page
    }

    /// The name for reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Usable size.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// True if its bytes lie in DRAM (tmpfs, zram), so that it saves no memory. Worth a warning.
    pub fn is_in_memory(&self) -> bool {
        dram::holds(&self.file)
    }

    pub(super) fn into_file(self) -> (File, String, u64) {
        (self.file, self.name, self.bytes)
    }
}

impl AsFd for NvmBacking {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Gives all space of a file back, and a device to other runs. A load of the mapping fails then.
pub(super) fn give_back(file: &File) {
    if file.metadata().is_ok_and(|of| of.is_file()) {
        let _ = file.set_len(0); // the space is given back when the file is closed
    } else {
        let _ = rustix::fs::flock(file, FlockOperation::Unlock);
    }
}

fn open(path: &Path, flags: OFlags) -> Result<File, Errno> {
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map(File::from)
}

/// `size` in whole units. Errors: less than one.
fn whole_units(path: &Path, size: Bytes, unit: u64) -> Result<u64, NvmError> {
    match size.0 / unit * unit {
        0 => Err(NvmError::TooSmall {
            path: path.to_owned(),
            room: size,
        }),
        bytes => Ok(bytes),
    }
}

/// The size of the DAX device of that number. `None`: it is none, or tells no size.
fn dax_bytes(number: u64) -> Option<Bytes> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let device = PathBuf::from(format!("/sys/dev/char/{major}:{minor}"));
    let subsystem = std::fs::read_link(device.join("subsystem")).ok()?;
    if subsystem.file_name()? != "dax" {
        return None;
    }
    let size = std::fs::read_to_string(device.join("size")).ok()?;
    size.trim().parse().ok().map(Bytes)
}
