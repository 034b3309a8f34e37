//! Every test of running programs, in one binary: linking costs more than most of them.

mod access_bits;
mod address_space;
mod bad_input;
mod daemon;
mod deaths;
mod hostile;
mod keeper;
mod latency;
mod limits;
mod live_and_simulated;
mod manager_kill;
mod miss_ratio_curve;
mod neighbours;
mod one_device;
mod policies;
mod real_programs;
mod real_time;
mod remote;
mod scale;
mod servers;
mod slabs;
mod soak;
mod takeover;
mod tiers;
mod transparency;
mod trees;
