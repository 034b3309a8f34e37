//! What is known of pages, and where they are kept: the ledger and the tiers.

pub(crate) mod ledger;
pub(crate) mod tiers;
