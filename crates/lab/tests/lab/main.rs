//! Every test of the experiments, in one binary.

mod harness;
mod hybridswap;
mod nvswap;
mod pcm;
mod stand_in;
mod touch_program;
