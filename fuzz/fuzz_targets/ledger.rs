//! Hostile bytes as the ledger of a dead manager: `undercroft_engine::fuzz::ledger` says what must
//! hold. A test runs it over mutated ledgers, too.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    undercroft_engine::fuzz::ledger(bytes);
});
