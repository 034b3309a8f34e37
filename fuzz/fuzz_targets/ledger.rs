//! Hostile bytes as the ledger of a dead manager. A test of the engine runs the same check over
//! mutated ledgers.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/engine/tests/engine/common/hostile_ledger.rs"]
mod hostile_ledger;

fuzz_target!(|bytes: &[u8]| {
    hostile_ledger::check(bytes);
});
