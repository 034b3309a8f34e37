//! Every test of the command line, in one binary.

mod demo;
mod pcm_traces;
mod refusals;
mod sim;
mod storm;
mod top;
mod trace;
