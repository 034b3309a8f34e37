//! An error as the user sees it: what happened, why, and the fix. It has the exit status of the
//! command.

use std::fmt;

use serde::Serialize;

/// Our own exit statuses; any other is the program's.
pub mod status {
    /// A command other than `run` failed.
    pub const FAILED: u8 = 1;
    /// The command line is wrong.
    pub const USAGE: u8 = 2;
    /// No daemon answers.
    pub const DAEMON_AWAY: u8 = 69;
    /// The configuration is wrong.
    pub const CONFIGURATION: u8 = 78;
    /// `run` failed, not the program.
    pub const RUN_FAILED: u8 = 125;
    /// The program was found but cannot be executed.
    pub const NOT_EXECUTABLE: u8 = 126;
    /// The program was not found.
    pub const NOT_FOUND: u8 = 127;
}

/// A refusal or failure, ready to be printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename = "failed")]
pub struct Failure {
    /// The thing that did not work, by name.
    pub what: String,
    /// The reason.
    pub why: String,
    /// The remedy.
    pub fix: String,
    /// Exit status, of [`status`].
    pub status: u8,
}

impl Failure {
    /// A failure in these words.
    pub fn new(
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
