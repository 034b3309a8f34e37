//! The NVSwap experiments at small sizes: bounds are missed without control, and kept with it; the
//! buffer takes page-outs faster; a bound is kept once it is changed; another client slows an SSD
//! down; a copy costs little more than mapping in place.

use std::fs;
use undercroft_experiments::results::{Simulated, Verdict};

use crate::run;

/// Runs an experiment, and checks its form. Its claims that have a bound hold.
fn findings(name: &str) -> (tempfile::TempDir, Simulated) {
    let (out, results) = run(name);
    let found = results.simulated.expect("simulated");
    assert!(found.verdicts.iter().all(Verdict::recomputes));
    for verdict in &found.verdicts {
        assert_ne!(verdict.must_reached, Some(false), "{verdict:?}");
    }
    for table in &found.tables {
        for row in &table.rows {
            assert_eq!(row.len(), table.columns.len(), "{}", table.title);
        }
    }
    let text = fs::read_to_string(out.path().join("results.md")).expect("results.md");
    assert!(text.contains("**simulated**"));
    let figure = out.path().join(format!("{}.svg", &name[7..]));
    let figure = fs::read_to_string(figure).expect("a picture");
    assert!(figure.contains("simulated"));
    (out, found)
}

/// Ours, of the claim whose name begins with this.
fn ours(found: &Simulated, begins: &str) -> f64 {
    let verdicts = found.verdicts.iter();
    let mut verdicts = verdicts.filter(|verdict| verdict.measure.starts_with(begins));
    let verdict = verdicts.next().expect(begins);
    assert!(verdicts.next().is_none(), "{begins} is one claim");
    verdict.ours
}

#[test]
fn one_client_keeps_its_bound_and_its_page_outs_are_faster() {
    let (_out, found) = findings("nvswap-fig4");
    assert_eq!(found.verdicts.len(), 3 + 4);
    assert_eq!(found.tables[0].rows.len(), 2);
    assert_eq!(found.tables[1].rows.len(), 3);
}

#[test]
fn three_clients_keep_their_bounds() {
    let (_out, found) = findings("nvswap-fig5");
    assert_eq!(found.verdicts.len(), 3 * 3);
    assert_eq!(found.tables[0].rows.len(), 2 * 3);
    assert_eq!(found.tables[1].rows.len(), 3 * 3);
}

/// The claims have bounds of their own: windows kept, and how soon after a change.
#[test]
fn a_bound_that_is_changed_is_kept_and_the_other_client_keeps_its_own() {
    let (_out, found) = findings("nvswap-fig6");
    let buffer = ours(&found, "C, p99=600us: page-ins that the buffer serves");
    assert!(buffer > 80.0, "C is served by the buffer at last: {buffer}");
    // A row for each run, bound of C, and client.
    let rows = &found.tables[0].rows;
    assert_eq!(rows.len(), 3 * 3 * 2 + 3 * 2);
    let bounds_of_c = |run: usize| {
        let rows = rows[6 * run..6 * (run + 1)].iter();
        rows.filter(|row| row[2] == "C").map(|row| row[3].clone())
    };
    let changed = ["p99=1ms", "p99=800us", "p99=600us"];
    assert!(bounds_of_c(0).eq(changed) && bounds_of_c(2).eq(changed));
    assert!(bounds_of_c(1).eq(["p99=1ms"; 3]));
    // Without the changes, the device serves C to the end.
    let last: f64 = rows[6 + 5][9].parse().expect("a percentage");
    assert!(last < 20.0, "C stays at the device: {last}");
}

#[test]
fn two_clients_on_an_ssd_wait_longer_than_one() {
    let (_out, found) = findings("nvswap-fig1");
    let reads = |servers| ours(&found, &format!("{servers}: p99 of reads"));
    assert!(reads("one server") > 5.0 * 34.0, "{:?}", found.verdicts);
    assert!(reads("two servers") > reads("one server"));
    let times = ours(&found, "p99 of reads of the database: two");
    let ratio = reads("two servers") / reads("one server");
    assert!((times - ratio).abs() < 0.01, "{times} {ratio}");
    let page_outs = ours(&found, "one server: p99 of page-outs");
    assert!(page_outs > 640.0 / 34.0, "a write takes 640 us");
}

#[test]
fn a_copy_costs_little_more_than_mapping_in_place() {
    let (_out, found) = findings("nvswap-fig7");
    let above = |page| {
        ours(
            &found,
            &format!("p99 of operations above direct mapping, page {page}"),
        )
    };
    let (within, out) = (above("copied within"), above("copied to DRAM"));
    assert!(0.0 < out && out < within && within < 20.0, "{out} {within}");
}
