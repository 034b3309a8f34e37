//! The process that the user started stands in front: for its parent it is the program. It passes
//! signals on, stops and goes on, and ends as the program does. The keeper is its child. So the
//! keeper can stay, with its manager, when the program has ended and left processes behind.
//!
//! They talk over a pair of sockets: the keeper says what becomes of the program, the front passes
//! on what is for processes that were left behind. The end of one side is the end of the other's
//! socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};
use undercroft_sys::inherit::{self, Given};
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::signal::{self, Received, Signals, is_ignored};
use undercroft_sys::{procfs, title};

use super::held::STOPPING;
use super::passing::{self, Scene};
use super::{End, OUR_FAILURE};

/// How long the front waits for the keeper, once the user has asked for an end and the program runs
/// no more, or not yet.
const LINGER: Duration = Duration::from_secs(5);

/// How long it waits for the keeper's word of the program's end, in which the report is written.
/// The keeper may be in a takeover.
const PATIENCE: Duration = Duration::from_secs(30);

const _: () = assert!(2 * super::READY.as_secs() + super::KILLED.as_secs() < PATIENCE.as_secs());

/// How long the front waits for the program's end when the keeper was killed.
const FOLLOWS: Duration = Duration::from_secs(2);

/// The name of the shim's thread in each process of the program.
const AGENT: &str = "uc-agent";

/// Words of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The program runs, as this process.
    Started(u32),
    /// This signal has stopped it.
    Stopped(i32),
    /// The program has ended: the status that wait(2) gives.
    Ended(i32),
    /// The program has left processes behind, and the keeper stays with them.
    Stays,
}

impl Word {
    fn bytes(self) -> [u8; 8] {
        let (kind, value) = match self {
            Word::Started(pid) => (1, pid as i32),
            Word::Stopped(number) => (2, number),
            Word::Ended(status) => (3, status),
            Word::Stays => (4, 0),
        };
        let mut bytes = [0; 8];
        bytes[0] = kind;
        bytes[4..].copy_from_slice(&i32::to_ne_bytes(value));
        bytes
    }

    fn of(bytes: &[u8; 8]) -> Option<Word> {
        let [kind, _, _, _, value @ ..] = *bytes;
        let value = i32::from_ne_bytes(value);
        match kind {
            1 => Some(Word::Started(value as u32)),
            2 => Some(Word::Stopped(value)),
            3 => Some(Word::Ended(value)),
            4 => Some(Word::Stays),
            _ => None,
        }
    }
}

/// Which side of [`split`] this process is.
pub(super) enum Side {
    /// The process that the user started.
    Front(Front),
    /// Its child.
    Keeper(Line),
}

/// Makes the keeper. Call it while the process has one thread.
pub(super) fn split() -> io::Result<Side> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let own = std::process::id();
    let group = process::group_of(own);
    match process::fork()? {
        Some(keeper) => Ok(Side::Front(Front {
            socket: ours,
            keeper,
            program: None,
            ended: None,
            until: None,
        })),
        None => {
            // Signals to the group of the front are passed on by the front. A group whose leader is
            // outside this pid namespace has no number here: all stay in it then.
            if group.is_some() {
                process::move_to_group(0)?;
            }
            Ok(Side::Keeper(Line {
                socket: Some(theirs),
                front: own,
                group,
                has_ended: false,
                is_stopped: false,
                waking: None,
            }))
        }
    }
}

/// The program, as the front knows it.
struct Program {
    pid: u32,
    /// `None`: it was gone when its start was told.
    pidfd: Option<PidFd>,
}

/// Acts of the front when it has waited long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// The front ends by this signal, or as the program has.
    End(i32),
    /// The front ends as the program has, which the kernel shows.
    EndAsShown,
    /// The front looks whether only the shim's thread is left of the program.
    Look,
}

/// The process that the user started.
pub(super) struct Front {
    socket: OwnedFd,
    keeper: u32,
    /// While it runs.
    program: Option<Program>,
    /// How it ended.
    ended: Option<End>,
    until: Option<(Instant, Then)>,
}

impl Front {
    /// Stands for the program until it has ended. Returns how.
    pub(super) fn serve(mut self, given: Given, signals: &Signals) -> End {
        given.close();
        let _ = inherit::leave_streams();
        process::spare_from_oom();
        process::trim_heap();
        loop {
            let mut fds = vec![
                PollFd::new(&self.socket, PollFlags::IN),
                PollFd::new(signals, PollFlags::IN),
            ];
            let running = self.program.as_ref().and_then(|of| of.pidfd.as_ref());
            // Once its end is seen, time runs.
            let watched = running.filter(|_| !self.awaits_word());
            fds.extend(watched.map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
            let left = self.until.map(|(until, _)| {
                let left = until.saturating_duration_since(Instant::now());
                rustix::fs::Timespec::try_from(left).unwrap_or_default()
            });
            let _ = poll(&mut fds, left.as_ref());
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            if ready[0]
                && let Some(end) = self.hear(signals)
            {
                return end;
            }
            if ready[1] {
                while let Some(received) = signals.next() {
                    self.pass(&received, signals);
                }
            }
            if ready.get(2) == Some(&true) && self.program.is_some() {
                self.until = Some((Instant::now() + PATIENCE, Then::EndAsShown));
            }
            if let Some((until, then)) = self.until
                && Instant::now() >= until
                && let Some(end) = self.has_waited(then)
            {
                return end;
            }
        }
    }

    fn awaits_word(&self) -> bool {
        matches!(self.until, Some((_, Then::EndAsShown)))
    }

    /// Takes the keeper's words. Returns the end, if it is one.
    fn hear(&mut self, signals: &Signals) -> Option<End> {
        loop {
            let mut bytes = [0; 8];
            match recv(&self.socket, &mut bytes, RecvFlags::empty()) {
                Ok((_, 8)) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return None,
                _ => return Some(self.follow()),
            }
            match Word::of(&bytes) {
                Some(Word::Started(pid)) => {
                    // The program may wipe its arguments, so ours must not show them longer.
                    let _ = title::set(&format!("undercroft: run of {pid}"));
                    let pidfd = PidFd::open(pid).ok();
                    self.program = Some(Program { pid, pidfd });
                    self.until = None; // it has the signals that came before
                }
                Some(Word::Stopped(number)) => {
                    let program = self.program.as_ref();
                    if program.is_some_and(|of| procfs::is_stopped(of.pid)) {
                        signals.stop_by(number);
                    }
                }
                Some(Word::Ended(status)) => {
                    self.program = None;
                    // What it ended by of our doing is no end of its own.
                    self.ended
                        .get_or_insert(End::of(ExitStatus::from_raw(status)));
                    self.until = None;
                }
                Some(Word::Stays) => return Some(self.end_or(OUR_FAILURE)),
                None => {}
            }
        }
    }

    /// The keeper has ended: so does the front, as the keeper did, which ends as the program.
    fn follow(&mut self) -> End {
        let status = process::wait_for(self.keeper);
        let end = status.map_or(End::Status(OUR_FAILURE), End::of);
        if let (Some(program), None) = (&self.program, &self.ended)
            && let Some(pidfd) = &program.pidfd
        {
            // It was killed: its manager ends the program, in milliseconds.
            pidfd.wait_exit(FOLLOWS);
        }
        let killed = matches!(end, End::Signal(_));
        match self.ended.take() {
            Some(ended) if killed => ended,
            _ => end,
        }
    }

    fn end_or(&mut self, status: i32) -> End {
        self.ended.take().unwrap_or(End::Status(status))
    }

    /// Passes a signal on: to the program while it runs. Before that to the keeper, which passes it
    /// on; after that to what is left, by the keeper.
    fn pass(&mut self, received: &Received, signals: &Signals) {
        let own = std::process::id();
        let number = received.number;
        let sender = received.sender;
        let from_inside =
            sender.is_some_and(|pid| pid == self.keeper || passing::is_inside(pid, self.keeper));
        let ends = STOPPING.contains(&number) && !is_ignored(number) && !from_inside;
        let Some(program) = &self.program else {
            if self.ended.is_some() {
                let _ = send(&self.socket, &received.bytes(), SendFlags::NOSIGNAL);
            } else if passing::is_for_program(&Received::new(number, Some(0)), Scene::default()) {
                signal::pass_on(received, self.keeper);
            }
            if ends {
                self.until
                    .get_or_insert((Instant::now() + LINGER, Then::End(number)));
            }
            return;
        };
        let scene = Scene {
            from_inside,
            leads_session: process::session_of(own) == Some(own),
            stopped: procfs::is_stopped(program.pid),
            stops_again: signals.is_stop_pending(),
        };
        if passing::is_for_program(received, scene) {
            signal::pass_on(received, program.pid);
        }
        if ends {
            let then = match self.until {
                Some((_, then @ Then::EndAsShown)) => then, // sooner
                _ => Then::Look,
            };
            self.until = Some((Instant::now() + LINGER, then));
        }
    }

    /// Time is up. Returns the end, if it is one.
    fn has_waited(&mut self, then: Then) -> Option<End> {
        self.until = None;
        let shown =
            |pid| procfs::exit_status(pid).map(|status| End::of(ExitStatus::from_raw(status)));
        match then {
            Then::End(number) => Some(self.ended.take().unwrap_or(End::Signal(number))),
            Then::EndAsShown => {
                let pid = self.program.as_ref().map_or(0, |of| of.pid);
                let ended = shown(pid);
                Some(ended.unwrap_or_else(|| self.end_or(OUR_FAILURE)))
            }
            Then::Look => {
                let program = self.program.as_ref()?;
                if is_only_agent(program.pid) {
                    // Without us it has ended already, and no signal but this one ends it.
                    self.ended = shown(program.pid);
                    let _ = program.pidfd.as_ref().map(PidFd::kill);
                }
                None
            }
        }
    }
}

/// Whether all threads of a process have ended but the shim's.
fn is_only_agent(pid: u32) -> bool {
    let threads = procfs::thread_ids(pid).unwrap_or_default();
    let others = threads.into_iter().filter(|tid| {
        let name = procfs::thread_name(*tid);
        name.as_deref() != Some(AGENT) && procfs::process_state(*tid) != Some('Z')
    });
    procfs::process_state(pid) == Some('Z') && others.count() == 0
}

/// News of the front: a signal that it passes on, or its end.
pub(super) enum Heard {
    Signal(Received),
    Gone,
}

/// The keeper's end.
pub(super) struct Line {
    /// `None`: the front has gone, and the keeper has the run for itself.
    socket: Option<OwnedFd>,
    front: u32,
    /// The front's process group, which is the program's. `None`: it is the keeper's, too.
    pub(super) group: Option<u32>,
    /// The front knows of the program's end.
    has_ended: bool,
    /// The front was told to stop.
    is_stopped: bool,
    /// Since when the program goes on after a stop, and the front may not yet.
    waking: Option<Instant>,
}

/// How long after a stop of the program the front is looked after.
const WAKING: Duration = Duration::from_secs(1);

impl Line {
    /// The socket to wait for.
    pub(super) fn socket(&self) -> Option<&OwnedFd> {
        self.socket.as_ref()
    }

    /// The front's process id, while it is there.
    pub(super) fn front(&self) -> Option<u32> {
        self.socket.as_ref().map(|_| self.front)
    }

    /// A front that has gone, or does not read, hears nothing.
    pub(super) fn say(&self, word: Word) {
        if let Some(socket) = &self.socket {
            let _ = send(socket, &word.bytes(), SendFlags::NOSIGNAL);
        }
    }

    /// The program has ended. Told once.
    pub(super) fn say_end(&mut self, status: ExitStatus) {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.say(Word::Ended(status.into_raw()));
        }
    }

    /// The next word of the front. `None`: nothing now.
    pub(super) fn hear(&self) -> Option<Heard> {
        let socket = self.socket.as_ref()?;
        let mut bytes = [0; Received::BYTES];
        match recv(socket, &mut bytes, RecvFlags::empty()) {
            Ok((_, Received::BYTES)) => Some(Heard::Signal(Received::of_bytes(&bytes))),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => None,
            _ => Some(Heard::Gone),
        }
    }

    /// Whether the front has gone.
    pub(super) fn is_cut(&self) -> bool {
        let Some(socket) = &self.socket else {
            return true;
        };
        let mut fds = [PollFd::new(socket, PollFlags::empty())];
        let now = rustix::fs::Timespec::default();
        let _ = poll(&mut fds, Some(&now));
        fds[0].revents().contains(PollFlags::HUP)
    }

    /// The keeper has the run for itself from now on: it lets go of everything that the front's
    /// parent may wait for, its terminal, its streams, its folder.
    pub(super) fn part(&mut self) {
        self.socket = None;
        let _ = inherit::leave_streams();
        let _ = inherit::leave_errors();
        let _ = std::env::set_current_dir("/");
        // A leader of a group cannot begin a session. If the front's group is gone, so is its
        // terminal's foreground, and the old session does no harm.
        if let Some(group) = self.group {
            let _ = process::move_to_group(group);
        }
        let _ = process::begin_session();
    }

    /// The program may have stopped, by this signal, or gone on: the front is to do the same.
    pub(super) fn note_stops(&mut self, program: u32, by: Option<i32>) {
        if let Some(number) = by {
            self.is_stopped = true;
            self.say(Word::Stopped(number));
        }
        if self.is_stopped && !procfs::is_stopped(program) {
            self.is_stopped = false;
            self.waking = Some(Instant::now());
            self.wake(program);
        }
    }

    /// Whether [`Line::wake`] is to be called again soon.
    pub(super) fn is_waking(&self) -> bool {
        self.waking.is_some()
    }

    /// Continues the front if it has stopped, and the program runs.
    pub(super) fn wake(&mut self, program: u32) {
        let Some(since) = self.waking else {
            return;
        };
        if self.socket.is_none() || since.elapsed() > WAKING {
            self.waking = None;
        } else if !procfs::is_stopped(program) && procfs::is_stopped(self.front) {
            signal::send(signal::SIGCONT, self.front);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_understood_as_they_were_said() {
        for word in [
            Word::Started(4711),
            Word::Stopped(20),
            Word::Ended(0x8b),
            Word::Ended(-1),
            Word::Stays,
        ] {
            assert_eq!(Word::of(&word.bytes()), Some(word));
        }
        assert_eq!(Word::of(&[0; 8]), None);
    }
}
