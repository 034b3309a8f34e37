//! The PCM experiments at small sizes: claims are judged and follow from the runs, and every
//! picture says "simulated".

use std::fs;
use std::path::Path;
use undercroft_experiments::results::{Results, SimulatedRun, Verdict};

use crate::run;

fn verdict<'a>(results: &'a Results, part: &str) -> &'a Verdict {
    let simulated = results.simulated.as_ref().expect("simulated");
    let mut verdicts = simulated.verdicts.iter();
    verdicts
        .find(|verdict| verdict.measure.contains(part))
        .unwrap_or_else(|| panic!("no verdict on `{part}`"))
}

fn assert_shown(out: &Path, results: &Results, runs: usize) {
    let simulated = results.simulated.as_ref().expect("simulated");
    assert!(simulated.verdicts.iter().all(Verdict::recomputes));
    assert_eq!(simulated.runs.len(), runs);
    assert!(simulated.traces.len() >= 4);
    let text = fs::read_to_string(out.join("results.md")).expect("results.md");
    assert!(text.contains("**simulated**"));
    for verdict in &simulated.verdicts {
        assert!(verdict.ours.is_finite(), "{}", verdict.measure);
        assert!(text.contains(&verdict.measure), "{}", verdict.measure);
    }
    for table in &simulated.tables {
        assert!(!table.rows.is_empty() || table.title.contains("worse"));
        for row in &table.rows {
            assert_eq!(row.len(), table.columns.len(), "{}", table.title);
        }
    }
    for figure in &simulated.figures {
        let svg = fs::read_to_string(out.join(format!("{}.svg", figure.name))).expect("svg");
        assert!(
            svg.contains("simulated") && svg.contains("</svg>"),
            "{}",
            figure.name
        );
        for panel in &figure.panels {
            assert!(svg.contains(&panel.title), "{}", panel.title);
            for (_, values) in &panel.series {
                assert_eq!(values.len(), panel.places.len());
            }
        }
    }
}

#[test]
fn table1_shows_ours_beside_the_papers() {
    let (out, results) = run("pcm-table1");
    assert_shown(out.path(), &results, 0);
    let text = fs::read_to_string(out.path().join("results.md")).expect("results.md");
    for name in ["xmms (paper)", "1 : 5.13", "13.93 : 1", "kghostview-like"] {
        assert!(text.contains(name), "{name}");
    }
}

#[test]
fn fig2_has_both_devices_and_the_disk_prefers_large_pages() {
    let (out, results) = run("pcm-fig2");
    assert_shown(out.path(), &results, 4 * 9 * 2 * 2);
    assert!(verdict(&results, "on the disk").must_reached.is_some());
}

#[test]
fn fig3_average_follows_from_the_runs() {
    let (out, results) = run("pcm-fig3");
    // Four programs in every page size, and four that are shown for comparison only.
    assert_shown(out.path(), &results, 4 * 9 * 11 + 4 * 2 * 11);
    let simulated = results.simulated.as_ref().expect("simulated");
    let mut saved = Vec::new();
    let judged = |run: &&SimulatedRun| run.page_bytes == 512 && run.trace.ends_with("-like");
    for small in simulated.runs.iter().filter(judged) {
        let large = simulated.runs.iter().find(|run| {
            run.page_bytes == 4096
                && run.trace == small.trace
                && run.memory_percent == small.memory_percent
        });
        let large = large.expect("the same with 4 KB");
        saved.push(100.0 * (1.0 - small.elapsed_seconds / large.elapsed_seconds));
    }
    let mean = saved.iter().sum::<f64>() / saved.len() as f64;
    assert_eq!(saved.len(), 4 * 11);
    let told = verdict(&results, "average over workloads");
    assert!((told.ours - mean).abs() < 1e-9 && told.must == Some(40.0));
    assert_eq!(told.must_reached, Some(mean >= 40.0));
}

#[test]
fn fig4_window_of_pages_nobody_uses_costs_time() {
    let (out, results) = run("pcm-fig4");
    assert_shown(out.path(), &results, 4 * 10);
    // Pages of a zipf trace are scattered, so pages that come along are not used.
    assert!(verdict(&results, "window of 8, average").ours > 10.0);
}

#[test]
fn fig5_counts_every_case_and_equals_at_full_memory() {
    let (out, results) = run("pcm-fig5");
    assert_shown(out.path(), &results, ((4 + 4) * 2 + 8) * 11 * 2);
    let simulated = results.simulated.as_ref().expect("simulated");
    let mut worst: f64 = 0.0;
    for pair in simulated.runs.chunks(2) {
        assert_eq!(
            (pair[0].reclaim.as_str(), pair[1].reclaim.as_str()),
            ("clock", "clock_w")
        );
        assert_eq!(pair[0].memory_pages, pair[1].memory_pages);
        let ratio = pair[1].elapsed_seconds / pair[0].elapsed_seconds;
        if pair[0].memory_percent == 100.0 {
            assert_eq!(ratio, 1.0, "nothing is replaced");
        }
        worst = worst.max(ratio);
    }
    let told = verdict(&results, "worst time under CLOCK-W");
    assert!((told.ours - worst).abs() < 1e-12);
    assert_eq!(told.must_reached, Some(worst <= 1.0));
}

#[test]
fn fig6_energy_adds_up() {
    let (out, results) = run("pcm-fig6");
    assert_shown(out.path(), &results, 8);
    let simulated = results.simulated.as_ref().expect("simulated");
    let mut saved = Vec::new();
    for pair in simulated.runs.chunks(2) {
        let joules = |run: usize| pair[run].energy_joules.expect("energy");
        saved.push(100.0 * (1.0 - joules(0) / joules(1)));
    }
    let told = verdict(&results, "average");
    let mean = saved.iter().sum::<f64>() / saved.len() as f64;
    assert!((told.ours - mean).abs() < 1e-9);
}
