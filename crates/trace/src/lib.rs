//! Traces of memory references and, from live managers, of page movements: how a trace is stored,
//! read, generated and analysed.
//!
//! Level 1: depends on `base` and `seeded` only. Traces are streams: none is in memory as a whole,
//! except as a [`PageTrace`]. The bytes are drawn in docs/formats/trace.md.
#![forbid(unsafe_code)]

pub mod analyse;
pub mod cache;
pub mod error;
pub mod format;
pub mod fuzz;
pub mod generate;
pub mod import;
pub mod pages;
pub mod reader;
pub mod recorder;
pub mod reference;
pub mod touch;
pub mod writer;

pub use analyse::{Analysis, MissRatioCurve, ReuseDistances, Sampling};
pub use cache::{Cache, CacheSpec};
pub use error::{TraceError, WriteError};
pub use format::header::{Header, TimeUnit};
pub use format::totals::Totals;
pub use generate::{Generator, Spec, SpecError};
pub use pages::{PageEntry, PageTrace};
pub use reader::TraceReader;
pub use recorder::Recorder;
pub use reference::{Access, Event, Kind, Movement, Reference};
pub use reference::{PASSED_OVER, TAKEN_BACK};
pub use touch::Touch;
pub use writer::TraceWriter;
