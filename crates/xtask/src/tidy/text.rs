//! How files look: first line, length, width of comments and of Markdown.

use super::tables::{COMMENT_WIDTH_MAX, FILE_LINES_MAX, TEXT_WIDTH_MAX};
use super::tree::Tree;

/// Files whose first line is not their job.
pub(super) fn heads(tree: &Tree) -> Vec<String> {
    let wrong = |text: &str| !text.starts_with("//! ");
    tree.sources
        .iter()
        .filter(|(_, text)| wrong(text))
        .map(|(path, _)| format!("{path}: the first line is not `//! its job in one sentence`"))
        .collect()
}

/// Files that are too long.
pub(super) fn file_lengths(tree: &Tree) -> Vec<String> {
    tree.sources
        .iter()
        .map(|(path, text)| (path, text.lines().count()))
        .filter(|(_, lines)| *lines > FILE_LINES_MAX)
        .map(|(path, lines)| format!("{path}: {lines} lines; split it, {FILE_LINES_MAX} is most"))
        .collect()
}

/// Comments and other lines that are too wide. `rustfmt` leaves both alone, strings too.
pub(super) fn comments(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    for (path, text) in &tree.sources {
        for (at, line) in text.lines().enumerate() {
            let (what, most) = if line.trim_start().starts_with("//") {
                ("a comment", COMMENT_WIDTH_MAX)
            } else {
                ("a line", TEXT_WIDTH_MAX)
            };
            if line.chars().count() > most {
                wrong.push(format!("{path}:{}: {what} over {most} columns", at + 1));
            }
        }
    }
    wrong
}

/// Lines of Markdown that are too wide. Tables may be wider.
pub(super) fn markdown(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    for (path, text) in &tree.texts {
        for (at, line) in text.lines().enumerate() {
            if !line.starts_with('|') && line.chars().count() > TEXT_WIDTH_MAX {
                wrong.push(format!("{path}:{}: over {TEXT_WIDTH_MAX} columns", at + 1));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree_of(path: &str, text: &str) -> Tree {
        let files = [(path.to_owned(), text.to_owned())].into();
        let none = Default::default();
        if path.ends_with(".md") {
            Tree {
                sources: none,
                texts: files,
                manifests: Default::default(),
            }
        } else {
            Tree {
                sources: files,
                texts: none,
                manifests: Default::default(),
            }
        }
    }

    #[test]
    fn what_is_too_wide_is_found_and_tables_are_not() {
        let wide = "x".repeat(99);
        let found = |text: &str| {
            let found = comments(&tree_of("crates/base/src/a.rs", text));
            found.iter().filter(|line| line.contains("a.rs")).count()
        };
        assert_eq!(found(&format!("// {wide}\n")), 1);
        assert_eq!(found(&format!("// {}\n", &wide[2..])), 0);
        assert_eq!(found(&format!("let a = \"{wide}\";\n")), 0);
        assert_eq!(found(&format!("let a = \"{wide}{wide}\";\n")), 1);
        let wide = "x".repeat(121);
        assert_eq!(markdown(&tree_of("a.md", &wide)).len(), 1);
        assert_eq!(markdown(&tree_of("a.md", &format!("|{wide}"))).len(), 0);
        assert_eq!(markdown(&tree_of("a/results.md", &wide)).len(), 1);
    }

    #[test]
    fn a_file_without_its_job_and_one_too_long_are_found() {
        assert_eq!(heads(&tree_of("crates/base/src/a.rs", "use x;\n")).len(), 1);
        let long = "//! a\n".repeat(FILE_LINES_MAX + 1);
        let tree = tree_of("crates/base/src/a.rs", &long);
        assert_eq!((heads(&tree).len(), file_lengths(&tree).len()), (0, 1));
    }
}
