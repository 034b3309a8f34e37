//! The totals of a trace, and the end block that holds them.

use super::{END_TAG, checksum, u64_at};
use crate::reference::{Access, Kind, Movement};

/// A trace's totals, as in its end block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Blocks of entries.
    pub blocks: u64,
    /// Instruction reads.
    pub instructions: u64,
    /// Data reads.
    pub reads: u64,
    /// Data writes.
    pub writes: u64,
    /// When the recording ended; not before the last entry.
    pub time_end: u64,
    /// Movements of each kind, in the order of [`Movement::ALL`]. They are not references.
    pub movements: [u64; Movement::ALL.len()],
}

impl Totals {
    /// References of all kinds.
    pub fn references(&self) -> u64 {
        self.instructions + self.reads + self.writes
    }

    /// References and movements.
    pub fn entries(&self) -> u64 {
        self.references() + self.movements.iter().sum::<u64>()
    }

    /// Movements of one kind.
    pub fn moved(&self, movement: Movement) -> u64 {
        self.movements[movement as usize]
    }

    /// Counts one entry.
    #[inline]
    pub fn count(&mut self, kind: Kind) {
        match kind {
            Kind::Access(access) => {
                // Without branches: reads and writes alternate irregularly, and a misprediction
                // costs as much as the rest of an entry.
                self.instructions += u64::from(access == Access::Instruction);
                self.reads += u64::from(access == Access::Read);
                self.writes += u64::from(access == Access::Write);
            }
            Kind::Movement(movement) => self.movements[movement as usize] += 1,
        }
    }

    /// The end block after a part with checksum `before`, with its own checksum.
    ///
    /// * `movements`: how many kinds the header announces.
    pub(crate) fn encode(&self, before: u32, movements: usize) -> Vec<u8> {
        let mut bytes = END_TAG.to_vec();
        bytes.extend([0; 4]);
        for number in [
            self.blocks,
            self.references(),
            self.instructions,
            self.reads,
            self.writes,
            self.time_end,
        ] {
            bytes.extend(number.to_le_bytes());
        }
        for number in &self.movements[..movements] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(checksum(before, &[&bytes]).to_le_bytes());
        bytes
    }

    /// The totals that a whole end block claims.
    ///
    /// * `movements`: how many kinds the header announces.
    pub(crate) fn decode(end: &[u8], movements: usize) -> Totals {
        Totals {
            blocks: u64_at(end, 8),
            instructions: u64_at(end, 24),
            reads: u64_at(end, 32),
            writes: u64_at(end, 40),
            time_end: u64_at(end, 48),
            movements: std::array::from_fn(|at| {
                if at < movements {
                    u64_at(end, 56 + 8 * at)
                } else {
                    0
                }
            }),
        }
    }
}
