//! Findings of the scans of one address space, or of a guest: what was used since the scan before,
//! and how long each page has not been used.

use std::collections::HashMap;
use std::time::Duration;

use undercroft_base::{BASE_PAGE_BYTES, Nanos, VirtPage, VirtRange};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_proto::report::Ages;
use undercroft_sys::access::{BLOCK_PAGES, BlockScan};

/// Most pages of a run that is named to leave: as many as a batch beside another may have.
const NAMED_PAGES: u64 = 32;
const _: () = assert!(NAMED_PAGES as usize <= EVICT_PAGES_MAX / 2);

/// Findings of the last scan in a block.
struct Block {
    /// The frames of its pages at the last scan: 0 = none.
    frames: [u8; BLOCK_PAGES as usize],
    /// When that was, in [`TICK`]s since the start.
    looked: u32,
    /// When each page was seen used, or came, in [`TICK`]s since the start. Empty: ages are
    /// not asked for.
    used: Vec<u32>,
}

/// Resolution of ages.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// Findings of the last scan in an address space. Blocks without resident pages are left out.
#[derive(Default)]
pub(super) struct Last {
    blocks: HashMap<VirtPage, Box<Block>>,
}

impl Last {
    /// Appends the pages of `block` that were used since the last scan, and remembers the block.
    ///
    /// * `now`: the time in [`TICK`]s; `None`: ages are not remembered.
    pub(super) fn used(
        &mut self,
        block: &BlockScan,
        now: Option<u32>,
        next: &mut Last,
        out: &mut Vec<VirtPage>,
    ) {
        let mut kept = self.blocks.remove(&block.start).unwrap_or_else(|| {
            Box::new(Block {
                frames: [0; BLOCK_PAGES as usize],
                looked: 0,
                used: now.map_or(Vec::new(), |now| vec![now; BLOCK_PAGES as usize]),
            })
        });
        for (at, frame) in block.frames.iter().enumerate() {
            let stays = *frame != 0 && *frame == kept.frames[at];
            let used = block.is_accessed(at);
            if stays && used {
                out.push(block.start.plus(at as u64));
            }
            if let Some(last) = kept.used.get_mut(at)
                && (used || !stays)
            {
                *last = now.unwrap_or_default();
            }
        }
        kept.frames = block.frames;
        kept.looked = now.unwrap_or_default();
        next.blocks.insert(block.start, kept);
    }

    /// The frames of a block's pages at the last scan.
    pub(super) fn frames(&self, start: VirtPage) -> [u8; BLOCK_PAGES as usize] {
        let none = [0; BLOCK_PAGES as usize];
        self.blocks.get(&start).map_or(none, |block| block.frames)
    }

    /// Bytes of what is remembered.
    pub(super) fn bytes(&self) -> u64 {
        let all = self.blocks.values();
        all.map(|of| (size_of::<(VirtPage, Block)>() + 4 * of.used.len()) as u64)
            .sum()
    }

    /// Counts the pages in memory by age.
    pub(super) fn add_to(&self, ages: &mut Ages) {
        for block in self.blocks.values() {
            for (frame, last) in block.frames.iter().zip(&block.used) {
                if *frame != 0 {
                    let age =
                        u64::from(block.looked.saturating_sub(*last)) * TICK.as_nanos() as u64;
                    ages.add(Nanos(age), BASE_PAGE_BYTES as u64);
                }
            }
        }
    }

    /// The pages in memory that had not been used for `older` at the last look at them, in runs of
    /// at most [`NAMED_PAGES`], in ascending order.
    pub(super) fn unused_for(&self, older: Duration) -> impl Iterator<Item = VirtRange> {
        let mut blocks: Vec<_> = self.blocks.iter().collect();
        blocks.sort_unstable_by_key(|(start, _)| **start);
        let all = blocks.into_iter();
        all.flat_map(move |(start, block)| block.unused_for(*start, older))
    }
}

impl Block {
    /// * `start`: its first page.
    fn unused_for(&self, start: VirtPage, older: Duration) -> Vec<VirtRange> {
        let mut runs: Vec<VirtRange> = Vec::new();
        let Some(until) = used_before(self.looked, older) else {
            return runs;
        };
        for (at, last) in self.used.iter().enumerate() {
            if self.frames[at] == 0 || *last > until {
                continue;
            }
            let page = start.plus(at as u64);
            match runs.last_mut() {
                Some(run) if run.end == page && run.count().0 < NAMED_PAGES => {
                    run.end = page.plus(1);
                }
                _ => runs.push(VirtRange::one(page)),
            }
        }
        runs
    }
}

/// When a page was last used that had not been used for `older` at a scan. `None`: there was no
/// run then. What was used after that scan is not known, so the time since it does not count.
fn used_before(scanned: u32, older: Duration) -> Option<u32> {
    let ticks = older.as_millis().div_ceil(TICK.as_millis());
    scanned.checked_sub(u32::try_from(ticks).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(pages: &[(usize, u8, bool)]) -> BlockScan {
        let mut block = BlockScan {
            start: VirtPage(512),
            frames: [0; 512],
            accessed: [0; 8],
        };
        for (at, frame, accessed) in pages {
            block.frames[*at] = *frame;
            block.accessed[at / 64] |= u64::from(*accessed) << (at % 64);
        }
        block
    }

    #[test]
    fn a_page_is_used_from_the_second_scan_on_and_only_in_the_same_frame() {
        let mut last = Last::default();
        let mut scan = |pages: &[(usize, u8, bool)]| -> Vec<u64> {
            let (mut next, mut used) = (Last::default(), Vec::new());
            last.used(&block(pages), None, &mut next, &mut used);
            last = next;
            used.iter().map(|page| page.0 - 512).collect()
        };
        assert_eq!(scan(&[(1, 7, true), (2, 8, true), (3, 9, false)]), [0; 0]);
        // 2 left and came back; 4 is new; 3 is used for the first time.
        assert_eq!(
            scan(&[(1, 7, true), (2, 5, true), (3, 9, true), (4, 6, true)]),
            [1, 3]
        );
        assert_eq!(scan(&[(1, 7, false), (2, 5, true), (4, 6, true)]), [2, 4]);
        assert_eq!(scan(&[(3, 9, true)]), [0; 0], "it was away meanwhile");
    }

    #[test]
    fn time_since_the_last_scan_makes_no_page_old() {
        let ms = Duration::from_millis;
        assert_eq!(used_before(600, ms(60_000)), Some(0));
        assert_eq!(used_before(600, ms(59_901)), Some(0));
        assert_eq!(used_before(600, ms(1)), Some(599), "used at the scan: 600");
        assert_eq!(used_before(600, ms(60_001)), None);
        assert_eq!(used_before(600, Duration::MAX), None);
    }

    #[test]
    fn a_page_ages_from_its_arrival_and_from_each_use() {
        let mut last = Last::default();
        let mut scan = |now: u32, pages: &[(usize, u8, bool)]| {
            let mut next = Last::default();
            last.used(&block(pages), Some(now), &mut next, &mut Vec::new());
            last = next;
            let mut ages = Ages::default();
            last.add_to(&mut ages);
            let unused = |seconds: u64| -> Vec<(u64, u64)> {
                let runs = last.unused_for(Duration::from_secs(seconds));
                runs.map(|run| (run.start.0 - 512, run.count().0)).collect()
            };
            let pages = [0, 1].map(|at| ages.unused[at].bytes / 4096);
            (pages, unused(1), unused(10))
        };
        let four = [(1, 7, true), (2, 8, true), (3, 9, false), (4, 5, false)];
        assert_eq!(scan(1000, &four), ([0, 0], vec![], vec![]));
        // 1 is used; 2 has another frame; 3 and 4 are as they were, for a second.
        let next = [(1, 7, true), (2, 5, false), (3, 9, false), (4, 5, false)];
        assert_eq!(scan(1010, &next), ([2, 0], vec![(3, 2)], vec![]));
        let later = next.map(|(at, frame, _)| (at, frame, false));
        assert_eq!(scan(1109, &later), ([4, 2], vec![(1, 4)], vec![(3, 2)]));
        // 3 left, and another page is in its place.
        let others = [(1, 7, false), (3, 9, false)];
        assert_eq!(
            scan(1110, &others[..1]),
            ([1, 1], vec![(1, 1)], vec![(1, 1)])
        );
        assert_eq!(scan(1200, &others), ([1, 1], vec![(1, 1)], vec![(1, 1)]));
        let all: Vec<_> = (0..512).map(|at| (at, 1, false)).collect();
        let _ = scan(1300, &all);
        assert_eq!(scan(1310, &all).1.len(), 16, "a run has 32 pages at most");
    }
}
