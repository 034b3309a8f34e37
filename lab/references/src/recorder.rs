//! From touches to a trace: through a cache if there is one, then to granules, then to the writer.

use std::io::Write;

use crate::cache::{Cache, CacheCounts, CacheSpec};
use crate::touch::Touch;
use undercroft_trace::Header;
use undercroft_trace::Totals;
use undercroft_trace::TraceWriter;
use undercroft_trace::WriteError;

/// Writes the trace of a stream of touches.
pub struct Recorder<W: Write> {
    writer: TraceWriter<W>,
    cache: Option<Cache>,
}

impl<W: Write> Recorder<W> {
    /// Writes the header. Adds to it whether it filters, and then a granularity of at least a line.
    /// Errors: as [`TraceWriter::new`].
    pub fn new(
        output: W,
        mut header: Header,
        cache: Option<CacheSpec>,
    ) -> Result<Recorder<W>, WriteError> {
        if let Some(cache) = cache {
            header.filtered = true;
            header.granularity = header.granularity.max(cache.line_shift);
        }
        Ok(Recorder {
            writer: TraceWriter::new(output, header)?,
            cache: cache.map(Cache::new),
        })
    }

    /// Adds a touch. Errors: as [`TraceWriter::write`].
    #[inline]
    pub fn touch(&mut self, touch: Touch) -> Result<(), WriteError> {
        let writer = &mut self.writer;
        let granularity = writer.header().granularity;
        match &mut self.cache {
            None => touch
                .references(granularity)
                .try_for_each(|reference| writer.write(reference)),
            Some(cache) => cache.touch(touch, |mut reference| {
                reference.address = reference.address >> granularity << granularity;
                writer.write(reference)
            }),
        }
    }

    /// The totals so far.
    pub fn totals(&self) -> &Totals {
        self.writer.totals()
    }

    /// The cache's counts. `None` without a cache.
    pub fn cache_counts(&self) -> Option<&CacheCounts> {
        self.cache.as_ref().map(Cache::counts)
    }

    /// Ends the trace at `time_end`. Dirty lines stay in the cache: the program's memory is gone
    /// before they reach it.
    pub fn finish(self, time_end: u64) -> Result<(Totals, W), WriteError> {
        self.writer.finish(time_end)
    }
}
