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
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use std::sync::Arc;

    use rustix::process::{Pid, Signal, kill_process};
    use undercroft_base::PageSize;
    use undercroft_engine::Outcome;
    use undercroft_sys::mapping::PageBuf;
    use undercroft_sys::process::PidFd;

    use super::*;
    use crate::fault::model_tests::{options, shared, this_process};
    use crate::space::identity::Identity;
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

    /// Whether a process is ended that moves memory to `to`, whose pages were `out`, in a tier, or
    /// not.
    /// * `exposed`: `to` was not registered for a moment.
    fn ends_by_a_move(to: VirtRange, out: bool, exposed: bool) -> bool {
        let shared = shared(options("ram"));
        let from = VirtRange::new(VirtPage(1 << 20), VirtPage((1 << 20) + to.count().0));
        let space = {
            let mut engine = shared.books.engine();
            let space = engine.layout().add_space();
            engine.layout().attached(space, from);
            engine.discovery().found_resident(space, from);
            let mut batch = Vec::new();
            if out {
                engine.evictions().select_these(space, &[from], &mut batch);
                assert_eq!(batch.len() as u64, from.count().0);
            }
            for item in batch {
                let fill = Outcome::Fill(7);
                engine.evictions().publish(item.at, fill, &mut Vec::new());
            }
            space
        };
        let memory = Arc::new(ModelMemory::new(to));
        let row = shared.books.row(space);
        let process = Process::new(space, memory, VirtPage(1), None, None, row);
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        // The pages are looked up in this process, and that one is ended.
        let _ = process.identity.set(Identity {
            pid: child.id(),
            pidfd: PidFd::open(child.id()).expect("a pidfd"),
            ..this_process()
        });
        if exposed {
            lock(&process.exposed).push(to);
        }
        read_zeros(&shared, &process, from, to);
        let pid = Pid::from_child(&child);
        kill_process(pid, Signal::TERM).expect("it is our child"); // too late if it was ended
        let status = child.wait().expect("its end");
        status.signal() == Some(Signal::KILL.as_raw())
    }

    /// Threads that touch an absent page where it is not registered read zeros. If its bytes are in
    /// a tier, these would be wrong bytes.
    #[test]
    fn process_that_read_zeros_where_its_bytes_are_in_a_tier_is_ended() {
        let here = PageBuf::new(4, PageSize::Base).expect("memory that is touched");
        let start = VirtPage::of(here.as_ptr() as u64);
        let touched = VirtRange::new(start, start.plus(4));
        let nothing = VirtRange::new(VirtPage(1), VirtPage(5));
        assert!(ends_by_a_move(touched, true, true));
        assert!(
            !ends_by_a_move(touched, false, true),
            "its bytes moved with it"
        );
        assert!(
            !ends_by_a_move(nothing, true, true),
            "no thread has touched it"
        );
        assert!(
            !ends_by_a_move(touched, true, false),
            "it was registered all the time"
        );
    }
}
