//! The keeper's services for its front and for the program's signals.

use std::io::{self, Write};
use std::process::{Child, ExitStatus};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use undercroft_proto::messages::Request;
use undercroft_sys::procfs;
use undercroft_sys::signal::{self, SIGCHLD, SIGTSTP, SIGTTIN, SIGTTOU, Signals};

use super::front::{Heard, Line, Word};
use super::left::pass_to_leftovers;
use super::passing::{self, Scene};
use super::voice::Voice;
use super::{End, Finished, Manager, READY, ask_for_report};

/// The program's signals, the front and the user: all that the keeper serves besides its manager.
pub(super) struct Outside {
    pub(super) signals: Signals,
    pub(super) line: Line,
    pub(super) quiet: bool,
    /// `run` waits for what the program leaves behind.
    pub(super) wait_all: bool,
    /// When the program was started.
    pub(super) started: Instant,
    /// The same, in seconds since 1970.
    pub(super) began_unix: f64,
}

impl Outside {
    /// The program starts now.
    pub(super) fn begin(&mut self) {
        self.started = Instant::now();
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        self.began_unix = since_1970.unwrap_or_default().as_secs_f64();
    }
}

/// The program has ended, and others go on: `run` ends now, and the keeper stays with them.
pub(super) fn leave(
    manager: &mut Manager,
    outside: &mut Outside,
    voice: &mut Voice,
    left: usize,
    status: ExitStatus,
) {
    let request = Request::Leave {
        exit_status: End::of(status).code(),
        wall_ns: outside.started.elapsed().as_nanos() as u64,
    };
    let report = ask_for_report(manager, &request, Instant::now() + READY);
    if !outside.quiet {
        if let Finished::Report(report) = report {
            voice.ended(&report);
        }
        let (processes, go) = match left {
            1 => ("1 process".to_owned(), "goes"),
            _ => (format!("{left} processes"), "go"),
        };
        voice.say(&format!(
            "the program has ended, and {processes} that it started {go} on, managed by process {} \
             (--wait-all waits for them)",
            std::process::id()
        ));
    }
    voice.flush();
    outside.line.say(Word::Stays);
    outside.line.part();
}

/// Takes what the front says. If it has gone, a signal that no process can pass on has ended it, so
/// it ends the program; or it waits no longer for what the program has left behind.
pub(super) fn answer_front(outside: &mut Outside, program: &mut Child, manager: &mut Manager) {
    while let Some(heard) = outside.line.hear() {
        match heard {
            Heard::Signal(received) => pass_to_leftovers(&received, outside.line.group, manager),
            Heard::Gone => {
                let _ = program.kill();
                outside.line.part();
                // It is known under another process id now. The answer is not waited for.
                let request = Request::Leave {
                    exit_status: 0,
                    wall_ns: outside.started.elapsed().as_nanos() as u64,
                };
                let told = serde_json::to_vec(&request).map_err(io::Error::from);
                let _ = told.and_then(|line| manager.link.write_all(&line));
            }
        }
    }
}

/// Passes on the signals that are for the program: those to the keeper alone. The front passes on
/// its own. The front is told of stops.
pub(super) fn answer_signals(
    outside: &mut Outside,
    program: &Child,
    ended: bool,
    manager: &Manager,
) {
    let own = std::process::id();
    let mut of_child = false;
    while let Some(received) = outside.signals.next() {
        if received.number == SIGCHLD {
            of_child = true; // a stop of the program, or an agent has ended
            continue;
        }
        if ended {
            pass_to_leftovers(&received, outside.line.group, manager);
            continue;
        }
        let scene = Scene {
            from_inside: received
                .sender
                .is_some_and(|pid| passing::is_inside(pid, own)),
            leads_session: false,
            stopped: procfs::is_stopped(program.id()),
            stops_again: outside.signals.is_stop_pending(),
        };
        if passing::is_for_program(&received, scene) {
            signal::pass_on(&received, program.id());
        }
    }
    if of_child && !ended {
        outside.line.note_stops(program.id(), job_stop(program));
    }
}

/// The job-control signal that has stopped the program since the last call.
fn job_stop(program: &Child) -> Option<i32> {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let pid = Pid::from_raw(program.id() as i32)?;
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
    let status = waitid(WaitId::Pid(pid), options).ok()??;
    let number = status.stopping_signal()?;
    [SIGTSTP, SIGTTIN, SIGTTOU]
        .contains(&number)
        .then_some(number)
}
