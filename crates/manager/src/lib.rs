//! One client's runtime: the keeper that owns a run, the manager that serves its faults, and the report of both.

mod access;
mod agent;
mod awake;
mod backoff;
mod command;
mod cow;
mod discover;
mod ending;
mod evictor;
mod fault_thread;
pub mod keeper;
mod layout;
mod ledger;
mod log;
pub mod options;
mod order;
mod pin;
mod placement;
mod process;
mod record;
pub mod report;
pub mod serve;
mod shared;
pub mod status;
mod sync;
mod tiers;
mod watch;
