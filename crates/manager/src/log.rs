//! What the manager says: lines on its standard error, which is a pipe that only the keeper reads.
//! It never waits: a line for which there is no room is lost. A panic's message goes the same way.

use std::io::{self, Write};

/// Longest line, in bytes: a pipe takes it whole or not at all.
const LINE_MAX: usize = 2000;

/// Tells the keeper, who tells the user. Cost: one write that does not wait.
pub(crate) fn say(what: &str) {
    let _ = io::stderr().write(line(what).as_bytes());
}

/// As [`say`], for what is worth a look and stops nothing.
pub(crate) fn warn(what: &str) {
    say(&format!("warning: {what}"));
}

fn line(what: &str) -> String {
    let mut text = String::with_capacity(LINE_MAX);
    for part in what.chars() {
        if text.len() + part.len_utf8() >= LINE_MAX {
            break;
        }
        text.push(if part.is_control() { ' ' } else { part });
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_bounded_line() {
        assert_eq!(line("a\nb\x1b[0m"), "a b [0m\n");
        let long = line(&"ä".repeat(LINE_MAX));
        assert!(long.len() <= LINE_MAX && long.ends_with("ä\n"));
    }
}
