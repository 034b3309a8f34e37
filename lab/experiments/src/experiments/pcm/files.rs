//! CLOCK and CLOCK-W as policy files (`policies`) beside the rules, on the patterns of
//! `pcm-fig5`.

use super::clock_w::GENERATORS;
use super::load::generated;
use super::study::{Constants, PCM, Pages, base};
use crate::policy_file;
use crate::results::SimulatedRun;
use undercroft_base::Nanos;
use undercroft_sim::Setup;

/// Memory, percent of the footprint. The first at the small size.
const PERCENTS: [f64; 3] = [50.0, 20.0, 80.0];

/// A scan each 100 references: the files have one each 100 ms.
const REFERENCE: Nanos = Nanos(1_000_000);

/// Faults, pages written, and the seconds of both by the paper's formula, in which references take
/// no time.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    faults: u64,
    written: u64,
    seconds: f64,
}

impl Found {
    fn of(runs: &[SimulatedRun]) -> Found {
        let constants = Constants::of(PCM);
        Found {
            faults: runs.iter().map(|run| run.faults).sum(),
            written: runs.iter().map(|run| run.pages_written).sum(),
            seconds: runs.iter().map(|run| constants.total_seconds(run)).sum(),
        }
    }
}

/// Runs a pattern in these sizes of memory.
fn run(pages: &Pages<'_>, percents: &[f64], reclaim: &str, reference_time: Nanos) -> Found {
    let setup = Setup {
        reclaim: reclaim.to_owned(),
        reference_time,
        ..base()
    };
    let run = |percent: &f64| pages.simulate(*percent, &setup).expect("a run").1;
    Found::of(&percents.iter().map(run).collect::<Vec<_>>())
}

/// The patterns in a tenth of their size, or with `PCM_FULL` set in all of it.
#[test]
fn clock_and_clock_w_as_files_fault_and_write_nearly_as_the_rules_do() {
    let folder = tempfile::tempdir().expect("a directory");
    let names = ["clock", "clock_w"];
    let files = names.map(|name| policy_file::of_test(folder.path(), name, &[]));
    let [Some(clock), Some(clock_w)] = &files else {
        return;
    };
    let full = std::env::var_os("PCM_FULL").is_some();
    let percents = if full { &PERCENTS[..] } else { &PERCENTS[..1] };
    let mut sums = [[Found::default(); 2]; 2];
    for (name, text) in GENERATORS {
        let small = text.replace("pages=8000,refs=200000", "pages=800,refs=20000");
        let trace = generated(name, if full { text } else { &small }).expect("a trace");
        let pages = Pages::of(&trace, 512).expect("pages");
        for (at, file) in [clock, clock_w].into_iter().enumerate() {
            let rule = run(&pages, percents, names[at], Nanos(0));
            let of = run(&pages, percents, file, REFERENCE);
            println!("{name}, {}: {rule:?}, as a file {of:?}", names[at]);
            for (sum, found) in sums[at].iter_mut().zip([rule, of]) {
                sum.faults += found.faults;
                sum.written += found.written;
                sum.seconds += found.seconds;
            }
        }
    }
    for ((name, [rule, of]), part) in names.iter().zip(&sums).zip([0.02, 0.05]) {
        println!("all, {name}: {rule:?}, as a file {of:?}");
        let near = |of: f64, rule: f64| (of / rule - 1.0).abs() <= part;
        assert!(
            near(of.faults as f64, rule.faults as f64)
                && near(of.written as f64, rule.written as f64)
                && near(of.seconds, rule.seconds),
            "{name}: {rule:?}, {of:?}"
        );
    }
    let [[rule, of], [rule_w, of_w]] = sums;
    assert!(
        rule_w.written < rule.written && of_w.written < of.written,
        "CLOCK-W writes less than CLOCK: {sums:?}"
    );
}
