//! The trace format: written traces read back the same, and no damage to a file is read as data.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use proptest::prelude::*;
use undercroft_trace::{
    Access, Event, Header, Kind, Movement, Reference, TimeUnit, TraceError, TraceReader,
    TraceWriter, WriteError, fuzz,
};

fn write(header: Header, references: &[Reference], time_end: u64) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), header).unwrap();
    for reference in references {
        writer.write(*reference).unwrap();
    }
    writer.finish(time_end).unwrap().1
}

fn read(bytes: &[u8]) -> Result<(Header, Vec<Reference>), TraceError> {
    let mut reader = TraceReader::new(bytes)?;
    let references = reader.by_ref().collect::<Result<Vec<_>, _>>()?;
    let totals = reader.totals().expect("the end was read");
    assert_eq!(totals.references(), references.len() as u64);
    Ok((reader.header().clone(), references))
}

fn access(number: u64) -> Access {
    [Access::Instruction, Access::Read, Access::Write][number as usize % 3]
}

/// A trace with blocks of several lengths, two clients, all kinds.
fn small() -> (Header, Vec<Reference>, Vec<u8>) {
    let header = Header {
        command: vec!["prog".to_owned(), "--ünicode".to_owned()],
        clients: vec!["a".to_owned(), "b".to_owned()],
        source: "a test".to_owned(),
        time_unit: TimeUnit::Nanoseconds,
        filtered: true,
        ..Header::default()
    };
    let references: Vec<Reference> = (0..60u64)
        .map(|n| Reference {
            time: n * n * 3,
            address: 0x7fff_0000_0000 ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (n % 50),
            access: access(n),
            client: (n / 20 % 2) as u16,
            thread: (n / 7) as u16,
        })
        .collect();
    let mut writer = TraceWriter::new(Vec::new(), header.clone()).unwrap();
    for (n, reference) in references.iter().enumerate() {
        writer.write(*reference).unwrap();
        if n == 10 || n == 11 {
            writer.flush_block().unwrap();
        }
    }
    let bytes = writer.finish(20_000).unwrap().1;
    (header, references, bytes)
}

fn write_events(header: Header, events: &[Event], time_end: u64) -> Vec<u8> {
    let mut writer = TraceWriter::new(Vec::new(), header).unwrap();
    for event in events {
        writer.write_event(*event).unwrap();
    }
    writer.finish(time_end).unwrap().1
}

fn read_events(bytes: &[u8]) -> Result<Vec<Event>, TraceError> {
    let mut reader = TraceReader::new(bytes)?;
    let mut events = Vec::new();
    while reader.next_events(&mut events)? {}
    Ok(events)
}

/// A live trace: every kind of entry, some blocks of one kind only.
fn live() -> (Vec<Event>, Vec<u8>) {
    let header = Header {
        granularity: 12,
        live: true,
        movements: true,
        accesses: true,
        locks: true,
        forks: true,
        clients: vec!["a".to_owned(), "b".to_owned()],
        ..Header::default()
    };
    let kinds: Vec<Kind> = [Access::Instruction, Access::Read, Access::Write]
        .map(Kind::Access)
        .into_iter()
        .chain(Movement::ALL.map(Kind::Movement))
        .collect();
    let events: Vec<Event> = (0..80u64)
        .map(|n| Event {
            time: n * 5,
            address: (n * n * 7 % 1000) << 12,
            kind: match n {
                20..40 => Kind::Movement(Movement::Evicted),
                40..50 => Kind::Access(Access::Write),
                n => kinds[n as usize % kinds.len()],
            },
            client: (n / 30 % 2) as u16,
            thread: (n / 9 % 3) as u16,
        })
        .collect();
    let mut writer = TraceWriter::new(Vec::new(), header).unwrap();
    for (n, event) in events.iter().enumerate() {
        writer.write_event(*event).unwrap();
        if matches!(n, 19 | 39 | 49) {
            writer.flush_block().unwrap();
        }
    }
    let bytes = writer.finish(400).unwrap().1;
    (events, bytes)
}

#[test]
fn movements_come_back_in_their_places_and_are_no_references() {
    let (events, bytes) = live();
    assert_eq!(read_events(&bytes).unwrap(), events);
    let references: Vec<Reference> = events.iter().filter_map(|e| e.reference()).collect();
    assert!(references.len() < events.len() - 20);
    let (header, iterated) = read(&bytes).unwrap();
    assert!(header.movements);
    assert_eq!(iterated, references);
    let mut reader = TraceReader::new(bytes.as_slice()).unwrap();
    let (mut in_blocks, mut blocks) = (Vec::new(), 0);
    while reader.next_block(&mut in_blocks).unwrap() {
        blocks += 1;
    }
    assert_eq!((in_blocks, blocks), (references.clone(), 4));
    let totals = *reader.totals().unwrap();
    for movement in Movement::ALL {
        let moved = |event: &&Event| event.kind == Kind::Movement(movement);
        let count = events.iter().filter(moved).count() as u64;
        assert_eq!(totals.moved(movement), count);
        assert!(count > 0);
    }
    assert_eq!(totals.entries(), events.len() as u64);
    fuzz::trace(&bytes);
}

#[test]
fn a_live_trace_cut_or_damaged_anywhere_is_refused_with_the_byte() {
    let (events, bytes) = live();
    for length in 0..bytes.len() {
        fuzz::trace(&bytes[..length]);
        let error = read_events(&bytes[..length]).expect_err("a cut trace");
        match error {
            TraceError::Truncated { offset, .. } => assert_eq!(offset, length as u64),
            TraceError::NotATrace { .. } => assert_eq!(length, 0),
            error => panic!("cut at {length}: {error}"),
        }
    }
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            let error = read_events(&bad).expect_err("a flipped bit");
            assert!(error.to_string().contains("byte "), "{error}");
            let Ok(mut reader) = TraceReader::new(bad.as_slice()) else {
                continue;
            };
            let mut good = Vec::new();
            while let Ok(true) = reader.next_events(&mut good) {}
            assert_eq!(good, events[..good.len()], "byte {at}, bit {bit}");
        }
    }
}

#[test]
fn movements_without_their_flag_are_neither_written_nor_read() {
    let (events, bytes) = live();
    let moved = events[30];
    let mut writer = TraceWriter::new(Vec::new(), Header::default()).unwrap();
    let refused = writer.write_event(moved).unwrap_err();
    assert!(
        matches!(refused, WriteError::Unannounced { index: 0 }),
        "{refused}"
    );
    // A file that was made to say so: the first movement is the fourth entry of the first block.
    let mut bad = bytes.clone();
    (bad[12], bad[13]) = (bad[12] & !(8 | 16 | 32), 0);
    let bad = fuzz::mended(&bad);
    let block = bad.windows(4).position(|at| at == b"REFS").unwrap();
    let error = read(&bad).unwrap_err();
    assert_eq!(error.offset(), block as u64, "{error}");
    let text = error.to_string();
    assert!(text.contains("byte 3 of its columns: a movement"), "{text}");
    // And the other way round: the end block lacks the counts.
    let (_, _, bytes) = small();
    let mut bad = bytes.clone();
    bad[12] |= 8;
    let error = read_events(&fuzz::mended(&bad)).unwrap_err();
    assert!(matches!(error, TraceError::Truncated { .. }), "{error}");
    // A flag of tomorrow, and those of yesterday.
    for (at, flag, says) in [
        (13, 2, "unknown"),
        (12, 64, "record the run again"),
        (12, 128, "record the run again"),
    ] {
        let mut bad = bytes.clone();
        bad[at] |= flag;
        let error = read(&fuzz::mended(&bad)).unwrap_err();
        assert_eq!(error.offset(), 12, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
}

/// Kinds of movements that have a flag of their own: which, how errors call the first, and the
/// header without the flag.
type Later = (&'static [Movement], u32, &'static str, fn(Header) -> Header);
const LATER: [Later; 3] = [
    (&[Movement::Accessed], 16, "a use of a page", |header| {
        Header {
            accesses: false,
            ..header
        }
    }),
    (&[Movement::Locked], 32, "a locked page", |header| Header {
        locks: false,
        ..header
    }),
    (
        &[Movement::Forked, Movement::Ended, Movement::Shared],
        256,
        "a fork",
        |header| Header {
            forks: false,
            ..header
        },
    ),
];

#[test]
fn later_kinds_of_movements_need_flags_of_their_own() {
    let (events, bytes) = live();
    let header = TraceReader::new(bytes.as_slice()).unwrap().header().clone();
    for (at, (movements, flag, called, without)) in LATER.into_iter().enumerate() {
        let is = |event: &Event| movements.iter().any(|m| event.kind == Kind::Movement(*m));
        let without = without(header.clone());
        for movement in movements {
            let mut writer = TraceWriter::new(Vec::new(), without.clone()).unwrap();
            let kind = Kind::Movement(*movement);
            let event = events.iter().find(|event| event.kind == kind).unwrap();
            let refused = writer.write_event(*event).unwrap_err();
            assert!(
                matches!(refused, WriteError::Unannounced { index: 0 }),
                "{movement:?}: {refused}"
            );
        }
        // The counts of the others stay where they are: only the last kinds' are left out.
        let some: Vec<Event> = events.iter().copied().filter(|e| !is(e)).collect();
        let some_bytes = write_events(without, &some, 400);
        let counts = match flag {
            256 => 8,
            _ => 11,
        };
        let end = some_bytes.len() - (60 + 8 * counts);
        assert_eq!(&some_bytes[end..][..4], b"END.", "flag {flag}");
        assert_eq!(read_events(&some_bytes).unwrap(), some);
        // A file that was made to have them.
        let flags = u32::from(bytes[12]) | u32::from(bytes[13]) << 8;
        let put = |bytes: &mut Vec<u8>, flags: u32| {
            bytes[12..14].copy_from_slice(&(flags as u16).to_le_bytes());
        };
        let mut bad = bytes.clone();
        put(&mut bad, flags & !flag);
        let error = read_events(&fuzz::mended(&bad)).unwrap_err();
        let block = bad.windows(4).position(|at| at == b"REFS").unwrap();
        assert_eq!(error.offset(), block as u64, "{error}");
        assert!(error.to_string().contains(called), "{error}");
        // They are movements: the flag does not stand alone, written or read.
        let plain = Header {
            movements: false,
            accesses: false,
            locks: false,
            forks: false,
            ..header.clone()
        };
        let with: [fn(&mut Header) -> &mut bool; 3] =
            [|h| &mut h.accesses, |h| &mut h.locks, |h| &mut h.forks];
        let mut alone = plain.clone();
        *with[at](&mut alone) = true;
        assert!(TraceWriter::new(Vec::new(), alone).is_err(), "flag {flag}");
        assert!(TraceWriter::new(Vec::new(), plain).is_ok());
        let mut bad = bytes.clone();
        put(&mut bad, flags & !(8 | 16 | 32 | 256) | flag);
        let error = read(&fuzz::mended(&bad)).unwrap_err();
        assert_eq!(error.offset(), 12, "{error}");
    }
    // Without any, a trace is as it was before they existed: the end block counts six kinds.
    let first = LATER
        .iter()
        .fold(header, |header, (.., without)| without(header));
    let later = LATER.iter().flat_map(|later| later.0);
    let later: Vec<Kind> = later.map(|movement| Kind::Movement(*movement)).collect();
    let old = |e: &Event| !later.contains(&e.kind);
    let old: Vec<Event> = events.iter().copied().filter(old).collect();
    let old_bytes = write_events(first, &old, 400);
    assert_eq!(&old_bytes[old_bytes.len() - 108..][..4], b"END.");
    assert_eq!(read_events(&old_bytes).unwrap(), old);
}

#[test]
fn the_end_block_must_count_movements_right() {
    let (_, bytes) = live();
    let end = bytes.len() - 148;
    assert_eq!(&bytes[end..end + 4], b"END.");
    for field in 0..11 {
        let mut bad = bytes.clone();
        bad[end + 56 + 8 * field] ^= 1;
        let error = read_events(&fuzz::mended(&bad)).unwrap_err();
        assert!(
            matches!(error, TraceError::Corrupt { offset, .. } if offset == end as u64),
            "{error}"
        );
    }
    assert!(read_events(&fuzz::mended(&bytes)).is_ok());
}

#[test]
fn small_trace_comes_back() {
    let (header, references, bytes) = small();
    let (header_read, references_read) = read(&bytes).unwrap();
    assert_eq!(header_read, header);
    assert_eq!(references_read, references);
    fuzz::trace(&bytes);
}

#[test]
fn trace_of_many_blocks_comes_back_both_ways() {
    let references: Vec<Reference> = (0..200_000u64)
        .map(|n| Reference {
            time: n,
            address: (n * 64) % (1 << 20),
            access: access(n / 5),
            client: 0,
            thread: 0,
        })
        .collect();
    let bytes = write(Header::default(), &references, 0);
    assert_eq!(read(&bytes).unwrap().1, references);
    // Half by one way, the rest by the other.
    let mut reader = TraceReader::new(bytes.as_slice()).unwrap();
    let mut got: Vec<Reference> = reader.by_ref().take(70_000).map(|r| r.unwrap()).collect();
    while reader.next_block(&mut got).unwrap() {}
    assert_eq!(got, references);
    assert!(bytes.len() < 200_000, "{} bytes", bytes.len());
}

#[test]
fn empty_trace_comes_back() {
    let bytes = write(Header::default(), &[], 7);
    let mut reader = TraceReader::new(bytes.as_slice()).unwrap();
    assert!(reader.next().is_none());
    assert_eq!(reader.totals().unwrap().time_end, 7);
}

#[test]
fn trace_cut_at_any_byte_is_told_with_its_length() {
    let (_, references, bytes) = small();
    for length in 0..bytes.len() {
        fuzz::trace(&bytes[..length]);
        let error = read(&bytes[..length]).expect_err("a cut trace");
        match error {
            TraceError::Truncated { offset, .. } => assert_eq!(offset, length as u64),
            TraceError::NotATrace { .. } => assert_eq!(length, 0),
            error => panic!("cut at {length}: {error}"),
        }
        // The entries given out before the error are right.
        let Ok(reader) = TraceReader::new(&bytes[..length]) else {
            continue;
        };
        let good: Vec<Reference> = reader.map_while(Result::ok).collect();
        assert_eq!(good, references[..good.len()]);
    }
}

#[test]
fn every_flipped_bit_is_found() {
    let (_, references, bytes) = small();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            let error = read(&bad).expect_err("a flipped bit");
            assert!(error.offset() <= bytes.len() as u64, "{at}.{bit}: {error}");
            assert!(error.to_string().contains("byte "), "{error}");
            if let Ok(reader) = TraceReader::new(bad.as_slice()) {
                let good: Vec<Reference> = reader.map_while(Result::ok).collect();
                assert_eq!(good, references[..good.len()], "byte {at}, bit {bit}");
            }
        }
    }
}

#[test]
fn blocks_that_are_missing_doubled_or_swapped_are_found() {
    let (_, _, bytes) = small();
    let starts: Vec<usize> = (0..bytes.len() - 4)
        .filter(|at| &bytes[*at..at + 4] == b"REFS" || &bytes[*at..at + 4] == b"END.")
        .collect();
    assert_eq!(starts.len(), 4);
    let [a, b, c, end] = starts[..] else { panic!() };
    let parts = |ranges: &[std::ops::Range<usize>]| -> Vec<u8> {
        ranges
            .iter()
            .flat_map(|r| bytes[r.clone()].to_vec())
            .collect()
    };
    for (what, bad) in [
        ("missing", parts(&[0..b, c..bytes.len()])),
        ("missing last", parts(&[0..c, end..bytes.len()])),
        ("doubled", parts(&[0..b, a..bytes.len()])),
        ("swapped", parts(&[0..a, b..c, a..b, c..bytes.len()])),
        ("two ends", parts(&[0..bytes.len(), end..bytes.len()])),
        ("nothing but the end", parts(&[0..a, end..bytes.len()])),
    ] {
        let error = read(&bad).expect_err(what);
        println!("{what}: {error}");
    }
}

#[test]
fn versions_and_strangers_are_refused_by_name() {
    let (_, _, mut bytes) = small();
    bytes[8] = 9;
    let error = read(&bytes).unwrap_err().to_string();
    assert!(
        error.contains("byte 8") && error.contains("version 9"),
        "{error}"
    );
    let error = read(b"#!/bin/sh\necho hello, this is no trace\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("not an Undercroft trace") && error.contains("#!/bin/s"),
        "{error}"
    );
    let error = read(b"").unwrap_err().to_string();
    assert!(error.contains("empty"), "{error}");
    let error = read(b"UCTRA").unwrap_err();
    assert!(
        matches!(error, TraceError::Truncated { offset: 5, .. }),
        "{error}"
    );
}

#[test]
fn header_that_claims_a_huge_text_is_refused_before_it_is_read() {
    let (_, _, mut bytes) = small();
    bytes[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = read(&bytes).unwrap_err();
    assert!(
        matches!(error, TraceError::Corrupt { offset: 16, .. }),
        "{error}"
    );
}

#[test]
fn references_against_the_header_are_not_written() {
    let header = Header {
        granularity: 12,
        ..Header::default()
    };
    let mut writer = TraceWriter::new(Vec::new(), header).unwrap();
    let good = Reference {
        time: 5,
        address: 0x3000,
        access: Access::Read,
        client: 0,
        thread: 3,
    };
    writer.write(good).unwrap();
    let refused =
        |reference, writer: &mut TraceWriter<Vec<u8>>| writer.write(reference).unwrap_err();
    assert!(matches!(
        refused(Reference { time: 4, ..good }, &mut writer),
        WriteError::TimeGoesBack {
            time: 4,
            last: 5,
            ..
        }
    ));
    assert!(matches!(
        refused(
            Reference {
                address: 0x3001,
                ..good
            },
            &mut writer
        ),
        WriteError::Misaligned { .. }
    ));
    assert!(matches!(
        refused(Reference { client: 1, ..good }, &mut writer),
        WriteError::UnknownClient { .. }
    ));
    let bytes = writer.finish(5).unwrap().1;
    assert_eq!(read(&bytes).unwrap().1, [good]);
    let nobody = Header {
        clients: Vec::new(),
        ..Header::default()
    };
    assert!(TraceWriter::new(Vec::new(), nobody).is_err());
}

/// Mutated traces through the function that the fuzz target runs; fixed seeds, so that a failure
/// comes back.
#[test]
fn fuzz_entry_holds_on_mutated_traces() {
    let traces = [small().2, live().1];
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut mended = 0;
    for round in 0..6_000 {
        let mut bad = traces[round % 2].clone();
        for _ in 0..=random(4) {
            let at = random(bad.len());
            match random(5) {
                0 => bad[at] = random(256) as u8,
                1 => bad.truncate(at.max(1)),
                2 => bad.insert(at, random(256) as u8),
                3 => {
                    let end = (at + random(40)).min(bad.len());
                    let copy = bad[at..end].to_vec();
                    let to = random(bad.len());
                    bad.splice(to..to, copy);
                }
                _ => bad[at..].rotate_left(1),
            }
        }
        mended += fuzz::trace(&bad);
    }
    assert!(
        mended > 1_000,
        "only {mended} references passed: the checksums kept all else out"
    );
    let mut decoded = 0;
    // Columns by themselves: as they should be, and then often not.
    for _ in 0..50_000 {
        let count = random(6) + 1;
        let mut columns = vec![count as u8 - 1];
        let mut owners = 0;
        for _ in 0..count {
            let owner = random(2);
            owners += owner;
            let kinds = [0, 1, 2, 3, 0b1011, 0b10011, 0b11011, 0b100011, 0b101011];
            columns.push(kinds[random(9)] + 4 * owner as u8);
        }
        columns.push(0);
        for _ in 1..2 * count {
            columns.push(random(128) as u8);
        }
        for _ in 0..2 * owners {
            columns.push(random(3) as u8);
        }
        if random(2) == 0 {
            let at = random(columns.len());
            columns[at] = random(256) as u8;
        }
        decoded += fuzz::trace(&columns);
    }
    assert!(
        decoded > 1_000,
        "only {decoded} references passed: the decoder was hardly reached"
    );
}

prop_compose! {
    fn references(granularity: u8)(steps in prop::collection::vec(
        (0u64..1 << 40, any::<u64>(), 0u64..3, 0u16..3, prop_oneof![0u16..3, any::<u16>()]), 0..300))
        -> Vec<Reference> {
        let mut time = 0;
        steps.into_iter().map(|(step, address, kind, client, thread)| {
            time += step;
            Reference { time, address: address >> granularity << granularity, access: access(kind), client, thread }
        }).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_references_come_back((granularity, references) in (0u8..=30).prop_flat_map(|g| (Just(g), references(g)))) {
        let header = Header {
            granularity,
            clients: vec!["x".to_owned(); 3],
            synthetic: true,
            ..Header::default()
        };
        let bytes = write(header.clone(), &references, u64::MAX);
        let (header_read, back) = read(&bytes).unwrap();
        prop_assert_eq!(header_read, header.clone());
        prop_assert_eq!(back, &references[..]);
        // The same with every other one a movement.
        let moved = references.iter().enumerate().map(|(n, reference)| match n % 2 {
            0 => Event::from(*reference),
            _ => Event { kind: Kind::Movement(Movement::ALL[n / 2 % Movement::ALL.len()]), ..Event::from(*reference) },
        });
        let events: Vec<Event> = moved.collect();
        let header = Header {
            movements: true,
            accesses: true,
            locks: true,
                forks: true,
            ..header
        };
        let bytes = write_events(header, &events, u64::MAX);
        prop_assert_eq!(read_events(&bytes).unwrap(), events);
    }
}
