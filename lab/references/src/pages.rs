//! A trace in memory as pages, for simulators: 8 bytes a reference, pages numbered densely in the
//! order of first touch.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::Read;

use undercroft_trace::Header;
use undercroft_trace::Totals;
use undercroft_trace::TraceError;
use undercroft_trace::TraceReader;
use undercroft_trace::{Access, Kind, Reference};

/// A reference to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageEntry {
    /// Index into [`PageTrace::pages`].
    pub page: u32,
    /// Which client.
    pub client: u16,
    /// The access.
    pub access: Access,
}

/// A trace in memory, in pages of one size.
#[derive(Clone, Debug)]
pub struct PageTrace {
    /// Its header.
    pub header: Header,
    /// Its totals.
    pub totals: Totals,
    /// log2 of the bytes of a page.
    pub page_shift: u8,
    /// The references in order.
    pub entries: Vec<PageEntry>,
    /// Their times; empty unless they were asked for.
    pub times: Vec<u64>,
    /// Client and page number (address >> page_shift) of each dense index. Clients share no page.
    pub pages: Vec<(u16, u64)>,
}

/// Why a trace cannot be read as pages.
#[derive(Debug, thiserror::Error)]
pub enum PageTraceError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The pages are smaller than the trace's granule.
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
    /// Reads the rest of `reader`. `page_shift`: log2 of the page size. `times`: keep them (8 more
    /// bytes a reference). Cost: one hash lookup for each reference to another page than the one
    /// before.
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
        Ok(builder.finish(reader.totals().copied()))
    }

    /// As [`PageTrace::read`], for references in memory, such as a generator's.
    pub fn from_references(
        header: Header,
        references: impl IntoIterator<Item = Reference>,
        page_shift: u8,
        times: bool,
    ) -> Result<PageTrace, PageTraceError> {
        let mut builder = Builder::new(header, page_shift, times)?;
        for reference in references {
            builder.trace.totals.count(Kind::Access(reference.access));
            builder.trace.totals.time_end = reference.time;
            builder.add(reference)?;
        }
        Ok(builder.finish(None))
    }
}

/// Numbers pages densely in the order of their first use.
#[derive(Clone, Debug, Default)]
pub struct PageNumbers {
    index: HashMap<(u16, u64), u32, BuildHasherDefault<PageHasher>>,
    pages: Vec<(u16, u64)>,
    last: Option<((u16, u64), u32)>,
}

impl PageNumbers {
    /// The number of page `page` of `client`. `None` if there are 2^32 - 1 pages already. Cost: a
    /// hash lookup, unless it is the page of the last call.
    #[inline]
    pub fn number(&mut self, client: u16, page: u64) -> Option<u32> {
        let key = (client, page);
        if let Some((last, number)) = self.last
            && last == key
        {
            return Some(number);
        }
        let number = match self.index.get(&key) {
            Some(number) => *number,
            None => {
                let number = u32::try_from(self.pages.len())
                    .ok()
                    .filter(|number| *number < u32::MAX)?;
                self.pages.push(key);
                self.index.insert(key, number);
                number
            }
        };
        self.last = Some((key, number));
        Some(number)
    }

    /// Client and page of each number.
    pub fn pages(&self) -> &[(u16, u64)] {
        &self.pages
    }
}

struct Builder {
    trace: PageTrace,
    numbers: PageNumbers,
    times: bool,
}

impl Builder {
    fn new(header: Header, page_shift: u8, times: bool) -> Result<Builder, PageTraceError> {
        let page_shift = page_shift.min(63);
        check_page(&header, page_shift)?;
        Ok(Builder {
            trace: PageTrace {
                header,
                totals: Totals::default(),
                page_shift,
                entries: Vec::new(),
                times: Vec::new(),
                pages: Vec::new(),
            },
            numbers: PageNumbers::default(),
            times,
        })
    }

    fn add(&mut self, reference: Reference) -> Result<(), PageTraceError> {
        let trace = &mut self.trace;
        let page = self
            .numbers
            .number(reference.client, reference.address >> trace.page_shift)
            .ok_or(PageTraceError::TooManyPages(1 << trace.page_shift))?;
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

    fn finish(self, totals: Option<Totals>) -> PageTrace {
        let mut trace = self.trace;
        trace.pages = self.numbers.pages;
        trace.totals = totals.unwrap_or(trace.totals);
        trace
    }
}

/// Refuses pages of 2^`page_shift` bytes that are smaller than the trace's granule.
pub(crate) fn check_page(header: &Header, page_shift: u8) -> Result<(), PageTraceError> {
    if page_shift < header.granularity {
        Err(PageTraceError::PageTooSmall {
            page_bytes: 1 << page_shift,
            granule_bytes: header.granule_bytes(),
        })
    } else {
        Ok(())
    }
}

/// Hashes page numbers by two multiplications. The standard hasher guards against attackers, at ten
/// times the cost. A trace made to collide would only slow its own reading.
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
