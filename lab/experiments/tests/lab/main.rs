//! The tests of the experiments that start programs, in one binary.

mod harness;
mod stand_in;
mod touch_program;
