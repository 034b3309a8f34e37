//! Programs that are shell scripts with an input of their own. They get `$1` (a size) and run in a
//! folder of their own.

use std::io;
use std::path::Path;
use std::process::Command;

use super::{CommandLine, Stdout};

/// Makes the input of [`SORT_COMMAND`]: `$1` random lines.
pub const SORT_PREPARE: &str = r#"python3 -c 'import random, sys
random.seed(1)
for _ in range(int(sys.argv[1])): print("%016x" % random.getrandbits(64))' "$1" > lines"#;

/// Sorts these lines.
pub const SORT_COMMAND: &str = "told env LC_ALL=C sort --parallel=2 -S 900M lines | cksum";

/// Lines of a real sort.
pub const SORT_LINES: u32 = 1_500_000;

/// Runs `script` to make the input. False if the script fails.
pub fn prepare(script: &str, size: u32, folder: &Path) -> io::Result<bool> {
    let status = Command::new("sh")
        .args(["-ec", script, "sh", &size.to_string()])
        .current_dir(folder)
        .status()?;
    Ok(status.success())
}

/// A function of each script. A command in a pipe that the kernel kills ends the script likewise:
/// its status is not that of the pipe, and its output is only short.
const TOLD: &str = r#"told() { "$@" || [ $? -ne 137 ] || kill -KILL $$; }"#;

/// The command that runs `script` in `folder`.
pub fn command(script: &str, size: u32, folder: &Path) -> CommandLine {
    let script = format!("{TOLD}\ncd \"$2\" || exit 1\n{script}");
    CommandLine {
        words: vec![
            "sh".into(),
            "-c".into(),
            script.into(),
            "sh".into(),
            size.to_string().into(),
            folder.into(),
        ],
        stdout: Stdout::Lines,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_command_that_is_killed_in_a_pipe_ends_the_script() {
        let folder = std::env::temp_dir();
        let run = |script: &str| {
            let words = command(script, 1, &folder).words;
            let mut shell = Command::new(&words[0]);
            shell.args(&words[1..]).output().expect("a shell")
        };
        let killed = run("told sh -c 'kill -KILL $$' | cksum").status;
        assert_eq!(killed.signal(), Some(9));
        let right = run("told echo right | cat");
        assert_eq!(
            (right.status.code(), &right.stdout[..]),
            (Some(0), &b"right\n"[..])
        );
        assert_eq!(run("told false | cat").status.code(), Some(0));
    }
}
