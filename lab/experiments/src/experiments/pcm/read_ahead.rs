//! `pcm-fig4`: time over the read-ahead window, pages of 512 bytes in a tenth of the footprint.

use super::load::{Loaded, load, walkers};
use super::study::{Constants, PCM, Pages, base, find, mean, model};
use crate::experiments::{Lab, progress};
use crate::results::{Figure, Panel, Simulated, SimulatedRun, Table, Verdict, number};
use undercroft_sim::Setup;

const WINDOWS: [u32; 9] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

fn policy(window: u32) -> String {
    match window {
        0 => "none".to_owned(),
        pages => format!("window:{pages}"),
    }
}

pub(in crate::experiments) fn run(lab: &Lab) -> anyhow::Result<Simulated> {
    let mut found = Simulated::of(model());
    found.model.push(
        "A window of N brings the next N pages along with every fault, used or not (`window:N`); \
         each page pays its own T_access. \
         For comparison Linux's own rule, which stops where nothing is used (`readahead:8`)."
            .to_owned(),
    );
    let loaded = load(lab, &mut found)?;
    let walkers = walkers(lab, &mut found)?;
    let (walked, walked_saved) = walk(&walkers)?;
    let mut policies: Vec<String> = WINDOWS.map(policy).to_vec();
    policies.push("readahead:8".to_owned());
    for trace in &loaded {
        progress(&trace.facts.name);
        let pages = Pages::of(trace, 512)?;
        for prefetch in &policies {
            let setup = Setup {
                prefetch: prefetch.clone(),
                ..base()
            };
            found.runs.push(pages.simulate(10.0, &setup)?.1);
        }
    }
    let elapsed = |run: &SimulatedRun| run.elapsed_seconds;
    let gains = saved(&loaded, &found.runs, &elapsed, "window:8")?;
    let linux = saved(&loaded, &found.runs, &elapsed, "readahead:8")?;
    let (table, panels) = windows(&loaded, &found.runs, &gains, &linux)?;
    found.tables = vec![table, open_constants(&loaded, &found.runs)?, walked];
    found.verdicts = verdicts(&gains, &linux, &walked_saved);
    found.figures = vec![Figure::lines(
        "fig4",
        "Total time on PCM over the read-ahead window, 512 B pages, memory 10 %",
        ["pages read ahead", "seconds"],
        panels,
    )];
    Ok(found)
}

/// The run of a trace with a prefetch policy.
fn at<'a>(
    runs: &'a [SimulatedRun],
    trace: &str,
    prefetch: &str,
) -> anyhow::Result<&'a SimulatedRun> {
    find(runs, |run| run.trace == trace && run.prefetch == prefetch)
}

/// Percent of the time that each program saves without read-ahead, against the policy `against`.
fn saved(
    loaded: &[Loaded],
    runs: &[SimulatedRun],
    time: &dyn Fn(&SimulatedRun) -> f64,
    against: &str,
) -> anyhow::Result<Vec<f64>> {
    let each = loaded.iter().map(|trace| {
        let name = &trace.facts.name;
        let (off, on) = (at(runs, name, "none")?, at(runs, name, against)?);
        Ok(100.0 * (1.0 - time(off) / time(on)))
    });
    each.collect()
}

/// Each program's times over the window, as a table and as panels.
fn windows(
    loaded: &[Loaded],
    runs: &[SimulatedRun],
    gains: &[f64],
    linux: &[f64],
) -> anyhow::Result<(Table, Vec<Panel>)> {
    let (mut panels, mut rows) = (Vec::new(), Vec::new());
    for (index, trace) in loaded.iter().enumerate() {
        let name = &trace.facts.name;
        let times: anyhow::Result<Vec<f64>> = WINDOWS
            .iter()
            .map(|window| Ok(at(runs, name, &policy(*window))?.elapsed_seconds))
            .collect();
        let times = times?;
        let mut row = vec![name.clone()];
        row.extend(times.iter().map(|time| number(*time)));
        row.push(number(at(runs, name, "readahead:8")?.elapsed_seconds));
        row.push(format!("{:.1}", gains[index]));
        row.push(format!("{:.1}", linux[index]));
        rows.push(row);
        panels.push(Panel::new(
            name.clone(),
            WINDOWS.iter().map(u32::to_string),
            [("window", times)],
        ));
    }
    let columns = format!(
        "seconds | {} | readahead:8 | off saves % of 8 | of readahead:8",
        WINDOWS.map(|window| window.to_string()).join(" | ")
    );
    let title = "Time over the read-ahead window";
    Ok((Table::new(title, "", &columns, rows), panels))
}

fn open_constants(loaded: &[Loaded], runs: &[SimulatedRun]) -> anyhow::Result<Table> {
    let constants = Constants::of(PCM);
    let mut rows = Vec::new();
    for write in [0.5, 1.0, 2.0, 4.0, 8.0] {
        let scaled = constants.scaled(1.0, 1.0, write);
        let time = |run: &SimulatedRun| scaled.total_seconds(run);
        rows.push(vec![
            format!("{:.1} x a read", scaled.write[1] / scaled.read[1]),
            format!("{:.1}", mean(&saved(loaded, runs, &time, "window:8")?)),
        ]);
    }
    Ok(Table::new(
        "How the average depends on the open constants, percent saved",
        "T_access and T_transfer have the same ratio of writes to reads, so at one page size \
               nothing else matters.",
        "a write takes | saved",
        rows,
    ))
}

fn verdicts(gains: &[f64], linux: &[f64], walked_saved: &[f64]) -> Vec<Verdict> {
    let most = gains.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    vec![
        Verdict::higher(
            "time saved by no read-ahead against a window of 8, average",
            "%",
            mean(gains),
        )
        .paper(51.6)
        .target(35.0, Some(50.0))
        .difference("a window costs the pages of it that leave unused."),
        Verdict::higher("the same, largest", "%", most).paper(80.7),
        Verdict::higher(
            "the same against Linux's rule (readahead:8), average",
            "%",
            mean(linux),
        ),
        Verdict::higher(
            "for comparison: the saving against a window of 8 with programs that walk through their memory in order",
            "%",
            mean(walked_saved),
        ),
    ]
}

/// Programs that walk through their memory in order: no window against a window of 8. The table,
/// and each program's saving in percent.
fn walk(walkers: &[Loaded]) -> anyhow::Result<(Table, Vec<f64>)> {
    let (mut rows, mut all) = (Vec::new(), Vec::new());
    for trace in walkers {
        progress(&trace.facts.name);
        let pages = Pages::of(trace, 512)?;
        let time = |prefetch: &str| -> anyhow::Result<f64> {
            let setup = Setup {
                prefetch: prefetch.to_owned(),
                ..base()
            };
            Ok(pages.simulate(10.0, &setup)?.1.elapsed_seconds)
        };
        let (none, window, linux) = (time("none")?, time("window:8")?, time("readahead:8")?);
        let saved = |with: f64| 100.0 * (1.0 - none / with);
        rows.push(vec![
            trace.facts.name.clone(),
            number(none),
            number(window),
            number(linux),
            format!("{:.1}", saved(window)),
            format!("{:.1}", saved(linux)),
        ]);
        all.push(saved(window));
    }
    let table = Table::new(
        "Programs that walk through their memory in order",
        "For comparison, not in the claims above.",
        "seconds | 0 | 8 | readahead:8 | off saves % of 8 | of readahead:8",
        rows,
    );
    Ok((table, all))
}
