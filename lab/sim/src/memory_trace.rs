//! A trace in memory: one stream of references a client, 8 bytes each, and movements of pages
//! between them.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use undercroft_trace::{Event, Kind, Movement, Reference};
use undercroft_trace::{PASSED_OVER, TAKEN_BACK};

use crate::recorded::Recorded;

/// A packed reference: the address, and one bit for a write.
pub(crate) const WRITE: u64 = 1;

/// A trace in memory, split by client.
#[derive(Clone, Debug, Default)]
pub struct MemoryTrace {
    /// For reports: the file, or the generator's description.
    pub name: String,
    /// Addresses are multiples of this many bytes.
    pub granule_bytes: u64,
    /// Name and references of each client, in order. Clients without references are left out.
    pub clients: Vec<(String, Vec<u64>)>,
    /// The movements of each client's pages; shorter if the last clients have none.
    pub moved: Vec<Vec<Moved>>,
    /// The settings of the run, if it was a live one.
    pub recorded: Option<Recorded>,
}

/// Event of a page in a live trace between references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Becomes {
    /// The page was in memory when its mapping was found; no policy loaded it. Or it shared the
    /// frame of a fork relative, and counts from now on.
    Found,
    /// The page is in memory, in a frame that is charged to a fork relative.
    Shared,
    /// The program dropped its content.
    Dropped,
    /// In the live run it could not leave after all, or its mapping was moved here.
    Returned,
    /// The page may not leave, now or after it is loaded.
    Locked,
    /// The live policy chose and forgot it, because its process did not run. It stays.
    PassedOver,
    /// The live policy knows it again. It had been chosen, and stayed.
    TakenBack,
    /// The program has written it, or will before the live run evicts it.
    Written,
    /// No write changed it before the live run evicted it, not even the one that faulted: its
    /// stored copy is right.
    Unchanged,
    /// The page was used while in memory. The live policy learned of it at this point.
    Used,
    /// The live prefetcher loaded it. The simulation's own policy decides whether it does so too.
    Ahead,
    /// Not of a page. An address space, empty until now, becomes a fork child's, with what this
    /// client has.
    Forked {
        /// The client of the live trace.
        parent: u16,
    },
    /// Not of a page. The address space has ended with all its pages.
    Ended,
}

impl Becomes {
    /// Whether it concerns one page, not an address space.
    pub fn is_of_a_page(self) -> bool {
        !matches!(self, Becomes::Forked { .. } | Becomes::Ended)
    }
}

/// A movement of a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// How many references of the client come before it.
    pub after: usize,
    /// First byte; without a page, the first byte of the address space.
    pub address: u64,
    /// Its event.
    pub what: Becomes,
}

impl MemoryTrace {
    /// Takes every reference. Addresses lose their top bit.
    ///
    /// * `clients`: names by index; any further client is named by its number.
    pub fn collect<E>(
        name: &str,
        granule_bytes: u64,
        clients: &[String],
        references: impl IntoIterator<Item = Result<Reference, E>>,
    ) -> Result<MemoryTrace, E> {
        let mut collector = Collector::default();
        for reference in references {
            collector.add(reference?.into());
        }
        Ok(collector.finish(name, granule_bytes, clients))
    }

    /// References of all clients.
    pub fn references(&self) -> u64 {
        self.clients.iter().map(|(_, refs)| refs.len() as u64).sum()
    }

    /// Whether the trace names prefetched pages. It then lacks their uses, except those seen by
    /// Accessed bits.
    pub fn tells_ahead(&self) -> bool {
        let mut moved = self.moved.iter().flatten();
        moved.any(|moved| moved.what == Becomes::Ahead)
    }
}

/// Splits a trace by client. The address spaces of a live trace make one client together, because
/// they shared the run's limit and policy.
#[derive(Default)]
pub(crate) struct Collector {
    streams: Vec<(Vec<u64>, Vec<Moved>)>,
    /// Of a live trace: what loaded the page, and what loaded it before its last eviction.
    came: FxHashMap<Page, (Brought, Option<Brought>)>,
    /// How many address spaces with each client number have ended.
    ended: FxHashMap<u16, u32>,
    /// The address spaces that a live trace names.
    spaces: BTreeSet<u16>,
    live: bool,
}

/// Addresses that a process of a live run can have (page tables of four levels). Beyond them, pages
/// of two processes could be confused.
pub(crate) const SPACE_BYTES: u64 = 1 << 47;

/// A page of a live trace: its address, and how many spaces with this client number ended before.
type Page = (u64, u32);

/// Loader of a page.
#[derive(Clone, Copy, Debug)]
enum Brought {
    /// The reference of this index.
    Reference(usize),
    /// The live prefetcher.
    Ahead,
}

/// Notes that the page was written after it was loaded and before it left.
fn written(brought: Brought, address: u64, moved: &mut Vec<Moved>) {
    if let Brought::Reference(at) = brought {
        moved.push(Moved {
            after: at + 1,
            address,
            what: Becomes::Written,
        });
    }
}

impl Collector {
    /// * `live`: the trace is of a live run.
    pub(crate) fn new(live: bool) -> Collector {
        Collector {
            live,
            ..Collector::default()
        }
    }

    /// Takes one entry. Keeps the movements that no policy decides.
    pub(crate) fn add(&mut self, event: Event) {
        let (client, mut address, page) = self.place(&event);
        let movement = match event.kind {
            Kind::Access(access) => return self.add_reference(client, page, access.is_write()),
            Kind::Movement(movement) => movement,
        };
        let what = match movement {
            Movement::Found => Becomes::Found,
            Movement::Shared if self.live => Becomes::Shared,
            Movement::Shared => Becomes::Found,
            Movement::Dropped => Becomes::Dropped,
            Movement::Evicted => return self.leaves(client, page),
            Movement::Clean => return self.left_clean(client, page),
            Movement::Accessed => Becomes::Used,
            Movement::Ahead => {
                self.came(page, Brought::Ahead);
                Becomes::Ahead
            }
            Movement::Returned => {
                self.came_back(page);
                Becomes::Returned
            }
            Movement::Locked => match event.thread {
                PASSED_OVER if self.live => Becomes::PassedOver,
                TAKEN_BACK if self.live => Becomes::TakenBack,
                _ => Becomes::Locked,
            },
            // Clients of other traces share nothing, and none begins after another.
            Movement::Forked | Movement::Ended if !self.live => return,
            Movement::Forked => Becomes::Forked {
                parent: event.thread,
            },
            Movement::Ended => {
                *self.ended.entry(event.client).or_default() += 1;
                Becomes::Ended
            }
        };
        if !what.is_of_a_page() {
            address = SPACE_BYTES * u64::from(event.client);
        }
        let (references, moved) = &mut self.streams[client];
        moved.push(Moved {
            after: references.len(),
            address,
            what,
        });
    }

    /// Where an entry belongs: the client, the address, and the page in `came`.
    fn place(&mut self, event: &Event) -> (usize, u64, Page) {
        let mut client = usize::from(event.client);
        let mut address = event.address;
        let mut life = 0;
        if self.live {
            self.spaces.insert(event.client);
            life = self.ended.get(&event.client).copied().unwrap_or(0);
            address = address.wrapping_add(SPACE_BYTES * client as u64);
            client = 0;
        }
        if client >= self.streams.len() {
            self.streams.resize_with(client + 1, Default::default);
        }
        (client, address, (address, life))
    }

    fn add_reference(&mut self, client: usize, page: Page, write: bool) {
        if self.live {
            self.came(page, Brought::Reference(self.streams[client].0.len()));
        }
        let write = u64::from(write) * WRITE;
        self.streams[client].0.push(page.0 << 1 | write);
    }

    fn came(&mut self, page: Page, brought: Brought) {
        self.came.entry(page).or_insert((brought, None)).0 = brought;
    }

    /// Notes that a page was chosen to leave, and that it had been written. If
    /// [`Collector::left_clean`] follows, it had not.
    fn leaves(&mut self, client: usize, page: Page) {
        if let Some(came) = self.came.get_mut(&page)
            && let Some(brought) = came.1.replace(came.0)
        {
            written(brought, page.0, &mut self.streams[client].1);
        }
    }

    /// Notes that the page that left last had not changed since it was loaded.
    fn left_clean(&mut self, client: usize, page: Page) {
        let (references, moved) = &mut self.streams[client];
        let came = self.came.get_mut(&page);
        if let Some(Brought::Reference(at)) = came.and_then(|came| came.1.take())
            && references[at] & WRITE != 0
        {
            moved.push(Moved {
                after: at + 1,
                address: page.0,
                what: Becomes::Unchanged,
            });
        }
    }

    /// Notes that an eviction came to nothing. The page's bytes are then unknown.
    fn came_back(&mut self, page: Page) {
        if let Some(came) = self.came.get_mut(&page) {
            came.1 = None;
        }
    }

    /// The finished trace; see [`MemoryTrace::collect`].
    pub(crate) fn finish(
        mut self,
        name: &str,
        granule_bytes: u64,
        clients: &[String],
    ) -> MemoryTrace {
        let name_of = |at: usize| match clients.get(at) {
            _ if self.spaces.len() > 1 => format!("{} address spaces", self.spaces.len()),
            Some(name) if !name.is_empty() => name.clone(),
            _ => format!("client {at}"),
        };
        let mut trace = MemoryTrace {
            name: name.to_owned(),
            granule_bytes: granule_bytes.max(1),
            ..MemoryTrace::default()
        };
        for ((address, _), (_, evicted)) in self.came {
            if let Some(brought) = evicted {
                written(brought, address, &mut self.streams[0].1);
            }
        }
        for (at, (references, mut moved)) in self.streams.into_iter().enumerate() {
            moved.sort_by_key(|moved| match moved.what {
                Becomes::Written | Becomes::Unchanged => (moved.after, 0, moved.address),
                _ => (moved.after, 1, 0), // as they came
            });
            if !references.is_empty() {
                trace.clients.push((name_of(at), references));
                trace.moved.push(moved);
            }
        }
        trace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A live trace of entries by page, with its movements: (references before, page, what).
    fn collected(entries: &[(u64, Kind)]) -> (MemoryTrace, Vec<(usize, u64, Becomes)>) {
        let mut collector = Collector::new(true);
        for (time, (page, kind)) in entries.iter().enumerate() {
            collector.add(Event {
                time: time as u64,
                address: page * 4096,
                kind: *kind,
                client: 0,
                thread: 0,
            });
        }
        let trace = collector.finish("t", 4096, &[]);
        let moved = trace.moved[0].iter();
        let moved = moved.map(|moved| (moved.after, moved.address / 4096, moved.what));
        let moved = moved.collect();
        (trace, moved)
    }

    #[test]
    fn pages_are_written_from_the_fault_that_brought_them_unless_they_leave_clean() {
        use undercroft_trace::Access;
        let (read, gone, clean, seen) = (
            Kind::Access(Access::Read),
            Kind::Movement(Movement::Evicted),
            Kind::Movement(Movement::Clean),
            Kind::Movement(Movement::Accessed),
        );
        let entries = [
            (1, read),
            (2, read),
            (1, seen),
            (1, gone),
            (2, gone),
            (1, clean),
            (2, read),
            (1, read),
            (2, gone),
            (2, clean),
            (1, gone),
        ];
        let (_, short) = collected(&entries);
        use Becomes::{Used, Written};
        let expected = [
            (2, 2, Written), // the second reference, before the evictions that follow it
            (2, 1, Used),
            (4, 1, Written),
        ];
        assert_eq!(short, expected);
    }

    #[test]
    fn a_page_of_a_reused_process_number_has_no_history() {
        use undercroft_trace::Access;
        let write = Kind::Access(Access::Write);
        let (forked, ended, gone, clean) = (
            Kind::Movement(Movement::Forked),
            Kind::Movement(Movement::Ended),
            Kind::Movement(Movement::Evicted),
            Kind::Movement(Movement::Clean),
        );
        let entries = [(1, write), (0, ended), (0, forked), (1, gone), (1, clean)];
        let (_, short) = collected(&entries);
        use Becomes::{Ended, Forked};
        let expected = [(1, 0, Ended), (1, 0, Forked { parent: 0 })];
        assert_eq!(short, expected); // as far as is known, the write did change something
    }

    #[test]
    fn address_spaces_of_a_live_run_are_one_client_and_clients_of_another_trace_are_not() {
        use undercroft_trace::Access;
        let clients_of = |live| {
            let mut collector = Collector::new(live);
            for (time, (client, page)) in [(0, 5), (2, 5), (0, 6)].into_iter().enumerate() {
                collector.add(Event {
                    time: time as u64,
                    address: page * 4096,
                    kind: Kind::Access(Access::Read),
                    client,
                    thread: 0,
                });
            }
            collector.finish("t", 4096, &["a".to_owned()]).clients
        };
        let page = |number: u64| (number * 4096) << 1;
        let other = (2 * SPACE_BYTES) << 1;
        let together = vec![page(5), other + page(5), page(6)];
        let name = "2 address spaces".to_owned(); // another did nothing
        assert_eq!(clients_of(true), [(name, together)]);
        let alone = [("a", vec![page(5), page(6)]), ("client 2", vec![page(5)])];
        let alone = alone.map(|(name, pages)| (name.to_owned(), pages));
        assert_eq!(clients_of(false), alone);
    }

    #[test]
    fn prefetched_pages_and_writes_that_change_nothing_are_noted() {
        use undercroft_trace::Access;
        let (read, write) = (Kind::Access(Access::Read), Kind::Access(Access::Write));
        let (gone, clean, along) = (
            Kind::Movement(Movement::Evicted),
            Kind::Movement(Movement::Clean),
            Kind::Movement(Movement::Ahead),
        );
        let entries = [
            (1, read),
            (2, along),
            (3, along),
            (1, gone),
            (2, gone),
            (3, gone),
            (2, clean),
            (1, write),
            (2, write),
            (1, gone),
            (1, clean),
            (2, gone),
            (3, along), // never evicted: its bytes are unknown
        ];
        let (trace, short) = collected(&entries);
        assert!(trace.tells_ahead());
        use Becomes::{Ahead, Unchanged, Written};
        let expected = [
            (1, 1, Written),
            (1, 2, Ahead),
            (1, 3, Ahead),
            (2, 1, Unchanged), // by the second reference, a write
            (3, 2, Written),
            (3, 3, Ahead),
        ];
        assert_eq!(short, expected);
    }
}
