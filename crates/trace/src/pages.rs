//! A trace in memory as pages: 8 bytes a reference, pages numbered densely in order of first touch. What simulators replay.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::Read;

use crate::error::TraceError;
use crate::format::header::Header;
use crate::reader::TraceReader;
use crate::reference::{Access, Reference};
use crate::writer::Totals;

/// One reference to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageEntry {
    /// Index into [`PageTrace::pages`].
    pub page: u32,
    /// Which client.
    pub client: u16,
    /// What it does.
    pub access: Access,
}

/// A trace in memory, in pages of one size.
#[derive(Clone, Debug)]
pub struct PageTrace {
    /// What the trace says of itself.
    pub header: Header,
    /// What it holds.
    pub totals: Totals,
    /// log2 of the bytes of a page.
    pub page_shift: u8,
    /// The references in order.
    pub entries: Vec<PageEntry>,
    /// Their times; empty unless asked for.
    pub times: Vec<u64>,
    /// Client and page number (address >> page_shift) of each dense index. Clients share no page.
    pub pages: Vec<(u16, u64)>,
}

/// Why a trace cannot be had as pages.
#[derive(Debug, thiserror::Error)]
pub enum PageTraceError {
    /// It cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace does not tell addresses inside its granule apart.
    #[error(
        "pages of {page_bytes} bytes: the trace's granularity is {granule_bytes} bytes; use pages at least as large"
    )]
    PageTooSmall {
        /// Asked for.
        page_bytes: u64,
        /// Of the trace.
        granule_bytes: u64,
    },
    /// More than 2^32 - 1 pages.
    #[error("the trace touches more than 2^32 pages of {0} bytes; use larger pages")]
    TooManyPages(u64),
}

impl PageTrace {
    /// Reads the rest of `reader`. `page_shift`: log2 of the page size. `times`: keep them (8 more bytes a reference).
    /// Cost: one hash lookup a reference that is not to the page of the one before.
    pub fn read<R: Read>(
        mut reader: TraceReader<R>,
        page_shift: u8,
        times: bool,
    ) -> Result<PageTrace, PageTraceError> {
        let mut builder = Builder::new(reader.header().clone(), page_shift, times)?;
        let mut block = Vec::new();
        while reader.next_block(&mut block)? {
            for reference in block.drain(..) {
                builder.add(reference)?;
            }
        }
        builder.trace.totals = reader.totals().copied().unwrap_or_default();
        Ok(builder.trace)
    }

    /// As [`PageTrace::read`], of references that are in memory already, such as a generator's.
    pub fn from_references(
        header: Header,
        references: impl IntoIterator<Item = Reference>,
        page_shift: u8,
        times: bool,
    ) -> Result<PageTrace, PageTraceError> {
        let mut builder = Builder::new(header, page_shift, times)?;
        for reference in references {
            builder.trace.totals.count(reference.access);
            builder.trace.totals.time_end = reference.time;
            builder.add(reference)?;
        }
        Ok(builder.trace)
    }
}

struct Builder {
    trace: PageTrace,
    index: HashMap<(u16, u64), u32, BuildHasherDefault<PageHasher>>,
    last: Option<((u16, u64), u32)>,
    times: bool,
}

impl Builder {
    fn new(header: Header, page_shift: u8, times: bool) -> Result<Builder, PageTraceError> {
        if page_shift < header.granularity {
            return Err(PageTraceError::PageTooSmall {
                page_bytes: 1 << page_shift,
                granule_bytes: header.granule_bytes(),
            });
        }
        Ok(Builder {
            trace: PageTrace {
                header,
                totals: Totals::default(),
                page_shift: page_shift.min(63),
                entries: Vec::new(),
                times: Vec::new(),
                pages: Vec::new(),
            },
            index: HashMap::default(),
            last: None,
            times,
        })
    }

    fn add(&mut self, reference: Reference) -> Result<(), PageTraceError> {
        let trace = &mut self.trace;
        let key = (reference.client, reference.address >> trace.page_shift);
        let page = match self.last {
            Some((last, page)) if last == key => page,
            _ => match self.index.get(&key) {
                Some(page) => *page,
                None => {
                    let page = u32::try_from(trace.pages.len())
                        .ok()
                        .filter(|page| *page < u32::MAX)
                        .ok_or(PageTraceError::TooManyPages(1 << trace.page_shift))?;
                    trace.pages.push(key);
                    self.index.insert(key, page);
                    page
                }
            },
        };
        self.last = Some((key, page));
        trace.entries.push(PageEntry {
            page,
            client: reference.client,
            access: reference.access,
        });
        if self.times {
            trace.times.push(reference.time);
        }
        Ok(())
    }
}

/// Hashes page numbers: two multiplications. The standard hasher guards against attackers, at ten times the cost; a trace
/// made to collide only slows its own reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u16(&mut self, number: u16) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }
}
