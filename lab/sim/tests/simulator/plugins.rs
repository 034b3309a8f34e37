//! Policy files in replays and storms.

#![allow(clippy::unwrap_used, reason = "everything here is a test")]

use undercroft_plugin::{Host, Policy};
use undercroft_plugin_wasm::Plugin;
use undercroft_sim::setup::{Memory, Setup, SimRoom};
use undercroft_sim::storm::{StormSetup, run_with};
use undercroft_sim::sweep::streams_of;
use undercroft_sim::{MemoryTrace, SimReport, simulate};

/// A module with what every policy must have.
fn module(on_event: &str) -> Vec<u8> {
    let text = format!(
        r#"(module
            (import "undercroft" "reclaim" (func $reclaim (param i32 i64) (result i32)))
            (import "undercroft" "prefetch" (func $prefetch (param i32 i64) (result i32)))
            (import "undercroft" "place" (func $place (param i32 i64 i32) (result i32)))
            (import "undercroft" "link_page" (func $link (param i32 i64 i64) (result i32)))
            (import "undercroft" "move_pages"
                (func $move (param i32 i64 i32 i32 i32) (result i32)))
            (import "undercroft" "scan" (func $scan (param i64) (result i32)))
            (memory (export "memory") 1)
            (global $asked (mut i32) (i32.const 0))
            (global $last (mut i64) (i64.const 0))
            (global $bits (mut i64) (i64.const 0))
            (global $dice (mut i64) (i64.const 88172645463325252))
            (func $roll (result i64)
                (global.set $dice (i64.xor (global.get $dice)
                    (i64.shl (global.get $dice) (i64.const 13))))
                (global.set $dice (i64.xor (global.get $dice)
                    (i64.shr_u (global.get $dice) (i64.const 7))))
                (global.set $dice (i64.xor (global.get $dice)
                    (i64.shl (global.get $dice) (i64.const 17))))
                (global.get $dice))
            (func (export "abi_version") (result i32) (i32.const 1))
            (func (export "on_event")
                (param $kind i32) (param $space i32) (param $page i64) (param $pages i64)
                (param $detail i64) {on_event}))"#
    );
    wat::parse_str(text).unwrap()
}

/// Pages that a walk loaded leave first, 64 pages behind it.
const BEHIND: &str = "(if (i32.le_u (local.get $kind) (i32.const 2)) (then
    (drop (call $reclaim (local.get $space) (i64.sub (local.get $page) (i64.const 64))))))";

/// The 8 pages after a fault come along, if there is room.
const NEXT: &str = "(local $n i64)
    (if (i32.ne (local.get $kind) (i32.const 1)) (then (return)))
    (loop
        (local.set $n (i64.add (local.get $n) (i64.const 1)))
        (drop (call $prefetch (local.get $space) (i64.add (local.get $page) (local.get $n))))
        (br_if 0 (i64.lt_u (local.get $n) (i64.const 8))))";

/// Walks round `pages` pages. Returns the faults under a policy, as a replay counts them.
fn faults(policy: &str, room: SimRoom) -> u64 {
    let pages = 1000u64;
    misses(policy, room, (0..10 * pages).map(|at| at % pages))
}

/// Replays one client.
///
/// * `references`: pages times 2, and 1 if it is a write.
fn walk(references: impl Iterator<Item = u64>, setup: &Setup) -> SimReport {
    let references = references.map(|at| (((at >> 1) * 4096) << 1) | (at & 1));
    let trace = MemoryTrace {
        name: "walk".to_owned(),
        granule_bytes: 1,
        clients: vec![("c0".to_owned(), references.collect())],
        ..MemoryTrace::default()
    };
    let streams = streams_of(&trace, setup.page_bytes).unwrap();
    simulate(&streams, setup, &mut |_| ()).unwrap()
}

/// Uses `pages` in turn, in memory for 500. Returns the faults under a policy, as a replay counts
/// them.
fn misses(policy: &str, room: SimRoom, pages: impl Iterator<Item = u64>) -> u64 {
    let setup = Setup {
        reclaim: policy.to_owned(),
        prefetch: "none".to_owned(),
        memory: Memory::Bytes(undercroft_base::Bytes(500 * 4096)),
        room,
        reference_time: undercroft_base::Nanos(10_000),
        ..Setup::default()
    };
    walk(pages.map(|page| page << 1), &setup).misses
}

#[test]
fn a_policy_file_decides_in_a_replay_and_gives_the_same_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("behind.wasm");
    std::fs::write(&path, module(BEHIND)).unwrap();
    let path = path.to_str().unwrap();
    for room in [SimRoom::AfterPlan, SimRoom::Ahead] {
        let (with, without) = (faults(path, room), faults("lru", room));
        assert_eq!(
            without, 10_000,
            "a walk round more than there is always faults"
        );
        assert!(with < 7500, "a part of the pages stays: {with}");
        assert_eq!(faults(path, room), with);
    }
    let wrong = folder.path().join("wrong.wasm");
    std::fs::write(&wrong, module("(loop (br 0))")).unwrap();
    let wrong = faults(wrong.to_str().unwrap(), SimRoom::Ahead);
    assert_eq!(
        wrong,
        faults("auto", SimRoom::Ahead),
        "the default goes on alone"
    );
    let none = undercroft_sim::setup::reclaim("/nothing/there.wasm");
    assert!(none.unwrap_err().to_string().contains("No such file"));
}

#[test]
fn pages_that_a_policy_file_wants_come_in_a_replay_while_there_is_room_and_none_leaves_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("next.wasm");
    std::fs::write(&path, module(NEXT)).unwrap();
    let path = path.to_str().unwrap();
    let (with, without) = (faults(path, SimRoom::Ahead), faults("auto", SimRoom::Ahead));
    assert!(2 * with < without, "{with} of {without}");
    assert_eq!(faults(path, SimRoom::Ahead), with);
    // There is never room before a fault has made some for itself.
    let full = faults(path, SimRoom::AfterPlan);
    assert_eq!(full, faults("auto", SimRoom::AfterPlan));
}

/// Names those of 64 pages whose bits are set after this change: the used ones, or the others. An
/// event 15 whose number of pages is not that of the bits is a failure.
fn by_scans(change: &str) -> Vec<u8> {
    module(&format!(
        "(local $n i64)
        (if (i32.eqz (global.get $asked)) (then
            (if (call $scan (i64.const 9)) (then (unreachable)))
            (if (i32.eqz (call $scan (i64.const 20))) (then (unreachable)))
            (global.set $asked (i32.const 1))))
        (if (i32.eq (local.get $kind) (i32.const 15)) (then
            (if (i64.ne (local.get $pages) (global.get $bits)) (then (unreachable)))
            (global.set $bits (i64.const 0))))
        (if (i32.ne (local.get $kind) (i32.const 14)) (then (return)))
        (global.set $bits (i64.add (global.get $bits) (i64.popcnt (local.get $detail))))
        (local.set $detail {change})
        (loop
            (if (i64.ne (i64.and (local.get $detail) (i64.const 1)) (i64.const 0)) (then
                (drop (call $reclaim (local.get $space)
                    (i64.add (local.get $page) (local.get $n))))))
            (local.set $detail (i64.shr_u (local.get $detail) (i64.const 1)))
            (local.set $n (i64.add (local.get $n) (i64.const 1)))
            (br_if 0 (i64.lt_u (local.get $n) (i64.const 64))))"
    ))
}

#[test]
fn a_policy_file_hears_in_a_replay_what_each_scan_found() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, change: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, by_scans(change)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let used = write("used.wasm", "(local.get $detail)");
    let unused = write(
        "unused.wasm",
        "(i64.xor (local.get $detail) (i64.const -1))",
    );
    // Two of three pages of the first 600 are hot. All pages are used now and then.
    let pages = || {
        let hot = (0u64..600).filter(|page| page % 3 != 2).collect::<Vec<_>>();
        let all = (0..200_000u64).map(move |at| match at % 50 {
            0 => at / 50 % 1000,
            _ => hot[at as usize % hot.len()],
        });
        all.collect::<Vec<_>>().into_iter()
    };
    let of = |policy: &str| misses(policy, SimRoom::Ahead, pages());
    let (used, unused, auto) = (of(&used), of(&unused), of("auto"));
    assert!(used > 2 * auto, "{used} if the used ones leave, {auto}");
    assert!(
        unused <= auto + auto / 10,
        "{unused} if the others leave, {auto}"
    );
}

/// A walk round 1000 pages in memory for 500, over two tiers. Returns the pages that each got.
fn written(policy: &str) -> [u64; 2] {
    let setup = Setup {
        reclaim: policy.to_owned(),
        prefetch: "none".to_owned(),
        placement: "waterfall".parse().unwrap(),
        memory: Memory::Bytes(undercroft_base::Bytes(500 * 4096)),
        tiers: ["nvme", "hdd-7200"]
            .map(|tier| tier.parse().unwrap())
            .to_vec(),
        room: SimRoom::Ahead,
        reference_time: undercroft_base::Nanos(100_000),
        ..Setup::default()
    };
    let report = walk((0..5000).map(|at| ((at % 1000) << 1) | 1), &setup);
    [0, 1].map(|tier| report.tiers[tier].pages_written)
}

#[test]
fn pages_go_and_move_in_a_replay_where_a_policy_file_says() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, on_event: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, module(on_event)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let odd = write(
        "odd.wasm",
        "(if (i32.le_u (local.get $kind) (i32.const 2)) (then
            (drop (call $place (local.get $space) (local.get $page)
                (i32.wrap_i64 (i64.and (local.get $page) (i64.const 1)))))))",
    );
    let down = write(
        "down.wasm",
        "(if (i32.and (i32.eq (local.get $kind) (i32.const 16))
                (i64.eqz (local.get $detail))) (then
            (drop (call $move (local.get $space) (local.get $page) (i32.const 1)
                (i32.const 0) (i32.const 1)))))",
    );
    let [all, none] = written("auto");
    assert!(all > 3000 && none == 0, "{all} and {none}");
    let [even, odd] = written(&odd);
    assert!(even > 1800 && odd > 1800, "{even} and {odd}");
    let [first, moved] = written(&down);
    assert!(first > 3000 && moved > 100, "{first} and {moved}");
}

/// Each page that is used comes with the one that was used before it.
const LINKED: &str = "
    (if (i32.or (i32.eq (local.get $kind) (i32.const 1)) (i32.eq (local.get $kind) (i32.const 5)))
        (then
            (drop (call $link (local.get $space) (global.get $last) (local.get $page)))
            (global.set $last (local.get $page))))";

#[test]
fn pages_that_a_policy_file_links_come_together_in_a_replay_wherever_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("linked.wasm");
    std::fs::write(&path, module(LINKED)).unwrap();
    let path = path.to_str().unwrap();
    // Neighbours in time are no neighbours in memory.
    let pages = || (0..20_000u64).map(|at| at * 379 % 1000);
    let (with, without) = (
        misses(path, SimRoom::Ahead, pages()),
        misses("auto", SimRoom::Ahead, pages()),
    );
    assert!(4 * with < without, "{with} of {without}");
    assert_eq!(misses(path, SimRoom::Ahead, pages()), with);
}

/// Names random pages and spaces at each event, and traps now and then.
fn hostile(_seed: u64) -> Box<dyn Policy> {
    let text = "(drop (call $reclaim (local.get $space)
            (i64.add (local.get $page) (i64.rem_s (call $roll) (i64.const 16)))))
        (drop (call $reclaim (i32.wrap_i64 (i64.rem_u (call $roll) (i64.const 9)))
            (i64.rem_u (call $roll) (i64.const 500))))
        (drop (call $reclaim (i32.wrap_i64 (call $roll)) (call $roll)))
        (drop (call $prefetch (local.get $space)
            (i64.add (local.get $page) (i64.rem_s (call $roll) (i64.const 16)))))
        (drop (call $prefetch (i32.wrap_i64 (call $roll)) (call $roll)))
        (drop (call $place (local.get $space) (local.get $page)
            (i32.wrap_i64 (i64.rem_s (call $roll) (i64.const 4)))))
        (drop (call $link (local.get $space) (local.get $page)
            (i64.add (local.get $page) (i64.rem_s (call $roll) (i64.const 16)))))
        (drop (call $move (local.get $space) (local.get $page) (i32.const 32)
            (i32.wrap_i64 (i64.rem_u (call $roll) (i64.const 4)))
            (i32.wrap_i64 (i64.rem_u (call $roll) (i64.const 4)))))
        (drop (call $move (i32.wrap_i64 (call $roll)) (call $roll) (i32.const 256)
            (i32.wrap_i64 (call $roll)) (i32.wrap_i64 (call $roll))))
        (if (i64.eqz (i64.rem_u (call $roll) (i64.const 3000))) (then (unreachable)))";
    Box::new(Plugin::read(&module(text), &mut Host::default()).unwrap())
}

#[test]
fn no_byte_is_wrong_in_storms_with_a_hostile_policy_file() {
    let (mut named, mut loaded, mut placed, mut moved) = (0, 0, 0, 0);
    for seed in 0..12 {
        let mut setup = StormSetup::of_seed(seed);
        setup.plugin = true;
        let ended = run_with(&setup, 3000, hostile);
        assert_eq!(ended.failure, None, "seed {seed}");
        let seen = |what| ended.tally.seen.get(what).copied().unwrap_or(0);
        named += seen("victims that a plugin named");
        loaded += seen("loads for a plugin");
        placed += seen("a plugin's place: offered");
        moved += seen("a plugin's move: begun");
    }
    assert!(
        named > 50 && loaded > 10 && placed > 50 && moved > 10,
        "{named}, {loaded}, {placed} and {moved} prove nothing"
    );
}
