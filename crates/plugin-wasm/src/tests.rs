//! Files that are refused, what a hostile policy gets, and that a right one is heard.

use undercroft_base::LatencyClass;
use undercroft_plugin::{Desk, Guest, GuestMemory, Memory, MovesFree};

use super::*;

/// A module in text form that has what every policy must have, and `more`.
fn text(imports: &str, on_event: &str, more: &str) -> Vec<u8> {
    let text = format!(
        r#"(module {imports} (memory (export "memory") 1)
            (func (export "abi_version") (result i32) (i32.const 1))
            (func (export "on_event")
                (param $kind i32) (param $space i32) (param $page i64) (param $pages i64)
                (param $detail i64) {on_event}) {more})"#
    );
    wat::parse_str(text).expect("right text")
}

fn refused(bytes: &[u8]) -> String {
    let plugin = Plugin::read(bytes, &mut Host::default());
    plugin.err().expect("a refusal").to_string()
}

#[test]
fn each_wrong_file_is_refused_by_what_is_wrong() {
    let of = |text: &str| wat::parse_str(text).expect("right text");
    let cases: [(Vec<u8>, &str); 12] = [
        (vec![0; MODULE_BYTES_MAX + 1], "it has 1048577 bytes"),
        (b"#!/bin/sh\n".to_vec(), "not a WebAssembly file"),
        (b"\0asm\x01\0\0\0\xff".to_vec(), "not valid WebAssembly"),
        (
            text(r#"(import "env" "system" (func (param i32)))"#, "", ""),
            "`env` `system`",
        ),
        (
            text(r#"(import "undercroft" "write_memory" (func))"#, "", ""),
            "`undercroft` `write_memory`",
        ),
        (
            text(
                r#"(import "undercroft" "reclaim" (func (param i64)))"#,
                "",
                "",
            ),
            "cannot be started",
        ),
        (of("(module)"), "`memory`"),
        (
            of(r#"(module (memory (export "memory") 1))"#),
            "`abi_version() -> i32`",
        ),
        (
            of(r#"(module (memory (export "memory") 1)
                (func (export "abi_version") (result i32) (i32.const 2)))"#),
            "version 2",
        ),
        (
            of(r#"(module (memory (export "memory") 1)
                (func (export "abi_version") (result i32) (i32.const 1))
                (func (export "on_event") (param i32)))"#),
            "`on_event",
        ),
        (
            text("", "", r#"(func (export "init") (loop (br 0)))"#),
            "used all its fuel",
        ),
        (
            of(r#"(module (memory (export "memory") 300))"#),
            "cannot be started",
        ),
    ];
    for (bytes, what) in cases {
        let said = refused(&bytes);
        assert!(said.contains(what), "{what}: {said}");
    }
}

/// Tells a plugin one event. Returns its wishes.
fn tell(desk: &mut Desk, kind: Kind, page: u64) -> Vec<Wish> {
    let mut wishes = Vec::new();
    let event = Event {
        kind,
        space: SpaceId(7),
        page,
        pages: 1,
        detail: 0,
        at: 0,
        cr3: 0,
    };
    desk.hear(&event, &mut |wish| wishes.push(wish));
    wishes
}

fn desk(bytes: &[u8]) -> Desk {
    let mut host = Host::default();
    let plugin = Plugin::read(bytes, &mut host).expect("a policy");
    Desk::with_host(Box::new(plugin), host)
}

const IMPORTS: &str = r#"
    (import "undercroft" "reclaim" (func $reclaim (param i32 i64) (result i32)))
    (import "undercroft" "reclaim_now" (func $reclaim_now (param i32 i64) (result i32)))
    (import "undercroft" "prefetch" (func $prefetch (param i32 i64) (result i32)))
    (import "undercroft" "scan" (func $scan (param i64) (result i32)))
    (import "undercroft" "get_page_state" (func $state (param i32 i64) (result i32)))
    (import "undercroft" "get_memory_limit" (func $limit (result i64)))
    (import "undercroft" "get_memory_usage" (func $usage (result i64)))
    (import "undercroft" "get_pf_count" (func $faults (result i64)))
    (import "undercroft" "get_waited_ms" (func $waited (result i64)))
    (import "undercroft" "gva_to_hva" (func $hva (param i32 i64) (result i64)))
    (import "undercroft" "register_parameter"
        (func $register (param i32 i32 i64) (result i32)))
    (import "undercroft" "get_parameter" (func $parameter (param i32) (result i64)))
    (import "undercroft" "set_parameter" (func $show (param i32 i64) (result i32)))"#;

fn wish(page: u64) -> Wish {
    Wish {
        what: What::Reclaim,
        space: SpaceId(7),
        page: VirtPage(page),
    }
}

#[test]
fn a_policy_hears_events_asks_and_wishes() {
    let mut desk = desk(&text(
        IMPORTS,
        r#"(if (i32.eq (local.get $kind) (i32.const 1)) (then
            (if (i32.eq (call $state (local.get $space) (i64.sub (local.get $page) (i64.const 1)))
                    (i32.const 1))
                (then (drop (call $reclaim (local.get $space)
                    (i64.sub (call $hva (local.get $space) (local.get $page))
                        (call $parameter (i32.const 0)))))))))
           (if (i32.eq (local.get $kind) (i32.const 12)) (then
            (drop (call $reclaim (local.get $space) (call $limit)))
            (drop (call $reclaim (local.get $space) (call $usage)))
            (drop (call $reclaim (local.get $space) (call $faults)))
            (drop (call $reclaim (local.get $space) (call $waited)))))"#,
        r#"(data (i32.const 8) "behind")
           (func (export "init")
            (drop (call $register (i32.const 8) (i32.const 6) (i64.const 1)))
            (drop (call $register (i32.const -8) (i32.const 6) (i64.const 2)))
            (drop (call $register (i32.const 0) (i32.const 4) (i64.const 3))))"#,
    ));
    let names: Vec<_> = desk.parameters().iter().map(|of| of.name.clone()).collect();
    assert_eq!(
        names,
        ["behind"],
        "a name outside of memory, and one of zeros"
    );
    assert_eq!(tell(&mut desk, Kind::Fault, 10), []);
    assert_eq!(tell(&mut desk, Kind::Fault, 11), [wish(10)]);
    assert_eq!(tell(&mut desk, Kind::Left, 11), []);
    assert_eq!(tell(&mut desk, Kind::Fault, 12), []);
    let memory = Memory {
        limit: 64,
        used: 5,
        faults: 3,
        waited_ms: 2,
    };
    let mut wishes = Vec::new();
    desk.at(memory, 100, &mut |wish| wishes.push(wish.page.0));
    assert_eq!(wishes, [64, 5, 3, 2]);
    desk.at(memory, 150, &mut |_| panic!("no tick is due"));
    assert_eq!(desk.counts().events, 6);
    assert_eq!(desk.counts().failures, 0);
    assert!(desk.set("behind", 20) && !desk.set("ahead", 1));
    assert_eq!(
        tell(&mut desk, Kind::Fault, 13),
        [wish(13u64.wrapping_sub(20))]
    );
}

#[test]
fn a_policy_that_loops_traps_or_takes_memory_is_bounded_and_dismissed() {
    let endless = "(loop (br 0))";
    let traps = "(unreachable)";
    let deep = "(call $self)";
    let grows = r#"(loop (drop (memory.grow (i32.const 64))) (br 0))"#;
    for body in [endless, traps, deep, grows] {
        let mut desk = desk(&text("", body, "(func $self (call $self))"));
        for round in 0..20 {
            assert_eq!(tell(&mut desk, Kind::Fault, round), []);
        }
        let counts = desk.counts();
        assert_eq!((counts.failures, counts.dismissed), (8, true), "{body}");
        assert_eq!(counts.events, 8, "{body}: it is not asked again");
        assert!(desk.last_failure().is_some());
    }
}

#[test]
fn a_policy_asks_for_scans_within_bounds_and_for_none_once_it_is_dismissed() {
    let mut desk = desk(&text(
        IMPORTS,
        r#"(if (i32.ne (call $scan (local.get $page)) (i32.wrap_i64 (local.get $detail)))
            (then (unreachable)))"#,
        "",
    ));
    let mut ask = |interval_ms: u64, allowed| {
        let event = Event {
            page: interval_ms,
            ..Event::plain(Kind::Scanned, allowed)
        };
        desk.hear(&event, &mut |_| ());
        (desk.scan_ms(), desk.counts())
    };
    let intervals = [
        (9, 0),
        (10, 1),
        (3_600_000, 1),
        (3_600_001, 0),
        (u64::MAX, 0),
    ];
    let asked = intervals.map(|(interval_ms, allowed)| ask(interval_ms, allowed).0);
    assert_eq!(asked, [0, 10, 3_600_000, 3_600_000, 3_600_000]);
    assert_eq!(ask(0, 1).0, 0);
    let (scan_ms, counts) = ask(500, 1);
    assert_eq!((scan_ms, counts.scans, counts.failures), (500, 7, 0));
    (0..8).for_each(|_| _ = ask(500, 7));
    assert_eq!(ask(500, 1).0, 0);
}

#[test]
fn a_policy_has_pages_leave_at_once_and_shows_what_it_found() {
    let mut desk = desk(&text(
        IMPORTS,
        r#"(drop (call $reclaim_now (local.get $space) (local.get $page)))
           (if (call $show (i32.const 1) (i64.const 5)) (then (unreachable)))
           (if (call $show (i32.const -1) (i64.const 5)) (then (unreachable)))
           (if (i64.gt_u (local.get $page) (i64.const 40)) (then
            (if (i32.eqz (call $show (i32.const 0) (local.get $page))) (then (unreachable)))))"#,
        r#"(data (i32.const 8) "cold")
           (func (export "init")
            (drop (call $register (i32.const 8) (i32.const 4) (i64.const 1))))"#,
    ));
    let now = |page| Wish {
        what: What::ReclaimNow,
        ..wish(page)
    };
    assert_eq!(tell(&mut desk, Kind::Fault, 40), [now(40)]);
    assert_eq!(desk.take_shown(), [], "it has changed nothing");
    assert_eq!(tell(&mut desk, Kind::Fault, 41), [now(41)]);
    assert_eq!(
        (desk.take_shown(), desk.counts().failures),
        (vec![(0, 41)], 0)
    );
    assert_eq!(desk.take_shown(), [], "it was taken");
}

#[test]
fn a_flood_of_wishes_is_cut_and_counted() {
    let flood = r#"(local $n i64) (loop
        (drop (call $reclaim (local.get $space) (local.get $n)))
        (local.set $n (i64.add (local.get $n) (i64.const 1)))
        (br_if 0 (i64.lt_u (local.get $n) (i64.const 1000))))"#;
    let mut desk = desk(&text(IMPORTS, flood, ""));
    assert_eq!(tell(&mut desk, Kind::Fault, 0).len(), 512);
    assert_eq!(desk.counts().flooded, 488);
    assert_eq!(desk.counts().failures, 0);
}

#[test]
fn wishes_of_both_kinds_come_in_their_order_with_any_numbers_and_share_the_bound() {
    let both = r#"(local $n i64)
        (drop (call $prefetch (local.get $space) (i64.add (local.get $page) (i64.const 1))))
        (drop (call $reclaim (local.get $space) (local.get $page)))
        (drop (call $prefetch (i32.const -1) (i64.const -1)))
        (if (i64.ne (local.get $page) (i64.const 0)) (then (return)))
        (loop
            (drop (call $prefetch (local.get $space) (local.get $n)))
            (local.set $n (i64.add (local.get $n) (i64.const 1)))
            (br_if 0 (i64.lt_u (local.get $n) (i64.const 1000))))
        (if (call $reclaim (local.get $space) (i64.const 7)) (then (unreachable)))
        (if (call $prefetch (local.get $space) (i64.const 7)) (then (unreachable)))"#;
    let mut desk = desk(&text(IMPORTS, both, ""));
    let load = |space, page| Wish {
        what: What::Prefetch,
        space: SpaceId(space),
        page: VirtPage(page),
    };
    let all = [load(7, 41), wish(40), load(u32::MAX, u64::MAX)];
    assert_eq!(tell(&mut desk, Kind::Fault, 40), all);
    let flood = tell(&mut desk, Kind::Fault, 0);
    assert_eq!((flood.len(), desk.counts().flooded), (512, 1000 - 509 + 2));
    assert_eq!(desk.counts().failures, 0, "the refused ones were told so");
}

const OF_TIERS: &str = r#"
    (import "undercroft" "place" (func $place (param i32 i64 i32) (result i32)))
    (import "undercroft" "link_page" (func $link (param i32 i64 i64) (result i32)))
    (import "undercroft" "move_pages" (func $move (param i32 i64 i32 i32 i32) (result i32)))
    (import "undercroft" "get_tier_count" (func $tiers (result i32)))
    (import "undercroft" "get_tier" (func $tier (param i32 i32) (result i64)))"#;

#[test]
fn a_policy_of_tiers_asks_about_them_and_wishes_places_and_moves_within_bounds() {
    let mut desk = desk(&text(
        OF_TIERS,
        r#"(if (i32.ne (call $tiers) (i32.const 2)) (then (unreachable)))
           (if (i64.ne (call $tier (i32.const 1) (i32.const 0)) (i64.const 2))
            (then (unreachable)))
           (if (i64.ne (call $tier (i32.const 0) (i32.const 1)) (i64.const 100))
            (then (unreachable)))
           (if (i64.ne (call $tier (i32.const 1) (i32.const 2)) (i64.const 50))
            (then (unreachable)))
           (if (i64.ne (call $tier (i32.const 0) (i32.const 3)) (i64.const 7))
            (then (unreachable)))
           (if (i64.ne (call $tier (i32.const 2) (i32.const 0)) (i64.const -1))
            (then (unreachable)))
           (if (i64.ne (call $tier (i32.const -1) (i32.const 9)) (i64.const -1))
            (then (unreachable)))
           (drop (call $place (local.get $space) (local.get $page) (i32.const 1)))
           (drop (call $place (local.get $space) (local.get $page) (i32.const -1)))
           (drop (call $link (local.get $space) (local.get $page) (i64.const -1)))
           (if (call $move (local.get $space) (i64.const 0) (i32.const 0) (i32.const 0)
            (i32.const 1)) (then (unreachable)))
           (if (call $move (local.get $space) (i64.const 0) (i32.const 257) (i32.const 0)
            (i32.const 1)) (then (unreachable)))
           (if (i32.ne (call $move (local.get $space) (i64.const 512) (i32.const 256)
            (i32.const 0) (i32.const 1)) (i32.wrap_i64 (local.get $detail)))
            (then (unreachable)))"#,
        "",
    ));
    assert!(desk.asks_tiers() && !self::desk(&text(IMPORTS, "", "")).asks_tiers());
    let tier = |latency| Tier {
        latency,
        capacity: 100,
        free: 50,
        load_ns: 7,
    };
    let tiers = [LatencyClass::Memory, LatencyClass::Device].map(tier);
    desk.tiers(tiers.into_iter(), MovesFree { up: 0, down: 512 });
    let mut told = |detail| {
        let mut wishes = Vec::new();
        let event = Event::plain(Kind::Tick, detail);
        desk.hear(&event, &mut |wish: Wish| wishes.push(wish.what));
        (wishes, desk.counts().failures)
    };
    let [one, none] = [TierId(1), TierId(u8::MAX)].map(What::Place);
    let places = [one, none, What::Link(VirtPage(u64::MAX))];
    let moves = What::Move {
        pages: 256,
        from: TierId(0),
        to: TierId(1),
    };
    let both = [&places[..], &[moves]].concat();
    assert_eq!(told(1), (both.clone(), 0));
    assert_eq!(told(1), (both, 0));
    assert_eq!(told(0), (places.to_vec(), 0), "no more moves may wait");
    assert_eq!(desk.counts().flooded, 2 * 3 + 1);
}

/// A guest whose programs have page 5 in its page 9, by tables in its pages 1 to 4.
struct Small;

impl GuestMemory for Small {
    fn pages(&self) -> u64 {
        16
    }

    fn read(&self, page: u64, from: usize, words: &mut [u64]) -> bool {
        for (at, word) in words.iter_mut().enumerate() {
            *word = match (page, from + at) {
                (1..=3, 0) => (page + 1) << 12 | 7,
                (4, 5) => 9 << 12 | 7,
                _ => 0,
            };
        }
        true
    }
}

#[test]
fn a_policy_asks_for_pages_of_a_guests_program_there_and_back() {
    let of_guests = r#"
        (import "undercroft" "gva_to_hva" (func $hva (param i32 i64 i64) (result i64)))
        (import "undercroft" "hva_to_gva" (func $gva (param i32 i64 i64) (result i64)))
        (import "undercroft" "get_fault_cr3" (func $cr3 (result i64)))"#;
    let mut desk = desk(&text(
        of_guests,
        r#"(if (i64.ne (call $hva (local.get $space) (call $cr3) (local.get $page))
                (local.get $detail)) (then (unreachable)))
           (if (i64.lt_s (local.get $detail) (i64.const 0)) (then (return)))
           (if (i64.ne (call $gva (local.get $space) (call $cr3) (local.get $detail))
                (local.get $page)) (then (unreachable)))"#,
        "",
    ));
    assert!(desk.asks_instructions() && desk.lacks_guest());
    assert!(!self::desk(&text("", "", "")).lacks_guest());
    desk.show_guest(Guest::new(SpaceId(7), Box::new(Small), 1));
    assert!(!desk.lacks_guest());
    let unknown = -1i64 as u64;
    for (space, cr3, page, found) in [
        (7, 0x1000, 5, 9),
        (7, 0x1000, 6, unknown),
        (7, 0x5000, 5, unknown),
        (7, 0, 5, unknown),
        (7, 0x1000, u64::MAX, unknown),
        (8, 0x1000, 6, 6),
    ] {
        let event = Event {
            space: SpaceId(space),
            page,
            cr3,
            ..Event::plain(Kind::Fault, found)
        };
        desk.hear(&event, &mut |_| ());
        assert_eq!(desk.counts().failures, 0, "{event:?}");
    }
}

/// A file of the time before there were guests asks without tables, and gets the page itself.
#[test]
fn an_older_policy_asks_as_it_did() {
    let traps_unless_same = r#"(if (i64.ne (call $hva (local.get $space) (local.get $page))
        (local.get $page)) (then (unreachable)))"#;
    let mut desk = desk(&text(IMPORTS, traps_unless_same, ""));
    desk.show_guest(Guest::new(SpaceId(7), Box::new(Small), 1));
    tell(&mut desk, Kind::Fault, 5);
    assert_eq!(desk.counts().failures, 0);
}

#[test]
fn no_file_takes_more_than_a_small_stack() {
    let deep = |open: &str, close: &str| format!("{}{}", open.repeat(20_000), close.repeat(20_000));
    let locals = "(local i64) ".repeat(20_000);
    let targets = "0 ".repeat(50_000);
    let bodies = [
        "loop br 0 end".to_owned(),
        "call $self".to_owned(),
        "call $tail".to_owned(),
        "i32.const 0 i32.const 0 call_indirect (type $none)".to_owned(),
        deep("block ", "end "),
        format!("{} loop br 0 end", deep("loop ", "end ")),
        deep("i32.const 1 if ", "end "),
        deep("i32.const 1 ", "drop "),
        format!("{locals} call $self"),
        format!("block i32.const 7 br_table {targets} end call $self"),
        "loop i32.const 0 i32.const 0 i32.const 65536 memory.fill br 0 end".to_owned(),
    ];
    let more = r#"(type $none (func)) (table 1 funcref) (elem (i32.const 0) $around)
        (func $self (local i64 i64 i64 i64 i64 i64 i64 i64) call $self)
        (func $around i32.const 0 call_indirect (type $none))
        (func $tail return_call $tail)"#;
    let files = bodies.map(|body| text("", &body, more));
    let thread = std::thread::Builder::new().stack_size(512 << 10);
    let thread = thread.spawn(move || {
        for bytes in files {
            // A refusal is good, too: what counts is that the thread's stack suffices.
            if let Ok(plugin) = Plugin::read(&bytes, &mut Host::default()) {
                let mut desk = Desk::new(Box::new(plugin));
                tell(&mut desk, Kind::Fault, 0);
            }
        }
    });
    thread.expect("a thread").join().expect("no panic");
}
