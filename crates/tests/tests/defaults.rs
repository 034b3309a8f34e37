//! The default settings beside fixed ones: real programs have hardly more faults that read. Faults
//! are counted, so a busy machine changes little. `undercroft lab run programs` has more programs.

use undercroft_tests::{Job, find, one_at_a_time, plain_only, say, skip};

/// Settings that do not adapt, and one that adapts in another way.
const FIXED: [(&str, &[&str]); 5] = [
    ("file alone", &[]),
    ("lru", &["--policy", "lru"]),
    ("clock", &["--policy", "clock"]),
    ("clock_w", &["--policy", "clock_w"]),
    ("auto", &["--policy", "auto"]),
];

/// Faults before the policies can know anything: `worth` decides every 512 refaults. Runs of one
/// setting differ by that much, too (sqlite: 197 to 732 in seven runs).
const LEARNING: f64 = 512.0;

/// Faults that read a tier: the fewer of two runs.
fn faults(script: &str, limit: u64, has_pool: bool, options: &[&str]) -> f64 {
    let run = || {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let spill = folder.path().join("spill").display().to_string();
        let mut job = Job::new("sh").args(["-c", script]);
        job = job.folder(folder.path()).limit(limit).options(options);
        if has_pool {
            job = job.tier("ram");
        }
        let job = job.tier(&format!("file:{spill},size=2G")).timeout(60);
        let outcome = job.run().expect(0).expect_swapping(1000.0);
        outcome.number("faults.swap_in").expect("a report")
    };
    run().min(run())
}

fn defaults_are_near_the_best(name: &str, needs: &str, script: &str, percent: u64) {
    let _turn = one_at_a_time();
    if plain_only() {
        return skip(name, "a plain run has no limit");
    }
    if find(needs).is_none() {
        return skip(name, &format!("{needs} is not installed"));
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let plain = Job::new("sh")
        .args(["-c", script])
        .folder(folder.path())
        .run();
    let limit = (plain.expect(0).anonymous_peak * percent / 100) & !0xfff;
    let default = faults(script, limit, true, &[]);
    let all = FIXED.map(|(fixed, options)| {
        let found = faults(script, limit, fixed != "file alone", options);
        (fixed, found)
    });
    let best = all.iter().map(|(_, found)| *found).fold(f64::MAX, f64::min);
    say(&format!(
        "{name}: {default} with defaults, others {all:?}, limit {limit}"
    ));
    assert!(
        default <= 1.15 * best + LEARNING,
        "{default} with defaults: {all:?}"
    );
}

#[test]
fn defaults_have_hardly_more_faults_than_fixed_settings_in_sqlite() {
    let script = r#"sqlite3 :memory: "PRAGMA temp_store=MEMORY;
CREATE TABLE t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<400000)
    SELECT x*7919%1000003 AS a, hex(x) AS b FROM c;
CREATE TABLE u AS SELECT a*3%1000003 AS a, b FROM t;
CREATE INDEX i ON t(a);
SELECT count(*), sum(length(t.b)+length(u.b)) FROM u JOIN t ON t.a=u.a;""#;
    let name = "defaults_have_hardly_more_faults_than_fixed_settings_in_sqlite";
    defaults_are_near_the_best(name, "sqlite3", script, 75);
}

#[test]
fn defaults_have_hardly_more_faults_than_fixed_settings_in_gcc() {
    let script = r#"i=0
while [ $i -lt 400 ]; do
    echo "int f$i(int a,int*b){int s=0;for(int i=0;i<a;i++)s+=b[i]*$i^(s>>$((i%7+1)));return s;}"
    i=$((i+1))
done > big.c
gcc -O2 -S -o - big.c | cksum"#;
    let name = "defaults_have_hardly_more_faults_than_fixed_settings_in_gcc";
    defaults_are_near_the_best(name, "gcc", script, 50);
}
