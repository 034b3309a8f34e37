//! Policies that decide while a program runs: they must have decided, and every byte must be right.

use undercroft_tests::{Job, MIB, Outcome, build, find, mix, say, skip, turn};

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
    turn!(one_at_a_time, "a plain run has no tiers");
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
    turn!(beside_others, "a plain run has no policy");
    let outcome = loop_with(&["--policy", "auto", "--prefetch", "none"]);
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(report["policies"]["reclaim"], "auto", "{outcome}");
    for sample in ["lru_sample_faults", "active_inactive_sample_faults"] {
        let faults = count(&outcome, &format!("policies.choice.{sample}"));
        assert!(faults > 100.0, "{sample}: {outcome}");
    }
}

/// A program with its input in the folder of the run.
struct Program {
    name: &'static str,
    needs: &'static str,
    command: &'static str,
}

const PROGRAMS: [Program; 2] = [
    Program {
        name: "sort",
        needs: "sort",
        command: "LC_ALL=C sort --parallel=2 -S 900M lines | cksum",
    },
    Program {
        name: "sqlite",
        needs: "sqlite3",
        command: r#"sqlite3 :memory: "PRAGMA temp_store=MEMORY;
CREATE TABLE t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<200000)
    SELECT x*7919%1000003 AS a, hex(x) AS b FROM c;
CREATE TABLE u AS SELECT a*3%1000003 AS a, b FROM t;
CREATE INDEX i ON t(a);
SELECT count(*), sum(length(t.b)+length(u.b)) FROM u JOIN t ON t.a=u.a;""#,
    },
];

/// Faults that read a tier with the default tiers may be this many times those with a file alone,
/// which is the best fixed setting of these programs, and
const TIMES: f64 = 2.5;
/// this many more: where there are few, chance decides.
const FEW: f64 = 500.0;

/// The quick part of `undercroft-lab run programs`: it counts faults, not seconds. The decision how
/// DRAM is split once cost these programs a hundred times the faults that a file alone has.
#[test]
fn defaults_never_fault_far_more_often_than_a_file_alone() {
    turn!(one_at_a_time, "a plain run has no faults that read");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let lines: String = (0..800_000)
        .map(|line| format!("{:016x}\n", mix(line)))
        .collect();
    std::fs::write(folder.path().join("lines"), lines).expect("the input of sort");
    for program in &PROGRAMS {
        if find(program.needs).is_none() {
            skip(&format!("no {}", program.needs));
            continue;
        }
        let job = Job::new("/bin/sh")
            .args(["-c", program.command])
            .folder(folder.path());
        let plain = job.run().expect(0);
        for percent in [75, 50] {
            let limit = plain.anonymous_peak * percent / 100;
            let spill = folder.path().join("spill").display().to_string();
            let file = format!("file:{spill},size=1G");
            let squeezed = job.clone().limit(limit);
            let count_of = |job: Job| {
                let outcome = job.run().expect(0);
                assert_eq!(outcome.text(), plain.text(), "{}: {outcome}", program.name);
                count(&outcome, "faults.swap_in")
            };
            let alone = count_of(squeezed.clone().tier(&file));
            let default = count_of(squeezed.tier("ram").tier(&file));
            say(&format!(
                "{} at {percent} %: {default} faults that read, {alone} with a file alone",
                program.name
            ));
            assert!(default > 0.0, "{} at {percent} % reads", program.name);
            assert!(
                default <= alone * TIMES + FEW,
                "{} at {percent} %: {default} faults that read, {alone} with a file alone",
                program.name
            );
        }
    }
}
