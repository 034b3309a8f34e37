//! A sweep's results as text: aligned columns, Markdown, CSV.

use std::fmt::Write;

use crate::outcome::SimReport;
use crate::sweep::Results;

/// How a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Columns aligned with spaces.
    Plain,
    /// A Markdown table under its heading.
    Markdown,
}

type Column = (&'static str, fn(&SimReport) -> String);

/// The columns that a reader needs first. The others are in CSV and JSON.
const COLUMNS: [Column; 15] = [
    ("memory", |o| o.setting.memory.clone()),
    ("page", |o| size(o.setting.page_bytes as f64)),
    ("reclaim", |o| o.setting.reclaim.clone()),
    ("prefetch", |o| o.setting.prefetch.clone()),
    ("tiers", |o| o.setting.tiers.join(" > ")),
    ("placement", |o| o.setting.placement.clone()),
    ("miss %", |o| format!("{:.3}", o.miss_ratio * 100.0)),
    ("swap-ins", |o| o.swap_ins.to_string()),
    ("read", |o| {
        size(o.tiers.iter().map(|t| t.read_bytes as f64).sum())
    }),
    ("written", |o| {
        size(o.tiers.iter().map(|t| t.written_bytes as f64).sum())
    }),
    ("prefetch used", |o| match o.prefetched {
        0 => "-".to_owned(),
        all => {
            let percent = o.prefetch_hits as f64 * 100.0 / all as f64;
            format!("{percent:.0} % of {all}")
        }
    }),
    ("elapsed", |o| duration(o.elapsed_seconds)),
    ("p99 fault", |o| duration(o.worst_p99_seconds())),
    ("p99 page-out", |o| duration(o.worst_page_out_seconds())),
    ("energy", |o| energy(o.energy.total_joules)),
];

/// The results as a table of [`Style`].
pub fn table(results: &Results, style: Style) -> String {
    let rows: Vec<Vec<String>> = results
        .outcomes
        .iter()
        .map(|outcome| COLUMNS.iter().map(|(_, cell)| cell(outcome)).collect())
        .collect();
    let mut out = String::new();
    if style == Style::Markdown {
        _ = writeln!(
            out,
            "# Simulated: {}\n\n{} references, {} client(s). Nothing here was measured on a device.\n",
            results.trace,
            results.references,
            results.clients.len()
        );
    }
    let widths: Vec<usize> = COLUMNS
        .iter()
        .enumerate()
        .map(|(at, (name, _))| {
            let cells = rows.iter().map(|row| row[at].chars().count());
            cells.chain([name.len()]).max().unwrap_or(0)
        })
        .collect();
    let names: Vec<_> = COLUMNS.iter().map(|(name, _)| (*name).to_owned()).collect();
    line(&mut out, &names, &widths, style);
    if style == Style::Markdown {
        let dashes: Vec<_> = widths.iter().map(|width| "-".repeat(*width)).collect();
        line(&mut out, &dashes, &widths, style);
    }
    for row in &rows {
        line(&mut out, row, &widths, style);
    }
    out
}

/// How latency bounds were kept: a line for each client of each simulation that has one. Empty
/// without bounds.
pub fn bounds(results: &Results) -> String {
    let mut out = String::new();
    for outcome in &results.outcomes {
        for client in &outcome.clients {
            let Some(of) = &client.latency_bound else {
                continue;
            };
            let windows = of.windows_kept + of.windows_missed;
            let kept = match of.worst_window_seconds {
                Some(worst) => format!(
                    "kept in {} of {windows} windows, worst {}",
                    of.windows_kept,
                    duration(worst)
                ),
                None => "too few page-ins to tell".to_owned(),
            };
            _ = writeln!(
                out,
                "{}, memory {}: {} {kept}",
                client.name, outcome.setting.memory, of.bound
            );
        }
    }
    out
}

/// The estimated miss-ratio curves beside the faults of replays, if any were asked for.
pub fn curves(results: &Results) -> String {
    let mut out = String::new();
    for outcome in &results.outcomes {
        for client in &outcome.clients {
            let Some(points) = &client.mrc else { continue };
            let setting = &outcome.setting;
            _ = writeln!(
                out,
                "\nswap-ins by limit, estimated from one run: {}, {}, {}, {}",
                client.name, setting.memory, setting.reclaim, setting.prefetch
            );
            _ = writeln!(
                out,
                "  {:>10}  {:>10}  {:>21}  {:>10}  {:>7}",
                "pages", "estimate", "range", "replayed", "error"
            );
            for point in points {
                let most =
                    (point.swap_ins_most).map_or("more".to_owned(), |most| format!("{most:.0}"));
                let (replayed, error) = match point.swap_ins_replayed {
                    None => ("-".to_owned(), "-".to_owned()),
                    Some(0) => ("0".to_owned(), "-".to_owned()),
                    Some(exact) => {
                        let error = (point.swap_ins / exact as f64 - 1.0) * 100.0;
                        (exact.to_string(), format!("{error:+.1} %"))
                    }
                };
                let mark = if point.memory_pages == client.memory_pages {
                    '>'
                } else {
                    ' '
                };
                let range = format!("{:.0}-{most}", point.swap_ins_least);
                _ = writeln!(
                    out,
                    "{mark} {:>10}  {:>10.0}  {range:>21}  {replayed:>10}  {error:>7}",
                    point.memory_pages, point.swap_ins
                );
            }
        }
    }
    out
}

fn line(out: &mut String, cells: &[String], widths: &[usize], style: Style) {
    let mut text = String::new();
    for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
        if style == Style::Markdown {
            text.push_str("| ");
        }
        // Words to the left, numbers to the right.
        let _ = if at < 5 {
            write!(text, "{cell:<width$}")
        } else {
            write!(text, "{cell:>width$}")
        };
        text.push_str(match style {
            Style::Plain => "  ",
            Style::Markdown => " ",
        });
    }
    if style == Style::Markdown {
        text.push('|');
    }
    out.push_str(text.trim_end());
    out.push('\n');
}

type Field = (&'static str, fn(&SimReport) -> String);

const FIELDS: [Field; 45] = [
    ("memory", |o| o.setting.memory.clone()),
    ("page_bytes", |o| o.setting.page_bytes.to_string()),
    ("reclaim", |o| o.setting.reclaim.clone()),
    ("prefetch", |o| o.setting.prefetch.clone()),
    ("tiers", |o| o.setting.tiers.join(" > ")),
    ("references", |o| o.references.to_string()),
    ("writes", |o| o.writes.to_string()),
    ("footprint_pages", |o| o.footprint_pages.to_string()),
    ("memory_pages", |o| o.memory_pages.to_string()),
    ("misses", |o| o.misses.to_string()),
    ("first_touches", |o| o.first_touches.to_string()),
    ("swap_ins", |o| o.swap_ins.to_string()),
    ("miss_ratio", |o| o.miss_ratio.to_string()),
    ("prefetched", |o| o.prefetched.to_string()),
    ("prefetch_hits", |o| o.prefetch_hits.to_string()),
    ("evictions", |o| o.evictions.to_string()),
    ("clean_evictions", |o| o.clean_evictions.to_string()),
    ("zero_evictions", |o| o.zero_evictions.to_string()),
    ("demotions", |o| o.demotions.to_string()),
    ("pages_read", |o| sum(o, |t| t.pages_read)),
    ("pages_written", |o| sum(o, |t| t.pages_written)),
    ("read_bytes", |o| sum(o, |t| t.read_bytes)),
    ("written_bytes", |o| sum(o, |t| t.written_bytes)),
    ("worn_bytes", |o| sum(o, |t| t.worn_bytes)),
    ("elapsed_seconds", |o| o.elapsed_seconds.to_string()),
    ("settled_seconds", |o| o.settled_seconds.to_string()),
    ("reference_seconds", |o| {
        o.times.reference_seconds.to_string()
    }),
    ("software_seconds", |o| o.times.software_seconds.to_string()),
    ("context_switch_seconds", |o| {
        o.times.context_switch_seconds.to_string()
    }),
    ("read_wait_seconds", |o| {
        o.times.read_wait_seconds.to_string()
    }),
    ("prefetch_wait_seconds", |o| {
        o.times.prefetch_wait_seconds.to_string()
    }),
    ("write_wait_seconds", |o| {
        o.times.write_wait_seconds.to_string()
    }),
    ("compression_seconds", |o| {
        o.times.compression_seconds.to_string()
    }),
    ("fault_p99_seconds_worst_client", |o| {
        o.worst_p99_seconds().to_string()
    }),
    ("dram_static_joules", |o| {
        o.energy.dram_static_joules.to_string()
    }),
    ("dram_dynamic_joules", |o| {
        o.energy.dram_dynamic_joules.to_string()
    }),
    ("device_dynamic_joules", |o| {
        o.energy.device_dynamic_joules.to_string()
    }),
    ("device_idle_share_joules", |o| {
        o.energy.device_idle_share_joules.to_string()
    }),
    ("device_idle_whole_joules", |o| {
        o.energy.device_idle_whole_joules.to_string()
    }),
    ("total_joules", |o| o.energy.total_joules.to_string()),
    ("dram_dollars", |o| o.cost.dram_dollars.to_string()),
    ("total_dollars", |o| o.cost.total_dollars.to_string()),
    ("room", |o| o.setting.room.clone()),
    ("placement", |o| o.setting.placement.clone()),
    ("page_out_p99_seconds_worst_client", |o| {
        o.worst_page_out_seconds().to_string()
    }),
];

fn sum(outcome: &SimReport, of: fn(&crate::outcome::TierOutcome) -> u64) -> String {
    outcome.tiers.iter().map(of).sum::<u64>().to_string()
}

/// The results as CSV (RFC 4180), one line a simulation; tiers added up.
pub fn csv(results: &Results) -> String {
    let mut writer = csv::WriterBuilder::new()
        .terminator(csv::Terminator::CRLF)
        .from_writer(Vec::new());
    let names = FIELDS.map(|(name, _)| name.to_owned());
    let rows = results
        .outcomes
        .iter()
        .map(|outcome| FIELDS.map(|(_, cell)| cell(outcome)));
    for record in std::iter::once(names).chain(rows) {
        writer.write_record(record).expect("a vector takes all");
    }
    let bytes = writer.into_inner().expect("a vector takes all");
    String::from_utf8(bytes).expect("made of text")
}

/// Bytes for people; exact below a KiB, and where it is a whole number of units.
pub fn size(bytes: f64) -> String {
    let mut value = bytes;
    for unit in ["B", "KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 || unit == "TiB" {
            return if value.fract() == 0.0 {
                format!("{value:.0} {unit}")
            } else {
                format!("{value:.1} {unit}")
            };
        }
        value /= 1024.0;
    }
    unreachable!("the last unit returns")
}

/// A duration for people.
pub fn duration(seconds: f64) -> String {
    prefixed(seconds, "s")
}

/// Energy for people.
pub fn energy(joules: f64) -> String {
    prefixed(joules, "J")
}

fn prefixed(value: f64, unit: &str) -> String {
    let steps = [
        (1.0, ""),
        (1e-3, "m"),
        (1e-6, "u"),
        (1e-9, "n"),
        (1e-12, "p"),
    ];
    match steps.into_iter().find(|(step, _)| value >= *step) {
        _ if value == 0.0 => format!("0 {unit}"),
        Some((step, prefix)) => format!("{:.2} {prefix}{unit}", value / step),
        None => format!("{value:e} {unit}"),
    }
}

impl SimReport {
    /// The highest p99 of any client.
    pub fn worst_p99_seconds(&self) -> f64 {
        let clients = self.clients.iter();
        clients
            .map(|client| client.fault_latency.p99_seconds)
            .fold(0.0, f64::max)
    }

    /// The highest p99 of any client's page-outs.
    pub fn worst_page_out_seconds(&self) -> f64 {
        let clients = self.clients.iter();
        clients
            .map(|client| client.page_out_latency.p99_seconds)
            .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::Setup;
    use crate::{MemoryTrace, Sweep};

    fn results() -> Results {
        let packed: Vec<u64> = (0..2000u64)
            .map(|at| ((at * 7 % 100) * 4096) << 1 | (at % 2))
            .collect();
        let trace = MemoryTrace {
            name: "loop, \"quoted\"".to_owned(),
            granule_bytes: 1,
            clients: vec![("a".to_owned(), packed)],
            ..MemoryTrace::default()
        };
        let mut sweep = Sweep::single(Setup::default());
        sweep.memory = vec!["10%".parse().expect("valid"), "50p".parse().expect("valid")];
        sweep.tiers.push(vec![
            "ram,ratio=2".parse().expect("valid"),
            "nvme".parse().expect("valid"),
        ]);
        sweep.run(&trace, &mut |_| ()).expect("it runs")
    }

    #[test]
    fn tables_have_a_row_for_each_simulation_and_as_many_cells_everywhere() {
        let results = results();
        assert_eq!(results.outcomes.len(), 4);
        let csv = csv(&results);
        assert_eq!(csv.lines().count(), 5);
        assert!(csv.contains("\"ram,ratio=2 > nvme\""), "{csv}");
        let markdown = table(&results, Style::Markdown);
        assert!(markdown.starts_with("# Simulated"));
        let bars = |line: &str| line.matches('|').count();
        let rows: Vec<_> = markdown
            .lines()
            .filter(|line| line.starts_with('|'))
            .collect();
        assert_eq!(rows.len(), 6);
        assert!(
            rows.iter().all(|row| bars(row) == COLUMNS.len() + 1),
            "{markdown}"
        );
        assert_eq!(table(&results, Style::Plain).lines().count(), 5);
    }

    #[test]
    fn numbers_for_people_have_units() {
        assert_eq!(size(512.0), "512 B");
        assert_eq!(size(1536.0), "1.5 KiB");
        assert_eq!(duration(0.0), "0 s");
        assert_eq!(duration(0.00025), "250.00 us");
        assert_eq!(energy(12.0), "12.00 J");
    }
}
