//! Storms: the real engine in a model world, driven by seed through operations, failures and interleavings.
mod check;
mod evict;
mod faults;
mod program;
mod world;

pub use evict::{Batch, Demotion};
pub use faults::Flight;
pub use world::*;
