//! Pure choices: which page leaves next, where it is kept, and which pages are loaded along with a
//! fault.
//!
//! Level 1: sees ids and counters only. No clock, no I/O, no bytes; the same code runs live and
//! simulated.

pub mod place;
pub mod prefetch;
pub mod reclaim;

/// The user named a policy that does not exist; the text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} policy `{name}`; use one of: {}", .valid.join(", "))]
pub struct UnknownPolicy {
    kind: &'static str,
    name: String,
    valid: &'static [&'static str],
}

impl UnknownPolicy {
    fn new(kind: &'static str, name: &str, valid: &'static [&'static str]) -> UnknownPolicy {
        UnknownPolicy {
            kind,
            name: name.to_owned(),
            valid,
        }
    }

    /// The names that would have been right.
    pub fn valid(&self) -> &'static [&'static str] {
        self.valid
    }
}
