//! One client's runtime: the keeper that owns a run, the manager that serves its faults, and the
//! report of both.

mod books;
pub mod control;
mod evict;
mod fault;
mod gauges;
pub mod grant;
pub mod keeper;
mod legacy;
mod log;
mod migrate;
pub mod options;
mod placement;
mod record;
pub mod report;
mod signals;
mod space;
mod sync;
pub mod versions;
