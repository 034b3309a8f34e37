//! Fork relatives share frames until one of them writes. A child's pages are write-protected. So
//! each copy that the kernel makes for a write is counted, and waits for room, before it is made.
//! Protection serves the limit only. Where it is missing, as in the parent, a scan of the child's
//! pages finds those it has alone ([`crate::space::discover::note_own_frames`]).

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::limits::COPY_PAGES_MAX;
use undercroft_engine::{BatchIndex, Fault, FaultAnswer};
use undercroft_sys::procfs;

use crate::books::Books;
use crate::space::process::Process;
use crate::space::processes::Processes;
use crate::space::shared::Shared;

/// Protects all pages of a fork child whose one thread, `thread`, waits for us. Not its parent's,
/// and not later: when a thread ends, the kernel writes to wake the one that joins it, and that
/// write is not delivered where a page is protected.
pub(crate) fn protect(books: &Books, process: &Process, thread: u32) {
    // A child that did not announce itself may have come far by now.
    if procfs::status_number(thread, "Threads") != Some(1) {
        return;
    }
    let regions = books.regions(process.space);
    for region in regions {
        let _ = process.memory.protect(region, true);
    }
}

/// A thread writes to a protected page. As soon as there is room for the copy the protection goes,
/// and the thread goes on.
pub(crate) fn written(shared: &Shared, process: &Process, fault: Fault) {
    let page = VirtRange::one(fault.page);
    let relatives = shared.processes.relatives(process);
    if relatives.is_empty() {
        // Nobody shares anything any more.
        let regions = shared.books.regions(process.space);
        for region in regions {
            let _ = process.memory.protect(region, false);
        }
    }
    let mut copies = process.trail.guess(fault.page.0);
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
    let looked = looked.max(1); // what cannot be looked at is taken to be shared
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
            process.trail.went(fault.page.0, granted, copies as u64);
            let range = VirtRange::new(fault.page, fault.page.plus(granted));
            // Wakes whoever waits there.
            if process.memory.protect(range, false).is_err() {
                // It reaches over the end of a mapping, or the layout changes: each page for
                // itself, or one more fault. A page that stays protected has been charged, and is
                // charged again when it is written to: too much, until it leaves.
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

/// The pages of a group, about to be taken out, that share their frames with relatives: bit i =
/// page i. They lose their protection, so that the agent, which breaks the sharing, does not have
/// to ask for each.
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

/// Pages of the batch were copied and the copies taken out, which has freed nothing: the frame that
/// each shared is charged to an heir, which is to leave next. Locks the engine once.
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
