//! Every test of the simulator by its public face, in one binary.

mod agreement;
mod cases;
mod crafted;
mod forks;
mod latency;
mod mrc;
mod plugins;
mod replay;
mod storm;
