//! Pure choices: which page leaves next, where it is kept, and which pages are loaded along with a
//! fault. And an estimate: the faults that other limits would have had.
//!
//! Level 1: sees ids and counters only. No clock, no I/O, no bytes; the same code runs live and
//! simulated.

/// Defines the type of the names of one kind of policy. A value has been parsed: the module's
/// `by_name` makes a policy of it.
macro_rules! policy_name {
    ($(#[$docs:meta])* $name:ident makes $policy:ident) => {
        $(#[$docs])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name(String);

        impl $name {
            /// Makes the policy, without history.
            pub fn make(&self) -> Box<dyn $policy> {
                by_name(&self.0).unwrap_or_else(|error| panic!("parsed before: {error}"))
            }
        }

        /// The name of the default.
        impl Default for $name {
            fn default() -> $name {
                $name(NAMES[0].to_owned())
            }
        }

        /// Errors: there is no policy of this name; the text is meant for the user.
        impl std::str::FromStr for $name {
            type Err = crate::UnknownPolicy;

            fn from_str(text: &str) -> Result<$name, Self::Err> {
                by_name(text).map(|_| $name(text.to_owned()))
            }
        }

        /// As the user gave it, with its size if it has one.
        impl std::fmt::Display for $name {
            fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str(&self.0)
            }
        }
    };
}

pub mod mrc;
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
