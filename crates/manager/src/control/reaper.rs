//! Whether process 1 of a pid namespace waits for agents that have ended.
//!
//! An agent that has lost its parent becomes a child of process 1 of its own namespace. Inits wait
//! for all their children; a program that a user made process 1 may not. Then each process that
//! ends would leave a dead agent behind, until no number is left for another.

use undercroft_sys::process::PidFd;
use undercroft_sys::procfs;

use undercroft_proto::is_agent;

/// Most ancestors that are followed.
pub(super) const ANCESTORS_MAX: usize = 256;

/// Dead agents that one process 1 may leave there. One may be about to wait for them.
const DEAD_MAX: usize = 32;

/// Children of process 1 that are looked at.
const LOOK_MAX: usize = 1024;

/// False if the dead agents of a process's namespace are not waited for. Cost: none in our own
/// namespace. Below, reads two files for each ancestor up to process 1, and one for each of its
/// children.
/// * `numbers`: the process's, as [`PidFd::numbers`] gives them.
pub(super) fn reaps(numbers: &[u32]) -> bool {
    let Some(first) = first_of_its_namespace(numbers) else {
        return true; // it was moved there from outside
    };
    let dead = |child: &u32| procfs::process_state(*child) == Some('Z') && is_agent(*child);
    let children = procfs::children(first).into_iter().take(LOOK_MAX);
    children.filter(dead).take(DEAD_MAX).count() < DEAD_MAX
}

/// Process 1 of a process's namespace, by our numbers, if it is an ancestor or the process itself.
/// `None` too for our own namespace.
fn first_of_its_namespace(numbers: &[u32]) -> Option<u32> {
    let depth = numbers.len();
    if depth < 2 {
        return None;
    }
    let mut at = *numbers.first()?;
    for _ in 0..ANCESTORS_MAX {
        let numbers = PidFd::open(at).ok()?.numbers().ok()?;
        if numbers.len() < depth {
            return None;
        }
        if numbers.len() == depth && numbers.last() == Some(&1) {
            return Some(at);
        }
        at = u32::try_from(procfs::status_number(at, "PPid")?).ok()?;
    }
    None
}
