//! Policies that decide while a program runs: they must have decided, and every byte must be right.

use undercroft_tests::{Job, MIB, Outcome, build, one_at_a_time, plain_only, skip};

/// Goes round `mib` of memory whose words are checked, in 24 MiB, over a pool and a file.
fn loop_with(mib: &str, pool: &str, options: &[&str]) -> Outcome {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let spill = folder.path().join("spill").display().to_string();
    Job::new(build("touch"))
        .args([mib, "--rounds", "5"])
        .limit(24 * MIB)
        .options(options)
        .tier(pool)
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

/// The pool begins with nothing. The loop comes back from so near that it is worth DRAM.
#[test]
fn worth_gives_the_pool_room_that_it_earns_and_loses_no_byte() {
    let name = "worth_gives_the_pool_room_that_it_earns_and_loses_no_byte";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no tiers");
    }
    let options = ["--placement", "worth", "--prefetch", "none"];
    let outcome = loop_with("32", "ram,max=8M", &options);
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(report["policies"]["placement"], "worth", "{outcome}");
    let decisions = count(&outcome, "policies.placement_decisions");
    assert!(decisions >= 4.0, "{outcome}");
    for tier in 0..2 {
        let reads = report["tiers"][tier]["reads"].as_u64();
        assert!(reads > Some(100), "tier {tier}: {outcome}");
    }
}

/// The pool is too small for all of it.
#[test]
fn waterfall_moves_pages_from_a_full_pool_to_the_file_and_loses_no_byte() {
    let name = "waterfall_moves_pages_from_a_full_pool_to_the_file_and_loses_no_byte";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no tiers");
    }
    let outcome = loop_with("96", "ram,max=3M", &["--placement", "waterfall"]);
    assert!(count(&outcome, "counters.demoted") > 100.0, "{outcome}");
}

#[test]
fn auto_has_faults_in_both_samples_and_loses_no_byte() {
    let name = "auto_has_faults_in_both_samples_and_loses_no_byte";
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no policy");
    }
    let options = ["--policy", "auto", "--prefetch", "none"];
    let outcome = loop_with("96", "ram,max=3M", &options);
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(report["policies"]["reclaim"], "auto", "{outcome}");
    for sample in ["lru_sample_faults", "active_inactive_sample_faults"] {
        let faults = count(&outcome, &format!("policies.choice.{sample}"));
        assert!(faults > 100.0, "{sample}: {outcome}");
    }
}
