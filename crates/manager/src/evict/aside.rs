//! Groups of pages, and processes, that wait for somebody: the evictor sets them aside and goes on
//! with the others.
//!
//! An order that was given up is cancelled, and settled when its answer comes: what the agent has
//! moved by then is stored, the rest has stayed. Until then its pages are on their way out, threads
//! that touch them wait, and the fork gate of their process stays shut; all of that concerns nobody
//! but the process that does not run. Its other pages are passed over.

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

/// Between two visits to those that wait: an eighth of the time that the youngest has waited.
const REVISIT_EVERY: Duration = Duration::from_millis(5);
const REVISIT_MAX: Duration = Duration::from_millis(100);

/// So many are visited in a row.
const REVISITS: usize = 32;

/// How long an answer is waited for where nothing else can leave: an agent is late on a machine
/// that has much to do, too.
const ANSWER_DUE: Duration = Duration::from_millis(200);

/// How long the memory of a process that ends may take to go before what is missing counts as lost.
const GOING_MAX: Duration = Duration::from_millis(200);

/// When a process is ended that lives on and does not let its pages be read; whose pages cannot be
/// put back.
const END_AFTER: Duration = Duration::from_secs(2);
const PLACE_AFTER: Duration = Duration::from_secs(10);

/// Processor time that an agent may use for one order, which takes a thousandth of that. One that
/// works for longer does something else.
const AGENT_TIME_MAX: Duration = Duration::from_secs(10);

/// How often that is asked.
const ASK_EVERY: Duration = Duration::from_secs(1);

// A late answer is not waited for longer than its process may live; every visit comes before that.
const _: () = assert!(ANSWER_DUE.as_nanos() < END_AFTER.as_nanos());
const _: () = assert!(END_AFTER.as_nanos() < PLACE_AFTER.as_nanos());
const _: () = assert!(REVISIT_MAX.as_nanos() < GOING_MAX.as_nanos());

/// What is waited for.
pub(super) enum Waits {
    /// That the process can be given an order.
    Run,
    /// The answer to an order that was given up.
    Answer(GivenUp),
    /// The end of the process: so many pages of the group may have been moved out, and cannot be
    /// read.
    End(u64),
    /// As before: it has ended, and its memory may go.
    Gone(u64),
    /// That pages of the group, by their places in it, can be put back.
    Place(Vec<(usize, Vec<u8>)>),
}

/// An order without an answer.
pub(super) struct GivenUp {
    seq: u32,
    /// Pages that shared their frames with relatives.
    sharing: u64,
    /// Processor time that the agent had used.
    agent_time: Option<Duration>,
    asked: Duration,
}

impl GivenUp {
    pub fn new(agent: &Agent, seq: u32, sharing: u64) -> GivenUp {
        GivenUp {
            seq,
            sharing,
            agent_time: procfs::thread_time(agent.tid()),
            asked: Duration::ZERO,
        }
    }
}

/// A process that is passed over, and what of it is in hand.
pub(super) struct Aside {
    process: Arc<Process>,
    items: Vec<EvictItem>,
    waits: Waits,
    since: Duration,
}

impl Evictor {
    /// Passes a process over until it can be given an order.
    pub(super) fn pass_over(&mut self, process: &Arc<Process>) {
        self.shared
            .books
            .engine()
            .evictions()
            .pass_over(process.space, true);
        self.put_aside(process, Vec::new(), Waits::Run);
    }

    /// Sets a group of the batch aside, which stays claimed until what it waits for has come.
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

    /// Goes on with what need not wait any longer. Cost while nothing does: one comparison.
    pub(super) fn revisit(&mut self) {
        let now = self.shared.elapsed();
        if self.aside.is_empty() || now < self.revisit_at {
            return;
        }
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
            self.shared.processes.wake_pages(&mut self.wakes);
        }
        self.revisit_at = now + youngest.max(REVISIT_EVERY);
        self.shared.books.free_released();
    }

    /// Whether a late answer may still come, before the limit is exceeded for want of it.
    pub(super) fn answer_is_due(&self) -> bool {
        let now = self.shared.elapsed();
        let due = |aside: &Aside| {
            matches!(aside.waits, Waits::Answer(_)) && now.saturating_sub(aside.since) < ANSWER_DUE
        };
        self.aside.iter().any(due)
    }

    /// Revisits one; what there is still to wait for. `age`: it has waited for so long.
    fn revisit_one(
        &mut self,
        process: &Arc<Process>,
        items: &[EvictItem],
        waits: Waits,
        age: Duration,
    ) -> Option<Waits> {
        let agent = process.agent.get()?; // who has none is not set aside
        match waits {
            Waits::Run => {
                let runs = agent.readiness() == Readiness::Ready;
                let over = runs || agent.has_ended() || !process.is_alive();
                (!over).then_some(waits)
            }
            Waits::Answer(order) => match agent.commands.answer_to(order.seq) {
                Some(done) => match self.taken(process, agent, items, (done, order.sharing)) {
                    Ok(moved) => self.store_all(items, moved),
                    Err(waits) => Some(waits),
                },
                None if agent.has_ended() => Some(Waits::Gone(all_of(items))),
                None => Some(Waits::Answer(self.ask(process, agent, order))),
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

    /// An agent that works for seconds and does not answer does something else.
    fn ask(&self, process: &Process, agent: &Agent, mut order: GivenUp) -> GivenUp {
        let now = self.shared.elapsed();
        if now >= order.asked + ASK_EVERY {
            order.asked = now;
            let used = procfs::thread_time(agent.tid()).zip(order.agent_time);
            let used = used.map(|(now, before)| now.saturating_sub(before));
            if used.is_some_and(|used| used >= AGENT_TIME_MAX) && !agent.commands.reader_wants() {
                process.end("its agent runs, and answers no order");
            }
        }
        order
    }

    /// The process is passed over no more.
    fn is_back(&self, process: &Process, claimed: bool) {
        if let (Some(agent), true) = (process.agent.get(), claimed) {
            agent.commands.release();
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

/// A set with every item of the group. A group has at least one page, and at most 64.
pub(super) fn all_of(group: &[EvictItem]) -> u64 {
    u64::MAX >> (EVICT_PAGES_MAX - group.len())
}
