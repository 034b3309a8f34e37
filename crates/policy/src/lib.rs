//! Pure choices: which page leaves next, where it is kept, and which pages are loaded along with a
//! fault. And an estimate: the faults that other limits would have had.
//!
//! Level 1: sees ids and counters only. No clock, no I/O, no bytes; the same code runs live and
//! simulated. The traits and most policies are in `undercroft-policy-core`; this is the door to
//! them, with the lists. The contract of a kind runs over every name of its list.

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
pub mod papers;

/// The reclaim policies, and their names.
pub mod reclaim {
    #[cfg(test)]
    mod contract;
    #[cfg(test)]
    mod simulation;

    pub use undercroft_policy_core::reclaim::*;

    policies! {
        /// The name of a reclaim policy that there is.
        ReclaimName makes Box<dyn Reclaim>, "reclaim";
        "auto" => Box::new(auto::Auto::new());
        "active_inactive" => Box::new(active_inactive::ActiveInactive::new());
        "lru" => Box::new(lru::Lru::new());
    }
}

/// The placement policies, and their names.
pub mod place {
    #[cfg(test)]
    mod contract;

    pub use undercroft_policy_core::place::*;

    policies! {
        /// The name of a placement policy that there is.
        PlacementName makes Box<dyn Place>, "placement";
        "worth" => Box::new(worth::Worth::default());
        "waterfall" => Box::new(waterfall::Waterfall);
    }
}

/// The prefetch policies, and their names.
pub mod prefetch {
    #[cfg(test)]
    mod contract;
    pub mod first_touch;

    use crate::papers;
    pub use undercroft_policy_core::prefetch::*;

    policies! {
        /// The name of a prefetch policy that there is; the policy is `None` if it brings nothing.
        /// `readahead:8`: blocks of up to 8 pages, the faulting one included. `window:8`: 8 besides
        /// the faulting page. Sizes are 1 to 63; 0 = none.
        PrefetchName makes Option<Box<dyn Prefetch>>, "prefetch";
        "majority" => Some(Box::new(majority::Majority::new()));
        "readahead" => Some(Box::new(readahead::Readahead::new())),
            or pages @ 0..=WINDOW_MAX => boxed(pages, readahead::Readahead::with_max);
        "window" => Some(Box::new(papers::window::FixedWindow::new(papers::window::PAGES_DEFAULT))),
            or pages @ 0..=WINDOW_MAX => boxed(pages, papers::window::FixedWindow::new);
        "none" => None;
    }

    /// A policy of a size that is not 0.
    fn boxed<P>(pages: u32, of: impl FnOnce(u32) -> P) -> Option<Box<dyn Prefetch>>
    where
        P: Prefetch + 'static,
    {
        (pages > 0).then(|| Box::new(of(pages)) as Box<dyn Prefetch>)
    }
}

/// The user named a policy that does not exist; the text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} policy `{name}`; use one of: {}", .valid.join(", "))]
pub struct UnknownPolicy {
    kind: &'static str,
    name: String,
    valid: &'static [&'static str],
}
