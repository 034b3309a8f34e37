//! Policies of papers. No run has them unless it names them, as the papers' experiments do. Each is
//! one file over the public core, which is all that a policy needs.

pub mod clock;
pub mod clock_w;
pub mod latency_group;
pub mod locality;
pub mod temperature;
pub mod window;
