//! Tiers, which keep page copies: a compressed RAM pool, mapped non-volatile memory, a file or
//! block device, a cluster of other machines, and the text by which the user names them.
//!
//! Level 2: depends on `base` (the Tier port), `sys` (shared memory, io_uring) and `device`
//! (times). No `unsafe`. It never chooses what to store or where. Every implementation passes
//! `contract::check`.

#![forbid(unsafe_code)]

#[cfg(test)]
mod contract;
mod device_name;
pub mod file;
pub mod mailbox;
pub mod measure;
pub mod nvm;
pub mod open;
pub mod profile;
pub mod ram;
pub mod remote;
pub mod shape;
pub mod shared_device;
pub mod spec;
