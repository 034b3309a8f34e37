//! Changes of many pages of the books, made a few chunks at a time. The engine is let go of in
//! between, so that no fault of any process waits for long. The caller holds the layout lock of the
//! space for writing, or the space is gone: nothing is installed in it meanwhile.
//!
//! A large range that the program drops is only cut off from its space, chunk by chunk. What was
//! cut off is forgotten later, by the control thread and, before it takes pages that somebody
//! has, by the evictor. A copy for a fork child and a move are made at once, page by page: both
//! places need their books.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use undercroft_base::{SpaceId, VirtPage, VirtRange};
use undercroft_engine::{EVERYTHING, Effect, Engine, LedgerFull};

use crate::books::ledger::MemfdLedger;
use crate::gauges::scale::note_hold;
use crate::space::graves::Dead;
use crate::space::process::Process;
use crate::space::shared::Shared;

type Locked = Engine<MemfdLedger>;

/// Chunks at once whose pages are changed, of 512 pages: some 0.3 ms.
const CHUNKS: usize = 8;

/// The same of chunks that are cut off whole.
const WHOLE_CHUNKS: usize = 2048;

/// From so many chunks on, dropped ones are cut off and forgotten later.
const MANY: usize = 16;

/// For so long the engine is left to others between two holds. Who waits for it does so awake for
/// some 20 us.
const PAUSE: Duration = Duration::from_micros(20);

/// Does `work` with the engine locked, and notes for how long it was.
fn locked<T>(shared: &Shared, work: impl FnOnce(&mut Locked) -> T) -> T {
    let mut engine: MutexGuard<'_, Locked> = shared.books.engine();
    let since = Instant::now();
    let done = work(&mut engine);
    drop(engine);
    note_hold(&shared.gauges.holds.engine, since);
    done
}

/// A trace hears of a fork as a whole: with one, a change is made in one hold.
fn at_once(shared: &Shared, chunks: usize) -> usize {
    match &shared.books.record {
        Some(_) => usize::MAX,
        None => chunks,
    }
}

/// Does `work` with each few of `parts`, then `last`, with the engine locked and let go of in
/// between.
fn in_parts(
    shared: &Shared,
    parts: &[VirtRange],
    mut work: impl FnMut(&mut Locked, VirtRange),
    last: impl FnOnce(&mut Locked),
) {
    let at_once = at_once(shared, CHUNKS);
    let mut left = parts;
    while left.len() > at_once {
        let (some, rest) = left.split_at(at_once);
        locked(shared, |engine| {
            some.iter().for_each(|part| work(engine, *part));
        });
        left = rest;
        pause();
    }
    locked(shared, |engine| {
        left.iter().for_each(|part| work(engine, *part));
        last(engine);
    });
}

fn pause() {
    let since = Instant::now();
    while since.elapsed() < PAUSE {
        std::hint::spin_loop();
    }
}

/// The program dropped the contents of `range`, or (`unmapped`) the mapping itself.
pub(crate) fn dropped(shared: &Shared, space: SpaceId, range: VirtRange, unmapped: bool) -> Effect {
    let mut effect = Effect::default();
    let parts = locked(shared, |engine| {
        if unmapped {
            engine.layout().detached(space, range);
        }
        engine.books().parts(space, range)
    });
    if parts.len() < MANY || shared.books.record.is_some() {
        in_parts(
            shared,
            &parts,
            |engine, part| effect.cancel_batch |= engine.layout().removed(space, part).cancel_batch,
            |_| {},
        );
        return effect;
    }
    let grave = shared.books.engine().layout().add_space();
    for parts in parts.chunks(WHOLE_CHUNKS) {
        let of_parts = locked(shared, |engine| engine.layout().bury(space, parts, grave));
        effect.cancel_batch |= of_parts.cancel_batch;
    }
    forget_later(shared, Dead::grave(shared, grave));
    effect
}

/// The mapping moved. What the books have no room for at its new place goes on unmanaged.
///
/// Errors: no room for a page that is not in memory.
pub(crate) fn moved(
    shared: &Shared,
    space: SpaceId,
    from: VirtRange,
    to: VirtPage,
) -> Result<Effect, LedgerFull> {
    let new = VirtRange::new(to, to.plus(from.count().0));
    let mut effect = dropped(shared, space, new, true);
    let mut lost = Ok(());
    let parts = locked(shared, |engine| {
        engine.layout().region_moved(space, from, to);
        engine.books().parts(space, from)
    });
    in_parts(
        shared,
        &parts,
        |engine, part| {
            let target = to.plus(part.start.0 - from.start.0);
            match engine.layout().remap_pages(space, part, target) {
                Ok(of_part) => effect.cancel_batch |= of_part.cancel_batch,
                Err(LedgerFull) if engine.books().keeps_nothing(space, part) => {
                    effect.cancel_batch |= engine.layout().removed(space, part).cancel_batch;
                    shared.gauges.shortages.no_entry();
                }
                Err(LedgerFull) => lost = Err(LedgerFull),
            }
        },
        |_| {},
    );
    lost.map(|()| effect)
}

/// The child of a fork gets what its parent has: `child` was given by `begin_fork`. What the books
/// have no room for goes on unmanaged in the child.
///
/// Errors: no room for a page that is not in memory.
pub(crate) fn forked(
    shared: &Shared,
    parent: SpaceId,
    child: SpaceId,
) -> Result<Effect, LedgerFull> {
    let mut effect = Effect::default();
    let mut lost = Ok(());
    let parts = locked(shared, |engine| engine.books().parts(parent, EVERYTHING));
    in_parts(
        shared,
        &parts,
        |engine, part| match engine.forks().inherit_range(parent, child, part, &[]) {
            Ok(of_part) => effect.cancel_batch |= of_part.cancel_batch,
            Err(LedgerFull) if engine.books().keeps_nothing(parent, part) => {
                shared.gauges.shortages.no_entry();
            }
            Err(LedgerFull) => lost = Err(LedgerFull),
        },
        |engine| engine.forks().end_fork(parent, child),
    );
    lost.map(|()| effect)
}

/// It is forgotten a few chunks at a time.
fn forget_later(shared: &Shared, dead: Dead) {
    shared.graves.push(dead);
    shared.signals.kick_control();
}

/// The address space is gone: it is no longer listed, its pages are forgotten and its slots freed
/// by and by, those of a small one at once.
pub(crate) fn ended(shared: &Shared, process: &Arc<Process>) {
    process.gone.store(true, Ordering::Relaxed);
    if !shared.processes.remove(process) {
        return;
    }
    shared.signals.wake_fault_threads();
    let process = process.clone();
    let mut dead = Dead {
        relatives: shared.processes.relatives(&process),
        parts: shared
            .books
            .engine()
            .books()
            .parts(process.space, EVERYTHING),
        space: process.space,
        process: Some(process),
        next: 0,
        cancel_batch: false,
    };
    if !dead.forget_some(shared) {
        forget_later(shared, dead);
    }
}

impl Dead {
    fn grave(shared: &Shared, space: SpaceId) -> Dead {
        Dead {
            parts: shared.books.engine().books().parts(space, EVERYTHING),
            space,
            process: None,
            relatives: Vec::new(),
            next: 0,
            cancel_batch: false,
        }
    }

    /// Forgets a few more of its chunks. True when none are left, and it is forgotten.
    fn forget_some(&mut self, shared: &Shared) -> bool {
        let space = self.space;
        let at_once = at_once(shared, CHUNKS);
        let _layout = self.process.as_ref().map(|process| process.layout.write());
        let done = locked(shared, |engine| {
            if self.next == 0 {
                engine.layout().ending(space);
            }
            for part in self.parts.iter().skip(self.next).take(at_once) {
                engine.forks().bequeath(space, *part, &self.relatives);
                self.cancel_batch |= engine.layout().removed(space, *part).cancel_batch;
            }
            self.next = self.next.saturating_add(at_once);
            let done = self.next >= self.parts.len();
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

/// Forgets a few chunks of what is gone; true when nothing more is left to forget.
pub(crate) fn forget_some(shared: &Shared) -> bool {
    if let Some(mut dead) = shared.graves.pop()
        && !dead.forget_some(shared)
    {
        shared.graves.push(dead);
    }
    shared.graves.is_empty()
}
