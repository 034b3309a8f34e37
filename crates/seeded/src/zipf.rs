//! Ranks by Zipf's law: rank k of 1..=n with a probability proportional to k^-theta.

use crate::Random;

/// Draws by rejection-inversion (Hörmann and Derflinger 1996): constant time, no table, any
/// exponent from 0 on.
#[derive(Clone, Debug)]
pub struct Zipf {
    theta: f64,
    /// 1 / (1 - theta); unused when theta is 1.
    q: f64,
    /// Area under the hat.
    area: f64,
}

impl Zipf {
    /// The law of `count` ranks, at least 1, with exponent `theta`.
    pub fn new(count: u64, theta: f64) -> Zipf {
        let count = count as f64;
        let q = 1.0 / (1.0 - theta);
        let area = if theta == 1.0 {
            1.0 + count.ln()
        } else {
            (count.powf(1.0 - theta) - theta) * q
        };
        Zipf { theta, q, area }
    }

    /// A rank, from 0.
    pub fn rank(&self, random: &mut Random) -> u64 {
        loop {
            let under = random.unit() * self.area;
            let inverse = if under <= 1.0 {
                under
            } else if self.theta == 1.0 {
                (under - 1.0).exp()
            } else {
                (under * (1.0 - self.theta) + self.theta).powf(self.q)
            };
            let rank = (inverse + 1.0).floor();
            let mut ratio = rank.powf(-self.theta);
            if rank > 1.0 {
                ratio *= inverse.powf(self.theta);
            }
            if random.unit() < ratio {
                return rank as u64 - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_come_as_often_as_the_law_says() {
        for theta in [0.0, 0.5, 0.99, 1.0, 1.5] {
            let (count, draws) = (50u64, 200_000);
            let zipf = Zipf::new(count, theta);
            let mut random = Random::new(3);
            let mut seen = vec![0u64; count as usize];
            for _ in 0..draws {
                seen[zipf.rank(&mut random) as usize] += 1;
            }
            let sum: f64 = (1..=count).map(|k| (k as f64).powf(-theta)).sum();
            for (rank, seen) in seen.iter().enumerate() {
                let expected = f64::from(draws) * ((rank + 1) as f64).powf(-theta) / sum;
                let off = (*seen as f64 - expected).abs();
                assert!(
                    off < 5.0 * expected.sqrt() + 1.0,
                    "theta {theta}, rank {rank}: {seen}, expected {expected:.0}"
                );
            }
        }
    }
}
