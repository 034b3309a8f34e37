//! Hostile text as the value of an option, a tier among them. `values::check` says what must hold.
#![no_main]

// A crate of a program cannot be used as a library.
#[path = "../../crates/cli/src/values.rs"]
mod values;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    values::check(&String::from_utf8_lossy(bytes));
});
