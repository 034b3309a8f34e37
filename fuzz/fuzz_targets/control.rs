//! Hostile bytes as a message between keeper and manager, or as a status.
//! `undercroft_manager::control::check_message` says what must hold.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    undercroft_manager::control::check_message(bytes);
});
