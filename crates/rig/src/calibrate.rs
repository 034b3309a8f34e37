//! Finds, by trial runs, the limit under which resident plus compressed memory stays within one
//! total.
//!
//! zram and zswap keep compressed pages outside the memcg limit, so equal limits are not equal
//! memory. With budget L, the limit is changed until limit + compressed peak is within 2 % of L.
//! The second trial uses L - compressed, later ones the secant.

use super::{CommandLine, MemoryUse, Rig, RigError};
use serde::{Deserialize, Serialize};
use undercroft_base::Bytes;

const TRIALS: usize = 4;
const CLOSE: f64 = 0.01;

/// The limit to use, and how it was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Limit for the rig.
    pub limit_bytes: u64,
    /// (limit, compressed peak) of each trial, in bytes.
    pub trials: Vec<(u64, u64)>,
}

/// Runs `probe` up to four times and returns the limit for `budget`. A rig that counts everything
/// gets the budget itself.
///
/// Errors: `BudgetTooSmall` if compressed data alone fill the budget; those of the runs.
pub fn calibrate(
    rig: &dyn Rig,
    budget: Bytes,
    probe: &CommandLine,
) -> Result<Calibration, RigError> {
    calibrate_with(rig, budget, |limit| {
        let outcome = rig.set_up(limit)?.spawn(probe)?.finish()?;
        Ok(outcome.successful(rig.name(), "trial run")?.memory)
    })
}

/// The same with any trial run: `probe` runs at a limit and returns the memory it took.
pub fn calibrate_with(
    rig: &dyn Rig,
    budget: Bytes,
    mut probe: impl FnMut(Bytes) -> Result<MemoryUse, RigError>,
) -> Result<Calibration, RigError> {
    if !rig.stores_outside_limit() {
        return Ok(Calibration {
            limit_bytes: budget.0,
            trials: Vec::new(),
        });
    }
    let total = budget.0 as f64;
    let floor = total * 0.1;
    let mut limit = total * 0.5;
    let mut trials: Vec<(u64, u64)> = Vec::new();
    for _ in 0..TRIALS {
        let memory = probe(Bytes(limit as u64 & !0xfff))?;
        let (used, compressed) = (memory.limit_bytes, memory.compressed_peak_bytes);
        trials.push((used, compressed));
        let error = (used + compressed) as f64 - total;
        if error.abs() <= total * CLOSE {
            break;
        }
        limit = match trials[..] {
            [.., (limit_a, stored_a), (limit_b, stored_b)] if limit_a != limit_b => {
                let slope =
                    1.0 + (stored_b as f64 - stored_a as f64) / (limit_b as f64 - limit_a as f64);
                limit_b as f64 - error / slope.clamp(0.2, 1.5)
            }
            _ => total - compressed as f64,
        };
        if limit < floor {
            return Err(RigError::BudgetTooSmall {
                budget,
                compressed: Bytes(compressed),
            });
        }
    }
    let limit_bytes = match trials.last() {
        Some(&(used, stored)) if ((used + stored) as f64 - total).abs() <= total * CLOSE => used,
        _ => limit as u64 & !0xfff,
    };
    Ok(Calibration {
        limit_bytes,
        trials,
    })
}
