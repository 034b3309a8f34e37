//! Copies of one plan that a device gives by one read: their items follow each other, and so do the
//! blocks that they are in. Several copies may be in one block, which is read once.
//!
//! ```text
//! items:   | 0 | 1 | 2 | 3 |      blocks read:  | a | b |
//! pages:   | a | b |   |   |  ->  | 0 | 1 | 2 | 3 |      items 0, 1 and 3 are in a, 2 in b
//! ```
//! The blocks arrive in the pages of the first items. The block of an item never lies behind the
//! item's own page. So from the last item to the first, each page can be made in its place.

use std::iter::Rev;
use std::ops::Range;
use std::os::fd::RawFd;

/// A read of one block or more.
#[derive(Clone, Copy, Debug)]
pub struct ReadRun {
    /// Descriptor that is read.
    pub fd: RawFd,
    /// Of the first block.
    pub offset: u64,
    /// The first item.
    pub first: usize,
    /// How many items.
    pub items: usize,
    /// How many blocks: no more than items.
    pub blocks: usize,
}

impl ReadRun {
    /// A read for one item.
    pub fn of(fd: RawFd, offset: u64, first: usize) -> ReadRun {
        ReadRun {
            fd,
            offset,
            first,
            items: 1,
            blocks: 1,
        }
    }

    /// Adds the next item, whose block is at `offset`. Returns in which item's page the block
    /// arrives. `None`: it takes a read of its own.
    ///
    /// * `most`: blocks of one read.
    pub fn join(
        &mut self,
        (fd, offset): (RawFd, u64),
        at: usize,
        block_bytes: u64,
        most: usize,
    ) -> Option<usize> {
        let behind = offset.checked_sub(self.offset)?;
        let block = usize::try_from(behind / block_bytes).ok()?;
        let follows = fd == self.fd && at == self.first + self.items;
        if !follows || block > self.blocks || block >= most || behind % block_bytes != 0 {
            return None;
        }
        self.items += 1;
        self.blocks = self.blocks.max(block + 1);
        Some(self.first + block)
    }

    /// Items of a read, in the order in which their pages are to be made.
    pub fn order(first: usize, items: usize) -> Rev<Range<usize>> {
        (first..first + items).rev()
    }

    /// Pages that the blocks arrive in.
    pub fn pages(&self) -> Range<usize> {
        self.first..self.first + self.blocks
    }
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;

    /// Items in random blocks of a device that gives its offsets: each page is made of its own
    /// block, although the blocks arrive in the pages of other items.
    #[test]
    fn each_page_is_made_before_its_block_is_overwritten() {
        for seed in 0..2000 {
            let mut random = Random::new(seed);
            let mut of = |_| 7 + random.below(6);
            let offsets: Vec<u64> = (0..20).map(&mut of).collect();
            let mut runs = vec![ReadRun::of(3, offsets[0], 0)];
            let mut block_at: Vec<usize> = (0..20).collect();
            for (at, offset) in offsets.iter().enumerate().skip(1) {
                let run = runs.last_mut().expect("the first");
                match run.join((3, *offset), at, 1, 20) {
                    Some(block) => block_at[at] = block,
                    None => runs.push(ReadRun::of(3, *offset, at)),
                }
            }
            let mut pages = vec![(0, false); 20];
            for run in &runs {
                for (at, offset) in run.pages().zip(run.offset..) {
                    pages[at] = (offset, false);
                }
                for at in ReadRun::order(run.first, run.items) {
                    let (offset, is_made) = pages[block_at[at]];
                    assert!(!is_made, "seed {seed}: {at} has lost its block");
                    pages[at] = (offset, true);
                }
            }
            assert!(runs.iter().map(|run| run.items).sum::<usize>() == 20);
            assert!(pages.iter().map(|page| page.0).eq(offsets), "seed {seed}");
        }
    }

    #[test]
    fn items_of_blocks_that_were_read_or_come_next_join_and_no_others() {
        let mut run = ReadRun::of(3, 40960, 5);
        let mut join = |place, at| run.join(place, at, 4096, 4);
        assert_eq!(join((3, 40960), 6), Some(5), "the same block");
        assert_eq!(join((3, 45056), 7), Some(6), "the next");
        assert_eq!(join((3, 40960), 8), Some(5), "one before");
        assert_eq!(join((3, 53248), 9), None, "one is left out");
        assert_eq!(join((3, 36864), 9), None, "before the first");
        assert_eq!(join((4, 49152), 9), None, "another file");
        assert_eq!(join((3, 49152), 10), None, "an item is left out");
        assert_eq!(join((3, 49152), 9), Some(7));
        assert_eq!(join((3, 53248), 10), Some(8));
        assert_eq!(join((3, 57344), 11), None, "too long");
        assert_eq!((run.pages(), run.items), (5..9, 6));
    }
}
