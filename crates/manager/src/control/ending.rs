//! Ends a client that has lost its keeper. The holder does it where the manager is dead too, and
//! the manager where it lives.
//!
//! Nothing here closes a descriptor: whatever is not found waits, at worst for ever, at the next
//! absent page. Only when no address space is left do its userfaultfds go.

use std::path::Path;
use std::time::Duration;

use undercroft_sys::process::{self, PidFd};
use undercroft_sys::{held, procfs};
use undercroft_wire::protocol::SOCKET_VARIABLE;

/// Pauses between two looks for processes that are left.
const NAP_MIN: Duration = Duration::from_millis(1);
const NAP_MAX: Duration = Duration::from_millis(200);

/// Longest sleep while everybody lives.
const LONG: Duration = Duration::from_secs(3600);

/// What tells the processes of one run from all others, whoever their parents are by now: the shim,
/// which each address space that can be managed has mapped from the run's own directory, and the
/// environment, which the others have too.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    shim: String,
    variable: String,
}

impl Mark {
    /// * `shim`: the file that the program loads, without links in its path. * `socket`: what the
    ///   program's environment calls the manager's.
    pub fn new(shim: &Path, socket: &Path) -> Mark {
        Mark {
            shim: shim.to_string_lossy().into_owned(),
            variable: format!("{SOCKET_VARIABLE}={}", socket.to_string_lossy()),
        }
    }

    fn is_on(&self, pid: u32, text: &mut String) -> bool {
        let mapped = procfs::read_maps(pid, text).is_ok() && text.contains(&self.shim);
        let variable = self.variable.as_bytes();
        mapped
            || procfs::environment(pid)
                .is_ok_and(|all| all.split(|b| *b == 0).any(|v| v == variable))
    }

    /// Kills every process of the run, in whatever order they are found; returns how many lived.
    fn kill(&self) -> usize {
        let (mut lived, mut text) = (0, String::new());
        for pid in procfs::processes().unwrap_or_default() {
            // By descriptor: what is killed is what was looked at.
            let Ok(pidfd) = PidFd::open(pid) else {
                continue;
            };
            if pid != std::process::id() && self.is_on(pid, &mut text) && !pidfd.has_exited() {
                let _ = pidfd.kill();
                lived += 1;
            }
        }
        lived
    }

    /// Kills the processes of the run until none is left and no address space of it.
    pub fn end_all(&self) {
        let mut nap = NAP_MIN;
        while self.kill() > 0 || !nothing_held() {
            std::thread::sleep(nap);
            nap = (2 * nap).min(NAP_MAX);
        }
    }
}

/// Whether no address space is left whose userfaultfd is open here. What cannot be told is left.
pub(crate) fn nothing_held() -> bool {
    held::address_spaces().is_ok_and(|held| held == 0)
}

/// The holder's job. While the manager lives: nothing. Then the keeper ends the program; if it
/// cannot, because it is dead too, the holder does. Returns when no address space is left.
pub(crate) fn hold(manager: &PidFd, keeper: &PidFd, mark: &Mark) {
    while !manager.wait_exit(LONG) {}
    process::close_standard_streams();
    let mut nap = NAP_MIN;
    while !keeper.has_exited() {
        if nothing_held() {
            return;
        }
        keeper.wait_exit(nap);
        nap = (2 * nap).min(NAP_MAX);
    }
    mark.end_all();
}
