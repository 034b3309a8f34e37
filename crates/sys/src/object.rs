//! A memory object: a memfd that other processes map, such as the memory of a virtual machine. This
//! process does not map it: it reads its pages and takes them away by descriptor.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{FallocateFlags, FsWord, MemfdFlags, SealFlags, SeekFrom};
use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, PageSize, VirtPage, VirtRange};

/// The file system of huge pages (`HUGETLBFS_MAGIC`).
const HUGETLBFS: FsWord = 0x9584_58f6;

/// Device and inode of a file: no two files have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// As `stat` has it.
    pub device: u64,
    /// The number of the file there.
    pub inode: u64,
}

/// A memfd of whole pages. Its pages are numbered from 0.
#[derive(Debug)]
pub struct MemoryObject {
    file: File,
    page: PageSize,
    pages: u64,
    id: FileId,
}

/// Makes a memfd of `bytes` bytes, rounded up to pages, which no process can make shorter or
/// longer. A program that this process starts gets the descriptor. Large pages come from the
/// kernel's pool of huge pages, when they are touched: none is reserved.
pub fn create(name: &str, bytes: Bytes, page: PageSize) -> io::Result<OwnedFd> {
    let bytes = bytes.0.next_multiple_of(page.bytes() as u64);
    let most = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if most.is_some_and(|most| bytes > most) {
        return Err(rustix::io::Errno::FBIG.into()); // the kernel would end this process
    }
    let flags = match page {
        PageSize::Base => MemfdFlags::ALLOW_SEALING,
        PageSize::Large => MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
    };
    let memfd = rustix::fs::memfd_create(name, flags)?;
    rustix::fs::ftruncate(&memfd, bytes)?;
    rustix::fs::fcntl_add_seals(
        &memfd,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(memfd)
}

impl MemoryObject {
    /// Opens it anew: the program may use the offset of its own descriptor.
    ///
    /// The size of its pages is that of its file system. The size of a block would not do: with
    /// transparent huge pages the kernel says 2 MiB for memory whose pages are of 4 KiB, and begins
    /// to say so when an administrator allows them.
    pub fn of(memfd: BorrowedFd<'_>) -> io::Result<MemoryObject> {
        let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let file = File::options().read(true).write(true).open(path)?;
        let metadata = file.metadata()?;
        let is_huge = rustix::fs::fstatfs(&file)?.f_type == HUGETLBFS;
        let page = match (
            is_huge,
            metadata.blksize() == PageSize::Large.bytes() as u64,
        ) {
            (false, _) => PageSize::Base,
            (true, true) => PageSize::Large,
            (true, false) => return Err(io::ErrorKind::InvalidInput.into()),
        };
        Ok(MemoryObject {
            page,
            pages: metadata.len() / page.bytes() as u64,
            id: FileId {
                device: metadata.dev(),
                inode: metadata.ino(),
            },
            file,
        })
    }

    /// All its pages.
    pub fn whole(&self) -> VirtRange {
        VirtRange::new(VirtPage(0), VirtPage(self.pages))
    }

    /// Size of its pages.
    pub fn page_size(&self) -> PageSize {
        self.page
    }

    /// Its size.
    pub fn bytes(&self) -> Bytes {
        PageCount(self.pages * self.page.base_pages()).bytes()
    }

    /// The byte at which a page begins.
    fn offset(&self, page: VirtPage) -> u64 {
        page.0 * self.page.bytes() as u64
    }

    /// Its name in texts of mappings.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Memory that it has now.
    pub fn allocated(&self) -> io::Result<Bytes> {
        Ok(Bytes(self.file.metadata()?.blocks() * 512))
    }

    /// Reads whole pages from `at` on. A hole reads as zeros.
    pub fn read(&self, at: VirtPage, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, self.offset(at))
    }

    /// Reads words, a page of them at most, from the byte `at` on. A hole reads as zeros.
    pub fn read_words(&self, at: u64, words: &mut [u64]) -> io::Result<()> {
        let mut room = [0; BASE_PAGE_BYTES];
        let bytes = room.get_mut(..size_of_val(words));
        let bytes = bytes.ok_or(io::ErrorKind::InvalidInput)?;
        self.file.read_exact_at(bytes, at)?;
        let (read, _) = bytes.as_chunks::<8>();
        for (word, bytes) in words.iter_mut().zip(read) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Ok(())
    }

    /// Takes pages away from every process that maps them. No userfaultfd hears of it, and threads
    /// that wait there go on waiting.
    pub fn punch(&self, range: VirtRange) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (from, end) = (self.offset(range.start), self.offset(range.end));
        let bytes = end - from;
        Ok(rustix::fs::fallocate(&self.file, flags, from, bytes)?)
    }

    /// The first pages that are there at `from` or behind it. `None`: there are none. Of base pages
    /// only, as all that seek: the kernel says that every large page is there.
    pub fn data(&self, from: VirtPage) -> io::Result<Option<VirtRange>> {
        let start = self.seek(SeekFrom::Data(from.address()))?;
        let end = start.and_then(|start| self.first_hole(start).transpose());
        let range = |end| VirtRange::new(start.unwrap_or(end), end);
        end.transpose().map(|end| end.map(range))
    }

    /// The first page that is there, at `from` or behind it. `None`: there is none. Holes cost
    /// little.
    pub fn first_data(&self, from: VirtPage) -> io::Result<Option<VirtPage>> {
        self.seek(SeekFrom::Data(from.address()))
    }

    /// The first page that is not there, at `from` or behind it; the end counts. `None`: `from` is
    /// not before the end. Cost: O(pages between).
    pub fn first_hole(&self, from: VirtPage) -> io::Result<Option<VirtPage>> {
        self.seek(SeekFrom::Hole(from.address()))
    }

    /// The offset is of this descriptor alone. One thread at a time uses it.
    fn seek(&self, to: SeekFrom) -> io::Result<Option<VirtPage>> {
        match rustix::fs::seek(&self.file, to) {
            Ok(offset) => Ok(Some(VirtPage::of(offset))),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for MemoryObject {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_there_are_found_and_others_read_as_zeros() {
        let memfd = create("uc-test-object", Bytes(5 * 4096 - 1), PageSize::Base).expect("a memfd");
        assert!(rustix::fs::ftruncate(&memfd, 0).is_err(), "it is sealed");
        let object = MemoryObject::of(memfd.as_fd()).expect("it opens anew");
        let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
        assert_eq!(object.whole(), range(0, 5));
        let data = |from| object.data(VirtPage(from)).expect("it seeks");
        assert_eq!(data(0), None);
        let file = File::from(memfd);
        for page in [1, 2, 4] {
            let at = page * BASE_PAGE_BYTES as u64;
            file.write_all_at(&[page as u8; 7], at).expect("written");
        }
        assert_eq!(
            [0, 2, 3].map(data),
            [(1, 3), (2, 3), (4, 5)].map(|(a, b)| Some(range(a, b)))
        );
        let hole = |from| object.first_hole(VirtPage(from)).expect("it seeks");
        assert_eq!(
            [0, 1, 4, 5].map(hole),
            [Some(0), Some(3), Some(5), None].map(|page| page.map(VirtPage))
        );
        let first = |from| object.first_data(VirtPage(from)).expect("it seeks");
        assert_eq!(
            [0, 3, 5].map(first),
            [Some(VirtPage(1)), Some(VirtPage(4)), None]
        );
        assert_eq!(object.allocated().expect("a size"), Bytes(3 * 4096));
        let mut pages = [9; 2 * BASE_PAGE_BYTES];
        object.read(VirtPage(2), &mut pages).expect("read");
        assert_eq!((pages[0], pages[6], pages[7], pages[4096]), (2, 2, 0, 0));
        let mut words = [9; 3];
        object.read_words(2 * 4096 - 8, &mut words).expect("read");
        assert_eq!(words, [0, 0x0002_0202_0202_0202, 0]);
        assert!(object.read_words(0, &mut [0; 513]).is_err());
        assert!(object.read_words(5 * 4096 - 8, &mut words).is_err());
        object.punch(range(0, 2)).expect("punched");
        assert_eq!((data(0), data(5)), (Some(range(2, 3)), None));
        assert_eq!(object.allocated().expect("a size"), Bytes(2 * 4096));
    }
}
