//! Fuzzes the trace reader: `undercroft_trace::fuzz::trace` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_trace::fuzz::trace(bytes);
});
