//! Processes that do not run, and groups of their pages: the evictor sets them aside and goes on
//! with the others.
//!
//! A command that was given up is cancelled, and finished when its answer comes: the pages that the
//! agent had moved by then are stored, and the others have stayed. Until then its pages are
//! evicting, threads that touch them wait, and the fork gate of their process stays shut. Only the
//! process that does not run is affected. Its other pages are passed over.

use std::sync::Arc;
use std::time::Duration;

use undercroft_base::PAGE_BYTES;
use undercroft_engine::EvictItem;
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_sys::procfs;

use super::Evictor;
use crate::books::page_of;
use crate::space::agent::{Agent, Readiness};
use crate::space::process::Process;
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

/// How long the kernel may take to free the memory of a process that ends. After that, missing
/// pages count as lost.
const GOING_MAX: Duration = Duration::from_millis(200);

/// A process is ended if its pages cannot be read for this long, or cannot be put back for this
/// long.
const END_AFTER: Duration = Duration::from_secs(2);
pub(super) const PLACE_AFTER: Duration = Duration::from_secs(10);

/// CPU time that an agent may use for one command; a command takes a thousandth of it. An agent
/// that uses more does something else.
const AGENT_TIME_MAX: Duration = Duration::from_secs(10);

/// How often the CPU time is read.
const ASK_EVERY: Duration = Duration::from_secs(1);

// The wait for a late answer ends before its process is ended, and visits are more frequent than
// both.
const _: () = assert!(ANSWER_DUE.as_nanos() < END_AFTER.as_nanos());
const _: () = assert!(END_AFTER.as_nanos() < PLACE_AFTER.as_nanos());
const _: () = assert!(REVISIT_EVERY.as_nanos() < REVISIT_MAX.as_nanos());
const _: () = assert!(REVISIT_MAX.as_nanos() < GOING_MAX.as_nanos());

/// The event that is waited for.
pub(super) enum Waits {
    /// The process can be given a command.
    Run,
    /// The answer to a command that was given up.
    Answer(GivenUp),
    /// The process ends. These pages of the group may have been moved out, and cannot be read.
    End(u64),
    /// The kernel frees the memory of the process, which has ended. The pages are as for `End`.
    Gone(u64),
    /// Pages of the group, by their places in it, can be put back.
    Place(Vec<(usize, Vec<u8>)>),
}

/// A command without an answer.
pub(super) struct GivenUp {
    seq: u32,
    /// Pages that shared their frames with relatives.
    sharing: u64,
    /// CPU time that the agent had used.
    agent_time: Option<Duration>,
    /// When the CPU time was read last.
    asked: Duration,
}

impl GivenUp {
    pub(super) fn new(agent: &Agent, seq: u32, sharing: u64) -> GivenUp {
        GivenUp {
            seq,
            sharing,
            agent_time: procfs::thread_time(agent.tid()),
            asked: Duration::ZERO,
        }
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
            let before = std::mem::discriminant(&aside.waits);
            match self.revisit_one(&aside.process, &aside.items, aside.waits, now - aside.since) {
                Some(waits) => {
                    if before != std::mem::discriminant(&waits) {
                        aside.since = now;
                    }
                    youngest = youngest.min((now - aside.since) / 8);
                    self.aside.push_back(Aside { waits, ..aside });
                }
                None => self.is_back(&aside.process, !aside.items.is_empty()),
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
            matches!(aside.waits, Waits::Answer(_)) && now.saturating_sub(aside.since) < ANSWER_DUE
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
        let agent = process.agent.get()?; // a process without an agent is not set aside
        match waits {
            Waits::Run => {
                let runs = agent.readiness() == Readiness::Ready;
                let over = runs || agent.has_ended() || !process.is_alive();
                (!over).then_some(waits)
            }
            Waits::Answer(command) => match agent.commands.answer_to(command.seq) {
                Some(done) => match self.taken(process, agent, items, (done, command.sharing)) {
                    Ok(moved) => self.store_all(items, moved),
                    Err(waits) => Some(waits),
                },
                None if agent.has_ended() => Some(Waits::Gone(all_of(items))),
                None => Some(Waits::Answer(self.ask(process, agent, command))),
            },
            Waits::End(pages) => {
                if agent.has_ended() || !process.is_alive() {
                    return Some(Waits::Gone(pages));
                }
                if age >= END_AFTER {
                    process.end("its pages cannot be read");
                }
                Some(waits)
            }
            Waits::Gone(pages) => {
                let gone = process.has_lost_its_memory(page_of(&self.buffer, 0));
                if !gone && age < GOING_MAX {
                    return Some(waits);
                }
                self.lose(items, pages);
                None
            }
            Waits::Place(mut pages) => {
                pages.retain(|(at, bytes)| {
                    self.buffer[at * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(bytes);
                    !self.put_back(&items[*at], *at, age)
                });
                if age >= PLACE_AFTER && !pages.is_empty() {
                    process.end("its pages cannot be put back");
                }
                (!pages.is_empty()).then_some(Waits::Place(pages))
            }
        }
    }

    /// Ends the process of an agent that runs for seconds and does not answer.
    fn ask(&self, process: &Process, agent: &Agent, mut command: GivenUp) -> GivenUp {
        let now = self.shared.elapsed();
        if now >= command.asked + ASK_EVERY {
            command.asked = now;
            let used = procfs::thread_time(agent.tid()).zip(command.agent_time);
            let used = used.map(|(now, before)| now.saturating_sub(before));
            if used.is_some_and(|used| used >= AGENT_TIME_MAX) && !agent.commands.reader_wants() {
                process.end("its agent runs, but answers no command");
            }
        }
        command
    }

    /// Ends the passing over of a process.
    fn is_back(&self, process: &Process, claimed: bool) {
        if let (Some(agent), true) = (process.agent.get(), claimed) {
            agent.ends_group();
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

/// The set of all items of the group. A group has 1 to 64 pages.
pub(super) fn all_of(group: &[EvictItem]) -> u64 {
    u64::MAX >> (EVICT_PAGES_MAX - group.len())
}
