//! Records a live run as a trace: page faults, and all other movements of pages. A thread of its
//! own writes the file.
//!
//! The engine reports each event ([`Journal`]) while it is locked, so the queue has the order of
//! the books. No thread waits for the file: an event that does not fit the queue is dropped and
//! counted.
//!
//! Each address space is one client of the trace. The number of an address space that has ended is
//! used again. The trace has what the manager sees. A use of a resident page raises no fault, so
//! only a scan of Accessed bits shows it.

mod known;
mod writer;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use undercroft_base::{BASE_PAGE_BYTES, SpaceId, ThreadId, VirtPage};
use undercroft_engine::{BookEvent, Fault, Journal, PageEvent};
use undercroft_trace::{Header, Movement, TimeUnit, TraceWriter, WriteError};
use undercroft_trace::{PASSED_OVER, TAKEN_BACK};

use crate::sync::lock;

use writer::Out;

/// Entries that may wait to be written: as many faults and evictions as a CPU can do in a quarter
/// of a second.
const QUEUE_MAX: usize = 1 << 16;

/// Further entries, only for forks and ends of processes: without those, later entries of a process
/// would be misread.
const QUEUE_SPARE: usize = 1 << 12;

/// With this many entries the writer is woken early.
const QUEUE_FULL: usize = QUEUE_MAX / 4;

/// Movements that are reported page by page for many pages in a row.
const RUNS: [Movement; 4] = [
    Movement::Found,
    Movement::Shared,
    Movement::Accessed,
    Movement::Locked,
];

/// Longest time that an entry waits.
const NAP: Duration = Duration::from_millis(50);

/// Address spaces of one trace at a time. Events of further ones are dropped and counted.
const CLIENTS: u16 = 256;

// The writer is woken before uses are dropped, which is at half of the queue.
const _: () = assert!(QUEUE_FULL < QUEUE_MAX / 2 && QUEUE_SPARE < QUEUE_FULL);

/// Why there is no trace, or only the first part of one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// The file cannot be made or written, or there is no thread for it. Nothing is recorded.
    #[error(
        "cannot write the trace {}: {}; give --trace a file that can be written",
        .path.display(),
        reason(.why)
    )]
    NotStarted { path: PathBuf, why: WriteError },
    /// The file has what was recorded before.
    #[error(
        "the trace {} ends early: {}; give --trace a file with room for all of it",
        .path.display(),
        reason(.why)
    )]
    EndsEarly { path: PathBuf, why: WriteError },
    /// A defect: it was reported when it happened.
    #[error("the trace ends early: its writer failed")]
    WriterFailed,
}

/// The system's reason, if it is one.
fn reason(why: &WriteError) -> String {
    match why {
        WriteError::Io(error) => error.to_string(),
        other => other.to_string(),
    }
}

/// Event of the pages from `Seen::page` on.
#[derive(Clone, Copy, Debug)]
enum What {
    /// A fault brought it in.
    Fault { write: bool, thread: ThreadId },
    /// This many pages moved. The number is what the trace has in the thread's place.
    Moved(Movement, u16, u64),
    /// The page was chosen to leave.
    Left,
    /// The program dropped this many pages. The trace gets those that it knows.
    Dropped(u64),
    /// This many pages moved to another address.
    Remapped(u64, VirtPage),
    /// The address space begins as a fork child's.
    Forked { parent: SpaceId },
    /// The address space is gone.
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    time: u64,
    space: SpaceId,
    page: VirtPage,
    what: What,
}

#[derive(Default)]
struct Queue {
    seen: Vec<Seen>,
    /// Faults of threads that wait for pages on their way out.
    waiting: Vec<Fault>,
    ends: bool,
}

/// State that the recording threads share with the writer.
struct Inbox {
    queue: Mutex<Queue>,
    wake: Condvar,
    dropped: AtomicU64,
    started: Instant,
}

/// The recorder of one run.
pub(crate) struct Record {
    inbox: Arc<Inbox>,
    writer: Mutex<Option<JoinHandle<Result<(), RecordError>>>>,
}

impl Record {
    /// Starts a trace in a new file, and its writer.
    /// * `settings`: options of the run, after the version; docs/formats/trace.md has those that
    ///   the simulator reads.
    /// * `accesses`: uses of resident pages are recorded too.
    ///
    /// Errors: [`RecordError::NotStarted`].
    pub(crate) fn create(
        path: &Path,
        command: &[String],
        settings: &str,
        accesses: bool,
    ) -> Result<Record, RecordError> {
        let started = File::create(path)
            .map_err(WriteError::from)
            .and_then(|file| Record::start(file, path, command, settings, accesses));
        started.map_err(|why| RecordError::NotStarted {
            path: path.to_owned(),
            why,
        })
    }

    fn start<W: Write + Send + 'static>(
        output: W,
        path: &Path,
        command: &[String],
        settings: &str,
        accesses: bool,
    ) -> Result<Record, WriteError> {
        let header = Header {
            granularity: BASE_PAGE_BYTES.trailing_zeros() as u8,
            time_unit: TimeUnit::Nanoseconds,
            filtered: false,
            synthetic: false,
            live: true,
            movements: true,
            accesses,
            locks: true,
            forks: true,
            command: command.to_vec(),
            clients: (0..CLIENTS).map(|at| format!("space {at}")).collect(),
            source: format!("undercroft {} run, {settings}", env!("CARGO_PKG_VERSION")),
        };
        let inbox = Arc::new(Inbox {
            queue: Mutex::new(Queue {
                seen: Vec::with_capacity(QUEUE_MAX + QUEUE_SPARE),
                ..Queue::default()
            }),
            wake: Condvar::new(),
            dropped: AtomicU64::new(0),
            started: Instant::now(),
        });
        let out = Out::new(inbox.clone(), path, TraceWriter::new(output, header)?);
        let writer = std::thread::Builder::new()
            .name("uc-trace".into())
            .spawn(move || out.run())?;
        Ok(Record {
            inbox,
            writer: Mutex::new(Some(writer)),
        })
    }

    /// Queues an event of the engine. On the fault path: no allocation, no I/O.
    fn take(&self, event: BookEvent) {
        match event {
            BookEvent::Faulted(fault) => {
                let (write, thread) = (fault.write, fault.thread);
                self.push(fault.space, fault.page, What::Fault { write, thread });
            }
            BookEvent::Waits(fault) => self.waits(fault),
            BookEvent::BatchBegan => lock(&self.inbox.queue).waiting.clear(),
            BookEvent::Page(space, page, PageEvent::Chosen) => {
                self.push(space, page, What::Left);
            }
            BookEvent::Page(space, page, PageEvent::PutBack) => self.put_back(space, page),
            BookEvent::Page(space, page, what) => {
                let why = match what {
                    PageEvent::Kept => PASSED_OVER,
                    PageEvent::TakenBack => TAKEN_BACK,
                    _ => 0,
                };
                self.moved(space, page, (movement(what), why), 1);
            }
            BookEvent::Stored(..) | BookEvent::Migrated(..) | BookEvent::Loaded(..) => {}
            BookEvent::Locked(space, range) => {
                self.moved(space, range.start, (Movement::Locked, 0), range.count().0);
            }
            BookEvent::Dropped(space, range) => {
                self.push(space, range.start, What::Dropped(range.count().0));
            }
            BookEvent::Moved(space, from, to) => {
                let count = from.count().0;
                self.push(space, to, What::Dropped(count));
                self.push(space, from.start, What::Remapped(count, to));
            }
            BookEvent::Forked { parent, child } => {
                self.push(child, VirtPage(0), What::Forked { parent });
            }
            BookEvent::Ended(space) => self.push(space, VirtPage(0), What::Ended),
        }
    }

    /// Queues a movement of pages without a reference. Movements of consecutive pages are one
    /// entry, because a discovery and a scan report very many. Uses are dropped first.
    fn moved(&self, space: SpaceId, page: VirtPage, what: (Movement, u16), pages: u64) {
        let mut queue = lock(&self.inbox.queue);
        let (movement, number) = what;
        if movement == Movement::Accessed && queue.seen.len() >= QUEUE_MAX / 2 {
            self.inbox.dropped.fetch_add(pages, Ordering::Relaxed);
            return;
        }
        if let Some(Seen {
            space: last,
            page: first,
            what: What::Moved(same, same_number, count),
            ..
        }) = queue.seen.last_mut()
            && (*last, *same, *same_number) == (space, movement, number)
            && first.plus(*count) == page
            && RUNS.contains(&movement)
        {
            *count += pages;
            return;
        }
        self.push_to(queue, space, page, What::Moved(movement, number, pages));
    }

    /// Notes that a thread faulted on a page that is being evicted, and waits. [`Record::put_back`]
    /// follows, or the thread faults again.
    fn waits(&self, fault: Fault) {
        let mut queue = lock(&self.inbox.queue);
        let waits = |waiting: &Fault| (waiting.space, waiting.page) == (fault.space, fault.page);
        if !queue.waiting.iter().any(waits) {
            queue.waiting.push(fault);
        }
    }

    /// Queues the return of a page that was taken out. If a thread waits for it, this is a fault.
    /// Otherwise no tier took the page.
    fn put_back(&self, space: SpaceId, page: VirtPage) {
        let mut queue = lock(&self.inbox.queue);
        let waits = |waiting: &Fault| (waiting.space, waiting.page) == (space, page);
        let at = queue.waiting.iter().position(waits);
        let what = match at.map(|at| queue.waiting.swap_remove(at)) {
            Some(Fault { write, thread, .. }) => What::Fault { write, thread },
            None => What::Moved(Movement::Returned, 0, 1),
        };
        self.push_to(queue, space, page, what);
    }

    fn push(&self, space: SpaceId, page: VirtPage, what: What) {
        self.push_to(lock(&self.inbox.queue), space, page, what);
    }

    /// As [`Record::push`], to a queue that is locked already.
    fn push_to(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        space: SpaceId,
        page: VirtPage,
        what: What,
    ) {
        let before = queue.seen.len();
        let lives = matches!(what, What::Forked { .. } | What::Ended);
        let most = QUEUE_MAX + if lives { QUEUE_SPARE } else { 0 };
        if before >= most {
            self.inbox.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        // Inside the lock, so that time never goes back.
        let time = self.inbox.started.elapsed().as_nanos() as u64;
        queue.seen.push(Seen {
            time,
            space,
            page,
            what,
        });
        let full = before < QUEUE_FULL && queue.seen.len() >= QUEUE_FULL;
        drop(queue);
        if full {
            self.inbox.wake.notify_one();
        }
    }

    /// Writes the queue and ends the trace; waits for the file. Returns how many entries the trace
    /// lacks; 0 in later calls.
    pub(crate) fn finish(&self) -> Result<u64, RecordError> {
        let Some(writer) = lock(&self.writer).take() else {
            return Ok(0);
        };
        lock(&self.inbox.queue).ends = true;
        self.inbox.wake.notify_one();
        match writer.join() {
            Ok(result) => result.map(|()| self.inbox.dropped.load(Ordering::Relaxed)),
            Err(_) => Err(RecordError::WriterFailed),
        }
    }
}

impl Journal for Record {
    fn note(&self, event: BookEvent) {
        self.take(event);
    }
}

/// The trace's name of an event.
fn movement(what: PageEvent) -> Movement {
    match what {
        PageEvent::CameAlong => Movement::Ahead,
        PageEvent::Chosen => Movement::Evicted,
        PageEvent::Stayed | PageEvent::PutBack => Movement::Returned,
        PageEvent::Kept | PageEvent::TakenBack => Movement::Locked,
        PageEvent::LeftClean => Movement::Clean,
        PageEvent::Found => Movement::Found,
        PageEvent::FoundShared => Movement::Shared,
        PageEvent::Used => Movement::Accessed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::VirtRange;
    use undercroft_trace::{Access, Event, Kind, TraceReader};

    #[test]
    fn faults_come_back_in_order_with_spaces_and_threads_from_zero() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let record = Record::create(&path, &["prog".to_owned()], "", true).unwrap();
        for (space, page, write, thread) in [
            (7, 100, false, 4001),
            (9, 100, true, 4002),
            (7, 101, true, 4001),
        ] {
            record.fault(SpaceId(space), VirtPage(page), write, ThreadId(thread));
        }
        assert_eq!(record.finish().unwrap(), 0);
        let mut reader = TraceReader::new(File::open(&path).unwrap()).unwrap();
        assert!(reader.header().live);
        let mut found = Vec::new();
        while reader.next_block(&mut found).unwrap() {}
        let short: Vec<_> = found
            .iter()
            .map(|r| (r.client, r.address / 4096, r.access, r.thread))
            .collect();
        let (r, w) = (Access::Read, Access::Write);
        assert_eq!(short, [(0, 100, r, 0), (1, 100, w, 1), (0, 101, w, 0)]);
    }

    fn fault(space: SpaceId, page: VirtPage, write: bool, thread: ThreadId) -> Fault {
        Fault {
            space,
            page,
            write,
            thread,
            urgent: false,
        }
    }

    /// Short forms of the engine's events.
    impl Record {
        fn fault(&self, space: SpaceId, page: VirtPage, write: bool, thread: ThreadId) {
            self.note(BookEvent::Faulted(fault(space, page, write, thread)));
        }

        fn page(&self, space: SpaceId, page: u64, what: PageEvent) {
            self.note(BookEvent::Page(space, VirtPage(page), what));
        }

        fn found(&self, space: SpaceId, range: VirtRange) {
            for page in range.pages() {
                self.page(space, page.0, PageEvent::Found);
            }
        }

        fn forked(&self, parent: SpaceId, child: SpaceId) {
            self.note(BookEvent::Forked { parent, child });
        }
    }

    /// A sink that takes nothing until it is told to.
    struct Stalled(std::sync::mpsc::Receiver<()>, File);

    impl Write for Stalled {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.recv();
            self.1.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            self.1.flush()
        }
    }

    /// A record whose file takes the header, and the rest once the returned sender is dropped.
    fn stalled(path: &Path) -> (Record, std::sync::mpsc::Sender<()>) {
        let (go, stalled) = std::sync::mpsc::channel();
        go.send(()).unwrap(); // the header
        let sink = Stalled(stalled, File::create(path).unwrap());
        (Record::start(sink, path, &[], "", true).unwrap(), go)
    }

    #[test]
    fn a_stalled_file_holds_nobody_up_and_what_it_misses_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let (record, go) = stalled(&path);
        // Entries that the writer has taken, those of its block (as many as the queue has), and
        // those that wait.
        let most = 3 * QUEUE_MAX as u64;
        for page in 0..most {
            record.fault(SpaceId(0), VirtPage(page), false, ThreadId(1));
            if page % 1000 == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        drop(go);
        let dropped = record.finish().unwrap();
        let written = events(&path).len() as u64;
        assert_eq!(written + dropped, most);
        assert!(dropped > 0, "the queue has no bound");
    }

    #[test]
    fn a_full_disk_ends_the_trace_with_a_reason_and_nothing_else() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        // The header fills the disk already.
        assert!(matches!(
            Record::start(full, Path::new("/dev/full"), &[], "", true),
            Err(WriteError::Io(_))
        ));
        let (reader, pipe) = std::io::pipe().unwrap();
        let record = Record::start(pipe, Path::new("pipe"), &[], "", true).unwrap();
        drop(reader);
        for page in 0..QUEUE_MAX as u64 {
            record.fault(SpaceId(0), VirtPage(page), false, ThreadId(1));
        }
        let why = record.finish().unwrap_err();
        let RecordError::EndsEarly { path, why } = why else {
            panic!("{why}");
        };
        assert_eq!(path, Path::new("pipe"));
        assert!(matches!(why, WriteError::Io(_)), "{why}");
        assert_eq!(record.finish().unwrap(), 0);
    }

    fn events(path: &Path) -> Vec<Event> {
        let mut reader = undercroft_trace::TraceReader::new(File::open(path).unwrap()).unwrap();
        let mut events = Vec::new();
        while reader.next_events(&mut events).unwrap() {}
        events
    }

    /// Pages and what happened to them, of one space.
    fn recorded(of: impl Fn(&Record)) -> Vec<(u64, Kind)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let record = Record::create(&path, &[], "", true).unwrap();
        of(&record);
        assert_eq!(record.finish().unwrap(), 0);
        let short = |event: &Event| (event.address / 4096, event.kind);
        events(&path).iter().map(short).collect()
    }

    const READ: Kind = Kind::Access(Access::Read);
    const WRITE: Kind = Kind::Access(Access::Write);

    fn pages(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    #[test]
    fn a_range_is_dropped_as_the_pages_of_it_that_the_trace_told_of() {
        let (space, thread) = (SpaceId(3), ThreadId(9));
        let found = recorded(|record| {
            record.found(space, pages(10, 13));
            record.page(space, 11, PageEvent::Chosen);
            record.fault(space, VirtPage(20), true, thread);
            record.note(BookEvent::Dropped(space, pages(0, 100)));
            record.note(BookEvent::Dropped(space, pages(0, 100)));
            record.fault(space, VirtPage(10), false, thread);
        });
        let moved = |page, movement| (page, Kind::Movement(movement));
        let three = [10, 11, 12].map(|page| moved(page, Movement::Found));
        let gone = [10, 11, 12, 20].map(|page| moved(page, Movement::Dropped));
        let mut expected = three.to_vec();
        expected.push(moved(11, Movement::Evicted));
        expected.push((20, WRITE));
        expected.extend(gone);
        expected.push((10, READ));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_mapping_that_moves_takes_its_pages_along_even_over_itself() {
        let space = SpaceId(0);
        let found = recorded(|record| {
            record.found(space, pages(10, 12));
            record.found(space, pages(50, 51));
            record.found(space, pages(12, 13));
            record.page(space, 12, PageEvent::Chosen);
            record.note(BookEvent::Moved(space, pages(10, 13), VirtPage(49)));
            record.note(BookEvent::Dropped(space, pages(0, 100)));
        });
        let moved: Vec<u64> = found[5..].iter().map(|(page, _)| *page).collect();
        // Nothing of page 12 at its new place: it is out.
        assert_eq!(moved, [50, 10, 11, 12, 49, 50, 49, 50]);
    }

    #[test]
    fn a_page_that_is_recalled_is_a_fault_of_who_waited_and_one_that_returns_is_not() {
        let space = SpaceId(0);
        let found = recorded(|record| {
            for page in [1, 2, 3] {
                record.page(space, page, PageEvent::Chosen);
            }
            for (page, write, thread) in [(1, true, 5), (1, false, 6), (3, true, 5)] {
                let fault = fault(space, VirtPage(page), write, ThreadId(thread));
                record.note(BookEvent::Waits(fault));
            }
            record.page(space, 1, PageEvent::PutBack);
            record.page(space, 2, PageEvent::PutBack);
            // Page 3 was stored after all. Its thread faults again.
            record.note(BookEvent::BatchBegan);
            record.fault(space, VirtPage(3), true, ThreadId(5));
        });
        let returned = Kind::Movement(Movement::Returned);
        let expected = [(1, WRITE), (2, returned), (3, WRITE)];
        assert_eq!(found[3..], expected);
    }

    #[test]
    fn spaces_that_end_before_anything_is_known_of_them_take_no_number() {
        let folder = tempfile::tempdir().unwrap();
        let record = Record::create(&folder.path().join("t.uct"), &[], "", false).unwrap();
        for space in 0..2 * u32::from(CLIENTS) {
            record.note(BookEvent::Ended(SpaceId(space)));
        }
        record.fault(SpaceId(1000), VirtPage(1), false, ThreadId(1));
        assert_eq!(record.finish().unwrap(), 0);
    }

    #[test]
    fn uses_are_recorded_of_pages_that_the_trace_knows_in_memory() {
        let space = SpaceId(0);
        let found = recorded(|record| {
            record.found(space, pages(10, 12));
            for page in [10, 11, 12, 20] {
                record.page(space, page, PageEvent::Used); // 12 and 20 are a fork child's, say
            }
            record.page(space, 11, PageEvent::Chosen);
            record.page(space, 10, PageEvent::Used);
            record.page(SpaceId(1), 11, PageEvent::Used);
        });
        let used = |page| (page, Kind::Movement(Movement::Accessed));
        let evicted = (11, Kind::Movement(Movement::Evicted));
        assert_eq!(found[2..], [used(10), used(11), evicted, used(10)]);
    }

    #[test]
    fn locked_pages_are_told_where_they_are_and_move_nothing() {
        let space = SpaceId(0);
        let found = recorded(|record| {
            record.found(space, pages(10, 11));
            record.note(BookEvent::Locked(space, pages(10, 12))); // 11 is not in memory
            record.note(BookEvent::Dropped(space, pages(0, 100)));
        });
        let [found_, locked, dropped] =
            [Movement::Found, Movement::Locked, Movement::Dropped].map(Kind::Movement);
        let expected = [(10, found_), (10, locked), (11, locked), (10, dropped)];
        assert_eq!(found, expected);
    }

    #[test]
    fn uses_leave_half_of_the_queue_to_faults() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let (record, go) = stalled(&path);
        let (space, thread) = (SpaceId(0), ThreadId(1));
        // Uses of pages in memory only are written, and more than these are what the writer stalls
        // over.
        record.found(space, pages(0, 8 * QUEUE_MAX as u64));
        for page in 0..4 * QUEUE_MAX as u64 {
            record.page(space, 2 * page, PageEvent::Used); // no runs
        }
        let before = record.inbox.dropped.load(Ordering::Relaxed);
        assert!(before > 0, "uses have no bound");
        for page in 0..QUEUE_MAX as u64 / 4 {
            record.fault(space, VirtPage(page), false, thread);
        }
        assert_eq!(record.inbox.dropped.load(Ordering::Relaxed), before);
        drop(go);
        record.finish().unwrap();
    }

    #[test]
    fn a_fork_child_has_what_its_parent_had_and_numbers_are_taken_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let record = Record::create(&path, &[], "", true).unwrap();
        let spaces = [3, 4, 5, 6].map(SpaceId);
        let [parent, child, other, grandchild] = spaces;
        record.forked(parent, other); // nothing is known of it yet
        record.note(BookEvent::Ended(other));
        record.found(parent, pages(10, 12));
        record.page(parent, 11, PageEvent::Chosen);
        record.forked(parent, child);
        record.note(BookEvent::Dropped(parent, pages(0, 100)));
        record.page(child, 10, PageEvent::Used);
        record.page(child, 11, PageEvent::Used); // out
        record.note(BookEvent::Dropped(child, pages(10, 11)));
        record.note(BookEvent::Ended(child));
        record.found(other, pages(7, 8));
        record.forked(other, grandchild);
        assert_eq!(record.finish().unwrap(), 0);
        let all = events(&path);
        let short = all.iter().map(|event| match event.kind {
            Kind::Movement(what) => (event.client, event.address / 4096, what, event.thread),
            Kind::Access(_) => unreachable!("no faults"),
        });
        use Movement::{Accessed, Dropped, Ended, Evicted, Forked, Found};
        let expected = [
            (0, 10, Found, 0),
            (0, 11, Found, 0),
            (0, 11, Evicted, 0),
            (1, 0, Forked, 0),
            (0, 10, Dropped, 0),
            (0, 11, Dropped, 0),
            (1, 10, Accessed, 0),
            (1, 10, Dropped, 0),
            (1, 0, Ended, 0),
            (1, 7, Found, 0),
            (2, 0, Forked, 1),
        ];
        assert_eq!(short.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn ends_and_forks_find_room_in_a_full_queue_and_what_comes_after_an_end_is_nobodys() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let (record, go) = stalled(&path);
        let [parent, child] = [3, 4].map(SpaceId);
        // What the writer has taken, and a full queue behind it.
        for page in 0..3 * QUEUE_MAX as u64 {
            record.fault(parent, VirtPage(page), false, ThreadId(1));
            if page % 1000 == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        record.forked(parent, child);
        record.note(BookEvent::Ended(parent));
        record.found(parent, pages(1, 2));
        drop(go);
        record.finish().unwrap();
        let all = events(&path);
        let lives = |event: &&Event| {
            use Movement::{Ended, Forked};
            matches!(event.kind, Kind::Movement(Forked | Ended))
        };
        let lives: Vec<_> = all.iter().filter(lives).map(|event| event.client).collect();
        assert_eq!(lives, [1, 0]);
        assert!(
            all.iter()
                .all(|event| event.kind != Kind::Movement(Movement::Found))
        );
    }

    #[test]
    fn the_257th_space_is_not_in_it_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let record = Record::create(&folder.path().join("t.uct"), &[], "", true).unwrap();
        for space in 0..u32::from(CLIENTS) + 3 {
            record.fault(SpaceId(space), VirtPage(1), false, ThreadId(1));
        }
        assert_eq!(record.finish().unwrap(), 3);
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let refused = Record::create(Path::new("/no/such/folder/t.uct"), &[], "", true);
        let why = refused.err().expect("no such folder");
        let text = why.to_string();
        assert!(matches!(why, RecordError::NotStarted { .. }), "{text}");
        assert!(
            text.contains("/no/such/folder/t.uct") && text.contains("--trace"),
            "{text}"
        );
    }
}
