//! Hostile bytes as the message of a monitor that hands memory over. `handover::check` says what
//! must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_proto::handover::check(bytes);
});
