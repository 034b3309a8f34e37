//! A client of a trace as numbered pages of one size, 4 bytes a reference.
//!
//! Pages are numbered so that the engine's own page number is the index. Chunks of 512 pages get
//! numbers in the order of addresses; untouched chunks get none. Neighbours keep neighbouring
//! numbers. Where pages are missing between two numbers, a *run* ends. The engine sees each run as
//! a mapping of its own, so no window crosses its end. Where chunks are nearly empty (object
//! traces), granules are smaller, because a number costs the engine 17 bytes.
//!
//! [`PageStream::build`] takes time. It runs once for each page size, before the replays.

use rustc_hash::FxHashMap;
use undercroft_base::CHUNK_PAGES;

use crate::memory_trace::{Becomes, Moved, SPACE_BYTES, WRITE};
use crate::spaces::Spaces;

/// A client's references as numbered pages of one size.
#[derive(Clone, Debug)]
pub struct PageStream {
    /// The client.
    pub name: String,
    /// `number << 1 | write`, in order.
    pub references: Vec<u32>,
    /// Half-open runs of numbers whose pages are neighbours in memory; together all numbers.
    pub runs: Vec<(u32, u32)>,
    /// How many numbers there are, those of untouched pages included. A multiple of 512.
    pub numbers: u32,
    /// Pages that are touched, found in memory or prefetched; ascending.
    pub touched: Vec<u32>,
    /// References that write.
    pub writes: u64,
    /// Movements of its pages, in order.
    pub moved: Vec<MovedPage>,
    /// The address spaces of the numbers. `None` if the trace has no forks and ends.
    pub spaces: Option<Spaces>,
}

/// A movement of a numbered page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedPage {
    /// How many references come before it.
    pub after: usize,
    /// The page, or, for an event without a page, the address space.
    pub number: u32,
    /// Its event.
    pub what: Becomes,
}

/// The trace touches more pages than can be numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trace touches too many places for pages of {page_bytes} bytes; use larger pages")]
pub struct TooManyPages {
    /// The page size that was asked for.
    pub page_bytes: u64,
}

const PER_CHUNK: usize = CHUNK_PAGES as usize;

/// Words for the bits of a chunk's pages, 64 a word.
const CHUNK_WORDS: usize = PER_CHUNK / 64;

/// Chunks of 512 pages in the order of their first use.
struct Chunks {
    list: Vec<u64>,
    seen: FxHashMap<u64, u32>,
    last: (u64, u32),
    too_many: TooManyPages,
}

impl Chunks {
    fn new(too_many: TooManyPages) -> Chunks {
        Chunks {
            list: Vec::new(),
            seen: FxHashMap::default(),
            last: (u64::MAX, 0),
            too_many,
        }
    }

    /// How many pages they have together.
    fn pages(&self) -> usize {
        self.list.len() * PER_CHUNK
    }

    #[inline]
    fn number_of(&mut self, page: u64) -> Result<u32, TooManyPages> {
        let per_chunk = u64::from(CHUNK_PAGES);
        let chunk = page / per_chunk;
        if chunk != self.last.0 {
            let fresh = self.list.len() as u32;
            let number = *self.seen.entry(chunk).or_insert(fresh);
            if number == fresh {
                if self.list.len() >= CHUNKS_MAX {
                    return Err(self.too_many);
                }
                self.list.push(chunk);
            }
            self.last = (chunk, number);
        }
        Ok(self.last.1 * CHUNK_PAGES + (page % per_chunk) as u32)
    }

    /// Packed references with page numbers, as [`PageStream::references`].
    fn number_references(
        &mut self,
        packed: &[u64],
        page_bytes: u64,
    ) -> Result<Vec<u32>, TooManyPages> {
        let shift = page_bytes.trailing_zeros() + 1;
        let mut references = Vec::with_capacity(packed.len());
        for word in packed {
            let number = self.number_of(word >> shift)?;
            references.push(number << 1 | (word & WRITE) as u32);
        }
        Ok(references)
    }

    /// Movements with page numbers.
    fn number_moved(
        &mut self,
        moved: &[Moved],
        page_bytes: u64,
    ) -> Result<Vec<MovedPage>, TooManyPages> {
        let shift = page_bytes.trailing_zeros() + 1;
        let mut numbered = Vec::with_capacity(moved.len());
        for moved in moved {
            let number = if moved.what.is_of_a_page() {
                // References lose their top bit in the same way.
                self.number_of((moved.address << 1) >> shift)?
            } else {
                (moved.address / SPACE_BYTES) as u32
            };
            numbered.push(MovedPage {
                after: moved.after,
                number,
                what: moved.what,
            });
        }
        Ok(numbered)
    }

    /// Gives numbers to pages of ancestors: a child inherits only pages that its parent, and the
    /// parent's parent, have numbers for. This runs from the end to the beginning, so that
    /// processes that reuse one number are told apart.
    ///
    /// * `named`: the pages that need a number, by chunk.
    fn hand_down(
        &mut self,
        references: &[u32],
        moves: &[MovedPage],
        space_chunks: u64,
        named: &mut Vec<bool>,
    ) -> Result<(), TooManyPages> {
        let forks = |moved: &MovedPage| matches!(moved.what, Becomes::Forked { .. });
        if !moves.iter().any(forks) {
            return Ok(());
        }
        // Of each address space, by chunk: the pages named between here and its end.
        let mut lives: FxHashMap<u32, FxHashMap<u64, [u64; CHUNK_WORDS]>> = FxHashMap::default();
        let name = |lives: &mut FxHashMap<_, FxHashMap<_, _>>, list: &[u64], number: u32| {
            let chunk = list[(number / CHUNK_PAGES) as usize];
            let life = lives.entry((chunk / space_chunks) as u32).or_default();
            let words: &mut [u64; CHUNK_WORDS] = life.entry(chunk % space_chunks).or_default();
            let at = number % CHUNK_PAGES;
            words[(at / 64) as usize] |= 1 << (at % 64);
        };
        let mut left = references;
        for moved in moves.iter().rev() {
            while left.len() > moved.after
                && let Some((last, before)) = left.split_last()
            {
                name(&mut lives, &self.list, last >> 1);
                left = before;
            }
            match moved.what {
                Becomes::Ended => _ = lives.remove(&moved.number),
                Becomes::Forked { parent } => {
                    let parent = u32::from(parent);
                    let life = lives.remove(&moved.number).unwrap_or_default();
                    for (chunk, words) in life {
                        let of_parent = u64::from(parent) * space_chunks + chunk;
                        let first = self.number_of(of_parent * u64::from(CHUNK_PAGES))?;
                        named.resize(self.pages(), false);
                        let theirs = lives.entry(parent).or_default().entry(chunk).or_default();
                        for (theirs, word) in theirs.iter_mut().zip(words) {
                            *theirs |= word;
                        }
                        for (at, named) in named[first as usize..]
                            .iter_mut()
                            .enumerate()
                            .take(PER_CHUNK)
                        {
                            *named |= words[at / 64] >> (at % 64) & 1 == 1;
                        }
                    }
                }
                _ => name(&mut lives, &self.list, moved.number),
            }
        }
        Ok(())
    }
}

/// The chunks of a trace in the order of their addresses.
struct ByAddress {
    /// Chunks in the order of addresses, by their old number.
    order: Vec<u32>,
    /// The reverse: the new number of each chunk.
    ranks: Vec<u32>,
}

impl ByAddress {
    /// * `places`: the place of each chunk.
    fn new(places: &[u64]) -> ByAddress {
        let mut order: Vec<u32> = (0..places.len() as u32).collect();
        order.sort_unstable_by_key(|at| places[*at as usize]);
        let mut ranks = vec![0; order.len()];
        for (rank, at) in order.iter().enumerate() {
            ranks[*at as usize] = rank as u32;
        }
        ByAddress { order, ranks }
    }

    /// The new number of a page.
    fn number(&self, number: u32) -> u32 {
        self.ranks[(number / CHUNK_PAGES) as usize] * CHUNK_PAGES + number % CHUNK_PAGES
    }

    /// The flags of pages, in the new order.
    fn sort(&self, flags: &[bool]) -> Vec<bool> {
        let chunk = |at: &u32| *at as usize * PER_CHUNK..(*at as usize + 1) * PER_CHUNK;
        let flags = self.order.iter().flat_map(|at| &flags[chunk(at)]);
        flags.copied().collect()
    }

    /// The places of chunks, in the new order.
    fn places(&self, places: &[u64]) -> Vec<u64> {
        self.order.iter().map(|at| places[*at as usize]).collect()
    }
}

/// The pages of a trace in the order of addresses, in whole chunks.
struct Pages {
    /// Pages of the footprint.
    touched: Vec<bool>,
    /// Pages that need a number.
    named: Vec<bool>,
    /// The place of each chunk.
    places: Vec<u64>,
    /// Chunks of an address space.
    space_chunks: u64,
}

/// The granules that have numbers. Granules without a named page have none.
struct Granules {
    /// Pages of a granule.
    size: usize,
    /// The granules that have numbers, ascending.
    kept: Vec<usize>,
    /// The new number of the first page of each granule that has numbers.
    firsts: Vec<u32>,
}

impl Granules {
    /// The largest granules with which few numbers are empty.
    fn choose(named: &[bool]) -> Granules {
        let distinct = named.iter().filter(|named| **named).count();
        let kept = |size: usize| -> Vec<usize> {
            let granules = named.chunks(size).enumerate();
            granules
                .filter(|(_, pages)| pages.iter().any(|named| *named))
                .map(|(at, _)| at)
                .collect()
        };
        let (size, kept) = [PER_CHUNK, 64, 8]
            .into_iter()
            .map(|size| (size, kept(size)))
            .find(|(size, kept)| kept.len() * size <= NUMBERS_SMALL.max(8 * distinct))
            .unwrap_or_else(|| (1, kept(1)));
        let mut firsts = vec![0; named.len() / size];
        for (rank, at) in kept.iter().enumerate() {
            firsts[*at] = (rank * size) as u32;
        }
        Granules { size, kept, firsts }
    }

    /// How many numbers there are.
    fn numbers(&self) -> usize {
        self.kept.len() * self.size
    }

    /// The new number of a page.
    fn number(&self, number: u32) -> u32 {
        let number = number as usize;
        self.firsts[number / self.size] + (number % self.size) as u32
    }

    /// Half-open runs of new numbers: granules whose pages are neighbours in memory.
    fn runs(&self, pages: &Pages) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let mut before = None;
        for at in &self.kept {
            let first = at * self.size;
            let chunk = pages.places[first / PER_CHUNK];
            let place = chunk * PER_CHUNK as u64 + (first % PER_CHUNK) as u64;
            let (start, size) = (self.firsts[*at], self.size as u32);
            match runs.last_mut() {
                Some(run) if before == Some(place) => run.1 = start + size,
                _ => runs.push((start, start + size)),
            }
            before = Some(place + u64::from(size));
        }
        runs
    }

    /// The address spaces of the new numbers, if the trace has forks or ends.
    fn spaces(&self, pages: &Pages, moved: &[MovedPage]) -> Option<Spaces> {
        let relates =
            |moved: &MovedPage| matches!(moved.what, Becomes::Forked { .. } | Becomes::Shared);
        let related = moved.iter().any(relates);
        if !related && moved.iter().all(|moved| moved.what != Becomes::Ended) {
            return None;
        }
        let per_chunk = PER_CHUNK / self.size;
        let owners = self.kept.iter().map(|at| {
            let chunk = pages.places[at / per_chunk];
            let in_space = chunk % pages.space_chunks;
            let place = in_space * per_chunk as u64 + (at % per_chunk) as u64;
            ((chunk / pages.space_chunks) as u32, place)
        });
        Some(Spaces::new(self.size as u32, owners, related))
    }
}

/// Which pages are of the footprint, and which need a number. Pages that only movements name need
/// one, too, but are not of the footprint.
fn touched_and_named(
    references: &[u32],
    moved: &[MovedPage],
    pages: usize,
) -> (Vec<bool>, Vec<bool>) {
    let mut touched = vec![false; pages];
    for word in references {
        touched[(*word >> 1) as usize] = true;
    }
    let mut named = vec![false; pages];
    for moved in moved.iter().filter(|moved| moved.what.is_of_a_page()) {
        named[moved.number as usize] = true;
        touched[moved.number as usize] |= matches!(
            moved.what,
            Becomes::Found | Becomes::Shared | Becomes::Returned | Becomes::Ahead
        );
    }
    for (named, touched) in named.iter_mut().zip(&touched) {
        *named |= touched;
    }
    (touched, named)
}

/// Gives the page of each reference and movement another number.
fn renumber(references: &mut [u32], moved: &mut [MovedPage], number: impl Fn(u32) -> u32) {
    for word in references {
        *word = number(*word >> 1) << 1 | (*word & 1);
    }
    for moved in moved.iter_mut().filter(|moved| moved.what.is_of_a_page()) {
        moved.number = number(moved.number);
    }
}

/// Most chunks that are numbered before granules shrink: page numbers have 30 bits.
const CHUNKS_MAX: usize = 1 << 20;

/// With fewer numbers than this, empty ones cost too little to matter.
const NUMBERS_SMALL: usize = 1 << 22;

impl PageStream {
    /// Numbers the pages of one client. `page_bytes`: a power of two.
    ///
    /// Errors: more than 2^20 chunks of 512 pages are touched. Cost: two passes over the
    /// references, with a hash lookup whenever the chunk changes.
    pub fn build(name: &str, packed: &[u64], page_bytes: u64) -> Result<PageStream, TooManyPages> {
        PageStream::build_moved(name, packed, &[], page_bytes)
    }

    /// As [`PageStream::build`], with movements. Dropped ranges must be whole pages.
    pub fn build_moved(
        name: &str,
        packed: &[u64],
        moved: &[Moved],
        page_bytes: u64,
    ) -> Result<PageStream, TooManyPages> {
        let mut chunks = Chunks::new(TooManyPages { page_bytes });
        let mut references = chunks.number_references(packed, page_bytes)?;
        let mut moved = chunks.number_moved(moved, page_bytes)?;
        let (mut touched, mut named) = touched_and_named(&references, &moved, chunks.pages());
        let space_chunks = SPACE_BYTES / page_bytes / u64::from(CHUNK_PAGES);
        chunks.hand_down(&references, &moved, space_chunks, &mut named)?;
        touched.resize(named.len(), false);
        let order = ByAddress::new(&chunks.list);
        renumber(&mut references, &mut moved, |number| order.number(number));
        let pages = Pages {
            touched: order.sort(&touched),
            named: order.sort(&named),
            places: order.places(&chunks.list),
            space_chunks,
        };
        let mut stream = PageStream::numbered(name, references, moved, &pages);
        // Several granules of one page may have been found together.
        stream.moved.dedup();
        Ok(stream)
    }

    /// Leaves out untouched granules where that pays, and finds the runs.
    fn numbered(
        name: &str,
        mut references: Vec<u32>,
        mut moved: Vec<MovedPage>,
        pages: &Pages,
    ) -> PageStream {
        let granules = Granules::choose(&pages.named);
        // Also if whole chunks are left out.
        if granules.numbers() != pages.named.len() {
            renumber(&mut references, &mut moved, |number| {
                granules.number(number)
            });
        }
        let touched = (0..).zip(&pages.touched).filter(|(_, touched)| **touched);
        PageStream {
            spaces: granules.spaces(pages, &moved),
            name: name.to_owned(),
            writes: references.iter().map(|word| u64::from(word & 1)).sum(),
            references,
            moved,
            runs: granules.runs(pages),
            numbers: (granules.numbers() as u32).next_multiple_of(CHUNK_PAGES),
            touched: touched.map(|(number, _)| granules.number(number)).collect(),
        }
    }

    /// Number of pages that are touched, found or prefetched.
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

    /// Pages that only movements name have their own numbers, and are not part of the footprint.
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
            of(0, Becomes::Dropped),
            of(4 * mib2, Becomes::Dropped),
            of(mib2 + 4096, Becomes::Dropped),
            of(9 * mib2 + 4096, Becomes::Used),
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
