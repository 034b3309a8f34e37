//! Bounds beside the policies: one knows the future, one knows nothing. They run in the same
//! engine.

pub mod belady;
pub mod random;

/// The bounds that a user can name in place of a reclaim policy.
pub const NAMES: [&str; 2] = ["belady", "random"];
