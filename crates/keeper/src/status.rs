//! Asks running clients: for their status, or to do something.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use undercroft_proto::grant::Figures;
use undercroft_proto::messages::{Answered, Ask, Word};
use undercroft_proto::options::PluginFile;
use undercroft_proto::report::Snapshot;

use serde::de::DeserializeOwned;

use undercroft_sys::procfs::read_maps;
use undercroft_sys::{fdpass, sealed};

use crate::place::{SHIM_NAME, STATUS_SOCKET, bases, is_run};

/// Longest time that one manager may take to take the call, and then to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Longest answer. It is some 10 KiB; an older manager sends all arguments, up to 6 MiB.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Runs that are asked at once.
const ASKERS: usize = 16;

/// Attempts to ask: a manager that is very late takes a request for one of the status.
const TRIES: usize = 10;

/// The sockets of all runs.
fn sockets() -> impl Iterator<Item = PathBuf> {
    bases()
        .into_iter()
        .filter_map(|base| std::fs::read_dir(base).ok())
        .flat_map(Iterator::flatten)
        .filter(|entry| is_run(&entry.file_name()))
        .map(|entry| entry.path().join(STATUS_SOCKET))
}

/// Has `ask` ask at each socket, and gives the answers as they come. Some are asked at once: a run
/// that does not answer delays no other, unless there are [`ASKERS`] of its kind.
pub(crate) fn answers<S: Send + 'static, T: Send + 'static>(
    sockets: Vec<S>,
    ask: impl Fn(S) -> Option<T> + Clone + Send + 'static,
) -> Receiver<T> {
    let (tell, hear) = channel();
    let askers = sockets.len().min(ASKERS);
    let sockets = Arc::new(Mutex::new(sockets));
    let next = move || sockets.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = move || {
        let mut answers = std::iter::from_fn(&next).filter_map(&ask);
        while answers.next().is_some_and(|it| tell.send(it).is_ok()) {}
    };
    let started = (0..askers)
        .filter(|_| thread::Builder::new().spawn(work.clone()).is_ok())
        .count();
    if started == 0 {
        work();
    }
    hear
}

/// The snapshots of all runs of this user that answer, with their sockets.
fn all() -> Receiver<(PathBuf, Snapshot)> {
    answers(sockets().collect(), |socket: PathBuf| {
        let snapshot = status_of(&socket, PATIENCE)?;
        Some((socket, snapshot))
    })
}

/// The snapshots of all runs of this user that answer, in order of the keeper's process id. A run
/// that ends meanwhile is left out.
pub fn snapshots() -> Vec<Snapshot> {
    let snapshots = all().into_iter().map(|(_, snapshot)| snapshot);
    in_order(snapshots.collect())
}

pub(super) fn in_order(mut found: Vec<Snapshot>) -> Vec<Snapshot> {
    found.sort_by_key(|snapshot| snapshot.pid);
    found
}

/// The status of one run. `None`: it gives none in time, or one that is none.
///
/// * `patience`: for the connection, and once more for the whole answer.
pub(super) fn status_of(socket: &Path, patience: Duration) -> Option<Snapshot> {
    serde_json::from_slice(&exchange(socket, &[], patience)?).ok()
}

/// The user for whom this process acts.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Longest time that another tier may take to be opened and measured.
const ADDING: Duration = Duration::from_secs(60);

/// Has the run of keeper `pid` do something. `None`: there is no such run, or it does not answer.
pub fn ask(pid: u32, what: Ask) -> Option<Answered> {
    ask_at(&folder_of(pid)?.join(STATUS_SOCKET), what)
}

/// Has a policy file name the pages of run `pid` from now on. `None`: there is no such run, or it
/// does not answer.
pub fn ask_policy(pid: u32, path: &Path) -> Option<Answered> {
    let socket = folder_of(pid)?.join(STATUS_SOCKET);
    let file = PluginFile::read(path);
    let read = file.and_then(|it| Ok((sealed::of("uc-policy-file", &it.module)?, it.file)));
    let (bytes, file) = match read {
        Ok(read) => read,
        Err(why) => return Some(Answered::Refused(format!("{}: {why}", path.display()))),
    };
    let question = serde_json::to_vec(&Ask::Policy { file: Some(file) }).ok()?;
    ask_once(&socket, &question, &[bytes.as_fd()])
}

/// Has the run that process `pid` belongs to do something, which may take up to `patience`. The
/// process's mappings name the run's directory: it may be another user's. `None`: it belongs to no
/// run.
pub fn ask_about(pid: u32, what: &Ask, patience: Duration) -> Option<Answered> {
    let mut maps = String::new();
    read_maps(pid, &mut maps).ok()?;
    let mut files = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]));
    let folder = files.find_map(|file| {
        let folder = Path::new(file.strip_suffix(SHIM_NAME)?);
        is_run(folder.file_name()?).then_some(folder)
    })?;
    let question = serde_json::to_vec(what).ok()?;
    let socket = folder.join(STATUS_SOCKET);
    let answered = (0..TRIES)
        .find_map(|_| serde_json::from_slice(&exchange(&socket, &question, patience)?).ok());
    Some(answered.unwrap_or_else(|| Answered::Refused("its run does not answer".to_owned())))
}

/// The directory of the run of keeper `pid`. `None`: there is no such run, or it does not answer.
pub(super) fn folder_of(pid: u32) -> Option<PathBuf> {
    let (socket, _) = all().into_iter().find(|(_, run)| run.is_of(pid))?;
    Some(socket.parent()?.to_owned())
}

/// As [`ask`], of the run with this socket.
pub(super) fn ask_at(socket: &Path, what: Ask) -> Option<Answered> {
    let question = serde_json::to_vec(&what).ok()?;
    match what {
        Ask::Add(_) | Ask::Policy { .. } | Ask::Parameter { .. } => {
            ask_once(socket, &question, &[])
        }
        _ => answer_to(socket, &question),
    }
}

/// Asks for what may take a while. It is asked again only if the request was not read: the answer
/// was the status, or came too early.
fn ask_once(socket: &Path, question: &[u8], along: &[BorrowedFd<'_>]) -> Option<Answered> {
    let begun = Instant::now();
    for _ in 0..TRIES {
        let answer = exchange_with(socket, question, along, ADDING);
        match answer.map(|it| serde_json::from_slice(&it)) {
            Some(Ok(answered)) => return Some(answered),
            None if begun.elapsed() > PATIENCE => return None,
            Some(Err(_)) | None => {}
        }
    }
    None
}

/// Passes on what the daemon says. Outer `None`: the manager does not answer.
pub(super) fn pass_on(socket: &Path, word: &Word) -> Option<Option<Figures>> {
    let question = serde_json::to_vec(word).ok()?;
    answer_to(socket, &question)
}

fn answer_to<T: DeserializeOwned>(socket: &Path, question: &[u8]) -> Option<T> {
    (0..TRIES).find_map(|_| serde_json::from_slice(&exchange(socket, question, PATIENCE)?).ok())
}

/// Sends a question, and returns the answer.
fn exchange(socket: &Path, question: &[u8], patience: Duration) -> Option<Vec<u8>> {
    exchange_with(socket, question, &[], patience)
}

/// The same with descriptors that go along.
fn exchange_with(
    socket: &Path,
    question: &[u8],
    along: &[BorrowedFd<'_>],
    patience: Duration,
) -> Option<Vec<u8>> {
    let mut stream = call(socket, patience)?;
    // A peer that has answered and gone already refuses the question.
    if along.is_empty() {
        stream.write_all(question).ok()?;
    } else {
        fdpass::send(stream.as_fd(), question, along).ok()?;
    }
    let _ = stream.shutdown(Shutdown::Write);
    answer(stream, patience, ANSWER_BYTES_MAX)
}

/// Connects. A manager that takes no calls leaves the kernel's queue full, and a connect then waits
/// as long as a send may.
pub(crate) fn call(socket: &Path, patience: Duration) -> Option<UnixStream> {
    let address = SocketAddrUnix::new(socket).ok()?;
    let flags = SocketFlags::CLOEXEC;
    let ours = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    set_socket_timeout(&ours, Timeout::Send, Some(patience)).ok()?;
    connect(&ours, &address).ok()?;
    Some(UnixStream::from(ours))
}

/// All that comes up to the end of the stream. `None`: it is longer than `bytes_max`, or takes
/// longer than `patience`.
pub(crate) fn answer(
    mut stream: UnixStream,
    patience: Duration,
    bytes_max: u64,
) -> Option<Vec<u8>> {
    let deadline = Instant::now() + patience;
    let (mut all, mut some) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let left = deadline.checked_duration_since(Instant::now())?;
        // An error if no time is left.
        stream.set_read_timeout(Some(left)).ok()?;
        let got = stream.read(&mut some).ok()?;
        if got == 0 {
            return Some(all);
        }
        if (all.len() + got) as u64 > bytes_max {
            return None;
        }
        all.extend_from_slice(&some[..got]);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Time in which a call that is bounded by `SHORT` has ended, also on a busy machine.
    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(300);

    fn listener() -> (tempfile::TempDir, std::path::PathBuf, UnixListener) {
        let dir = tempfile::tempdir().expect("a scratch folder");
        let path = dir.path().join("status");
        let listener = UnixListener::bind(&path).expect("a socket");
        (dir, path, listener)
    }

    /// Asks on a thread of its own. Panics if there is an answer, or none after `LONG`.
    fn gets_nothing(path: &Path, patience: Duration) {
        let (path, (told, hears)) = (path.to_owned(), channel());
        thread::spawn(move || told.send(status_of(&path, patience).is_none()));
        assert_eq!(hears.recv_timeout(LONG), Ok(true));
    }

    #[test]
    fn ask_runs_that_do_not_answer_delay_no_other() {
        let wait = Arc::new(Mutex::new(()));
        let held = wait.lock().expect("it is free");
        let waits = wait.clone();
        let sockets = (0..4 * ASKERS).map(|at| PathBuf::from(at.to_string()));
        let heard = answers(sockets.collect(), move |socket: PathBuf| {
            let number: usize = socket.to_str()?.parse().ok()?;
            if number.is_multiple_of(5) && number / 5 < ASKERS - 1 {
                drop(waits.lock()); // it does not answer
            }
            (number % 2 == 1).then_some(number)
        });
        let quick = |number: &usize| number % 2 == 1 && !number.is_multiple_of(5);
        let mut expected: Vec<_> = (0..4 * ASKERS).filter(quick).collect();
        while !expected.is_empty() {
            let number = heard.recv_timeout(LONG).expect("it answers");
            expected.retain(|other| *other != number);
        }
        drop(held);
        let late = heard.into_iter().all(|number| number % 10 == 5);
        assert!(late, "each answers once");
    }

    #[test]
    fn ask_endless_answer_is_dropped_at_the_bound() {
        let (_dir, path, listener) = listener();
        let writer = thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a call");
            let (part, mut written) = (vec![b'['; 1 << 20], 0);
            while written < 4 * ANSWER_BYTES_MAX && peer.write_all(&part).is_ok() {
                written += part.len() as u64;
            }
            written
        });
        // Patience is no reason to stop here.
        gets_nothing(&path, LONG);
        let written = writer.join().expect("it ends");
        // What is written may wait in the socket's buffer.
        assert!(written >= ANSWER_BYTES_MAX - (1 << 20), "{written}");
        assert!(written <= ANSWER_BYTES_MAX + (2 << 20), "{written}");
    }

    #[test]
    fn ask_answer_byte_by_byte_ends_with_the_patience() {
        let (_dir, path, listener) = listener();
        let writer = thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a call");
            let began = Instant::now();
            while began.elapsed() < 3 * LONG && peer.write_all(b" ").is_ok() {
                thread::sleep(SHORT / 10);
            }
        });
        gets_nothing(&path, SHORT);
        writer.join().expect("it ends");
    }

    #[test]
    fn ask_manager_that_takes_no_calls_is_left_out() {
        let (_dir, path, listener) = listener();
        rustix::net::listen(&listener, 0).expect("a queue of one");
        // The first call waits in the queue; the second finds it full.
        gets_nothing(&path, SHORT);
        gets_nothing(&path, SHORT);
    }
}
