//! The core of the policies: what each kind is asked, and the policies that are of no one paper.
//!
//! Level 1, below `undercroft-policy`, which has the names, and through which all others use it.

pub mod place;
pub mod prefetch;
pub mod reclaim;
