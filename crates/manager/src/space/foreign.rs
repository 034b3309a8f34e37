//! Takes mappings that cannot be managed out of the registration.
//!
//! One call registers all between two such mappings (`discover.rs`), and the program may map
//! another there meanwhile. The kernel accepts huge pages and shared memory. A huge page could
//! never be installed: its fault would repeat for ever. Shared memory would be counted, and never
//! leave.

use undercroft_base::{VirtPage, VirtRange};

use crate::space::process::Process;

/// If `page`, of no managed range, is in a mapping that cannot be managed: unregisters all of the
/// mapping, and has the threads that wait there fault again, without us. False otherwise.
///
/// The caller holds no lock. Cost: a system call of 1 us if the mapping can be managed.
pub(crate) fn release(process: &Process, page: VirtPage) -> bool {
    let foreign = || -> Option<VirtRange> {
        let mapping = process.maps().ok()?.at_or_above(page).ok()??;
        let is_foreign = mapping.range.contains(page) && !mapping.private_anonymous;
        is_foreign.then_some(mapping.range)
    };
    if foreign().is_none() {
        return false;
    }
    // With the lock held, no mapping gets into the books. Another mapping may have taken this one's
    // place by now, and is then unregistered instead. It is registered again before any page of it
    // leaves.
    let _layout = process.layout.write();
    let Some(range) = foreign() else {
        return false;
    };
    process.fence(range);
    let released = process.memory.unregister(range).is_ok();
    process.memory.wake(range);
    released
}
