//! The source of references: a trace file, or the description of one to generate.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};

use undercroft_references::{Generator, Spec, SpecError};
use undercroft_trace::{TraceError, TraceReader};

use crate::memory_trace::{Collector, MemoryTrace};
use crate::recorded::Recorded;

/// Why a trace cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be opened.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not a valid trace.
    #[error("{}: {source}", path.display())]
    Trace {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: TraceError,
    },
    /// There is no such file, and the text describes no trace.
    #[error("there is no file `{text}`, and the text does not describe a trace: {source}")]
    Neither {
        /// As written.
        text: String,
        /// Why it is no description.
        source: SpecError,
    },
}

/// Reads a whole trace into memory. `text` names a file, or describes a trace to generate:
/// `zipf:pages=10000,refs=1000000`.
pub fn open(text: &str) -> Result<MemoryTrace, OpenError> {
    let path = Path::new(text);
    if !path.exists() {
        let spec: Spec = text.parse().map_err(|source| OpenError::Neither {
            text: text.to_owned(),
            source,
        })?;
        let generator = Generator::new(spec);
        let header = generator.header();
        let references = generator.map(Ok::<_, std::convert::Infallible>);
        let trace = MemoryTrace::collect(text, header.granule_bytes(), &header.clients, references);
        return Ok(trace.unwrap_or_else(|never| match never {}));
    }
    let io_error = |source| OpenError::Io {
        path: path.to_owned(),
        source,
    };
    let file = BufReader::with_capacity(1 << 20, File::open(path).map_err(io_error)?);
    let trace_error = |source| OpenError::Trace {
        path: path.to_owned(),
        source,
    };
    let mut reader = TraceReader::new(file).map_err(&trace_error)?;
    let mut collector = Collector::new(reader.header().live);
    let mut block = Vec::new();
    while reader.next_events(&mut block).map_err(&trace_error)? {
        block.drain(..).for_each(|event| collector.add(event));
    }
    let header = reader.header();
    let recorded = Recorded::of(header);
    Ok(MemoryTrace {
        recorded,
        ..collector.finish(text, header.granule_bytes(), &header.clients)
    })
}
