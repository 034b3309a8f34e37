//! ARCHITECTURE.md stays short, and the files and functions of its table that says where to start
//! reading exist.

use super::tree::{Tree, code};

const TEXT: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Start reading here";

/// Most bytes of the map.
const BYTES_MAX: usize = 12 * 1024;

/// Names in the table that no file or function has; and that the map is too long, if it is.
pub(super) fn missing(tree: &Tree) -> Vec<String> {
    let text = tree.texts.get(TEXT).map_or("", String::as_str);
    if text.len() > BYTES_MAX {
        let bytes = text.len();
        return vec![format!("{TEXT}: {bytes} bytes; at most {BYTES_MAX}")];
    }
    let section = text.split_once(HEADING).unwrap_or_default().1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows: Vec<&str> = section.lines().filter(|l| l.starts_with('|')).collect();
    if rows.len() < 3 {
        return vec![format!("{TEXT}: no table below `{HEADING}`")];
    }
    rows.iter().flat_map(|row| missing_in(tree, row)).collect()
}

/// The same for one row. Words in backquotes with a `/` or a `.` are paths that begin with `lab/`,
/// paths below `crates/`, or the ends of paths named before. Other words are defined in the file
/// named last.
fn missing_in(tree: &Tree, row: &str) -> Vec<String> {
    let (mut wrong, mut named) = (Vec::new(), Vec::<String>::new());
    for word in row.split('`').skip(1).step_by(2) {
        if word.contains(['/', '.']) {
            let end = format!("/{word}");
            let again = named.iter().find(|path| path.ends_with(&end)).cloned();
            let path = again.unwrap_or_else(|| match word.split('/').next() {
                Some("lab") => word.to_owned(),
                _ => format!("crates/{word}"),
            });
            let folder = format!("{path}/");
            if !(tree.sources.keys()).any(|file| *file == path || file.starts_with(&folder)) {
                wrong.push(format!("{TEXT}: there is no {path}"));
            }
            named.push(path);
            continue;
        }
        let file = named.last().map_or("", String::as_str);
        let name = word.rsplit("::").next().unwrap_or(word);
        let text = tree.sources.get(file);
        if !text.is_some_and(|text| defines(&code(text), name)) {
            wrong.push(format!("{TEXT}: `{name}` is not defined in {file}"));
        }
    }
    wrong
}

fn defines(code: &str, name: &str) -> bool {
    let kinds = ["fn", "struct", "enum", "trait"].map(|kind| format!("{kind} {name}"));
    kinds.iter().any(|head| {
        let mut found = code.match_indices(head.as_str());
        found.any(|(at, _)| {
            let next = code[at + head.len()..].chars().next();
            !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_or_function_that_is_gone_is_found() {
        let sources = [("a/src/b.rs", "fn run() {}\n// fn gone()\nfn runs() {}")];
        let found = |cell: &str| {
            let table = format!("{HEADING}\n\n| see | read |\n|---|---|\n| it | {cell} |\n");
            let tree = Tree {
                sources: sources
                    .map(|(path, text)| (format!("crates/{path}"), text.to_owned()))
                    .into(),
                texts: [(TEXT.to_owned(), table)].into(),
                manifests: Default::default(),
            };
            missing(&tree).len()
        };
        assert_eq!(
            found("`a/src/b.rs` (`run`), back in `b.rs` (`runs`), `a/src`"),
            0
        );
        assert_eq!(
            found("`a/src/c.rs`, `a/src/b.rs` (`ru`, `gone`, `X::run`)"),
            3
        );
        assert_eq!(found("`run`"), 1);
    }
}
