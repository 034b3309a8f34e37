//! Finds the mappings that can be managed, and registers them. Before pressure: none. Then: every
//! private anonymous mapping but stacks, thread control blocks, locked memory and the shim's own.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Engine};
use undercroft_sys::maps::{Mapping, Maps};
use undercroft_sys::pagemap::Category;
use undercroft_sys::process::robust_list_head;
use undercroft_sys::procfs::{self, Vma};
use undercroft_sys::uffd::{RegisterMode, UffdError};

use crate::books::Books;
use crate::books::ledger::MemfdLedger;
use crate::legacy::Flag;
use crate::signals::Signals;
use crate::space::agent::Agent;
use crate::space::layout::apply_events;
use crate::space::parts::{CHUNKS, next_parts, pause};
use crate::space::process::{EXCLUDE_MAX, Process};
use crate::space::shared::Shared;
use crate::sync::lock;

/// Pages whose presence is read under one hold of the layout lock. Bounds how long a fault waits
/// for the lock.
const SCAN_PAGES: u64 = 4096;

/// Pages that are counted under one hold of the engine: some 0.1 ms, or 1 ms beside fork relatives.
const COUNT_PAGES: u64 = 512;

/// Locked memory of a process, in KiB, above which the locked mappings are looked up, which takes a
/// few ms a GiB. The kernel refuses to move locked pages anyway. Each thread has a few: its control
/// block.
const LOCKED_MIN: u64 = 4096;

/// Mappings that are looked up under one hold of the layout lock, some 2 us each.
const MAPPINGS_A_HOLD: usize = 64;

/// Times that a mapping may change during its registration before it is left to the next check.
const REGISTER_TRIES_MAX: usize = 8;

/// Longest wait for a process's events to be read. After it, its pages are counted later.
const EVENT_WAIT_MAX: Duration = Duration::from_millis(50);

/// Pause while a fault thread reads a pending event.
const EVENT_PAUSE: Duration = Duration::from_micros(20);

const _: () = assert!(EVENT_PAUSE.as_nanos() < EVENT_WAIT_MAX.as_nanos());

/// Bytes around a thread's robust-list head that belong to its control block (glibc: the head is
/// 0x2e0 into `struct pthread`, of about 0x900 bytes). The kernel writes there when the thread
/// ends, past userfaultfd.
const CONTROL_BLOCK: (u64, u64) = (0x300, 0x700);

/// New mappings of a process, registered. Their pages are still to be counted
/// ([`Enrolled::count`]).
#[must_use]
pub(crate) struct Enrolled {
    process: Arc<Process>,
    fresh: Vec<VirtRange>,
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        self.process.counting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Enrolled {
    /// Counts the pages. Returns whose they are.
    pub(crate) fn count(self, shared: &Shared) -> SpaceId {
        let process = &self.process;
        let (Some(pid), Some(agent)) = (process.pid(), process.agent.get()) else {
            return process.space;
        };
        for range in &self.fresh {
            count_present(shared, process, agent, *range);
        }
        count_moved(shared, process, agent);
        lock_threads(&shared.books, &shared.signals, process, pid);
        process.space
    }
}

/// Registers the new mappings of a process and counts their pages.
pub(crate) fn manage(shared: &Shared, process: &Arc<Process>, text: &mut String) {
    if let Some(enrolled) = enroll(shared, process, text) {
        enrolled.count(shared);
    }
}

/// Registers the new mappings of a process. Reads `/proc/PID/maps` once. `None` if that cannot be
/// read.
pub(crate) fn enroll(
    shared: &Shared,
    process: &Arc<Process>,
    text: &mut String,
) -> Option<Enrolled> {
    // Without an agent, it is a fork child that has not announced itself.
    let (pid, agent) = process.pid().zip(process.agent.get())?;
    procfs::read_maps(pid, text).ok()?;
    let beacon = VirtRange::one(process.beacon);
    let begins = !process.managed.swap(true, Ordering::AcqRel);
    if begins {
        let _ = process.memory.register(beacon, RegisterMode::MISSING);
        process.row.set(Flag::Managed);
    }
    let mut locked = Vec::new();
    if procfs::status_number(pid, "VmLck").unwrap_or(0) > LOCKED_MIN {
        let _ = procfs::mappings_with_flags(pid, &mut [("lo", &mut locked)]);
    }
    process.counting.fetch_add(1, Ordering::SeqCst);
    let mut enrolled = Enrolled {
        process: process.clone(),
        fresh: Vec::new(),
    };
    let may = |vma: &Vma<'_>| {
        let is_locked = !vma.range.overlapping(&locked).is_empty();
        vma.is_private_anonymous() && !is_locked && !is_ours(process, agent, vma.range)
    };
    let (ours, others): (Vec<_>, Vec<_>) = text.lines().filter_map(Vma::parse).partition(may);
    shared
        .gauges
        .note_mappings(pid, (ours.len() + others.len()) as u64);
    *lock(&process.fences) = others.iter().map(|vma| vma.range).collect();
    let new = unknown(&shared.books, process, ours);
    let new: Vec<VirtRange> = if begins {
        spans(process, &new)
    } else {
        new.iter().map(|vma| vma.range).collect()
    };
    for range in new {
        let fresh = register(shared, process, agent, range, true);
        enrolled.fresh.extend(fresh);
    }
    if process.recount.swap(false, Ordering::AcqRel) {
        enrolled.fresh = shared.books.regions(process.space);
    }
    Some(enrolled)
}

/// Between each two mappings that cannot be managed: from the first to the last of those in `of`.
/// Where most memory is mapped comes first, because there the program can grow fastest.
fn spans(process: &Process, of: &[Vma<'_>]) -> Vec<VirtRange> {
    let mut spans: Vec<(VirtRange, VirtRange, u64)> = Vec::new();
    for vma in of {
        let wide = process.between_fences(vma.range).unwrap_or(vma.range);
        let pages = vma.range.count().0;
        match spans.last_mut() {
            Some((within, span, sum)) if *within == wide => {
                *span = VirtRange::new(span.start, vma.range.end);
                *sum += pages;
            }
            _ => spans.push((wide, vma.range, pages)),
        }
    }
    spans.sort_by_key(|(_, _, pages)| std::cmp::Reverse(*pages));
    spans.into_iter().map(|(_, span, _)| span).collect()
}

/// The mappings that the books do not have. The books may have a mapping that an unread event will
/// remove; it is tried again when the event has been applied.
fn unknown<'a>(books: &Books, process: &Process, mut of: Vec<Vma<'a>>) -> Vec<Vma<'a>> {
    let regions = books.regions(process.space);
    of.retain(|vma| {
        !vma.range
            .minus(&regions[vma.range.overlapping(&regions)])
            .is_empty()
    });
    of
}

/// [`manage_new`] for each of several ranges. Also counts what was moved while pages were counted.
pub(crate) fn manage_again(shared: &Shared, process: &Process, ranges: &[VirtRange]) {
    for range in ranges {
        manage_new(shared, process, *range);
    }
    if let Some(agent) = process.agent.get() {
        process.counting.fetch_add(1, Ordering::SeqCst);
        count_moved(shared, process, agent);
        process.counting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Registers `wide`, of [`Process::between_fences`], in one call and without a lock of ours, before
/// [`manage_new`] comes to a new mapping in it. The program is about to touch the mapping, and the
/// layout lock may be held by a thread that has no CPU.
///
/// - No end of the registration is inside a mapping, whatever the program does meanwhile.
/// - The program may replace the mapping before [`manage_new`] comes, which therefore registers it
///   with the lock held. If it is registered already, that changes nothing.
/// - Pages that are touched in between are counted by their faults.
///
/// Cost: the kernel visits each mapping in the range.
pub(crate) fn register_early(process: &Process, wide: VirtRange) {
    let _ = process.memory.register(wide, RegisterMode::MISSING_WP);
}

/// True if the books have all of `range`, and no event says otherwise. False also if another thread
/// is at the books.
pub(crate) fn is_surely_known(books: &Books, process: &Process, range: VirtRange) -> bool {
    let known = (books.try_engine()).is_some_and(|engine| has_region(&engine, process, range));
    known && !process.event_pending()
}

/// Registers the mappings at `range` and counts their pages.
pub(crate) fn manage_new(shared: &Shared, process: &Process, range: VirtRange) {
    let Some(agent) = process.agent.get() else {
        return;
    };
    process.counting.fetch_add(1, Ordering::SeqCst);
    for fresh in register(shared, process, agent, range, true) {
        count_present(shared, process, agent, fresh);
    }
    count_moved(shared, process, agent);
    process.counting.fetch_sub(1, Ordering::SeqCst);
}

/// Registers the mappings that overlap `hint`. Returns the ranges that the books did not have;
/// their present pages are still to be counted.
///
/// Each mapping is registered whole, and as it is now. The kernel splits mappings at the ends of a
/// registration, and pieces that have pages of their own never merge again. An mremap over them
/// would then fail, which it would not do without us.
///
/// * `wide`: registers all between the nearest mappings that cannot be managed, in one call. Then
///   no end of the registration is inside a mapping, whatever the program does meanwhile. Each call
///   more may wait for long: at its end the kernel gives the lock of the address space to threads
///   of the program that wait for it, and they may have no CPU. The kernel visits each mapping in
///   the range.
pub(crate) fn register(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    hint: VirtRange,
    wide: bool,
) -> Vec<VirtRange> {
    let mut fresh = Vec::new();
    let Ok(maps) = process.maps() else {
        return fresh;
    };
    let (mut at, mut since) = (hint.start, Instant::now());
    while at < hint.end {
        // Held for one mapping at a time: faults wait for it.
        let layout = process.layout.write();
        let held = shared.gauges.layout_holds.hold();
        let mapping = match maps.at_or_above(at) {
            Ok(Some(mapping)) if mapping.range.start < hint.end => mapping,
            _ => break,
        };
        at = mapping.range.end;
        if !mapping.private_anonymous || is_ours(process, agent, mapping.range) {
            continue;
        }
        // While an event is unread, the books may have a mapping that is gone.
        if is_known(&shared.books, process, mapping.range) && !process.event_pending() {
            continue;
        }
        let wide = wide
            .then(|| process.between_fences(mapping.range))
            .flatten();
        let all = VirtRange::new(mapping.range.start, hint.end);
        let found = wide.and_then(|wide| register_wide(shared, process, agent, maps, wide, all));
        let (end, ranges) = found.unwrap_or_else(|| {
            let ranges = register_whole(shared, process, agent, maps, mapping.range);
            (mapping.range.end, Some(ranges))
        });
        at = end;
        if let Some(ranges) = &ranges
            && attach(&shared.books, process, ranges, &mut fresh)
        {
            since = Instant::now();
            continue;
        }
        drop(held);
        drop(layout);
        if awaits_events(process, since) {
            at = mapping.range.start;
        } else {
            let all = VirtRange::new(mapping.range.start, end);
            process.recheck.add(all);
        }
    }
    fresh
}

/// Registers `wide`, of [`Process::between_fences`], in one call. Returns the mappings of `all`
/// that are registered then ([`registered`]), up to an end: as many as one hold of the layout lock
/// may take. `None` if the kernel refuses.
fn register_wide(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    maps: &Maps,
    wide: VirtRange,
    all: VirtRange,
) -> Option<(VirtPage, Option<Vec<VirtRange>>)> {
    let may = |now: &Mapping| {
        let whole = now.range.intersect(wide) == now.range;
        now.private_anonymous && whole && !is_ours(process, agent, now.range)
    };
    let before = some_mappings(maps, all, may);
    let end = before.last()?.end;
    let done = (process.memory).register(wide, RegisterMode::MISSING_WP);
    done.ok()?;
    let as_now = |old: &VirtRange| {
        let now = maps.at_or_above(old.start).ok().flatten()?;
        (now.range.contains(old.start) && may(&now)).then_some(now.range)
    };
    let now = before.iter().filter_map(as_now).collect();
    Some((end, registered(shared, process, agent, maps, now)))
}

/// The mappings of `now`, after a registration of all of them. `None` while an event is unread.
///
/// A mapping made after the registration is not registered. If it were in the books, its pages
/// would leave, and read as zeros. So the kernel is asked about each mapping that the books do not
/// have, and one that is not registered is registered by itself. The answer is of a mapping that
/// was there when `now` was read: if it had been replaced meanwhile, an event would be unread.
fn registered(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    maps: &Maps,
    now: Vec<VirtRange>,
) -> Option<Vec<VirtRange>> {
    let mut ranges = Vec::new();
    for range in now {
        if is_known(&shared.books, process, range) {
            ranges.push(range);
            continue;
        }
        // Nothing of it is protected: it is new.
        match process.memory.protect(VirtRange::one(range.start), false) {
            Ok(()) => ranges.push(range),
            Err(UffdError::LayoutChanging { .. }) => return None,
            Err(_) => ranges.extend(register_whole(shared, process, agent, maps, range)),
        }
    }
    Some(ranges)
}

/// Lets a fault thread read the process's events. The caller holds no layout lock, and has waited
/// since `since`. False if they may stay unread for long: its agent does not run, or it has ended.
fn awaits_events(process: &Process, since: Instant) -> bool {
    let stuck = process.unread.load(Ordering::Relaxed);
    if stuck || since.elapsed() > EVENT_WAIT_MAX || !process.is_alive() {
        return false;
    }
    std::thread::sleep(EVENT_PAUSE);
    true
}

/// The mappings from `range.start` on that begin in `range`, up to the first that `may` refuses.
/// [`MAPPINGS_A_HOLD`] at most.
fn some_mappings(
    maps: &Maps,
    mut range: VirtRange,
    may: impl Fn(&Mapping) -> bool,
) -> Vec<VirtRange> {
    let mut found = Vec::new();
    while found.len() < MAPPINGS_A_HOLD
        && let Ok(Some(now)) = maps.at_or_above(range.start)
        && now.range.start < range.end
        && may(&now)
    {
        found.push(now.range);
        range = VirtRange::new(now.range.end.min(range.end), range.end);
    }
    found
}

/// Adds registered ranges to the books, and appends the parts that they did not have to `fresh`.
///
/// False, and nothing is done, while an event is unread: a range may be the new place of a mapping
/// that the books still have at its old one. The move would then seem to go to a place in use, and
/// to wait for an event that never comes ([`crate::space::order`]).
fn attach(
    books: &Books,
    process: &Process,
    ranges: &[VirtRange],
    fresh: &mut Vec<VirtRange>,
) -> bool {
    if process.event_pending() {
        return false;
    }
    let mut engine = books.engine_for_many();
    for range in ranges {
        let regions = engine.books().regions(process.space);
        let holes = &regions[range.overlapping(regions)];
        fresh.extend(range.minus(holes));
        engine.layout().attached(process.space, *range);
    }
    true
}

/// True for the shim's memory, which is a mapping of its own.
fn is_ours(process: &Process, agent: &Agent, range: VirtRange) -> bool {
    range.contains(process.beacon) || !range.intersect(agent.private).is_empty()
}

/// True if the books have all of `range`.
fn is_known(books: &Books, process: &Process, range: VirtRange) -> bool {
    has_region(&books.engine(), process, range)
}

fn has_region(engine: &Engine<MemfdLedger>, process: &Process, range: VirtRange) -> bool {
    let regions = engine.books().regions(process.space);
    range.minus(&regions[range.overlapping(regions)]).is_empty()
}

/// Registers a mapping, or what it has become meanwhile. Returns the ranges registered.
///
/// The program may replace the mapping before it is registered. The new one is then split at the
/// ends of the old one. So both ends are read again, and the rest is registered at once: pieces
/// without pages of their own merge again.
fn register_whole(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    maps: &Maps,
    range: VirtRange,
) -> Vec<VirtRange> {
    let mut done: Vec<VirtRange> = Vec::new();
    let mut next = vec![range];
    for _ in 0..REGISTER_TRIES_MAX {
        let Some(range) = next.pop() else { break };
        // A refusal: the mapping is gone, or of a kind that cannot be registered. Nothing is
        // write-protected yet (see `crate::space::cow`).
        if process
            .memory
            .register(range, RegisterMode::MISSING_WP)
            .is_err()
        {
            continue;
        }
        let below = VirtPage(range.start.0.saturating_sub(1));
        for page in [below, range.start, range.end] {
            let Ok(Some(now)) = maps.at_or_above(page) else {
                continue;
            };
            let inside = !now.range.intersect(range).is_empty();
            let beside = now.range.contains(page) && !is_known(&shared.books, process, now.range);
            let may = now.private_anonymous && !is_ours(process, agent, now.range);
            if !may || done.contains(&now.range) {
                continue;
            }
            if now.range == range {
                done.push(range);
            } else if inside || beside {
                next.push(now.range);
            }
        }
    }
    done
}

/// Counts pages that the program moved while pages were counted. Pages that it moves once more
/// meanwhile are left to the next check.
fn count_moved(shared: &Shared, process: &Process, agent: &Agent) {
    for range in process.uncounted.take() {
        count_present(shared, process, agent, range);
    }
}

/// Counts the resident pages of a newly registered range. Pages that cannot be counted now are
/// counted later ([`Process::recount`]).
pub(crate) fn count_present(shared: &Shared, process: &Process, agent: &Agent, range: VirtRange) {
    let Ok(pagemap) = process.pagemap() else {
        return;
    };
    let mut present = Vec::new();
    let relatives = shared.processes.relatives(process);
    let mut words = if relatives.is_empty() {
        Vec::new()
    } else {
        vec![0u8; SCAN_PAGES as usize * 8]
    };
    let mut shares = Vec::new();
    let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
    let mut start = range.start;
    let mut since = Instant::now();
    // Pages come only through us from now on, so a place that was empty is not read again.
    while let Ok(next) = pagemap.first(VirtRange::new(start, range.end), any) {
        let Some(next) = next else {
            // Pages that are not found may be moving. Their new place is noted while pages are
            // counted.
            let layout = process.layout.read();
            if process.books_are_current() {
                break;
            }
            drop(layout);
            if awaits_events(process, since) {
                continue;
            }
            process.recount.store(true, Ordering::Release);
            break;
        };
        start = next;
        let part = VirtRange::new(start, start.plus(SCAN_PAGES).min(range.end));
        present.clear();
        // With the lock held, no page of the part is installed and no event acknowledged. A mapping
        // whose move is still unread would be found at its new place, while the books have it at
        // the old one.
        let layout = process.layout.write();
        let held = shared.gauges.layout_holds.hold();
        let scanned = pagemap.scan(part, any, &mut present).is_ok();
        shares.clear();
        if !relatives.is_empty()
            && let Ok(entries) = pagemap.entries(start, &mut words[..part.count().0 as usize * 8])
        {
            shares.extend(entries.map(|entry| entry.present() && !entry.exclusive()));
        }
        if process.event_pending() || !apply_events_without_agent(shared, process, agent) {
            drop(held);
            drop(layout);
            if awaits_events(process, since) {
                continue;
            }
            process.recount.store(true, Ordering::Release);
            break;
        }
        if scanned {
            let now = Instant::now();
            let stays = |found: &(VirtRange, _)| process.dropping.without(found.0, now);
            let counted: Vec<VirtRange> = present.iter().flat_map(stays).collect();
            add_present(&shared.books, process, &relatives, start, &counted, &shares);
        }
        start = part.end;
        since = Instant::now();
    }
    shared.signals.kick_evictor();
}

/// Counts the pages that were found `present`.
/// * `shares`: for each page from `start` on, whether it shares its frame.
fn add_present(
    books: &Books,
    process: &Process,
    relatives: &[SpaceId],
    start: VirtPage,
    present: &[VirtRange],
    shares: &[bool],
) {
    let mut engine = books.engine_for_many();
    let mut held_pages = 0;
    for found in present.iter().flat_map(|found| pieces(*found)) {
        held_pages += found.count().0;
        if held_pages > COUNT_PAGES {
            drop(engine);
            pause();
            engine = books.engine_for_many();
            held_pages = found.count().0;
        }
        if shares.is_empty() {
            (engine.discovery()).found_resident(process.space, found);
            continue;
        }
        for page in found.pages() {
            let shares = shares.get((page.0 - start.0) as usize) == Some(&true);
            let mut discovery = engine.discovery();
            if !shares || !discovery.found_shared(process.space, page, relatives) {
                let one = VirtRange::one(page);
                discovery.found_resident(process.space, one);
            }
        }
    }
}

/// `range` in parts of no more pages than are counted under one hold of the engine.
fn pieces(range: VirtRange) -> impl Iterator<Item = VirtRange> {
    let starts = (range.start.0..range.end.0).step_by(COUNT_PAGES as usize);
    starts.map(move |start| {
        let start = VirtPage(start);
        VirtRange::new(start, start.plus(COUNT_PAGES).min(range.end))
    })
}

/// As [`apply_events`], with the agent excluded meanwhile. False if the agent does not let go in
/// time, or if an event has to wait.
pub(crate) fn apply_events_without_agent(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
) -> bool {
    if lock(&process.order).asks() {
        let began = Instant::now();
        let patient = || began.elapsed() < EXCLUDE_MAX;
        if !(agent.commands).exclude_agent(|| !agent.has_ended(), patient) {
            return false;
        }
        apply_events(shared, process);
        agent.commands.admit_agent();
    }
    process.has_applied_all()
}

/// Excludes the control blocks of new threads from eviction.
pub(crate) fn lock_threads(books: &Books, signals: &Signals, process: &Process, pid: u32) {
    let Ok(threads) = procfs::thread_ids(pid) else {
        return;
    };
    let mut seen = lock(&process.threads_seen);
    let mut excluded = HashSet::with_capacity(threads.len());
    for tid in &threads {
        if seen.contains(tid) {
            excluded.insert(*tid);
            continue;
        }
        let Some(head) = robust_list_head(*tid) else {
            continue; // not set up yet (or not glibc): tried again at the next check
        };
        let first = VirtPage::of(head.saturating_sub(CONTROL_BLOCK.0));
        let last = VirtPage::of(head + CONTROL_BLOCK.1);
        let block = VirtRange::new(first, last.plus(1));
        let absent = {
            let mut engine = books.engine();
            engine.layout().lock(process.space, block, true)
        };
        if absent.0 == 0 {
            excluded.insert(*tid);
            continue;
        }
        // The thread is tried again at the next check.
        signals.bring_in(process.space, block.pages());
    }
    *seen = excluded; // without threads that have ended
}

/// Counts inherited pages whose frames the process has alone by now. False if it has no inherited
/// pages.
pub(crate) fn note_own_frames(
    books: &Books,
    signals: &Signals,
    process: &Process,
    buffer: &mut [u8],
) -> bool {
    let Ok(pagemap) = process.pagemap() else {
        return false;
    };
    let (mut left, mut ranges) = (EVERYTHING, Vec::new());
    while !left.is_empty() {
        let engine = books.engine_for_many();
        for part in next_parts(&engine, process.space, &mut left, CHUNKS) {
            ranges.extend(engine.books().inherited(process.space, part));
        }
    }
    let any = !ranges.is_empty();
    let mut found = false;
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let count = (range.end.0 - start.0)
                .min(buffer.len() as u64 / 8)
                .min(COUNT_PAGES);
            let _layout = process.layout.read();
            let Ok(entries) = pagemap.entries(start, &mut buffer[..count as usize * 8]) else {
                return any;
            };
            let mut engine = books.engine_for_many();
            for (at, entry) in entries.enumerate() {
                if entry.present() && entry.exclusive() {
                    let page = start.plus(at as u64);
                    engine.forks().own_frame(process.space, page);
                    found = true;
                }
            }
            start = start.plus(count);
        }
    }
    if found {
        signals.kick_evictor();
    }
    any
}

#[cfg(test)]
mod tests {
    use undercroft_base::VirtPage;

    use super::*;
    use crate::legacy::Row;
    use crate::space::model::ModelMemory;

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    /// Each call of the kernel may wait for threads of the program that have no CPU, and the others
    /// grow meanwhile.
    #[test]
    fn all_between_two_fences_is_registered_at_once_and_the_largest_first() {
        let memory = Arc::new(ModelMemory::new(pages(0, 1)));
        let process = Process::new(SpaceId(1), memory, VirtPage(1), None, None, Row::default());
        *lock(&process.fences) = vec![pages(0x100, 0x110), pages(0x300, 0x400)];
        let lines = [
            "20000-21000 rw-p 00000000 00:00 0",
            "110000-120000 rw-p 00000000 00:00 0",
            "120000-160000 ---p 00000000 00:00 0",
            "180000-190000 rw-p 00000000 00:00 0",
            "400000-420000 rw-p 00000000 00:00 0",
        ];
        let of: Vec<Vma<'_>> = lines.iter().filter_map(|line| Vma::parse(line)).collect();
        assert_eq!(of.len(), lines.len());
        let in_turn = [pages(0x110, 0x190), pages(0x400, 0x420), pages(0x20, 0x21)];
        assert_eq!(spans(&process, &of), in_turn);
    }
}
