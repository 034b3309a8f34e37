//! Fork relatives share frames until one of them writes. A child's pages are write-protected, so
//! each copy that a write needs is counted, and waits for room, before the kernel makes it.
//! Protection serves only the limit. Where it is missing, as in the parent, a scan of the child
//! finds the frames that it has alone ([`crate::space::discover::note_own_frames`]).

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::limits::COPY_PAGES_MAX;
use undercroft_engine::{BatchIndex, Fault, FaultAnswer};
use undercroft_sys::procfs;

use crate::books::Books;
use crate::space::process::{Process, control_block};
use crate::space::processes::Processes;
use crate::space::shared::Shared;

/// Protects all pages of a fork child, while its only thread, `thread`, waits for us. The parent's
/// pages are not protected, nor the child's later: when a thread ends, the kernel writes to wake
/// the joining thread, and that write fails on a protected page.
pub(crate) fn protect(books: &Books, process: &Process, thread: u32) {
    let regions = books.regions(process.space);
    // A child that did not announce itself may have several threads by now.
    if regions.is_empty() || procfs::status_number(thread, "Threads") != Some(1) {
        return;
    }
    // The kernel writes there when the child ends or calls exec, and wakes its agent. The page or
    // two are charged by a later scan.
    let block = control_block(thread);
    for region in regions {
        for part in region.minus(block.as_slice()) {
            let _ = process.memory.protect(part, true);
        }
    }
}

/// Serves a write to a protected page. When there is room for the copy, the protection is removed,
/// and the thread goes on.
pub(crate) fn written(shared: &Shared, process: &Process, fault: Fault) {
    let page = VirtRange::one(fault.page);
    let relatives = shared.processes.relatives(process);
    if relatives.is_empty() {
        // No relative is left to share with.
        let regions = shared.books.regions(process.space);
        for region in regions {
            let _ = process.memory.protect(region, false);
        }
    }
    let mut copies = process.relatives.trail.guess(fault.page.0);
    let mut words = [0u8; 8 * COPY_PAGES_MAX as usize];
    let mut sharing = [true; COPY_PAGES_MAX as usize];
    let mut looked = 0;
    if let Ok(pagemap) = process.pagemap()
        && let Ok(mut entries) = pagemap.entries(fault.page, &mut words)
    {
        while let Some(entry) = entries.next()
            && copies > 0
        {
            if looked == 0 && entry.present() && !entry.write_protected() {
                // Another thread was first.
                process.memory.wake(page);
                return;
            }
            sharing[looked] = entry.present() && !entry.exclusive();
            copies -= u64::from(sharing[looked]);
            looked += 1;
        }
    }
    let looked = looked.max(1); // a page that cannot be read counts as shared
    let (answer, kick) = {
        let mut engine = shared.books.engine();
        let shares = &sharing[..looked];
        let answer = engine.faults().copy_on_write(fault, shares, &relatives);
        (answer, engine.books().reclaim_wanted())
    };
    if kick {
        shared.signals.kick_evictor();
    }
    match answer {
        Ok(granted) => {
            let copies = sharing[..granted as usize].iter().filter(|is| **is).count();
            process
                .relatives
                .trail
                .went(fault.page.0, granted, copies as u64);
            let range = VirtRange::new(fault.page, fault.page.plus(granted));
            // Removing the protection wakes the threads that wait there.
            if process.memory.protect(range, false).is_err() {
                // The range crosses the end of a mapping, or the layout is changing. Each page is
                // tried by itself; one that fails faults again. A page that stays protected is
                // charged again at its next write: that is too much, until it leaves.
                for page in range.pages() {
                    let _ = process.memory.protect(VirtRange::one(page), false);
                }
                process.memory.wake(page);
            }
        }
        Err(FaultAnswer::NoRoom) => {}
        Err(_) => {
            process.memory.wake(page);
        }
    }
}

/// The pages of a group that share their frames with relatives: bit i = page i. The group is about
/// to be taken out. Their protection is removed, so that the agent does not fault when it breaks
/// the sharing.
pub(crate) fn leaving(
    processes: &Processes,
    process: &Process,
    pages: impl Iterator<Item = VirtPage>,
) -> u64 {
    if processes.relatives(process).is_empty() {
        return 0;
    }
    let Ok(pagemap) = process.pagemap() else {
        return 0;
    };
    let mut sharing = 0;
    for (at, page) in pages.enumerate() {
        let mut word = [0u8; 8];
        let entry = pagemap.entries(page, &mut word).ok();
        let is_shared = entry
            .and_then(|mut entries| entries.next())
            .is_some_and(|entry| entry.present() && !entry.exclusive());
        if is_shared {
            let range = VirtRange::one(page);
            let _ = process.memory.protect(range, false);
            sharing |= 1 << at;
        }
    }
    sharing
}

/// The agent has copied pages of the batch and taken the copies out, which has freed no frame. Each
/// frame is charged to an heir, which is to leave next. Locks the engine once.
pub(crate) fn left(
    books: &Books,
    processes: &Processes,
    process: &Process,
    items: impl Iterator<Item = BatchIndex>,
) {
    let relatives = processes.relatives(process);
    let mut engine = books.engine();
    let heirs: Vec<(SpaceId, VirtPage)> = items
        .filter_map(|index| engine.evictions().leave_frame(index, &relatives))
        .collect();
    drop(engine);
    for (space, page) in heirs {
        let one = VirtRange::one(page);
        books.leave_next.note(space, one);
    }
}
