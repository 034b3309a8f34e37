//! Processes that share their memory with others and end before them: their agents end too, and no
//! page of that memory can leave until one of the others has an agent.

use undercroft_base::SpaceId;

use super::world::{Doing, World};

impl World {
    /// A process of several that share their memory is killed, or one of the others has an agent.
    pub(super) fn leader_step(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        if self.procs[proc].agentless {
            self.find_agent(proc);
        } else {
            self.end_leader(proc);
        }
    }

    /// A leader dies while there is no manager. Its agent carries out no command any more.
    pub(super) fn leader_dies_unseen(&mut self) {
        let Some(proc) = self.a_proc() else { return };
        let space = self.procs[proc].space;
        self.commands.retain(|(owner, ..)| *owner != space);
        self.procs[proc].agentless = true;
        self.saw("a leader is killed, and its partner lives");
    }

    /// Each memory that lives has an agent.
    pub(super) fn find_agents(&mut self) {
        for proc in 0..self.procs.len() {
            if self.procs[proc].alive && self.procs[proc].agentless {
                self.find_agent(proc);
            }
        }
    }

    /// Whether the memory has no agent.
    pub(super) fn has_no_agent(&self, space: SpaceId) -> bool {
        (self.proc_of(space)).is_some_and(|proc| self.procs[proc].agentless)
    }

    /// No page leaves memory without an agent. A successor does not know of it yet.
    pub(super) fn pass_agentless_over(&mut self) {
        for proc in self.procs.iter().filter(|p| p.alive && p.agentless) {
            self.engine.evictions().pass_over(proc.space, true);
        }
    }

    fn find_agent(&mut self, proc: usize) {
        let space = self.procs[proc].space;
        self.procs[proc].agentless = false;
        self.saw("a partner has an agent");
        if !self.is_aside(space) {
            self.engine.evictions().pass_over(space, false);
            while self.engine.evictions().take_back(space, 16) {}
        }
    }

    /// Some threads are gone in the middle of what they did, and so is the agent. What it had moved
    /// is in the holding area; it moves nothing more.
    fn end_leader(&mut self, proc: usize) {
        let of = |world: &World, at: &usize| world.threads[*at].proc == proc;
        let threads: Vec<_> = (0..self.threads.len()).filter(|at| of(self, at)).collect();
        if threads.len() < 2 {
            return;
        }
        let space = self.procs[proc].space;
        self.log(|| format!("leader of p{proc} killed"));
        self.saw("a leader is killed, and its partner lives");
        for thread in threads.iter().step_by(2) {
            // Another thread of the process has its number soon.
            self.threads[*thread].doing = Doing::Running;
        }
        for batch in self.evictions_mut() {
            if batch.items.iter().any(|item| item.space == space) {
                batch.cancelled = true;
            }
        }
        self.procs[proc].agentless = true;
        self.engine.evictions().pass_over(space, true);
    }
}
