//! A bound of the part of the time that a program waits for its pages (`--stall-max`): kept from
//! both sides, by a running program over an SSD and a disk.

use std::path::Path;
use std::time::{Duration, Instant};

use undercroft_tests::{
    Job, MIB, Running, build, has_access_bits, one_at_a_time, plain_only, say, skip,
};

/// A bound, and the pause before each page in microseconds: the program waits less than the bound
/// if all pages go to the SSD, and more if all that may go to the disk.
const LOADS: [(u32, &str); 3] = [(30, "300"), (50, "150"), (70, "50")];

/// Control begins on the SSD, and shifts pages after three windows of a second.
const WARM_UP: Duration = Duration::from_secs(12);
const MEASURED: Duration = Duration::from_secs(12);

/// What a bound may be missed by, on either side: percentage points.
const MUST: f64 = 5.0;

/// Goes round 10 MiB in 5 MiB, in a random order which is always the same, and checks every word.
/// Each has devices of its own.
fn shuffled(folder: &Path, bound: &str, pause: &str) -> Job {
    let file = |name: &str| folder.join(format!("{name}-{pause}")).display().to_string();
    Job::new(build("touch"))
        .args(["10", "--rounds", "100000", "--random-data", "--shuffle"])
        .args(["--pace", pause])
        .limit(5 * MIB)
        .options(["--placement", "locality", "--prefetch", "none"])
        .options(["--access-scan", "10ms", "--policy", "clock"])
        .options(["--stall-max", bound])
        .tier(&format!("file:{},size=64M,shape=sata-ssd", file("ssd")))
        .tier(&format!("file:{},size=64M,shape=hdd-7200", file("disk")))
        .timeout(100)
}

/// Seconds that it has waited, and pages written to the disk.
fn waited(run: &Running) -> (Instant, f64, u64) {
    let status = run.status().expect("it runs");
    let seconds = status["stall_some_seconds"].as_f64().expect("a number");
    let written = status["tiers"][1]["writes"].as_u64().expect("a count");
    (Instant::now(), seconds, written)
}
