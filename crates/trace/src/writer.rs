//! Writes a trace as a stream. Takes references and movements; writes the header, compressed blocks
//! and the end block. It never seeks.

use std::io::Write;

use crate::error::WriteError;
use crate::format::header::Header;
use crate::format::totals::Totals;
use crate::format::{BLOCK_BYTES, BLOCK_REFERENCES_MAX, BLOCK_TAG, block, checksum};
use crate::reference::{Event, Kind, Reference};

/// zstd's own default: 1 is hardly faster on these columns, 9 hardly smaller.
const COMPRESSION_LEVEL: i32 = 3;

/// Writes one trace. Call [`TraceWriter::finish`]: a trace without its end block reads as
/// truncated.
///
/// Writes the header at once, and each block when it is full, in three writes. So `output` may be
/// an unbuffered `File` or pipe.
pub struct TraceWriter<W: Write> {
    output: W,
    header: Header,
    chain: u32,
    pending: Vec<Event>,
    totals: Totals,
    columns: Vec<u8>,
    frame: Vec<u8>,
    compressor: zstd::bulk::Compressor<'static>,
}

impl<W: Write> TraceWriter<W> {
    /// Writes the header. Errors: it cannot be stored, or `output` failed.
    pub fn new(mut output: W, header: Header) -> Result<TraceWriter<W>, WriteError> {
        let (bytes, chain) = header.encode()?;
        output.write_all(&bytes)?;
        Ok(TraceWriter {
            output,
            header,
            chain,
            pending: Vec::with_capacity(BLOCK_REFERENCES_MAX as usize),
            totals: Totals::default(),
            columns: Vec::new(),
            frame: Vec::new(),
            compressor: zstd::bulk::Compressor::new(COMPRESSION_LEVEL)?,
        })
    }

    /// The header as written.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The totals so far.
    pub fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Adds a reference. Errors: it does not fit the header (nothing is written, and the trace can
    /// continue), or `output` failed.
    #[inline]
    pub fn write(&mut self, reference: Reference) -> Result<(), WriteError> {
        self.write_event(reference.into())
    }

    /// Adds a reference or, if the header announces its kind, a movement. Errors: as
    /// [`TraceWriter::write`].
    #[inline]
    pub fn write_event(&mut self, event: Event) -> Result<(), WriteError> {
        let index = self.totals.entries();
        let last = self.totals.time_end;
        if matches!(event.kind, Kind::Movement(movement) if !self.header.announces(movement)) {
            return Err(WriteError::Unannounced { index });
        }
        if event.time < last {
            return Err(WriteError::TimeGoesBack {
                index,
                time: event.time,
                last,
            });
        }
        if event.address & (self.header.granule_bytes() - 1) != 0 {
            return Err(WriteError::Misaligned {
                index,
                address: event.address,
                granule: self.header.granule_bytes(),
            });
        }
        if usize::from(event.client) >= self.header.clients.len() {
            return Err(WriteError::UnknownClient {
                index,
                client: event.client,
                clients: self.header.clients.len(),
            });
        }
        self.totals.count(event.kind);
        self.totals.time_end = event.time;
        self.pending.push(event);
        if self.pending.len() == BLOCK_REFERENCES_MAX as usize {
            self.flush_block()?;
        }
        Ok(())
    }

    /// Ends the trace at `time_end`, or at its last entry if that is later. Returns the totals and
    /// the output, flushed.
    pub fn finish(mut self, time_end: u64) -> Result<(Totals, W), WriteError> {
        self.flush_block()?;
        self.totals.time_end = self.totals.time_end.max(time_end);
        let end = self.totals.encode(self.chain, self.header.movement_kinds());
        self.output.write_all(&end)?;
        self.output.flush()?;
        Ok((self.totals, self.output))
    }

    /// Writes the pending entries as a block, so that a reader of a pipe gets them. A block of few
    /// entries compresses badly.
    pub fn flush_block(&mut self) -> Result<(), WriteError> {
        let (Some(first), Some(last)) = (self.pending.first(), self.pending.last()) else {
            return Ok(());
        };
        self.columns.clear();
        block::encode(&self.pending, self.header.granularity, &mut self.columns);
        self.frame.clear();
        self.frame
            .reserve(zstd::zstd_safe::compress_bound(self.columns.len()));
        self.compressor
            .compress_to_buffer(&self.columns, &mut self.frame)?;
        let mut head = Vec::with_capacity(BLOCK_BYTES);
        head.extend(BLOCK_TAG);
        for number in [self.pending.len(), self.columns.len(), self.frame.len()] {
            head.extend((number as u32).to_le_bytes());
        }
        head.extend(first.time.to_le_bytes());
        head.extend(last.time.to_le_bytes());
        self.chain = checksum(self.chain, &[&head, &self.frame]);
        self.output.write_all(&head)?;
        self.output.write_all(&self.frame)?;
        self.output.write_all(&self.chain.to_le_bytes())?;
        self.totals.blocks += 1;
        self.pending.clear();
        Ok(())
    }
}
