//! Memory references for experiments and simulations: they are generated, imported, filtered by a
//! cache, gathered by page, and analysed. `trace` has the format in which they are stored.
#![forbid(unsafe_code)]

pub mod analyse;
pub mod cache;
pub mod fuzz;
pub mod generate;
pub mod import;
pub mod pages;
pub mod recorder;
pub mod touch;

pub use analyse::{Analysis, MissRatioCurve, ReuseDistances, Sampling};
pub use cache::{Cache, CacheSpec};
pub use generate::{Generator, Spec, SpecError};
pub use pages::{PageEntry, PageTrace};
pub use recorder::Recorder;
pub use touch::Touch;
