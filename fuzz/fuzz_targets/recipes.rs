//! Hostile text as a storm to replay: `undercroft_sim::storm::check_recipe` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_sim::storm::check_recipe(&String::from_utf8_lossy(bytes));
});
