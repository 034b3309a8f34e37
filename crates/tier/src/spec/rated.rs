//! The settings `price=` and `tbw=`: what a tier costs. They change nothing of how it works.

use std::fmt;

use undercroft_base::{Price, WriteBudget};

use super::words::SpecError;

/// Costs of a tier, as the user says. Without a price there is no cost: none is assumed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rated {
    /// Price of the memory or device below.
    pub price: Option<Price>,
    /// Bytes that may be written to the device in all.
    pub budget: Option<WriteBudget>,
}

impl Rated {
    /// Takes a setting if it is one of these. False: it is another one.
    ///
    /// * `wears`: writes wear this kind of tier out.
    pub(super) fn set(
        &mut self,
        kind: &'static str,
        wears: bool,
        key: &str,
        value: Option<&str>,
    ) -> Result<bool, SpecError> {
        let value = value.unwrap_or_default();
        let twice = |known: bool| {
            if !known {
                return Ok(true);
            }
            let key = key.to_owned();
            Err(SpecError::Twice { kind, key })
        };
        match (key, wears) {
            ("price", _) => {
                let price = value.parse().map_err(|error| wrong("price", error))?;
                twice(self.price.replace(price).is_some())
            }
            ("tbw", true) => {
                let budget = value.parse().map_err(|error| wrong("tbw", error))?;
                twice(self.budget.replace(budget).is_some())
            }
            ("tbw", false) => Err(wrong(
                "tbw",
                format!("`{kind}` is DRAM, which does not wear out by writing; leave it out"),
            )),
            _ => Ok(false),
        }
    }
}

fn wrong(key: &'static str, why: impl fmt::Display) -> SpecError {
    SpecError::Value {
        key,
        why: why.to_string(),
    }
}

/// As settings that parse to an equal value.
impl fmt::Display for Rated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(price) = self.price {
            write!(f, ",price={price}")?;
        }
        match self.budget {
            Some(budget) => write!(f, ",tbw={budget}"),
            None => Ok(()),
        }
    }
}
