//! Processes that do not run, and groups of their pages: the evictor sets them aside and goes on
//! with the others.
//!
//! A group that is late is finished when its answer comes: the pages that had moved by then are
//! stored, and the others have stayed. Until then its pages are evicting, threads that touch them
//! wait, and the fork gate of their process stays shut. Only the process that does not run is
//! affected. Its other pages are passed over.
//!
//! No thread waits long for a process. The evictor waits 25 ms for an answer, or 1 ms if the last
//! answer was late; then it cancels the command and sets the group aside. A reader of messages that
//! finds the agent busy after 2 ms leaves them unread, and comes back every 5 ms (`leave_unread` in
//! `fault/`). A group is also set aside if its pages cannot be read, or cannot be put back within 2
//! ms: after 2 s (not read) or 10 s (not put back) the process is ended. If the policy names a page
//! of such a process, the engine remembers it (`engine/src/kept.rs`), and gives it back later.

use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Duration;

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::EvictItem;
use undercroft_engine::limits::EVICT_PAGES_MAX;

use super::Evictor;
use super::wayout::Way;
use crate::space::agent::Readiness;
use crate::space::port::Late;
use crate::space::process::Process;
use crate::space::still;
use crate::sync::read;

/// Shortest and longest time between two visits. It is an eighth of the time that the youngest has
/// waited.
const REVISIT_EVERY: Duration = Duration::from_millis(5);
const REVISIT_MAX: Duration = Duration::from_millis(100);

/// Most that are visited in a row.
const REVISITS: usize = 32;

/// How long the evictor waits for an answer if no other page can leave. An agent may also be late
/// because the machine is busy.
const ANSWER_DUE: Duration = Duration::from_millis(200);

/// A process is ended if its pages cannot be put back for this long.
pub(super) const PLACE_AFTER: Duration = Duration::from_secs(10);

/// A process that has had no agent for this long has none for good. It may have just begun, or be
/// about to end.
const AGENT_LOST: Duration = Duration::from_millis(200);

const _: () = assert!(REVISIT_EVERY.as_nanos() < REVISIT_MAX.as_nanos());
const _: () = assert!(ANSWER_DUE.as_nanos() < PLACE_AFTER.as_nanos());

/// The event that is waited for.
pub(super) enum Waits {
    /// The process can be given a command.
    Run,
    /// The group, which is late.
    Late(Late),
    /// These pages of the group cannot be read any more, and it is still to be told which of them
    /// are missing.
    Lost(u64),
    /// Pages of the group, by their places in it, can be put back.
    Place(Vec<Stuck>),
}

/// A page of a group that cannot be put back at once.
pub(super) struct Stuck {
    /// Its place in the group.
    pub at: usize,
    pub bytes: Vec<u8>,
    pub done: Done,
}

/// Places where a page was put back already. The program may have put a guard there since, by a
/// system call that no event tells of: a second copy would replace it.
pub(super) type Done = Vec<(SpaceId, VirtPage)>;

impl Waits {
    /// The age of a group begins anew when it waits for another kind of event.
    fn kind(&self) -> (Discriminant<Waits>, Option<Discriminant<Late>>) {
        let late = match self {
            Waits::Late(late) => Some(discriminant(late)),
            _ => None,
        };
        (discriminant(self), late)
    }
}

/// A process that is passed over, and the items of it that are claimed.
pub(super) struct Aside {
    process: Arc<Process>,
    items: Vec<EvictItem>,
    waits: Waits,
    since: Duration,
}

impl Evictor {
    /// Passes a process over until it can be given a command.
    pub(super) fn pass_over(&mut self, process: &Arc<Process>) {
        self.shared
            .books
            .engine()
            .evictions()
            .pass_over(process.space, true);
        self.put_aside(process, Vec::new(), Waits::Run);
    }

    /// Sets a group of the batch aside. It stays claimed until the event that it waits for.
    pub(super) fn set_aside(&mut self, process: &Arc<Process>, group: &[EvictItem], waits: Waits) {
        let mut items = group.to_vec();
        self.shared.books.engine().evictions().set_aside(&mut items);
        self.put_aside(process, items, waits);
    }

    fn put_aside(&mut self, process: &Arc<Process>, items: Vec<EvictItem>, waits: Waits) {
        let since = self.shared.elapsed();
        self.revisit_at = self.revisit_at.min(since + REVISIT_EVERY);
        self.aside.push_back(Aside {
            process: process.clone(),
            items,
            waits,
            since,
        });
    }

    /// Visits those that were set aside, and finishes those that need not wait longer. Cost if none
    /// is due: one comparison.
    pub(super) fn revisit(&mut self) {
        let now = self.shared.elapsed();
        if self.aside.is_empty() || now < self.revisit_at {
            return;
        }
        let shared = self.shared.clone();
        let _storing = read(&shared.books.storing);
        let mut youngest = REVISIT_MAX;
        for _ in 0..self.aside.len().min(REVISITS) {
            let Some(mut aside) = self.aside.pop_front() else {
                break;
            };
            let age = now - aside.since;
            let before = aside.waits.kind();
            match self.revisit_one(&aside.process, &aside.items, aside.waits, age) {
                Some(waits) => {
                    if before != waits.kind() {
                        aside.since = now;
                    }
                    youngest = youngest.min((now - aside.since) / 8);
                    self.aside.push_back(Aside { waits, ..aside });
                }
                None => self.is_back(&aside.process, &aside.items),
            }
            self.wake();
        }
        self.revisit_at = now + youngest.max(REVISIT_EVERY);
        self.shared.books.free_released();
    }

    /// True while a late answer may still come. As long as that is so, the limit is not exceeded
    /// for lack of it.
    pub(super) fn answer_is_due(&self) -> bool {
        let now = self.shared.elapsed();
        let due = |aside: &Aside| {
            matches!(aside.waits, Waits::Late(Late::Answer(_)))
                && now.saturating_sub(aside.since) < ANSWER_DUE
        };
        self.aside.iter().any(due)
    }

    /// Visits one; returns what it still waits for.
    /// * `age`: how long it has waited.
    fn revisit_one(
        &mut self,
        process: &Arc<Process>,
        items: &[EvictItem],
        waits: Waits,
        age: Duration,
    ) -> Option<Waits> {
        let shared = self.shared.clone();
        let way = Way::of(&shared, process)?; // a process without one is not set aside
        match waits {
            Waits::Run if process.lost_its_agent() => {
                let lasts = age >= AGENT_LOST;
                if lasts {
                    still::no_way_out(&shared, process);
                }
                (!lasts).then_some(waits)
            }
            Waits::Run => {
                let over = process
                    .agent
                    .get()
                    .is_none_or(|agent| agent.readiness() == Readiness::Ready || agent.has_ended());
                (!over && process.is_alive()).then_some(waits)
            }
            Waits::Late(late) => {
                let took = way.out().resume(late, age, items, &mut self.buffer);
                self.go_on(process, way.out(), items, took)
            }
            Waits::Lost(pages) => {
                if age >= PLACE_AFTER {
                    process.end("its pages cannot be marked as lost");
                }
                self.lose_told(items, pages)
            }
            Waits::Place(pages) => {
                let left = self.put_back_again(items, pages, age);
                if age >= PLACE_AFTER && left.is_some() {
                    process.end("its pages cannot be put back");
                }
                left
            }
        }
    }

    /// Ends the passing over of a process, if nothing else of it waits.
    /// * `claimed`: the items of it that had been claimed.
    fn is_back(&self, process: &Arc<Process>, claimed: &[EvictItem]) {
        if let (Some(way), false) = (Way::of(&self.shared, process), claimed.is_empty()) {
            way.out().end(claimed);
        }
        if (self.aside.iter()).any(|aside| aside.process.space == process.space) {
            return;
        }
        self.shared
            .books
            .engine()
            .evictions()
            .pass_over(process.space, false);
        while self
            .shared
            .books
            .engine()
            .evictions()
            .take_back(process.space, EVICT_PAGES_MAX)
        {}
    }
}
