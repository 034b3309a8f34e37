//! Every test of the command line of the lab, in one binary.

mod interrupt;
mod pcm_traces;
mod refusals;
mod sim;
mod storm;
mod trace;
