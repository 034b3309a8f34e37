//! The kernel's view of another process's pages: PAGEMAP_SCAN and `/proc/PID/pagemap` entries.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use undercroft_base::{VirtPage, VirtRange};

use crate::ioctl;

/// Categories of a page; a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Category(pub u64);

impl Category {
    /// Written since it was protected.
    pub const WRITTEN: Category = Category(1 << 1);
    /// File-backed or shared.
    pub const FILE: Category = Category(1 << 2);
    /// In memory.
    pub const PRESENT: Category = Category(1 << 3);
    /// In the kernel's swap, on the way between two frames, or a mark ([`PageIs`] tells which).
    pub const SWAPPED: Category = Category(1 << 4);
    /// The shared zero page.
    pub const PFNZERO: Category = Category(1 << 5);
    /// Part of a huge mapping.
    pub const HUGE: Category = Category(1 << 6);

    /// True when every bit of `other` is set.
    pub fn has(self, other: Category) -> bool {
        self.0 & other.0 == other.0
    }
}

#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGEMAP_SCAN: u64 = ioctl::read_write::<ScanArg>('f' as u32, 16);

/// A word of `/proc/PID/pagemap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagemapEntry(u64);

/// Where a page is, as its word of `/proc/PID/pagemap` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageIs {
    /// Nothing is there.
    Absent,
    /// In memory.
    Present,
    /// In the kernel's swap, or on the way between two frames. Also a [`PageIs::Mark`], if this
    /// reader may not see which it is.
    Swapped,
    /// A guard (`MADV_GUARD_INSTALL`). Linux 6.15 or newer says so.
    Guard,
    /// A mark that fails each access: poison, or a guard before Linux 6.15. Only a reader that had
    /// CAP_SYS_ADMIN when it opened the file sees it.
    Mark,
}

impl PagemapEntry {
    /// The entry of a word.
    pub const fn of(word: u64) -> PagemapEntry {
        PagemapEntry(word)
    }

    /// In memory.
    pub fn present(self) -> bool {
        self.0 >> 63 & 1 == 1
    }

    /// Write-protected by a userfaultfd.
    pub fn write_protected(self) -> bool {
        self.0 >> 57 & 1 == 1
    }

    /// Mapped by this process only: not shared with a fork relative.
    pub fn exclusive(self) -> bool {
        self.0 >> 56 & 1 == 1
    }

    /// Where the page is.
    pub fn place(self) -> PageIs {
        // Of a page that is not in memory, bits 0 to 4 are the type of its swap entry. The last
        // type is that of marks (`SWP_PTE_MARKER`).
        const MARKS: u64 = 31;
        let swapped = self.0 >> 62 & 1 == 1;
        match (self.present(), swapped) {
            (true, _) => PageIs::Present,
            (false, false) => PageIs::Absent,
            (false, true) if self.0 >> 58 & 1 == 1 => PageIs::Guard,
            (false, true) if self.0 & 31 == MARKS => PageIs::Mark,
            (false, true) => PageIs::Swapped,
        }
    }
}

/// An open `/proc/PID/pagemap`. Stays with the address space it was opened on: reads as empty after
/// exec or exit.
#[derive(Debug)]
pub struct Pagemap(File);

impl From<OwnedFd> for Pagemap {
    fn from(fd: OwnedFd) -> Pagemap {
        Pagemap(File::from(fd))
    }
}

impl AsFd for Pagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Pagemap {
    /// Opens the pagemap of a process.
    pub fn open(pid: u32) -> io::Result<Pagemap> {
        Ok(Pagemap(File::open(format!("/proc/{pid}/pagemap"))?))
    }

    /// Appends the sub-ranges of `range` whose pages are in any category of `any`, each with those
    /// categories. Cost: about 7 ns a page. Linux 6.7 or newer.
    pub fn scan(
        &self,
        range: VirtRange,
        any: Category,
        out: &mut Vec<(VirtRange, Category)>,
    ) -> io::Result<()> {
        let mut regions = [Region::default(); 256];
        let mut start = range.start.address();
        let end = range.end.address();
        while start < end {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                flags: 0,
                start,
                end,
                walk_end: 0,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                max_pages: 0,
                category_inverted: 0,
                category_mask: 0,
                category_anyof_mask: any.0,
                return_mask: any.0,
            };
            // SAFETY: PAGEMAP_SCAN takes `struct pm_scan_arg`; the kernel writes at most `vec_len`
            // regions into `regions`, which lives on this frame and is not otherwise borrowed
            // during the call.
            let count = unsafe { ioctl::call(self.0.as_fd(), PAGEMAP_SCAN, &mut arg) }?;
            for region in &regions[..count as usize] {
                let found = VirtRange::of_addresses(region.start, region.end);
                out.push((found, Category(region.categories)));
            }
            if arg.walk_end <= start {
                break;
            }
            start = arg.walk_end;
        }
        Ok(())
    }

    /// The first page of `range` that is in any category of `any`, if there is one. Empty page
    /// tables are skipped whole: a reservation of 1 TiB takes some microseconds.
    pub fn first(&self, range: VirtRange, any: Category) -> io::Result<Option<VirtPage>> {
        let mut found = Region::default();
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start: range.start.address(),
            end: range.end.address(),
            walk_end: 0,
            vec: std::ptr::from_mut(&mut found) as u64,
            vec_len: 1,
            max_pages: 1,
            category_inverted: 0,
            category_mask: 0,
            category_anyof_mask: any.0,
            return_mask: any.0,
        };
        // SAFETY: as in `scan`; `found` is a live local with room for the one region asked for.
        let count = unsafe { ioctl::call(self.0.as_fd(), PAGEMAP_SCAN, &mut arg) }?;
        Ok((count > 0).then(|| VirtPage::of(found.start)))
    }

    /// Where one page is. Absent if its process is gone.
    pub fn place(&self, page: VirtPage) -> io::Result<PageIs> {
        let mut word = [0; 8];
        let mut entries = self.entries(page, &mut word)?;
        Ok(entries.next().map_or(PageIs::Absent, PagemapEntry::place))
    }

    /// Reads the entries of up to `buffer.len() / 8` pages from `start`; returns how many.
    pub fn entries<'a>(
        &self,
        start: VirtPage,
        buffer: &'a mut [u8],
    ) -> io::Result<impl Iterator<Item = PagemapEntry> + 'a> {
        let got = self.0.read_at(buffer, start.0 * 8)?;
        let (words, _) = buffer[..got].as_chunks::<8>();
        Ok(words
            .iter()
            .map(|word| PagemapEntry(u64::from_ne_bytes(*word))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_by_the_words_of_linux() {
        for (word, place) in [
            (0, PageIs::Absent),
            (0x8180_0000_0001_fc00, PageIs::Present),
            // In swap file 0 at page 2: seen by root, and by another user.
            (0x4000_0000_0000_0040, PageIs::Swapped),
            (0x4000_0000_0000_0000, PageIs::Swapped),
            (0x4400_0000_0000_009f, PageIs::Guard),
            (0x4400_0000_0000_0000, PageIs::Guard),
            (0x4000_0000_0000_005f, PageIs::Mark),
        ] {
            assert_eq!(PagemapEntry::of(word).place(), place, "{word:#x}");
        }
    }
}
