//! Carries out one command: moves pages into the staging area, and on into the holding area.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use undercroft_wire::command::{self, CommandWords};
use undercroft_wire::protocol::{CommandPage, HALF_PAGES, STAGING_PAGES, next_run, places_of};

use crate::page::Page;
use crate::raw::{EBUSY, EEXIST, EINVAL, PAGE, advice, call3, nr};

/// Number of the request: see ioctl_userfaultfd(2).
const UFFD_MOVE: usize = 0xC028_AA05;

/// Most pages, and most MOVEs, in one exclusion of the reader. This bounds how long a fault waits
/// for the agent: some 20 us. A smaller bound is no better. Each fault between two MOVEs costs the
/// program's CPU an interrupt, which flushes what it has cached of the next page.
const MOVE_PAGES_MAX: usize = 16;
const MOVES_MAX: usize = 8;

/// Moves the listed pages into the staging area, page i to place i, and on into the holding area
/// behind it.
///
/// The first move uses the process's own userfaultfd, which refuses it while a layout event is
/// unread. So a page of a mapping that replaced the one meant is never moved. The second move
/// empties the staging area without an event; dropping its pages would raise one.
///
/// # Safety
/// The calling thread is the agent: `staging` is its area, and no other thread moves its pages.
pub(crate) unsafe fn move_out(page: &Page, seq: u32, listed: Range<usize>, staging: usize) {
    let places = places_of(listed.start, listed.end);
    // SAFETY: the caller's promise.
    let taken = unsafe { make_room(page, staging, places) };
    leave_out(page, taken);
    let count = listed.end;
    // SAFETY: the caller's promise; the listed places of the staging area are empty.
    let staged = unsafe { stage(page, seq, listed, staging) };
    // A page that the kernel forgot (see `pages_moved`) may be anywhere in the staging area. So if
    // a command did not run to its end, every place is tried.
    let sought = if staged.whole {
        staged.moved
    } else {
        places & !taken
    };
    // SAFETY: the caller's promise; its places of the holding area are empty.
    let held = unsafe { hold(page, staging, sought, staged.moved, count) };
    if staged.executable {
        // SAFETY: the areas are the shim's own.
        unsafe { protect(staging, false) };
    }
    if held.stranded != 0 {
        page.strays.fetch_or(halves_of(places), Relaxed);
    }
    let tell = |word: &AtomicU64, here: u64| {
        word.store(word.load(Relaxed) & !places | here, Relaxed);
    };
    tell(&page.moved, held.moved);
    tell(&page.refused, staged.refused & !held.moved);
    tell(&page.stranded, held.stranded);
}

/// The halves that `places` has, as bits of [`CommandPage::strays`].
fn halves_of(places: u64) -> u32 {
    u32::from(places & 1 != 0) | u32::from(places >> HALF_PAGES != 0) << 1
}

/// The first of `places`, which is a half or all, and their end.
fn range_of(places: u64) -> Range<usize> {
    places.trailing_zeros() as usize..STAGING_PAGES - places.leading_zeros() as usize
}

/// Takes the pages off the list whose places are in `taken`.
fn leave_out(page: &Page, taken: u64) {
    let mut at = 0;
    while let Some((first, end)) = next_run(taken, at, STAGING_PAGES) {
        for page in &page.pages[first..end] {
            page.store(0, Relaxed);
        }
        at = end;
    }
}

/// Pages of a command by outcome. Bit i = page i.
struct Staged {
    /// They are in the staging area.
    moved: u64,
    /// They stay in the program, whatever was tried.
    refused: u64,
    /// No MOVE stopped before its end.
    whole: bool,
    /// Both areas are executable now.
    executable: bool,
}

/// Moves the listed pages into the staging area, until the command is cancelled.
///
/// # Safety
/// As [`move_out`].
unsafe fn stage(page: &Page, seq: u32, listed: Range<usize>, staging: usize) -> Staged {
    let count = listed.end;
    let (mut moved, mut refused, mut whole) = (0u64, 0u64, true);
    let mut remedies = Remedies::default();
    let mut at = listed.start;
    while at < count {
        if page.pages[at].load(Relaxed) == 0 {
            at += 1; // dropped by the program before the command was posted
            continue;
        }
        let last = count.min(at + MOVE_PAGES_MAX);
        let alone = remedies.alone;
        // SAFETY: the caller's promise; place `at` has a page.
        let moving = || unsafe { move_runs(page, staging, at, last, alone) };
        let Some(run) = command::between_events(page, seq, moving) else {
            break; // cancelled
        };
        whole &= run.result == 0;
        moved |= low_bits(run.done) << at;
        at += run.done;
        // After some progress the kernel says EAGAIN, whatever stopped it: the next call tells the
        // reason.
        // SAFETY: the caller's promise; place `at` has the page that is stuck.
        if run.stuck && !unsafe { remedies.apply(page, staging, at, &run) } {
            refused |= 1 << at;
            at += 1;
        }
    }
    Staged {
        moved,
        refused,
        whole,
        executable: remedies.executable,
    }
}

/// Remedies that a command has tried so far for pages that do not move.
struct Remedies {
    /// From this place on, pages are moved one by one.
    alone: usize,
    /// The shim's own memory was unlocked.
    unlocked: bool,
    /// Sharing of the page at this place was broken.
    unshared: usize,
    /// Both areas are executable now.
    executable: bool,
    /// That was changed for the page at this place.
    changed: usize,
    /// Changes that did not help. Read-only memory is refused either way, and each change wakes the
    /// manager's readers of layout events.
    fruitless: u32,
}

/// Most changes of one command that may fail to help.
const FRUITLESS_MAX: u32 = 2;

impl Default for Remedies {
    fn default() -> Remedies {
        Remedies {
            alone: usize::MAX,
            unlocked: false,
            unshared: usize::MAX,
            executable: false,
            changed: usize::MAX,
            fruitless: 0,
        }
    }
}

impl Remedies {
    /// Does what may help against `run.result` at place `at`. False if nothing is left to try.
    ///
    /// # Safety
    /// As [`move_out`]; place `at` has a page.
    #[cold]
    unsafe fn apply(&mut self, page: &Page, staging: usize, at: usize, run: &Moved) -> bool {
        match run.result {
            // A range over two mappings moves nothing: the rest of the batch is moved page by page.
            EINVAL if run.tried > 1 => self.alone = at,
            // The kernel moves between mappings only if both or neither are locked.
            EINVAL if !self.unlocked => {
                self.unlocked = true;
                // SAFETY: the shim's own mapping.
                unsafe { unlock(staging) };
            }
            // Nor between memory that is executable and memory that is not. Pages of one kind are
            // mostly together, so runs are tried again.
            EINVAL if self.changed != at && self.fruitless < FRUITLESS_MAX => {
                (self.changed, self.alone) = (at, usize::MAX);
                // SAFETY: the areas are the shim's own.
                self.executable ^= unsafe { protect(staging, !self.executable) };
            }
            EINVAL if self.changed == at => {
                self.fruitless += 1;
                return false;
            }
            // Shared with a fork relative, or pinned. Breaking the sharing changes no byte. It
            // helps if the page is shared; a pinned one stays busy.
            EBUSY if self.unshared != at => {
                self.unshared = at;
                let start = page.pages[at].load(Relaxed) as usize;
                // SAFETY: a page of the program, whose contents stay.
                unsafe { call3(nr::MADVISE, start, PAGE, advice::POPULATE_WRITE) };
            }
            _ => return false,
        }
        true
    }
}

/// Pages of a command by outcome in the end. Bit i = page i.
struct Outcomes {
    /// They left the program.
    moved: u64,
    /// They left the program too, but are still in the staging area.
    stranded: u64,
}

/// Moves the pages at the places `sought` on into the holding area. `moved`: those that are known
/// to be in the staging area.
///
/// # Safety
/// As [`move_out`]; the holding area is empty.
unsafe fn hold(page: &Page, staging: usize, sought: u64, mut moved: u64, count: usize) -> Outcomes {
    let mut stranded = 0u64;
    let mut waits = Waits::default();
    let mut at = 0;
    while let Some((first, end)) = next_run(sought, at, count) {
        at = first;
        // SAFETY: the caller's promise.
        let (done, result) = unsafe { move_on(page, staging, first..end, 0, &mut waits) };
        moved |= low_bits(done) << at;
        at += done;
        if done == 0 {
            // The page that is there is in use. Other errors: the place is empty.
            moved |= u64::from(result == EBUSY) << at;
            stranded |= moved & 1 << at;
            at += 1;
        }
    }
    Outcomes { moved, stranded }
}

/// Moves places of the staging area on to the same places of the holding area. Returns how many,
/// from the first on, and the result of the last MOVE. 0: the first is empty or in use.
unsafe fn move_on(
    page: &Page,
    staging: usize,
    places: Range<usize>,
    mode: u64,
    waits: &mut Waits,
) -> (usize, isize) {
    let hold = staging + STAGING_PAGES * PAGE;
    let (to, from) = (hold + places.start * PAGE, staging + places.start * PAGE);
    let len = (places.len() * PAGE) as u64;
    loop {
        let mut request = [to as u64, from as u64, len, mode, 0u64];
        // SAFETY: both areas are the shim's own; nothing refers to them.
        let result = unsafe { call3(nr::IOCTL, 1, UFFD_MOVE, request.as_mut_ptr() as usize) };
        // SAFETY: `request` is that of this call.
        let done = unsafe { pages_moved(result, &request) };
        match result {
            // The program is locking its mappings one by one, and has locked one of the two.
            EINVAL if done == 0 && waits.unlocks < UNLOCKS_MAX => {
                waits.unlocks += 1;
                // SAFETY: the shim's own mapping.
                unsafe { unlock(staging) };
            }
            // A program reads all its memory, and this page at this moment.
            EBUSY if done == 0 && waits.yields < YIELDS_MAX => {
                waits.yields += 1;
                page.pause(true);
            }
            _ => return (done, result),
        }
    }
}

/// How often one command has polled for its pages.
#[derive(Default)]
struct Waits {
    unlocks: u32,
    yields: u32,
}

/// Most polls of one command for pages that are in use. More would not help: the thread that reads
/// a page may wait for another page of the same command.
const YIELDS_MAX: u32 = 20;

/// Leaves out places of the source where nothing is.
const MOVE_ALLOW_SRC_HOLES: u64 = 2;

/// Empties these places of both areas. Bit i = place i of the staging area is in use.
unsafe fn make_room(page: &Page, staging: usize, places: u64) -> u64 {
    // SAFETY: the holding area is the shim's own; the pages there are stored.
    let emptied = unsafe { empty_held(staging, places) };
    // Refused if the program has locked all its memory.
    if emptied == EINVAL {
        // SAFETY: the areas are the shim's own.
        unsafe { unlock(staging) };
        // SAFETY: as above.
        unsafe { empty_held(staging, places) };
    }
    let halves = halves_of(places);
    if page.strays.fetch_and(!halves, Relaxed) & halves == 0 {
        return 0;
    }
    // SAFETY: the areas are the shim's own.
    unsafe { clear_strays(page, staging, places) }
}

/// Drops the pages at these places of the holding area. Returns the kernel's answer.
///
/// # Safety
/// The areas are the shim's own, and nothing refers to those pages.
unsafe fn empty_held(staging: usize, places: u64) -> isize {
    let range = range_of(places);
    let start = staging + (STAGING_PAGES + range.start) * PAGE;
    // SAFETY: the caller's promise.
    unsafe { call3(nr::MADVISE, start, range.len() * PAGE, advice::DONTNEED) }
}

/// Empties these places of the staging area: the pages there are zeros mapped for a reader, or are
/// stored already. The holding area is empty there. Returns the places in use, for the next command
/// to clear.
#[cold]
unsafe fn clear_strays(page: &Page, staging: usize, places: u64) -> u64 {
    let mut taken = 0u64;
    let mut waits = Waits::default();
    let mut rest = range_of(places);
    while !rest.is_empty() {
        let to_move = rest.clone();
        // SAFETY: both areas are the shim's own; nothing refers to them.
        let moved = unsafe { move_on(page, staging, to_move, MOVE_ALLOW_SRC_HOLES, &mut waits) };
        // SAFETY: as above.
        unsafe { empty_held(staging, places) };
        let (done, _) = moved;
        if done == 0 {
            taken |= 1 << rest.start;
        }
        rest.start += done.max(1);
    }
    if taken != 0 {
        page.strays.fetch_or(halves_of(places), Relaxed);
    }
    taken
}

/// How often the shim's own memory is unlocked in one command.
const UNLOCKS_MAX: u32 = 64;

/// Unlocks the shim's own memory, after the program locked it with its own: by mlockall, or by
/// mlock of every mapping.
unsafe fn unlock(staging: usize) {
    // SAFETY: the shim's own mapping; the contents stay.
    unsafe { call3(nr::MUNLOCK, staging, 2 * STAGING_PAGES * PAGE, 0) };
}

const PROT_READ_WRITE: usize = 3;
const PROT_EXEC: usize = 4;

/// Makes both areas executable, or not. False if the kernel refuses: programs may be denied memory
/// that is writable and executable.
#[cold]
unsafe fn protect(staging: usize, executable: bool) -> bool {
    let access = PROT_READ_WRITE | if executable { PROT_EXEC } else { 0 };
    // SAFETY: the shim's own mappings; the contents stay.
    unsafe { call3(nr::MPROTECT, staging, 2 * STAGING_PAGES * PAGE, access) == 0 }
}

/// Number of the request: see ioctl_userfaultfd(2).
const UFFD_ZEROPAGE: usize = 0xC020_AA04;

/// Maps zeros at those of `places` of the holding area where a command left no page. Faults there
/// are not served. A thread that touches every mapping (mlockall, a garbage collector) must find a
/// page, and is woken.
pub(crate) unsafe fn fill_holding(uffd: usize, page: &Page, places: u64, staging: usize) {
    let hold = staging + STAGING_PAGES * PAGE;
    let empty = places & (!page.moved.load(Relaxed) | page.stranded.load(Relaxed));
    let mut at = 0;
    while let Some((first, end)) = next_run(empty, at, STAGING_PAGES) {
        // SAFETY: the caller's promise.
        unsafe { fill(uffd, hold + first * PAGE, end - first) };
        at = end;
    }
}

/// Maps zeros at `count` pages from `start`, up to the first one that is there.
unsafe fn fill(uffd: usize, start: usize, count: usize) {
    let mut request = [start as u64, (count * PAGE) as u64, 0, 0u64];
    // SAFETY: the shim's own memory, registered with `uffd`; `request` is live.
    unsafe {
        call3(
            nr::IOCTL,
            uffd,
            UFFD_ZEROPAGE,
            request.as_mut_ptr() as usize,
        )
    };
}

/// The outcome of moving some pages of a command.
struct Moved {
    /// How many have moved, from the first on.
    done: usize,
    /// The result of the last MOVE: 0, or why it did not move its run.
    result: isize,
    /// Pages of the last run.
    tried: usize,
    /// Nothing of the last run moved; `result` says why.
    stuck: bool,
}

/// Moves the pages of places `at..last` into the staging area, a run of neighbours at a time, until
/// one does not move whole. Place `at` has a page. From place `alone` on, a run is one page.
unsafe fn move_runs(
    page: &CommandPage,
    staging: usize,
    at: usize,
    last: usize,
    alone: usize,
) -> Moved {
    let (mut next, mut result, mut tried, mut stuck) = (at, 0, 0, false);
    for _ in 0..MOVES_MAX {
        let start = if next < last {
            page.pages[next].load(Relaxed)
        } else {
            0
        };
        if start == 0 || result != 0 {
            break;
        }
        tried = 1;
        while next + tried < last
            && next < alone
            && page.pages[next + tried].load(Relaxed) == start + (tried * PAGE) as u64
        {
            tried += 1;
        }
        let to = (staging + next * PAGE) as u64;
        let mut request = [to, start, (tried * PAGE) as u64, 0, 0u64];
        // SAFETY: the pages are the program's own, moved as the manager commands.
        result = unsafe { call3(nr::IOCTL, 0, UFFD_MOVE, request.as_mut_ptr() as usize) };
        // SAFETY: the kernel has written the request.
        let done = unsafe { pages_moved(result, &request) };
        stuck = done == 0;
        next += done;
    }
    Moved {
        done: next - at,
        result,
        tried,
        stuck,
    }
}

/// How many pages a MOVE has moved, from the first on. `request` is its `uffdio_move`, `result` the
/// call's result. Its target was empty.
///
/// Linux 6.18 forgets pages that it moved just after it had to look at one again. (A page that
/// another processor uses meanwhile is enough.) It then finds them at the target and says EEXIST.
/// So EEXIST as the first result means that one page has moved.
unsafe fn pages_moved(result: isize, request: &[u64; 5]) -> usize {
    // SAFETY: `request` is live; the kernel has written to it.
    let said = unsafe { core::ptr::read_volatile(&request[4]) } as i64;
    match (result, said.max(0) as usize / PAGE) {
        (0, _) => request[2] as usize / PAGE,
        (EEXIST, 0) => 1,
        (_, done) => done,
    }
}

/// The lowest `count` bits, at most [`MOVE_PAGES_MAX`] or all of a staging area.
fn low_bits(count: usize) -> u64 {
    1u64.checked_shl(count as u32).unwrap_or(0).wrapping_sub(1)
}
