//! Reads a trace as a stream. It trusts nothing in the file: every length has its bound, every
//! block its checksum.

use std::io::{self, Read};

use crate::error::TraceError;
use crate::format::header::{Header, corrupt, not_a_trace};
use crate::format::totals::Totals;
use crate::format::{
    BLOCK_BYTES, BLOCK_REFERENCES_MAX, BLOCK_TAG, END_BYTES, END_MOVEMENTS_BYTES, END_TAG,
    HEADER_BYTES, MAGIC, block, checksum, u32_at, u64_at,
};
use crate::reference::{Event, Movement, Reference};

/// Reads one trace, a block at a time, with about 4 MiB of memory. Iterate it, or take whole blocks
/// with [`TraceReader::next_block`], which is faster; both give references only.
/// [`TraceReader::next_events`] also gives the movements between them.
///
/// The entries of a block are given out only when its checksum fits. An error is given once; then
/// there is nothing more.
pub struct TraceReader<R: Read> {
    input: Input<R>,
    header: Header,
    chain: u32,
    seen: Totals,
    end: Option<Totals>,
    failed: bool,
    block: Vec<Reference>,
    given: usize,
    events: Vec<Event>,
    frame: Vec<u8>,
    columns: Vec<u8>,
    decompressor: zstd::bulk::Decompressor<'static>,
}

impl<R: Read> TraceReader<R> {
    /// Reads the header. Errors: not a trace, an unknown version, a damaged header.
    pub fn new(input: R) -> Result<TraceReader<R>, TraceError> {
        let mut input = Input { input, offset: 0 };
        let mut fixed = [0; HEADER_BYTES];
        let got = input.read(&mut fixed)?;
        // A short file may be the beginning of a trace, or something else.
        let common = got.min(MAGIC.len());
        if got == 0 || fixed[..common] != MAGIC[..common] {
            let wrong = (0..common).find(|at| fixed[*at] != MAGIC[*at]);
            return Err(not_a_trace(wrong.unwrap_or(0), &fixed[..common]));
        }
        if got < HEADER_BYTES {
            return Err(input.truncated("the header", 0));
        }
        let mut text = vec![0; Header::text_bytes(&fixed)?];
        input.fill(&mut text, "the header", 0)?;
        let computed = checksum(0, &[&fixed, &text]);
        let chain = input.checksum(computed, "the header", 0)?;
        let decompressor = zstd::bulk::Decompressor::new()
            .map_err(|source| TraceError::Io { offset: 0, source })?;
        Ok(TraceReader {
            header: Header::decode(&fixed, &text)?,
            input,
            chain,
            seen: Totals::default(),
            end: None,
            failed: false,
            block: Vec::new(),
            given: 0,
            events: Vec::new(),
            frame: Vec::new(),
            columns: Vec::new(),
            decompressor,
        })
    }

    /// The trace's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The trace's totals; `Some` once its end has been read.
    pub fn totals(&self) -> Option<&Totals> {
        self.end.as_ref()
    }

    /// Bytes read so far.
    pub fn offset(&self) -> u64 {
        self.input.offset
    }

    /// Appends the next block's references to `out` (none, if it has only movements). False at the
    /// end. References that the iterator has not returned yet come first. On an error `out` is
    /// unchanged.
    pub fn next_block(&mut self, out: &mut Vec<Reference>) -> Result<bool, TraceError> {
        if self.given < self.block.len() {
            out.extend(self.block.drain(..).skip(self.given));
            self.given = 0;
            return Ok(true);
        }
        if self.failed || self.end.is_some() {
            return Ok(false);
        }
        if !self.header.movements {
            return self.part(out);
        }
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        let result = self.part(&mut events);
        out.extend(events.iter().filter_map(|event| event.reference()));
        self.events = events;
        result
    }

    /// Appends the next block's references and movements to `out`, in order. False at the end. On
    /// an error `out` is unchanged. Only for a reader that is used in this way from the beginning.
    pub fn next_events(&mut self, out: &mut Vec<Event>) -> Result<bool, TraceError> {
        if self.failed || self.end.is_some() {
            return Ok(false);
        }
        self.part(out)
    }

    /// As [`TraceReader::read_part`]; after an error nothing more is read.
    fn part<T: block::Entry>(&mut self, out: &mut Vec<T>) -> Result<bool, TraceError> {
        let length = out.len();
        let result = self.read_part(out);
        if result.is_err() {
            self.failed = true;
            out.truncate(length);
        }
        result
    }

    /// Reads a block (true) or the end block (false).
    fn read_part<T: block::Entry>(&mut self, out: &mut Vec<T>) -> Result<bool, TraceError> {
        let begin = self.input.offset;
        let mut head = [0; END_BYTES + END_MOVEMENTS_BYTES];
        self.input.fill(&mut head[..4], "a block", begin)?;
        if head[..4] == BLOCK_TAG {
            self.input
                .fill(&mut head[4..BLOCK_BYTES], "a block", begin)?;
            self.read_block(begin, &head[..BLOCK_BYTES], out)?;
            return Ok(true);
        }
        if head[..4] != END_TAG {
            return Err(TraceError::Corrupt {
                offset: begin,
                why: format!(
                    "a block begins with \"{}\"; REFS or END. must stand here",
                    head[..4].escape_ascii()
                ),
            });
        }
        let end = &mut head[..END_BYTES + 8 * self.header.movement_kinds()];
        self.input.fill(&mut end[4..], "the end block", begin)?;
        self.read_end(begin, end)?;
        Ok(false)
    }

    /// Reads a block after its head, checks it, and appends its entries to `out`.
    fn read_block<T: block::Entry>(
        &mut self,
        begin: u64,
        head: &[u8],
        out: &mut Vec<T>,
    ) -> Result<(), TraceError> {
        let [count, columns, frame] = [u32_at(head, 4), u32_at(head, 8), u32_at(head, 12)];
        let claims = block::Claims {
            count: count as usize,
            first_time: u64_at(head, 16),
            last_time: u64_at(head, 24),
            granularity: self.header.granularity,
            clients: self.header.clients.len(),
        };
        check_sizes(begin, [count, columns, frame])?;
        self.frame.resize(frame as usize, 0);
        self.input.fill(&mut self.frame, "a block", begin)?;
        let computed = checksum(self.chain, &[head, &self.frame]);
        self.chain = self.input.checksum(computed, "a block", begin)?;
        // The checksum fits, so an error from here on was made on purpose.
        if claims.first_time < self.seen.time_end || claims.last_time < claims.first_time {
            return Err(corrupt(begin + 16, "time goes back".to_owned()));
        }
        self.decompress(begin, columns as usize)?;
        block::decode(&self.columns, &claims, out).map_err(|(at, why)| {
            let why = format!("in the block that begins here, byte {at} of its columns: {why}");
            corrupt(begin, why)
        })?;
        block::count(&self.columns[..claims.count], &mut self.seen);
        self.check_announced(begin)?;
        self.seen.blocks += 1;
        self.seen.time_end = claims.last_time;
        Ok(())
    }

    /// Unpacks the frame into `self.columns`. Errors: no zstd frame, or not one of `bytes`.
    fn decompress(&mut self, begin: u64, bytes: usize) -> Result<(), TraceError> {
        self.columns.clear();
        self.columns.reserve(bytes);
        let got = self
            .decompressor
            .decompress_to_buffer(&self.frame, &mut self.columns)
            .map_err(|error| {
                let at = begin + BLOCK_BYTES as u64;
                corrupt(at, format!("the zstd frame: {error}"))
            })?;
        if got != bytes {
            let why = format!("a block claims {bytes} bytes of columns, it has {got}");
            return Err(corrupt(begin + 8, why));
        }
        Ok(())
    }

    /// Errors: a movement was seen of a kind that the header does not announce.
    fn check_announced(&self, begin: u64) -> Result<(), TraceError> {
        for (kind, what) in [
            (Movement::Accessed, "a use of a page in memory"),
            (Movement::Locked, "a locked page"),
            (Movement::Forked, "a fork"),
            (Movement::Ended, "the end of a client"),
            (Movement::Shared, "a page that is shared"),
        ] {
            if self.seen.moved(kind) > 0 && !self.header.announces(kind) {
                let why = format!("{what}, and the header does not announce any");
                return Err(corrupt(begin, why));
            }
        }
        Ok(())
    }

    fn read_end(&mut self, begin: u64, end: &[u8]) -> Result<(), TraceError> {
        let sum_at = end.len() - 4;
        let computed = checksum(self.chain, &[&end[..sum_at]]);
        let stored = u32_at(end, sum_at);
        if stored != computed {
            return Err(TraceError::Checksum {
                offset: begin + sum_at as u64,
                of: "the end block",
                begin,
                stored,
                computed,
            });
        }
        let said = Totals::decode(end, self.header.movement_kinds());
        let seen = Totals {
            time_end: said.time_end,
            ..self.seen
        };
        let sum_fits = u64_at(end, 16) == seen.references() && u32_at(end, 4) == 0;
        if said != seen || said.time_end < self.seen.time_end || !sum_fits {
            return Err(TraceError::Corrupt {
                offset: begin,
                why: format!(
                    "the end block says {said:?}, the blocks before it {:?}",
                    self.seen
                ),
            });
        }
        if self.input.read(&mut [0])? != 0 {
            return Err(TraceError::Corrupt {
                offset: begin + end.len() as u64,
                why: "bytes after the end block".to_owned(),
            });
        }
        self.end = Some(said);
        Ok(())
    }
}

impl<R: Read> Iterator for TraceReader<R> {
    type Item = Result<Reference, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.given == self.block.len() {
            let mut block = std::mem::take(&mut self.block);
            block.clear();
            self.given = 0;
            let result = self.next_block(&mut block);
            self.block = block;
            match result {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        let reference = self.block[self.given];
        self.given += 1;
        Some(Ok(reference))
    }
}

/// Errors: a block claims more entries, or more bytes, than a block can have.
fn check_sizes(begin: u64, [count, columns, frame]: [u32; 3]) -> Result<(), TraceError> {
    if count == 0 || count > BLOCK_REFERENCES_MAX {
        let why = format!("a block claims {count} entries");
        return Err(corrupt(begin + 4, why));
    }
    let most = block::columns_bytes_max(count);
    if columns as usize > most {
        let why = format!("a block claims {columns} bytes of columns");
        return Err(corrupt(begin + 8, why));
    }
    if frame as usize > zstd::zstd_safe::compress_bound(most) {
        let why = format!("a block claims a frame of {frame} bytes");
        return Err(corrupt(begin + 12, why));
    }
    Ok(())
}

/// The input, and how many bytes were read.
struct Input<R> {
    input: R,
    offset: u64,
}

impl<R: Read> Input<R> {
    /// Fills `buffer` as far as the file goes. Returns how far.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, TraceError> {
        let mut got = 0;
        while got < buffer.len() {
            match self.input.read(&mut buffer[got..]) {
                Ok(0) => break,
                Ok(count) => {
                    got += count;
                    self.offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(TraceError::Io {
                        offset: self.offset,
                        source,
                    });
                }
            }
        }
        Ok(got)
    }

    fn fill(
        &mut self,
        buffer: &mut [u8],
        inside: &'static str,
        begin: u64,
    ) -> Result<(), TraceError> {
        if self.read(buffer)? == buffer.len() {
            Ok(())
        } else {
            Err(self.truncated(inside, begin))
        }
    }

    fn truncated(&self, inside: &'static str, begin: u64) -> TraceError {
        TraceError::Truncated {
            offset: self.offset,
            inside,
            begin,
        }
    }

    /// Reads a checksum, which must be `computed`.
    fn checksum(&mut self, computed: u32, of: &'static str, begin: u64) -> Result<u32, TraceError> {
        let offset = self.offset;
        let mut bytes = [0; 4];
        self.fill(&mut bytes, of, begin)?;
        let stored = u32::from_le_bytes(bytes);
        if stored == computed {
            Ok(stored)
        } else {
            Err(TraceError::Checksum {
                offset,
                of,
                begin,
                stored,
                computed,
            })
        }
    }
}
