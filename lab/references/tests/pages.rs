//! References by page, and only references.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use undercroft_references::{Analysis, PageTrace, Sampling};
use undercroft_trace::{
    Access, Event, Header, Kind, Movement, Reference, TraceReader, TraceWriter,
};

#[test]
fn movements_are_neither_analysed_nor_gathered() {
    let header = Header {
        granularity: 12,
        live: true,
        movements: true,
        ..Header::default()
    };
    let mut writer = TraceWriter::new(Vec::new(), header).unwrap();
    for n in 0..80u64 {
        let kind = match n % 3 {
            0 => Kind::Movement(Movement::Evicted),
            _ => Kind::Access(Access::Write),
        };
        let event = Event {
            time: n,
            address: n << 12,
            kind,
            client: 0,
            thread: 0,
        };
        writer.write_event(event).unwrap();
    }
    let bytes = writer.finish(80).unwrap().1;
    let mut reader = TraceReader::new(bytes.as_slice()).unwrap();
    let analysis = Analysis::read(&mut reader, 12, Sampling::Exact, |_| ()).unwrap();
    assert_eq!(analysis.accesses().total(), 53);
    let pages = PageTrace::read(TraceReader::new(bytes.as_slice()).unwrap(), 12, false).unwrap();
    assert_eq!(pages.entries.len(), 53);
}

#[test]
fn page_trace_numbers_pages_by_first_touch_and_keeps_clients_apart() {
    let at = |address, client| Reference {
        time: address,
        address,
        access: Access::Write,
        client,
        thread: 0,
    };
    let header = Header {
        clients: vec![String::new(); 2],
        ..Header::default()
    };
    let references = [
        at(0x1000, 0),
        at(0x1fff, 0),
        at(0x2000, 0),
        at(0x2000, 1),
        at(0x2001, 0),
    ];
    let mut writer = TraceWriter::new(Vec::new(), header.clone()).unwrap();
    for reference in &references[..4] {
        writer.write(*reference).unwrap();
    }
    let bytes = writer.finish(0).unwrap().1;
    let trace = PageTrace::read(TraceReader::new(bytes.as_slice()).unwrap(), 12, true).unwrap();
    let pages: Vec<u32> = trace.entries.iter().map(|entry| entry.page).collect();
    assert_eq!(pages, [0, 0, 1, 2]);
    assert_eq!(trace.pages, [(0, 1), (0, 2), (1, 2)]);
    assert_eq!(trace.times, [0x1000, 0x1fff, 0x2000, 0x2000]);
    assert_eq!(trace.totals.writes, 4);
    let same = PageTrace::from_references(header, references, 9, false).unwrap();
    assert_eq!(same.pages.len(), 4);
    let coarse = Header {
        granularity: 12,
        ..Header::default()
    };
    assert!(PageTrace::from_references(coarse, [], 9, false).is_err());
}
