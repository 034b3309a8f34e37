//! Counts by distance: one bin for each distance, or a fixed number of bins an octave for estimated
//! distances.

/// Weighted counts of distances.
#[derive(Clone, Debug)]
pub(crate) struct Bins {
    /// Each octave from 2^bits on has 2^bits bins; below, every distance has its own.
    bits: u8,
    counts: Vec<f64>,
}

impl Bins {
    /// Each distance has its own bin.
    pub(super) fn exact() -> Bins {
        Bins {
            bits: 62,
            counts: Vec::new(),
        }
    }

    /// Distances known to 0.1 %, in bounded memory.
    pub(super) fn rounded() -> Bins {
        Bins {
            bits: 10,
            counts: Vec::new(),
        }
    }

    fn bin(&self, distance: u64) -> usize {
        if distance >> self.bits == 0 {
            return distance as usize;
        }
        let shift = 63 - distance.leading_zeros() as u8 - self.bits;
        ((u64::from(shift) << self.bits) + (distance >> shift)) as usize
    }

    /// The smallest distance of a bin.
    fn low(&self, bin: usize) -> u64 {
        let bin = bin as u64;
        match (bin >> self.bits).checked_sub(1) {
            None | Some(0) => bin,
            Some(shift) => (bin - (shift << self.bits)) << shift,
        }
    }

    pub(super) fn add(&mut self, distance: u64, weight: f64) {
        let bin = self.bin(distance);
        if bin >= self.counts.len() {
            self.counts.resize(bin + 1, 0.0);
        }
        self.counts[bin] += weight;
    }

    /// (smallest distance, weight) of each bin with weight, rising.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, f64)> {
        let filled = self
            .counts
            .iter()
            .enumerate()
            .filter(|(_, weight)| **weight != 0.0);
        filled.map(|(bin, weight)| (self.low(bin), *weight))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_fall_into_bins_that_hold_them() {
        let (exact, rounded) = (Bins::exact(), Bins::rounded());
        let mut last = 0;
        for distance in
            (0..5000).chain((12..50).flat_map(|bit| [(1 << bit) - 1, 1 << bit, 3 << bit]))
        {
            assert_eq!(exact.low(exact.bin(distance)), distance);
            let low = rounded.low(rounded.bin(distance));
            assert!(
                low <= distance && (distance - low) * 1024 <= distance,
                "{distance}: {low}"
            );
            assert!(distance < last || rounded.bin(distance) >= rounded.bin(last));
            last = distance;
        }
    }
}
