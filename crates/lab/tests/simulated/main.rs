//! The simulated experiments at small sizes. They only compute.

mod hybridswap;
mod nvswap;
mod pcm;
