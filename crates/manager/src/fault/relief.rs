//! Gives a thread the one page that it waits for, without fault threads. A manager that takes over
//! needs it: an agent may wait for a page in the middle of a command, and the takeover waits for
//! the command's end.
//!
//! The books stay as they are where a load would change them. The takeover then finds the page
//! present, as if a dead manager had installed it.

use undercroft_base::{Entry, Loaded, PageSize, PageState, TierId, VirtPage, VirtRange};
use undercroft_engine::Missing;
use undercroft_sys::ring::read_page;
use undercroft_sys::uffd::UffdError;

use super::lane::fill;
use crate::space::guest::Guest;
use crate::space::pool::pool_is_empty;
use crate::space::port::Wake;
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Fills `page`, where nothing is, with what it reads as, and wakes its threads. If that cannot be
/// done now, nothing happens.
///
/// The caller holds the layout lock for writing, and has applied the events that it read. No other
/// thread changes the books. Cost: at most one read of a device.
pub(crate) fn give(shared: &Shared, process: &Process, page: VirtPage) {
    let (one, memory) = (VirtRange::one(page), &*process.memory);
    let entry = {
        let engine = shared.books.engine();
        engine.books().entry(process.space, page)
    };
    // What is refused is tried again when the thread has faulted again.
    let _ = match entry.state {
        // A page on its way out was removed without an event.
        PageState::Evicting | PageState::Untouched => memory.zero(one, Wake::Now),
        // Another mapping was moved to this place.
        PageState::Stored | PageState::Loading => match copy(shared, &entry, process.page_size()) {
            Some(bytes) => memory.install(page, &bytes, Wake::Now),
            None => Ok(()),
        },
        PageState::Resident => fill_missing(shared, process, page),
        PageState::Lost => memory.poison(one),
    };
}

/// Fills a page that is resident by the books, if the kernel says that nothing is there: with
/// zeros, if the program or the kernel dropped it ([`Missing::Dropped`]), or another process can
/// take it away (`Handed::is_shared`), otherwise with poison.
/// The kernel refuses both if something is there, or if a layout event is pending. The caller holds
/// the layout lock for writing, so no command is posted: a page that is resident now does not leave
/// meanwhile.
#[cold]
pub(super) fn fill_missing(
    shared: &Shared,
    process: &Process,
    page: VirtPage,
) -> Result<(), UffdError> {
    let range = VirtRange::one(page);
    let missing = (shared.books.engine().discovery()).missing(process.space, page);
    let (Some(missing), true) = (missing, process.has_applied_all()) else {
        return Ok(());
    };
    let is_shared = (process.handed.as_ref()).is_some_and(|handed| handed.is_shared(page));
    let missing = if is_shared { Missing::Dropped } else { missing };
    match missing {
        Missing::Dropped => process.memory.zero(range, Wake::Now),
        Missing::Lost => process.memory.poison(range),
    }?;
    let mut engine = shared.books.engine();
    (engine.discovery()).vanished(process.space, page, missing);
    Ok(())
}

/// A thread waits for a page of guest memory that the books have in memory. If nothing is there,
/// the monitor has given the page back, and it is zeros. Otherwise it was to leave, and did not: it
/// is protected no more. The caller wakes the thread, and holds no lock.
#[cold]
pub(super) fn stays(shared: &Shared, process: &Process, guest: &Guest, page: VirtPage) {
    let one = VirtRange::one(page);
    let stays = guest.stays();
    let entry = {
        let engine = shared.books.engine();
        engine.books().entry(process.space, page)
    };
    if entry.state != PageState::Resident {
        return;
    }
    match process.memory.zero(one, Wake::Later) {
        Ok(()) => guest.note_given_back(1),
        Err(UffdError::NoMemory { .. }) => {
            drop(stays); // another page has to leave
            pool_is_empty(shared, process);
        }
        Err(_) => _ = process.memory.protect(one, false),
    }
}

/// The bytes of a page that is not in memory. `None`: no copy verifies, or it is on another
/// machine.
fn copy(shared: &Shared, entry: &Entry, size: PageSize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; size.bytes()];
    if entry.tier == TierId::FILL {
        fill(&mut bytes, entry.slot.0 as u32);
        return Some(bytes);
    }
    let metered = shared.books.tiers.get(usize::from(entry.tier.0))?;
    match metered.load(entry.slot, entry.stamp, &mut bytes).ok()? {
        Loaded::Done => Some(bytes),
        Loaded::Read { fd, offset } => {
            let mut bytes = read_page(fd, offset, size)?;
            let is_copy = metered.tier.unpack(entry.slot, &mut bytes);
            let is_right = |bytes: &[u8]| {
                let found = shared.books.key.checksum(bytes, entry.stamp);
                metered.tier.checksum(entry.slot, entry.stamp) == Some(found)
            };
            (is_copy && (metered.facts().is_source || is_right(&bytes))).then_some(bytes)
        }
        Loaded::Fetch => None,
    }
}
