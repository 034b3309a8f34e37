//! Policies that decide while a program runs: they must have decided, and every byte must be right.

use undercroft_tests::{Job, MIB, Outcome, build, one_at_a_time, plain_only, skip};

/// Goes round memory whose words are checked, over a pool and a file. The pool is too small for all
/// of it.
fn loop_with(options: &[&str]) -> Outcome {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let spill = folder.path().join("spill").display().to_string();
    Job::new(build("touch"))
        .args(["96", "--rounds", "5"])
        .limit(24 * MIB)
        .options(options)
        .tier("ram,max=3M")
        .tier(&format!("file:{spill},size=1G"))
        .timeout(100)
        .run()
        .expect(0)
        .expect_swapping(10_000.0)
}

fn count(outcome: &Outcome, path: &str) -> f64 {
    outcome
        .number(path)
        .unwrap_or_else(|| panic!("no number `{path}` in the report: {outcome}"))
}

#[test]
fn worth_moves_pages_between_pool_and_file_and_loses_no_byte() {
    let name = "worth_moves_pages_between_pool_and_file_and_loses_no_byte";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no tiers");
    }
    let outcome = loop_with(&["--placement", "worth"]);
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(report["policies"]["placement"], "worth", "{outcome}");
    let decisions = count(&outcome, "policies.placement_decisions");
    assert!(decisions >= 4.0, "{outcome}");
    assert!(count(&outcome, "counters.demoted") > 100.0, "{outcome}");
    for tier in 0..2 {
        let reads = report["tiers"][tier]["reads"].as_u64();
        assert!(reads > Some(100), "tier {tier}: {outcome}");
    }
}

#[test]
fn auto_has_faults_in_both_samples_and_loses_no_byte() {
    let name = "auto_has_faults_in_both_samples_and_loses_no_byte";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no policy");
    }
    let outcome = loop_with(&["--policy", "auto", "--prefetch", "none"]);
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(report["policies"]["reclaim"], "auto", "{outcome}");
    for sample in ["lru_sample_faults", "active_inactive_sample_faults"] {
        let faults = count(&outcome, &format!("policies.choice.{sample}"));
        assert!(faults > 100.0, "{sample}: {outcome}");
    }
}
