//! The homes of `unsafe`, and what deciding crates may not name.

use super::tables::{IMPURE_WORDS, PRINTING, PURE, RECLAIM_DRIVERS, UNSAFE_HOMES};
use super::tree::{Tree, code, crate_of, lines_with};

/// Uses of `unsafe` outside its homes.
pub(super) fn of_unsafe(tree: &Tree) -> Vec<String> {
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
pub(super) fn pure(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (path, text) in &tree.sources {
        let folder = format!("crates/{}/src/", crate_of(path));
        let tests = path.contains("/tests") || path.contains("/test_");
        if !PURE.contains(&crate_of(path)) || !path.starts_with(&folder) || tests {
            continue;
        }
        seen += 1;
        // Unit tests may use anything. They stand at the end of a file or in a file of their own.
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

/// Files that make a machine of reclaim and are no driver of it, and drivers that make none.
pub(super) fn reclaim(tree: &Tree) -> Vec<String> {
    let made = tree.sources.iter().filter(|(path, text)| {
        let inside = path.contains("/tests/") || crate_of(path) == "xtask";
        !inside && !lines_with(&code(text), "Reclaimer::new").is_empty()
    });
    not_the_drivers(&made.map(|(path, _)| path.as_str()).collect::<Vec<_>>())
}

fn not_the_drivers(made: &[&str]) -> Vec<String> {
    let others = made.iter().filter(|path| !RECLAIM_DRIVERS.contains(path));
    let others = others.map(|path| format!("{path} makes a `Reclaimer`"));
    let idle = RECLAIM_DRIVERS.iter().filter(|path| !made.contains(path));
    let idle = idle.map(|path| format!("RECLAIM_DRIVERS: {path} makes no `Reclaimer`"));
    others.chain(idle).collect()
}

/// Places in manager and keeper that print. The manager shares no terminal or pipe with the
/// program, and the keeper waits for none. These macros also panic if standard error is closed.
pub(super) fn printing(tree: &Tree) -> Vec<String> {
    let files = tree.sources.iter();
    let homes = ["crates/manager/src/", "crates/keeper/src/"];
    let files = files.filter(|(path, _)| homes.iter().any(|home| path.starts_with(home)));
    files.flat_map(|(path, text)| prints(path, text)).collect()
}

fn prints(path: &str, text: &str) -> Vec<String> {
    let code = code(text);
    let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let found = PRINTING
        .iter()
        .flat_map(|word| lines_with(code, word).into_iter().map(move |at| (at, word)));
    found
        .map(|(line, word)| format!("{path}:{line} prints with {word}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_driver_of_reclaim_is_found_and_one_that_drives_no_more() {
        assert!(not_the_drivers(&RECLAIM_DRIVERS).is_empty());
        let [first, second, _] = RECLAIM_DRIVERS;
        let wrong = not_the_drivers(&[first, second, "crates/keeper/src/lib.rs"]);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
    }

    #[test]
    fn a_line_that_prints_is_found_but_not_in_tests() {
        let text =
            "fn f() {\n    eprintln!(\"x\");\n}\n#[cfg(test)]\nmod tests {\n    println!();\n}\n";
        assert_eq!(prints("a.rs", text), ["a.rs:2 prints with eprintln!"]);
    }
}
