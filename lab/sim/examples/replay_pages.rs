//! Replays a file of page numbers (u64, little-endian) and prints misses and seconds as JSON: our
//! side of bench/libcachesim.
//!
//! `replay_pages FILE POLICY PAGES_OF_MEMORY`

use std::time::Instant;

use undercroft_sim::setup::Memory;
use undercroft_sim::{PageStream, Setup, simulate};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, file, policy, frames] = &arguments[..] else {
        panic!("usage: replay_pages FILE POLICY PAGES_OF_MEMORY");
    };
    let bytes = std::fs::read(file).expect("a readable file");
    let (words, _) = bytes.as_chunks::<8>();
    let packed: Vec<u64> = words
        .iter()
        .map(|word| (u64::from_le_bytes(*word) * 4096) << 1)
        .collect();
    drop(bytes);
    let started = Instant::now();
    let stream = PageStream::build("pages", &packed, 4096).expect("few pages");
    let numbering = started.elapsed();
    drop(packed);
    let setup = Setup {
        memory: Memory::Pages(frames.parse().expect("a number of pages")),
        reclaim: policy.clone(),
        ..Setup::default()
    };
    let streams = [stream];
    let started = Instant::now();
    let outcome = simulate(&streams, &setup, &mut |_| ()).expect("it runs");
    let replay = started.elapsed();
    println!(
        "{{\"references\": {}, \"misses\": {}, \"numbering_seconds\": {}, \"replay_seconds\": {}}}",
        outcome.references,
        outcome.misses,
        numbering.as_secs_f64(),
        replay.as_secs_f64()
    );
}
