//! Breaks the lines of text for a Markdown page.

/// Most columns of a line; tables may be wider.
const COLUMNS: usize = 120;

/// A paragraph of several lines.
pub(super) fn paragraph(text: &str) -> String {
    wrap("", "", text)
}

/// A list item; its further lines are indented.
pub(super) fn item(text: &str) -> String {
    wrap("- ", "  ", text)
}

/// Fills the lines one after the other. A word that is wider than a line stays whole.
fn wrap(first: &str, indent: &str, text: &str) -> String {
    let mut out = first.to_owned();
    let mut column = first.chars().count();
    for (at, word) in words(text).into_iter().enumerate() {
        let width = word.chars().count();
        if at > 0 && column + 1 + width > COLUMNS {
            out.push('\n');
            out.push_str(indent);
            column = indent.chars().count();
        } else if at > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(&word);
        column += width;
    }
    out
}

/// The words of a text. One that would begin a list, a heading or a quotation at the start of a
/// line stays with the word before it.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match words.last_mut() {
            Some(before) if begins_block(word) => {
                before.push(' ');
                before.push_str(word);
            }
            _ => words.push(word.to_owned()),
        }
    }
    words
}

fn begins_block(word: &str) -> bool {
    let of = |signs: &str| word.chars().all(|sign| signs.contains(sign));
    let number = word.strip_suffix(['.', ')']).unwrap_or_default();
    of("-")
        || of("=")
        || of("*")
        || of("+")
        || of("#")
        || word.starts_with(['>', '|'])
        || (!number.is_empty() && number.chars().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_full_and_no_word_is_lost() {
        let text = "word ".repeat(100) + &"w".repeat(200);
        for wrapped in [paragraph(&text), item(&text)] {
            let lines: Vec<&str> = wrapped.lines().collect();
            let (last, full) = lines.split_last().expect("lines");
            assert_eq!(last.trim_start(), "w".repeat(200));
            for line in full {
                assert!(line.len() <= COLUMNS, "{line}");
            }
            for line in &full[..full.len() - 1] {
                assert!(line.len() + " word".len() > COLUMNS, "{line}");
            }
            let all: Vec<&str> = wrapped
                .trim_start_matches("- ")
                .split_whitespace()
                .collect();
            assert_eq!(all, text.split_whitespace().collect::<Vec<_>>());
        }
        assert!(
            item(&text)
                .lines()
                .skip(1)
                .all(|line| line.starts_with("  w"))
        );
    }

    #[test]
    fn no_line_begins_as_a_block() {
        for sign in ["+", "-", "--", "*", "#", "1.", "12)", "=", ">", "|"] {
            for before in 100..125 {
                let text = format!("{} {sign} {}", "x".repeat(before), "y".repeat(30));
                let wrapped = paragraph(&text);
                for line in wrapped.lines() {
                    assert!(!line.starts_with(sign), "{wrapped}");
                }
                assert_eq!(wrapped.replace('\n', " "), text);
            }
        }
        assert_eq!(words("a 1.5 b"), ["a", "1.5", "b"]);
    }
}
