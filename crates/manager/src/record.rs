//! Records the page faults of a live run as a trace: fault threads put them into a bounded queue, the control thread writes.
//!
//! One client of the trace is one address space, in the order they came. What is recorded is what the manager sees: faults
//! that brought a page in. Uses of pages in memory raise no fault, and evictions have no place in the format.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use undercroft_base::{PAGE_BYTES, SpaceId, ThreadId, VirtPage};
use undercroft_trace::{Access, Header, Reference, TimeUnit, TraceWriter};

use crate::shared::lock;

/// Faults that wait to be written: half a second of the most a CPU can serve.
const QUEUE_MAX: usize = 1 << 16;

/// Address spaces of one trace; the faults of later ones are counted as dropped.
const CLIENTS: u16 = 256;

#[derive(Clone, Copy)]
struct Seen {
    time: u64,
    space: SpaceId,
    page: VirtPage,
    write: bool,
    thread: ThreadId,
}

/// The recorder of one run.
pub(crate) struct Record {
    queue: Mutex<Vec<Seen>>,
    dropped: AtomicU64,
    out: Mutex<Option<Out>>,
    started: Instant,
}

/// The trace being written, and numbers for what it names from 0.
struct Out {
    writer: TraceWriter<File>,
    spaces: HashMap<SpaceId, u16>,
    threads: HashMap<ThreadId, u16>,
    taken: Vec<Seen>,
}

impl Record {
    /// Starts a trace in a new file. Errors: the file cannot be made, or not written.
    pub fn create(path: &Path, command: &[String]) -> Result<Record, String> {
        let failed = |why: &dyn std::fmt::Display| {
            format!(
                "cannot write the trace {}: {why}; give --trace a file that can be written",
                path.display()
            )
        };
        let file = File::create(path).map_err(|error| failed(&error))?;
        let header = Header {
            granularity: PAGE_BYTES.trailing_zeros() as u8,
            time_unit: TimeUnit::Nanoseconds,
            filtered: false,
            synthetic: false,
            live: true,
            command: command.to_vec(),
            clients: (0..CLIENTS).map(|at| format!("space {at}")).collect(),
            source: format!("undercroft {} run", env!("CARGO_PKG_VERSION")),
        };
        let writer = TraceWriter::new(file, header).map_err(|error| failed(&error))?;
        Ok(Record {
            queue: Mutex::new(Vec::with_capacity(QUEUE_MAX)),
            dropped: AtomicU64::new(0),
            out: Mutex::new(Some(Out {
                writer,
                spaces: HashMap::new(),
                threads: HashMap::new(),
                taken: Vec::with_capacity(QUEUE_MAX),
            })),
            started: Instant::now(),
        })
    }

    /// A fault that brings a page in. Fault path: no allocation, no I/O; dropped and counted when the queue is full.
    pub fn fault(&self, space: SpaceId, page: VirtPage, write: bool, thread: ThreadId) {
        let mut queue = lock(&self.queue);
        if queue.len() == QUEUE_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        // Inside the lock, so that time never goes back.
        let time = self.started.elapsed().as_nanos() as u64;
        queue.push(Seen {
            time,
            space,
            page,
            write,
            thread,
        });
    }

    /// Writes what waits. Errors end the recording, with the reason.
    pub fn drain(&self) -> Result<(), String> {
        let mut out = lock(&self.out);
        let Some(this) = out.as_mut() else {
            return Ok(());
        };
        std::mem::swap(&mut *lock(&self.queue), &mut this.taken);
        for seen in &this.taken {
            let spaces = this.spaces.len() as u16;
            let client = *this.spaces.entry(seen.space).or_insert(spaces);
            if client >= CLIENTS {
                this.spaces.remove(&seen.space);
                self.dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            // The last number is for all threads that find none left.
            let threads = this.threads.len().min(usize::from(u16::MAX)) as u16;
            let reference = Reference {
                time: seen.time,
                address: seen.page.address(),
                access: match seen.write {
                    true => Access::Write,
                    false => Access::Read,
                },
                client,
                thread: *this.threads.entry(seen.thread).or_insert(threads),
            };
            if let Err(error) = this.writer.write(reference) {
                *out = None;
                return Err(format!("the trace ends early: {error}"));
            }
        }
        this.taken.clear();
        Ok(())
    }

    /// Ends the trace; the faults that are not in it.
    pub fn finish(&self) -> Result<u64, String> {
        self.drain()?;
        if let Some(out) = lock(&self.out).take() {
            let end = self.started.elapsed().as_nanos() as u64;
            out.writer
                .finish(end)
                .map_err(|error| format!("the trace could not be ended: {error}"))?;
        }
        Ok(self.dropped.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_trace::TraceReader;

    #[test]
    fn faults_come_back_in_order_with_spaces_and_threads_from_zero() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.uct");
        let record = Record::create(&path, &["prog".to_owned()]).unwrap();
        for (space, page, write, thread) in [
            (7, 100, false, 4001),
            (9, 100, true, 4002),
            (7, 101, true, 4001),
        ] {
            record.fault(SpaceId(space), VirtPage(page), write, ThreadId(thread));
        }
        assert_eq!(record.finish(), Ok(0));
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

    #[test]
    fn a_full_queue_drops_and_counts() {
        let folder = tempfile::tempdir().unwrap();
        let record = Record::create(&folder.path().join("t.uct"), &[]).unwrap();
        for page in 0..QUEUE_MAX as u64 + 5 {
            record.fault(SpaceId(0), VirtPage(page), false, ThreadId(1));
        }
        assert_eq!(record.finish(), Ok(5));
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let refused = Record::create(Path::new("/no/such/folder/t.uct"), &[]);
        let why = refused.err().expect("no such folder");
        assert!(
            why.contains("/no/such/folder/t.uct") && why.contains("--trace"),
            "{why}"
        );
    }
}
