//! Contents that every page of every space must have. Kept apart from the world, which never writes
//! it.

use std::collections::HashMap;

use undercroft_base::{VirtPage, VirtRange};

use crate::content::Content;
use crate::memory::Mm;

/// The content that a page must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Exactly this.
    Reads(Content),
    /// Its only copy is damaged, and the damage was found. A read is an error, never bytes.
    Error,
}

/// Knows what every page must contain. A page that was never written reads as zeros.
#[derive(Debug, Default)]
pub struct Oracle {
    pages: HashMap<(Mm, VirtPage), Expect>,
    /// Content that may come back where zeros are expected.
    returning: HashMap<(Mm, VirtPage), Content>,
}

impl Oracle {
    /// The content that the page must have.
    pub fn expect(&self, mm: Mm, page: VirtPage) -> Expect {
        let zeros = Expect::Reads(Content::ZERO);
        self.pages.get(&(mm, page)).copied().unwrap_or(zeros)
    }

    /// The program wrote the page.
    pub fn write(&mut self, mm: Mm, page: VirtPage, content: Content) {
        self.returning.remove(&(mm, page));
        self.pages.insert((mm, page), Expect::Reads(content));
    }

    /// The page's copy is damaged.
    pub fn damage(&mut self, mm: Mm, page: VirtPage) {
        self.pages.insert((mm, page), Expect::Error);
    }

    /// The page reads as zeros from now on.
    pub fn zero(&mut self, mm: Mm, page: VirtPage) {
        self.returning.remove(&(mm, page));
        self.pages.remove(&(mm, page));
    }

    /// The page reads as zeros from now on. Once `content` has [returned], it reads as that, until
    /// it is written or dropped again.
    ///
    /// [returned]: Oracle::returned
    pub fn zero_or(&mut self, mm: Mm, page: VirtPage, content: Content) {
        self.zero(mm, page);
        if content != Content::ZERO {
            self.returning.insert((mm, page), content);
        }
    }

    /// `content` is about to be put where it may return. False if it may not.
    pub fn returned(&mut self, mm: Mm, page: VirtPage, content: Content) -> bool {
        let may = self.returning.get(&(mm, page)) == Some(&content);
        if may {
            self.write(mm, page, content);
        }
        may
    }

    /// Every content that may return, and where.
    pub fn returning(&self) -> Vec<(Mm, VirtPage, Content)> {
        let all = self.returning.iter();
        all.map(|((mm, page), content)| (*mm, *page, *content))
            .collect()
    }

    /// No content may return any more.
    pub fn forget_returning(&mut self) {
        self.returning.clear();
    }

    /// As [`Oracle::zero`], for every page of the range.
    pub fn zero_range(&mut self, mm: Mm, range: VirtRange) {
        for page in range.pages() {
            self.zero(mm, page);
        }
    }

    /// The contents moved.
    pub fn remap(&mut self, mm: Mm, from: VirtRange, to: VirtPage) {
        for page in from.pages() {
            let target = (mm, to.plus(page.0 - from.start.0));
            replace(&mut self.pages, (mm, page), target);
            replace(&mut self.returning, (mm, page), target);
        }
    }

    /// The child reads what the parent read.
    pub fn fork(&mut self, parent: Mm, child: Mm) {
        inherit(&mut self.pages, parent, child);
        inherit(&mut self.returning, parent, child);
    }

    /// The space is gone.
    pub fn exit(&mut self, mm: Mm) {
        self.pages.retain(|(of, _), _| *of != mm);
        self.returning.retain(|(of, _), _| *of != mm);
    }
}

/// Moves the contents of `from` to `to`.
fn replace<T>(pages: &mut HashMap<(Mm, VirtPage), T>, from: (Mm, VirtPage), to: (Mm, VirtPage)) {
    match pages.remove(&from) {
        Some(moved) => _ = pages.insert(to, moved),
        None => _ = pages.remove(&to),
    }
}

fn inherit<T: Copy>(pages: &mut HashMap<(Mm, VirtPage), T>, parent: Mm, child: Mm) {
    let copied: Vec<_> = pages
        .iter()
        .filter(|((mm, _), _)| *mm == parent)
        .map(|((_, page), value)| ((child, *page), *value))
        .collect();
    pages.extend(copied);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_return_does_so_once_and_until_the_page_is_written_or_dropped() {
        let (mm, child, page) = (Mm(1), Mm(2), VirtPage(7));
        let old = Content::numbered(3);
        let zeros = Expect::Reads(Content::ZERO);
        let mut oracle = Oracle::default();
        oracle.write(mm, page, old);
        oracle.zero_or(mm, page, old);
        assert_eq!(oracle.expect(mm, page), zeros);
        assert!(!oracle.returned(mm, page, Content::numbered(4)));
        oracle.fork(mm, child);
        oracle.remap(mm, VirtRange::new(page, page.plus(1)), VirtPage(70));
        assert!(!oracle.returned(mm, page, old), "it has moved");
        assert!(oracle.returned(mm, VirtPage(70), old));
        assert_eq!(oracle.expect(mm, VirtPage(70)), Expect::Reads(old));
        assert!(!oracle.returned(mm, VirtPage(70), old), "once");
        oracle.zero(child, page);
        assert!(!oracle.returned(child, page, old), "dropped again");
        oracle.zero_or(child, page, old);
        oracle.write(child, page, Content::numbered(5));
        assert!(!oracle.returned(child, page, old), "written again");
        oracle.zero_or(child, page, old);
        oracle.forget_returning();
        assert!(!oracle.returned(child, page, old));
        oracle.zero_or(child, page, Content::ZERO);
        assert!(!oracle.returned(child, page, Content::ZERO), "no news");
    }
}
