//! Words of a manager to its keeper: notices on the link, and its standard error.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_proto::messages::Notice;
use undercroft_sys::process::PidFd;

use super::voice::Voice;

/// Reads of the manager's log in a row. So a flood of messages does not stop the keeper.
const LOG_READS_MAX: usize = 32;

/// The next notice by `deadline`. `None` if it has not come whole, or the manager is dead: its
/// holder has the other end of the link open, too, so that does not end.
pub(super) fn notice_by(
    lines: &mut BufReader<UnixStream>,
    manager: &PidFd,
    deadline: Instant,
) -> Option<Notice> {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        if lines.buffer().is_empty() {
            let left = deadline.checked_duration_since(Instant::now())?;
            let mut fds = [
                PollFd::new(lines.get_ref(), PollFlags::IN),
                PollFd::new(manager, PollFlags::IN),
            ];
            let left = rustix::fs::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let _ = poll(&mut fds, Some(&left));
            if fds[0].revents().is_empty() && !fds[1].revents().is_empty() {
                return None;
            }
        }
        let left = deadline.checked_duration_since(Instant::now())?;
        // An error if no time is left.
        lines.get_ref().set_read_timeout(Some(left)).ok()?;
        let part = lines.fill_buf().ok().filter(|part| !part.is_empty())?;
        let end = part.iter().position(|byte| *byte == b'\n');
        let used = end.map_or(part.len(), |at| at + 1);
        line.extend_from_slice(&part[..used]);
        lines.consume(used);
    }
    serde_json::from_slice(&line).ok()
}

/// The manager's standard error: a pipe of its own, so that no process of the program can stop it.
pub(super) struct Log {
    pub(super) pipe: File,
    unfinished: Vec<u8>,
}

impl Log {
    /// Makes the pipe; returns the log and the end to write to. No read or write waits.
    pub(super) fn new() -> io::Result<(Log, Stdio)> {
        use rustix::pipe::{PipeFlags, pipe_with};
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let log = Log {
            pipe: File::from(read),
            unfinished: Vec::new(),
        };
        Ok((log, Stdio::from(write)))
    }

    /// The lines that have arrived.
    pub(super) fn lines(&mut self) -> Vec<String> {
        let mut bytes = [0u8; 4096];
        for _ in 0..LOG_READS_MAX {
            match self.pipe.read(&mut bytes) {
                Ok(got) if got > 0 => self.unfinished.extend_from_slice(&bytes[..got]),
                _ => break,
            }
        }
        let whole = self.unfinished.iter().rposition(|byte| *byte == b'\n');
        let rest = self.unfinished.split_off(whole.map_or(0, |at| at + 1));
        let text = std::mem::replace(&mut self.unfinished, rest);
        let lines = String::from_utf8_lossy(&text).into_owned();
        lines.lines().map(str::to_owned).collect()
    }

    /// Relays the lines that have arrived.
    pub(super) fn tell(&mut self, voice: &mut Voice) {
        for line in self.lines() {
            voice.relay(&line);
        }
    }
}
