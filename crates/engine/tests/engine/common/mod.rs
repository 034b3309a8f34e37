//! The engine that several tests begin with.

use undercroft_base::{BASE_PAGE_BYTES, Bytes, SpaceId, ThreadId, VirtPage};
use undercroft_engine::{Config, Engine, Fault, FaultAnswer, Install, LoadPlan, Room, VecLedger};
use undercroft_policy::reclaim::Reclaim;

/// Keeps a reserve below `limit` pages and no copies of resident pages. Does not prefetch.
/// * `chunks`: of its ledger.
pub(crate) fn engine(chunks: usize, limit: u64, reclaim: Box<dyn Reclaim>) -> Engine<VecLedger> {
    engine_with(chunks, limit, reclaim, false)
}

/// As [`engine`].
/// * `retain`: the tier keeps the copies of resident pages.
pub(crate) fn engine_with(
    chunks: usize,
    limit: u64,
    reclaim: Box<dyn Reclaim>,
    retain: bool,
) -> Engine<VecLedger> {
    let prefetch = undercroft_policy::prefetch::by_name("none").expect("a policy");
    Engine::new(
        VecLedger::new(chunks),
        reclaim,
        prefetch,
        config(limit, retain),
    )
}

/// The configuration of [`engine_with`].
pub(crate) fn config(limit: u64, retain: bool) -> Config {
    Config {
        limit: Bytes(limit * BASE_PAGE_BYTES as u64),
        retain: vec![retain],
        demotes: vec![false],
        room: Room::Ahead,
    }
}

/// An access of the first thread.
pub(crate) fn fault(space: SpaceId, page: VirtPage, write: bool) -> Fault {
    Fault {
        space,
        page,
        write,
        thread: ThreadId(1),
        urgent: false,
    }
}

/// A read of a page, served if there is room.
pub(crate) fn answer(
    engine: &mut Engine<VecLedger>,
    space: SpaceId,
    page: VirtPage,
) -> FaultAnswer {
    let fault = fault(space, page, false);
    let mut plan = LoadPlan::default();
    let answer = engine.faults().answer(fault, &mut plan);
    if answer == FaultAnswer::Load {
        engine.faults().validate(&mut plan.items);
        plan.items[0].install = Install::Done;
        engine.faults().finish(plan.fault, &mut plan.items);
    }
    answer
}

/// A read of a page that is not in memory, served.
pub(crate) fn touch(engine: &mut Engine<VecLedger>, space: SpaceId, page: VirtPage) {
    assert_eq!(answer(engine, space, page), FaultAnswer::Load);
}
