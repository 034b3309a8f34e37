//! The HybridSwap experiment at small sizes: the SSD is written less, and sequences save faults.

use undercroft_lab::RunOptions;
use undercroft_lab::results::{Results, Verdict};

#[test]
fn a_disk_saves_writes_to_the_ssd_and_sequences_save_faults() {
    let out = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let options = RunOptions {
        out: out.path().to_owned(),
        small: true,
        touch_command: Some(vec![env!("CARGO_BIN_EXE_undercroft-touch").into()]),
        ..RunOptions::default()
    };
    undercroft_lab::run("hybridswap-table5.2", &options).expect("it runs");
    let results = Results::read(&out.path().join("results.json")).expect("results.json parses");
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
