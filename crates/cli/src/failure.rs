//! An error as the user sees it: what happened, why, and the fix. It has the exit status of the
//! command.

use std::fmt;

/// Our own exit statuses; any other is the program's.
pub(crate) mod status {
    /// A command other than `run` failed.
    pub(crate) const FAILED: u8 = 1;
    /// The command line is wrong.
    pub(crate) const USAGE: u8 = 2;
    /// No daemon answers.
    pub(crate) const DAEMON_AWAY: u8 = 69;
    /// The configuration is wrong.
    pub(crate) const CONFIGURATION: u8 = 78;
    /// `run` failed, not the program.
    pub(crate) const RUN_FAILED: u8 = 125;
    /// The program was found but cannot be executed.
    pub(crate) const NOT_EXECUTABLE: u8 = 126;
    /// The program was not found.
    pub(crate) const NOT_FOUND: u8 = 127;
}

/// A refusal or failure, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What did not work, naming the thing.
    pub what: String,
    /// The reason.
    pub why: String,
    /// What to do about it.
    pub fix: String,
    /// One of [`status`].
    pub status: u8,
}

impl Failure {
    /// A failure in these words.
    pub(crate) fn new(
        status: u8,
        what: impl Into<String>,
        why: impl Into<String>,
        fix: impl Into<String>,
    ) -> Failure {
        Failure {
            what: what.into(),
            why: why.into(),
            fix: fix.into(),
            status,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "undercroft: {}\n  why: {}\n  fix: {}",
            self.what, self.why, self.fix
        )
    }
}

impl std::error::Error for Failure {}

/// Prints that a test did not run, past the test harness's capture: `NAME: reason`.
#[cfg(test)]
pub(crate) fn skip(what: &str) {
    use std::io::Write;
    let _ = std::io::stderr().write_all(format!("SKIPPED: {what}\n").as_bytes());
}
