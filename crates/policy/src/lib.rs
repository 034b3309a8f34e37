//! Pure choices: which page leaves next, where it is kept, and which pages are loaded along with a
//! fault. And an estimate: the faults that other limits would have had.
//!
//! Level 1: sees ids and counters only. No clock, no I/O, no bytes; the same code runs live and
//! simulated.

/// The one list of the policies of a kind: their names, the first of which is the default, and
/// what makes each without history. Some take a size after a colon as well: `or`.
macro_rules! policies {
    (
        $(#[$docs:meta])* $name:ident makes $policy:ty, $kind:literal;
        $($text:literal => $make:expr $(, or $size:pat => $sized:expr)?;)+
    ) => {
        /// The names of the policies; the first is the default.
        pub const NAMES: &[&str] = &[$($text),+];

        /// Makes a policy without history.
        ///
        /// Errors: an unknown name, or a size that it cannot have; the message lists the names.
        pub fn by_name(name: &str) -> Result<$policy, crate::UnknownPolicy> {
            let (stem, size) = match name.split_once(':') {
                Some((stem, size)) => (stem, Some(size.parse::<u32>())),
                None => (name, None),
            };
            match (stem, size) {
                $(
                    ($text, None) => Ok($make),
                    $(($text, Some(Ok($size))) => Ok($sized),)?
                )+
                _ => Err(crate::UnknownPolicy {
                    kind: $kind,
                    name: name.to_owned(),
                    valid: NAMES,
                }),
            }
        }

        $(#[$docs])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name(String);

        impl $name {
            /// Makes the policy, without history.
            pub fn make(&self) -> $policy {
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
    /// The names that would have been right.
    pub fn valid(&self) -> &'static [&'static str] {
        self.valid
    }
}
