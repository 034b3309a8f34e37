//! The program's command line as it is kept and shown. Its words may be secrets, and they may be
//! any bytes.

use std::ffi::OsString;

use serde::{Deserialize, Serialize};

/// Bytes of the command line that are kept.
const BYTES_MAX: usize = 4096;

/// Mark at the end of a word that is cut.
const CUT: &str = "...";

/// Program and arguments, cut at 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownCommand {
    /// The first words; bytes that are not UTF-8 are replaced. The last of them may be cut, and
    /// ends with "..." then.
    pub words: Vec<String>,
    /// How many arguments there are, of which some may not be in `words`.
    pub arguments: u64,
}

impl ShownCommand {
    /// * `command`: the program, then its arguments.
    pub fn of(command: &[OsString]) -> ShownCommand {
        let (mut words, mut room) = (Vec::new(), BYTES_MAX - CUT.len() - 1);
        for word in command {
            // A word takes a byte more than it has, so that empty ones are bounded, too.
            let word = word.to_string_lossy();
            if word.len() < room {
                room -= word.len() + 1;
                words.push(word.into_owned());
                continue;
            }
            let mut ends = (0..=room).rev();
            let end = ends.find(|at| word.is_char_boundary(*at));
            words.push(format!("{}{CUT}", &word[..end.unwrap_or(0)]));
            break;
        }
        ShownCommand {
            words,
            arguments: command.len().saturating_sub(1) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(words: &[&str]) -> ShownCommand {
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        ShownCommand::of(&words)
    }

    #[test]
    fn a_short_command_is_kept_whole_and_a_long_one_is_cut() {
        let short = kept(&["sort", "-n", "", "é"]);
        assert_eq!((short.words.len(), short.arguments), (4, 3));
        let long = "é".repeat(3000);
        for words in [vec!["sort", &long, "-n"], vec![&long], vec![""; 9000]] {
            let cut = kept(&words);
            assert_eq!(cut.arguments, words.len() as u64 - 1);
            let bytes: usize = cut.words.iter().map(|word| word.len() + 1).sum();
            assert!((4000..=BYTES_MAX).contains(&bytes), "{bytes}");
            assert!(cut.words.last().is_some_and(|word| word.ends_with(CUT)));
        }
    }
}
