//! `undercroft upgrade`: another binary for the manager of a running program. A user gives it to
//! the keeper, open, by the keeper's own socket. The keeper checks it before anything is touched
//! (`succession.rs` then replaces the manager).
//!
//! Who may ask: this user and root, but no process of the program, the manager included. These may
//! have fewer rights than the keeper, which runs the binary with its own. What may be given: a
//! binary that no other user can change. What was checked is what runs: the keeper has the file
//! open, and runs it by that descriptor.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};
use undercroft_proto::versions::Versions;
use undercroft_sys::process::PidFd;
use undercroft_sys::{fdpass, inherit};

use super::passing::is_inside;
use super::place::UPGRADE_SOCKET;
use super::{DYING, KILLED, status};

/// The question that is sent along with the binary.
const QUESTION: &[u8] = b"upgrade 1";

/// How long the asker may take to send its question, or to take an answer.
const ASKING: Duration = Duration::from_secs(1);

/// How long a binary may take to say its versions. It takes milliseconds.
const SAYING: Duration = Duration::from_secs(5);

/// Longest statement of versions, and longest message to the asker.
const SAID_BYTES_MAX: usize = 16 << 10;

/// Longest time without news of the keeper, until it says how long a takeover may take.
const PATIENCE: Duration = Duration::from_secs(240);

/// Longest time without news after that. It ends the manager and the one of the new binary, and
/// waits for that and for one of the old.
fn patience(takeover: f64) -> Duration {
    let takeover = Duration::try_from_secs_f64(takeover).unwrap_or_default();
    PATIENCE.max(2 * (DYING + takeover) + Duration::from_secs(60))
}

/// Answers to the asker. The first is no end; each of the others is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Told {
    /// The binary can take over. The manager is being replaced.
    Checked {
        /// Its version.
        version: String,
        /// How long the program's threads are expected to wait. 0: an older keeper does not say.
        #[serde(default)]
        pause_seconds: f64,
        /// After how long a manager that is not ready is given up.
        #[serde(default)]
        pause_seconds_max: f64,
    },
    /// The binary has taken over.
    Done {
        /// How long the program's threads may have waited.
        pause_seconds: f64,
    },
    /// The binary did not become ready; the one before has taken over again.
    Kept {
        /// Its reason, or that it gave none.
        why: String,
        /// How long the program's threads may have waited.
        pause_seconds: f64,
    },
    /// No manager has taken over: the program is being ended.
    Ended {
        /// Why.
        why: String,
    },
    /// Nothing was touched.
    Refused {
        /// Why, with the fix.
        why: String,
    },
}

/// A user who waits for an upgrade, and the binary.
pub(super) struct Asking {
    socket: OwnedFd,
    pub(super) binary: OwnedFd,
}

impl Asking {
    /// Tells the user. One who has gone, or does not listen, is not waited for.
    pub(super) fn tell(&self, told: &Told) {
        if let Ok(bytes) = serde_json::to_vec(told) {
            let _ = fdpass::send(self.socket.as_fd(), &bytes, &[]);
        }
    }
}

/// The binary of this process, held open.
pub(super) fn own_binary() -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(open("/proc/self/exe", flags, Mode::empty())?)
}

/// Runs an open binary. The descriptor stays open until it has started.
/// * `title`: what others see in place of its name.
pub(super) fn command(binary: &OwnedFd, title: &str) -> Command {
    let mut command = Command::new(format!("/proc/self/fd/{}", binary.as_raw_fd()));
    command.arg0(title);
    command
}

/// Takes a call. `None`: there is none, or its caller may not ask, or gives nothing. Waits for
/// [`ASKING`] at most, and for no process of the program.
pub(super) fn asked(listener: &OwnedFd) -> Option<Asking> {
    let socket = rustix::net::accept_with(listener, SocketFlags::CLOEXEC).ok()?;
    set_socket_timeout(&socket, Timeout::Send, Some(ASKING)).ok()?;
    if let Err(why) = may_ask(&socket) {
        tell_stranger(&socket, why);
        return None;
    }
    set_socket_timeout(&socket, Timeout::Recv, Some(ASKING)).ok()?;
    let mut bytes = [0; 64];
    let (got, mut given) = fdpass::receive(socket.as_fd(), &mut bytes).ok()?;
    match (given.pop(), given.is_empty()) {
        (Some(binary), true) if &bytes[..got] == QUESTION => Some(Asking { socket, binary }),
        _ => {
            tell_stranger(&socket, "the question cannot be understood");
            None
        }
    }
}

fn tell_stranger(socket: &OwnedFd, why: &str) {
    let why = why.to_owned();
    if let Ok(bytes) = serde_json::to_vec(&Told::Refused { why }) {
        let _ = fdpass::send(socket.as_fd(), &bytes, &[]);
    }
}

/// Whether the process at the other end may choose what the keeper runs. Orphans of the program are
/// children of the keeper, so every process of the program descends from it.
fn may_ask(socket: &OwnedFd) -> Result<(), &'static str> {
    let unknown = "the kernel does not say who asks";
    let peer = fdpass::peer(socket).map_err(|_| unknown)?;
    let own = rustix::process::geteuid().as_raw();
    if ![0, own].contains(&peer.uid) {
        return Err("only the user of the run, and root, may choose its binary");
    }
    let numbers = peer.pidfd.numbers().map_err(|_| unknown)?;
    let pid = *numbers.first().ok_or(unknown)?;
    // While the peer lives, its number and its ancestors are its own.
    let inside = is_inside(pid, std::process::id());
    if inside || peer.pidfd.has_exited() {
        return Err("a process of the program may not choose what its keeper runs");
    }
    Ok(())
}

/// Checks a binary, and asks it for its versions. Takes [`SAYING`] at most. Errors: why it is
/// refused, with the fix.
pub(super) fn check(binary: &OwnedFd) -> Result<Versions, String> {
    let found = fstat(binary).map_err(|why| format!("its file cannot be looked at: {why}"))?;
    check_file(&found, rustix::process::geteuid().as_raw())?;
    let mut first = [0; 4];
    let read = File::open(format!("/proc/self/fd/{}", binary.as_raw_fd()))
        .and_then(|file| file.read_exact_at(&mut first, 0));
    read.map_err(|why| format!("it cannot be read: {why}"))?;
    if &first != b"\x7fELF" {
        return Err(
            "it is no binary: a script is read again by its interpreter, so what was checked may \
             not be what runs; give the undercroft binary itself"
                .to_owned(),
        );
    }
    let said = said_versions(binary).map_err(|why| format!("it does not run: {why}"))?;
    let versions: Versions = serde_json::from_slice(&said).map_err(|_| {
        let own = Versions::of_this();
        format!(
            "it does not say what it can continue: it is no undercroft, or one before {} that \
             cannot take over",
            own.undercroft
        )
    })?;
    match Versions::of_this().refusal_of(&versions) {
        None => Ok(versions),
        Some(why) => Err(format!(
            "{why}; give a binary that reads it, or start the program anew"
        )),
    }
}

/// Whether a file of such a kind may be run for user `user`.
fn check_file(found: &Stat, user: u32) -> Result<(), String> {
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err("it is no file; give the path of an undercroft binary".to_owned());
    }
    if ![0, user].contains(&found.st_uid) {
        return Err(format!(
            "it belongs to user {}, who could change it; give a file of user {user} or of root",
            found.st_uid
        ));
    }
    if found.st_mode & 0o022 != 0 {
        return Err("other users may write to it; `chmod go-w` it".to_owned());
    }
    if found.st_mode & 0o111 == 0 {
        return Err("it is not executable; `chmod +x` it".to_owned());
    }
    Ok(())
}

/// The output of the binary when it is asked for its versions.
fn said_versions(binary: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut asks = command(binary, "undercroft");
    asks.arg("versions")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    inherit::only(&mut asks, &[]);
    let mut child = asks.spawn()?;
    let deadline = Instant::now() + SAYING;
    let said = (child.stdout.take()).map(|mut pipe| read_until(&mut pipe, deadline));
    let _ = child.kill();
    if let Ok(pidfd) = PidFd::open(child.id()) {
        pidfd.wait_exit(KILLED);
    }
    let _ = child.try_wait();
    said.unwrap_or_else(|| Err(io::ErrorKind::BrokenPipe.into()))
}

/// All that comes up to the end. Errors: more than [`SAID_BYTES_MAX`], or no end by `deadline`.
fn read_until(pipe: &mut (impl Read + AsFd), deadline: Instant) -> io::Result<Vec<u8>> {
    use rustix::event::{PollFd, PollFlags, poll};
    let (mut all, mut some) = (Vec::new(), [0; 4096]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = rustix::fs::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let ready = poll(&mut [PollFd::new(&*pipe, PollFlags::IN)], Some(&left))?;
        if ready == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let got = pipe.read(&mut some)?;
        if got == 0 {
            return Ok(all);
        }
        all.extend_from_slice(&some[..got]);
        if all.len() > SAID_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Opens a binary, to give it to a keeper. Errors: it cannot be opened.
pub fn open_binary(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Has the keeper of run `pid` replace its manager. `news`: what it says on the way. Returns the
/// last of it. `None`: there is no such run, or it does not answer.
pub fn ask(pid: u32, binary: BorrowedFd<'_>, mut news: impl FnMut(&Told)) -> Option<Told> {
    let address = status::folder_of(pid)?.join(UPGRADE_SOCKET);
    let address = SocketAddrUnix::new(&address).ok()?;
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE)).ok()?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).ok()?;
    connect(&socket, &address).ok()?;
    // A keeper that refuses has said so, and may have gone already.
    let _ = fdpass::send(socket.as_fd(), QUESTION, &[binary]);
    loop {
        let mut bytes = vec![0; SAID_BYTES_MAX];
        let got = match fdpass::receive(socket.as_fd(), &mut bytes) {
            // A keeper that refuses reads no question. Its answer is behind this error.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                fdpass::receive(socket.as_fd(), &mut bytes)
            }
            got => got,
        };
        let (got, _) = got.ok()?;
        match serde_json::from_slice(&bytes[..got]).ok()? {
            told @ Told::Checked {
                pause_seconds_max, ..
            } => {
                let longest = patience(pause_seconds_max);
                set_socket_timeout(&socket, Timeout::Recv, Some(longest)).ok()?;
                news(&told)
            }
            told => return Some(told),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn refusal(path: &Path) -> String {
        let binary = open_binary(path).expect("a file");
        check(&binary).expect_err("refused")
    }

    #[test]
    fn a_file_that_others_may_change_or_that_is_no_undercroft_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("binary");
        let mode = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("its owner may");
        };
        std::fs::copy("/bin/true", &path).expect("a program");
        for (bits, part) in [
            (0o775, "chmod go-w"),
            (0o757, "chmod go-w"),
            (0o644, "chmod +x"),
            (0o755, "no undercroft"),
        ] {
            mode(bits);
            let why = refusal(&path);
            assert!(why.contains(part), "{bits:o}: {why}");
        }
        std::fs::write(&path, "#!/bin/sh\necho '{}'\n").expect("a script");
        assert!(refusal(&path).contains("a script"), "{}", refusal(&path));
        assert!(refusal(folder.path()).contains("no file"));
        let mut found = fstat(open_binary(&path).expect("a file")).expect("it is open");
        assert_eq!(check_file(&found, found.st_uid), Ok(()));
        found.st_uid = 4711;
        let why = check_file(&found, 4712).expect_err("refused");
        assert!(why.contains("belongs to user 4711"), "{why}");
    }
}
