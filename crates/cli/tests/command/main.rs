//! Every test of the command line, in one binary.

mod demo;
mod group;
mod refusals;
mod top;
mod version;
