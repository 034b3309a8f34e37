//! Client memory by the kernel's rules: address spaces, page tables, frames shared after a fork,
//! and the answers of userfaultfd's ioctls.
//!
//! A frame may be in the kernel's swap. Each access then brings it back, without a message.
//!
//! Not modelled: write protection, huge pages, memory limits of the kernel, partial results of a
//! range ioctl.

use std::collections::BTreeMap;

use undercroft_base::{VirtPage, VirtRange};

use crate::content::Content;

/// An address space of the fake kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mm(pub usize);

/// Why a page was not installed (UFFDIO_COPY, ZEROPAGE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotInstalled {
    /// EEXIST: a page is there.
    Exists,
    /// ENOENT: nothing registered is mapped there, or the space is gone.
    NotMapped,
    /// EAGAIN: a layout event waits to be read.
    LayoutChanging,
    /// ENOMEM: no memory for a page just now. This memory never runs out; a test may return it.
    NoMemory,
}

/// Why a page was not moved out (UFFDIO_MOVE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveRefusal {
    /// EBUSY: pinned, or the frame is shared with another space.
    Busy,
    /// No page is there (a hole, or a poison mark).
    Missing,
    /// Nothing registered is mapped there, or the space is gone.
    NotMapped,
    /// EAGAIN: a layout event waits to be read.
    LayoutChanging,
}

/// The outcome of an access by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// The page held this, before the write if it was one.
    Done(Content),
    /// The thread stops and a fault message is sent.
    Fault,
    /// Nothing is mapped there.
    Segv,
    /// The page is poisoned: SIGBUS.
    Poisoned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Here {
    Absent,
    Frame(usize),
    Poison,
}

/// The advice for a mapped page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// Registered with userfaultfd.
    pub registered: bool,
    /// `MADV_WIPEONFORK`.
    pub wipe_on_fork: bool,
    /// `MADV_DONTFORK`.
    pub dont_fork: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pte {
    advice: Advice,
    here: Here,
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    maps: u32,
    content: Content,
    pinned: bool,
    swapped: bool,
}

#[derive(Debug, Default)]
struct Space {
    pages: BTreeMap<VirtPage, Pte>,
    changing: u32,
}

/// The fake kernel.
#[derive(Debug, Default)]
pub struct Memory {
    spaces: BTreeMap<Mm, Space>,
    next: usize,
    frames: Vec<Frame>,
    free: Vec<usize>,
}

impl Memory {
    /// A new, empty address space.
    pub fn add(&mut self) -> Mm {
        self.next += 1;
        self.spaces.insert(Mm(self.next), Space::default());
        Mm(self.next)
    }

    /// True until the space exits.
    pub fn has(&self, mm: Mm) -> bool {
        self.spaces.contains_key(&mm)
    }

    fn pte(&mut self, mm: Mm, page: VirtPage) -> Option<&mut Pte> {
        self.spaces.get_mut(&mm)?.pages.get_mut(&page)
    }

    fn frame(&mut self, content: Content) -> usize {
        let frame = Frame {
            maps: 1,
            content,
            pinned: false,
            swapped: false,
        };
        match self.free.pop() {
            Some(at) => {
                self.frames[at] = frame;
                at
            }
            None => {
                self.frames.push(frame);
                self.frames.len() - 1
            }
        }
    }

    fn put(&mut self, here: Here) {
        if let Here::Frame(at) = here {
            self.frames[at].maps -= 1;
            if self.frames[at].maps == 0 {
                self.free.push(at);
            }
        }
    }

    /// Maps fresh private anonymous memory over `range`, unregistered. It replaces what was there.
    pub fn map(&mut self, mm: Mm, range: VirtRange) {
        self.unmap(mm, range);
        let space = self.spaces.get_mut(&mm).expect("space");
        for page in range.pages() {
            space.pages.insert(
                page,
                Pte {
                    advice: Advice::default(),
                    here: Here::Absent,
                },
            );
        }
    }

    /// Changes the advice for the mapped pages of `range`.
    pub fn advise(&mut self, mm: Mm, range: VirtRange, change: impl Fn(&mut Advice)) {
        for page in range.pages() {
            if let Some(pte) = self.pte(mm, page) {
                change(&mut pte.advice);
            }
        }
    }

    /// The advice for the page; `None` when it is not mapped.
    pub fn advice(&self, mm: Mm, page: VirtPage) -> Option<Advice> {
        Some(self.spaces.get(&mm)?.pages.get(&page)?.advice)
    }

    /// Removes the mapping.
    pub fn unmap(&mut self, mm: Mm, range: VirtRange) {
        for page in range.pages() {
            let space = self.spaces.get_mut(&mm).expect("space");
            if let Some(pte) = space.pages.remove(&page) {
                self.put(pte.here);
            }
        }
    }

    /// Drops contents and poison marks; the pages stay mapped.
    pub fn zap(&mut self, mm: Mm, range: VirtRange) {
        for page in range.pages() {
            if let Some(pte) = self.pte(mm, page) {
                let here = std::mem::replace(&mut pte.here, Here::Absent);
                self.put(here);
            }
        }
    }

    /// Moves the mapping; with `keep_old` (DONTUNMAP) the old range stays mapped, empty.
    pub fn remap(&mut self, mm: Mm, from: VirtRange, to: VirtPage, keep_old: bool) {
        self.unmap(mm, VirtRange::new(to, to.plus(from.count().0)));
        for page in from.pages() {
            let space = self.spaces.get_mut(&mm).expect("space");
            let Some(pte) = space.pages.remove(&page) else {
                continue;
            };
            if keep_old {
                let here = Here::Absent;
                space.pages.insert(page, Pte { here, ..pte });
            }
            space.pages.insert(to.plus(page.0 - from.start.0), pte);
        }
    }

    /// Copies the space; frames are shared until written.
    pub fn fork(&mut self, mm: Mm) -> Mm {
        let child = self.add();
        let pages = self.spaces[&mm].pages.clone();
        let mut copied = BTreeMap::new();
        for (page, pte) in pages {
            if pte.advice.dont_fork {
                continue;
            }
            let here = match pte.here {
                _ if pte.advice.wipe_on_fork => Here::Absent,
                Here::Frame(at) if self.frames[at].pinned => {
                    let content = self.frames[at].content;
                    Here::Frame(self.frame(content)) // pinned pages are copied at the fork
                }
                Here::Frame(at) => {
                    self.frames[at].maps += 1;
                    pte.here
                }
                here => here,
            };
            copied.insert(page, Pte { here, ..pte });
        }
        self.spaces.get_mut(&child).expect("child").pages = copied;
        child
    }

    /// The space is gone.
    pub fn exit(&mut self, mm: Mm) {
        let space = self.spaces.remove(&mm).expect("space");
        for pte in space.pages.into_values() {
            self.put(pte.here);
        }
    }

    /// A layout event waits to be read: installs and moves are refused.
    pub fn begin_change(&mut self, mm: Mm) {
        self.spaces.get_mut(&mm).expect("space").changing += 1;
    }

    /// The event was read.
    pub fn end_change(&mut self, mm: Mm) {
        self.spaces.get_mut(&mm).expect("space").changing -= 1;
    }

    /// True while a layout event waits to be read.
    pub fn is_changing(&self, mm: Mm) -> bool {
        self.spaces
            .get(&mm)
            .is_some_and(|space| space.changing != 0)
    }

    /// The program reads the page, or writes it when `write` is given.
    pub fn touch(&mut self, mm: Mm, page: VirtPage, write: Option<Content>) -> Touch {
        let Some(pte) = self.pte(mm, page).copied() else {
            return Touch::Segv;
        };
        let at = match pte.here {
            Here::Frame(at) => at,
            Here::Poison => return Touch::Poisoned,
            Here::Absent if pte.advice.registered => return Touch::Fault,
            Here::Absent => {
                let at = self.frame(Content::ZERO);
                self.pte(mm, page).expect("mapped").here = Here::Frame(at);
                at
            }
        };
        self.frames[at].swapped = false;
        let before = self.frames[at].content;
        if let Some(content) = write {
            self.break_sharing(mm, page);
            let Some(Here::Frame(at)) = self.pte(mm, page).map(|pte| pte.here) else {
                unreachable!("it was there");
            };
            self.frames[at].content = content;
        }
        Touch::Done(before)
    }

    /// MADV_POPULATE_WRITE on a present page: gives it its own frame, with the same bytes. True if
    /// it was shared.
    pub fn break_sharing(&mut self, mm: Mm, page: VirtPage) -> bool {
        let Some(Here::Frame(at)) = self.pte(mm, page).map(|pte| pte.here) else {
            return false;
        };
        if self.frames[at].maps < 2 {
            return false;
        }
        let content = self.frames[at].content;
        self.frames[at].maps -= 1;
        let own = self.frame(content);
        self.pte(mm, page).expect("mapped").here = Here::Frame(own);
        true
    }

    /// UFFDIO_COPY or ZEROPAGE.
    pub fn install(
        &mut self,
        mm: Mm,
        page: VirtPage,
        content: Content,
    ) -> Result<(), NotInstalled> {
        self.may_install(mm, page)?;
        let at = self.frame(content);
        self.pte(mm, page).expect("mapped").here = Here::Frame(at);
        Ok(())
    }

    /// The answer that [`Memory::install`] would give.
    pub fn may_install(&mut self, mm: Mm, page: VirtPage) -> Result<(), NotInstalled> {
        if self.is_changing(mm) {
            return Err(NotInstalled::LayoutChanging);
        }
        match self.pte(mm, page) {
            Some(pte) if pte.advice.registered => match pte.here {
                Here::Absent => Ok(()),
                _ => Err(NotInstalled::Exists),
            },
            _ => Err(NotInstalled::NotMapped),
        }
    }

    /// UFFDIO_POISON.
    pub fn poison(&mut self, mm: Mm, page: VirtPage) -> Result<(), NotInstalled> {
        self.may_install(mm, page)?;
        self.pte(mm, page).expect("mapped").here = Here::Poison;
        Ok(())
    }

    /// UFFDIO_MOVE into the staging area: the bytes leave the page.
    pub fn move_out(&mut self, mm: Mm, page: VirtPage) -> Result<Content, MoveRefusal> {
        if self.is_changing(mm) {
            return Err(MoveRefusal::LayoutChanging);
        }
        let Some(pte) = self.pte(mm, page).filter(|pte| pte.advice.registered) else {
            return Err(MoveRefusal::NotMapped);
        };
        let Here::Frame(at) = pte.here else {
            return Err(MoveRefusal::Missing);
        };
        let frame = self.frames[at];
        if frame.pinned || frame.maps > 1 {
            return Err(MoveRefusal::Busy);
        }
        self.zap(mm, VirtRange::new(page, page.plus(1)));
        Ok(frame.content)
    }

    /// A device holds (or releases) the page's frame. False if there is no frame, or it is shared.
    pub fn pin(&mut self, mm: Mm, page: VirtPage, on: bool) -> bool {
        match self.pte(mm, page).map(|pte| pte.here) {
            Some(Here::Frame(at)) if self.frames[at].maps == 1 => {
                self.frames[at].swapped = false;
                self.frames[at].pinned = on;
                true
            }
            _ => false,
        }
    }

    /// The kernel swaps the page's frame out. False if there is none, or a device holds it.
    pub fn swap_out(&mut self, mm: Mm, page: VirtPage) -> bool {
        let frame = self.frame_of(mm, page).map(|at| &mut self.frames[at]);
        let frame = frame.filter(|frame| !frame.pinned);
        frame.is_some_and(|frame| {
            frame.swapped = true;
            true
        })
    }

    /// True when the page's frame is in the kernel's swap: `pagemap` shows no page then.
    pub fn is_swapped(&self, mm: Mm, page: VirtPage) -> bool {
        self.frame_of(mm, page)
            .is_some_and(|at| self.frames[at].swapped)
    }

    /// True when the page has a frame, which may be in the kernel's swap.
    pub fn is_present(&self, mm: Mm, page: VirtPage) -> bool {
        self.frame_of(mm, page).is_some()
    }

    /// True if the page is mapped and has neither a frame nor a poison mark.
    pub fn is_absent(&self, mm: Mm, page: VirtPage) -> bool {
        let space = self.spaces.get(&mm);
        space
            .and_then(|space| space.pages.get(&page))
            .is_some_and(|pte| pte.here == Here::Absent)
    }

    /// True when the page's frame is mapped in another space too.
    pub fn is_shared(&self, mm: Mm, page: VirtPage) -> bool {
        self.frame_of(mm, page)
            .is_some_and(|at| self.frames[at].maps > 1)
    }

    /// True when a device holds the page's frame.
    pub fn is_pinned(&self, mm: Mm, page: VirtPage) -> bool {
        self.frame_of(mm, page)
            .is_some_and(|at| self.frames[at].pinned)
    }

    /// The content of a present page, without touching it.
    pub fn peek(&self, mm: Mm, page: VirtPage) -> Option<Content> {
        Some(self.frames[self.frame_of(mm, page)?].content)
    }

    fn frame_of(&self, mm: Mm, page: VirtPage) -> Option<usize> {
        match self.spaces.get(&mm)?.pages.get(&page)?.here {
            Here::Frame(at) => Some(at),
            _ => None,
        }
    }

    /// Mapped pages of a space, ascending, with their advice.
    pub fn pages(&self, mm: Mm) -> impl Iterator<Item = (VirtPage, Advice)> {
        let space = self.spaces.get(&mm);
        space
            .into_iter()
            .flat_map(|space| space.pages.iter().map(|(page, pte)| (*page, pte.advice)))
    }

    /// How many pages are mapped.
    pub fn mapped(&self, mm: Mm) -> usize {
        self.spaces.get(&mm).map_or(0, |space| space.pages.len())
    }

    /// Frames in use, of all spaces.
    pub fn frames_used(&self) -> usize {
        self.frames.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(from: u64, to: u64) -> VirtRange {
        VirtRange::new(VirtPage(from), VirtPage(to))
    }

    fn registered() -> (Memory, Mm) {
        let mut memory = Memory::default();
        let mm = memory.add();
        memory.map(mm, range(0, 8));
        memory.advise(mm, range(0, 8), |advice| advice.registered = true);
        (memory, mm)
    }

    #[test]
    fn forked_frames_are_shared_until_one_side_writes() {
        let (mut memory, mm) = registered();
        memory.install(mm, VirtPage(1), Content(5)).unwrap();
        let child = memory.fork(mm);
        assert_eq!(memory.move_out(mm, VirtPage(1)), Err(MoveRefusal::Busy));
        memory.touch(mm, VirtPage(1), Some(Content(6)));
        assert_eq!(
            memory.touch(child, VirtPage(1), None),
            Touch::Done(Content(5))
        );
        assert_eq!(memory.move_out(mm, VirtPage(1)), Ok(Content(6)));
        memory.exit(mm);
        memory.exit(child);
        assert_eq!(memory.frames_used(), 0);
    }

    #[test]
    fn installs_and_moves_are_refused_while_an_event_waits() {
        let (mut memory, mm) = registered();
        memory.begin_change(mm);
        assert_eq!(
            memory.install(mm, VirtPage(1), Content(5)),
            Err(NotInstalled::LayoutChanging)
        );
        memory.end_change(mm);
        assert_eq!(memory.install(mm, VirtPage(1), Content(5)), Ok(()));
        assert_eq!(
            memory.install(mm, VirtPage(1), Content(5)),
            Err(NotInstalled::Exists)
        );
        assert_eq!(
            memory.install(mm, VirtPage(9), Content(5)),
            Err(NotInstalled::NotMapped)
        );
        assert_eq!(memory.touch(mm, VirtPage(9), None), Touch::Segv);
    }

    #[test]
    fn wiped_and_unforked_pages_do_not_reach_the_child() {
        let (mut memory, mm) = registered();
        for page in 0..3 {
            memory
                .install(mm, VirtPage(page), Content(page + 1))
                .unwrap();
        }
        memory.advise(mm, range(0, 1), |advice| advice.wipe_on_fork = true);
        memory.advise(mm, range(1, 2), |advice| advice.dont_fork = true);
        let child = memory.fork(mm);
        assert_eq!(memory.touch(child, VirtPage(0), None), Touch::Fault);
        assert_eq!(memory.touch(child, VirtPage(1), None), Touch::Segv);
        assert!(memory.is_shared(child, VirtPage(2)));
    }

    #[test]
    fn remapped_pages_keep_contents_and_dontunmap_leaves_holes() {
        let (mut memory, mm) = registered();
        memory.install(mm, VirtPage(2), Content(9)).unwrap();
        memory.remap(mm, range(0, 4), VirtPage(100), true);
        assert_eq!(memory.peek(mm, VirtPage(102)), Some(Content(9)));
        assert_eq!(memory.touch(mm, VirtPage(2), None), Touch::Fault);
    }
}
