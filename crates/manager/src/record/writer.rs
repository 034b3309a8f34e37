//! Writes the recorded events to the trace's file, in a thread of its own. Numbers the address
//! spaces, and remembers which pages the trace has.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use undercroft_base::{SpaceId, ThreadId, VirtPage};
use undercroft_trace::{Access, Event, Kind, Movement, TraceWriter, WriteError};

use super::known::Known;
use super::{CLIENTS, Inbox, NAP, QUEUE_FULL, QUEUE_MAX, QUEUE_SPARE, RecordError, Seen, What};
use crate::sync::lock;

/// The writer: the trace, the numbers of its address spaces and threads from 0, and the pages that
/// it has.
pub(super) struct Out<W: Write> {
    inbox: Arc<Inbox>,
    path: PathBuf,
    writer: TraceWriter<W>,
    /// The clients of the address spaces that the trace has.
    spaces: HashMap<SpaceId, u16>,
    threads: HashMap<ThreadId, u16>,
    /// For each client, the pages that the trace has.
    known: Vec<Known>,
    /// Clients whose address spaces have ended.
    free: Vec<u16>,
    /// Address spaces that ended last: events of them may still arrive.
    ended: VecDeque<SpaceId>,
    taken: Vec<Seen>,
}

/// Ends that are remembered.
const ENDED_MAX: usize = 64;

impl<W: Write> Out<W> {
    /// Makes the writer of a trace whose header is written.
    /// * `path`: for messages.
    pub(super) fn new(inbox: Arc<Inbox>, path: &Path, writer: TraceWriter<W>) -> Out<W> {
        Out {
            inbox,
            path: path.to_owned(),
            writer,
            spaces: HashMap::new(),
            threads: HashMap::new(),
            known: Vec::new(),
            free: Vec::new(),
            ended: VecDeque::with_capacity(ENDED_MAX),
            taken: Vec::with_capacity(QUEUE_MAX + QUEUE_SPARE),
        }
    }

    /// Writes until the run ends. If the file cannot be written, it stops, and later events are
    /// dropped.
    pub(super) fn run(mut self) -> Result<(), RecordError> {
        loop {
            let ends = {
                let mut queue = lock(&self.inbox.queue);
                if !queue.ends && queue.seen.len() < QUEUE_FULL {
                    let waited = self.inbox.wake.wait_timeout(queue, NAP);
                    queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                std::mem::swap(&mut queue.seen, &mut self.taken);
                queue.ends
            };
            let taken = std::mem::take(&mut self.taken);
            for seen in &taken {
                if let Err(why) = self.write(*seen) {
                    let path = self.path;
                    return Err(RecordError::EndsEarly { path, why });
                }
            }
            self.taken = taken;
            self.taken.clear();
            if ends {
                let end = self.inbox.started.elapsed().as_nanos() as u64;
                let path = self.path;
                let finished = self.writer.finish(end);
                return finished
                    .map(|_| ())
                    .map_err(|why| RecordError::EndsEarly { path, why });
            }
        }
    }

    /// The client of an address space, which is added if it is new. `None` if there are too many,
    /// or it has ended.
    fn client(&mut self, space: SpaceId) -> Option<u16> {
        if let Some(client) = self.spaces.get(&space) {
            return Some(*client);
        }
        if self.ended.contains(&space) {
            return None;
        }
        let client = match self.free.pop() {
            Some(client) => client,
            None if self.known.len() < usize::from(CLIENTS) => {
                self.known.push(Known::default());
                self.known.len() as u16 - 1
            }
            None => {
                self.inbox.dropped.fetch_add(1, Ordering::Relaxed);
                return None;
            }
        };
        self.spaces.insert(space, client);
        Some(client)
    }

    /// Writes a fork, if the trace has pages of the parent.
    fn write_fork(&mut self, seen: Seen, parent: SpaceId) -> Result<(), WriteError> {
        let Some(parent) = self.spaces.get(&parent).copied() else {
            return Ok(());
        };
        let known = self.known[usize::from(parent)].clone();
        if known.is_empty() {
            return Ok(());
        }
        let Some(client) = self.client(seen.space) else {
            return Ok(());
        };
        self.known[usize::from(client)] = known;
        self.writer.write_event(Event {
            time: seen.time,
            address: seen.page.address(),
            kind: Kind::Movement(Movement::Forked),
            client,
            thread: parent,
        })
    }

    fn write(&mut self, seen: Seen) -> Result<(), WriteError> {
        let client = match seen.what {
            What::Forked { parent } => return self.write_fork(seen, parent),
            // Not written for an address space that the trace does not have. Most processes end
            // before memory runs short.
            What::Dropped(_) | What::Remapped(..) | What::Ended => {
                self.spaces.get(&seen.space).copied()
            }
            What::Fault { .. } | What::Moved(..) | What::Left => self.client(seen.space),
        };
        let Some(client) = client else {
            return Ok(());
        };
        let known = &mut self.known[usize::from(client)];
        let writer = &mut self.writer;
        let mut put = |page: u64, kind, thread| {
            writer.write_event(Event {
                time: seen.time,
                address: VirtPage(page).address(),
                kind,
                client,
                thread,
            })
        };
        let first = seen.page.0;
        let moved = Kind::Movement;
        match seen.what {
            What::Forked { .. } => Ok(()), // above
            What::Fault { write, thread } => {
                // All threads beyond the last number share it.
                let threads = self.threads.len().min(usize::from(u16::MAX)) as u16;
                let thread = *self.threads.entry(thread).or_insert(threads);
                let access = if write { Access::Write } else { Access::Read };
                known.insert(first, true);
                put(first, Kind::Access(access), thread)
            }
            What::Moved(movement, number, count) => {
                for page in first..first + count {
                    if movement == Movement::Accessed {
                        // Other pages are being evicted, or the trace does not have them.
                        if known.is_there(page) {
                            put(page, moved(movement), 0)?;
                        }
                        continue;
                    }
                    // The other movements do not say where the page is.
                    if movement.is_arrival() {
                        known.insert(page, true);
                    }
                    put(page, moved(movement), number)?;
                }
                Ok(())
            }
            What::Left => {
                known.insert(first, false);
                put(first, moved(Movement::Evicted), 0)
            }
            What::Dropped(count) => {
                for (page, _) in known.take(first..first + count) {
                    put(page, moved(Movement::Dropped), 0)?;
                }
                Ok(())
            }
            What::Remapped(count, to) => {
                let pages = known.take(first..first + count);
                for (page, _) in &pages {
                    put(*page, moved(Movement::Dropped), 0)?;
                }
                // A page that was out before is unknown at its new place: the format cannot say
                // that a page is there and not resident.
                for (page, _) in pages.iter().filter(|(_, there)| *there) {
                    known.insert(page - first + to.0, true);
                    put(page - first + to.0, moved(Movement::Returned), 0)?;
                }
                Ok(())
            }
            What::Ended => {
                put(first, moved(Movement::Ended), 0)?;
                *known = Known::default();
                if self.ended.len() == ENDED_MAX {
                    self.ended.pop_front();
                }
                self.ended.push_back(seen.space);
                self.spaces.remove(&seen.space);
                self.free.push(client);
                Ok(())
            }
        }
    }
}
