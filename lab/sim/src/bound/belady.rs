//! Belady's optimum: evicts the page whose next use is farthest away. No policy without prefetch
//! misses less.
//!
//! It is the optimum of *misses*, not of write-outs or time. Source: Belady, "A study of
//! replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966. It knows
//! the future from the trace: [`Future`] has, for every reference, the next use of its page. The
//! replay tells its position. It treats prefetched pages like all others.

use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use undercroft_base::{Bytes, PageCount, PageNo};
use undercroft_policy::reclaim::{Arrival, Reclaim, Shown, Verdict};

/// Never used again.
const NEVER: u32 = u32::MAX;

/// When each page is used next.
#[derive(Debug)]
pub struct Future {
    /// For each reference, the index of the next one to the same page.
    next: Vec<u32>,
    /// The first use of each page.
    first: Vec<u32>,
    /// The reference that the replay is at.
    position: AtomicU32,
}

impl Future {
    /// Reads the trace backwards.
    ///
    /// * `references`: `number << 1 | write`, fewer than 2^32 - 1.
    /// * `numbers`: larger than every page number.
    pub fn new(references: &[u32], numbers: u32) -> Future {
        assert!(
            references.len() < NEVER as usize,
            "too long for Belady's bound"
        );
        let mut first = vec![NEVER; numbers as usize];
        let mut next = vec![NEVER; references.len()];
        for (at, word) in references.iter().enumerate().rev() {
            let page = (word >> 1) as usize;
            next[at] = first[page];
            first[page] = at as u32;
        }
        Future {
            next,
            first,
            position: AtomicU32::new(NEVER),
        }
    }

    /// The replay is at this reference. Call it before the engine gets the reference.
    pub fn at(&self, position: usize) {
        self.position.store(position as u32, Ordering::Relaxed);
    }
}

/// Belady's MIN as a reclaim policy.
pub struct Belady {
    future: Arc<Future>,
    /// The next use of each page, seen from now.
    upcoming: Vec<u32>,
    resident: Vec<bool>,
    /// (next use, page). An entry is stale if the page is gone or its next use is another.
    queue: BinaryHeap<(u32, u32)>,
    aside: Vec<(u32, u32)>,
    count: u64,
}

impl Belady {
    /// Empty, at the start of the trace.
    pub fn new(future: Arc<Future>) -> Belady {
        Belady {
            upcoming: future.first.clone(),
            resident: vec![false; future.first.len()],
            queue: BinaryHeap::new(),
            aside: Vec::new(),
            count: 0,
            future,
        }
    }

    /// Advances the page's next use if that is now.
    fn note(&mut self, page: PageNo) {
        let position = self.future.position.load(Ordering::Relaxed);
        let upcoming = &mut self.upcoming[page.0 as usize];
        if *upcoming == position && position != NEVER {
            *upcoming = self.future.next[position as usize];
        }
    }

    fn enqueue(&mut self, page: PageNo) {
        if self.queue.len() as u64 > 4 * self.count + 1024 {
            let (upcoming, resident) = (&self.upcoming, &self.resident);
            self.queue.retain(|(use_at, page)| {
                resident[*page as usize] && upcoming[*page as usize] == *use_at
            });
        }
        self.queue.push((self.upcoming[page.0 as usize], page.0));
    }
}

impl Reclaim for Belady {
    fn insert(&mut self, page: PageNo, _arrival: Arrival) {
        let resident = &mut self.resident[page.0 as usize];
        assert!(!*resident, "{page:?} is inserted twice");
        *resident = true;
        self.count += 1;
        self.note(page);
        self.enqueue(page);
    }

    fn remove(&mut self, page: PageNo) {
        let resident = &mut self.resident[page.0 as usize];
        assert!(*resident, "{page:?} is not there");
        *resident = false;
        self.count -= 1;
    }

    fn touch(&mut self, page: PageNo, _write: bool) {
        if self.resident[page.0 as usize] {
            self.note(page);
            self.enqueue(page);
        }
    }

    fn select(
        &mut self,
        want: usize,
        scan_max: usize,
        verdict: &mut dyn FnMut(PageNo) -> Verdict,
        out: &mut Vec<PageNo>,
    ) {
        let (mut wanted, mut looks) = (want, scan_max);
        let mut last = None;
        while wanted > 0 && looks > 0 {
            let Some((use_at, page)) = self.queue.pop() else {
                break;
            };
            let at = page as usize;
            // The same entry may be there twice in a row: the page left and came back.
            let stale = !self.resident[at] || self.upcoming[at] != use_at;
            if stale || last == Some((use_at, page)) {
                continue;
            }
            last = Some((use_at, page));
            looks -= 1;
            match verdict(PageNo(page)) {
                Verdict::Take => {
                    self.remove(PageNo(page));
                    out.push(PageNo(page));
                    wanted -= 1;
                }
                Verdict::Skip => self.aside.push((use_at, page)),
            }
        }
        self.queue.extend(self.aside.drain(..));
    }

    /// Without its knowledge of the future.
    fn shown(&self) -> Shown {
        let pages = self.upcoming.capacity() * size_of::<u32>() + self.resident.capacity();
        let entries = self.queue.capacity() + self.aside.capacity();
        Shown {
            len: PageCount(self.count),
            metadata: Bytes((pages + entries * size_of::<(u32, u32)>()) as u64),
            choice: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_seeded::Random;

    /// The fewest possible misses, by trying every choice.
    fn least(references: &[u32], at: usize, resident: &mut Vec<u32>, room: usize) -> u32 {
        let Some(&page) = references.get(at) else {
            return 0;
        };
        if resident.contains(&page) {
            return least(references, at + 1, resident, room);
        }
        if resident.len() < room {
            resident.push(page);
            let best = 1 + least(references, at + 1, resident, room);
            resident.pop();
            return best;
        }
        let tries = (0..room).map(|victim| {
            let old = std::mem::replace(&mut resident[victim], page);
            let misses = 1 + least(references, at + 1, resident, room);
            resident[victim] = old;
            misses
        });
        tries.min().unwrap_or(0)
    }

    #[test]
    fn misses_equal_the_best_of_all_choices() {
        let mut random = Random::new(5);
        for round in 0..200 {
            let references: Vec<u32> = (0..14).map(|_| random.below(6) as u32).collect();
            let room = 1 + random.index(3);
            let words: Vec<u32> = references.iter().map(|page| page << 1).collect();
            let future = Arc::new(Future::new(&words, 6));
            let mut belady = Belady::new(future.clone());
            let mut misses = 0;
            for (at, page) in references.iter().enumerate() {
                future.at(at);
                if belady.resident[*page as usize] {
                    belady.touch(PageNo(*page), false);
                    continue;
                }
                misses += 1;
                if belady.count as usize == room {
                    let mut out = Vec::new();
                    belady.select(1, 100, &mut |_| Verdict::Take, &mut out);
                }
                belady.insert(PageNo(*page), Arrival::FirstTouch);
            }
            let best = least(&references, 0, &mut Vec::new(), room);
            assert_eq!(misses, best, "round {round}: {references:?}, room {room}");
        }
    }
}
