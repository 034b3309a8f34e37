//! Ends a client that has lost its keeper. The manager does it while it lives, and the holder
//! otherwise.
//!
//! Nothing here closes a descriptor. A process that is not found waits at its next absent page. At
//! worst it waits for ever. Userfaultfds are closed only when no address space is left.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_proto::legacy::{Fds, Flag, Legacy};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::Vma;
use undercroft_sys::{handover, held, inherit, procfs};
use undercroft_wire::protocol::SOCKET_VARIABLE;

/// Shortest and longest pause between two searches for remaining processes.
const NAP_MIN: Duration = Duration::from_millis(1);
const NAP_MAX: Duration = Duration::from_millis(200);

const _: () = assert!(NAP_MIN.as_nanos() < NAP_MAX.as_nanos());

/// Longest sleep while the manager lives.
const LONG: Duration = Duration::from_secs(3600);

/// Marks the processes of one run; their parents prove nothing, because a parent may be dead. Each
/// address space that can be managed has mapped the shim from the run's own directory. The others
/// have the run's socket in their environment.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    shim: String,
    variable: String,
    /// The number of the descriptor of the legacy, in the table that manager and holder share. It
    /// names the processes that have handed memory over: they are marked by nothing else.
    legacy: Option<i32>,
}

impl Mark {
    /// * `shim`: the file that the program loads, without links in its path.
    /// * `socket`: the manager's socket, as the program's environment has it.
    pub(crate) fn new(shim: &Path, socket: &Path) -> Mark {
        Mark {
            shim: shim.to_string_lossy().into_owned(),
            variable: format!("{SOCKET_VARIABLE}={}", socket.to_string_lossy()),
            legacy: None,
        }
    }

    /// Marks what `legacy` says, too.
    pub(crate) fn with(self, legacy: i32) -> Mark {
        Mark {
            legacy: Some(legacy),
            ..self
        }
    }

    /// The processes that have handed memory over.
    fn machines(&self) -> Vec<PidFd> {
        let memory = self.legacy.and_then(|number| inherit::copy_of(number).ok());
        let memory = memory.and_then(|memory| SharedMemory::from_fd(memory).ok());
        let Some(Ok(legacy)) = memory.map(Legacy::open) else {
            return Vec::new();
        };
        let heirs = Arc::new(legacy).heirs().into_iter();
        let handed = heirs.filter(|(_, heir)| heir.has(Flag::Handed));
        let pidfds = handed.map(|(_, heir)| heir.fds[Fds::Pidfd as usize]);
        pidfds
            .filter_map(|number| inherit::copy_of(number).ok())
            .map(PidFd::from)
            .collect()
    }

    pub(crate) fn is_on(&self, pid: u32, text: &mut String) -> bool {
        let mapped = procfs::read_maps(pid, text).is_ok() && self.runs(text);
        let variable = self.variable.as_bytes();
        mapped
            || procfs::environment(pid)
                .is_ok_and(|all| all.split(|b| *b == 0).any(|v| v == variable))
    }

    /// Whether a process with these mappings runs the shim. A debugger, a profiler and a scanner
    /// map the file too, but not to execute it.
    fn runs(&self, maps: &str) -> bool {
        // The directory may have been removed. In front there may be where a mount namespace had
        // the file system of this one.
        let is_shim = |name: &str| {
            let name = name.strip_suffix(" (deleted)").unwrap_or(name);
            name.ends_with(&self.shim)
        };
        let mut mappings = maps.lines().filter_map(Vma::parse);
        mappings.any(|of| of.exec && is_shim(of.name))
    }

    /// Kills every process of the run. Returns how many were alive.
    fn kill(&self) -> usize {
        let (mut lived, mut text) = (0, String::new());
        for pid in procfs::processes().unwrap_or_default() {
            // By descriptor, so that no other process is killed under the same number.
            let Ok(pidfd) = PidFd::open(pid) else {
                continue;
            };
            if pid != std::process::id() && self.is_on(pid, &mut text) && !pidfd.has_exited() {
                let _ = pidfd.kill();
                lived += 1;
            }
        }
        for pidfd in self.machines() {
            // A number of another table may be no process.
            lived += usize::from(!pidfd.has_exited() && pidfd.kill().is_ok());
        }
        lived
    }

    /// Kills processes of the run until no process and no address space of it is left.
    pub(crate) fn end_all(&self) {
        let mut nap = NAP_MIN;
        while self.kill() > 0 || !nothing_held() {
            std::thread::sleep(nap);
            nap = (2 * nap).min(NAP_MAX);
        }
    }
}

/// True if no address space is left whose userfaultfd is open here. False if that cannot be told.
pub(crate) fn nothing_held() -> bool {
    held::address_spaces().is_ok_and(|held| held == 0)
}

/// The holder's job: it sleeps while the manager lives. After that it hands descriptors to a
/// successor, as long as the keeper has the other end of `handover` open. Then the keeper ends the
/// holder, or the program; the holder ends the program if the keeper is dead. Returns when no
/// address space is left.
pub(crate) fn hold(manager: &PidFd, keeper: &PidFd, handover: &OwnedFd, mark: &Mark) {
    while !manager.wait_exit(LONG) {}
    process::close_standard_streams();
    while !keeper.has_exited() && hands_over(keeper, handover) {}
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

/// Waits for a question or the keeper's end, and answers. False if no process will ask.
fn hands_over(keeper: &PidFd, socket: &OwnedFd) -> bool {
    let mut fds = [
        PollFd::new(keeper, PollFlags::IN),
        PollFd::new(socket, PollFlags::IN),
    ];
    let _ = poll(&mut fds, None);
    let asked = !fds[1].revents().is_empty();
    !asked || handover::answer(socket.as_fd()).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_on_those_that_run_the_shim_and_on_no_bystander() {
        let shim = Path::new("/run/undercroft/run-7/libundercroft_shim.so");
        let mark = Mark::new(shim, Path::new("/run/undercroft/run-7/shim.sock"));
        let map = |how: &str, name: &str| {
            format!(
                "55d0-55d8 r-xp 00000000 fe:00 12                     /usr/bin/gdb\n\
                 7f00-7f08 {how} 00001000 00:1b 4711                   {name}\n"
            )
        };
        let shim = shim.display().to_string();
        for (how, name, on) in [
            ("r-xp", shim.clone(), true),
            ("r-xp", format!("{shim} (deleted)"), true),
            ("r-xp", format!("/newroot{shim}"), true),
            ("r--p", shim.clone(), false),
            ("r--s", shim.clone(), false),
            ("rw-p", shim.clone(), false),
            ("r-xp", format!("{shim}.debug"), false),
            ("r-xp", shim.replace("run-7", "run-77"), false),
        ] {
            assert_eq!(mark.runs(&map(how, &name)), on, "{how} {name}");
        }
    }
}
