//! The engine in virtual time: traces replayed against models of devices, and storms of failures.
//!
//! Runs the engine and the policies that run live; nothing in them knows of this crate.
#![forbid(unsafe_code)]

pub mod storm;
