//! Step 4 of the fault path: puts the pages of a plan into a client's memory, each contiguous run
//! in one call.

use std::ops::Range;

use undercroft_base::{PAGE_BYTES, VirtPage, VirtRange};
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_engine::{Install, LoadItem, LoadPlan};
use undercroft_sys::uffd::UffdError;

use crate::space::port::{Space, Wake};

/// How far an item of a plan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Its read is in flight. `again`: it is the second, after one that failed.
    Reading { again: bool },
    /// Its bytes are here, or it needs none.
    Ready,
    /// Not to be installed this time: it goes back to where it was.
    Skipped,
    /// No copy of it verifies.
    Lost,
    /// In the client's memory.
    Installed,
    /// The engine has been told what became of it.
    Finished,
}

/// A plan, and how far each of its items is.
pub(super) struct Loads {
    pub plan: LoadPlan,
    pub states: [Load; LOAD_PAGES_MAX],
}

/// What is put into a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The shared zero page. It is the only installation that never takes the place of a guard
    /// page.
    ZeroPage,
    /// A frame of zeros, for a fresh page that is written to.
    Zeros,
    /// What was loaded.
    Loaded,
}

/// What came of installing a run.
enum Came {
    /// All of it is installed.
    Whole,
    /// The first page that is not installed has a page already.
    Exists,
    /// The run spans two mappings, and no page of it is installed.
    Across,
    /// The rest is refused for now.
    Refused,
}

impl Loads {
    pub fn new() -> Loads {
        Loads {
            plan: LoadPlan::default(),
            states: [Load::Finished; LOAD_PAGES_MAX],
        }
    }

    /// The next stretch of items from `from` on that are neither in flight nor finished.
    pub fn next_part(&self, from: usize) -> Option<Range<usize>> {
        let states = &self.states[..self.plan.items.len()];
        let closed = |state: &Load| matches!(state, Load::Reading { .. } | Load::Finished);
        let start = from + states[from..].iter().position(|state| !closed(state))?;
        let end = states[start..].iter().position(closed);
        Some(start..end.map_or(states.len(), |count| start + count))
    }

    /// Nothing can be installed now: what is ready goes back to where it was.
    pub fn skip_ready(&mut self) {
        for state in &mut self.states[..self.plan.items.len()] {
            if *state == Load::Ready {
                *state = Load::Skipped;
            }
        }
    }

    /// Installs what is ready and valid in `part`; wakes no thread.
    ///
    /// * `loaded`: the bytes of a range of items.   * `zeros`: as many pages as a plan has.
    /// * `zeroed`: told of runs that got the shared zero page.
    pub fn install<'a>(
        &mut self,
        part: Range<usize>,
        memory: &dyn Space,
        loaded: impl Fn(Range<usize>) -> Option<&'a [u8]>,
        zeros: &[u8],
        zeroed: impl Fn(VirtRange),
    ) {
        let (mut from, mut most) = (part.start, LOAD_PAGES_MAX);
        while let Some(run) = self.next_run(from..part.end, most) {
            let page = self.plan.items[run.start].page;
            let source = self.source(run.start);
            let result = match source {
                Source::ZeroPage => {
                    let range = VirtRange::new(page, page.plus(run.len() as u64));
                    memory.zero(range, Wake::Later)
                }
                Source::Zeros => {
                    memory.install(page, &zeros[..run.len() * PAGE_BYTES], Wake::Later)
                }
                Source::Loaded => match loaded(run.clone()) {
                    Some(bytes) => memory.install(page, bytes, Wake::Later),
                    None => Err(UffdError::LayoutChanging { done: 0 }),
                },
            };
            let (done, came) = came_of(result, run.len());
            let at = run.start + done;
            self.states[run.start..at].fill(Load::Installed);
            if done > 0 && source == Source::ZeroPage {
                zeroed(VirtRange::new(page, page.plus(done as u64)));
            }
            from = match came {
                Came::Exists if at < run.end => {
                    // Somebody else's page is there. A fresh page may be one that is about to be
                    // dropped, so it is left untouched in our books.
                    if !self.plan.items[at].fresh {
                        self.states[at] = Load::Installed;
                    }
                    at + 1
                }
                Came::Across if run.len() > 1 => {
                    most = run.len() / 2; // shorter runs are each in one mapping
                    at
                }
                Came::Whole => at,
                Came::Exists | Came::Across | Came::Refused => run.end,
            };
        }
    }

    /// The next items within `part` that follow each other in memory and have the same source, at
    /// most `most` of them.
    fn next_run(&self, part: Range<usize>, most: usize) -> Option<Range<usize>> {
        let may = |at: &usize| self.plan.items[*at].valid && self.states[*at] == Load::Ready;
        let mut rest = part.clone();
        let start = rest.find(may)?;
        let source = self.source(start);
        let mut end = start + 1;
        while end < part.end.min(start + most)
            && may(&end)
            && self.source(end) == source
            && self.plan.items[end].page == self.plan.items[end - 1].page.plus(1)
        {
            end += 1;
        }
        Some(start..end)
    }

    /// A fresh page that is written to gets a frame of its own; one that comes along, or is read,
    /// the shared zero page.
    fn source(&self, at: usize) -> Source {
        let item = &self.plan.items[at];
        match (item.fresh, self.plan.fault.write && item.demanded) {
            (true, true) => Source::Zeros,
            (true, false) => Source::ZeroPage,
            (false, _) => Source::Loaded,
        }
    }

    /// The items of `part`, each with what became of it, for [`undercroft_engine::Engine`].
    pub fn results(&mut self, part: Range<usize>) -> &mut [LoadItem] {
        let items = &mut self.plan.items[part.clone()];
        for (item, state) in items.iter_mut().zip(&self.states[part]) {
            item.install = match state {
                Load::Installed => Install::Done,
                Load::Lost => Install::Lost,
                _ => Install::NotYet,
            };
        }
        items
    }

    /// The pages of `part`, and what lies between them: its items are in ascending order.
    pub fn pages(&self, part: Range<usize>) -> VirtRange {
        let page = |at: usize| -> VirtPage { self.plan.items[at].page };
        VirtRange::new(page(part.start), page(part.end - 1).plus(1))
    }
}

/// How many pages of a run of `count` are installed, and why no more.
fn came_of(result: Result<(), UffdError>, count: usize) -> (usize, Came) {
    match result {
        Ok(()) => (count, Came::Whole),
        Err(UffdError::Exists { done }) => (done as usize, Came::Exists),
        Err(UffdError::NotMapped { done: 0 }) => (0, Came::Across),
        Err(
            UffdError::LayoutChanging { done }
            | UffdError::NotMapped { done }
            | UffdError::NoMemory { done }
            | UffdError::Busy { done },
        ) => (done as usize, Came::Refused),
        Err(_) => (0, Came::Refused),
    }
}
