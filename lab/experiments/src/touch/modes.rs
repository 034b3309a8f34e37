//! The modes of `undercroft-touch`: what each does to the memory, and how it is timed.

use super::PhaseLine;
use super::args::{Access, Args, Phase};
use super::data::{Content, PAGE_WORDS, mix};
use super::walk::Walk;
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// Two significant digits: buckets of 1 %, about 40 KiB a thread. So the histograms stay small
/// beside the footprint.
const HISTOGRAM_DIGITS: u8 = 2;
const HISTOGRAM_MAX_NS: u64 = 60_000_000_000;
pub(super) const MIB_PAGES: usize = 256;

/// The measurements of one thread.
pub(super) struct Measured {
    latencies: Histogram<u64>,
    sum_ns: u64,
    pub(super) errors: u64,
}

impl Measured {
    pub(super) fn new() -> Measured {
        let latencies = Histogram::new_with_bounds(1, HISTOGRAM_MAX_NS, HISTOGRAM_DIGITS);
        Measured {
            latencies: latencies.expect("the bounds are constants in range"),
            sum_ns: 0,
            errors: 0,
        }
    }

    pub(super) fn record(&mut self, latency: Duration) {
        let ns = latency.as_nanos() as u64;
        self.latencies.saturating_record(ns.max(1));
        self.sum_ns += ns;
    }
}

/// Adds the threads up and prints the phase's line. Returns its errors.
pub(super) fn print(pattern: &str, rw: &str, threads: Vec<Measured>, wall: Duration) -> u64 {
    let mut all = Measured::new();
    let threads_count = threads.len();
    for thread in threads {
        all.latencies.add(&thread.latencies).expect("equal bounds");
        all.sum_ns += thread.sum_ns;
        all.errors += thread.errors;
    }
    let ops = all.latencies.len();
    let seconds = wall.as_secs_f64();
    let quantile = |q| all.latencies.value_at_quantile(q);
    let line = PhaseLine {
        pattern: pattern.to_owned(),
        rw: rw.to_owned(),
        threads: threads_count,
        ops,
        mean_ns: all.sum_ns as f64 / ops.max(1) as f64,
        p50_ns: quantile(0.5),
        p90_ns: quantile(0.9),
        p99_ns: quantile(0.99),
        p999_ns: quantile(0.999),
        max_ns: all.latencies.max(),
        ops_per_second: ops as f64 / seconds.max(1e-9),
        seconds,
        errors: all.errors,
    };
    println!("{}", serde_json::to_string(&line).expect("a flat record"));
    all.errors
}

/// `pages` pages of zeros, never touched: (memory, index of the first word of the first page).
pub(super) fn fresh(pages: usize) -> (Vec<u64>, usize) {
    let memory = vec![0u64; (pages + 1) * PAGE_WORDS];
    let start = memory.as_ptr().align_offset(4096) % PAGE_WORDS;
    (memory, start)
}

/// Fills the footprint, runs the phases, and verifies if it is asked for. Returns the number of
/// wrong reads, as every mode does.
pub(super) fn patterns(args: &Args) -> u64 {
    let content = Content { seed: args.seed };
    let pages = args.footprint_mib * MIB_PAGES;
    let (mut memory, start) = fresh(pages);
    let memory = &mut memory[start..start + pages * PAGE_WORDS];
    let mut versions = vec![0u32; pages];

    let began = Instant::now();
    let mut fill = Measured::new();
    for (page, words) in memory.chunks_exact_mut(PAGE_WORDS).enumerate() {
        let at = Instant::now();
        content.fill(words, page as u64);
        fill.record(at.elapsed());
    }
    let mut errors = print("fill", "write", vec![fill], began.elapsed());
    for (number, phase) in args.phases.iter().enumerate() {
        errors += run_phase(content, memory, &mut versions, *phase, number as u64);
    }
    if args.verify {
        let began = Instant::now();
        let mut check = Measured::new();
        for (page, words) in memory.chunks_exact(PAGE_WORDS).enumerate() {
            let at = Instant::now();
            let good = content.check_all(words, page as u64, versions[page]);
            check.record(at.elapsed());
            check.errors += u64::from(!good);
        }
        errors += print("verify", "read", vec![check], began.elapsed());
    }
    if args.sleep_seconds > 0 {
        let began = Instant::now();
        std::thread::sleep(Duration::from_secs(args.sleep_seconds));
        print("sleep", "", vec![Measured::new()], began.elapsed());
    }
    errors
}

/// Runs one phase. Pages and versions are split evenly over the threads. As warm-up, a tenth as
/// many operations run first, unmeasured.
fn run_phase(
    content: Content,
    memory: &mut [u64],
    versions: &mut [u32],
    phase: Phase,
    salt: u64,
) -> u64 {
    let pages = versions.len();
    let share = pages.div_ceil(phase.threads);
    let ops = if phase.ops == 0 {
        pages as u64
    } else {
        phase.ops
    };
    let ops_each = ops.div_ceil(phase.threads as u64);
    let began = std::sync::OnceLock::new();
    let gate = std::sync::Barrier::new(phase.threads);
    let measured: Vec<Measured> = std::thread::scope(|scope| {
        let parts = memory
            .chunks_mut(share * PAGE_WORDS)
            .zip(versions.chunks_mut(share));
        let threads: Vec<_> = parts
            .enumerate()
            .map(|(number, (words, versions))| {
                let (gate, began) = (&gate, &began);
                let first_page = (number * share) as u64;
                scope.spawn(move || {
                    let seed = mix(content.seed ^ mix(salt << 8 | number as u64));
                    let walk = Walk::new(phase.pattern, versions.len(), seed);
                    let mut visitor = Visitor {
                        content,
                        words,
                        versions,
                        first_page,
                        walk,
                        seed,
                    };
                    let mut warm_up = Measured::new();
                    (0..ops_each / 10).for_each(|_| visitor.visit(phase.access, &mut warm_up));
                    gate.wait();
                    began.get_or_init(Instant::now);
                    let mut measured = Measured::new();
                    (0..ops_each).for_each(|_| visitor.visit(phase.access, &mut measured));
                    measured.errors += warm_up.errors;
                    measured
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a worker does not panic"))
            .collect()
    });
    let wall = began.get().map_or(Duration::ZERO, Instant::elapsed);
    print(phase.pattern.name(), phase.access.name(), measured, wall)
}

/// A thread's share of the memory and its place in the walk.
struct Visitor<'a> {
    content: Content,
    words: &'a mut [u64],
    versions: &'a mut [u32],
    first_page: u64,
    walk: Walk,
    seed: u64,
}

impl Visitor<'_> {
    fn visit(&mut self, access: Access, measured: &mut Measured) {
        let index = self.walk.next();
        let page = self.first_page + index as u64;
        let words = &mut self.words[index * PAGE_WORDS..(index + 1) * PAGE_WORDS];
        let version = self.versions[index];
        self.seed = self.seed.wrapping_add(1);
        let at = Instant::now();
        let good = match access {
            Access::Read => self.content.check_sample(words, page, version, self.seed),
            Access::Write => {
                let good = words[1] == u64::from(version);
                self.content.write(words, page, version + 1);
                good
            }
        };
        measured.record(at.elapsed());
        measured.errors += u64::from(!good);
        if access == Access::Write {
            self.versions[index] = version + 1;
        }
    }
}

/// Uses fresh memory each round. One word a page is written, and each write is timed. Then the page
/// must hold the word, and zeros.
pub(super) fn first_touch(args: &Args) -> u64 {
    let pages = args.footprint_mib * MIB_PAGES;
    let mut errors = 0;
    for round in 0..args.rounds as u64 {
        let (mut memory, start) = fresh(pages);
        let memory = &mut memory[start..start + pages * PAGE_WORDS];
        let mut touched = Measured::new();
        let began = Instant::now();
        for (page, words) in memory.chunks_exact_mut(PAGE_WORDS).enumerate() {
            let at = Instant::now();
            words[0] = mix(args.seed ^ round ^ page as u64);
            touched.record(at.elapsed());
        }
        let wall = began.elapsed();
        for (page, words) in memory.chunks_exact(PAGE_WORDS).enumerate() {
            let zero = words[1] == 0 && words[PAGE_WORDS / 2] == 0 && words[PAGE_WORDS - 1] == 0;
            let good = zero && words[0] == mix(args.seed ^ round ^ page as u64);
            touched.errors += u64::from(!good);
        }
        errors += print("first-touch", "write", vec![touched], wall);
    }
    errors
}

/// A program that stays below its limit: generates, sorts, sums up. The sum of each round must
/// agree with that of the unsorted numbers.
pub(super) fn compute(args: &Args) -> u64 {
    let words = args.footprint_mib * MIB_PAGES * PAGE_WORDS;
    let mut memory = vec![0u64; words];
    let mut errors = 0;
    for round in 0..args.rounds as u64 {
        let began = Instant::now();
        let mut sum = 0u64;
        for (index, word) in memory.iter_mut().enumerate() {
            *word = mix(args.seed ^ (round << 40) ^ index as u64);
            sum = sum.wrapping_add(*word);
        }
        memory.sort_unstable();
        let after = memory
            .iter()
            .fold(0u64, |sum, word| sum.wrapping_add(*word));
        let mut measured = Measured::new();
        measured.record(began.elapsed());
        measured.errors += u64::from(after != sum || !memory.is_sorted());
        errors += print("compute", "", vec![measured], began.elapsed());
    }
    errors
}
