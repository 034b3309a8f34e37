//! Asks the kernel for one mapping of another process: by PROCMAP_QUERY on `/proc/PID/maps` (Linux
//! 6.11), or by reading the text where the query is missing.
//!
//! The answer is true at the moment of the call. The process may change its mappings right after.

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use undercroft_base::{VirtPage, VirtRange};

use crate::ioctl;
use crate::procfs::{self, Vma};

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<Query>() == 104);

const PROCMAP_QUERY: u64 = ioctl::read_write::<Query>('f' as u32, 17);
/// The mapping that covers the address, or else the next one.
const COVERING_OR_NEXT: u64 = 1 << 4;

/// Names of anonymous mappings are shorter (`[anon:` and 80 bytes).
const NAME_BYTES: usize = 128;

/// A mapping of a process, as `/proc` shows it, with what decides whether it can be managed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Its pages: the whole mapping.
    pub range: VirtRange,
    /// Private anonymous memory: [`Vma::is_private_anonymous`].
    pub private_anonymous: bool,
    /// The program may write there now. The kernel moves no page of another mapping.
    pub writable: bool,
}

/// An open `/proc/PID/maps`. It belongs to the address space that it was opened on.
#[derive(Debug)]
pub struct Maps(File);

impl From<OwnedFd> for Maps {
    fn from(fd: OwnedFd) -> Maps {
        Maps(File::from(fd))
    }
}

impl AsFd for Maps {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Maps {
    /// Opens the maps of a process.
    pub fn open(pid: u32) -> io::Result<Maps> {
        Ok(Maps(File::open(format!("/proc/{pid}/maps"))?))
    }

    /// The mapping that holds `page`, or the first one above it; `None` when there is none.
    ///
    /// Errors: the address space is gone. Cost: about 1 us; below Linux 6.11 the whole text is
    /// read.
    pub fn at_or_above(&self, page: VirtPage) -> io::Result<Option<Mapping>> {
        let mut name = [0u8; NAME_BYTES];
        let mut query = Query {
            size: size_of::<Query>() as u64,
            query_flags: COVERING_OR_NEXT,
            query_addr: page.address(),
            vma_name_size: NAME_BYTES as u32,
            vma_name_addr: name.as_mut_ptr() as u64,
            ..Query::default()
        };
        match self.ask(&mut query) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return self.search(page),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ENAMETOOLONG) => {
                // A path of a file, whose name does not matter.
                (query.vma_name_size, query.vma_name_addr) = (0, 0);
                self.ask(&mut query)?;
                query.inode = query.inode.max(1);
            }
            Err(error) => return Err(error),
        }
        let length = (query.vma_name_size as usize).clamp(1, NAME_BYTES) - 1; // with its NUL
        let vma = Vma {
            range: VirtRange::of_addresses(query.vma_start, query.vma_end),
            read: query.vma_flags & 1 != 0,
            write: query.vma_flags & 1 << 1 != 0,
            exec: query.vma_flags & 1 << 2 != 0,
            shared: query.vma_flags & 1 << 3 != 0,
            inode: query.inode,
            name: std::str::from_utf8(&name[..length]).unwrap_or("?"),
        };
        Ok(Some(Mapping::of(&vma)))
    }

    fn ask(&self, query: &mut Query) -> io::Result<()> {
        // SAFETY: PROCMAP_QUERY takes `struct procmap_query`. The kernel writes at most
        // `vma_name_size` bytes to `vma_name_addr`, which is 0 or a live local of the caller that
        // is not borrowed meanwhile.
        unsafe { ioctl::call(self.0.as_fd(), PROCMAP_QUERY, query) }?;
        Ok(())
    }

    /// As [`Maps::at_or_above`], by reading.
    fn search(&self, page: VirtPage) -> io::Result<Option<Mapping>> {
        let mut text = String::new();
        let mut file = &self.0;
        file.rewind()?;
        procfs::read_text(&mut file, &mut text)?;
        let vma = text.lines().filter_map(Vma::parse);
        Ok(vma
            .map(|vma| Mapping::of(&vma))
            .find(|mapping| mapping.range.end > page))
    }
}

impl Mapping {
    fn of(vma: &Vma<'_>) -> Mapping {
        Mapping {
            range: vma.range,
            private_anonymous: vma.is_private_anonymous(),
            writable: vma.write,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process whose mappings do not change: it has answered, and waits for more to read.
    fn quiet() -> Child {
        let piped = Stdio::piped;
        let spawned = Command::new("cat").stdin(piped()).stdout(piped()).spawn();
        let mut cat = spawned.expect("cat runs");
        cat.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        cat.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        cat
    }

    #[test]
    fn the_query_says_what_the_text_says() {
        let mut process = quiet();
        let maps = Maps::open(process.id()).unwrap();
        let mut text = String::new();
        procfs::read_maps(process.id(), &mut text).unwrap();
        let mut compared = 0;
        for vma in text.lines().filter_map(Vma::parse) {
            if vma.name != "[vsyscall]" {
                let mapping = Some(Mapping::of(&vma));
                assert_eq!(
                    maps.at_or_above(vma.range.start).unwrap(),
                    mapping,
                    "{vma:?}"
                );
                assert_eq!(maps.search(vma.range.start).unwrap(), mapping, "{vma:?}");
                compared += 1;
            }
        }
        assert!(compared > 10, "only {compared} mappings were compared");
        assert_eq!(maps.search(VirtPage(u64::MAX >> 12)).unwrap(), None);
        assert_eq!(maps.at_or_above(VirtPage(1 << 36)).unwrap(), None);
        drop(process.stdin.take()); // it ends
        process.wait().unwrap();
    }

    #[test]
    fn a_hole_answers_with_the_next_mapping() {
        let maps = Maps::open(std::process::id()).unwrap();
        let first = maps.at_or_above(VirtPage(0)).unwrap().unwrap();
        assert!(first.range.start > VirtPage(0));
        assert_eq!(maps.at_or_above(first.range.start).unwrap(), Some(first));
    }
}
