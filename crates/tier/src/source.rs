//! A file that another program has written, such as the memory of a virtual machine in a snapshot.
//! Its pages are the copies; nothing is ever stored in it.
//!
//! It is read through the kernel's page cache, not past it: many machines begin from one file, and
//! what one of them has read is there for the others. Pages in the cache are copied at once. Others
//! are read by the caller's ring, with no more than was asked for: which pages come along is
//! decided by the engine.
//!
//! A slot is a page of the file. Each machine has slots of its own, so that no two pages of one run
//! have the same: slot `n` is page `n` modulo the pages of the file.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};
use rustix::io::{ReadWriteFlags, preadv2};
use undercroft_base::{
    Bytes, LatencyClass, LoadError, Loaded, Nanos, PageSize, Slot, Stamp, Store, StoreError, Tier,
    TierFacts, TierInfo, TierUsage,
};

/// Facts of these files.
pub const FACTS: TierFacts = TierFacts {
    is_source: true,
    ..TierFacts::of("snapshot", LatencyClass::Device, Nanos(80_000))
};

/// Version of what another manager takes over: the file itself.
pub const VERSION: u64 = 1;

/// Why a file cannot be used; the text names the fix.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The system refused.
    #[error("cannot read {path}: {source}")]
    System {
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// A directory, a device or a pipe.
    #[error("{0} is no file; name the file with the memory of a snapshot")]
    NoFile(PathBuf),
    /// A file without a whole page.
    #[error("{0} has less than a page of 4 KiB; name the file with the memory of a snapshot")]
    TooShort(PathBuf),
}

/// The file, open for reading.
#[derive(Debug)]
pub struct Source {
    file: File,
    name: String,
    bytes: Bytes,
}

impl Source {
    /// Opens `path`.
    pub fn open(path: &Path) -> Result<Source, SourceError> {
        let system = |source: io::Error| SourceError::System {
            path: path.to_owned(),
            source,
        };
        // A pipe would be waited for.
        let kind = path.metadata().map_err(system)?.file_type();
        if !kind.is_file() {
            return Err(SourceError::NoFile(path.to_owned()));
        }
        let file = File::open(path).map_err(system)?;
        let bytes = Bytes(file.metadata().map_err(system)?.len())
            .pages_floor()
            .bytes();
        if bytes == Bytes(0) {
            return Err(SourceError::TooShort(path.to_owned()));
        }
        Ok(Source {
            name: format!("{}:{}", FACTS.kind, path.display()),
            file,
            bytes,
        })
    }

    /// The file that an earlier process opened and kept: same `bytes` and `name`.
    pub fn inherit(fd: OwnedFd, name: String, bytes: Bytes) -> Source {
        let file = File::from(fd);
        Source { file, name, bytes }
    }

    /// The name for reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whole pages of it.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The tier over it.
pub struct SourceTier {
    file: File,
    pages: u64,
    info: TierInfo,
}

impl SourceTier {
    /// A tier of the pages of `source`.
    pub fn new(source: Source) -> SourceTier {
        // The kernel reads nothing ahead: it would read for each machine what none of them wants.
        let _ = fadvise(&source.file, 0, None, Advice::Random);
        SourceTier {
            pages: source.bytes.pages_floor().0,
            info: TierInfo {
                name: source.name,
                facts: &FACTS,
                page: PageSize::Base,
                emulated: false,
                capacity: source.bytes,
            },
            file: source.file,
        }
    }

    fn offset(&self, slot: Slot) -> u64 {
        slot.0 % self.pages * PageSize::Base.bytes() as u64
    }
}

impl Tier for SourceTier {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn usage(&self) -> TierUsage {
        TierUsage::default()
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        for item in batch {
            item.result = Err(StoreError::Full);
        }
    }

    fn load(&self, slot: Slot, _: Stamp, dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let offset = self.offset(slot);
        let whole = dst.len();
        let cached = preadv2(
            &self.file,
            &mut [IoSliceMut::new(dst)],
            offset,
            ReadWriteFlags::NOWAIT,
        );
        Ok(match cached {
            Ok(got) if got == whole && whole > 0 => Loaded::Done,
            _ => Loaded::Read {
                fd: self.file.as_raw_fd(),
                offset,
            },
        })
    }

    fn checksum(&self, _: Slot, _: Stamp) -> Option<u64> {
        None
    }

    fn free(&self, _: &[Slot]) {}
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const PAGE: usize = PageSize::Base.bytes();

    #[test]
    fn a_slot_is_a_page_of_the_file_whichever_machine_it_is_of() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        for page in 0..3u8 {
            file.write_all(&[page + 1; PAGE]).expect("written");
        }
        file.write_all(b"no page").expect("written");
        let source = Source::open(file.path()).expect("a file");
        assert_eq!(source.bytes(), Bytes(3 * PAGE as u64));
        let tier = SourceTier::new(source);
        let mut page = [0; PAGE];
        for (slot, first) in [(0, 1), (2, 3), (3, 1), (3 << 30 | 1, 2)] {
            // It was just written, so it is in the cache.
            let loaded = tier.load(Slot(slot), Stamp(0), &mut page);
            assert_eq!(loaded, Ok(Loaded::Done), "{slot}");
            assert!(page.iter().all(|byte| *byte == first), "{slot}");
        }
        // What the file has no more is to be read, and that falls short.
        file.as_file().set_len(PAGE as u64).expect("cut");
        let loaded = tier.load(Slot(2), Stamp(0), &mut page);
        assert!(matches!(loaded, Ok(Loaded::Read { offset, .. }) if offset == 2 * PAGE as u64));
    }

    #[test]
    fn nothing_is_stored_in_it() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(&[1; PAGE]).expect("written");
        let tier = SourceTier::new(Source::open(file.path()).expect("a file"));
        let mut batch = [Store {
            page: &[0; PAGE],
            stamp: Stamp(0),
            checksum: 0,
            result: Ok(Slot(0)),
        }];
        tier.store(&mut batch);
        assert_eq!(batch[0].result, Err(StoreError::Full));
    }

    #[test]
    fn what_is_no_file_with_a_page_is_refused_with_the_fix() {
        let folder = tempfile::tempdir().expect("a folder");
        let short = folder.path().join("short");
        std::fs::write(&short, [0; PAGE - 1]).expect("written");
        for (path, why) in [
            (folder.path(), "is no file"),
            (Path::new("/dev/null"), "is no file"),
            (&folder.path().join("none"), "No such file"),
            (&short, "less than a page"),
        ] {
            let error = Source::open(path).expect_err("refused").to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
