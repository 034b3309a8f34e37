//! Metrics for Prometheus (text format 0.0.4), in base units.
//!
//! A client is labelled by `pid` (of its keeper), `command` (the program's name), `class`, if the
//! daemon gives it memory, `name`, if a person gave it one, and `uid`, if it is another user's; a
//! tier by `tier`, too: `NUMBER NAME`, with ` (emulated)` where it is. The text is written by hand:
//! it is a dozen lines of code, and a client library keeps state that this server has not.

use std::fmt::Write;

use undercroft_proto::report::{Snapshot, TierSnapshot};

/// A metric of a client: name, type, help, value.
type OfClient = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Snapshot) -> Option<f64>,
);
/// A metric of a tier.
type OfTier = (
    &'static str,
    &'static str,
    &'static str,
    fn(&TierSnapshot) -> Option<f64>,
);

const CLIENT: &[OfClient] = &[
    (
        "undercroft_uptime_seconds",
        "gauge",
        "Time since the program started.",
        |of| Some(of.uptime_seconds),
    ),
    (
        "undercroft_memory_max_bytes",
        "gauge",
        "The limit; absent without one.",
        |of| of.memory_max_bytes.map(|bytes| bytes as f64),
    ),
    (
        "undercroft_paused",
        "gauge",
        "1 while a user has paused it.",
        |of| Some(f64::from(u8::from(of.paused))),
    ),
    (
        "undercroft_memory_bytes",
        "gauge",
        "Memory of the program, in DRAM and out of it.",
        |of| Some(of.memory_bytes as f64),
    ),
    (
        "undercroft_memory_peak_bytes",
        "gauge",
        "Most of it at once.",
        |of| Some(of.memory_bytes_peak as f64),
    ),
    (
        "undercroft_resident_bytes",
        "gauge",
        "The part of it that is in DRAM.",
        |of| Some(of.resident_bytes as f64),
    ),
    (
        "undercroft_dram_bytes",
        "gauge",
        "Resident pages, and what tiers hold in DRAM.",
        |of| Some(of.dram_bytes as f64),
    ),
    ("undercroft_faults_total", "counter", "Page faults.", |of| {
        Some(of.faults.total as f64)
    }),
    (
        "undercroft_first_touch_faults_total",
        "counter",
        "Faults of new pages.",
        |of| Some(of.faults.first_touch as f64),
    ),
    (
        "undercroft_swap_in_faults_total",
        "counter",
        "Faults that read a tier.",
        |of| Some(of.faults.swap_in as f64),
    ),
    (
        "undercroft_swapped_in_pages_total",
        "counter",
        "Pages installed from a tier.",
        |of| Some(of.pages.swapped_in as f64),
    ),
    (
        "undercroft_swapped_out_pages_total",
        "counter",
        "Pages evicted.",
        |of| Some(of.pages.swapped_out as f64),
    ),
    (
        "undercroft_prefetched_pages_total",
        "counter",
        "Pages loaded along with a fault.",
        |of| Some(of.pages.prefetched as f64),
    ),
    (
        "undercroft_stall_seconds_total",
        "counter",
        "Time of faults; threads add up.",
        |of| Some(of.stall_seconds),
    ),
    (
        "undercroft_stall_some_seconds_total",
        "counter",
        "Time in which at least one thread waited for a page.",
        |of| Some(of.stall_some_seconds),
    ),
    (
        "undercroft_limit_exceeded_seconds_total",
        "counter",
        "Time above the limit.",
        |of| Some(of.limit_exceeded.seconds),
    ),
    (
        "undercroft_immovable_bytes",
        "gauge",
        "Memory that cannot leave: read-only, locked, pinned, or of a process without an agent.",
        |of| Some(of.immovable.bytes as f64),
    ),
    (
        "undercroft_guest_bytes",
        "gauge",
        "Memory of its virtual machine; absent without one.",
        |of| of.guest.map(|guest| guest.bytes as f64),
    ),
    (
        "undercroft_guest_resident_bytes",
        "gauge",
        "The part of it that is in DRAM.",
        |of| of.guest.map(|guest| guest.resident_bytes as f64),
    ),
    (
        "undercroft_guest_stored_bytes",
        "gauge",
        "The part of it whose copies are in tiers.",
        |of| of.guest.map(|guest| guest.stored_bytes as f64),
    ),
    (
        "undercroft_guest_given_back_bytes_total",
        "counter",
        "Memory that the virtual machine gave back, from DRAM or from tiers.",
        |of| of.guest.map(|guest| guest.given_back_bytes as f64),
    ),
    (
        "undercroft_guest_locked_bytes",
        "gauge",
        "Memory of it that programs have locked for I/O, of what was to leave.",
        |of| of.guest.map(|guest| guest.locked_bytes as f64),
    ),
    (
        "undercroft_takeovers_total",
        "counter",
        "Managers that took over from one that had died, or was replaced.",
        |of| Some(of.takeovers.count as f64),
    ),
    (
        "undercroft_takeover_pause_max_seconds",
        "gauge",
        "Longest time that the program waited for that.",
        |of| Some(of.takeovers.pause_seconds_max),
    ),
    (
        "undercroft_working_set_bytes",
        "gauge",
        "Memory that was used in the last minute; absent without scans at an interval.",
        |of| of.ages.as_ref().map(|ages| ages.working_set_bytes as f64),
    ),
    (
        "undercroft_lost_pages_total",
        "counter",
        "Pages whose copies did not verify.",
        |of| Some(of.counters.lost as f64),
    ),
    (
        "undercroft_latency_bound_seconds",
        "gauge",
        "The latency bound.",
        |of| of.latency_bound.as_ref().map(|bound| bound.limit_seconds),
    ),
    (
        "undercroft_latency_window_seconds",
        "gauge",
        "Its percentile in the last window.",
        |of| {
            of.latency_bound
                .as_ref()
                .and_then(|bound| bound.last_window_seconds)
        },
    ),
    (
        "undercroft_latency_windows_kept_total",
        "counter",
        "Windows that kept it.",
        |of| {
            of.latency_bound
                .as_ref()
                .map(|bound| bound.windows_kept as f64)
        },
    ),
    (
        "undercroft_latency_windows_missed_total",
        "counter",
        "Windows that missed it.",
        |of| {
            of.latency_bound
                .as_ref()
                .map(|bound| bound.windows_missed as f64)
        },
    ),
    (
        "undercroft_cost_dollars",
        "gauge",
        "DRAM and tiers at their peaks; absent without prices.",
        |of| of.cost.map(|cost| cost.total_dollars),
    ),
    (
        "undercroft_all_in_dram_dollars",
        "gauge",
        "The same pages, all in DRAM.",
        |of| of.cost.map(|cost| cost.all_in_dram_dollars),
    ),
];

const TIER: &[OfTier] = &[
    (
        "undercroft_tier_emulated",
        "gauge",
        "1 if the tier's speed is emulated.",
        |of| Some(f64::from(u8::from(of.figures.emulated))),
    ),
    (
        "undercroft_tier_logical_bytes",
        "gauge",
        "Page bytes held, before compression.",
        |of| Some(of.logical_bytes as f64),
    ),
    (
        "undercroft_tier_stored_bytes",
        "gauge",
        "Copy bytes held, after compression.",
        |of| Some(of.stored_bytes as f64),
    ),
    (
        "undercroft_tier_held_bytes",
        "gauge",
        "Bytes taken from the device below.",
        |of| Some(of.held_bytes as f64),
    ),
    (
        "undercroft_tier_ratio",
        "gauge",
        "Page bytes per stored byte.",
        |of| of.figures.ratio,
    ),
    (
        "undercroft_tier_read_pages_total",
        "counter",
        "Pages read.",
        |of| Some(of.figures.reads as f64),
    ),
    (
        "undercroft_tier_written_pages_total",
        "counter",
        "Pages written.",
        |of| Some(of.figures.writes as f64),
    ),
    (
        "undercroft_tier_written_bytes_total",
        "counter",
        "Bytes written to the memory or device below.",
        |of| Some(of.figures.written_bytes as f64),
    ),
    (
        "undercroft_tier_cost_dollars",
        "gauge",
        "The tier at its peak; absent without a price.",
        |of| of.figures.cost.map(|cost| cost.dollars_at_peak),
    ),
    (
        "undercroft_tier_tbw_bytes",
        "gauge",
        "Bytes that the device is rated to take in all; absent if it is not given.",
        |of| of.figures.wear.map(|wear| wear.tbw_bytes),
    ),
];

/// The text of all metrics.
pub(crate) fn text(clients: &[Snapshot]) -> String {
    let mut text = String::new();
    let build = "undercroft_build_info";
    head(&mut text, build, "gauge", "1; the version of this server.");
    let version = env!("CARGO_PKG_VERSION");
    let _ = writeln!(text, "{build}{{version=\"{version}\"}} 1");
    head(&mut text, "undercroft_clients", "gauge", "Running clients.");
    let _ = writeln!(text, "undercroft_clients {}", clients.len());
    for (name, kind, help, value) in CLIENT {
        head(&mut text, name, kind, help);
        for client in clients {
            if let Some(value) = value(client) {
                let _ = writeln!(text, "{name}{{{}}} {value}", labels(client));
            }
        }
    }
    unused(&mut text, clients);
    latency(&mut text, clients);
    for (name, kind, help, value) in TIER {
        head(&mut text, name, kind, help);
        for client in clients {
            let labels = labels(client);
            for (at, tier) in client.tiers.iter().enumerate() {
                if let Some(value) = value(tier) {
                    let tier = escaped(&tier_label(at, tier));
                    let _ = writeln!(text, "{name}{{{labels},tier=\"{tier}\"}} {value}");
                }
            }
        }
    }
    text
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// How much memory of each client has not been used for how long.
fn unused(text: &mut String, clients: &[Snapshot]) {
    let name = "undercroft_unused_bytes";
    let help =
        "Memory in DRAM that was not used for this long; absent without scans at an interval.";
    head(text, name, "gauge", help);
    for client in clients {
        let (labels, ages) = (labels(client), client.ages.iter());
        for of in ages.flat_map(|ages| &ages.unused) {
            let (seconds, bytes) = (of.seconds, of.bytes);
            let _ = writeln!(text, "{name}{{{labels},seconds=\"{seconds}\"}} {bytes}");
        }
    }
}

/// The histogram of fault times of each client whose version tells it.
fn latency(text: &mut String, clients: &[Snapshot]) {
    let name = "undercroft_fault_latency_seconds";
    head(text, name, "histogram", "Time of a fault.");
    for client in clients {
        let (labels, of) = (labels(client), &client.fault_latency_histogram);
        if of.buckets.is_empty() {
            continue;
        }
        for bucket in &of.buckets {
            let (most, count) = (bucket.seconds_max, bucket.count);
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{most}\"}} {count}");
        }
        let (count, sum) = (of.count, of.sum_seconds);
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(
            text,
            "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}"
        );
    }
}

fn labels(client: &Snapshot) -> String {
    let program: String = client.program().chars().take(64).collect();
    let mut labels = format!("pid=\"{}\",command=\"{}\"", client.pid, escaped(&program));
    if let Some(class) = &client.class {
        let _ = write!(labels, ",class=\"{}\"", escaped(class));
    }
    if let Some(name) = &client.name {
        let _ = write!(labels, ",name=\"{}\"", escaped(name));
    }
    if let Some(user) = client.uid {
        let _ = write!(labels, ",uid=\"{user}\"");
    }
    labels
}

fn tier_label(at: usize, tier: &TierSnapshot) -> String {
    format!("{} {}", at + 1, tier.figures.title())
}

fn escaped(label: &str) -> String {
    let mut text = String::with_capacity(label.len());
    for letter in label.chars() {
        match letter {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            other => text.push(other),
        }
    }
    text
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
