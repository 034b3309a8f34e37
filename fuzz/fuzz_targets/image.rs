//! Hostile bytes as a program to run. `undercroft_sys::fuzz::image` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_sys::fuzz::image(bytes);
});
