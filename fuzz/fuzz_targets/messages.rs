//! Hostile bytes as a message of the handshake. `wire::parse::check` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_wire::parse::check(bytes);
});
