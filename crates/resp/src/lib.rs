//! The part of the Redis protocol (RESP 2) that the demo and the tests speak.
//!
//! Level 0: no dependency. Requests are arrays of strings. [`Client`] speaks over a unix socket or
//! loopback; a server uses [`read_request`] and [`write_reply`]. With the feature `cluster`, tests
//! start a cluster of real servers.

mod client;
#[cfg(feature = "cluster")]
pub mod cluster;
mod wire;

pub use client::Client;
pub use wire::{Reply, read_reply, read_request, write_reply, write_request};
