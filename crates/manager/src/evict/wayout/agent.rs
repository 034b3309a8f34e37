//! The way out by the agent of a process: it moves pages to its holding area on command, where they
//! are read. A command that was given up is cancelled, and finished when its answer comes: the
//! pages that the agent had moved by then are taken, and the others have stayed.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::VirtPage;
use undercroft_engine::EvictItem;
use undercroft_sys::uffd::UffdError;
use undercroft_sys::{process, procfs};
use undercroft_wire::protocol::OP_MOVE;

use super::{all_of, apply_events, places};
use crate::space::agent::{Agent, Readiness, is_present};
use crate::space::command::{Done, NotDone};
use crate::space::port::{Answered, Asked, Begun, GivenUp, Late, Read, Taken, Took, Wake, WayOut};
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Longest wait for an answer, which takes some 50 us if the agent has a CPU. The second is for an
/// agent that was late before.
const COMMAND_MAX: Duration = Duration::from_millis(25);
const LATE_COMMAND_MAX: Duration = Duration::from_millis(1);

/// An agent that takes longer than this may have no CPU.
const AGENT_LATE: Duration = Duration::from_millis(4);

/// How long the kernel may take to free the memory of a process that ends. After that, missing
/// pages count as lost.
const GOING_MAX: Duration = Duration::from_millis(200);

/// A process is ended if its pages cannot be read for this long.
const END_AFTER: Duration = Duration::from_secs(2);

/// CPU time that an agent may use for one command; a command takes a thousandth of it. An agent
/// that uses more does something else.
const AGENT_TIME_MAX: Duration = Duration::from_secs(10);

/// How often the CPU time is read.
const ASK_EVERY: Duration = Duration::from_secs(1);

const _: () = assert!(LATE_COMMAND_MAX.as_nanos() < AGENT_LATE.as_nanos());
const _: () = assert!(AGENT_LATE.as_nanos() < COMMAND_MAX.as_nanos());
const _: () = assert!(GOING_MAX.as_nanos() < END_AFTER.as_nanos());

/// The agent of a process, for one group.
pub(crate) struct AgentOut<'a> {
    shared: &'a Shared,
    process: &'a Arc<Process>,
    agent: &'a Agent,
}

impl<'a> AgentOut<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        process: &'a Arc<Process>,
        agent: &'a Agent,
    ) -> AgentOut<'a> {
        AgentOut {
            shared,
            process,
            agent,
        }
    }

    /// Gives the command for the group. `None`: the books are behind.
    fn post(&self, group: &[EvictItem]) -> Option<u32> {
        // An event that was acknowledged before this is in the books. One that is acknowledged
        // later cancels the command.
        let _layout = self.process.layout.read();
        if !self.process.has_applied_all() {
            return None;
        }
        let mut engine = self.shared.books.engine();
        let pages = group.iter().map(|item| {
            let stays = engine.evictions().is_at(item.at, item.page);
            if stays { item.page.address() } else { 0 }
        });
        let places = places_in(group);
        self.agent.begins_group(places.clone());
        Some(self.agent.commands.post(OP_MOVE, places.start, pages))
    }

    /// Waits for the answer to a command. The time since it was given counts: several processes may
    /// have been asked at once.
    fn answer(&self, asked: Asked) -> Result<Done, NotDone> {
        let (agent, began) = (self.agent, Instant::now());
        let given = asked.at.unwrap_or(began);
        let most = if self.process.is_late.load(Ordering::Relaxed) {
            LATE_COMMAND_MAX
        } else {
            COMMAND_MAX
        };
        let brought = Cell::new(false);
        let patient = || {
            let waited = began.elapsed();
            if waited > AGENT_LATE.min(most) && !brought.replace(true) {
                bring_here(agent);
            }
            given.elapsed() < most || waited < LATE_COMMAND_MAX
        };
        let answer = agent
            .commands
            .wait(asked.seq, || !agent.has_ended(), patient);
        let late = matches!(answer, Err(NotDone::GivenUp));
        self.process.is_late.store(late, Ordering::Relaxed);
        answer
    }

    /// Handles the agent's answer: reads the pages that it moved.
    /// * `sharing`: pages that shared their frames with relatives.
    fn taken(
        &self,
        group: &[EvictItem],
        (done, sharing): (Done, u64),
        buffer: &mut [u8],
        or: Read,
    ) -> Took {
        // The client wrote these sets: they may have places outside the group.
        let from = places_in(group).start;
        let here = |set: u64| set >> from & all_of(group);
        let (moved, refused) = (here(done.moved), here(done.refused));
        let out = Done {
            moved,
            refused,
            stranded: here(done.stranded),
        };
        let readable = self.agent.read_moved(out, (from, group.len()), buffer);
        if moved & sharing != 0 {
            let copied = places(moved & sharing).map(|at| group[at].at);
            let (books, processes) = (&self.shared.books, &self.shared.processes);
            crate::space::cow::left(books, processes, self.process, copied);
        }
        Took::Pages(Taken {
            moved,
            refused,
            kept: 0,
            // The process died meanwhile, or unmapped its holding area.
            read: if readable { Read::Yes } else { or },
        })
    }

    /// Ends the process of an agent that runs for seconds and does not answer.
    fn ask(&self, mut command: GivenUp, age: Duration) -> GivenUp {
        if age >= command.asked + ASK_EVERY {
            command.asked = age;
            let used = procfs::thread_time(self.agent.tid()).zip(command.agent_time);
            let used = used.map(|(now, before)| now.saturating_sub(before));
            let busy = used.is_some_and(|used| used >= AGENT_TIME_MAX);
            if busy && !self.agent.commands.reader_wants() {
                self.process.end("its agent runs, but answers no command");
            }
        }
        command
    }

    /// Goes on with a group whose agent has ended.
    fn gone(
        &self,
        (pages, sharing): (u64, u64),
        age: Duration,
        group: &[EvictItem],
        buffer: &mut [u8],
    ) -> Took {
        let gone = self.process.has_lost_its_memory();
        if !gone && age < GOING_MAX {
            return Took::Later(Late::Gone(pages, sharing));
        }
        if !gone && self.agent.has_ended() {
            if let Some(done) = self.left_behind(group) {
                return self.taken(group, (done, sharing), buffer, Read::Never);
            }
            if age < END_AFTER {
                return Took::Later(Late::Gone(pages, sharing));
            }
        }
        Took::Lost(pages)
    }

    /// Work that the agent, which was killed alone, had done on the group. Its pages are in the
    /// program's memory, in the staging or the holding area, and the kernel shows where. `None`:
    /// that cannot be told, now or ever.
    fn left_behind(&self, group: &[EvictItem]) -> Option<Done> {
        let process = self.process;
        apply_events(self.shared, process);
        // Nothing moves pages any more, and the program changes nothing that we have not heard of.
        let _layout = process.layout.write();
        if !process.books_are_current() {
            return None;
        }
        let pagemap = process.pagemap().ok()?;
        let mut done = Done::default();
        for (item, place) in group.iter().zip(places_in(group)) {
            let bit = 1 << place;
            let mut engine = self.shared.books.engine();
            if !engine.evictions().is_at(item.at, item.page) {
                let mut places = Vec::new();
                engine.evictions().places_of(item.at, &mut places);
                if places.is_empty() {
                    continue; // dropped: no process needs it
                }
                return None; // moved by the program, before the agent took it or after
            }
            drop(engine);
            if is_present(pagemap, item.page)? {
                continue;
            }
            let (staged, held) = self.agent.is_at(pagemap, place)?;
            if !staged && !held {
                return None;
            }
            done.moved |= bit;
            done.stranded |= bit * u64::from(staged);
        }
        Some(done)
    }
}

impl WayOut for AgentOut<'_> {
    fn begin(&self, group: &[EvictItem]) -> Begun {
        // A stopped process (SIGSTOP, a debugger) has a stopped agent: no page can leave until it
        // goes on.
        let agent = self.agent;
        let ready = agent.readiness() == Readiness::Ready;
        let cpu_plan = &self.shared.cpu_plan;
        cpu_plan.place_agent(&agent.placed, agent.tid(), agent.proof.pid);
        if !ready {
            return Begun::NotNow;
        }
        // A command without an answer: its group is aside, and this one was chosen before that.
        if !agent.commands.is_idle() || !agent.commands.claim() {
            return Begun::No;
        }
        apply_events(self.shared, self.process);
        let pages = group.iter().map(|item| item.page);
        let sharing = crate::space::cow::leaving(&self.shared.processes, self.process, pages);
        match self.post(group) {
            Some(seq) => Begun::Yes(Asked {
                seq,
                at: Some(Instant::now()),
                sharing,
                kept: 0,
                locked: 0,
            }),
            None => {
                self.end(group);
                Begun::No
            }
        }
    }

    fn wait(&self, asked: Asked) -> Answered {
        match self.answer(asked) {
            Ok(_) => Answered::Done(asked),
            // The agent died during the command, as a rule because its program has.
            Err(NotDone::Gone) => Answered::Late(Late::Gone(u64::MAX, asked.sharing)),
            Err(NotDone::GivenUp) => {
                let given_up = &self.shared.gauges.eviction.commands_given_up;
                given_up.fetch_add(1, Ordering::Relaxed);
                Answered::Late(Late::Answer(GivenUp {
                    seq: asked.seq,
                    sharing: asked.sharing,
                    agent_time: procfs::thread_time(self.agent.tid()),
                    asked: Duration::ZERO,
                }))
            }
        }
    }

    fn take(&self, answered: Answered, group: &[EvictItem], buffer: &mut [u8]) -> Took {
        match answered {
            // The results of its places stay when another command is carried out.
            Answered::Done(asked) => {
                let done = self.agent.commands.result();
                self.taken(group, (done, asked.sharing), buffer, Read::NotNow)
            }
            Answered::Late(Late::Gone(pages, sharing)) => {
                Took::Later(Late::Gone(pages & all_of(group), sharing))
            }
            Answered::Late(late) => Took::Later(late),
        }
    }

    fn resume(&self, late: Late, age: Duration, group: &[EvictItem], buffer: &mut [u8]) -> Took {
        let agent = self.agent;
        match late {
            Late::Answer(command) => match agent.commands.answer_to(command.seq) {
                Some(done) => self.taken(group, (done, command.sharing), buffer, Read::NotNow),
                None if agent.has_ended() => {
                    Took::Later(Late::Gone(all_of(group), command.sharing))
                }
                None => Took::Later(Late::Answer(self.ask(command, age))),
            },
            Late::End(pages) => {
                if agent.has_ended() || !self.process.is_alive() {
                    return Took::Later(Late::Gone(pages, 0));
                }
                if age >= END_AFTER {
                    self.process.end("its pages cannot be read");
                }
                Took::Later(Late::End(pages))
            }
            Late::Gone(pages, sharing) => self.gone((pages, sharing), age, group, buffer),
        }
    }

    fn stay(&self, page: VirtPage, bytes: &[u8]) -> Result<(), UffdError> {
        self.process.memory.install(page, bytes, Wake::Now)
    }

    fn left(&self, _group: &[EvictItem], _pages: u64) {
        // They are in the holding area, which the next command reuses.
    }

    fn end(&self, group: &[EvictItem]) {
        self.agent.ends_group(places_in(group));
    }
}

/// The places of a group in the holding area. They follow each other.
fn places_in(group: &[EvictItem]) -> Range<usize> {
    let from = group.first().map_or(0, |item| usize::from(item.place));
    from..from + group.len()
}

/// Binds an agent that waits for its CPU to the caller's, where it will run: the caller waits for
/// it.
#[cold]
fn bring_here(agent: &Agent) {
    let tid = agent.tid();
    if !agent.has_ended() && procfs::process_state(tid) == Some('R') {
        let _ = process::set_affinity(tid, &[process::current_cpu()]);
    }
}
