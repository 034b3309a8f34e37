//! The address spaces of a client: their processes and agents, their layout events, their managed
//! memory.

pub(crate) mod access;
pub(crate) mod agent;
pub(crate) mod anonymous;
pub(crate) mod arrivals;
mod backlog;
pub(crate) mod bring_home;
pub(crate) mod claims;
pub(crate) mod command;
pub(crate) mod correction;
pub(crate) mod cow;
pub(crate) mod discover;
mod dropping;
mod findings;
pub(crate) mod foreign;
pub(crate) mod give_way;
pub(crate) mod graves;
mod ground;
pub(crate) mod guest;
mod guest_access;
pub(crate) mod handed;
pub(crate) mod identity;
#[cfg(test)]
mod large_tests;
pub(crate) mod layout;
pub(crate) mod locks;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod order;
mod partners;
pub(crate) mod parts;
pub(crate) mod pool;
pub(crate) mod port;
pub(crate) mod process;
pub(crate) mod processes;
mod refused;
pub(crate) mod relatives;
mod scans;
pub(crate) mod shared;
pub(crate) mod still;
#[cfg(test)]
mod successor_tests;
mod ticket;
mod trail;
pub(crate) mod views;
pub(crate) mod watch;
