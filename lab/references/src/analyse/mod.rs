//! Analyses a trace: counts, footprint, reuse distances, miss-ratio curve.

mod bins;
mod curve;
mod reuse;

pub use curve::MissRatioCurve;
pub use reuse::{Reuse, ReuseDistances, Sampling};

use std::io::Read;

use crate::pages::{PageNumbers, PageTraceError, check_page};
use undercroft_trace::Header;
use undercroft_trace::TraceReader;
use undercroft_trace::{Access, Reference};

/// References of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// Instruction reads.
    pub instructions: u64,
    /// Data reads.
    pub reads: u64,
    /// Data writes.
    pub writes: u64,
}

impl AccessCounts {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.instructions + self.reads + self.writes
    }

    /// Reads, of instructions too, for each write, as Table 1 of PCM swap counts; `None` without
    /// writes.
    pub fn reads_per_write(&self) -> Option<f64> {
        (self.writes > 0).then(|| (self.instructions + self.reads) as f64 / self.writes as f64)
    }

    fn count(&mut self, access: Access) {
        match access {
            Access::Instruction => self.instructions += 1,
            Access::Read => self.reads += 1,
            Access::Write => self.writes += 1,
        }
    }
}

/// A client's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounts {
    /// Its references.
    pub accesses: AccessCounts,
    /// Pages it touched.
    pub pages: u64,
    /// Pages it wrote.
    pub pages_written: u64,
}

/// Collects all of this in one pass. Memory: about 40 bytes a page.
#[derive(Clone, Debug)]
pub struct Analysis {
    page_shift: u8,
    numbers: PageNumbers,
    written: Vec<bool>,
    clients: Vec<ClientCounts>,
    distances: ReuseDistances,
    times: Option<(u64, u64)>,
}

impl Analysis {
    /// Of a trace with this header, in pages of 2^`page_shift` bytes. Errors: the trace's
    /// granularity is larger.
    pub fn new(
        header: &Header,
        page_shift: u8,
        sampling: Sampling,
    ) -> Result<Analysis, PageTraceError> {
        let page_shift = page_shift.min(63);
        check_page(header, page_shift)?;
        Ok(Analysis {
            page_shift,
            numbers: PageNumbers::default(),
            written: Vec::new(),
            clients: vec![ClientCounts::default(); header.clients.len()],
            distances: ReuseDistances::new(sampling),
            times: None,
        })
    }

    /// Of the whole of `reader`; calls `progress` with the bytes read after each block.
    pub fn read<R: Read>(
        reader: &mut TraceReader<R>,
        page_shift: u8,
        sampling: Sampling,
        mut progress: impl FnMut(u64),
    ) -> Result<Analysis, PageTraceError> {
        let mut analysis = Analysis::new(reader.header(), page_shift, sampling)?;
        let mut block = Vec::new();
        while reader.next_block(&mut block)? {
            for reference in block.drain(..) {
                analysis.add(reference)?;
            }
            progress(reader.offset());
        }
        Ok(analysis)
    }

    /// Adds one reference. Errors: too many pages.
    pub fn add(&mut self, reference: Reference) -> Result<(), PageTraceError> {
        let page = self
            .numbers
            .number(reference.client, reference.address >> self.page_shift)
            .ok_or(PageTraceError::TooManyPages(1 << self.page_shift))?;
        let client = usize::from(reference.client);
        if client >= self.clients.len() {
            self.clients.resize(client + 1, ClientCounts::default());
        }
        let client = &mut self.clients[client];
        client.accesses.count(reference.access);
        if self.written.len() <= page as usize {
            self.written.push(false);
            client.pages += 1;
        }
        if reference.access.is_write() && !std::mem::replace(&mut self.written[page as usize], true)
        {
            client.pages_written += 1;
        }
        self.distances.touch(page);
        let first = self.times.map_or(reference.time, |(first, _)| first);
        self.times = Some((first, reference.time));
        Ok(())
    }

    /// log2 of the bytes of a page.
    pub fn page_shift(&self) -> u8 {
        self.page_shift
    }

    /// References of each kind.
    pub fn accesses(&self) -> AccessCounts {
        let mut sum = AccessCounts::default();
        for client in &self.clients {
            sum.instructions += client.accesses.instructions;
            sum.reads += client.accesses.reads;
            sum.writes += client.accesses.writes;
        }
        sum
    }

    /// Each client's part, by its number.
    pub fn clients(&self) -> &[ClientCounts] {
        &self.clients
    }

    /// Pages touched.
    pub fn footprint_pages(&self) -> u64 {
        self.numbers.pages().len() as u64
    }

    /// Pages written.
    pub fn written_pages(&self) -> u64 {
        self.clients.iter().map(|client| client.pages_written).sum()
    }

    /// Times of the first and last reference.
    pub fn times(&self) -> Option<(u64, u64)> {
        self.times
    }

    /// Reuse distances and what follows from them.
    pub fn distances(&self) -> &ReuseDistances {
        &self.distances
    }
}
