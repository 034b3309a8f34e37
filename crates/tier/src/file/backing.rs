//! The file or block device under a file tier. It is opened so that nothing is left behind and
//! nothing is overwritten.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use undercroft_base::{Bytes, PageSize};

use super::{SLAB_BYTES, slab_bytes};
use crate::dram;

/// The file or device that keeps a tier's bytes.
#[derive(Debug)]
pub struct Backing {
    file: File,
    name: String,
    bytes: u64,
    block_device: bool,
    direct: bool,
    page: PageSize,
    packs: bool,
}

/// Why a file or device cannot be used; the text names the fix.
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    /// A file of this name exists, and its contents may matter.
    #[error(
        "{0} exists already and would be overwritten; remove it, or name a new file, a directory or a block device"
    )]
    Exists(PathBuf),
    /// The device is mounted, or swap, or opened exclusively by another program.
    #[error("{0} is in use (mounted, swap, or part of another device); choose another")]
    InUse(PathBuf),
    /// Not a file that can be created, nor a directory, nor a block device.
    #[error("{0} is neither a new file, a directory nor a block device")]
    Kind(PathBuf),
    /// The place has no room for one slab.
    #[error("{path} has room for {room}, a file tier needs at least {least}", least = Bytes(SLAB_BYTES))]
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

impl Backing {
    /// Opens `path` with O_DIRECT. Where the file system refuses that, it is buffered: see
    /// [`Backing::is_direct`].
    ///
    /// * A name that does not exist is created, sized, and unlinked at once, so that nothing is
    ///   left behind however the process ends.
    /// * In a directory, a nameless file is made.
    /// * A block device is opened exclusively: all of it, or its first `size` bytes.
    ///
    /// `size`: rounded down to slabs of 1 MiB. `None`: the whole device, or half of what the file
    /// system has free. A file takes no space until it is written.
    pub fn open(path: &Path, size: Option<Bytes>) -> Result<Backing, BackingError> {
        let system = |source: io::Error| BackingError::System {
            path: path.to_owned(),
            source,
        };
        let kind = match std::fs::metadata(path) {
            Ok(metadata) => Some(metadata.file_type()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(system(error)),
        };
        let (file, direct) = match kind {
            None => {
                let flags = OFlags::CREATE | OFlags::EXCL;
                let opened = open_direct(path, flags).map_err(|errno| system(errno.into()))?;
                std::fs::remove_file(path).map_err(system)?;
                opened
            }
            Some(kind) if kind.is_dir() => {
                open_direct(path, OFlags::TMPFILE).map_err(|errno| system(errno.into()))?
            }
            Some(kind) if kind.is_block_device() => {
                open_direct(path, OFlags::EXCL).map_err(|errno| match errno {
                    Errno::BUSY => BackingError::InUse(path.to_owned()),
                    errno => system(errno.into()),
                })?
            }
            Some(kind) if kind.is_file() => return Err(BackingError::Exists(path.to_owned())),
            Some(_) => return Err(BackingError::Kind(path.to_owned())),
        };
        let block_device = kind.is_some_and(|kind| kind.is_block_device());
        let room = match (block_device, size) {
            (true, size) => {
                let device = (&file).seek(SeekFrom::End(0)).map_err(system)?;
                size.map_or(device, |size| size.0.min(device))
            }
            (false, Some(size)) => size.0,
            (false, None) => {
                let free = rustix::fs::fstatvfs(&file).map_err(|errno| system(errno.into()))?;
                free.f_bavail * free.f_frsize / 2
            }
        };
        let bytes = room / SLAB_BYTES * SLAB_BYTES;
        if bytes == 0 {
            return Err(BackingError::TooSmall {
                path: path.to_owned(),
                room: Bytes(room),
            });
        }
        if !block_device {
            file.set_len(bytes).map_err(system)?;
        }
        Ok(Backing {
            name: format!("file:{}", path.display()),
            file,
            bytes,
            block_device,
            direct,
            page: PageSize::Base,
            packs: false,
        })
    }

    /// Backing that an earlier process opened with [`Backing::open`] and kept: same file, `bytes`
    /// and `name`.
    pub fn inherit(fd: OwnedFd, name: String, bytes: Bytes) -> io::Result<Backing> {
        let file = File::from(fd);
        let flags = rustix::fs::fcntl_getfl(&file)?;
        let block_device = file.metadata()?.file_type().is_block_device();
        Ok(Backing {
            direct: flags.contains(OFlags::DIRECT),
            name,
            bytes: bytes.0 / SLAB_BYTES * SLAB_BYTES,
            block_device,
            file,
            page: PageSize::Base,
            packs: false,
        })
    }

    /// Keeps copies of pages of this size, in whole slabs of them.
    pub fn of_pages(mut self, page: PageSize) -> Backing {
        self.page = page;
        self.bytes = self.bytes / slab_bytes(page) * slab_bytes(page);
        self
    }

    /// Keeps several compressed pages in one block, where they are short enough. For base pages.
    pub fn packing(mut self, packs: bool) -> Backing {
        self.packs = packs;
        self
    }

    pub(super) fn packs(&self) -> bool {
        self.packs && self.page == PageSize::Base
    }

    pub(crate) fn page(&self) -> PageSize {
        self.page
    }

    /// The name for reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Usable size, whole slabs.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// False if the file system refused O_DIRECT: the kernel may then keep second copies in its
    /// page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// True if its bytes lie in DRAM (tmpfs, zram), so that it saves no memory. Worth a warning.
    pub fn is_in_memory(&self) -> bool {
        dram::holds(&self.file)
    }

    /// True for a block device.
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Asks the file system for the range in one piece. Space that is given write by write lies in
    /// many pieces, and each costs the file system time when the file ends: some 4 ms, if it tells
    /// the disk (`mount -o discard`). A refusal changes nothing: writes then get space one by one.
    pub(super) fn reserve(&self, offset: u64, bytes: u64) {
        if !self.block_device {
            let _ = rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, offset, bytes);
        }
    }

    /// Gives all space of a file back. A device stays as it is.
    pub(super) fn give_back(&self) {
        if !self.block_device {
            let _ = self.file.set_len(0); // the space is given back when the file is closed
        }
    }

    /// Tells the file system or device that the bytes of the range are no longer needed.
    pub(super) fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset, bytes)?)
    }
}

impl AsFd for Backing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn open_direct(path: &Path, flags: OFlags) -> Result<(File, bool), Errno> {
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(path, flags | OFlags::DIRECT, mode) {
        Ok(fd) => Ok((File::from(fd), true)),
        Err(Errno::INVAL) => {
            // The kernel may have created the file before it refused the flag.
            if flags.contains(OFlags::CREATE | OFlags::EXCL) {
                let _ = rustix::fs::unlink(path);
            }
            let fd = rustix::fs::open(path, flags, mode)?;
            Ok((File::from(fd), false))
        }
        Err(errno) => Err(errno),
    }
}
