//! Traces of memory references (and of pages moved, where a live manager saw them): what one is,
//! how they are stored, read, made, and what they say about a program.
//!
//! Level 1: depends on the base words only. Streams everywhere: a trace is never in memory as a
//! whole unless [`PageTrace`] is asked for. The bytes are drawn in docs/formats/trace.md.
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
pub use generate::{Generator, Spec, SpecError};
pub use pages::{PageEntry, PageTrace};
pub use reader::TraceReader;
pub use recorder::Recorder;
pub use reference::{Access, Event, Kind, Movement, Reference};
pub use touch::Touch;
pub use writer::{Totals, TraceWriter};
