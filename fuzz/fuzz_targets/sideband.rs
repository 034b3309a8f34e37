//! Hostile bytes as a side-band record. `undercroft_sys::fuzz::sideband` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_sys::fuzz::sideband(bytes);
});
