//! One client's runtime: the keeper that owns a run, the manager that serves its faults, and the report of both.

pub mod options;
pub mod report;
