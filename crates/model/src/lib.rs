//! A fake world for tests and simulations: client memory with the kernel's rules, tiers that fail
//! by seed, and an oracle that knows what every page must read as. Also the contract of the Tier
//! port, which each implementation passes.
//!
//! Level 1: depends on `base` and `seeded` only. Deterministic: all randomness comes from a seed.

pub mod content;
pub mod contract;
pub mod memory;
pub mod oracle;
pub mod tier;

pub use content::Content;
pub use memory::{Memory, Mm, MoveRefusal, NotInstalled, Touch};
pub use oracle::Oracle;
pub use tier::{FailRates, FakeTier};
