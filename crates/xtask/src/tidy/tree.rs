//! The material of the checks: the sources, texts and manifests of the tree, and the code in a
//! file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the crates: the product and its tests; what measures and simulates it.
pub(super) const ROOFS: [&str; 2] = ["crates", "lab"];

/// The files of the tree. Paths are from its root, with `/` between their parts.
pub(super) struct Tree {
    /// Rust files below [`ROOFS`] and `fuzz/`.
    pub sources: BTreeMap<String, String>,
    /// Markdown files.
    pub texts: BTreeMap<String, String>,
    /// The manifest of each crate, by the name of its folder.
    pub manifests: BTreeMap<String, String>,
}

impl Tree {
    /// Reads the checkout in which this program was built. Panics: if a file cannot be read.
    pub(super) fn read() -> Self {
        let mut tree = Self {
            sources: BTreeMap::new(),
            texts: BTreeMap::new(),
            manifests: BTreeMap::new(),
        };
        let root = root();
        tree.walk(&root, &root);
        tree
    }

    fn walk(&mut self, directory: &Path, root: &Path) {
        for entry in fs::read_dir(directory).expect("a readable folder") {
            let path = entry.expect("a readable entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                // `target` can also be a link to a folder elsewhere.
                if !name.starts_with('.') && name != "target" && name != "node_modules" {
                    self.walk(&path, root);
                }
                continue;
            }
            let from_root = path
                .strip_prefix(root)
                .expect("below the root")
                .display()
                .to_string();
            let read = || fs::read_to_string(&path).expect("a text file");
            let parts: Vec<&str> = from_root.split('/').collect();
            if (ROOFS.contains(&parts[0]) || parts[0] == "fuzz") && name.ends_with(".rs") {
                self.sources.insert(from_root.clone(), read());
            } else if name.ends_with(".md") {
                self.texts.insert(from_root.clone(), read());
            } else if let [roof, folder, "Cargo.toml"] = parts[..]
                && ROOFS.contains(&roof)
            {
                self.manifests.insert(folder.to_owned(), read());
            }
        }
    }
}

/// The root of the checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the crate is two folders below the root")
}

/// The crate of a path such as `crates/base/src/lib.rs`.
pub(super) fn crate_of(path: &str) -> &str {
    path.split('/').nth(1).expect("a path below a roof")
}

/// The code of a file: comments, strings and characters are blanked out, lines are kept.
pub(super) fn code(text: &str) -> String {
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

/// Length of the raw string that starts here; none if none starts.
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
pub(super) fn lines_with(code: &str, word: &str) -> Vec<usize> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_sees_code_and_not_comments_or_strings() {
        let text = "// unsafe\nlet a = \"unsafe \\\" unsafe\"; /* unsafe\n */ let b = '\"'; \
                    let c = r#\"unsafe\"#;\nunsafe {}\n#![forbid(unsafe_code)]\n";
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
}
