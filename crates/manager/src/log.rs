//! The manager's messages: lines on its standard error, a pipe that only the keeper reads. Writing
//! never waits: a line that does not fit is lost. A panic's message goes the same way.

use std::io::{self, Write};

/// Longest line, in bytes. A pipe takes a line of up to `PIPE_BUF` bytes whole or not at all.
const LINE_MAX: usize = 2000;

const _: () = assert!(LINE_MAX <= rustix::pipe::PIPE_BUF);

/// Sends a line to the keeper, which shows it to the user. Cost: one write that does not wait.
pub(crate) fn say(what: &str) {
    let _ = io::stderr().write(line(what).as_bytes());
}

/// As [`say`], for a message that the user should read, though the run goes on.
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
