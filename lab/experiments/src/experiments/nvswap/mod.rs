//! The experiments of NVSwap, simulated: latency bounds of page-ins ([`bounds`], figures 4 and 5),
//! bounds that are changed while clients run ([`changed`], figure 6), what page-outs do to page-ins
//! without them ([`interference`], figure 1), and pages that are copied against pages that are
//! mapped in place ([`in_place`], figure 7).
//!
//! The paper's clients are memcached servers under YCSB with a zipfian choice of records of 1 KB.
//! Ours are generated: a zipfian choice of pages. A page has four records, of which few are hot, so
//! pages differ less than records ([`THETA`]).

mod bounds;
mod changed;
mod in_place;
mod interference;

pub(super) use bounds::{fig4, fig5};
pub(super) use changed::fig6;
pub(super) use in_place::fig7;
pub(super) use interference::fig1;

use super::Lab;
use undercroft_base::Nanos;
use undercroft_sim::outcome::{ClientOutcome, Latency};
use undercroft_sim::setup::{Initial, Latencies, Memory, SimRoom};
use undercroft_sim::{PageStream, Setup};

/// DRAM, in percent of the footprint. The paper has 5 GB and does not say how large its server is.
const MEMORY_PERCENT: f64 = 50.0;

/// Skew of the choice of pages. YCSB's of records is 0.99.
const THETA: f64 = 0.6;

/// Time of an operation that finds its page in memory: the paper's shortest (Fig. 1).
const OPERATION: Nanos = Nanos(34_000);

/// The regular zone: the SSD of the paper.
const SSD: &str = "sata-ssd";

/// The buffer: a memory module of the paper.
const BUFFER: &str = "optane-dimm";

/// Buffer and regular zone.
const TIERS: [&str; 2] = [BUFFER, SSD];

/// The trace of clients that write these shares of their operations, which are equally many.
fn spec(writes: impl Iterator<Item = f64>, small: bool) -> String {
    let (pages, refs) = if small {
        (4_000, 400_000)
    } else {
        (100_000, 3_000_000)
    };
    spec_of(writes.map(|writes| (writes, refs)), pages)
}

/// The trace of clients: the share of their operations that write, and how many operations they
/// have.
fn spec_of(clients: impl Iterator<Item = (f64, u64)>, pages: u64) -> String {
    let parts = clients.enumerate().map(|(at, (writes, refs))| {
        format!(
            "zipf:pages={pages},refs={refs},writes={writes},theta={THETA},client={at},seed={}",
            at + 1
        )
    });
    parts.collect::<Vec<_>>().join("+")
}

/// The setup of every simulation. * `bounds`: of the clients; empty: they have none.
fn setup(lab: &Lab, tiers: &[&str], bounds: &[&str], control: bool) -> anyhow::Result<Setup> {
    let bounds: Result<Vec<_>, _> = bounds.iter().map(|bound| bound.parse()).collect();
    let tiers: Result<Vec<_>, _> = tiers.iter().map(|tier| tier.parse()).collect();
    Ok(Setup {
        memory: Memory::Percent(MEMORY_PERCENT),
        tiers: tiers?,
        reclaim: "active_inactive".to_owned(),
        reference_time: OPERATION,
        room: SimRoom::Ahead,
        initial: Initial::Stored,
        latency: Latencies {
            bounds: bounds?,
            window: lab.pick(Nanos(10_000_000), Nanos(1_000_000_000)),
            control,
            ..Latencies::default()
        },
        ..Setup::default()
    })
}

/// The clients in words, for the results.
fn clients_in_words() -> String {
    format!(
        "Each client chooses pages of 4 KiB by Zipf's law with {THETA} in memory for {MEMORY_PERCENT} % \
         of them. All pages lie in the last tier at first, as after the server was filled. The paper \
         names neither its share of memory nor how records lie in pages. An operation takes {OPERATION} \
         besides its page-in: the paper's shortest (Fig. 1)."
    )
}

/// The SSD in words.
const SSD_IN_WORDS: &str = "The regular zone is the SSD that the paper used, by its data sheet: nine \
     channels, a read of 90 us, a write of 640 us, and a read beside a write takes twice as long. \
     Sources: `device/src/profiles.rs`.";

/// The buffer in words.
const BUFFER_IN_WORDS: &str =
    "The buffer is one Optane module, large enough for every page, as in the paper.";

/// Control in words.
const CONTROL_IN_WORDS: &str = "With control a batch and the queue of writes are S(t), and a client that \
     the SSD cannot serve leaves to the buffer. It tries the SSD again after 8 windows, then 16, and so on, \
     until the try has failed.";

/// Parts of the buffer and the SSD that are not modelled.
const NOT_MODELLED: &str = "Not modelled: destaging from the buffer (it never fills), mapping its pages in \
     place, garbage collection of the SSD.";

/// Page-ins and page-outs in words.
const PAGING_IN_WORDS: &str = "A page-in is the kernel's path (8 us for the SSD), the wait for a \
     channel, and the read. A page-out begins when the page is handed to its tier, and ends when the \
     tier has it: it waits for a slot of the queue and for a channel. Pages leave in batches once a \
     reserve is used. If the queue of writes is full, the program waits, which is part of the time of \
     the run but of no page-in.";

/// Microseconds for a table.
fn micros(seconds: f64) -> String {
    format!("{:.1}", seconds * 1e6)
}

/// By how many percent `with` is less than `without`.
fn less_percent(without: f64, with: f64) -> f64 {
    100.0 * (1.0 - with / without)
}

/// Count, p50, p95, p99 and p99.9 for a table.
fn spread(of: &Latency) -> [String; 5] {
    [
        of.count.to_string(),
        micros(of.p50_seconds),
        micros(of.p95_seconds),
        micros(of.p99_seconds),
        micros(of.p999_seconds),
    ]
}

/// The operations of a client: [`OPERATION`] each, and what they waited.
struct Operations {
    /// How many did not wait.
    at_once: usize,
    /// Waits of the others, ascending.
    waits: Vec<Nanos>,
}

impl Operations {
    /// Operations that read or operations that write. The waits of the client were kept.
    fn of(stream: &PageStream, client: &ClientOutcome, write: bool) -> Operations {
        let is_one = |reference: u32| (reference & 1 != 0) == write;
        let waits = client.waits.iter();
        let mut waits: Vec<_> = waits
            .filter(|wait| is_one(stream.references[wait.reference as usize]))
            .map(|wait| wait.time)
            .collect();
        waits.sort_unstable();
        let all = stream.references.iter().filter(|of| is_one(**of)).count();
        Operations {
            at_once: all - waits.len(),
            waits,
        }
    }

    /// Adds those of another kind or client.
    fn join(mut self, other: Operations) -> Operations {
        self.at_once += other.at_once;
        self.waits.extend(other.waits);
        self.waits.sort_unstable();
        self
    }

    /// Seconds within which this part of them was done. There is at least one.
    fn within(&self, part: f64) -> f64 {
        let all = self.at_once + self.waits.len();
        let rank = ((all as f64 * part).ceil() as usize).clamp(1, all) - 1;
        let waited = rank.checked_sub(self.at_once);
        let waited = waited.map_or(Nanos(0), |at| self.waits[at]);
        Nanos(OPERATION.0 + waited.0).seconds()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_that_did_not_wait_are_the_first() {
        let of = Operations {
            at_once: 97,
            waits: vec![Nanos(10_000), Nanos(20_000), Nanos(30_000)],
        };
        for (part, micros) in [(0.0, 34), (0.97, 34), (0.98, 44), (0.99, 54), (1.0, 64)] {
            assert_eq!(of.within(part), Nanos(micros * 1000).seconds(), "{part}");
        }
    }
}
