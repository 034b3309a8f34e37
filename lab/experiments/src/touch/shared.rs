//! The mode `shared`: threads that all visit one memory, as those of a server do.
//!
//! A lock for each page keeps its bytes and its version together, so that every read is verified
//! whatever the others do. Readers share it. Its 24 bytes are memory of the program's own.

use super::args::{Access, Args, Phase};
use super::data::{Content, PAGE_WORDS, mix};
use super::modes::{MIB_PAGES, Measured, fresh, print};
use super::walk::{Pattern, Walk};
use std::sync::{Barrier, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// A page, and how often it was written.
struct Page<'a> {
    words: &'a mut [u64; PAGE_WORDS],
    version: u32,
}

/// The footprint.
struct Memory<'a> {
    content: Content,
    pages: Vec<RwLock<Page<'a>>>,
}

/// Fills the footprint, runs the phases in order, and checks every byte if it is asked for. Returns
/// the number of wrong reads.
pub(super) fn run(args: &Args) -> u64 {
    let pages = args.footprint_mib * MIB_PAGES;
    let (mut words, start) = fresh(pages);
    let (chunks, _) = words[start..start + pages * PAGE_WORDS].as_chunks_mut::<PAGE_WORDS>();
    let unwritten = |words| RwLock::new(Page { words, version: 0 });
    let memory = Memory {
        content: Content { seed: args.seed },
        pages: chunks.iter_mut().map(unwritten).collect(),
    };
    let threads = args.phases.iter().map(|phase| phase.threads).max();
    let threads = threads.unwrap_or(1);

    let (fill, wall) = together(threads, |number| {
        memory.each_of(number, threads, Memory::fill)
    });
    let mut errors = print("fill", "write", fill, wall);
    for (number, phase) in args.phases.iter().enumerate() {
        let work = |thread| memory.walk(*phase, number as u64, thread);
        let (measured, wall) = together(phase.threads, work);
        errors += print(phase.pattern.name(), phase.access.name(), measured, wall);
    }
    if args.verify {
        let verify = |number| memory.each_of(number, threads, Memory::verify);
        let (measured, wall) = together(threads, verify);
        errors += print("verify", "read", measured, wall);
    }
    errors
}

/// Runs `work` on each of `threads` threads, which begin at one moment. Returns what they measured,
/// and the time from there to the end of the last.
fn together(threads: usize, work: impl Fn(usize) -> Measured + Sync) -> (Vec<Measured>, Duration) {
    let (gate, began) = (Barrier::new(threads), OnceLock::new());
    let measured = std::thread::scope(|scope| {
        let run = |number: usize| {
            let (gate, began, work) = (&gate, &began, &work);
            scope.spawn(move || {
                gate.wait();
                began.get_or_init(Instant::now);
                work(number)
            })
        };
        let all: Vec<_> = (0..threads).map(run).collect();
        all.into_iter()
            .map(|thread| thread.join().expect("a worker does not panic"))
            .collect()
    });
    (
        measured,
        began.get().map_or(Duration::ZERO, Instant::elapsed),
    )
}

impl Memory<'_> {
    /// Does `work` with each page of a thread's share, in order. It returns whether the page was
    /// right.
    fn each_of(
        &self,
        thread: usize,
        threads: usize,
        work: impl Fn(&Self, usize) -> bool,
    ) -> Measured {
        let count = self.pages.len();
        let mut measured = Measured::new();
        for page in count * thread / threads..count * (thread + 1) / threads {
            let at = Instant::now();
            let good = work(self, page);
            measured.record(at.elapsed());
            measured.errors += u64::from(!good);
        }
        measured
    }

    /// Visits pages as the phase says. Scans of several threads begin at equal distances.
    fn walk(&self, phase: Phase, salt: u64, thread: usize) -> Measured {
        let count = self.pages.len();
        let ops = if phase.ops == 0 {
            count as u64
        } else {
            phase.ops
        };
        let mut seed = mix(self.content.seed ^ mix(salt << 8 | thread as u64));
        let mut walk = Walk::new(phase.pattern, count, seed);
        if phase.pattern == Pattern::Seq {
            walk = walk.starting_at((count * thread / phase.threads) as u64);
        }
        let mut measured = Measured::new();
        for _ in 0..ops.div_ceil(phase.threads as u64) {
            let page = walk.next();
            seed = seed.wrapping_add(1);
            let at = Instant::now();
            let good = match phase.access {
                Access::Read => self.read(page, seed),
                Access::Write => self.write(page),
            };
            measured.record(at.elapsed());
            measured.errors += u64::from(!good);
        }
        measured
    }

    fn fill(&self, page: usize) -> bool {
        let mut held = self.pages[page]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        self.content.fill(held.words, page as u64);
        true
    }

    fn read(&self, page: usize, salt: u64) -> bool {
        let held = self.pages[page]
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        (self.content).check_sample(held.words, page as u64, held.version, salt)
    }

    fn write(&self, page: usize) -> bool {
        let mut held = self.pages[page]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let good = held.words[1] == u64::from(held.version);
        held.version += 1;
        let version = held.version;
        self.content.write(held.words, page as u64, version);
        good
    }

    fn verify(&self, page: usize) -> bool {
        let held = self.pages[page]
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        self.content
            .check_all(held.words, page as u64, held.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_over_one_memory_lose_no_write_and_see_damage() {
        let (mut words, start) = fresh(64);
        let (chunks, _) = words[start..start + 64 * PAGE_WORDS].as_chunks_mut::<PAGE_WORDS>();
        let unwritten = |words| RwLock::new(Page { words, version: 0 });
        let memory = Memory {
            content: Content { seed: 3 },
            pages: chunks.iter_mut().map(unwritten).collect(),
        };
        let errors = |of: Vec<Measured>| of.iter().map(|one| one.errors).sum::<u64>();
        together(3, |thread| memory.each_of(thread, 3, Memory::fill));
        for text in ["random:write:4:4000", "zipf:read:3:3000", "seq:read:5:640"] {
            let phase: Phase = text.parse().expect("a phase");
            let (measured, _) = together(phase.threads, |thread| memory.walk(phase, 1, thread));
            assert_eq!(errors(measured), 0, "{text}");
        }
        let versions = |page: &RwLock<Page<'_>>| page.read().expect("not poisoned").version;
        assert_eq!(memory.pages.iter().map(versions).sum::<u32>(), 4000);
        memory.pages[9].write().expect("not poisoned").words[77] ^= 1;
        let (measured, _) = together(2, |thread| memory.each_of(thread, 2, Memory::verify));
        assert_eq!(errors(measured), 1);
    }
}
