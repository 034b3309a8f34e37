//! Unmodified programs in a quarter to a half of their memory: their output is bit-identical to
//! that of a plain run.

use std::fmt::Write;

use undercroft_tests::{
    Job, MIB, Outcome, beside_others, find, mix, plain_only, rounds, say, skip,
};

/// How a program is squeezed.
struct Squeeze {
    /// Percent of the plain run's peak of anonymous memory.
    percent: u64,
    tier: &'static str,
    /// Pages that must have been swapped out for the result to mean anything.
    pages: f64,
}

const RAM_25: Squeeze = Squeeze {
    percent: 25,
    tier: "ram",
    pages: 2000.0,
};
const RAM_40: Squeeze = Squeeze {
    percent: 40,
    tier: "ram",
    pages: 2000.0,
};
const FILE_50: Squeeze = Squeeze {
    percent: 50,
    tier: "file:SPILL,size=2G",
    pages: 2000.0,
};

/// Runs plain, measures, then runs squeezed. Both runs end with 0 and write the same bytes to
/// standard output and, if given, to the file `product` (made anew in each run).
fn same_as_plain(
    name: &str,
    job: &Job,
    product: Option<&std::path::Path>,
    squeezes: &[Squeeze],
) -> Outcome {
    let _turn = beside_others();
    let read = || product.map(|path| std::fs::read(path).expect("the program's product"));
    let plain = job.run().expect(0);
    let plain_product = read();
    assert!(
        !plain.output.is_empty() || product.is_some(),
        "nothing to compare: {plain}"
    );
    assert!(
        plain.anonymous_peak > 8 * MIB,
        "too small to squeeze: {plain}"
    );
    for squeeze in squeezes {
        if let Some(path) = product {
            std::fs::remove_file(path).expect("the plain product");
        }
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let spill = scratch.path().join("spill").display().to_string();
        let limit = plain.anonymous_peak * squeeze.percent / 100;
        let squeezed = job
            .clone()
            .limit(limit)
            .tier(&squeeze.tier.replace("SPILL", &spill))
            .run()
            .expect(0);
        assert_eq!(
            squeezed.text(),
            plain.text(),
            "{name} at {} %: the output differs: {squeezed}",
            squeeze.percent
        );
        assert!(
            read() == plain_product,
            "{name}: the product differs: {squeezed}"
        );
        say(&format!(
            "{name}: identical at {} % of {} MiB on {}; {:.1?} plain, {:.1?} squeezed",
            squeeze.percent,
            plain.anonymous_peak / MIB,
            squeeze.tier,
            plain.wall,
            squeezed.wall
        ));
        squeezed.expect_swapping(squeeze.pages);
    }
    if plain_only() {
        skip("compared plain with plain: UNDERCROFT_TEST_PLAIN is set");
    }
    plain
}

/// Debian's Python, which finds Debian's numpy whatever `python3` comes first in `PATH`.
fn python() -> Option<&'static str> {
    ["/usr/bin/python3"]
        .into_iter()
        .find(|path| std::path::Path::new(path).exists())
}

#[test]
fn numpy_product_and_sort_are_identical() {
    let name = "numpy_product_and_sort_are_identical";
    let Some(python) = python() else {
        return skip("no /usr/bin/python3");
    };
    if Job::new(python).args(["-c", "import numpy"]).run().code() != Some(0) {
        return skip("no numpy; on Debian: apt-get install python3-numpy");
    }
    let script = r#"
import numpy, hashlib
rng = numpy.random.default_rng(7)
def digest(array): return hashlib.sha256(array.tobytes()).hexdigest()
a = rng.standard_normal((900, 900)); b = rng.standard_normal((900, 900))
print("product", digest(a @ b))
v = rng.integers(0, 1 << 62, 2_000_000)
order = numpy.argsort(v, kind="stable")
v.sort()
print("sorted", bool((v[1:] >= v[:-1]).all()), digest(v), digest(order))
"#;
    let job = Job::new(python)
        .args(["-c", script])
        .env("OPENBLAS_NUM_THREADS", "1");
    same_as_plain(name, &job, None, &[RAM_25, FILE_50]);
    same_as_plain(name, &job.env("OPENBLAS_NUM_THREADS", "2"), None, &[RAM_40]);
}

#[test]
fn sqlite_in_memory_is_identical() {
    let name = "sqlite_in_memory_is_identical";
    let Some(sqlite) = find("sqlite3") else {
        return skip("no sqlite3; on Debian: apt-get install sqlite3");
    };
    let script = "
PRAGMA temp_store = MEMORY;
CREATE TABLE item(id INTEGER PRIMARY KEY, kind INTEGER, name TEXT, body BLOB);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ROWS)
INSERT INTO item SELECT i, i * 7919 % 1009, 'name ' || (i * 104729 % 1000003), hex(i * 2654435761)
  || printf('%.*c', 200 + i % 300, 'x') FROM n;
CREATE INDEX by_name ON item(name);
CREATE INDEX by_kind ON item(kind, id);
UPDATE item SET body = body || name WHERE kind % 5 = 0;
DELETE FROM item WHERE kind % 11 = 3;
SELECT count(*), sum(id), sum(length(body)), sum(unicode(substr(name, 7, 1))) FROM item;
SELECT kind, count(*), min(name), max(name), sum(length(body)) FROM item GROUP BY kind ORDER BY kind;
SELECT a.name, b.id FROM item a JOIN item b ON a.name = b.name AND a.id < b.id ORDER BY a.id LIMIT 2000;
SELECT id, substr(body, -20) FROM item ORDER BY name DESC, id LIMIT 5000;
PRAGMA integrity_check;
";
    let job = Job::new(sqlite)
        .arg(":memory:")
        .input(script.replace("ROWS", rounds("60000", "120000")));
    let plain = same_as_plain(name, &job, None, &[RAM_25, FILE_50]);
    assert!(plain.text().trim_end().ends_with("ok"), "{plain}");
}

/// A C file for which the compiler needs much memory: many functions with loops and switches.
fn large_source(functions: u64) -> String {
    let mut text = String::from("unsigned f0(unsigned x) { return x; }\n");
    for i in 1..functions {
        let (a, b) = (mix(i) % (1 << 31), mix(i + 7) % 97 + 2);
        writeln!(
            text,
            "unsigned f{i}(unsigned x) {{ unsigned a[8] = {{ x, {i}, {b} }};\n\
             for (unsigned k = 0; k < x; k++) {{ a[k % 8] += a[(k + {i}) % 8] * {a}u;\n\
             if (a[k % 8] & {i}) a[(k + 1) % 8] ^= x >> 1; else switch (a[k % 8] % {b}) {{\n\
             case 0: x += a[1]; break; case 1: x ^= a[2]; break; default: x -= k; }} }}\n\
             return x ^ a[x % 8]; }}"
        )
        .expect("writing to a string");
    }
    text
}

#[test]
fn gcc_makes_the_same_object_file() {
    let name = "gcc_makes_the_same_object_file";
    let Some(gcc) = find("gcc") else {
        return skip("no gcc; on Debian: apt-get install gcc");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    std::fs::write(
        folder.path().join("large.c"),
        large_source(rounds(250, 450)),
    )
    .expect("a source file");
    let object = folder.path().join("large.o");
    let job = Job::new(gcc)
        .args(["-O1", "-c", "large.c", "-o", "large.o"])
        .folder(folder.path());
    same_as_plain(name, &job, Some(&object), &[RAM_40, FILE_50]);
}

#[test]
fn jvm_program_is_identical() {
    let name = "jvm_program_is_identical";
    let Some(java) = find("java") else {
        return skip("no java; on Debian: apt-get install default-jdk-headless");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let source = folder.path().join("Churn.java");
    std::fs::write(&source, include_str!("../../programs/Churn.java")).expect("a source file");
    for collector in ["-XX:+UseSerialGC", "-XX:+UseG1GC"] {
        let job = Job::new(&java)
            .args(["-Xms160m", "-Xmx160m", collector])
            .arg(&source)
            .arg(rounds("30000", "60000"))
            .timeout(180);
        same_as_plain(&format!("{name} {collector}"), &job, None, &[RAM_40]);
    }
}

/// The methods of `stress-ng --vm` that verify what they wrote; (name, operations). `cache-lines`
/// and `prime-incdec` need minutes for one pass and are left out.
const METHODS: &[(&str, u32)] = &[
    ("cache-stripe", 300),
    ("checkerboard", 400),
    ("flip", 3000),
    ("fwdrev", 3000),
    ("galpat-0", 250),
    ("galpat-1", 400),
    ("gray", 3000),
    ("grayflip", 2000),
    ("rowhammer", 1000),
    ("incdec", 2000),
    ("inc-nybble", 2000),
    ("lfsr32", 80),
    ("rand-set", 2000),
    ("rand-sum", 60),
    ("read64", 2000),
    ("ror", 2000),
    ("swap", 10),
    ("move-inv", 3000),
    ("modulo-x", 2000),
    ("mscan", 3000),
    ("wrrd128nt", 1000),
    ("prime-0", 60),
    ("prime-1", 60),
    ("prime-gray-0", 50),
    ("prime-gray-1", 50),
    ("walk-0d", 3000),
    ("walk-1d", 3000),
    ("walk-0a", 60),
    ("walk-1a", 60),
    ("write64", 500),
    ("write64nt", 500),
    ("write1024v", 800),
    ("zero-one", 3000),
];

#[test]
fn stress_ng_finds_no_wrong_bit() {
    let Some(stress) = find("stress-ng") else {
        return skip("no stress-ng; on Debian: apt-get install stress-ng");
    };
    let _turn = beside_others();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let every = rounds(2, 1);
    let mut swapped = 0.0;
    let methods = METHODS.iter().enumerate().skip(every - 1).step_by(every);
    for (number, (method, ops)) in methods {
        let tier = match number % 4 {
            3 => format!("file:{},size=256M", scratch.path().join(method).display()),
            _ => "ram".to_owned(),
        };
        let outcome = Job::new(&stress)
            .args(["--vm", "1", "--vm-bytes", "24M", "--vm-keep", "--verify"])
            .args(["--vm-method", method, "--vm-ops", &(ops / 2).to_string()])
            .args(["--temp-path", &scratch.path().to_string_lossy()])
            .limit(8 * MIB)
            .tier(&tier)
            .run()
            .expect(0);
        let said = format!("{}{}", outcome.text(), outcome.errors).to_lowercase();
        assert!(
            !said.contains("fail") && !said.contains("error detected"),
            "{method}: {outcome}"
        );
        swapped += outcome.number("pages.swapped_out").unwrap_or(0.0);
    }
    say(&format!(
        "stress-ng: {} methods verified, {swapped} pages swapped out",
        METHODS.len() / every
    ));
    assert!(
        plain_only() || swapped > rounds(8_000.0, 20_000.0),
        "only {swapped} pages went out"
    );
}
