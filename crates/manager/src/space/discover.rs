//! Finds the mappings that can be managed, and registers them. Before pressure: none. Then: every
//! private anonymous mapping but stacks, thread control blocks, locked memory and the shim's own.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Engine};
use undercroft_proto::legacy::Flag;
use undercroft_sys::maps::{Mapping, Maps};
use undercroft_sys::pagemap::Category;
use undercroft_sys::procfs::{self, Vma};
use undercroft_sys::uffd::{RegisterMode, UffdError};

use crate::books::Books;
use crate::books::ledger::MemfdLedger;
use crate::signals::Signals;
use crate::space::agent::Agent;
use crate::space::layout::apply_events;
use crate::space::parts::{CHUNKS, next_parts, pause};
use crate::space::process::{EXCLUDE_MAX, Process, control_block};
use crate::space::shared::Shared;
use crate::space::still;
use crate::sync::lock;

/// Pages whose presence is read under one hold of the layout lock. Bounds how long a fault waits
/// for the lock.
const SCAN_PAGES: u64 = 4096;

/// Pages that are counted under one hold of the engine: some 0.1 ms, or 1 ms beside fork relatives.
const COUNT_PAGES: u64 = 512;

/// Locked memory of a process, in KiB, above which the locked mappings are looked up, which takes a
/// few ms a GiB. The kernel refuses to move locked pages anyway.
const LOCKED_MIN: u64 = 4096;

/// Locked memory of each thread, in KiB: its control block may be in two pages.
const LOCKED_OF_THREAD: u64 = 8;

/// Mappings that are looked up under one hold of the layout lock, some 2 us each.
const MAPPINGS_A_HOLD: usize = 64;

/// Times that a mapping may change during its registration before it is left to the next check.
const REGISTER_TRIES_MAX: usize = 8;

/// Longest wait for a process's events to be read. After it, its pages are counted later.
const EVENT_WAIT_MAX: Duration = Duration::from_millis(50);

/// Pause while a fault thread reads a pending event.
const EVENT_PAUSE: Duration = Duration::from_micros(20);

const _: () = assert!(EVENT_PAUSE.as_nanos() < EVENT_WAIT_MAX.as_nanos());

/// Threads that wait for the start of another to be looked at again. Checks find the others.
const STARTED_MAX: usize = 8;

/// New mappings of a process, registered. Their pages are still to be counted
/// ([`Enrolled::count`]).
#[must_use]
pub(crate) struct Enrolled {
    process: Arc<Process>,
    fresh: Vec<VirtRange>,
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        self.process.backlog.counting.fetch_sub(1, Ordering::SeqCst);
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
    let beacon = VirtRange::one(process.relatives.beacon);
    let begins = !process.managed.swap(true, Ordering::AcqRel);
    if begins {
        let _ = process.memory.register(beacon, RegisterMode::MISSING);
        process.row.set(Flag::Managed);
    }
    process.backlog.counting.fetch_add(1, Ordering::SeqCst);
    let mut enrolled = Enrolled {
        process: process.clone(),
        fresh: Vec::new(),
    };
    let (ours, others, regions) = survey(shared, process, (pid, agent), text);
    (shared.gauges).note_mappings(pid, (ours.len() + others) as u64);
    let spans = process.ground.spans(&unknown(ours, &regions));
    // All that can grow is registered before the first page is counted.
    for span in &spans {
        register_ground(process, *span);
    }
    for span in spans {
        let fresh = register(shared, process, agent, span);
        enrolled.fresh.extend(fresh);
    }
    if process.backlog.recount.swap(false, Ordering::AcqRel) {
        enrolled.fresh = shared.books.regions(process.space);
    }
    Some(enrolled)
}

/// The mappings of `text` that can be managed, how many cannot, and what the books have. The ground
/// is as they are from now on.
fn survey<'a>(
    shared: &Shared,
    process: &Process,
    (pid, agent): (u32, &Agent),
    text: &'a str,
) -> (Vec<Vma<'a>>, usize, Vec<VirtRange>) {
    let mut locked = Vec::new();
    if locks_memory(pid) {
        let _ = procfs::mappings_with_flags(pid, &mut [("lo", &mut locked)]);
    }
    let may = |vma: &Vma<'_>| {
        let is_locked = !vma.range.overlapping(&locked).is_empty();
        vma.is_private_anonymous() && !is_locked && !is_ours(process, agent, vma.range)
    };
    let (ours, others): (Vec<_>, Vec<_>) = text.lines().filter_map(Vma::parse).partition(may);
    let regions = shared.books.regions(process.space);
    let fences = others.iter().map(|vma| vma.range);
    process.ground.surveyed(fences, &regions);
    (ours, others.len(), regions)
}

/// Notes which mappings of a process cannot be managed, before its first discovery by this manager.
/// Without these fences the kernel refuses what is registered early, because it spans them.
pub(crate) fn note_fences(shared: &Shared, process: &Process, text: &mut String) {
    if let Some(of) = process.pid().zip(process.agent.get())
        && procfs::read_maps(of.0, text).is_ok()
    {
        survey(shared, process, of, text);
    }
}

/// True if the program has locked more than its threads' control blocks ([`LOCKED_MIN`]).
fn locks_memory(pid: u32) -> bool {
    let number = |key| procfs::status_number(pid, key).unwrap_or(0);
    let locked = number("VmLck");
    locked > LOCKED_MIN && locked > LOCKED_MIN + LOCKED_OF_THREAD * number("Threads")
}

/// The mappings that the books do not have. The books may have a mapping that an unread event will
/// remove; it is tried again when the event has been applied.
/// * `regions`: those of the books.
fn unknown(of: Vec<Vma<'_>>, regions: &[VirtRange]) -> Vec<VirtRange> {
    let ranges = of.into_iter().map(|vma| vma.range);
    ranges
        .filter(|range| {
            let known = &regions[range.overlapping(regions)];
            !range.minus(known).is_empty()
        })
        .collect()
}

/// [`manage_new`] for each of several ranges. Also counts what was moved while pages were counted.
pub(crate) fn manage_again(shared: &Shared, process: &Process, ranges: &[VirtRange]) {
    for range in ranges {
        manage_new(shared, process, *range);
    }
    if let Some(agent) = process.agent.get() {
        process.backlog.counting.fetch_add(1, Ordering::SeqCst);
        count_moved(shared, process, agent);
        process.backlog.counting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Registers the ground of `range` ([`Ground::around`]) in one call and without a lock of ours.
/// True if the kernel did so.
///
/// The program is about to touch a new mapping there, and the layout lock may be held by a thread
/// that has no CPU. [`register`] comes to it later.
///
/// - No end of the registration is inside a mapping, whatever the program does meanwhile. Each call
///   more may wait for long: at its end the kernel gives the lock of the address space to threads
///   of the program that wait for it, and they may have no CPU.
/// - The program may replace the mapping before [`register`] comes, which therefore registers it
///   with the lock held. If it is registered already, that changes nothing.
/// - Pages that are touched in between are counted by their faults.
///
/// Cost: the kernel visits each mapping there. Those are new: the ground ends at the next one that
/// is registered.
///
/// [`Ground::around`]: crate::space::ground::Ground::around
pub(crate) fn register_ground(process: &Process, range: VirtRange) -> Option<VirtRange> {
    let ground = process.ground.around(range)?;
    let ground = with_whole_ends(process.maps().ok()?, process.ground.beyond(ground));
    let done = (process.memory).register(ground, RegisterMode::MISSING_WP);
    done.ok().map(|()| ground)
}

/// `ground`, and the rest of the mappings that its ends would cut: it is a hint, and they may have
/// come since.
fn with_whole_ends(maps: &Maps, ground: VirtRange) -> VirtRange {
    let at = |page| maps.at_or_above(page).ok().flatten().map(|now| now.range);
    let first = at(ground.start).filter(|now| now.start < ground.start);
    let last = at(ground.end).filter(|now| now.start < ground.end);
    VirtRange::new(
        first.map_or(ground.start, |now| now.start),
        last.map_or(ground.end, |now| now.end),
    )
}

/// Registers the mappings at `range` and counts their pages.
pub(crate) fn manage_new(shared: &Shared, process: &Process, range: VirtRange) {
    let Some(agent) = process.agent.get() else {
        return;
    };
    process.backlog.counting.fetch_add(1, Ordering::SeqCst);
    for fresh in register(shared, process, agent, range) {
        count_present(shared, process, agent, fresh);
    }
    count_moved(shared, process, agent);
    process.backlog.counting.fetch_sub(1, Ordering::SeqCst);
    still::look(shared, process, range); // its protection may have changed
}

/// Registers the mappings that overlap `hint`. Returns the ranges that the books did not have;
/// their present pages are still to be counted.
///
/// Each mapping is registered whole, and as it is now. The kernel splits mappings at the ends of a
/// registration, and pieces that have pages of their own never merge again. An mremap over them
/// would then fail, which it would not do without us.
pub(crate) fn register(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    hint: VirtRange,
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
        let all = VirtRange::new(mapping.range.start, hint.end);
        let found = register_some(shared, process, agent, maps, (mapping.range, all));
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
            process.backlog.recheck.add(all);
        }
    }
    fresh
}

/// Registers the ground of `first` in one call, but no more than what one hold of the layout lock
/// may take. Returns the mappings of `all` there that are registered then ([`registered`]), up to
/// an end. `None` if the kernel refuses.
///
/// [`register_ground`] may have done so already. The kernel does not say for certain that this
/// userfaultfd has registered a mapping, and not one of the program, so it is asked again.
fn register_some(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    maps: &Maps,
    (first, all): (VirtRange, VirtRange),
) -> Option<(VirtPage, Option<Vec<VirtRange>>)> {
    let around = process.ground.around(first)?;
    let may = |now: &Mapping| {
        let whole = now.range.intersect(around) == now.range;
        now.private_anonymous && whole && !is_ours(process, agent, now.range)
    };
    let found = some_mappings(maps, all, may);
    let end = found.last()?.end;
    let mut ground = process.ground.beyond(around);
    if found.len() == MAPPINGS_A_HOLD
        && let Ok(Some(next)) = maps.at_or_above(end)
    {
        ground.end = ground.end.min(next.range.start.max(end));
    }
    let ground = with_whole_ends(maps, ground);
    let done = (process.memory).register(ground, RegisterMode::MISSING_WP);
    done.ok()?;
    Some((end, registered(shared, process, agent, maps, found)))
}

/// The mappings that begin where those of `found` did, after a registration of all of them. `None`
/// while an event is unread.
///
/// A mapping made after the registration is not registered. If it were in the books, its pages
/// would leave, and read as zeros. So the kernel is asked about each mapping that the books do not
/// have, and one that is not registered is registered by itself. What the mapping is, is read after
/// the answer: if it had been replaced in between, an event would be unread.
fn registered(
    shared: &Shared,
    process: &Process,
    agent: &Agent,
    maps: &Maps,
    found: Vec<VirtRange>,
) -> Option<Vec<VirtRange>> {
    let mut ranges = Vec::new();
    for range in found {
        let new = new_part(&shared.books.engine(), process, range);
        let Some(new) = new else {
            ranges.push(range);
            continue;
        };
        // Nothing that the books do not have is protected.
        match process.memory.protect(VirtRange::one(new), false) {
            Ok(()) => {
                let now = maps.at_or_above(new).ok().flatten();
                let may = |now: &Mapping| {
                    let there = now.range.contains(new) && now.private_anonymous;
                    there && !is_ours(process, agent, now.range)
                };
                ranges.extend(now.filter(may).map(|now| now.range));
            }
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
    // The last mapping may end behind the range: it is found once.
    while found.len() < MAPPINGS_A_HOLD
        && !range.is_empty()
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
        process.ground.registered(*range);
    }
    true
}

/// True for the shim's memory, which is a mapping of its own, and for memory that is being given
/// up.
fn is_ours(process: &Process, agent: &Agent, range: VirtRange) -> bool {
    let shims =
        range.contains(process.relatives.beacon) || !range.intersect(agent.private).is_empty();
    shims || process.has_yielded(range)
}

/// True if the books have all of `range`.
fn is_known(books: &Books, process: &Process, range: VirtRange) -> bool {
    has_region(&books.engine(), process, range)
}

fn has_region(engine: &Engine<MemfdLedger>, process: &Process, range: VirtRange) -> bool {
    new_part(engine, process, range).is_none()
}

/// The first page of `range` that the books do not have.
fn new_part(engine: &Engine<MemfdLedger>, process: &Process, range: VirtRange) -> Option<VirtPage> {
    let regions = engine.books().regions(process.space);
    let new = range.minus(&regions[range.overlapping(regions)]);
    new.first().map(|part| part.start)
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
        let register = |range| (process.memory).register(range, RegisterMode::MISSING_WP);
        let wide = with_whole_ends(maps, process.ground.beyond(range));
        if register(wide).or_else(|_| register(range)).is_err() {
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
    for range in process.backlog.uncounted.take() {
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
    let mut found = false;
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
            process.backlog.recount.store(true, Ordering::Release);
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
            process.backlog.recount.store(true, Ordering::Release);
            break;
        }
        if scanned {
            let now = Instant::now();
            let stays = |found: &(VirtRange, _)| process.dropping.without(found.0, now);
            let counted: Vec<VirtRange> = present.iter().flat_map(stays).collect();
            add_present(&shared.books, process, &relatives, start, &counted, &shares);
            found |= !counted.is_empty();
        }
        start = part.end;
        since = Instant::now();
    }
    if found {
        shared.signals.kick_evictor();
    }
}

/// Counts the pages that were found `present`.
/// * `shares`: for each page from `start` on, whether it shares its frame.
pub(crate) fn add_present(
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

/// Excludes the control blocks of new threads from eviction. Cost: O(threads).
pub(crate) fn lock_threads(books: &Books, signals: &Signals, process: &Process, pid: u32) {
    let Ok(threads) = procfs::thread_ids(pid) else {
        return;
    };
    let threads: HashSet<u32> = threads.into_iter().collect();
    let new: Vec<u32> = {
        let mut seen = lock(&process.threads_seen);
        seen.retain(|tid| threads.contains(tid));
        threads.difference(&seen).copied().collect()
    };
    for tid in new {
        lock_thread(books, signals, process, tid);
    }
}

/// Thread `tid` was started. It has no control block yet, so it is excluded from eviction at the
/// next start of a thread, or at the next check.
pub(crate) fn thread_started(books: &Books, signals: &Signals, process: &Process, tid: u32) {
    lock(&process.threads_seen).remove(&tid); // of an older thread
    let mut started = lock(&process.threads_started);
    started.retain(|tid| !lock_thread(books, signals, process, *tid));
    if started.len() == STARTED_MAX {
        started.remove(0); // it may have ended
    }
    started.push(tid);
}

/// Excludes the control block of a thread from eviction. False if that is to be tried again.
fn lock_thread(books: &Books, signals: &Signals, process: &Process, tid: u32) -> bool {
    let Some(block) = control_block(tid) else {
        return false;
    };
    let absent = {
        let mut engine = books.engine();
        engine.layout().lock(process.space, block, true)
    };
    if absent.0 > 0 {
        signals.bring_in(process.space, block.pages());
        return false;
    }
    lock(&process.threads_seen).insert(tid);
    true
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
    use super::*;

    /// Each one that is found costs three system calls, and the layout lock is held meanwhile.
    #[test]
    fn a_mapping_that_ends_behind_the_range_is_found_once() {
        let memory = vec![1u8; 64 << 20]; // a mapping of its own
        let first = VirtPage::of(memory.as_ptr() as u64).plus(1);
        let maps = Maps::open(std::process::id()).expect("own mappings");
        for pages in [1, 5] {
            let range = VirtRange::new(first, first.plus(pages));
            let found = some_mappings(&maps, range, |_| true);
            assert!(
                matches!(found[..], [one] if one.contains(first)),
                "{found:?}"
            );
        }
    }
}
