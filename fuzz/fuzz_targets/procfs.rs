//! Hostile text as a file of /proc. `undercroft_sys::fuzz::procfs` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_sys::fuzz::procfs(bytes);
});
