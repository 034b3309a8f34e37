//! Promises to a client, and the control that keeps them: latency bounds, after NVSwap §IV.
//!
//! Level 1, like the policies: sees counts and times that it is given. No clock, no I/O, no lock;
//! the same code runs live and simulated. A caller measures page-ins, gives them to a [`Monitor`],
//! ends its windows, and turns the knobs that [`LatencyControl`] sets.
//!
//! - `bound.rs`: what a user asks for, `p99=200us`.
//! - `tail.rs`: the percentile of many latencies in little memory.
//! - `monitor.rs`: windows that kept or missed the bound.
//! - `queue.rs`: Eq. 1 and Algorithm 1: how large the queue is, and who uses the buffer.
//! - `admission.rs`: whether a bound can be kept at all, by an idle device.
//! - `load.rs`: what a device can serve: the tail of its reads beside a load.
//! - `place.rs`: demand against capacity for all clients: who is admitted, who has the buffer.
//! - `control.rs`: queue and buffer together, for all clients of a device.
//! - `pressure.rs`: how much of the time a client waits for its pages.
//! - `shares.rs`: how DRAM is divided among clients.
//! - `curves.rs`: the curves of a client that count for that.
#![forbid(unsafe_code)]

pub mod admission;
pub mod admit;
pub mod bound;
pub mod control;
pub mod curves;
pub mod load;
pub mod monitor;
pub mod pressure;
pub mod queue;
pub mod shares;
pub mod tail;

pub use admission::{Capacity, Demand, Refused, admit};
pub use admit::{Asks, Could, Devices, admit_one, place};
pub use bound::{BoundError, LatencyBound, Percentile};
pub use control::{LatencyControl, Misses, Out, Unkeepable};
pub use curves::Curves;
pub use load::{Load, Service};
pub use monitor::{Judged, Monitor, Window};
pub use queue::{Queue, QueueLimits};
pub use tail::Tail;
