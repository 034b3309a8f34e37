//! The name that a person gives to a run.

use std::fmt;
use std::str::FromStr;

/// Longest name, in bytes.
const BYTES_MAX: usize = 63;

/// A name of a run. It begins with a letter, so it is never taken for a process id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunName(String);

impl FromStr for RunName {
    type Err = String;

    fn from_str(text: &str) -> Result<RunName, String> {
        let is_inner = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(is_inner)
            && text.len() <= BYTES_MAX
        {
            Ok(RunName(text.to_owned()))
        } else {
            Err(format!(
                "a name has a letter, then letters, digits, `.`, `_` and `-`, {BYTES_MAX} in all at most"
            ))
        }
    }
}

impl fmt::Display for RunName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_no_number_and_has_no_sign_that_a_label_or_a_path_obeys() {
        let longest = "n".repeat(BYTES_MAX);
        for name in ["web", "w", "web-1.of_two", "Z9", &longest] {
            let parsed: Result<RunName, _> = name.parse();
            assert_eq!(parsed.map(|name| name.to_string()), Ok(name.to_owned()));
        }
        let longer = "n".repeat(BYTES_MAX + 1);
        for text in [
            "", "7", "7up", "-w", ".w", "a b", "a/b", "a\n", "größe", "a\"", &longer,
        ] {
            assert!(text.parse::<RunName>().is_err(), "{text}");
        }
    }
}
