//! Every test of the command line, in one binary.

mod demo;
mod refusals;
mod top;
