//! Traces of memory references and, from live managers, of page movements: how a trace is stored,
//! written and read.
//!
//! Traces are streams: none is in memory as a whole. The bytes are drawn in docs/formats/trace.md.
#![forbid(unsafe_code)]

pub mod error;
pub mod format;
pub mod fuzz;
pub mod reader;
pub mod reference;
pub mod writer;

pub use error::{TraceError, WriteError};
pub use format::header::{Header, TimeUnit};
pub use format::totals::Totals;
pub use reader::TraceReader;
pub use reference::{Access, Event, Kind, Movement, Reference};
pub use reference::{PASSED_OVER, TAKEN_BACK};
pub use writer::TraceWriter;
