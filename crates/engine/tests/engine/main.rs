//! The engine through its face: each file is one subject. One binary, because each one would
//! compile the engine's generic code again.

mod after_plan;
mod ahead;
mod approach;
mod beside;
mod bury;
mod changed;
mod common;
mod copy_on_write;
mod cut_off;
mod distance;
mod in_flight;
mod inherited;
mod ledger;
mod moves;
mod named_victims;
mod numbers;
mod page_size;
mod parts;
mod reclaim;
mod refused;
mod regions;
mod reserve;
mod set_aside;
mod source;
mod unsure;
mod upset;
mod waiters;
mod wished;
