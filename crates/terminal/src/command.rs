//! A command line as one line of text, whatever bytes its words have.

/// A command line on one line, as a shell would read it again: words with blanks or signs of the
/// shell are quoted, and characters that a terminal may obey are escaped.
/// * `arguments`: how many there are; those that `words` lacks are told.
pub fn command_line(words: &[String], arguments: u64) -> String {
    let shown: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    let mut text = shown.join(" ");
    let lacks = (arguments + 1).saturating_sub(words.len() as u64);
    match (lacks, words.len()) {
        (0, _) | (_, 0) => {}
        (1, 1) => text.push_str(" (1 argument)"),
        (_, 1) => text.push_str(&format!(" ({lacks} arguments)")),
        _ => text.push_str(&format!(" ({lacks} more)")),
    }
    text
}

/// A word as a shell would read it again.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "%+,-./:=@_".contains(c);
    if word.chars().any(is_obeyed) {
        let escaped = word.chars().map(|c| match c {
            '\n' => "\\n".to_owned(),
            '\t' => "\\t".to_owned(),
            '\'' | '\\' => format!("\\{c}"),
            c if is_obeyed(c) && u32::from(c) < 256 => format!("\\x{:02x}", u32::from(c)),
            c if is_obeyed(c) => format!("\\u{:04x}", u32::from(c)),
            c => c.to_string(),
        });
        format!("$'{}'", escaped.collect::<String>())
    } else if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Whether a terminal may do something else than show this character: control characters, line
/// ends, marks that change the direction of writing.
pub fn is_obeyed(c: char) -> bool {
    let direction = [
        '\u{200e}'..='\u{200f}',
        '\u{2028}'..='\u{202e}',
        '\u{2066}'..='\u{2069}',
    ];
    c.is_control() || direction.iter().any(|range| range.contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_that_a_shell_reads_again() {
        for (word, shown) in [
            ("--port=7001", "--port=7001"),
            ("", "''"),
            ("a b", "'a b'"),
            ("it's", r"'it'\''s'"),
            ("$HOME", "'$HOME'"),
            ("sleep 2 #\x1b[31mred\n", r"$'sleep 2 #\x1b[31mred\n'"),
            ("'\\\t\u{7f}\u{9b}", r"$'\'\\\t\x7f\x9b'"),
            ("\u{202e}", r"$'\u202e'"),
            ("größe", "größe"),
        ] {
            assert_eq!(quoted(word), shown);
        }
        let words = ["sh".to_owned(), "-c".to_owned(), String::new()];
        assert_eq!(command_line(&words, 2), "sh -c ''");
        assert_eq!(command_line(&words, 9), "sh -c '' (7 more)");
        assert_eq!(command_line(&words[..1], 2), "sh (2 arguments)");
        assert_eq!(command_line(&words[..1], 1), "sh (1 argument)");
        assert_eq!(command_line(&words[..1], 0), "sh");
        assert_eq!(command_line(&[], 3), "");
    }
}
