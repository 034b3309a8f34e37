//! The threads that compress beside the evictor. The evictor is one of them: what no other has
//! begun, it does itself. So a busy machine delays it by no more than the part of another thread.

use rayon_core::{ThreadPool, ThreadPoolBuilder};
use undercroft_proto::options::COMPRESSORS_MAX;
use undercroft_sys::process;

/// Most threads unless the user asks for more: one mover of pages fills no more of them.
const COMPRESSORS_USUAL: usize = 8;

const _: () = assert!(COMPRESSORS_USUAL <= COMPRESSORS_MAX);

/// The evictor's helpers.
#[derive(Default)]
pub(super) struct Compressors(Option<ThreadPool>);

impl Compressors {
    /// How many threads compress, the evictor included.
    /// * `asked`: `None`: half of the CPUs that the caller may use. The others are the program's.
    pub(super) fn wanted(asked: Option<usize>) -> usize {
        let usual = || {
            let cpus = process::allowed_cpus(0).map_or(1, |cpus| cpus.len());
            (cpus / 2).min(COMPRESSORS_USUAL)
        };
        asked.unwrap_or_else(usual).min(COMPRESSORS_MAX)
    }

    /// The caller must stay the thread that calls [`Compressors::both`]. If threads cannot be
    /// started, it works alone.
    /// * `asked`: as [`Compressors::wanted`].
    pub(super) fn start(asked: Option<usize>) -> Compressors {
        let count = Compressors::wanted(asked);
        if count < 2 {
            return Compressors(None);
        }
        let builder = ThreadPoolBuilder::new()
            .num_threads(count)
            .use_current_thread()
            .thread_name(|at| format!("uc-compress-{at}"));
        Compressors(builder.build().ok())
    }

    /// How many threads there are, the evictor included.
    pub(super) fn count(&self) -> usize {
        self.0.as_ref().map_or(1, ThreadPool::current_num_threads)
    }

    /// Does both, at once if another thread is free.
    pub(super) fn both<A: Send, B: Send>(
        &self,
        one: impl FnOnce() -> A + Send,
        other: impl FnOnce() -> B + Send,
    ) -> (A, B) {
        match self.0 {
            Some(_) => rayon_core::join(one, other),
            None => (one(), other()),
        }
    }
}
