//! Pure choices: which page leaves next, and which pages come along with a fault.
//!
//! Level 1: sees ids and counters only. No clock, no I/O, no bytes; the same code runs live and simulated.

pub mod prefetch;
pub mod reclaim;
