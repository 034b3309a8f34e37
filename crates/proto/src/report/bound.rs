//! How a latency bound was kept, in the report and in snapshots.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use undercroft_base::Nanos;
use undercroft_qos::Monitor;

/// How a latency bound was kept. Counts and times are of windows that have ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BoundReport {
    /// As the user gave it: `p99=200us`.
    pub bound: String,
    /// The percentile.
    pub percentile: f64,
    /// The limit.
    pub limit_seconds: f64,
    /// Windows that kept the bound.
    pub windows_kept: u64,
    /// Windows that missed it.
    pub windows_missed: u64,
    /// Page-ins in windows.
    pub page_ins: u64,
    /// Page-ins above the limit.
    pub page_ins_over: u64,
    /// Page-ins that are in no window yet, or were too few for one.
    pub page_ins_pending: u64,
    /// The percentile of all windows together; null without windows.
    pub tail_seconds: Option<f64>,
    /// The percentile of the window that ended last.
    pub last_window_seconds: Option<f64>,
    /// The percentile of the worst window: the least limit that every window would have kept.
    pub worst_window_seconds: Option<f64>,
    /// Windows from when the bound was set to the first that kept it, with it; null before.
    pub windows_until_kept: Option<u64>,
    /// Last decision of control; null if the bound is only measured.
    pub control: Option<BoundControl>,
}

/// Last decision of latency control, and how much it did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BoundControl {
    /// `device`: to the last tier. `buffer`: to the first, and none is demoted. `placement`: as the
    /// policy says, because the daemon has not heard of the bound yet.
    pub pages_go_to: String,
    /// Most pages that leave at a time.
    pub batch_pages: u64,
    /// Times that it changed one of these.
    pub changes: u64,
    /// Times that write-out waited for reads.
    pub writes_after_reads: u64,
}

impl BoundReport {
    /// Counts of the monitor.
    pub fn of(monitor: &Monitor) -> BoundReport {
        let bound = monitor.bound();
        let (windows_kept, windows_missed) = monitor.windows();
        let (page_ins, page_ins_over) = monitor.page_ins();
        BoundReport {
            bound: bound.to_string(),
            percentile: bound.percentile.percent(),
            limit_seconds: bound.limit.seconds(),
            windows_kept,
            windows_missed,
            page_ins,
            page_ins_over,
            page_ins_pending: monitor.pending(),
            tail_seconds: monitor.whole().map(Nanos::seconds),
            last_window_seconds: monitor.last().map(|window| window.tail.seconds()),
            worst_window_seconds: monitor.worst().map(Nanos::seconds),
            windows_until_kept: None,
            control: None,
        }
    }
}
