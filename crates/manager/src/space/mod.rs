//! The address spaces of a client: their processes and agents, their layout events, their managed
//! memory.

pub(crate) mod access;
pub(crate) mod agent;
pub(crate) mod anonymous;
pub(crate) mod arrivals;
pub(crate) mod command;
pub(crate) mod correction;
pub(crate) mod cow;
pub(crate) mod discover;
mod dropping;
pub(crate) mod foreign;
pub(crate) mod graves;
pub(crate) mod layout;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod order;
pub(crate) mod parts;
pub(crate) mod port;
pub(crate) mod process;
pub(crate) mod processes;
pub(crate) mod shared;
mod trail;
pub(crate) mod watch;
