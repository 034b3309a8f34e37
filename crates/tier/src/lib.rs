//! Tiers: where page copies are kept. A compressed RAM pool, a file or block device, and the user's
//! way to name them.
//!
//! Level 2: depends on `base` (the Tier port) and `sys` (shared memory, io_uring). No `unsafe`.
//! Never chooses what to store or where: it is told. Every implementation passes
//! [`contract::check`].

#![forbid(unsafe_code)]

pub mod contract;
pub mod file;
pub mod ram;
pub mod spec;
