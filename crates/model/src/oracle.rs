//! What every page of every space must read as, kept beside the world and never told by it.

use std::collections::HashMap;

use undercroft_base::{VirtPage, VirtRange};

use crate::content::Content;
use crate::memory::Mm;

/// What a page must read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Exactly this.
    Reads(Content),
    /// Its only copy was damaged and the damage was found: an error, never bytes.
    Error,
}

/// See the module. Pages never written read as zeros.
#[derive(Debug, Default)]
pub struct Oracle {
    pages: HashMap<(Mm, VirtPage), Expect>,
}

impl Oracle {
    /// What the page must read as.
    pub fn expect(&self, mm: Mm, page: VirtPage) -> Expect {
        let zeros = Expect::Reads(Content::ZERO);
        self.pages.get(&(mm, page)).copied().unwrap_or(zeros)
    }

    /// The program wrote the page.
    pub fn write(&mut self, mm: Mm, page: VirtPage, content: Content) {
        self.pages.insert((mm, page), Expect::Reads(content));
    }

    /// The page's copy is damaged.
    pub fn damage(&mut self, mm: Mm, page: VirtPage) {
        self.pages.insert((mm, page), Expect::Error);
    }

    /// The page reads as zeros from now on.
    pub fn zero(&mut self, mm: Mm, page: VirtPage) {
        self.pages.remove(&(mm, page));
    }

    /// ... every page of the range.
    pub fn zero_range(&mut self, mm: Mm, range: VirtRange) {
        for page in range.pages() {
            self.zero(mm, page);
        }
    }

    /// The contents moved.
    pub fn remap(&mut self, mm: Mm, from: VirtRange, to: VirtPage) {
        for page in from.pages() {
            let target = (mm, to.plus(page.0 - from.start.0));
            match self.pages.remove(&(mm, page)) {
                Some(expect) => _ = self.pages.insert(target, expect),
                None => _ = self.pages.remove(&target),
            }
        }
    }

    /// The child reads what the parent read.
    pub fn fork(&mut self, parent: Mm, child: Mm) {
        let copied: Vec<_> = self
            .pages
            .iter()
            .filter(|((mm, _), _)| *mm == parent)
            .map(|((_, page), expect)| ((child, *page), *expect))
            .collect();
        self.pages.extend(copied);
    }

    /// The space is gone.
    pub fn exit(&mut self, mm: Mm) {
        self.pages.retain(|(of, _), _| *of != mm);
    }
}
