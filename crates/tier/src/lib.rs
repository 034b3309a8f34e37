//! Tiers, which keep page copies: a compressed RAM pool, mapped non-volatile memory, a file or
//! block device, and the text by which the user names them. With the feature `redis` also a cluster
//! of other machines (`tier-redis`).
//!
//! Level 2: depends on `base` (the Tier port), `sys` (shared memory, io_uring) and `device`
//! (times). No `unsafe`. It never chooses what to store or where. Every implementation passes
//! `undercroft_model::contract::check`.
//!
//! A new kind of tier takes a folder here or a crate beside this one, and one row: a file in `spec`
//! that [`spec::KINDS`] names. The row has the facts that all other crates ask for
//! ([`undercroft_base::TierFacts`]), the settings, and how a tier of it is opened and made.
//! Besides: a fake with the same facts (`model/src/tier.rs`; a test compares), how it fails in
//! storms (`lab/sim/src/storm`), and how fast it is in simulations (`TierModel` in
//! `lab/sim/src/setup.rs`).

#![forbid(unsafe_code)]

mod device_name;
pub mod dram;
pub mod file;
mod made;
pub mod mailbox;
pub mod measure;
pub mod nvm;
pub mod open;
pub mod profile;
pub mod ram;
pub mod read_run;
pub mod shape;
pub mod shared_device;
pub mod source;
pub mod spec;
