//! Policies of papers. No run has them unless it names them, as the papers' experiments do. Each is
//! one file over the public core, which is all that a policy needs.

pub mod window;
