//! The NVSwap experiments at small sizes: bounds are missed without control, and kept with it.

use std::fs;
use undercroft_lab::results::Verdict;

use crate::run;

/// The experiments' claims that have a bound hold, each of `workloads` with and without control.
fn check(name: &str, workloads: usize) {
    let (out, results) = run(name);
    let found = results.simulated.as_ref().expect("simulated");
    assert_eq!(found.verdicts.len(), 3 * workloads);
    assert!(found.verdicts.iter().all(Verdict::recomputes));
    for verdict in &found.verdicts {
        assert_ne!(verdict.must_reached, Some(false), "{verdict:?}");
    }
    assert_eq!(found.tables[0].rows.len(), 2 * workloads);
    for table in &found.tables {
        for row in &table.rows {
            assert_eq!(row.len(), table.columns.len(), "{}", table.title);
        }
    }
    let text = fs::read_to_string(out.path().join("results.md")).expect("results.md");
    assert!(text.contains("**simulated**"));
    let figure = out.path().join(format!("{}.svg", &name[7..]));
    let figure = fs::read_to_string(figure).expect("a picture");
    assert!(figure.contains("simulated") && figure.contains("p99=200us") == (workloads == 1));
}

#[test]
fn one_client_keeps_its_bound() {
    check("nvswap-fig4", 1);
}

#[test]
fn three_clients_keep_their_bounds() {
    check("nvswap-fig5", 3);
}
