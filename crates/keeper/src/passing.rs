//! Which signals the keeper passes on to the program: those that the program would have received
//! without the keeper.

use undercroft_sys::procfs;
use undercroft_sys::signal::{
    Received, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTSTP, SIGTTIN, SIGTTOU,
    SIGWINCH, SIGXFSZ,
};

/// The state of the program when a signal arrives.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scene {
    /// The sender is a process of the program.
    pub from_inside: bool,
    /// The keeper leads its session: when the terminal goes away, only the keeper is told.
    pub leads_session: bool,
    /// The program is stopped.
    pub stopped: bool,
    /// A stop signal waits that came after this signal.
    pub stops_again: bool,
}

/// True if the signal is to be passed on. A terminal signals every process of its foreground group
/// itself. What the program's own processes send to their group or to their parent is not for the
/// program.
pub(super) fn is_for_program(signal: &Received, scene: Scene) -> bool {
    match signal.number {
        SIGCHLD | SIGPIPE | SIGTTIN | SIGTTOU | SIGXFSZ => false,
        // A shell continues the whole group. If a stop has come since, the program stopped for
        // that. The manager continues only the keeper.
        SIGCONT => scene.stopped && !scene.stops_again && !scene.from_inside,
        SIGHUP if signal.sender.is_none() => scene.leads_session,
        SIGINT | SIGQUIT | SIGTSTP | SIGWINCH if signal.sender.is_none() => false,
        _ => !scene.from_inside,
    }
}

/// True if `pid` descends from `root`.
pub(super) fn is_inside(pid: u32, root: u32) -> bool {
    let mut at = pid;
    for _ in 0..256 {
        match procfs::status_number(at, "PPid") {
            Some(parent) if parent as u32 == root => return true,
            Some(parent) if parent > 0 => at = parent as u32,
            _ => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_sys::signal::{SIGALRM, SIGTERM, SIGUSR1};

    #[test]
    fn each_signal_reaches_the_program_once() {
        let outside = Scene::default();
        let inside = Scene {
            from_inside: true,
            ..outside
        };
        let stopped = Scene {
            stopped: true,
            ..outside
        };
        let leader = Scene {
            leads_session: true,
            ..outside
        };
        let by = |number, sender| Received::new(number, sender);
        let someone = Some(77);
        for number in [
            SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGWINCH, SIGTSTP, 40,
        ] {
            assert!(is_for_program(&by(number, someone), outside), "{number}");
            assert!(!is_for_program(&by(number, someone), inside), "{number}");
        }
        for number in [SIGHUP, SIGINT, SIGQUIT, SIGWINCH, SIGTSTP, SIGCHLD] {
            assert!(!is_for_program(&by(number, None), outside), "{number}");
        }
        assert!(
            is_for_program(&by(SIGALRM, None), outside),
            "a timer set before exec"
        );
        assert!(
            is_for_program(&by(SIGHUP, None), leader),
            "the terminal is gone"
        );
        assert!(!is_for_program(&by(SIGCONT, someone), outside));
        assert!(is_for_program(&by(SIGCONT, someone), stopped));
        let again = Scene {
            stops_again: true,
            ..stopped
        };
        assert!(!is_for_program(&by(SIGCONT, someone), again));
        let by_manager = Scene {
            from_inside: true,
            ..stopped
        };
        assert!(!is_for_program(&by(SIGCONT, someone), by_manager));
    }
}
