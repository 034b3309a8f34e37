//! Gives memory up that the program registers with a userfaultfd of its own: two userfaultfds
//! cannot have one page. Its pages are brought in, and it is registered no more. From then on it is
//! outside the limit, as memory that cannot be managed.
//!
//! The books forget the pages before the kernel does. A manager that dies in between leaves pages
//! that are all in memory, and its successor finds them as new ones.

use std::time::{Duration, Instant};

use undercroft_base::{PageState, VirtPage, VirtRange};

use crate::space::discover::lock_threads;
use crate::space::parts::{CHUNKS, dropped, next_parts, pause};
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::sync::lock;

/// Longest wait for the pages.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pages that are asked for at a time, and the time until they are asked for again.
const BRING_PAGES: usize = 128;
const BRING_AGAIN: Duration = Duration::from_millis(50);

/// Pause between two looks.
const NAP: Duration = Duration::from_millis(1);

/// Pages of a range that are not in memory.
#[derive(Debug, Default)]
struct Absent {
    stored: Vec<VirtPage>,
    /// Some are on their way in or out.
    moving: bool,
    /// A page of it is lost: its error must stay.
    lost: bool,
}

impl Absent {
    fn is_none(&self) -> bool {
        self.stored.is_empty() && !self.moving && !self.lost
    }
}

/// Gives `range` up, as far as it is managed. False: none of it is, or its pages cannot be brought
/// in. Then nothing has changed.
pub(crate) fn give_way(shared: &Shared, process: &Process, range: VirtRange) -> bool {
    let is_managed = |part: &VirtRange| !part.intersect(range).is_empty();
    if !shared.books.regions(process.space).iter().any(is_managed) {
        return false;
    }
    process.yields(range);
    let (until, mut asked) = (Instant::now() + PATIENCE, None);
    while Instant::now() < until && process.is_alive() && !shared.signals.stopped() {
        let absent = hold(shared, process, range);
        if absent.lost {
            break;
        }
        if absent.is_none() && release(shared, process, range) {
            return true;
        }
        let again = asked.is_none_or(|at: Instant| at.elapsed() >= BRING_AGAIN);
        if !absent.stored.is_empty() && (again || !absent.moving) {
            asked = Some(Instant::now());
            let some = absent.stored.into_iter().take(BRING_PAGES);
            shared.signals.bring_in(process.space, some);
        }
        std::thread::sleep(NAP);
    }
    let_go(shared, process, range);
    false
}

/// Keeps the pages of the range from leaving. Returns what is not in memory.
fn hold(shared: &Shared, process: &Process, range: VirtRange) -> Absent {
    let (mut absent, mut left) = (Absent::default(), range);
    while !left.is_empty() {
        let mut engine = shared.books.engine_for_many();
        for part in next_parts(&engine, process.space, &mut left, CHUNKS) {
            engine.layout().lock(process.space, part, true);
            for page in part.pages() {
                match engine.books().entry(process.space, page).state {
                    PageState::Stored => absent.stored.push(page),
                    PageState::Evicting | PageState::Loading => absent.moving = true,
                    PageState::Lost => absent.lost = true,
                    PageState::Untouched | PageState::Resident => {}
                }
            }
        }
        drop(engine);
        pause();
    }
    absent
}

/// Its pages may leave again, but for the control blocks of threads.
fn let_go(shared: &Shared, process: &Process, range: VirtRange) {
    process.yields_no_more(range);
    let mut left = range;
    while !left.is_empty() {
        let mut engine = shared.books.engine_for_many();
        for part in next_parts(&engine, process.space, &mut left, CHUNKS) {
            engine.layout().lock(process.space, part, false);
        }
        drop(engine);
        pause();
    }
    lock(&process.threads_seen).clear();
    if let Some(pid) = process.pid() {
        lock_threads(&shared.books, &shared.signals, process, pid);
    }
}

/// Takes the range out of the books and the registration, if all its pages are in memory. False: to
/// be tried again.
fn release(shared: &Shared, process: &Process, range: VirtRange) -> bool {
    // With the lock held, no page is installed and no event read.
    let _layout = process.layout.write();
    if process.event_pending() || !process.has_applied_all() {
        return false;
    }
    if !hold(shared, process, range).is_none() {
        return false;
    }
    let regions = shared.books.regions(process.space);
    let managed = regions.iter().map(|region| region.intersect(range));
    let managed: Vec<VirtRange> = managed.filter(|part| !part.is_empty()).collect();
    process.yields(range);
    // All of it is in memory, so no batch has a page of it.
    let _none = dropped(shared, process.space, range, true);
    process.ground.fence(range);
    for part in managed {
        let _ = process.memory.unregister(part); // a refusal: the program gets EBUSY once more
        process.memory.wake(part);
    }
    true
}
