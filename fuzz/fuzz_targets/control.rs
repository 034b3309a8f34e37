//! Hostile bytes as a message between keeper and manager, or as a status.
//! `undercroft_proto::messages::check` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_proto::messages::check(bytes);
});
