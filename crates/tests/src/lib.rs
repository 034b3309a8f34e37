//! Runs unmodified programs plain and under Undercroft, and reports what they did, so that tests
//! can compare every byte.
//!
//! The tests are in `tests/`. The C programs that they compile are in `programs/`. Environment:
//!
//! * `UNDERCROFT_BIN`: the binary under test. Default: `cargo build --release` of this checkout,
//!   once a test process.
//! * `UNDERCROFT_LAB_BIN`: the binary of the lab, for the tests that use it.
//! * `UNDERCROFT_TEST_PLAIN=1`: runs every command without Undercroft, to validate the tests
//!   themselves. A failure is then the fault of the test or of the machine. Tests that need
//!   Undercroft are skipped.
//! * `UNDERCROFT_TEST_ALL=1`: rounds and sizes of the second ring ([`rounds`]).
//! * `UNDERCROFT_TEST_FULL_SIZE=1`: tests of scale at their full size.
//! * `UNDERCROFT_TEST_OPS`, `UNDERCROFT_TEST_SEEDS`, `UNDERCROFT_TEST_KILLS`: larger runs of the
//!   random tests.
//!
//! Three more are read by `undercroft run`: `UNDERCROFT_TEST_LEDGER_CHUNKS`, the room of the page
//! table; `UNDERCROFT_TEST_FIRST_SPACE`, the number of the first space; and
//! `UNDERCROFT_TEST_SWAPS`, a file like `/proc/swaps`, of a kernel that loses pages beside swap.
//!
//! A test that cannot run prints `SKIPPED: name: reason` on standard error. The line bypasses the
//! harness, which captures output.

mod huge_pages;
mod job;
mod memcached;
mod processes;
mod programs;
mod sampler;
mod stalls;
mod turn;

use std::io::Write;
use std::net::TcpListener;

pub use huge_pages::HugePages;
pub use job::{Job, Outcome, Running, plain_only};
pub use memcached::Memcached;
pub use processes::{AGENT, Process, anonymous_kib, descendants, processes};
pub use programs::{
    build, build_musl, build_static, build_with, find, programs_folder, target_folder, undercroft,
    undercroft_lab,
};
pub use sampler::{Sample, Sampler};
pub use stalls::Stalls;
pub use turn::{Turn, beside_others, one_at_a_time};
pub use undercroft_resp::{Client, Reply};
pub use undercroft_seeded::mix;

/// A MiB in bytes.
pub const MIB: u64 = 1 << 20;

/// Prints that this test, or a part of it, did not run, and why. Bypasses the harness's capture. CI
/// counts these lines.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    say(&format!("SKIPPED: {name}: {reason}"));
}

/// Takes the turn of a test until its end: `beside_others` or `one_at_a_time`. Where only plain
/// runs are made, the test ends here, and says why.
#[macro_export]
macro_rules! turn {
    ($turn:ident, $why:expr) => {
        let _turn = $crate::$turn();
        if $crate::plain_only() {
            return $crate::skip($why);
        }
    };
}

/// Whether `run --access-scan` works here. If not, prints that the test is skipped.
pub fn has_access_bits() -> bool {
    if plain_only() {
        skip("a plain run scans nothing");
        return false;
    }
    let doctor = Job::new(undercroft()).args(["doctor", "--json"]).run();
    let found: serde_json::Value = serde_json::from_str(&doctor.text()).unwrap_or_default();
    let checks = found["checks"].as_array().cloned().unwrap_or_default();
    let check = checks.iter().find(|check| check["name"] == "access bits");
    let check = check.unwrap_or_else(|| panic!("doctor does not name access bits: {doctor}"));
    if check["state"] != "ok" {
        skip(&format!("no access bits here: {}", check["detail"]));
        return false;
    }
    true
}

/// Writes one line to standard error, without the harness's capture: progress and results worth
/// keeping in a CI log.
pub fn say(line: &str) {
    // A closed standard error is no reason to fail a test.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// A TCP port on loopback that was free a moment ago.
///
/// Panics: if loopback has no free port.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a free port on loopback")
        .port()
}

/// A number from the environment, or `default`. Panics on a value that is no number, so that a
/// typing error does not shrink a test.
pub fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Err(_) => default,
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name}=`{text}` is not a number")),
    }
}

/// Options of a run in which nothing but this policy decides what leaves, and no page comes along.
pub fn policy_alone(policy: &str) -> [&str; 6] {
    [
        "--policy",
        policy,
        "--prefetch",
        "none",
        "--access-scan",
        "never",
    ]
}

/// Rounds or a size of a test: what a change runs, or what `cargo xtask test --all` runs, which
/// sets `UNDERCROFT_TEST_ALL=1`. A change's must still fail without what the test guards.
pub fn rounds<T>(change: T, all: T) -> T {
    let is_all = std::env::var("UNDERCROFT_TEST_ALL").is_ok_and(|value| value == "1");
    if is_all { all } else { change }
}

/// Whether tests of scale run at their full size (`UNDERCROFT_TEST_FULL_SIZE=1`).
pub fn is_full_size() -> bool {
    std::env::var("UNDERCROFT_TEST_FULL_SIZE").is_ok_and(|value| value == "1")
}

/// The value of `key` at `version`: `length` bytes. Half of the keys compress badly, half well.
pub fn value_of(key: u64, version: u64, length: usize) -> Vec<u8> {
    let seed = mix(key ^ mix(version));
    let mut value = Vec::with_capacity(length + 8);
    for word in 0.. {
        if value.len() >= length {
            break;
        }
        let word = if key.is_multiple_of(2) {
            mix(seed ^ word)
        } else {
            seed ^ (word / 8)
        };
        value.extend_from_slice(&word.to_le_bytes());
    }
    value.truncate(length);
    value
}
