//! `undercroft status --mrc`: what other limits would have cost, as a table with bars.

use undercroft_base::Bytes;
use undercroft_proto::report::{CurveBegan, LimitPoint, MissRatioCurve, Snapshot};

/// Characters of the longest bar.
const BAR: usize = 24;

/// The curve of one running program.
pub(crate) fn table(snapshot: &Snapshot) -> String {
    let mut text = format!("{}  {}\n", snapshot.pid, snapshot.command_line());
    match (&snapshot.mrc, snapshot.memory_max_bytes) {
        (Some(mrc), _) => text.push_str(&limits(mrc)),
        (None, None) => text.push_str("  no limit, so nothing is known of limits\n"),
        (None, Some(_)) => {
            text.push_str(
                "  nothing is known of other limits yet: no page has left memory, or too few since \
                 its manager was replaced\n",
            );
        }
    }
    text
}

fn limits(mrc: &MissRatioCurve) -> String {
    let header = ["limit", "reads", "from", "to", "time"].map(str::to_owned);
    let mut rows = vec![header];
    rows.extend(mrc.limits.iter().map(cells));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let most = mrc.limits.iter().map(|point| point.swap_in);
    let most = most.fold(f64::MIN_POSITIVE, f64::max);
    let mut text = match mrc.began {
        CurveBegan::Start => "",
        CurveBegan::Limit => "  since its limit was changed\n",
        CurveBegan::Manager => "  since its manager was replaced, and had seen enough\n",
    }
    .to_owned();
    if mrc.fault_seconds.is_none() {
        text.push_str("  what a fault costs could not be measured: no times of other limits\n");
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
            let bar = (point.swap_in / most * BAR as f64).ceil() as usize;
            line.push_str(&"#".repeat(bar));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn cells(point: &LimitPoint) -> [String; 5] {
    let time = match (point.wall_seconds, point.wall_seconds_most) {
        (Some(seconds), _) => format!("{seconds:.1} s"),
        (None, Some(most)) => format!("<{most:.1} s"),
        (None, None) => "-".to_owned(),
    };
    let most = point
        .swap_in_most
        .map_or("more".to_owned(), |most| format!("{most:.0}"));
    [
        Bytes(point.memory_max_bytes).to_string(),
        format!("{:.0}", point.swap_in),
        format!("{:.0}", point.swap_in_least),
        most,
        time,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(mib: u64, swap_in: f64, most: Option<f64>, seconds: Option<f64>) -> LimitPoint {
        LimitPoint {
            memory_max_bytes: mib << 20,
            in_force: mib == 128,
            swap_in,
            swap_in_least: swap_in * 0.9,
            swap_in_most: most,
            faults: swap_in + 10.0,
            wall_seconds: seconds,
            wall_seconds_most: (mib > 128).then_some(2.5),
        }
    }

    #[test]
    fn each_limit_has_a_line_and_the_present_one_a_mark() {
        let mrc = MissRatioCurve {
            pages_followed: 1000,
            pages_each: 16,
            since_seconds: 3.0,
            began: CurveBegan::Manager,
            fault_seconds: Some(2e-5),
            limits: vec![
                point(64, 80_000.0, None, None),
                point(128, 20_000.0, Some(20_000.0), Some(4.0)),
                point(192, 10.0, Some(16.0), None),
                point(256, 0.0, Some(16.0), Some(2.0)),
            ],
        };
        let text = limits(&mrc);
        let (first, text) = text.split_once('\n').expect("lines");
        assert!(first.contains("manager was replaced"), "{first}");
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 5, "{text}");
        let words: Vec<Vec<_>> = lines
            .iter()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(words[0], ["limit", "reads", "from", "to", "time"]);
        let bar = |length: usize| "#".repeat(length);
        let full = bar(BAR);
        assert_eq!(words[1][2..], ["80000", "72000", "more", "-", &full]);
        let quarter = bar(BAR / 4);
        let second = [">", "128.0", "MiB", "20000", "18000", "20000", "4.0", "s"];
        assert_eq!(words[2][..8], second);
        assert_eq!(words[2][8], quarter);
        assert!(lines[3].ends_with(" <2.5 s  #"), "{text}");
        assert!(lines[4].ends_with(" 2.0 s"), "no reads, no bar: {text}");
    }
}
