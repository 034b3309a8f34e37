//! A set of CPUs, as users and the kernel write it.

use std::fmt;
use std::str::FromStr;

/// CPUs that exist for us: their numbers are below this.
const CPUS: usize = 1024;

/// CPUs by their numbers, 0 to 1023; never empty. Text form: `0-3,6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

/// A text that names no CPUs; its text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no CPUs: give numbers and ranges from 0 to 1023 (example: 0-3,6)")]
pub struct CpusError(String);

impl Cpus {
    /// `numbers` ascending, each below 1024. `None` if there is none.
    pub fn of(numbers: Vec<usize>) -> Option<Cpus> {
        (!numbers.is_empty()).then_some(Cpus(numbers))
    }

    /// Their numbers, ascending.
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }
}

impl FromStr for Cpus {
    type Err = CpusError;

    fn from_str(text: &str) -> Result<Cpus, CpusError> {
        let wrong = || CpusError(text.to_owned());
        let number = |text: &str| {
            let number = text.trim().parse::<usize>().ok();
            number.filter(|it| *it < CPUS).ok_or_else(wrong)
        };
        let mut found = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            found.extend(first..=last);
        }
        found.sort_unstable();
        found.dedup();
        Ok(Cpus(found))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.0.chunk_by(|one, next| one + 1 == *next);
        for (at, run) in runs.enumerate() {
            let comma = if at == 0 { "" } else { "," };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_read_as_it_is_written() {
        for (text, canonical) in [
            ("3", "3"),
            ("0-3,6", "0-3,6"),
            (" 6 , 0 - 2,2,3", "0-3,6"),
            ("1023", "1023"),
        ] {
            let cpus: Cpus = text.parse().expect(text);
            assert_eq!(cpus.to_string(), canonical);
            assert_eq!(canonical.parse(), Ok(cpus));
        }
        for text in ["", ",", "a", "-1", "3-1", "0-1024", "1,,2", "1-2-3", "all"] {
            let wrong = text.parse::<Cpus>().expect_err(text);
            assert_eq!(wrong, CpusError(text.to_owned()));
        }
    }
}
