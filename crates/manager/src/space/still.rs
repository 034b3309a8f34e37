//! Memory whose pages cannot leave: mappings that the program may not write to, because the kernel
//! moves none of them; and all memory of a process that has no agent, or whose pages no tier takes
//! (`vm --page-size 2M`). Collectors protect their heaps for a while, and compilers their code for
//! good.
//!
//! A refusal sets the whole mapping aside, until it is writable again. That is looked up when the
//! kernel tells of a change of protection, and at intervals, because such a record may be lost. The
//! memory of a process is set aside until it has an agent.

use std::sync::atomic::Ordering;

use undercroft_base::{VirtPage, VirtRange};

use crate::space::parts::{CHUNKS, next_parts, pause};
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Mappings of one process that are looked up in one round, some 1 us each.
const LOOKS: usize = 64;

/// The kernel refused to move these pages of a process.
pub(crate) fn refused(shared: &Shared, process: &Process, pages: impl Iterator<Item = VirtPage>) {
    let Ok(maps) = process.maps() else { return };
    let mut known = VirtRange::new(VirtPage(0), VirtPage(0));
    for page in pages {
        if known.contains(page) {
            continue;
        }
        let Ok(Some(mapping)) = maps.at_or_above(page) else {
            continue;
        };
        if mapping.range.contains(page) && mapping.private_anonymous && !mapping.writable {
            known = mapping.range;
            let set = parts(shared, process, known);
            for new in known.minus(&set) {
                set_aside(shared, process, new, true);
            }
        }
    }
}

/// No page of the process can leave until it has an agent. O(1) if all of it is set aside.
pub(crate) fn no_way_out(shared: &Shared, process: &Process) {
    let all = process.all_pages;
    for new in all.minus(&parts(shared, process, all)) {
        set_aside(shared, process, new, true);
    }
    process.backlog.all_still.store(true, Ordering::SeqCst);
    if may_leave(shared, process) {
        agent_has_come(shared, process); // meanwhile
    }
}

/// Whether its pages may leave, but for single mappings: it has an agent, and tiers have pages of
/// this size.
fn may_leave(shared: &Shared, process: &Process) -> bool {
    process.has_agent() && shared.options.page_size == process.page_size()
}

/// The process has an agent: its pages may move, if they were set aside without one.
pub(crate) fn agent_has_come(shared: &Shared, process: &Process) {
    if !may_leave(shared, process) {
        return;
    }
    if process.backlog.all_still.swap(false, Ordering::SeqCst) {
        set_aside(shared, process, process.all_pages, false);
    }
}

/// Looks up whether mappings of `range` that are set aside are writable again.
pub(crate) fn look(shared: &Shared, process: &Process, range: VirtRange) {
    if process.backlog.all_still.load(Ordering::SeqCst) {
        return;
    }
    let set = parts(shared, process, range);
    look_up(shared, process, &set);
}

/// Looks up some of the mappings that are set aside, and the next ones in the next round. Of a
/// process without an agent: whether it has one now.
pub(crate) fn look_around(shared: &Shared, process: &Process) {
    if process.backlog.all_still.load(Ordering::SeqCst) {
        agent_has_come(shared, process);
        return;
    }
    let set = parts(shared, process, process.all_pages);
    if set.is_empty() {
        return;
    }
    let from = VirtPage(process.backlog.still_looked.load(Ordering::Relaxed));
    let mut rest: Vec<_> = set.iter().filter(|part| part.end > from).copied().collect();
    if let Some(first) = rest.first_mut() {
        first.start = first.start.max(from);
    }
    let next = look_up(shared, process, &rest).unwrap_or(process.all_pages.start);
    process
        .backlog
        .still_looked
        .store(next.0, Ordering::Relaxed);
}

/// Lets the pages of writable mappings in `set` move. Returns where to go on, if not all were
/// looked up.
fn look_up(shared: &Shared, process: &Process, set: &[VirtRange]) -> Option<VirtPage> {
    let maps = process.maps().ok()?;
    let mut looks = 0;
    for part in set {
        let mut at = part.start;
        while at < part.end {
            if looks == LOOKS {
                return Some(at);
            }
            looks += 1;
            let Ok(Some(mapping)) = maps.at_or_above(at) else {
                break;
            };
            if mapping.writable && !mapping.range.intersect(*part).is_empty() {
                set_aside(shared, process, mapping.range.intersect(*part), false);
            }
            at = mapping.range.end;
        }
    }
    None
}

/// The parts of `range` that are set aside.
fn parts(shared: &Shared, process: &Process, range: VirtRange) -> Vec<VirtRange> {
    let mut engine = shared.books.engine();
    engine.evictions().still_parts(process.space, range)
}

/// Sets `range` aside, or ends that. The books are changed a few chunks at a time.
fn set_aside(shared: &Shared, process: &Process, range: VirtRange, on: bool) {
    let space = process.space;
    let mut engine = shared.books.engine();
    engine.evictions().set_still(space, range, on);
    drop(engine);
    let mut left = range;
    while !left.is_empty() {
        let mut engine = shared.books.engine_for_many();
        for part in next_parts(&engine, space, &mut left, CHUNKS) {
            engine.evictions().follow_still(space, part);
        }
        drop(engine);
        if !left.is_empty() {
            pause();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::fault::model_tests::{options, shared, this_process};
    use crate::space::model::{ModelMemory, agent};

    /// Its mappings are writable, so a look at these alone would let its pages move.
    #[test]
    fn all_pages_of_a_process_without_an_agent_stay_until_it_has_one() {
        let shared = shared(options("ram"));
        let range = VirtRange::new(VirtPage(4096), VirtPage(4160));
        let space = shared.books.engine().layout().add_space();
        let row = shared.books.row(space);
        let memory = Arc::new(ModelMemory::new(range));
        let process = Process::new(space, memory, range.start, None, None, row);
        let _ = process.identity.set(this_process());
        {
            let mut engine = shared.books.engine();
            engine.layout().attached(space, range);
            engine.discovery().found_resident(space, range);
        }
        let still = || shared.books.engine().books().immovable().0 / 4096;
        assert_eq!(still(), 0);
        no_way_out(&shared, &process);
        assert_eq!(still(), 64);
        look_around(&shared, &process);
        look(&shared, &process, range);
        assert_eq!(still(), 64);
        assert!(process.agent.set(agent(&shared, &process)).is_ok());
        agent_has_come(&shared, &process);
        assert_eq!(still(), 0);
        // An evictor found none, and one came before it could set the memory aside.
        no_way_out(&shared, &process);
        assert_eq!(still(), 0);
    }
}
