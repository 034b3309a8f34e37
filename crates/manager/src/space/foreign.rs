//! Takes mappings that cannot be managed out of the registration.
//!
//! One call registers all between two such mappings (`discover.rs`), and the program may map
//! another there meanwhile. The kernel accepts huge pages and shared memory. A huge page could
//! never be installed: its fault would repeat for ever. Shared memory would be counted, and never
//! leave.
//!
//! The kernel unregisters a range, whatever is there by then. The program may have moved managed
//! memory there since the range was read. Then its event is unread ([`unregister`]), and what is
//! there is registered again. A thread that touched an absent page in between has read zeros: the
//! process is ended ([`read_zeros`]).

use undercroft_base::{PageState, VirtPage, VirtRange};
use undercroft_sys::pagemap::Category;
use undercroft_sys::uffd::RegisterMode;

use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::sync::lock;

/// If `page`, of no managed range, is in a mapping that cannot be managed: unregisters all of the
/// mapping, and has the threads that wait there fault again, without us. The same, without the
/// first, if events are unread. False otherwise.
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
    // With the lock held, no event is acknowledged, and no mapping gets into the books.
    let _layout = process.layout.write();
    let Some(range) = foreign() else {
        return false;
    };
    let mut released = true;
    if process.books_are_current() {
        process.ground.fence(range);
        released = unregister(process, range);
    }
    process.memory.wake(range);
    released
}

/// Unregisters `range`, where a mapping that cannot be managed was seen while no event was unread.
/// The caller has held the layout lock since. False if the kernel refuses.
pub(crate) fn unregister(process: &Process, range: VirtRange) -> bool {
    lock(&process.exposed).clear(); // every move until now is applied
    process.row.put_exposed(range); // first: a successor must register again what we cannot
    let done = process.memory.unregister(range).is_ok();
    if process.event_pending() {
        register_again(process, range);
    } else {
        process
            .row
            .put_exposed(VirtRange::new(range.start, range.start));
    }
    done
}

/// A dead manager had unregistered `range`, and a move there may not be applied. Call it before any
/// event is applied.
pub(crate) fn exposed_before(process: &Process, range: VirtRange) {
    if !range.is_empty() {
        register_again(process, range);
    }
}

/// Registers all of `range` that can be managed, and keeps in mind that pages were touched there.
fn register_again(process: &Process, range: VirtRange) {
    let Ok(maps) = process.maps() else {
        // Its only thread waits for us: nothing can have moved.
        let _ = process.memory.register(range, RegisterMode::MISSING_WP);
        return;
    };
    let mut at = range.start;
    while let Ok(Some(mapping)) = maps.at_or_above(at)
        && mapping.range.start < range.end
    {
        at = mapping.range.end;
        if mapping.private_anonymous {
            let _ = (process.memory).register(mapping.range, RegisterMode::MISSING_WP);
            lock(&process.exposed).push(mapping.range.intersect(range));
        }
    }
}

/// Ends the process if a page that is moved to `to` was touched where it was not registered, and
/// its bytes are elsewhere. Call it with the books as they are before the move, and the layout lock
/// held.
pub(crate) fn read_zeros(shared: &Shared, process: &Process, from: VirtRange, to: VirtRange) {
    let exposed = lock(&process.exposed).clone();
    if exposed.is_empty() {
        return;
    }
    let Ok(pagemap) = process.pagemap() else {
        return;
    };
    let mut present = Vec::new();
    for range in exposed {
        let _ = pagemap.scan(range.intersect(to), Category::PRESENT, &mut present);
    }
    let engine = shared.books.engine();
    let is_elsewhere = |page: VirtPage| {
        let before = from.start.plus(page.0 - to.start.0);
        let state = engine.books().entry(process.space, before).state;
        matches!(
            state,
            PageState::Stored | PageState::Loading | PageState::Evicting | PageState::Lost
        )
    };
    let mut pages = present.iter().flat_map(|(range, _)| range.pages());
    if pages.any(is_elsewhere) {
        process.end("it moved memory over a mapping that is not managed, and read zeros there");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use undercroft_base::PageSize;
    use undercroft_sys::mapping::PageBuf;

    use super::*;
    use crate::fault::model_tests::{options, shared, this_process};
    use crate::space::model::ModelMemory;
    use crate::space::port::Space;

    /// The program moves managed memory to where a mapping of another kind was, at the moment in
    /// which that is unregistered: an event is unread. What is there is registered again, also by a
    /// successor of a manager that died in between.
    #[test]
    fn memory_that_was_moved_there_meanwhile_is_registered_again() {
        let here = PageBuf::new(4, PageSize::Base).expect("private anonymous memory");
        let start = VirtPage::of(here.as_ptr() as u64);
        let range = VirtRange::new(start, start.plus(4));
        for moved in [false, true] {
            let shared = shared(options("ram"));
            let space = shared.books.engine().layout().add_space();
            let memory = Arc::new(ModelMemory::new(range));
            let (beacon, row) = (VirtPage(1), shared.books.row(space));
            let process = Process::new(space, memory.clone(), beacon, None, None, row);
            let _ = process.identity.set(this_process());
            let exposed_in_legacy = || {
                let heirs = shared.books.legacy.heirs();
                heirs[0].1.exposed()
            };
            if moved {
                memory.changes(true);
            }
            assert!(unregister(&process, range));
            assert!(
                range
                    .pages()
                    .all(|page| memory.is_registered(page) == moved)
            );
            // Its absent pages may have been touched.
            assert_eq!(lock(&process.exposed).contains(&range), moved);
            assert_eq!(exposed_in_legacy().is_empty(), !moved);
            if moved {
                memory.unregister(range).expect("the model does");
                exposed_before(&process, exposed_in_legacy());
                assert!(range.pages().all(|page| memory.is_registered(page)));
            }
        }
    }
}
