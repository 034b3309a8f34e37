//! The engine's documented behaviour, case by case: a script, and what it tells.
//!
//! Words of a script, separated by `;`. Pages are numbered from the start of the region; `p1`
//! before a word names another process than `p0`. Every access is checked against the byte oracle.
//! ```text
//! read A..B, write A..B    a thread touches each page; faults are served at once
//! stop A, stop-write A     a thread touches the page; its fault is not read yet
//! fault, load, finish      a fault thread reads a message and decides / loads / validates,
//!                          installs and finishes (oldest)
//! select N, take, store, publish    the eviction path, whole batch
//! reclaim N                all four;  leave A = until A has left
//! demote, demote-load, demote-end, no-demote   moves the oldest page from tier 0 to tier 1
//! lift A..B                moves pages from tier 1 to tier 0, as a file wishes; then as `demote`
//! drain                    closes tier 0 and empties it
//! remove, unmap A..B, remap A..B to C, keep A..B to C (DONTUNMAP), fork, exit, spawn
//!                          with their events (and zap)
//! remove-event A, zap      a REMOVE is acknowledged / the kernel drops the pages
//! repeat A                 a stale fault message comes
//! lock A..B, unlock A..B, limit N, wake (take_waiters), bad N (tier N fails every store)
//! tell A | slots N | stopped | count | clean | lost
//!                          what is told: a page's state, slots in a tier, ...
//! ```

#![allow(clippy::unwrap_used, reason = "everything here is a test helper")]

use undercroft_base::{PageCount, PageNo, PageSize, PageState, TierId, VirtPage, VirtRange};
use undercroft_engine::WishedMove;
use undercroft_model::FailRates;
use undercroft_model::tier::DEVICE;
use undercroft_policy::place::Migration;
use undercroft_sim::storm::{Doing, FullAction, Message, StormSetup, Thread, TierSetup, World};

/// The oldest page of the first tier goes to the second.
const DOWN: Migration = Migration {
    from: TierId(0),
    to: TierId(1),
    pages: PageCount(1),
};
const BASE: u64 = 512;
const REGION: u64 = 400;

fn world(options: &str) -> World {
    let mut setup = StormSetup {
        seed: 1,
        reclaim: "lru",
        prefetch: "none",
        limit_pages: 1000,
        tiers: Vec::new(),
        ledger_chunks: 8,
        layout: 0,
        failures: false,
        kills: 0,
        when_full: FullAction::Stay,
        links: false,
        beside: false,
        kernel_swap: false,
        plugin: false,
        large: false,
        sabotage: None,
        fault_threads: 4,
        program_threads: 1,
    };
    let tier = || TierSetup {
        facts: &DEVICE,
        pages: 1000,
        retain: options.contains("retain"),
        demotes: true,
        reads: options.contains("reads"),
        packs: false,
        page: PageSize::Base,
    };
    setup.tiers = vec![tier(), tier()];
    for option in options.split_whitespace() {
        match option.split_once('=') {
            Some(("first", pages)) => setup.tiers[0].pages = pages.parse().unwrap(),
            Some(("limit", pages)) => setup.limit_pages = pages.parse().unwrap(),
            Some(("prefetch", _)) => setup.prefetch = "readahead",
            Some(("ledger", chunks)) => setup.ledger_chunks = chunks.parse().unwrap(),
            _ => assert!(["retain", "reads"].contains(&option), "{option}"),
        }
    }
    let mut world = World::new(setup);
    world.plain = true;
    world.calm = true;
    spawn(&mut world);
    world
}

fn spawn(world: &mut World) {
    let proc = world.spawn();
    let all = VirtRange::new(VirtPage(BASE), VirtPage(BASE + REGION));
    world.map_attached(proc, all);
}

fn range(text: &str) -> VirtRange {
    let (from, to) = match text.split_once("..") {
        Some((from, to)) => (from.parse().unwrap(), to.parse().unwrap()),
        None => {
            let page: u64 = text.parse().unwrap();
            (page, page + 1)
        }
    };
    VirtRange::new(VirtPage(BASE + from), VirtPage(BASE + to))
}

fn touch(world: &mut World, proc: usize, page: VirtPage, write: bool) {
    let able = |t: &Thread| t.proc == proc && t.doing == Doing::Running;
    let thread = match world.threads.iter().position(able) {
        Some(thread) => thread,
        None => world.add_thread(proc),
    };
    world.access(thread, page, write);
}

fn serve(world: &mut World) {
    for _ in 0..200 {
        world.fault_step();
    }
}

fn events(world: &mut World) {
    while world.event_step() | world.zap_step() {}
}

fn oldest(world: &World) -> usize {
    world
        .flights
        .iter()
        .position(Option::is_some)
        .expect("a fault in progress")
}

fn take(world: &mut World) {
    while world.batch.as_ref().is_some_and(|b| b.next < b.items.len()) {
        world.take_next();
    }
}

fn store(world: &mut World) {
    for held in 0..world.batch.as_ref().map_or(0, |b| b.held.len()) {
        world.store_held(held);
    }
}

fn publish(world: &mut World) {
    while let Some(held) = world.batch.as_ref().and_then(|b| b.held.first().copied()) {
        assert!(world.publish_held(0, held.outcome.expect("stored")));
    }
    world.batch = None;
}

fn reclaim(world: &mut World, count: usize) {
    world.select(count);
    take(world);
    store(world);
    publish(world);
}

/// Carries out one step of a script. `Some`: what it tells.
fn step(world: &mut World, words: &[&str]) -> Option<String> {
    let (proc, words) = match words[0].strip_prefix('p').and_then(|n| n.parse().ok()) {
        Some(proc) => (proc, &words[1..]),
        None => (0, words),
    };
    let told = tell(world, proc, words);
    if told.is_none() && !program_step(world, proc, words) && !manager_step(world, proc, words) {
        panic!("unknown word {}", words[0]);
    }
    told
}

fn number(words: &[&str]) -> u64 {
    words[1].parse().unwrap()
}

/// Does a step of the program and its kernel. False: it is another word.
fn program_step(world: &mut World, proc: usize, words: &[&str]) -> bool {
    match words[0] {
        "read" | "write" => {
            for page in range(words[1]).pages() {
                touch(world, proc, page, words[0] == "write");
                serve(world);
            }
        }
        "stop" | "stop-write" => {
            touch(world, proc, range(words[1]).start, words[0] == "stop-write");
        }
        "remove" => {
            world.begin_remove(proc, range(words[1]), true);
            events(world);
        }
        "remove-event" => {
            world.procs[proc].unmanaged_ok = true; // until the zap, and in fork children after it
            world.begin_remove(proc, range(words[1]), true);
            world.read_event(proc);
        }
        "zap" => assert!(world.zap_step()),
        "repeat" => {
            let message = Message {
                page: range(words[1]).start,
                write: false,
                thread: 0,
            };
            world.procs[proc].messages.push_back(message);
        }
        "unmap" => {
            world.begin_unmap(proc, range(words[1]), true, false);
            events(world);
        }
        "remap" | "keep" => {
            let to = range(words[3]).start;
            world.begin_remap(proc, range(words[1]), true, to, words[0] == "keep");
            events(world);
        }
        "fork" => {
            world.begin_fork(proc);
            events(world);
        }
        "exit" => world.exit(proc),
        "spawn" => spawn(world),
        _ => return false,
    }
    true
}

/// Does a step of the manager and its tiers. False: it is another word.
fn manager_step(world: &mut World, proc: usize, words: &[&str]) -> bool {
    match words[0] {
        "fault" => {
            let at = world.flights.iter().position(Option::is_none).unwrap();
            let message = world.procs[proc].messages.pop_front().expect("a message");
            world.decide(at, proc, message);
        }
        "load" | "finish" => world.advance_flight(oldest(world)),
        "select" => assert!(world.select(number(words) as usize)),
        "take" => take(world),
        "store" => store(world),
        "publish" => publish(world),
        "reclaim" => reclaim(world, number(words) as usize),
        "leave" => {
            let (space, page) = (world.procs[proc].space, range(words[1]).start);
            for _ in 0..100 {
                if world.engine.books().entry(space, page).state == PageState::Resident {
                    reclaim(world, 8);
                }
            }
        }
        "demote" => assert!(world.start_demotion(DOWN)),
        "no-demote" => assert!(!world.start_demotion(DOWN)),
        "lift" => {
            let pages = range(words[1]);
            let lift = WishedMove {
                space: world.procs[proc].space,
                page: pages.start,
                pages: pages.count().0,
                from: TierId(1),
                to: TierId(0),
            };
            assert!(world.start_moves(&[lift]));
        }
        "drain" => {
            world.begin_drain(TierId(0));
            while world.drain_some(TierId(0), PageNo(0)) {
                while world.demotion.is_some() && world.demotion_step() {}
            }
            world.give_back_freed();
        }
        "demote-load" => _ = world.demotion_step(),
        "demote-end" => while world.demotion.is_some() && world.demotion_step() {},
        "lock" | "unlock" => {
            let space = world.procs[proc].space;
            world
                .engine
                .layout()
                .lock(space, range(words[1]), words[0] == "lock");
        }
        "limit" => world.engine.set_limit(PageCount(number(words)).bytes()),
        "wake" => {
            world.take_waiters();
            serve(world);
        }
        "bad" => world.tiers[number(words) as usize].set_rates(FailRates {
            store_io: 1000,
            ..FailRates::NONE
        }),
        "flip" => world.tiers[number(words) as usize].set_rates(FailRates {
            flip: 1000,
            ..FailRates::NONE
        }),
        _ => return false,
    }
    true
}

/// Answer to a word that asks. `None`: it asks for nothing.
fn tell(world: &mut World, proc: usize, words: &[&str]) -> Option<String> {
    Some(match words[0] {
        "tell" => {
            let space = world.procs[proc].space;
            let entry = world.engine.books().entry(space, range(words[1]).start);
            match (entry.state, entry.tier) {
                (PageState::Stored, TierId::FILL) => "stored fill".to_owned(),
                (PageState::Stored, tier) => format!("stored {}", tier.0),
                (state, _) => format!("{state:?}").to_lowercase(),
            }
        }
        "slots" => {
            world.give_back_freed();
            let live = world.tiers[number(words) as usize].live().len();
            format!("slots {live}")
        }
        "stopped" => {
            let stopped = world.threads.iter().filter(|t| t.doing != Doing::Running);
            format!("stopped {}", stopped.count())
        }
        "count" => format!("count {}", world.engine.books().resident().0),
        "clean" => format!("clean {}", world.engine.books().stats().clean_dropped),
        "lost" => format!("lost {}", world.engine.books().stats().lost),
        _ => return None,
    })
}

/// Runs the script, compares what it tells, then ends the world: nothing may be left.
fn check(options: &str, script: &str, tells: &str) {
    let mut world = world(options);
    let mut told = Vec::new();
    for line in script.split(';') {
        let words: Vec<&str> = line.split_whitespace().collect();
        told.extend(step(&mut world, &words));
        world.engine.books().audit();
    }
    assert_eq!(told.join("; "), tells, "{script}");
    while world.flights.iter().any(Option::is_some) {
        world.advance_flight(oldest(&world));
    }
    world.check_slots();
    world.end();
}

#[test]
fn evicted_page_comes_back_and_its_slot_is_freed() {
    check(
        "",
        "write 0..64; reclaim 16; tell 3; slots 0; read 3; tell 3; slots 0; count",
        "stored 0; slots 16; resident; slots 15; count 49",
    );
}

#[test]
fn page_of_zeros_or_of_equal_words_takes_no_slot() {
    check(
        "",
        "read 0..64; reclaim 16; tell 3; slots 0; read 3; tell 3",
        "stored fill; slots 0; resident",
    );
}

#[test]
fn refault_during_eviction_recalls_the_page() {
    check(
        "",
        "write 0..64; select 1; take; stop 0; fault; stopped; store; publish; tell 0; stopped; slots 0",
        "stopped 1; resident; stopped 0; slots 0",
    );
}

#[test]
fn remove_during_load_never_brings_old_bytes() {
    check(
        "",
        "write 0..64; reclaim 1; stop 0; fault; load; remove 0; slots 0; finish; slots 0; tell 0; read 0; tell 0",
        "slots 1; slots 0; untouched; resident",
    );
}

#[test]
fn page_found_present_between_a_remove_and_its_zap_is_not_taken_for_a_fresh_one() {
    // Finished as Done, it would be evicted with its old bytes. The zap could not reach those, and
    // they would come back.
    check(
        "",
        "write 0..64; remove-event 5; repeat 5; fault; load; finish; tell 5; read 64..128; lock \
         0..5; lock 6..128; zap; \
         read 5; tell 5",
        "untouched; resident",
    );
}

#[test]
fn first_touch_in_progress_is_untouched_in_a_fork_child() {
    // The child has the page, which is not counted: its entry must not say that it is stored.
    check(
        "",
        "write 0..64; remove-event 5; repeat 5; fault; fork; finish; p1 tell 5; p1 read 5; read 5",
        "untouched",
    );
}

#[test]
fn slot_is_freed_only_after_its_page_is_installed() {
    check(
        "",
        "write 0..64; reclaim 1; stop 0; fault; slots 0; load; slots 0; finish; slots 0; stopped",
        "slots 1; slots 1; slots 0; stopped 0",
    );
}

#[test]
fn remap_during_load_keeps_the_slot_for_the_new_address() {
    check(
        "",
        "write 0..64; reclaim 1; stop 0; fault; load; keep 0..8 to 100; finish; tell 0; tell 100; \
         slots 0; read 100; read 0; \
         slots 0",
        "untouched; stored 0; slots 1; slots 0",
    );
}

#[test]
fn remap_of_an_evicting_page_publishes_at_the_new_address() {
    check(
        "",
        "write 0..64; select 2; take; store; remap 0..8 to 100; publish; tell 0; tell 100; read 100..102",
        "untouched; stored 0",
    );
}

#[test]
fn remove_during_eviction_discards_the_bytes() {
    check(
        "",
        "write 0..64; select 1; take; store; remove 0; publish; slots 0; tell 0; read 0",
        "slots 0; untouched",
    );
}

#[test]
fn fork_of_an_evicting_page_shares_its_slot() {
    check(
        "",
        "write 0..64; select 1; take; fork; store; publish; tell 0; p1 tell 0; slots 0; read 0; \
         slots 0; p1 read 0; slots 0",
        "stored 0; stored 0; slots 1; slots 1; slots 0",
    );
}

#[test]
fn fork_child_keeps_an_evicting_page_its_parent_drops() {
    check(
        "",
        "write 0..64; select 1; take; fork; remove 0; store; publish; tell 0; p1 tell 0; p1 read 0; slots 0",
        "untouched; stored 0; slots 0",
    );
}

#[test]
fn fork_child_put_back_keeps_its_claim_on_the_retained_copy() {
    // The child's entry lost the slot but not the flag: page 0's slot leaked, and slot 0 was freed
    // once too often.
    check(
        "retain",
        "write 0..64; reclaim 3; write 0..3; read 64..100; lock 3..100; select 2; take; fork; bad \
         0; bad 1; store; publish; \
         tell 0; p1 tell 0; slots 0; p1 remove 0..64; slots 0; remove 0..64; slots 0",
        "resident; resident; slots 3; slots 3; slots 0",
    );
}

#[test]
fn unchanged_page_is_dropped_without_a_write() {
    check(
        "retain",
        "write 0..64; reclaim 1; slots 0; read 0; slots 0; read 64..128; leave 0; clean; tell 0; read 0",
        "slots 1; slots 1; clean 1; stored 0",
    );
}

#[test]
fn changed_page_gives_its_retained_copy_up() {
    check(
        "retain",
        "write 0..64; reclaim 1; write 0; lock 1..64; read 64..100; lock 64..100; reclaim 1; clean; slots 0; read 0",
        "clean 0; slots 1",
    );
}

#[test]
fn fault_without_room_waits_until_reclaim_has_made_some() {
    check(
        "limit=40",
        "write 0..40; write 50; stopped; tell 50; reclaim 4; wake; stopped; tell 50; count",
        "stopped 1; untouched; stopped 0; resident; count 37",
    );
}

#[test]
fn pages_installed_last_stay_for_a_minimum_time() {
    check(
        "",
        "write 0..64; reclaim 64; count; tell 31; tell 32",
        "count 32; stored 0; resident",
    );
}

#[test]
fn minimum_residency_gives_way_when_there_is_no_other_victim() {
    check(
        "limit=8",
        "write 0..8; lock 0..4; write 8; stopped; reclaim 1; wake; stopped; tell 4; tell 8",
        "stopped 1; stopped 0; stored 0; resident",
    );
}

#[test]
fn locked_page_is_never_a_victim() {
    check(
        "",
        "write 0..64; lock 0..4; reclaim 8; tell 3; tell 4; unlock 0..4; reclaim 28; tell 3",
        "resident; stored 0; stored 0",
    );
}

#[test]
fn page_no_tier_takes_stays() {
    check(
        "",
        "write 0..64; bad 0; bad 1; reclaim 8; tell 0; count; read 0",
        "resident; count 64",
    );
}

#[test]
fn damaged_copy_is_an_error_never_bytes() {
    check(
        "",
        "flip 0; write 0..64; reclaim 1; read 0; tell 0; lost; remove 0; read 0; tell 0",
        "lost; lost 1; resident",
    );
}

#[test]
fn a_copy_that_is_read_from_a_device_counts_only_if_it_verifies() {
    check(
        "reads",
        "write 0..64; reclaim 32; read 0..32; lost; slots 0; count",
        "lost 0; slots 0; count 64",
    );
    check(
        "reads",
        "flip 0; write 0..64; reclaim 8; read 0; tell 0; lost; slots 0",
        "lost; lost 1; slots 7",
    );
}

#[test]
fn demotion_moves_the_page_and_frees_the_old_slot() {
    check(
        "",
        "write 0..64; reclaim 2; demote; demote-end; tell 0; slots 0; slots 1; read 0",
        "stored 1; slots 1; slots 1",
    );
}

#[test]
fn demotion_reads_a_page_from_a_device() {
    check(
        "reads",
        "write 0..64; reclaim 2; demote; demote-end; tell 0; slots 0; slots 1; read 0",
        "stored 1; slots 1; slots 1",
    );
}

/// A copy that is damaged stays where it is, as it is.
#[test]
fn demotion_leaves_a_damaged_copy_on_its_device() {
    check(
        "reads",
        "flip 0; write 0..64; reclaim 2; demote; demote-end; tell 0; slots 0; slots 1; read 0; lost",
        "stored 0; slots 2; slots 0; lost 1",
    );
}

#[test]
fn demotion_of_a_page_that_came_back_is_undone() {
    check(
        "reads",
        "write 0..64; reclaim 1; demote; demote-load; write 0; demote-end; tell 0; slots 0; slots 1",
        "resident; slots 0; slots 0",
    );
    check(
        "",
        "write 0..64; reclaim 1; demote; demote-load; write 0; demote-end; tell 0; slots 0; slots 1",
        "resident; slots 0; slots 0",
    );
}

#[test]
fn demotion_leaves_shared_slots_until_one_side_is_gone() {
    check(
        "",
        "write 0..64; reclaim 1; fork; no-demote; p1 exit; demote; demote-end; tell 0; read 0; slots 0; slots 1",
        "stored 1; slots 0; slots 0",
    );
    check(
        "",
        "write 0..64; reclaim 1; fork; no-demote; write 0; demote; demote-end; p1 tell 0; p1 read 0; slots 0; slots 1",
        "stored 1; slots 0; slots 0",
    );
}

/// Pages of fork relatives, and second copies of pages in memory, too.
#[test]
fn a_drain_leaves_nothing_in_its_tier() {
    check(
        "reads",
        "write 0..64; reclaim 32; drain; tell 0; slots 0; slots 1; read 0..64; lost; count",
        "stored 1; slots 0; slots 32; lost 0; count 64",
    );
    check(
        "",
        "write 0..64; reclaim 1; fork; drain; tell 0; p1 tell 0; slots 0; slots 1; read 0; p1 read 0; lost",
        "stored 1; stored 1; slots 0; slots 2; lost 0",
    );
    check(
        "retain",
        "write 0..64; reclaim 2; read 0; slots 0; drain; slots 0; slots 1; read 0..2; lost",
        "slots 2; slots 0; slots 1; lost 0",
    );
}

/// A page that is touched while it has copies in both tiers is resident, and neither copy is left.
#[test]
fn pages_that_a_file_lifts_go_up_and_a_fault_that_meets_one_wins() {
    for options in ["", "reads"] {
        check(
            options,
            "write 0..64; reclaim 2; demote; demote-end; demote; demote-end; tell 0; slots 0; slots 1; \
             lift 0..2; demote-load; write 1; demote-end; tell 1; tell 0; slots 0; slots 1; lost",
            "stored 1; slots 0; slots 2; resident; stored 0; slots 1; slots 0; lost 0",
        );
    }
}

#[test]
fn a_closed_tier_gets_no_page_and_keeps_no_copy() {
    check(
        "retain",
        "write 0..64; drain; reclaim 8; tell 0; read 0; slots 0; slots 1",
        "stored 1; slots 0; slots 8",
    );
}

#[test]
fn demotion_never_publishes_bytes_of_an_earlier_stay() {
    // Page 0 comes back, changes, and leaves to the same slot before the demotion of its old bytes
    // ends.
    check(
        "",
        "write 0..64; reclaim 1; demote; demote-load; write 0; slots 0; write 64..100; lock 1..100; reclaim 1; tell 0; \
         demote-end; read 0; slots 1",
        "slots 0; stored 0; slots 0",
    );
}

#[test]
fn stale_plan_does_not_touch_a_page_that_has_its_number_now() {
    // The exit gives the chunk back; the next process gets it, and faults at the same offset.
    check(
        "",
        "stop 0; fault; exit; spawn; p1 stop 0; p1 fault; load; finish; p1 tell 0; count; load; \
         finish; p1 tell 0; count",
        "loading; count 1; resident; count 1",
    );
}

#[test]
fn prefetched_pages_come_along() {
    check(
        "prefetch=readahead",
        "write 0..64; reclaim 32; read 0..3; tell 3; tell 4; tell 20",
        "resident; stored 0; stored 0",
    );
}
