//! The summary on standard error at the end of a run.

use undercroft_base::{Bytes, Nanos};

use super::{BoundReport, Quantiles, Report, TierReport, command_line};

/// Characters of the command shown in the first line.
const COMMAND_CHARS_MAX: usize = 60;
const DIM: &str = "\x1b[2m";
const BOLD: &str = "\x1b[1m";
const WARN: &str = "\x1b[33m";
const OFF: &str = "\x1b[0m";

/// Below this peak no limit is suggested.
const SUGGESTED_FROM: Bytes = Bytes(16 << 20);

/// About eight aligned lines; one if no page was managed, and none if no memory was seen. `color`:
/// the caller's decision (a terminal, and `NO_COLOR` not set).
pub fn human_summary(report: &Report, color: bool) -> String {
    let paint = |code: &'static str| if color { code } else { "" };
    let head = format!(
        "{}undercroft{} {}",
        paint(BOLD),
        paint(OFF),
        command(&report.command)
    );
    match (report.faults.total, report.memory_bytes_peak) {
        (0, 0) => String::new(),
        (0, peak) => {
            let limit = report.memory_max_bytes.map(Bytes);
            let ended = report.signal.map_or(String::new(), |number| {
                format!("ended by {}; ", signal_name(number))
            });
            format!("{head}: {ended}{}\n", unmanaged(Bytes(peak), limit))
        }
        _ => format!("{head}\n{}", lines(report, paint)),
    }
}

/// The lines below the command.
fn lines(report: &Report, paint: impl Fn(&'static str) -> &'static str) -> String {
    let mut text = String::new();
    let mut line = |label: &str, value: String| {
        let (dim, off) = (paint(DIM), paint(OFF));
        text.push_str(&format!("  {dim}{label:<10}{off} {value}\n"));
    };
    line(
        "time",
        format!(
            "{}, {}",
            seconds(report.wall_seconds),
            match report.signal {
                Some(number) => format!("ended by {}", signal_name(number)),
                None => format!("exit status {}", report.exit_status),
            }
        ),
    );
    line("faults", faults(report));
    line(
        "latency",
        match &report.fault_latency_seconds {
            Some(q) => format!(
                "{}, stalled {}",
                quantiles(q),
                seconds(report.stall_seconds)
            ),
            None => "no fault was needed".to_owned(),
        },
    );
    if let Some(bound) = &report.latency_bound {
        line("bound", self::bound(bound));
    }
    if report.pauses.count > 0 {
        line("paused", pauses(report));
    }
    line("pages", pages(report));
    line("memory", memory(report));
    if let Some(guest) = &report.guest {
        line("guest", guest.to_string());
    }
    for tier in &report.tiers {
        line("tier", self::tier(tier));
    }
    if let Some(cost) = &report.cost {
        line("cost", cost.to_string());
    }
    line(
        "manager",
        format!(
            "{} of CPU, {} of metadata, {} address space{}",
            seconds(report.manager.cpu_seconds),
            Bytes(report.manager.metadata_bytes),
            report.spaces,
            if report.spaces == 1 { "" } else { "s" },
        ),
    );
    for warning in warnings(report) {
        line("warning", format!("{}{warning}{}", paint(WARN), paint(OFF)));
    }
    text
}

/// Names of the signals from 1 on (x86-64).
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

fn signal_name(number: i32) -> String {
    let at = usize::try_from(number - 1).unwrap_or(usize::MAX);
    match SIGNALS.get(at) {
        Some(name) => format!("signal {number} (SIG{name})"),
        None => format!("signal {number}"),
    }
}

/// How much memory a program took that no limit held.
fn unmanaged(peak: Bytes, limit: Option<Bytes>) -> String {
    match limit {
        Some(limit) => format!("peak {peak}, within the limit of {limit}: no page had to leave"),
        None if peak < SUGGESTED_FROM => format!("peak {peak}, without a limit"),
        None => format!(
            "peak {peak}, without a limit; try -m {}M, then `undercroft status --mrc` says what other \
             limits cost",
            peak.0.div_ceil(2 << 20)
        ),
    }
}

/// The command on one line; a long one is cut.
fn command(words: &[String]) -> String {
    let text = command_line(words, 0);
    match text.char_indices().nth(COMMAND_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn faults(report: &Report) -> String {
    let faults = report.faults;
    format!(
        "{}: {} first touch, {} swap-in; {} avoided by prefetch",
        faults.total, faults.first_touch, faults.swap_in, faults.prefetch_hits
    )
}

/// How the latency bound was kept, on one line. `status` shows the same.
pub fn bound(of: &BoundReport) -> String {
    let windows = of.windows_kept + of.windows_missed;
    let control = of.control.as_ref().map_or(String::new(), |control| {
        format!(
            "; pages go to the {}, {} at a time",
            control.pages_go_to, control.batch_pages
        )
    });
    match of.worst_window_seconds {
        Some(worst) => format!(
            "{}: kept in {} of {windows} window{}, worst {}{control}",
            of.bound,
            of.windows_kept,
            if windows == 1 { "" } else { "s" },
            seconds(worst)
        ),
        None => format!("{}: too few page-ins to tell{control}", of.bound),
    }
}

fn pauses(report: &Report) -> String {
    let pauses = report.pauses;
    let times = if pauses.count == 1 { "time" } else { "times" };
    let took = seconds(pauses.seconds);
    format!(
        "{} {times}, for {took} in all; no limit was kept then",
        pauses.count
    )
}

fn pages(report: &Report) -> String {
    let pages = report.pages;
    format!(
        "{} in ({} ahead of need), {} out ({} clean, {} same-filled)",
        pages.swapped_in,
        pages.prefetched,
        pages.swapped_out,
        pages.clean_dropped,
        pages.same_filled
    )
}

fn memory(report: &Report) -> String {
    let limit = report
        .memory_max_bytes
        .map_or("no limit".to_owned(), |max| format!("limit {}", Bytes(max)));
    format!(
        "{} DRAM at most ({limit}), {} of it resident at most; {} with what was out",
        Bytes(report.dram_bytes_peak),
        Bytes(report.resident_bytes_peak),
        Bytes(report.memory_bytes_peak)
    )
}

fn tier(tier: &TierReport) -> String {
    let ratio = tier.figures.ratio_text();
    let read = match &tier.read_latency_seconds {
        Some(q) => format!(", read {}", quantiles(q)),
        None => String::new(),
    };
    format!(
        "{}: logical {}, stored {}, ratio {ratio}, {} reads, {} writes{read}",
        tier.figures.title(),
        Bytes(tier.logical_bytes_peak),
        Bytes(tier.stored_bytes_peak),
        tier.figures.reads,
        tier.figures.writes,
    )
}

/// Warnings of a cluster that lost or lacks something.
fn remote_warnings(tier: &TierReport) -> Vec<String> {
    let Some(remote) = &tier.figures.remote else {
        return Vec::new();
    };
    let of = |count: u64, what: &str| {
        let s = if count == 1 { "" } else { "s" };
        (count > 0).then(|| format!("{}: {count} page{s} {what}", tier.figures.name))
    };
    let lost = "lost both copies; a touch of them was SIGBUS";
    let degraded = "had one copy instead of two at the end";
    [
        of(remote.pages_lost, lost),
        of(remote.pages_degraded, degraded),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn warnings(report: &Report) -> Vec<String> {
    let mut warnings: Vec<String> = report.tiers.iter().flat_map(remote_warnings).collect();
    if let Some(of) = &report.latency_bound
        && of.windows_missed > 0
    {
        warnings.push(format!(
            "the latency bound {} was missed in {} window{}; every window would have kept {}",
            of.bound,
            of.windows_missed,
            if of.windows_missed == 1 { "" } else { "s" },
            seconds(of.worst_window_seconds.unwrap_or_default())
        ));
    }
    let fixed = report.immovable;
    if fixed.limit_raised_bytes_peak > 0 {
        warnings.push(format!(
            "up to {} could not leave (read-only, locked, pinned, or of a process without an agent); \
             the limit was passed for that by {} at most, for {}",
            Bytes(fixed.bytes_peak),
            Bytes(fixed.limit_raised_bytes_peak),
            seconds(fixed.limit_raised_seconds)
        ));
    }
    let exceeded = report.limit_exceeded;
    if exceeded.events > 0 {
        warnings.push(format!(
            "above the limit {} time{}, by {} at most, for {}",
            exceeded.events,
            if exceeded.events == 1 { "" } else { "s" },
            Bytes(exceeded.bytes_peak),
            seconds(exceeded.seconds)
        ));
    }
    if report.counters.refused_store > 0 {
        warnings.push(format!(
            "{} times no tier would take a page: give a larger tier",
            report.counters.refused_store
        ));
    }
    if report.counters.lost > 0 {
        warnings.push(format!(
            "{} pages were lost: no copy of them verified; check the device below",
            report.counters.lost
        ));
    }
    let errors: u64 = report.tiers.iter().map(|tier| tier.errors).sum();
    if errors > 0 {
        warnings.push(format!("{errors} reads or writes of a tier failed"));
    }
    warnings
}

fn quantiles(q: &Quantiles) -> String {
    format!("p50 {}, p99 {}", seconds(q.p50), seconds(q.p99))
}

fn seconds(seconds: f64) -> String {
    Nanos((seconds * 1e9) as u64).to_string()
}
