//! The daemon: admits runs, grants them memory and storage, and moves memory to where it saves the
//! most waiting. docs/design/0027.
//!
//! It is a control plane. The keeper of a run stays in `undercroft run`, with the program's
//! terminal, signals and descriptors, and no page passes through the daemon. So its death harms no
//! program: a run goes on with what it has, and claims that from the next daemon.
//!
//! - `bounds.rs`: the latency bounds of all clients, kept by one control.
//! - `config.rs`: the configuration file and its drop-ins.
//! - `devices.rs`: the emulated devices that clients share.
//! - `journal.rs`: the log of who was admitted, refused, given another limit, or gone.
//! - `load.rs`: whether the devices can serve one more run.
//! - `member.rs`: one client that was admitted.
//! - `members.rs`: who has what, and what is to be said to whom. It sees messages and times, and
//!   does no I/O.
//! - `server.rs`: the socket, and the loop around `members.rs`.
//! - `storage.rs`: who has how much of which tier, by what `store.rs` knows of each run.
#![forbid(unsafe_code)]

mod bounds;
pub mod config;
mod devices;
mod journal;
mod load;
mod member;
mod members;
mod server;
mod storage;
mod store;

pub use config::{Config, ConfigError};
pub use server::{ServeError, serve};
