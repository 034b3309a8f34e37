//! Traces of memory references: what one is, how they are stored, read, made, and what they say about a program.
//!
//! Level 1: depends on the base words only.
#![forbid(unsafe_code)]

pub mod reference;

pub use reference::{Access, Reference};
