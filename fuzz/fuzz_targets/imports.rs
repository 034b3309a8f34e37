//! Hostile text as a trace to import: `undercroft_references::fuzz::imports` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_references::fuzz::imports(bytes);
});
