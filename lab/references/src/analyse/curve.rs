//! The miss-ratio curve of LRU: for each number of pages of memory, the share of references that
//! miss.

/// Miss ratios of all sizes; falls with size.
#[derive(Clone, Debug)]
pub struct MissRatioCurve {
    /// Steps of (pages, miss ratio from that size up to the next step), by rising pages. The first
    /// is at 0, where all miss.
    steps: Vec<(u64, f64)>,
}

impl MissRatioCurve {
    /// The curve of `touches` references; `first` of them are first touches. The others are given
    /// as (distance, weight), rising. `adjust` is added at distance 0.
    pub(crate) fn new(
        touches: u64,
        first: f64,
        adjust: f64,
        distances: impl Iterator<Item = (u64, f64)>,
    ) -> MissRatioCurve {
        let total = touches as f64;
        let mut steps = vec![(0, if touches == 0 { 0.0 } else { 1.0 })];
        if touches == 0 {
            return MissRatioCurve { steps };
        }
        let mut distances: Vec<(u64, f64)> = distances.collect();
        match distances.first_mut() {
            Some((0, weight)) => *weight += adjust,
            _ => distances.insert(0, (0, adjust)),
        }
        let hits: f64 = distances.iter().map(|(_, weight)| weight).sum();
        let mut misses = first + hits;
        for (distance, weight) in distances {
            misses -= weight;
            // A page at distance d is still in a memory of d + 1 pages.
            steps.push((distance + 1, (misses / total).clamp(0.0, 1.0)));
        }
        // Sampling noise at distance 0 may go the wrong way; no curve rises with size.
        for index in (1..steps.len()).rev() {
            let (head, tail) = steps.split_at_mut(index);
            head[index - 1].1 = head[index - 1].1.max(tail[0].1);
        }
        MissRatioCurve { steps }
    }

    /// Share of references that miss in an LRU memory of `pages` pages. Cost: O(log steps).
    pub fn miss_ratio(&self, pages: u64) -> f64 {
        let after = self.steps.partition_point(|(size, _)| *size <= pages);
        self.steps[after - 1].1
    }

    /// At most `points` points of the curve, evenly spaced from 0 to `pages_max`.
    pub fn points(&self, pages_max: u64, points: u64) -> Vec<(u64, f64)> {
        let mut sizes: Vec<u64> = (0..=points)
            .map(|index| {
                (u128::from(pages_max) * u128::from(index) / u128::from(points.max(1))) as u64
            })
            .collect();
        sizes.dedup();
        sizes
            .into_iter()
            .map(|size| (size, self.miss_ratio(size)))
            .collect()
    }
}
