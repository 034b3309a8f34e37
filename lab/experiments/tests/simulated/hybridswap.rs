//! The HybridSwap experiments at small sizes: the SSD is written less, sequences save faults, and
//! stall bounds are kept.

use undercroft_experiments::results::Verdict;

use crate::run;

#[test]
fn a_stall_bound_is_kept_between_what_disk_and_ssd_give() {
    let (out, results) = run("hybridswap-fig5.9");
    let found = results.simulated.as_ref().expect("simulated");
    // Two for each bound that all have: how near it is, and the pages on the disk.
    assert_eq!(found.verdicts.len(), 5, "{:?}", found.verdicts);
    for verdict in &found.verdicts {
        assert!(verdict.recomputes());
        // Beside two instances without a bound, the devices are not its own.
        let alone = !verdict.measure.contains("for the first");
        assert!(!alone || verdict.must_reached == Some(true), "{verdict:?}");
    }
    assert!(out.path().join("fig5.9.svg").exists());
}

#[test]
fn a_disk_saves_writes_to_the_ssd_and_sequences_save_faults() {
    let (out, results) = run("hybridswap-table5.2");
    let found = results.simulated.as_ref().expect("simulated");
    assert_eq!(found.verdicts.len(), 4 * 3 + 1);
    assert!(found.verdicts.iter().all(Verdict::recomputes));
    for verdict in &found.verdicts {
        let is_time = verdict.measure.ends_with("run time");
        assert!(
            is_time || verdict.must_reached != Some(false),
            "{verdict:?}"
        );
    }
    for row in &found.tables[0].rows {
        assert_eq!(row.len(), found.tables[0].columns.len());
    }
    let text = std::fs::read_to_string(out.path().join("results.md")).expect("results.md");
    assert!(text.contains("**simulated**"));
    assert!(out.path().join("table5.2.svg").exists());
}

#[test]
fn striped_pages_wait_for_the_disk_and_sequences_save_faults_beside_it() {
    let (out, results) = run("hybridswap-fig5.8");
    let found = results.simulated.as_ref().expect("simulated");
    assert!(found.verdicts.iter().all(Verdict::recomputes));
    let ours = |measure: &str| {
        let named = |of: &&Verdict| of.measure.starts_with(measure);
        found.verdicts.iter().find(named).expect(measure).ours
    };
    assert!(ours("7 instances: major faults, against the SSD") < -20.0);
    assert!(ours("7 instances: waits for devices, against striped") < -43.0);
    // Where each write takes 1 ms, an SSD alone is overwhelmed, and a disk beside it saves waits.
    assert!(ours("SSD written at random: waits of 7 instances, against it alone") < -20.0);
    // Two ends of the axis, two SSDs, three ways to swap. Striped pages are on both devices alike.
    let rows = &found.tables[0].rows;
    assert_eq!((rows.len(), found.runs.len()), (6, 12));
    let written = |at: usize| rows[4][at].parse::<f64>().expect("a number");
    assert!(
        (written(5) / written(6) - 1.0).abs() < 0.01,
        "{:?}",
        rows[4]
    );
    assert!(out.path().join("fig5.8.svg").exists());
}

#[test]
fn sequences_save_faults_and_movements_of_the_head_beside_striped_pages() {
    let (out, results) = run("hybridswap-fig5.5");
    let found = results.simulated.as_ref().expect("simulated");
    assert!(found.verdicts.iter().all(Verdict::recomputes));
    let ours = |measure: &str| {
        let named = |of: &&Verdict| of.measure == measure;
        found.verdicts.iter().find(named).expect(measure).ours
    };
    assert!(ours("correlation: major faults, against the SSD alone") < -35.0);
    assert!(ours("correlation: major faults, against striped") < -35.0);
    assert!(ours("image: major faults, against striped") < -40.9);
    assert!(ours("image: movements of the head for 1,000 pages, against striped") < -50.0);
    // Two programs, three ways to swap. The head's table has the two that use a disk, and counts
    // what the devices count.
    assert_eq!((found.tables.len(), found.runs.len()), (3, 6));
    let head = &found.tables[2];
    assert_eq!(head.rows.len(), 4);
    for (row, run) in head.rows.iter().zip([1, 2, 4, 5].map(|at| &found.runs[at])) {
        let number = |at: usize| row[at].parse::<u64>().expect("a number");
        assert!(
            number(2) < run.pages_written && number(3) < run.pages_read,
            "{row:?}"
        );
        assert!(
            number(5) > 0 && number(5) <= number(2) + number(4),
            "{row:?}"
        );
    }
    assert!(out.path().join("fig5.5.svg").exists());
}
