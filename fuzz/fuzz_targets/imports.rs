//! Hostile text as a trace to import: `undercroft_trace::fuzz::imports` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_trace::fuzz::imports(bytes);
});
