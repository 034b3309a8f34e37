//! Part of the report on the cluster of a remote tier.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::RemoteCounts;

/// Events in the cluster of a remote tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RemoteReport {
    /// Pages that have one copy now, instead of two.
    pub pages_degraded: u64,
    /// Pages of which a copy was found missing.
    pub pages_missing_copy: u64,
    /// Pages whose copies were stored anew.
    pub pages_mended: u64,
    /// Reads for which the second master was asked because the first was late.
    pub reads_hedged: u64,
    /// Reads that ended at the deadline, and were tried again.
    pub reads_late: u64,
    /// Copies that did not verify.
    pub copies_damaged: u64,
    /// Pages that no master had: they are lost.
    pub pages_lost: u64,
    /// Connections that broke or could not be made.
    pub connections_broken: u64,
}

impl RemoteReport {
    /// The counts as reports name them.
    pub fn of(counts: RemoteCounts) -> RemoteReport {
        RemoteReport {
            pages_degraded: counts.degraded,
            pages_missing_copy: counts.missing,
            pages_mended: counts.mended,
            reads_hedged: counts.hedged,
            reads_late: counts.late,
            copies_damaged: counts.damaged,
            pages_lost: counts.lost,
            connections_broken: counts.breaks,
        }
    }
}
