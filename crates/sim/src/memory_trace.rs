//! A trace in memory: one stream of references a client, 8 bytes each; and its pages for one page size, 4 bytes a reference.
//!
//! Pages are numbered so that the engine's own page number is the index: chunks of 512 pages, ascending by address, chunks
//! nobody touches left out. Neighbours keep neighbouring numbers; where pages are missing between two numbers, a *run* ends,
//! and each run is told to the engine as a mapping of its own, so that no window crosses it. Where chunks are nearly empty
//! (object traces), smaller granules are used: a number costs the engine 17 bytes.
//!
//! Making this costs time, which [`PageStream::build`] is not part of a replay: it is done once for each page size.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use undercroft_base::CHUNK_PAGES;
use undercroft_trace::{Event, Kind, Movement, Reference};

use crate::recorded::Recorded;

/// What a stream packs: address, one bit for a write.
const WRITE: u64 = 1;

/// A trace in memory, split by client.
#[derive(Clone, Debug, Default)]
pub struct MemoryTrace {
    /// For reports: the file, or the generator's description.
    pub name: String,
    /// Addresses are multiples of this many bytes.
    pub granule_bytes: u64,
    /// Name and references of each client, in order; clients that do nothing are left out.
    pub clients: Vec<(String, Vec<u64>)>,
    /// Of each client, what became of its pages beside references; shorter where there is nothing.
    pub moved: Vec<Vec<Moved>>,
    /// The settings of the run, where it is a live one.
    pub recorded: Option<Recorded>,
}

/// What a live trace tells of a page beside references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Becomes {
    /// It is in memory, by nobody's decision.
    Found,
    /// Its content is gone, by the program's.
    Dropped,
    /// The live manager took it out: whether the simulation does so too, its own policy decides.
    Evicted,
    /// The same, and no policy named it: the live manager did, and so does the simulation, where it follows evictions.
    Named,
    /// The next reference faults on it before it is out: it is put back.
    Recalled,
    /// It could not leave after all, live.
    Returned,
    /// It may not leave, or not when it comes.
    Locked,
    /// The program has written it, or will before it is evicted live.
    Written,
    /// The write that faulted changed nothing, nor did another before it was evicted live: its copy below is right.
    Unchanged,
    /// It was used in memory, as the live policy was told then.
    Used,
    /// The live prefetcher brought it along. What it brings here, the policy asked for says; or the trace, if that was asked for.
    Ahead {
        /// The program wrote it before it was evicted live.
        written: bool,
    },
}

/// A granule, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// References of the client that come before.
    pub after: usize,
    /// First byte.
    pub address: u64,
    /// What.
    pub what: Becomes,
}

impl MemoryTrace {
    /// Takes in every reference. Addresses lose their top bit.
    ///
    /// * `clients`: names by index; a client beyond them is named by its number.
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

    /// Whether it tells of pages that were brought along. Their uses are then not in it, but for those seen by access bits.
    pub fn tells_ahead(&self) -> bool {
        let mut moved = self.moved.iter().flatten();
        moved.any(|moved| matches!(moved.what, Becomes::Ahead { .. }))
    }
}

/// Splits a trace by client; but those of a live trace are the address spaces of one run, which shared its limit and its policy, and
/// make one client together.
#[derive(Default)]
pub(crate) struct Collector {
    streams: Vec<(Vec<u64>, Vec<Moved>)>,
    /// Of a live trace, by address: what brought the page, and what had before it was evicted last.
    came: FxHashMap<u64, (Brought, Option<Brought>)>,
    /// Address spaces of a live trace that it tells of.
    spaces: BTreeSet<u16>,
    live: bool,
}

/// Addresses that a process of a live run can have (page tables of four levels); beyond them pages of two may be taken for one.
const SPACE_BYTES: u64 = 1 << 47;

/// What brought a page.
#[derive(Clone, Copy, Debug)]
enum Brought {
    /// The reference of this index.
    Reference(usize),
    /// The movement of this index, a [`Becomes::Ahead`].
    Ahead(usize),
}

/// That a page was written at some time after it was brought, and before it left.
fn written(brought: Brought, address: u64, moved: &mut Vec<Moved>) {
    match brought {
        Brought::Reference(at) => moved.push(Moved {
            after: at + 1,
            address,
            what: Becomes::Written,
        }),
        Brought::Ahead(at) => moved[at].what = Becomes::Ahead { written: true },
    }
}

impl Collector {
    /// * `live`: a run of ours.
    pub fn new(live: bool) -> Collector {
        Collector {
            live,
            ..Collector::default()
        }
    }

    /// Takes in one entry. Of movements those that no policy decides, and when pages were evicted.
    pub fn add(&mut self, event: Event) {
        let mut client = usize::from(event.client);
        let mut address = event.address;
        if self.live {
            self.spaces.insert(event.client);
            address = address.wrapping_add(SPACE_BYTES * client as u64);
            client = 0;
        }
        if client >= self.streams.len() {
            self.streams.resize_with(client + 1, Default::default);
        }
        let (references, moved) = &mut self.streams[client];
        let what = match event.kind {
            Kind::Access(access) => {
                let write = u64::from(access.is_write()) * WRITE;
                if self.live {
                    let brought = Brought::Reference(references.len());
                    let came = self.came.entry(address);
                    came.or_insert((brought, None)).0 = brought;
                }
                references.push(address << 1 | write);
                return;
            }
            Kind::Movement(Movement::Found) => Becomes::Found,
            Kind::Movement(Movement::Dropped) => Becomes::Dropped,
            Kind::Movement(movement @ (Movement::Evicted | Movement::Named)) => {
                // Not known to be clean yet: see below, or it was written.
                if let Some(came) = self.came.get_mut(&address)
                    && let Some(brought) = came.1.replace(came.0)
                {
                    written(brought, address, moved);
                }
                match movement {
                    Movement::Named => Becomes::Named,
                    _ => Becomes::Evicted,
                }
            }
            Kind::Movement(Movement::Clean) => {
                let came = self.came.get_mut(&address);
                match came.and_then(|came| came.1.take()) {
                    Some(Brought::Reference(at)) if references[at] & WRITE != 0 => {
                        moved.push(Moved {
                            after: at + 1,
                            address,
                            what: Becomes::Unchanged,
                        });
                    }
                    _ => {}
                }
                return;
            }
            Kind::Movement(Movement::Accessed) => Becomes::Used,
            Kind::Movement(Movement::Ahead) => {
                let brought = Brought::Ahead(moved.len());
                let came = self.came.entry(address);
                came.or_insert((brought, None)).0 = brought;
                Becomes::Ahead { written: false }
            }
            Kind::Movement(movement @ (Movement::Returned | Movement::Recalled)) => {
                // Nothing is known of its bytes: that eviction came to nothing.
                if let Some(came) = self.came.get_mut(&address) {
                    came.1 = None;
                }
                match movement {
                    Movement::Recalled => Becomes::Recalled,
                    _ => Becomes::Returned,
                }
            }
            Kind::Movement(Movement::Locked) => Becomes::Locked,
        };
        moved.push(Moved {
            after: references.len(),
            address,
            what,
        });
    }

    /// All of it; see [`MemoryTrace::collect`].
    pub fn finish(mut self, name: &str, granule_bytes: u64, clients: &[String]) -> MemoryTrace {
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
        for (address, (_, evicted)) in self.came {
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

/// One client's references as numbered pages of one size.
#[derive(Clone, Debug)]
pub struct PageStream {
    /// The client.
    pub name: String,
    /// `number << 1 | write`, in order.
    pub references: Vec<u32>,
    /// Half-open runs of numbers whose pages are neighbours in memory; together all numbers.
    pub runs: Vec<(u32, u32)>,
    /// Numbers given, pages nobody touches included; a multiple of 512.
    pub numbers: u32,
    /// Pages that are touched, found in memory or brought along; ascending.
    pub touched: Vec<u32>,
    /// References that write.
    pub writes: u64,
    /// What became of its pages beside references, in order.
    pub moved: Vec<MovedPage>,
}

/// A page, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedPage {
    /// References that come before.
    pub after: usize,
    /// The page.
    pub number: u32,
    /// What.
    pub what: Becomes,
}

/// The trace touches more pages than can be numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trace touches too many places for pages of {page_bytes} bytes; use larger pages")]
pub struct TooManyPages {
    /// The page size asked for.
    pub page_bytes: u64,
}

/// Chunks that may be numbered before granules shrink: page numbers have 30 bits.
const CHUNKS_MAX: usize = 1 << 20;

/// Numbers below which nobody minds empty ones.
const NUMBERS_SMALL: usize = 1 << 22;

impl PageStream {
    /// Numbers the pages of one client. `page_bytes`: a power of two.
    ///
    /// Errors: more than 2^20 chunks of 512 pages are touched.
    /// Cost: two passes over the references; a hash lookup where the chunk is another than the reference's before.
    pub fn build(name: &str, packed: &[u64], page_bytes: u64) -> Result<PageStream, TooManyPages> {
        PageStream::build_moved(name, packed, &[], page_bytes)
    }

    /// As [`PageStream::build`], with what else becomes of pages. What is dropped must be whole pages.
    pub fn build_moved(
        name: &str,
        packed: &[u64],
        moved: &[Moved],
        page_bytes: u64,
    ) -> Result<PageStream, TooManyPages> {
        let shift = page_bytes.trailing_zeros() + 1;
        let too_many = TooManyPages { page_bytes };
        let per_chunk = u64::from(CHUNK_PAGES);
        let mut seen: FxHashMap<u64, u32> = FxHashMap::default();
        let mut chunks: Vec<u64> = Vec::new();
        let mut references = Vec::with_capacity(packed.len());
        let mut last = (u64::MAX, 0);
        let mut number_of = |page: u64| {
            let chunk = page / per_chunk;
            if chunk != last.0 {
                let fresh = chunks.len() as u32;
                let number = *seen.entry(chunk).or_insert(fresh);
                if number == fresh {
                    if chunks.len() >= CHUNKS_MAX {
                        return Err(too_many);
                    }
                    chunks.push(chunk);
                }
                last = (chunk, number);
            }
            Ok(last.1 * CHUNK_PAGES + (page % per_chunk) as u32)
        };
        for word in packed {
            let number = number_of(word >> shift)?;
            references.push(number << 1 | (word & WRITE) as u32);
        }
        let mut moves = Vec::with_capacity(moved.len());
        for moved in moved {
            moves.push(MovedPage {
                after: moved.after,
                // As references lose the top bit.
                number: number_of((moved.address << 1) >> shift)?,
                what: moved.what,
            });
        }
        let mut order: Vec<u32> = (0..chunks.len() as u32).collect();
        order.sort_unstable_by_key(|at| chunks[*at as usize]);
        let mut ranks = vec![0; chunks.len()];
        for (rank, at) in order.iter().enumerate() {
            ranks[*at as usize] = rank as u32;
        }
        let mut touched = vec![false; chunks.len() * per_chunk as usize];
        let ranked = |number: u32| {
            ranks[(number / CHUNK_PAGES) as usize] * CHUNK_PAGES + number % CHUNK_PAGES
        };
        for word in &mut references {
            let ranked = ranked(*word >> 1);
            touched[ranked as usize] = true;
            *word = ranked << 1 | (*word & 1);
        }
        for moved in &mut moves {
            moved.number = ranked(moved.number);
            touched[moved.number as usize] |=
                matches!(moved.what, Becomes::Found | Becomes::Ahead { .. });
        }
        // Pages of which nothing else is known have numbers too, though they are no part of the footprint.
        let mut named = touched.clone();
        for moved in &moves {
            named[moved.number as usize] = true;
        }
        let firsts: Vec<u64> = order.iter().map(|at| chunks[*at as usize]).collect();
        let mut stream = PageStream::numbered(name, references, moves, &touched, &named, &firsts);
        // Granules of one page, found together.
        stream.moved.dedup();
        Ok(stream)
    }

    /// Leaves out granules nobody touches where that pays, and finds the runs. `firsts`: the place of each chunk; `named`:
    /// pages that need a number, `touched`: those of the footprint.
    fn numbered(
        name: &str,
        mut references: Vec<u32>,
        mut moved: Vec<MovedPage>,
        touched: &[bool],
        named: &[bool],
        firsts: &[u64],
    ) -> PageStream {
        let distinct = named.iter().filter(|touched| **touched).count();
        let per_chunk = CHUNK_PAGES as usize;
        let kept = |granule: usize| -> Vec<usize> {
            let granules = named.chunks(granule).enumerate();
            granules
                .filter(|(_, pages)| pages.iter().any(|touched| *touched))
                .map(|(at, _)| at)
                .collect()
        };
        let (granule, kept) = [per_chunk, 64, 8]
            .into_iter()
            .map(|granule| (granule, kept(granule)))
            .find(|(granule, kept)| kept.len() * granule <= NUMBERS_SMALL.max(8 * distinct))
            .unwrap_or_else(|| (1, kept(1)));
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let mut new_number = vec![0u32; touched.len() / granule];
        let mut before = None;
        for (rank, at) in kept.iter().enumerate() {
            let first = at * granule;
            let place = firsts[first / per_chunk] * per_chunk as u64 + (first % per_chunk) as u64;
            let start = (rank * granule) as u32;
            new_number[*at] = start;
            match runs.last_mut() {
                Some(run) if before == Some(place) => run.1 = start + granule as u32,
                _ => runs.push((start, start + granule as u32)),
            }
            before = Some(place + granule as u64);
        }
        let renumber = |number: usize| new_number[number / granule] + (number % granule) as u32;
        // Also where whole chunks are left out.
        if kept.len() * granule != touched.len() {
            for word in &mut references {
                *word = renumber((*word >> 1) as usize) << 1 | (*word & 1);
            }
            for moved in &mut moved {
                moved.number = renumber(moved.number as usize);
            }
        }
        let touched = (0..touched.len()).filter(|number| touched[*number]);
        PageStream {
            name: name.to_owned(),
            writes: references.iter().map(|word| u64::from(word & 1)).sum(),
            references,
            moved,
            runs,
            numbers: ((kept.len() * granule) as u32).next_multiple_of(CHUNK_PAGES),
            touched: touched.map(renumber).collect(),
        }
    }

    /// Pages touched, found or brought along.
    pub fn footprint(&self) -> u64 {
        self.touched.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(addresses: &[u64], page_bytes: u64) -> PageStream {
        let packed: Vec<u64> = addresses.iter().map(|address| address << 1).collect();
        PageStream::build("test", &packed, page_bytes).expect("few pages")
    }

    #[test]
    fn pages_are_numbered_by_address_and_neighbours_stay_so() {
        let mib2 = 512 * 4096;
        let built = stream(
            &[10 * mib2 + 4096, 3 * mib2, 4 * mib2, 3 * mib2 + 4095],
            4096,
        );
        let numbers: Vec<_> = built.references.iter().map(|word| word >> 1).collect();
        assert_eq!(numbers, [2 * 512 + 1, 0, 512, 0]);
        assert_eq!(built.runs, [(0, 1024), (1024, 1536)]);
        assert_eq!((built.footprint(), built.numbers), (3, 1536));
    }

    #[test]
    fn sparse_pages_are_packed_and_no_page_is_merged_with_another() {
        let places: Vec<u64> = (0..20_000u64).map(|at| at * 4096 * 5000).collect();
        let built = stream(&places, 4096);
        assert!(built.numbers <= NUMBERS_SMALL as u32);
        assert_eq!(built.footprint(), 20_000);
        assert_eq!(built.runs.len(), 20_000);
        let mut numbers: Vec<_> = built.references.iter().map(|word| word >> 1).collect();
        numbers.dedup();
        assert_eq!(numbers, built.touched);
    }

    #[test]
    fn page_size_decides_what_is_one_page() {
        let addresses: Vec<u64> = (0..64u64).map(|at| at * 512).collect();
        for (page_bytes, pages) in [(512, 64), (4096, 8), (2 << 20, 1)] {
            assert_eq!(stream(&addresses, page_bytes).footprint(), pages);
        }
    }

    /// A live trace of entries by page; and what became of pages, as (references before, page, what).
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
        use Becomes::{Evicted, Used, Written};
        let expected = [
            (2, 2, Written), // the second reference, before the evictions that follow it
            (2, 1, Used),
            (2, 1, Evicted),
            (2, 2, Evicted),
            (4, 1, Written),
            (4, 2, Evicted),
            (4, 1, Evicted),
        ];
        assert_eq!(short, expected);
    }

    #[test]
    fn an_eviction_that_was_called_back_says_nothing_of_its_bytes() {
        use undercroft_trace::Access;
        let read = Kind::Access(Access::Read);
        let (gone, clean, recalled) = (
            Kind::Movement(Movement::Evicted),
            Kind::Movement(Movement::Clean),
            Kind::Movement(Movement::Recalled),
        );
        let entries = [
            (1, read),
            (1, gone),
            (1, recalled),
            (1, read),
            (1, gone),
            (1, clean),
        ];
        let (_, short) = collected(&entries);
        let left = (1, 1, Becomes::Evicted);
        assert_eq!(
            short,
            [left, (1, 1, Becomes::Recalled), (2, 1, Becomes::Evicted)]
        );
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
    fn what_came_along_is_told_with_whether_it_was_written_and_writes_that_changed_nothing_are_told()
     {
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
            (3, along), // never evicted: nothing is known of it
        ];
        let (trace, short) = collected(&entries);
        assert!(trace.tells_ahead());
        use Becomes::{Ahead, Evicted, Unchanged, Written};
        let expected = [
            (1, 1, Written),
            (1, 2, Ahead { written: false }),
            (1, 3, Ahead { written: true }),
            (1, 1, Evicted),
            (1, 2, Evicted),
            (1, 3, Evicted),
            (2, 1, Unchanged), // by the second reference, a write
            (3, 2, Written),
            (3, 1, Evicted),
            (3, 2, Evicted),
            (3, 3, Ahead { written: false }),
        ];
        assert_eq!(short, expected);
    }

    /// Pages that only movements name have numbers of their own, and are no part of the footprint.
    #[test]
    fn movements_of_pages_never_used_have_their_own_numbers() {
        let mib2 = 512 * 4096;
        let packed: Vec<u64> = [mib2, 9 * mib2 + 4096].map(|address| address << 1).to_vec();
        let of = |address, what| Moved {
            after: 1,
            address,
            what,
        };
        let moved = [
            of(0, Becomes::Evicted),
            of(4 * mib2, Becomes::Evicted),
            of(mib2 + 4096, Becomes::Dropped),
            of(9 * mib2 + 4096, Becomes::Evicted),
        ];
        let built = PageStream::build_moved("test", &packed, &moved, 4096).expect("few pages");
        let mut numbers: Vec<_> = built.moved.iter().map(|moved| moved.number).collect();
        assert_eq!(numbers[3], built.references[1] >> 1);
        numbers[3] = built.references[0] >> 1;
        assert_eq!(numbers, [0, 1024, 513, 512]);
        assert!(numbers.iter().all(|number| *number < built.numbers));
        assert_eq!((built.footprint(), built.numbers), (2, 4 * 512));
    }
}
