//! Where `unsafe` lives, and what deciding crates may not name.

use super::tables::{IMPURE_WORDS, PURE, UNSAFE_HOMES};
use super::tree::{Tree, code, crate_of, lines_with};

/// Places outside its homes where `unsafe` stands.
pub fn of_unsafe(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut at_home = 0;
    for (path, text) in &tree.sources {
        let lines = lines_with(&code(text), "unsafe");
        if UNSAFE_HOMES.contains(&crate_of(path)) {
            at_home += lines.len();
        } else {
            wrong.extend(lines.iter().map(|line| format!("{path}:{line}")));
        }
    }
    if at_home == 0 {
        wrong.push("no `unsafe` where it must be: the search is broken".to_owned());
    }
    wrong
}

/// Places in deciding crates that name a clock, thread, file, environment or socket.
pub fn pure(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (path, text) in &tree.sources {
        let folder = format!("crates/{}/src/", crate_of(path));
        let tests = path.contains("/tests") || path.contains("/test_");
        if !PURE.contains(&crate_of(path)) || !path.starts_with(&folder) || tests {
            continue;
        }
        seen += 1;
        // Unit tests may do as they like; they stand at the end of a file or in one of their own.
        let code = code(text);
        let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        for word in IMPURE_WORDS {
            let lines = lines_with(code, word);
            wrong.extend(
                lines
                    .iter()
                    .map(|line| format!("{path}:{line} names {word}")),
            );
        }
    }
    if seen <= 10 {
        wrong.push(format!("only {seen} files of {PURE:?} were looked at"));
    }
    wrong
}
