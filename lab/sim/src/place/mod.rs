//! Placement policies of simulations: those of runs, and HybridSwap's rule with its stall bound. A
//! run has that as a policy file (`policies/locality.c`), which decides when pages come; the rule
//! decides of a batch that leaves, as the paper does.

mod locality;
pub mod stall_bound;

use std::fmt;
use std::str::FromStr;

use undercroft_policy::place::{self, Place, PlacementName};

pub(crate) use locality::Held;
pub use stall_bound::{StallControl, StallMax};

const LOCALITY: &str = "locality";

/// The name of a placement policy that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Of runs.
    OfRuns(PlacementName),
    /// HybridSwap's rule.
    Locality,
}

impl Placement {
    /// Makes the policy, without history; HybridSwap's rule for the replay as well.
    pub(crate) fn make(&self) -> (Box<dyn Place>, Option<Held>) {
        match self {
            Placement::OfRuns(name) => (name.make(), None),
            Placement::Locality => {
                let rule = Held::default();
                (Box::new(rule.clone()), Some(rule))
            }
        }
    }

    /// The name that a run has for it.
    pub(crate) fn of_runs(&self) -> Option<&PlacementName> {
        match self {
            Placement::OfRuns(name) => Some(name),
            Placement::Locality => None,
        }
    }
}

/// The default of runs.
impl Default for Placement {
    fn default() -> Placement {
        Placement::OfRuns(PlacementName::default())
    }
}

/// The user named a placement policy that does not exist; the text is meant for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no placement policy `{name}`; use one of: {names}")]
pub struct NoPlacement {
    name: String,
    names: String,
}

/// Errors: an unknown name; the text lists the valid ones.
impl FromStr for Placement {
    type Err = NoPlacement;

    fn from_str(text: &str) -> Result<Placement, NoPlacement> {
        if text == LOCALITY {
            return Ok(Placement::Locality);
        }
        text.parse()
            .map(Placement::OfRuns)
            .map_err(|_| NoPlacement {
                name: text.to_owned(),
                names: [place::NAMES, &[LOCALITY]].concat().join(", "),
            })
    }
}

/// As the user gave it.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::OfRuns(name) => name.fmt(f),
            Placement::Locality => f.write_str(LOCALITY),
        }
    }
}
