//! One client of a trace as numbered pages of one size, 4 bytes a reference.
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

/// One client's references as numbered pages of one size.
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
    /// What.
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

    /// A page that has a number in a child needs one in its parent, and in the parent's parent;
    /// otherwise it could not be inherited. This runs from the end to the beginning, so that the
    /// processes that had a number in turn are told apart. `named`: the pages that need a number,
    /// by chunk.
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

/// Most chunks that are numbered before granules shrink: page numbers have 30 bits.
const CHUNKS_MAX: usize = 1 << 20;

/// With fewer numbers than this, empty ones cost nothing that matters.
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
        let shift = page_bytes.trailing_zeros() + 1;
        let mut chunks = Chunks::new(TooManyPages { page_bytes });
        let mut references = Vec::with_capacity(packed.len());
        for word in packed {
            let number = chunks.number_of(word >> shift)?;
            references.push(number << 1 | (word & WRITE) as u32);
        }
        let mut moves = Vec::with_capacity(moved.len());
        for moved in moved {
            let space = (moved.address / SPACE_BYTES) as u32;
            let number = match moved.what.is_of_a_page() {
                // References lose their top bit in the same way.
                true => chunks.number_of((moved.address << 1) >> shift)?,
                false => space,
            };
            moves.push(MovedPage {
                after: moved.after,
                number,
                what: moved.what,
            });
        }
        let mut touched = vec![false; chunks.pages()];
        for word in &references {
            touched[(*word >> 1) as usize] = true;
        }
        let of_pages = moves.iter().filter(|moved| moved.what.is_of_a_page());
        let mut named = vec![false; chunks.pages()];
        for moved in of_pages {
            named[moved.number as usize] = true;
            touched[moved.number as usize] |= matches!(
                moved.what,
                Becomes::Found | Becomes::Shared | Becomes::Returned | Becomes::Ahead { .. }
            );
        }
        // Pages that only movements name have numbers, too, but are not part of the footprint.
        for (named, touched) in named.iter_mut().zip(&touched) {
            *named |= touched;
        }
        let space_chunks = SPACE_BYTES / page_bytes / u64::from(CHUNK_PAGES);
        chunks.hand_down(&references, &moves, space_chunks, &mut named)?;
        touched.resize(named.len(), false);
        let mut order: Vec<u32> = (0..chunks.list.len() as u32).collect();
        order.sort_unstable_by_key(|at| chunks.list[*at as usize]);
        let mut ranks = vec![0; order.len()];
        for (rank, at) in order.iter().enumerate() {
            ranks[*at as usize] = rank as u32;
        }
        let ranked = |number: u32| {
            ranks[(number / CHUNK_PAGES) as usize] * CHUNK_PAGES + number % CHUNK_PAGES
        };
        for word in &mut references {
            *word = ranked(*word >> 1) << 1 | (*word & 1);
        }
        for moved in &mut moves {
            if moved.what.is_of_a_page() {
                moved.number = ranked(moved.number);
            }
        }
        let in_order = |flags: Vec<bool>| -> Vec<bool> {
            let chunk = |at: &u32| *at as usize * PER_CHUNK..(*at as usize + 1) * PER_CHUNK;
            order
                .iter()
                .flat_map(|at| &flags[chunk(at)])
                .copied()
                .collect()
        };
        let (touched, named) = (in_order(touched), in_order(named));
        let firsts: Vec<u64> = order.iter().map(|at| chunks.list[*at as usize]).collect();
        let mut stream = PageStream::numbered(
            name,
            references,
            moves,
            &touched,
            &named,
            &firsts,
            space_chunks,
        );
        // Granules of one page that were found together.
        stream.moved.dedup();
        Ok(stream)
    }

    /// Leaves out untouched granules where that pays, and finds the runs. `firsts`: the place of
    /// each chunk. `named`: pages that need a number. `touched`: pages of the footprint.
    fn numbered(
        name: &str,
        mut references: Vec<u32>,
        mut moved: Vec<MovedPage>,
        touched: &[bool],
        named: &[bool],
        firsts: &[u64],
        space_chunks: u64,
    ) -> PageStream {
        let distinct = named.iter().filter(|touched| **touched).count();
        let kept = |granule: usize| -> Vec<usize> {
            let granules = named.chunks(granule).enumerate();
            granules
                .filter(|(_, pages)| pages.iter().any(|touched| *touched))
                .map(|(at, _)| at)
                .collect()
        };
        let (granule, kept) = [PER_CHUNK, 64, 8]
            .into_iter()
            .map(|granule| (granule, kept(granule)))
            .find(|(granule, kept)| kept.len() * granule <= NUMBERS_SMALL.max(8 * distinct))
            .unwrap_or_else(|| (1, kept(1)));
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let mut new_number = vec![0u32; touched.len() / granule];
        let mut before = None;
        for (rank, at) in kept.iter().enumerate() {
            let first = at * granule;
            let place = firsts[first / PER_CHUNK] * PER_CHUNK as u64 + (first % PER_CHUNK) as u64;
            let start = (rank * granule) as u32;
            new_number[*at] = start;
            match runs.last_mut() {
                Some(run) if before == Some(place) => run.1 = start + granule as u32,
                _ => runs.push((start, start + granule as u32)),
            }
            before = Some(place + granule as u64);
        }
        let renumber = |number: usize| new_number[number / granule] + (number % granule) as u32;
        // Also if whole chunks are left out.
        if kept.len() * granule != touched.len() {
            for word in &mut references {
                *word = renumber((*word >> 1) as usize) << 1 | (*word & 1);
            }
            for moved in &mut moved {
                if moved.what.is_of_a_page() {
                    moved.number = renumber(moved.number as usize);
                }
            }
        }
        let touched = (0..touched.len()).filter(|number| touched[*number]);
        let related =
            |moved: &MovedPage| matches!(moved.what, Becomes::Forked { .. } | Becomes::Shared);
        let related = moved.iter().any(related);
        let ends = moved.iter().any(|moved| moved.what == Becomes::Ended);
        let spaces = (related || ends).then(|| {
            let per_chunk = PER_CHUNK / granule;
            let owners = kept.iter().map(|at| {
                let chunk = firsts[at / per_chunk];
                let place = chunk % space_chunks * per_chunk as u64 + (at % per_chunk) as u64;
                ((chunk / space_chunks) as u32, place)
            });
            Spaces::new(granule as u32, owners, related)
        });
        PageStream {
            spaces,
            name: name.to_owned(),
            writes: references.iter().map(|word| u64::from(word & 1)).sum(),
            references,
            moved,
            runs,
            numbers: ((kept.len() * granule) as u32).next_multiple_of(CHUNK_PAGES),
            touched: touched.map(renumber).collect(),
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
            of(0, Becomes::Evicted { batch: 0 }),
            of(4 * mib2, Becomes::Evicted { batch: 0 }),
            of(mib2 + 4096, Becomes::Dropped),
            of(9 * mib2 + 4096, Becomes::Evicted { batch: 0 }),
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
