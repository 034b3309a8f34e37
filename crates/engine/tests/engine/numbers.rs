//! Numbers of address spaces: each is used again, and by nothing that still has it.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::common;
use undercroft_base::{PageKey, PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_engine::{
    EVERYTHING, Engine, EvictItem, FlatLedger, Ledger, LedgerFull, Outcome, Taken, VecLedger,
    bytes_for,
};
use undercroft_policy::prefetch;

/// The end of all numbers.
const END: u32 = 1 << 24;

fn range(start: u64, end: u64) -> VirtRange {
    VirtRange::new(VirtPage(start), VirtPage(end))
}

/// An engine whose first space has the number `first`, and two pages in one chunk.
fn engine(first: u32, end: u32) -> (Engine<VecLedger>, SpaceId) {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(16, 1 << 20, reclaim);
    engine.number_spaces(first, end);
    let space = engine.layout().add_space();
    attach(&mut engine, space);
    (engine, space)
}

fn attach<L: Ledger>(engine: &mut Engine<L>, space: SpaceId) {
    engine.layout().attached(space, range(0, 1 << 12));
    engine.discovery().found_resident(space, range(7, 9));
}

/// A shell that forks for each command, a command that a child becomes, and a large drop: three
/// numbers. The shell keeps its own for all of that time.
fn fork_exec_drop(engine: &mut Engine<VecLedger>, shell: SpaceId) {
    let (child, _) = engine.forks().forked(shell, &[]).expect("room");
    let command = engine
        .layout()
        .new_space(PageSize::Base, |_| false)
        .expect("a number");
    let grave = engine.layout().new_grave(shell).expect("a number");
    attach(engine, command);
    engine.layout().remove_space(child);
    let parts = engine.books().parts(command, EVERYTHING);
    engine.layout().bury(command, &parts, grave);
    engine.layout().removed(grave, EVERYTHING);
    engine.layout().remove_space(grave);
    engine.layout().remove_space(command);
    let all = [shell, child, command, grave].map(|space| space.0);
    let differ = (1..all.len()).all(|at| !all[..at].contains(&all[at]));
    assert!(
        differ && all.iter().all(|number| (1..END).contains(number)),
        "{all:?}"
    );
}

/// `UNDERCROFT_TEST_SPACES=100000000`: that many, which comes round six times.
#[test]
fn forks_execs_and_drops_go_on_after_the_last_number() {
    let spaces = match std::env::var("UNDERCROFT_TEST_SPACES") {
        Ok(text) => text.parse().expect("a number of spaces"),
        Err(_) => 30_000u64,
    };
    let (mut engine, shell) = engine(END - 10_000, u32::MAX);
    let began = std::time::Instant::now();
    for round in 0..spaces / 3 {
        fork_exec_drop(&mut engine, shell);
        if round % 100_000 == 0 {
            engine.books().audit();
        }
    }
    engine.books().audit();
    println!("{spaces} spaces in {:?}", began.elapsed());
    engine.layout().remove_space(shell);
    assert_eq!(engine.books().resident().0, 0);
}

#[test]
fn a_number_that_is_in_use_is_passed_over() {
    let (mut engine, first) = engine(1, 6);
    let others: Vec<_> = (2..6).map(|_| engine.layout().add_space()).collect();
    assert_eq!(others, [2, 3, 4, 5].map(SpaceId));
    engine.layout().remove_space(others[1]);
    // Of the caller's own.
    let refused = engine
        .layout()
        .new_space(PageSize::Base, |space| space == others[1]);
    assert_eq!(refused, Err(LedgerFull));
    // A page is in the hands of its agent, and its process is gone.
    engine.layout().remove_space(others[0]);
    let mut items: Vec<EvictItem> = Vec::new();
    assert!(engine.evictions().select(8, &mut items));
    assert!(items.iter().all(|item| item.space == first));
    engine.layout().remove_space(first);
    let [next, after] = [0; 2].map(|_| engine.layout().add_space());
    assert_eq!(
        [next, after],
        [others[0], others[1]],
        "not that of the batch"
    );
    assert_eq!(
        engine.layout().new_space(PageSize::Base, |_| false),
        Err(LedgerFull)
    );
    let mut wake = Vec::new();
    for item in &items {
        engine.evictions().settle(item.at, Taken::Moved, &mut wake);
        engine
            .evictions()
            .publish(item.at, Outcome::Fill(5), &mut wake);
    }
    engine.books().audit();
}

#[test]
fn without_a_free_number_forks_are_refused_and_the_rest_goes_on() {
    let (mut engine, first) = engine(1, 4);
    let second = engine.layout().add_space();
    assert_eq!(
        engine.layout().new_grave(first),
        None,
        "the last is for a process"
    );
    let (third, _) = engine.forks().forked(first, &[]).expect("a number");
    assert_eq!(engine.forks().forked(first, &[]), Err(LedgerFull));
    assert_eq!(
        engine.layout().new_space(PageSize::Base, |_| false),
        Err(LedgerFull)
    );
    engine.books().audit();
    engine.layout().remove_space(third);
    assert_eq!(
        engine.layout().new_space(PageSize::Base, |_| false),
        Ok(SpaceId(3))
    );
    engine.layout().remove_space(second);
    assert_eq!(engine.forks().begin_fork(first), Ok(SpaceId(2)));
}

#[test]
fn a_successor_goes_on_after_the_last_number() {
    let words = bytes_for(4) / 8;
    let memory: std::sync::Arc<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
    let policies = || {
        let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
        (reclaim, prefetch::by_name("none").expect("a policy"))
    };
    let last = SpaceId(END - 1);
    {
        let ledger = FlatLedger::create(memory.clone(), 4, &PageKey::KNOWN).expect("memory");
        let (reclaim, prefetch) = policies();
        let mut engine = Engine::new(ledger, reclaim, prefetch, common::config(1 << 20, false));
        engine.number_spaces(last.0, u32::MAX);
        assert_eq!(engine.layout().add_space(), last);
        attach(&mut engine, last);
    }
    let ledger = FlatLedger::open(memory.clone()).expect("a ledger");
    assert_eq!(ledger.key().secret(), PageKey::KNOWN.secret());
    let (reclaim, prefetch) = policies();
    let recovered = Engine::recover(
        ledger,
        reclaim,
        prefetch,
        common::config(1 << 20, false),
        &[(last, PageSize::Base)],
    );
    let (mut engine, _) = recovered.expect("a ledger that is whole");
    assert_eq!(engine.layout().add_space(), SpaceId(1));
    assert!(memory.iter().any(|word| word.load(Ordering::Relaxed) != 0));
}
