//! The rules of the tree: which crate may use which, where `unsafe` lives, what pure code may not
//! name, how files look.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Every crate and the crates of the workspace it may use. Nothing points up; see ARCHITECTURE.md.
const ARROWS: [(&str, &[&str]); 14] = [
    ("base", &[]),
    ("wire", &[]),
    ("shim", &["wire"]),
    ("policy", &["base"]),
    ("sys", &["base"]),
    ("model", &["base"]),
    ("trace", &["base"]),
    ("engine", &["base", "policy"]),
    ("tier", &["base", "sys"]),
    (
        "manager",
        &["base", "engine", "policy", "sys", "tier", "trace", "wire"],
    ),
    ("sim", &["base", "engine", "model", "policy", "trace"]),
    ("lab", &["base", "sim", "trace"]),
    (
        "cli",
        &[
            "base", "lab", "manager", "policy", "sim", "sys", "tier", "trace",
        ],
    ),
    ("tests", &[]),
];

/// Crates that tests may use besides: fakes and oracles.
const TEST_ARROWS: [&str; 1] = ["model"];

/// The only homes of `unsafe`.
const UNSAFE_HOMES: [&str; 2] = ["sys", "shim"];

/// Crates that decide: what they may not name, so that the same code runs live and simulated.
const PURE: [&str; 2] = ["engine", "policy"];
const IMPURE_WORDS: [&str; 14] = [
    "Instant",
    "SystemTime",
    "std::time",
    "std::thread",
    "std::fs",
    "std::env",
    "std::net",
    "std::process",
    "std::os",
    "std::io",
    "undercroft_model",
    "undercroft_sim",
    "undercroft_sys",
    "undercroft_trace",
];

const LINES_MAX: usize = 800;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the crate is two folders below the root")
}

/// Every Rust file of the tree: (path from the root, text).
fn sources() -> Vec<(String, String)> {
    fn walk(directory: &Path, root: &Path, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(directory).expect("a readable folder") {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                walk(&path, root, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).expect("a text file");
                let name = path
                    .strip_prefix(root)
                    .expect("below the root")
                    .display()
                    .to_string();
                found.push((name, text));
            }
        }
    }
    let root = root();
    let mut found = Vec::new();
    walk(&root.join("crates"), &root, &mut found);
    assert!(
        found.len() > 50,
        "the walk found only {} files",
        found.len()
    );
    found
}

/// The crate a path such as `crates/base/src/lib.rs` belongs to.
fn crate_of(path: &str) -> &str {
    path.split('/').nth(1).expect("a path below crates/")
}

/// The code of a file: comments, strings and characters blanked out, lines kept.
fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(raw) = raw_string(rest) {
            raw
        } else if rest.starts_with('"') {
            1 + closing_quote(&bytes[at + 1..])
        } else if rest.starts_with("'\\") {
            3 + rest[3..].find('\'').map_or(0, |end| end + 1)
        } else if rest.starts_with("'\"'") {
            3
        } else {
            let first = rest.chars().next().expect("not at the end");
            out.push(first);
            at += first.len_utf8();
            continue;
        };
        out.extend(rest[..skipped].chars().filter(|c| *c == '\n'));
        out.push(' ');
        at += skipped;
    }
    out
}

/// Length of the raw string that starts here, if one does.
fn raw_string(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix("r")?;
    let hashes = inner.len() - inner.trim_start_matches('#').len();
    let body = inner[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let found = body.find(&end).unwrap_or(body.len());
    Some((rest.len() - body.len() + found + end.len()).min(rest.len()))
}

fn closing_quote(bytes: &[u8]) -> usize {
    let mut at = 0;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Lines (from 1) where `word` stands by itself.
fn lines_with(code: &str, word: &str) -> Vec<usize> {
    let part_of_a_name = |c: char| c.is_alphanumeric() || c == '_';
    let stands_alone = |line: &str| {
        line.match_indices(word).any(|(at, _)| {
            !line[..at].ends_with(part_of_a_name)
                && !line[at + word.len()..].starts_with(part_of_a_name)
        })
    };
    code.lines()
        .enumerate()
        .filter(|(_, line)| stands_alone(line))
        .map(|(number, _)| number + 1)
        .collect()
}

/// The workspace crates a manifest names, by section.
fn dependencies(manifest: &str) -> BTreeMap<String, Vec<String>> {
    let mut sections: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut section = String::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_matches(['[', ']']).to_owned();
            continue;
        }
        let key = line.split(['.', '=', ' ']).next().unwrap_or_default();
        if let Some(name) = key
            .strip_prefix("undercroft-")
            .filter(|_| section.ends_with("dependencies"))
        {
            sections
                .entry(section.clone())
                .or_default()
                .push(name.to_owned());
        }
    }
    sections
}

/// What the arrows say against a crate's manifest; empty when it keeps to them.
fn wrong_arrows(name: &str, manifest: &str) -> Vec<String> {
    let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
        return vec![format!(
            "crate `{name}` has no line in ARROWS: give it a level"
        )];
    };
    let mut wrong = Vec::new();
    for (section, used) in dependencies(manifest) {
        for target in used {
            let for_tests = section == "dev-dependencies" && TEST_ARROWS.contains(&target.as_str());
            if !allowed.contains(&target.as_str()) && !for_tests {
                wrong.push(format!(
                    "{name} -> {target} ({section}) points up or sideways"
                ));
            }
        }
    }
    wrong
}

#[test]
fn crates_use_only_what_is_below_them() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for entry in fs::read_dir(root().join("crates")).expect("the crates folder") {
        let path = entry.expect("a readable entry").path();
        let Ok(manifest) = fs::read_to_string(path.join("Cargo.toml")) else {
            continue;
        };
        let name = path
            .file_name()
            .expect("a named folder")
            .to_string_lossy()
            .into_owned();
        wrong.extend(wrong_arrows(&name, &manifest));
        seen += 1;
    }
    assert!(seen >= 8, "only {seen} manifests were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn arrows_form_no_cycle() {
    for (position, (name, allowed)) in ARROWS.iter().enumerate() {
        for target in *allowed {
            let level = ARROWS
                .iter()
                .position(|(known, _)| known == target)
                .expect("a known crate");
            assert!(
                level < position,
                "{name} -> {target}: ARROWS lists a crate after all it uses"
            );
        }
    }
}

#[test]
fn an_arrow_that_points_up_is_found() {
    let up = "[dependencies]\nundercroft-base.workspace = true\nundercroft-tier = { workspace = true }\n";
    assert_eq!(wrong_arrows("engine", up).len(), 1);
    let fakes = "[dev-dependencies]\nundercroft-model.workspace = true\n";
    assert!(wrong_arrows("engine", fakes).is_empty());
    assert_eq!(wrong_arrows("engine", &fakes.replace("dev-", "")).len(), 1);
    assert_eq!(wrong_arrows("newcomer", "").len(), 1);
}

#[test]
fn unsafe_is_at_home_in_sys_and_client_only() {
    let mut wrong = Vec::new();
    let mut homes = 0;
    for (path, text) in sources() {
        let lines = lines_with(&code(&text), "unsafe");
        match UNSAFE_HOMES.contains(&crate_of(&path)) {
            true => homes += lines.len(),
            false => wrong.extend(lines.iter().map(|line| format!("{path}:{line}"))),
        }
    }
    assert!(
        homes > 0,
        "no `unsafe` was found where it must be: the search is broken"
    );
    assert!(
        wrong.is_empty(),
        "unsafe outside {UNSAFE_HOMES:?}:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn deciding_crates_name_no_clock_thread_file_or_environment() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (path, text) in sources() {
        let folder = format!("crates/{}/src/", crate_of(&path));
        if !PURE.contains(&crate_of(&path)) || !path.starts_with(&folder) {
            continue;
        }
        seen += 1;
        // Unit tests may do as they like; they stand at the end of a file or in one of their own.
        let code = code(&text);
        let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        if path.contains("/tests") || path.contains("/test_") {
            continue;
        }
        for word in IMPURE_WORDS {
            wrong.extend(
                lines_with(code, word)
                    .iter()
                    .map(|line| format!("{path}:{line} names {word}")),
            );
        }
    }
    assert!(seen > 10, "only {seen} files of {PURE:?} were looked at");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_say_their_job_first_and_stay_short() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        if !text.starts_with("//! ") {
            wrong.push(format!(
                "{path}: the first line is not `//! its job in one sentence`"
            ));
        }
        let lines = text.lines().count();
        if lines > LINES_MAX {
            wrong.push(format!(
                "{path}: {lines} lines; split it, {LINES_MAX} is the most"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_search_sees_code_and_not_comments_or_strings() {
    let text = "// unsafe\nlet a = \"unsafe \\\" unsafe\"; /* unsafe\n */ let b = '\"'; let c = r#\"unsafe\"#;\nunsafe {}\n#![forbid(unsafe_code)]\n";
    assert_eq!(lines_with(&code(text), "unsafe"), [4]);
    assert_eq!(
        lines_with("let t = std::time::Instant::now();", "std::time"),
        [1]
    );
    assert_eq!(
        lines_with("let t = std::timer;", "std::time"),
        Vec::<usize>::new()
    );
}
