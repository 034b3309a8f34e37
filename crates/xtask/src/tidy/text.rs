//! How files look: first line, length, width of comments and of Markdown. And phrases that texts do
//! without.

use std::sync::LazyLock;

use super::tables::{COMMENT_WIDTH_MAX, FILE_LINES_MAX, PHRASES, PRONOUNS, TEXT_WIDTH_MAX};
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
            let (what, most) = if line.trim_start().starts_with("//") || has_comment(line) {
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

/// Whether a comment ends the line. A quote that is open before the dashes is a string.
fn has_comment(line: &str) -> bool {
    let mut found = line.match_indices(" // ");
    found.any(|(at, _)| line[..at].matches('"').count().is_multiple_of(2))
}

/// Doc comments that begin with [`PRONOUNS`].
pub(super) fn pronouns(tree: &Tree) -> Vec<String> {
    let found = tree
        .sources
        .iter()
        .flat_map(|(path, text)| pronouns_in(path, text));
    found.collect()
}

fn pronouns_in(path: &str, text: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut before = None;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let mark = ["///", "//!"].into_iter().find(|it| line.starts_with(it));
        if let Some(mark) = mark
            && before != Some(mark)
        {
            let words = line[mark.len()..].trim_start();
            let begins = |pronoun: &&&str| {
                let rest = words.strip_prefix(**pronoun);
                rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
            };
            if let Some(pronoun) = PRONOUNS.iter().find(begins) {
                wrong.push(format!("{path}:{}: begins with `{pronoun}`", at + 1));
            }
        }
        before = mark;
    }
    wrong
}

/// Phrases of [`PHRASES`] in comments and in Markdown, over the ends of lines too.
pub(super) fn phrases(tree: &Tree) -> Vec<String> {
    let comments = tree.sources.iter().map(|(path, text)| {
        let comments = text.lines().map(|line| {
            let (_, comment) = line.split_once("//").unwrap_or_default();
            comment.trim_start_matches(['/', '!'])
        });
        (path, comments.collect::<Vec<_>>())
    });
    // Results keep the words of the day they were made.
    let texts = tree.texts.iter();
    let texts = texts.filter(|(path, _)| !path.starts_with("docs/results/"));
    let texts = texts.map(|(path, text)| (path, text.lines().collect()));
    let found = comments.chain(texts);
    found
        .flat_map(|(path, lines)| phrases_in(path, &lines))
        .collect()
}

fn phrases_in(path: &str, lines: &[&str]) -> Vec<String> {
    static SOUGHT: LazyLock<Vec<(String, &str, &str)>> = LazyLock::new(|| {
        let sought = |(phrase, instead)| (format!(" {} ", plain(phrase)), phrase, instead);
        PHRASES.iter().copied().map(sought).collect()
    });
    let words: Vec<String> = lines.iter().map(|line| plain(line)).collect();
    let mut wrong = Vec::new();
    for (at, line) in words.iter().enumerate() {
        // The next line too: a phrase may be broken there.
        let next = words.get(at + 1).map_or("", String::as_str);
        let (this, after) = (format!(" {line} "), format!(" {next} "));
        let both = format!(" {line} {next} ");
        for (phrase, name, instead) in SOUGHT.iter() {
            let is_in = |text: &str| text.contains(phrase.as_str());
            if is_in(&this) || is_in(&both) && !is_in(&after) {
                wrong.push(format!("{path}:{}: `{name}`: {instead}", at + 1));
            }
        }
    }
    wrong
}

/// The words of a text in small letters, with one space between.
fn plain(text: &str) -> String {
    let words = text.split(|c: char| !(c.is_alphanumeric() || c == '.' || c == '-'));
    let words = words.map(|word| word.trim_end_matches('.').to_lowercase());
    let words: Vec<String> = words.filter(|word| !word.is_empty()).collect();
    words.join(" ")
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
        assert_eq!(found(&format!("a(); // {wide}\n")), 1);
        assert_eq!(found(&format!("a(\"{wide} // \");\n")), 0);
        let wide = "x".repeat(121);
        assert_eq!(markdown(&tree_of("a.md", &wide)).len(), 1);
        assert_eq!(markdown(&tree_of("a.md", &format!("|{wide}"))).len(), 0);
        assert_eq!(markdown(&tree_of("a/results.md", &wide)).len(), 1);
    }

    #[test]
    fn a_phrase_is_found_over_the_end_of_a_line_and_once() {
        let (phrase, _) = PHRASES[0];
        let broken = phrase.replacen(' ', "\n/// ", 1);
        let found = |path: &str, text: &str| phrases(&tree_of(path, text)).len();
        let path = "crates/base/src/a.rs";
        assert_eq!(found(path, &format!("/// One {phrase}, two.\n")), 1);
        assert_eq!(found(path, &format!("/// One {broken}\n/// two.\n")), 1);
        assert_eq!(found(path, &format!("let a = \"{phrase}\";\n")), 0);
        assert_eq!(found(path, &format!("/// One{phrase}s.\n")), 0);
        assert_eq!(found("a.md", &format!("one\n{phrase}\n")), 1);
    }

    #[test]
    fn a_doc_comment_that_begins_with_a_pronoun_is_found() {
        let found = |text: &str| pronouns_in("a.rs", text).len();
        for pronoun in PRONOUNS {
            assert_eq!(found(&format!("/// {pronoun} is it.\nfn f() {{}}\n")), 1);
            assert_eq!(found(&format!("//! {pronoun}: a file.\n")), 1);
            assert_eq!(found(&format!("    /// {pronoun}'s.\n    a: u8,\n")), 1);
            // Only the first line, whole words, and doc comments.
            assert_eq!(
                found(&format!("/// A page.\n///\n/// {pronoun} is it.\n")),
                0
            );
            assert_eq!(found(&format!("/// {pronoun}ever is it.\n")), 0);
            assert_eq!(found(&format!("// {pronoun} is it.\n")), 0);
        }
        assert_eq!(
            found("/// A.\na: u8,\n/// It.\nb: u8,\n/// One.\nc: u8,\n"),
            2
        );
        assert_eq!(
            pronouns_in("a.rs", "//! A.\n/// It.\n"),
            ["a.rs:2: begins with `It`"]
        );
    }

    #[test]
    fn a_file_without_its_job_and_one_too_long_are_found() {
        assert_eq!(heads(&tree_of("crates/base/src/a.rs", "use x;\n")).len(), 1);
        let long = "//! a\n".repeat(FILE_LINES_MAX + 1);
        let tree = tree_of("crates/base/src/a.rs", &long);
        assert_eq!((heads(&tree).len(), file_lengths(&tree).len()), (0, 1));
    }
}
