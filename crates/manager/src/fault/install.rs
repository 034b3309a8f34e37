//! Step 4 of the fault path: installs the pages of a plan in a client's memory, each contiguous run
//! in one call.

use std::ops::Range;

use undercroft_base::{BASE_PAGE_BYTES, PageSize, VirtPage, VirtRange};
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_engine::{Install, LoadItem, LoadPlan};
use undercroft_sys::uffd::UffdError;

use crate::space::port::{Space, Wake};

/// The progress of one item of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Its read is in flight. `again`: it is the second read, after one that failed.
    Reading { again: bool },
    /// Its bytes are here, or it needs none.
    Ready,
    /// Not installed this time: it goes back to its former state.
    Skipped,
    /// No copy of it verifies.
    Lost,
    /// The page is in the client's memory.
    Installed,
    /// The engine has its result.
    Finished,
}

/// A plan, and the progress of each of its items.
pub(super) struct Loads {
    pub plan: LoadPlan,
    pub states: [Load; LOAD_PAGES_MAX],
    /// Pages that come along with a first write get frames too. Nothing may be in their place that
    /// a frame would replace.
    pub frames: bool,
    /// Size of the pages.
    pub size: PageSize,
    /// The tier keeps the copies that are loaded.
    pub kept: bool,
    /// The kernel had no memory for a page.
    pub short: bool,
}

/// The contents that are installed in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The shared zero page. Only this installation never replaces a guard page.
    ZeroPage,
    /// A frame of zeros, for a fresh page that is written or soon will be.
    Zeros,
    /// The bytes that were loaded.
    Loaded,
}

/// The result of installing a run.
enum Came {
    /// All of it is installed.
    Whole,
    /// The first page that was not installed is there already.
    Exists,
    /// The run spans two mappings, and no page of it is installed.
    Across,
    /// The rest is refused for now.
    Refused,
}

impl Loads {
    pub(super) fn new() -> Loads {
        Loads {
            plan: LoadPlan::default(),
            states: [Load::Finished; LOAD_PAGES_MAX],
            frames: false,
            size: PageSize::Base,
            kept: false,
            short: false,
        }
    }

    /// True if fresh pages of `part` come along with a first write.
    pub(super) fn has_company(&self, part: Range<usize>) -> bool {
        let comes_along = |item: &LoadItem| item.fresh && !item.demanded;
        self.plan.fault.write && self.plan.items[part].iter().any(comes_along)
    }

    /// The next range of items from `from` on that are neither in flight nor finished.
    pub(super) fn next_part(&self, from: usize) -> Option<Range<usize>> {
        let states = &self.states[..self.plan.items.len()];
        let closed = |state: &Load| matches!(state, Load::Reading { .. } | Load::Finished);
        let start = from + states[from..].iter().position(|state| !closed(state))?;
        let end = states[start..].iter().position(closed);
        Some(start..end.map_or(states.len(), |count| start + count))
    }

    /// No page can be installed now: the items that are ready are skipped.
    pub(super) fn skip_ready(&mut self) {
        for state in &mut self.states[..self.plan.items.len()] {
            if *state == Load::Ready {
                *state = Load::Skipped;
            }
        }
    }

    /// Installs the items of `part` that are ready and valid. Wakes no thread.
    ///
    /// * `loaded`: the bytes of a range of items.   * `zeros`: as many pages as a plan has.
    /// * `zeroed`: called with each run that got the shared zero page.
    pub(super) fn install<'a>(
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
                    memory.install(page, &zeros[..run.len() * BASE_PAGE_BYTES], Wake::Later)
                }
                Source::Loaded => match loaded(run.clone()) {
                    Some(bytes) if self.kept && !self.plan.fault.write => {
                        memory.install_unwritten(page, bytes)
                    }
                    Some(bytes) => memory.install(page, bytes, Wake::Later),
                    None => Err(UffdError::LayoutChanging { done: 0 }),
                },
            };
            self.short |= matches!(result, Err(UffdError::NoMemory { .. }));
            let (done, came) = came_of(result, run.len());
            let at = run.start + done;
            self.states[run.start..at].fill(Load::Installed);
            if done > 0 && source == Source::ZeroPage {
                zeroed(VirtRange::new(page, page.plus(done as u64)));
            }
            from = match came {
                Came::Exists if at < run.end => {
                    // A page is there that is not ours. If the item is fresh, that page may be
                    // about to be dropped, so the item stays untouched in the books.
                    if !self.plan.items[at].fresh {
                        self.states[at] = Load::Installed;
                    }
                    at + 1
                }
                Came::Across if run.len() > 1 => {
                    most = run.len() / 2; // shorter runs lie in one mapping each
                    at
                }
                Came::Whole => at,
                Came::Exists | Came::Across | Came::Refused => run.end,
            };
        }
    }

    /// The next items within `part` that follow each other in memory and have the same source, at
    /// most `most` of them.
    pub(super) fn next_run(&self, part: Range<usize>, most: usize) -> Option<Range<usize>> {
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

    /// A fresh page that is written gets a frame of its own. One that is read gets the shared zero
    /// page, and so does one that comes along, unless a frame is safe there. A large one is left to
    /// its memory.
    fn source(&self, at: usize) -> Source {
        let item = &self.plan.items[at];
        let is_base = self.size == PageSize::Base;
        let frame = is_base && self.plan.fault.write && (item.demanded || self.frames);
        match (item.fresh, frame) {
            (true, true) => Source::Zeros,
            (true, false) => Source::ZeroPage,
            (false, _) => Source::Loaded,
        }
    }

    /// The items of `part`, each with its result, for [`undercroft_engine::Engine`].
    pub(super) fn results(&mut self, part: Range<usize>) -> &mut [LoadItem] {
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

    /// The range from the first to the last page of `part`: its items are in ascending order.
    pub(super) fn pages(&self, part: Range<usize>) -> VirtRange {
        let page = |at: usize| -> VirtPage { self.plan.items[at].page };
        VirtRange::new(page(part.start), page(part.end - 1).plus(1))
    }
}

/// How many pages of a run of `count` were installed, and why no more.
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
