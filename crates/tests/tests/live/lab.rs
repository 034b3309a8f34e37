//! Experiments of the lab that run undercroft itself, at small sizes.

use serde_json::Value;
use undercroft_tests::{
    Job, find, one_at_a_time, plain_only, programs_folder, say, skip, undercroft,
};

#[test]
fn experiments_with_tiers_have_all_their_rows() {
    let name = "experiments_with_tiers_have_all_their_rows";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "they run undercroft themselves");
    }
    let has_fio = find("fio").is_some();
    if !has_fio {
        say(&format!("SKIPPED: {name}: tier-bandwidth: no fio"));
    }
    for (experiment, rows) in [("tier-bandwidth", 2), ("migration", 6)] {
        if experiment == "tier-bandwidth" && !has_fio {
            continue;
        }
        let out = tempfile::tempdir_in(programs_folder()).expect("a folder on a disk");
        let path = out.path().display().to_string();
        let lab = Job::new(undercroft())
            .args(["lab", "run", experiment, "--small", "--out", &path])
            .timeout(120);
        let outcome = lab.run().expect(0);
        let text = std::fs::read_to_string(out.path().join("results.json")).expect("results");
        let results: Value = serde_json::from_str(&text).expect("JSON");
        let found = results["rows"].as_array().expect("rows");
        assert_eq!(found.len(), rows, "{experiment}: {outcome}");
        for row in found {
            let ratio = row["ratio"].as_f64();
            assert!(ratio.is_some_and(|ratio| ratio > 0.0), "{row:#}");
        }
        assert_eq!(results["failures"], serde_json::json!([]), "{results:#}");
        let left = std::fs::read_dir(out.path()).expect("the folder").flatten();
        let left = left.filter(|it| it.file_name().to_string_lossy().contains("undercroft-lab"));
        assert_eq!(left.count(), 0, "files of the runs are left");
    }
}
