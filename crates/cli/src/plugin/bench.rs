//! `undercroft policy bench`: the command that compares a policy file. The simulator is in the lab,
//! which is no part of this binary.

use std::path::Path;

use undercroft_terminal::{Failure, line, status};

/// A hot set, and a walk round the rest.
pub(crate) const TRACE: &str = "scan_hot:pages=8000,refs=300000";

/// Prints the command for a file and a trace. Errors: it is no policy, or the lab cannot take its
/// name.
pub(crate) fn bench(path: &Path, trace: &str) -> Result<u8, Failure> {
    super::open(path)?;
    line(&command(path, trace)?)?;
    Ok(0)
}

/// Line of a shell. Time passes in the replay, so that a policy that scans or counts time is heard.
fn command(path: &Path, trace: &str) -> Result<String, Failure> {
    let name = path.to_str().filter(|name| !name.contains(','));
    let Some(name) = name.filter(|name| name.ends_with(".wasm")) else {
        return Err(Failure::new(
            status::USAGE,
            format!("{} cannot be compared by this name", path.display()),
            "the lab takes a list of policies, and knows a file by the end of its name",
            "give it a name that ends in .wasm and has no comma",
        ));
    };
    Ok(format!(
        "undercroft-lab sim --trace {} --policy {},auto,lru,belady --memory 25%,50%,75% \
         --initial stored --reference-time 10us --out bench",
        quoted(trace),
        quoted(name)
    ))
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:=,+%".contains(c);
    if word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_words_that_a_shell_leaves_alone() {
        let of = |path: &str| command(Path::new(path), "a trace.uct");
        let said = of("it's/mine.wasm").expect("a name that the lab takes");
        assert!(
            said.starts_with(
                r"undercroft-lab sim --trace 'a trace.uct' --policy 'it'\''s/mine.wasm',auto,"
            ),
            "{said}"
        );
        assert!(said.contains("--reference-time 10us"), "{said}");
        for name in ["mine", "a,b.wasm"] {
            let refused = of(name).expect_err(name);
            assert!(refused.fix.contains("no comma"), "{refused}");
        }
    }
}
