//! Bounds beside the policies: what knows the future, and what knows nothing. They run through the
//! same engine.

pub mod belady;
pub mod random;

/// The bounds a user can name where a reclaim policy is asked for.
pub const NAMES: [&str; 2] = ["belady", "random"];
