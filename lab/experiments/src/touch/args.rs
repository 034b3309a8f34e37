//! The command line of `undercroft-touch`.

use super::walk::Pattern;
use std::str::FromStr;

/// Its arguments, as `--help` shows them.
pub const USAGE: &str = "\
usage: undercroft-touch [--mode patterns|shared|first-touch|compute] [--footprint-mib N] [--seed N] [--rounds N]
                        [--phase PATTERN:read|write[:THREADS[:OPS]]]... [--verify] [--sleep-seconds N]
  PATTERN  seq | stride | random | zipf      THREADS 1..=256    OPS 0 = one visit a page
  patterns     fill the footprint, then the phases in order; --verify ends with a check of every byte
               each thread has its own share of the footprint
  shared       the same, but every thread visits the whole footprint, and as many fill and verify it
  first-touch  --rounds times: map fresh memory, write one word a page, check, unmap
  compute      --rounds times: generate, sort and sum the footprint (no pressure expected)";

/// Whether an operation reads or writes its page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Checks the header and four words of the page.
    Read,
    /// Checks the header, then rewrites an eighth of the page.
    Write,
}

impl Access {
    /// `read` or `write`.
    pub fn name(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "write",
        }
    }
}

/// Threads of a phase.
pub const THREADS_MAX: usize = 256;

/// A measured phase. Text form: `PATTERN:read|write[:THREADS[:OPS]]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Phase {
    pub pattern: Pattern,
    pub access: Access,
    /// 1 to [`THREADS_MAX`].
    pub threads: usize,
    /// Operations of all threads together; 0 = as many as there are pages.
    pub ops: u64,
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(text: &str) -> Result<Phase, String> {
        let bad = |what: &str| format!("phase `{text}`: {what}");
        let mut parts = text.split(':');
        let pattern = parts
            .next()
            .and_then(Pattern::from_name)
            .ok_or_else(|| bad("the pattern must be seq, stride, random or zipf"))?;
        let access = match parts.next() {
            Some("read") => Access::Read,
            Some("write") => Access::Write,
            _ => return Err(bad("the access must be read or write")),
        };
        let threads = parts.next().unwrap_or("1").parse();
        let ops = parts.next().unwrap_or("0").parse();
        match (threads, ops, parts.next()) {
            (Ok(threads @ 1..=THREADS_MAX), Ok(ops), None) => Ok(Phase {
                pattern,
                access,
                threads,
                ops,
            }),
            _ => Err(bad("threads must be 1..=256 and ops a number")),
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Phase {
            pattern,
            access,
            threads,
            ops,
        } = self;
        write!(f, "{}:{}:{threads}:{ops}", pattern.name(), access.name())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Patterns,
    Shared,
    FirstTouch,
    Compute,
}

#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) mode: Mode,
    pub(crate) footprint_mib: usize,
    pub(crate) seed: u64,
    pub(crate) rounds: usize,
    pub(crate) phases: Vec<Phase>,
    pub(crate) verify: bool,
    pub(crate) sleep_seconds: u64,
}

pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args {
        mode: Mode::Patterns,
        footprint_mib: 64,
        seed: 1,
        rounds: 3,
        phases: Vec::new(),
        verify: false,
        sleep_seconds: 0,
    };
    while let Some(name) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("`{name}` needs a value"));
        match name.as_str() {
            "--mode" => {
                args.mode = match value()?.as_str() {
                    "patterns" => Mode::Patterns,
                    "shared" => Mode::Shared,
                    "first-touch" => Mode::FirstTouch,
                    "compute" => Mode::Compute,
                    other => return Err(format!("unknown mode `{other}`")),
                }
            }
            "--footprint-mib" => args.footprint_mib = number(&name, &value()?)?,
            "--seed" => args.seed = number(&name, &value()?)?,
            "--rounds" => args.rounds = number(&name, &value()?)?,
            "--sleep-seconds" => args.sleep_seconds = number(&name, &value()?)?,
            "--phase" => args.phases.push(value()?.parse()?),
            "--verify" => args.verify = true,
            other => return Err(format!("unknown argument `{other}`")),
        }
    }
    match args.footprint_mib {
        1..=1_048_576 => Ok(args),
        _ => Err("--footprint-mib must be 1..=1048576".to_owned()),
    }
}

fn number<T: FromStr>(name: &str, text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{name}`: `{text}` is not a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_text_round_trips_and_refuses_nonsense() {
        let phase: Phase = "zipf:write:4:1000".parse().expect("valid");
        assert_eq!(phase.to_string(), "zipf:write:4:1000");
        assert_eq!("seq:read".parse::<Phase>().expect("valid").threads, 1);
        for bad in [
            "",
            "seq",
            "seq:look",
            "up:read",
            "seq:read:0",
            "seq:read:257",
            "seq:read:1:x",
            "seq:read:1:1:1",
        ] {
            assert!(bad.parse::<Phase>().is_err(), "{bad}");
        }
    }
}
