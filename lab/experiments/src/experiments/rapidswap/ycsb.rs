//! Generates the workloads of YCSB as references to pages: RapidSwap, table 2.
//!
//! Records of 1 KiB lie one after the other, in the order in which they are loaded. A load writes
//! all of them. Then queries choose records as YCSB does: by Zipf's law, of ranks that a hash
//! spreads over all records. Keys are hashed, too, so that records that follow each other in a scan
//! lie anywhere.

use std::convert::Infallible;

use undercroft_seeded::{Random, Zipf, mix};
use undercroft_sim::MemoryTrace;
use undercroft_trace::{Access, Reference};

/// Bytes of a record: ten fields of 100 bytes.
const RECORD_BYTES: u64 = 1 << 10;

/// Records of a page.
pub(super) const PAGE_RECORDS: u64 = 4096 / RECORD_BYTES;

/// YCSB's constant of Zipf's law.
const THETA: f64 = 0.99;

/// Most records of a scan, YCSB's default; its length is uniform.
const SCAN_MAX: u64 = 100;

/// How a workload chooses records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// By Zipf's law.
    Zipf,
    /// The same, of the records inserted last. What writes inserts a record, into a page anywhere.
    Latest,
    /// The first of a scan by Zipf's law. What writes inserts, as above.
    Scan,
}

/// A workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    /// YCSB's letter.
    pub(super) name: &'static str,
    choice: Choice,
    /// Share of the queries that write.
    writes: f64,
}

const fn workload(name: &'static str, choice: Choice, writes: f64) -> Workload {
    Workload {
        name,
        choice,
        writes,
    }
}

/// All six. What reads, changes and writes a record (F) finds it in memory the second time, so it
/// counts as one reference that writes.
pub(super) const WORKLOADS: [Workload; 6] = [
    workload("A", Choice::Zipf, 0.5),
    workload("B", Choice::Zipf, 0.05),
    workload("C", Choice::Zipf, 0.0),
    workload("D", Choice::Latest, 0.05),
    workload("E", Choice::Scan, 0.05),
    workload("F", Choice::Zipf, 0.5),
];

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Pages that are loaded.
    pub(super) pages: u64,
    /// Pages of them that no query uses: the first.
    pub(super) unused: u64,
    /// References of the queries.
    pub(super) refs: u64,
}

/// A workload's references.
pub(super) struct Generated {
    /// The load, then the queries.
    pub(super) trace: MemoryTrace,
    /// References of the load.
    pub(super) loads: u64,
    /// The references of each query, if not one each.
    pub(super) queries: Option<Vec<u64>>,
}

impl Generated {
    /// The description of its making, for the results.
    pub(super) fn command(workload: &Workload, size: &Size) -> String {
        format!(
            "YCSB {}: load pages={} in order, {PAGE_RECORDS} records each; then refs={}, records={}, \
             theta={THETA}, writes={}, {:?}",
            workload.name,
            size.pages,
            size.refs,
            (size.pages - size.unused) * PAGE_RECORDS,
            workload.writes,
            workload.choice,
        )
    }
}

/// The queries in progress.
struct Queries {
    workload: Workload,
    size: Size,
    random: Random,
    zipf: Zipf,
    inserted: u64,
    /// The key that the scan is at, and records still to come.
    scan: (u64, u64),
    lengths: Vec<u64>,
}

impl Queries {
    fn new(workload: &Workload, size: &Size) -> Queries {
        let seed = u64::from(workload.name.as_bytes()[0]);
        Queries {
            workload: *workload,
            size: *size,
            random: Random::new(seed),
            zipf: Zipf::new((size.pages - size.unused) * PAGE_RECORDS, THETA),
            inserted: 0,
            scan: (0, 0),
            lengths: Vec::new(),
        }
    }

    fn records(&self) -> u64 {
        (self.size.pages - self.size.unused) * PAGE_RECORDS
    }

    /// The page of a record, by its number among those that queries use.
    fn page(&self, record: u64) -> u64 {
        self.size.unused + record / PAGE_RECORDS
    }

    /// The page of the inserted record of this number: where the program has found a place.
    fn hole(&self, inserted: u64) -> u64 {
        self.page(mix(!inserted) % self.records())
    }

    fn insert(&mut self) -> (u64, bool) {
        self.inserted += 1;
        (self.hole(self.inserted - 1), true)
    }

    /// The next page, and whether it is written.
    fn step(&mut self) -> (u64, bool) {
        if self.scan.1 > 0 {
            self.scan = (self.scan.0 + 1, self.scan.1 - 1);
            return (self.page(mix(self.scan.0) % self.records()), false);
        }
        let write = self.random.unit() < self.workload.writes;
        let rank = self.zipf.rank(&mut self.random).min(self.records() - 1);
        match self.workload.choice {
            Choice::Zipf => (self.page(mix(rank) % self.records()), write),
            Choice::Latest if write => self.insert(),
            Choice::Latest => match self.inserted.checked_sub(rank + 1) {
                Some(inserted) => (self.hole(inserted), false),
                None => {
                    let last = self.records() - 1;
                    (self.page(last - (rank - self.inserted)), false)
                }
            },
            Choice::Scan if write => {
                self.lengths.push(1);
                self.insert()
            }
            Choice::Scan => {
                let length = 1 + self.random.scaled(SCAN_MAX);
                self.lengths.push(length);
                self.scan = (mix(rank) % self.records(), length - 1);
                (self.page(mix(self.scan.0) % self.records()), false)
            }
        }
    }
}

/// Generates a workload.
pub(super) fn generate(workload: &Workload, size: &Size) -> Generated {
    let loads = size.pages * PAGE_RECORDS;
    let mut queries = Queries::new(workload, size);
    let load = (0..loads).map(|record| (record / PAGE_RECORDS, true));
    let work = (0..size.refs).map(|_| queries.step());
    let references = load.chain(work).map(|(page, write)| {
        Ok::<_, Infallible>(Reference {
            time: 0,
            address: page * 4096,
            access: if write { Access::Write } else { Access::Read },
            client: 0,
            thread: 0,
        })
    });
    let clients = ["client0".to_owned()];
    let trace = MemoryTrace::collect(workload.name, 4096, &clients, references);
    Generated {
        trace: trace.unwrap_or_else(|never| match never {}),
        loads,
        queries: (workload.choice == Choice::Scan).then_some(queries.lengths),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(name: &str, size: &Size) -> (Generated, Vec<(u64, bool)>) {
        let workload = WORKLOADS.iter().find(|of| of.name == name).expect(name);
        let generated = generate(workload, size);
        let words = generated.trace.clients[0].1.iter();
        let pages = words.map(|word| (word >> 13, word & 1 != 0)).collect();
        (generated, pages)
    }

    #[test]
    fn a_load_writes_every_page_and_queries_keep_to_theirs() {
        let size = Size {
            pages: 300,
            unused: 100,
            refs: 20_000,
        };
        for workload in &WORKLOADS {
            let (generated, pages) = pages(workload.name, &size);
            let (load, work) = pages.split_at(generated.loads as usize);
            assert!(load.iter().all(|(_, write)| *write) && load[1199].0 == 299);
            assert!(work.iter().all(|(page, _)| (100..300).contains(page)));
            if let Some(queries) = &generated.queries {
                let all: u64 = queries.iter().sum();
                assert!((20_000..20_100).contains(&all), "{all}");
                continue;
            }
            let writes = work.iter().filter(|(_, write)| *write).count() as f64 / 20_000.0;
            assert!((writes - workload.writes).abs() < 0.02, "{writes}");
        }
    }

    #[test]
    fn the_latest_are_read_most() {
        let size = Size {
            pages: 300,
            unused: 0,
            refs: 2_000,
        };
        let (generated, pages) = pages("D", &size);
        let before_insert = pages[generated.loads as usize..].iter().take(5);
        // Until one is inserted, these are among the last that were loaded.
        let last = before_insert
            .filter(|(page, write)| !write && *page >= 290)
            .count();
        assert!(last > 0);
    }
}
