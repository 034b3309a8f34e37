//! Policies that others wrote: they hear what happens to pages, and name pages that shall leave
//! first, or although there is room, or come before they are needed. The crate `plugin-wasm` has
//! those that are WebAssembly files.
//!
//! A plugin cannot do harm. It sees numbers, never bytes. It may only wish: a page that it names
//! leaves only if it could be chosen anyway; one that it wants in memory comes only while there is
//! room; a copy that it wants elsewhere moves only if it is where the plugin says, and may. Our
//! policies choose the rest. What it may use is bounded: fuel for each event, memory, wishes. A
//! plugin that fails often is not asked again ([`Desk`]).
//!
//! The way of an event: [`Ears`] put it into a ring, which costs the engine some stores. A thread
//! of its own takes it out and gives it to the [`Desk`], and that to the [`Policy`]. The wishes go
//! back through other rings, to the threads that choose victims, load pages and move copies. No
//! thread waits for a ring: what does not fit is dropped and counted. A simulation calls the desk
//! itself, so it is the same each time.
//!
//! Source: FlexSwap §4.3, Table 1. Differs: state and usage are those of the events heard so far,
//! so that no question of a policy locks what a fault needs.

mod desk;
mod ears;
mod event;
mod found;
mod guest;
mod host;
mod known;
mod ring;
mod tables;

pub use desk::{Counts, Desk, FAILURES_MAX};
pub use ears::{Ears, MOVE_PAGES_MAX, MovesFree, What, Wish, Wishes};
pub use event::{Event, Kind};
pub use found::Found;
pub use guest::Guest;
pub use host::{Host, Memory, Parameter, Tier};
pub use known::PageIs;
pub use tables::{GuestMemory, Reverse, translate};

/// A larger policy file is refused.
pub const MODULE_BYTES_MAX: usize = 1 << 20;

/// A hearer of events that wishes. A plugin is one; storms have others.
pub trait Policy: Send {
    /// Takes note of one event, and may wish through `host`. Errors: it failed; wishes it made
    /// before count.
    fn hear(&mut self, event: &Event, host: &mut Host) -> Result<(), Failure>;
}

/// A policy failed at one event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The code worked longer than it may.
    #[error("it used all its fuel at one event")]
    Fuel,
    /// The code trapped.
    #[error("{0}")]
    Trap(String),
}
