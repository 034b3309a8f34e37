//! Hostile bytes as the message of a monitor that hands memory over, and as what Cloud Hypervisor
//! and its snapshot say. The functions say what must hold.
#![no_main]

use undercroft_proto::handover;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    handover::check(bytes);
    handover::cloud_hypervisor::check(bytes);
});
