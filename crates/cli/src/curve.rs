//! `undercroft status --mrc`: what other limits would have cost, as a table with bars.

use undercroft_base::{Bytes, Nanos};
use undercroft_proto::report::{LimitPoint, MissRatioCurve, Snapshot};

/// Characters of the longest bar.
const BAR: usize = 24;

/// The curve of one running program.
pub(crate) fn table(snapshot: &Snapshot) -> String {
    let mut text = format!("{}  {}\n", snapshot.pid, snapshot.command_line());
    match (&snapshot.mrc, snapshot.memory_max_bytes) {
        (Some(mrc), _) => text.push_str(&limits(mrc)),
        (None, None) => text.push_str("  no limit, so nothing is known of limits\n"),
        (None, Some(_)) => {
            text.push_str("  no page has left memory yet, so nothing is known of other limits\n");
        }
    }
    text
}

fn limits(mrc: &MissRatioCurve) -> String {
    let header = ["limit", "reads", "reads/s", "from", "to", "time"].map(str::to_owned);
    let mut rows = vec![header];
    rows.extend(mrc.limits.iter().map(cells));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let most = mrc.limits.iter().map(|point| point.wall_seconds);
    let most = most.fold(f64::MIN_POSITIVE, f64::max);
    let mut text = String::new();
    if mrc.since_seconds > 0.0 {
        let since = Nanos((mrc.since_seconds * 1e9) as u64);
        text = format!("  since its limit was changed, {since} after its start\n");
    }
    for (at, row) in rows.iter().enumerate() {
        let point = at.checked_sub(1).map(|at| &mrc.limits[at]);
        let mark = if point.is_some_and(|point| point.in_force) {
            '>'
        } else {
            ' '
        };
        let mut line = format!("{mark} ");
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:>width$}  "));
        }
        if let Some(point) = point {
            let bar = (point.wall_seconds / most * BAR as f64).round() as usize;
            line.push_str(&"#".repeat(bar.clamp(1, BAR)));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn cells(point: &LimitPoint) -> [String; 6] {
    let per_second = point.swap_in / point.wall_seconds.max(f64::MIN_POSITIVE);
    let most = point
        .swap_in_most
        .map_or("more".to_owned(), |most| format!("{most:.0}"));
    [
        Bytes(point.memory_max_bytes).to_string(),
        format!("{:.0}", point.swap_in),
        format!("{per_second:.0}"),
        format!("{:.0}", point.swap_in_least),
        most,
        format!("{:.1} s", point.wall_seconds),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(mib: u64, swap_in: f64, most: Option<f64>, wall_seconds: f64) -> LimitPoint {
        LimitPoint {
            memory_max_bytes: mib << 20,
            in_force: mib == 128,
            swap_in,
            swap_in_least: swap_in * 0.9,
            swap_in_most: most,
            faults: swap_in + 10.0,
            wall_seconds,
        }
    }

    #[test]
    fn each_limit_has_a_line_and_the_present_one_a_mark() {
        let mrc = MissRatioCurve {
            pages_followed: 1000,
            pages_each: 16,
            since_seconds: 0.0,
            fault_seconds: 2e-5,
            limits: vec![
                point(64, 80_000.0, None, 8.0),
                point(128, 20_000.0, Some(20_000.0), 4.0),
                point(256, 0.0, Some(16.0), 0.0),
            ],
        };
        let text = limits(&mrc);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert!(lines[0].contains("reads/s") && lines[0].ends_with("time"));
        let words: Vec<Vec<_>> = lines
            .iter()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(words[1][2..6], ["80000", "10000", "72000", "more"]);
        assert_eq!(words[2][..5], [">", "128.0", "MiB", "20000", "5000"]);
        assert_eq!(words[1].last().map(|bar| bar.len()), Some(BAR));
        assert_eq!(words[2].last().map(|bar| bar.len()), Some(BAR / 2));
        assert_eq!(words[3].last(), Some(&"#"), "never nothing: {text}");
    }
}
