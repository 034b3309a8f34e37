//! Chromium without a window: a tree of processes, a zygote that forks them, compilers, and a
//! sandbox of namespaces and seccomp filters.

use undercroft_tests::{Job, MIB, Outcome, beside_others, find, plain_only, rounds, say, skip};

/// A document that is made by its script: texts, a table and memory of a compiled program.
const PAGE: &str = r#"<!doctype html><body><script>
const texts = [], counts = new Map();
for (let n = 0; n < TEXTS; n++) texts.push("text " + n * 7919 % 50021);
for (const text of texts) counts.set(text, (counts.get(text) || 0) + 1);
let hash = 0;
for (const text of [...counts.keys()].sort()) hash = (hash * 31 + counts.get(text) * text.length) | 0;
const bytes = new Uint8Array(new WebAssembly.Memory({ initial: 320 }).buffer);
for (let at = 0; at < bytes.length; at += 64) bytes[at] = at >> 6;
let sum = 0;
for (let at = 0; at < bytes.length; at += 64) sum += bytes[at];
document.body.textContent = `${counts.size} texts, ${hash}, ${sum}`;
</script></body>"#;

const MADE: &str = "50021 texts, ";

/// A limit that is less than what one of its processes needs.
const TINY: u64 = 16 * MIB;

/// The browser, by the words before its name, which may make it another user's. Plain, then with a
/// tiny limit if `and_tiny`, and then in a third of that memory, it shows the same document. The
/// runs with a limit; `None`: it does not run plain.
fn shows_the_same(
    who: &str,
    before: &[&str],
    options: &[&str],
    and_tiny: bool,
) -> Option<Vec<Outcome>> {
    let folder = crate::images::scratch();
    let page = folder.path().join("page.html");
    let text = PAGE.replace("TEXTS", rounds("150000", "400000"));
    std::fs::write(&page, text).expect("a document");
    let browser = find("chromium").expect("it is here").display().to_string();
    let words = before.iter().copied().chain([browser.as_str()]);
    let words: Vec<&str> = words.chain(options.iter().copied()).collect();
    let job = Job::new(words[0])
        .args(&words[1..])
        .args(["--headless", "--disable-gpu", "--dump-dom"])
        .arg("--virtual-time-budget=20000")
        .env("HOME", folder.path());
    let shown = |job: Job, profile: &str| {
        let profile = folder.path().join(profile);
        job.arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("file://{}", page.display()))
            .run()
    };
    let plain = shown(job.clone(), "plain");
    if plain.code() != Some(0) || !plain.text().contains(MADE) {
        say(&format!("{who}: plain: {plain}"));
        return None;
    }
    let with = |limit: u64, profile: &str| {
        // The report is written when all that the browser leaves behind has ended.
        let ours = job.clone().limit(limit).options(["--wait-all"]);
        let ours = shown(ours, profile).expect(0);
        assert_eq!(ours.text(), plain.text(), "{ours}");
        say(&format!(
            "Chromium {who}: {} MiB, {:.1?} plain, {:.1?} in {} MiB",
            plain.anonymous_peak / MIB,
            plain.wall,
            ours.wall,
            limit / MIB
        ));
        ours
    };
    let tiny = and_tiny.then(|| with(TINY, "tiny"));
    let third = with(plain.anonymous_peak / 3, "third");
    let ours = tiny.into_iter().chain([third]).collect();
    if plain_only() {
        skip("compared plain with plain: UNDERCROFT_TEST_PLAIN is set");
    }
    Some(ours)
}

#[test]
fn chromium_without_its_sandbox_shows_the_same_document() {
    let _turn = beside_others();
    if find("chromium").is_none() {
        return skip("no chromium; on Debian: apt-get install chromium");
    }
    // A change runs the tiny limit with the sandbox alone.
    let and_tiny = rounds(false, true);
    let ours = shows_the_same("without its sandbox", &[], &["--no-sandbox"], and_tiny);
    for ours in ours.expect("it runs plain") {
        ours.expect_swapping(1000.0);
    }
}

#[test]
fn chromium_with_its_sandbox_shows_the_same_document() {
    let _turn = beside_others();
    if find("chromium").is_none() || find("setpriv").is_none() {
        return skip("needs chromium and setpriv");
    }
    let other = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    let is_root = rustix::process::geteuid().is_root();
    let before = if is_root { &other[..] } else { &[] };
    let Some(ours) = shows_the_same("with its sandbox", before, &[], true) else {
        return skip("its sandbox does not work plain: a user may make no user namespace here");
    };
    let [tiny, third] = &ours[..] else {
        panic!("two runs with a limit");
    };
    // No page of its sandboxed processes leaves, and they have the document. A limit that is less
    // than they have is raised.
    let touched = third.number("faults.first_touch");
    assert!(plain_only() || touched > Some(500.0), "{third}");
    let raised = tiny.number("immovable.limit_raised_bytes_peak");
    assert!(plain_only() || raised > Some(0.0), "{tiny}");
}
