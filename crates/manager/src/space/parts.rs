//! Changes of many pages of the books, made a few chunks at a time. The engine is unlocked in
//! between, so that no fault waits for long. The caller holds the layout lock of the space for
//! writing, or the space is gone: no page is installed in it meanwhile.
//!
//! A large range that the program drops is first only cut off from its space, chunk by chunk. The
//! control thread forgets it later, or the evictor does, before it evicts any page. The books of a
//! fork child or of a moved mapping are made at once, page by page, because both places need them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Effect, Engine, LedgerFull};
use undercroft_proto::legacy::Flag;
use undercroft_sys::uffd::UffdError;

use crate::books::ledger::MemfdLedger;
use crate::space::graves::Dead;
use crate::space::process::Process;
use crate::space::shared::Shared;

type Locked = Engine<MemfdLedger>;

/// Chunks whose pages are changed under one hold of the engine: 0.2 ms, and 1.6 ms in a
/// build without optimisation across crates.
pub(crate) const CHUNKS: usize = 4;

/// Chunks that are cut off whole under one hold.
const WHOLE_CHUNKS: usize = 1024;

/// A drop of at least this many chunks is cut off, and forgotten later.
const MANY: usize = 16;

// A small drop takes a few holds; cutting off a chunk is cheaper than changing its pages.
const _: () = assert!(CHUNKS <= MANY && CHUNKS < WHOLE_CHUNKS);

/// Pause between two holds of the engine. A thread that waits for the engine spins for some 20 us,
/// so it gets the lock meanwhile.
const PAUSE: Duration = Duration::from_micros(20);

/// Does `work` with the engine locked, and notes the time of the hold.
fn locked<T>(shared: &Shared, work: impl FnOnce(&mut Locked) -> T) -> T {
    work(&mut shared.books.engine_for_many())
}

/// Chunks for one hold. A trace has a fork as a whole: with a trace, all is done in one hold.
fn at_once(shared: &Shared, chunks: usize) -> usize {
    match &shared.books.record {
        Some(_) => usize::MAX,
        None => chunks,
    }
}

/// The next parts of `left` that the books know, `most` at most. `left` is what is behind them: it
/// is empty after the last one. Even the list of all parts of a space may take too long for one
/// hold of the engine.
pub(crate) fn next_parts(
    engine: &Locked,
    space: SpaceId,
    left: &mut VirtRange,
    most: usize,
) -> Vec<VirtRange> {
    let parts = engine.books().some_parts(space, *left, most);
    left.start = match parts.last() {
        Some(last) if parts.len() == most => last.end,
        _ => left.end,
    };
    parts
}

/// Does `work` for each part of `range` that the books know, then `last`, with the engine locked.
/// The engine is unlocked after every few parts.
fn in_parts(
    shared: &Shared,
    space: SpaceId,
    range: VirtRange,
    mut work: impl FnMut(&mut Locked, VirtRange),
    last: impl FnOnce(&mut Locked),
) {
    let at_once = at_once(shared, CHUNKS);
    let (mut left, mut last) = (range, Some(last));
    while last.is_some() {
        locked(shared, |engine| {
            for part in next_parts(engine, space, &mut left, at_once) {
                work(engine, part);
            }
            if left.is_empty()
                && let Some(last) = last.take()
            {
                last(engine);
            }
        });
        if last.is_some() {
            pause();
        }
    }
}

/// Leaves the engine to threads that wait for it. The caller has just unlocked it.
pub(crate) fn pause() {
    let since = Instant::now();
    while since.elapsed() < PAUSE {
        std::hint::spin_loop();
    }
}

/// The program dropped the contents of `range`, or (`unmapped`) the mapping itself.
pub(crate) fn dropped(shared: &Shared, space: SpaceId, range: VirtRange, unmapped: bool) -> Effect {
    let mut effect = Effect::default();
    let few = locked(shared, |engine| {
        if unmapped {
            engine.layout().detached(space, range);
        }
        engine.books().some_parts(space, range, MANY).len() < MANY
    });
    let at_once = few || shared.books.record.is_some();
    let new_grave = || shared.books.engine().layout().new_grave(space);
    let grave = (!at_once).then(new_grave).flatten();
    let Some(grave) = grave else {
        in_parts(
            shared,
            space,
            range,
            |engine, part| effect.cancel_batch |= engine.layout().removed(space, part).cancel_batch,
            |_| {},
        );
        return effect;
    };
    let mut left = range;
    while !left.is_empty() {
        let of_parts = locked(shared, |engine| {
            let parts = next_parts(engine, space, &mut left, WHOLE_CHUNKS);
            engine.layout().bury(space, &parts, grave)
        });
        effect.cancel_batch |= of_parts.cancel_batch;
        pause();
    }
    forget_later(shared, Dead::grave(grave));
    effect
}

/// Moves the books of a mapping. Pages without room in the page table at the new place go on
/// unmanaged, and are refused there if they are not in memory.
///
/// * `freed`: what was at the new place is out of the books already, and some pages may have moved.
/// * `free`: called once it is.
pub(crate) fn moved(
    shared: &Shared,
    process: &Process,
    (from, to): (VirtRange, VirtPage),
    freed: bool,
    free: impl FnOnce(),
) -> Effect {
    let space = process.space;
    let new = VirtRange::new(to, to.plus(from.count().0));
    let mut effect = Effect::default();
    if !freed {
        effect = dropped(shared, space, new, true);
        free();
    }
    let mut no_room = Vec::new();
    let new_place = |page: VirtPage| to.plus(page.0 - from.start.0);
    locked(shared, |engine| {
        engine.layout().region_moved(space, from, to)
    });
    in_parts(
        shared,
        space,
        from,
        |engine, part| match (engine.layout()).remap_pages(space, part, new_place(part.start)) {
            Ok(of_part) => effect.cancel_batch |= of_part.cancel_batch,
            Err(LedgerFull) => no_room.push(part),
        },
        |_| {},
    );
    for part in no_room {
        // Refused before they are forgotten: a successor that moves the mapping again must find
        // them, or they would read as zeros.
        let away = locked(shared, |engine| engine.books().away(space, part));
        let moved = |old: VirtRange| VirtRange::new(new_place(old.start), new_place(old.end));
        refuse(shared, process, away.into_iter().map(moved));
        let removed = locked(shared, |engine| engine.layout().removed(space, part));
        effect.cancel_batch |= removed.cancel_batch;
    }
    effect
}

/// Copies the books of `parent` for a fork child; `begin_fork` made `child`. Pages without room in
/// the page table go on unmanaged in the child, and are refused to it if they are not in memory.
/// No page of the child is served meanwhile.
pub(crate) fn forked(shared: &Shared, parent: SpaceId, child: &Process) -> Effect {
    let (mut effect, mut no_room) = (Effect::default(), Vec::new());
    let space = child.space;
    in_parts(
        shared,
        parent,
        EVERYTHING,
        |engine, part| match engine.forks().inherit_range(parent, space, part, &[]) {
            Ok(of_part) => effect.cancel_batch |= of_part.cancel_batch,
            Err(LedgerFull) => no_room.push(part),
        },
        |engine| engine.forks().end_fork(parent, space),
    );
    for part in no_room {
        let away = locked(shared, |engine| {
            engine.layout().removed(space, part);
            engine.books().away(parent, part)
        });
        refuse(shared, child, away.into_iter());
    }
    effect
}

/// The page table has no room for these pages of a process. Those of them that are missing are
/// nowhere: a touch is SIGBUS, and never reads zeros. Only this process feels it.
fn refuse(shared: &Shared, process: &Process, ranges: impl Iterator<Item = VirtRange>) {
    shared.gauges.shortages.no_entry();
    for range in ranges {
        shared.gauges.shortages.refused(range.count());
        // A range of several mappings, or with a page that is there, is refused as a whole. Nothing
        // is allowed while the thread has another event to report, as after a move.
        let whole = process.memory.poison(range).is_ok();
        if !whole && !range.pages().all(|page| is_poisoned(process, page)) {
            process.row.set(Flag::Short);
            process.refused.add(range);
        }
    }
}

/// Poisons a page. True also if it is in memory or not mapped: then nothing is missing.
fn is_poisoned(process: &Process, page: VirtPage) -> bool {
    match process.memory.poison(VirtRange::one(page)) {
        Ok(())
        | Err(UffdError::Exists { .. } | UffdError::NotMapped { .. } | UffdError::ClientGone) => {
            true
        }
        Err(_) => false,
    }
}

/// Has the books forgotten later, a few chunks at a time.
fn forget_later(shared: &Shared, dead: Dead) {
    shared.graves.push(dead);
    shared.signals.kick_control();
}

/// Removes an address space that is gone, and whose events are applied. Its pages are forgotten and
/// its slots freed later, a few chunks at a time; those of a small one at once.
pub(crate) fn ended(shared: &Shared, process: &Arc<Process>) {
    process.gone.store(true, Ordering::Relaxed);
    process.row.free();
    let is_active = |thread| shared.cpu_plan.is_active(thread);
    if !shared.processes.remove(process, is_active) {
        return;
    }
    shared.signals.wake_followers(is_active);
    let process = process.clone();
    let mut dead = Dead {
        relatives: shared.processes.relatives(&process),
        space: process.space,
        process: Some(process),
        began: false,
        left: EVERYTHING,
        cancel_batch: false,
    };
    if !dead.forget_some(shared) {
        forget_later(shared, dead);
    }
}

impl Dead {
    fn grave(space: SpaceId) -> Dead {
        Dead {
            space,
            process: None,
            relatives: Vec::new(),
            began: false,
            left: EVERYTHING,
            cancel_batch: false,
        }
    }

    /// Forgets a few more chunks. True if none is left.
    fn forget_some(&mut self, shared: &Shared) -> bool {
        let space = self.space;
        let at_once = at_once(shared, CHUNKS);
        let _layout = self.process.as_ref().map(|process| process.layout.write());
        let _held = shared.gauges.layout_holds.hold();
        let done = locked(shared, |engine| {
            if !std::mem::replace(&mut self.began, true) {
                engine.layout().ending(space);
            }
            for part in next_parts(engine, space, &mut self.left, at_once) {
                engine.forks().bequeath(space, part, &self.relatives);
                self.cancel_batch |= engine.layout().removed(space, part).cancel_batch;
            }
            let done = self.left.is_empty();
            if done {
                self.cancel_batch |= engine.layout().remove_space(space).cancel_batch;
            }
            done
        });
        let agent = self
            .process
            .as_ref()
            .and_then(|process| process.agent.get());
        if let (true, true, Some(agent)) = (done, self.cancel_batch, agent) {
            agent.commands.cancel();
        }
        shared.books.free_released();
        done
    }
}

/// Forgets a few chunks of the books that are gone. True if none is left.
pub(crate) fn forget_some(shared: &Shared) -> bool {
    if let Some(mut dead) = shared.graves.pop()
        && !dead.forget_some(shared)
    {
        shared.graves.push(dead);
    }
    shared.graves.is_empty()
}
