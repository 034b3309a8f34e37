//! Which instruction of a guest faults, and by which page tables: registers of the virtual CPU
//! whose thread waits. Looked at only if the run's plugin asks. The monitor is not asked: its
//! answer might need the thread that waits for us.

use undercroft_sys::access::vcpu::{Registers, Thread, VirtualCpus};

/// Threads that are remembered; each takes a descriptor. Of a guest with more virtual CPUs that
/// fault, some are looked for anew each time.
const THREADS_MAX: usize = 64;

/// Threads of the monitor that were looked at, the newest last.
#[derive(Default)]
pub(super) struct Looks(Vec<(u32, Thread)>);

impl Looks {
    /// The registers of the virtual CPU of a thread that waits for a page. `None`: it runs none, or
    /// they cannot be read.
    pub(super) fn registers(&mut self, cpus: &VirtualCpus, thread: u32) -> Option<Registers> {
        let known = self.0.iter().position(|(id, _)| *id == thread);
        let at = match known {
            Some(at) => at,
            None => {
                let new = cpus.thread(thread).ok()?;
                if self.0.len() == THREADS_MAX {
                    self.0.remove(0);
                }
                self.0.push((thread, new));
                self.0.len() - 1
            }
        };
        self.0[at].1.registers().ok()?
    }
}
