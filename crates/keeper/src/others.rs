//! The runs of other users, for root. What is in their directories is theirs, and is taken for
//! hostile:
//!
//! - No link is followed, and no other file system than the directory's own is entered, so a user
//!   cannot lead root to another socket than one of that user.
//! - The kernel says who serves the socket: a process of that user, whose number is the keeper's.
//!   Numbers of processes that do not belong to it are dropped.
//! - An answer is bounded in size and time, and so are the runs of a user and the users. Each user
//!   is asked on threads of its own: one who does not answer delays no other.
//! - A text that a terminal would obey, and numbers that a sum could not hold, make it no answer.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat2};
use serde_json::Value;
use undercroft_proto::name::RunName;
use undercroft_proto::report::Snapshot;
use undercroft_sys::fdpass;
use undercroft_terminal::is_obeyed;

use crate::passing::is_inside;
use crate::place::{STATUS_SOCKET, is_run, open_of};
use crate::status::{self, answer, call};
use crate::wanted::parent;

/// Longest time for all runs of one user.
const PATIENCE: Duration = Duration::from_secs(2);

/// Users that are asked, those with the smallest numbers: a user may have thousands of others, of a
/// user namespace, which have large ones.
const USERS_MAX: usize = 64;

/// Runs of a user, and names in its directory, that are looked at.
const RUNS_MAX: usize = 64;
const NAMES_MAX: usize = 4096;

/// Longest answer. It is some 10 KiB.
const ANSWER_BYTES_MAX: u64 = 256 << 10;

/// Largest number in an answer: a hundred of them can be added up.
const NUMBER_MAX: f64 = (1u64 << 53) as f64;

/// Users that are being asked. One whose file system does not answer is not asked again.
static ASKED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// The snapshots of all runs that answer: of this user, and of others, which only root can see.
pub fn snapshots_of_all() -> Vec<Snapshot> {
    let mut found = status::snapshots();
    found.extend(snapshots());
    status::in_order(found)
}

/// The snapshots of the runs of other users, with the users' numbers. Only root can see them; of
/// `UNDERCROFT_DIR`s of theirs, the one is known that root has set itself. Takes some [`PATIENCE`]
/// at most.
fn snapshots() -> Vec<Snapshot> {
    let (tell, hear) = channel();
    let mut waits = 0;
    for (user, bases) in users() {
        if !asked().insert(user) {
            continue;
        }
        let tell = tell.clone();
        let started = std::thread::Builder::new().spawn(move || {
            let found = of_user(user, &bases);
            asked().remove(&user);
            let _ = tell.send(found);
        });
        match started {
            Ok(_) => waits += 1,
            Err(_) => drop(asked().remove(&user)),
        }
    }
    let deadline = Instant::now() + PATIENCE + PATIENCE / 4;
    let mut all = Vec::new();
    for _ in 0..waits {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(found) = hear.recv_timeout(left) else {
            break;
        };
        all.extend(found);
    }
    all
}

fn asked() -> std::sync::MutexGuard<'static, BTreeSet<u32>> {
    ASKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Other users, and the directories in which their runs may be.
fn users() -> BTreeMap<u32, Vec<PathBuf>> {
    let own = rustix::process::geteuid().as_raw();
    let mut found: BTreeMap<u32, Vec<PathBuf>> = BTreeMap::new();
    let mut add = |name: &OsStr, prefix: &str, path: PathBuf| {
        let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
        if let Some(user) = number.and_then(|number| number.parse().ok())
            && user != own
        {
            let bases = found.entry(user).or_default();
            if !bases.contains(&path) {
                bases.push(path);
            }
        }
    };
    let names = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten();
    for entry in names(Path::new("/run/user")) {
        add(&entry.file_name(), "", entry.path().join("undercroft"));
    }
    for parent in [std::env::temp_dir(), "/tmp".into(), "/var/tmp".into()] {
        for entry in names(&parent) {
            add(&entry.file_name(), "undercroft-", entry.path());
        }
    }
    let chosen = std::env::var_os("UNDERCROFT_DIR").map(std::fs::canonicalize);
    if let Some(Ok(chosen)) = chosen {
        for entry in names(&chosen) {
            add(&entry.file_name(), "undercroft-", entry.path());
        }
        if let Ok(of) = std::fs::metadata(&chosen) {
            add(OsStr::new(&of.uid().to_string()), "", chosen);
        }
    }
    found.into_iter().take(USERS_MAX).collect()
}

/// The runs of one user.
fn of_user(user: u32, bases: &[PathBuf]) -> Vec<Snapshot> {
    let deadline = Instant::now() + PATIENCE;
    let mut sockets = Vec::new();
    for base in bases.iter().filter_map(|base| open_of(base, user)) {
        let Ok(names) = Dir::read_from(&base) else {
            continue;
        };
        let names = names.flatten().take(NAMES_MAX);
        let names = names.map(|entry| OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
        let runs = names.filter(|name| is_run(name)).take(RUNS_MAX);
        sockets.extend(runs.filter_map(|name| socket_of(base.as_fd(), &name, user)));
        sockets.truncate(RUNS_MAX);
    }
    let found = status::answers(sockets, move |socket: OwnedFd| {
        let left = deadline.checked_duration_since(Instant::now())?;
        of_socket(&socket, user, left)
    });
    found.into_iter().collect()
}

/// The socket of a run, without a way to read it: [`call`] connects to it.
fn socket_of(base: BorrowedFd<'_>, run: &OsStr, user: u32) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let path = Path::new(run).join(STATUS_SOCKET);
    let socket = openat2(base, &path, flags, Mode::empty(), beneath).ok()?;
    let of = fstat(&socket).ok()?;
    let is_socket = FileType::from_raw_mode(of.st_mode) == FileType::Socket;
    (is_socket && of.st_uid == user).then_some(socket)
}

/// The run that serves a socket.
fn of_socket(socket: &OwnedFd, user: u32, patience: Duration) -> Option<Snapshot> {
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    let stream = call(Path::new(&path), patience)?;
    let peer = fdpass::peer(&stream).ok().filter(|peer| peer.uid == user)?;
    let keeper = *peer.pidfd.numbers().ok()?.first()?;
    stream.shutdown(std::net::Shutdown::Write).ok()?;
    let run = believed(&answer(stream, patience, ANSWER_BYTES_MAX)?, keeper, user)?;
    (!peer.pidfd.has_exited()).then_some(run)
}

/// An answer, as far as it is believed.
///
/// * `keeper`: the process that serves the socket.
fn believed(bytes: &[u8], keeper: u32, user: u32) -> Option<Snapshot> {
    let value: Value = serde_json::from_slice(bytes).ok()?;
    if !is_plain(&value) {
        return None;
    }
    // As text again: a snapshot is read from text alone, because each way is long to compile.
    let text = serde_json::to_vec(&value).ok()?;
    let mut run: Snapshot = serde_json::from_slice(&text).ok()?;
    if run.pid != keeper {
        return None;
    }
    run.uid = Some(user);
    run.run_pid = run.run_pid.filter(|front| parent(keeper) == Some(*front));
    run.name = run.name.filter(|name| name.parse::<RunName>().is_ok());
    for pid in [&mut run.client_pid, &mut run.manager_pid] {
        if *pid != 0 && !is_inside(*pid, keeper) {
            *pid = 0;
        }
    }
    Some(run)
}

/// Whether a value may be shown and reckoned with. The command is quoted wherever it is shown, so
/// it may be any text.
fn is_plain(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) => true,
        Value::Number(number) => (number.as_f64()).is_some_and(|of| of.abs() <= NUMBER_MAX),
        Value::String(text) => !text.chars().any(is_obeyed),
        Value::Array(items) => items.iter().all(is_plain),
        Value::Object(fields) => {
            let mut fields = fields.iter();
            fields.all(|(name, value)| name == "command" || is_plain(value))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::wanted::tests::run;

    fn own() -> (u32, u32) {
        (std::process::id(), rustix::process::geteuid().as_raw())
    }

    fn bytes(run: &Snapshot) -> Vec<u8> {
        serde_json::to_vec(run).expect("plain data")
    }

    #[test]
    fn an_answer_names_its_own_keeper_alone_and_strange_processes_are_dropped() {
        let (keeper, user) = own();
        let mut said = run(keeper, Some("web"), "\u{1b}[31mred");
        (said.client_pid, said.run_pid, said.manager_pid) = (1, Some(1), 1);
        let found = believed(&bytes(&said), keeper, user).expect("believed");
        assert_eq!((found.client_pid, found.manager_pid), (0, 0));
        assert_eq!((found.run_pid, found.uid), (None, Some(user)));
        assert_eq!(found.name.as_deref(), Some("web"));
        said.run_pid = parent(keeper);
        let found = believed(&bytes(&said), keeper, user).expect("believed");
        assert_eq!(found.run_pid, parent(keeper));
        assert_eq!(believed(&bytes(&said), keeper + 1, user), None);
        said.name = Some("7".to_owned());
        let found = believed(&bytes(&said), keeper, user).expect("believed");
        assert_eq!(found.name, None);
    }

    #[test]
    fn texts_that_a_terminal_obeys_and_numbers_that_no_sum_holds_are_no_answer() {
        let (keeper, user) = own();
        let changes: [fn(&mut Snapshot); 6] = [
            |run| run.class = Some("\u{1b}[2J".to_owned()),
            |run| run.policies.reclaim = "a\nb".to_owned(),
            |run| run.tiers[0].figures.name = "\u{202e}".to_owned(),
            |run| run.tiers[0].logical_bytes = u64::MAX,
            |run| run.uptime_seconds = 1e300,
            |run| run.faults.total = 1 << 54,
        ];
        for (at, change) in changes.iter().enumerate() {
            let mut said = run(keeper, None, "sleep");
            assert!(believed(&bytes(&said), keeper, user).is_some());
            change(&mut said);
            assert_eq!(believed(&bytes(&said), keeper, user), None, "{at}");
        }
    }

    /// Directories of a user as they should be, and such as lead elsewhere.
    #[test]
    fn no_link_and_no_socket_of_another_is_followed() {
        let (keeper, user) = own();
        let folder = tempfile::tempdir().expect("a folder");
        let base = folder.path().canonicalize().expect("a path").join("base");
        let make = |path: &Path| {
            let mut builder = std::fs::DirBuilder::new();
            builder.mode(0o755).create(path).expect("a folder");
        };
        make(&base);
        make(&base.join("run-1"));
        let real = base.join("run-1").join(STATUS_SOCKET);
        let listener = UnixListener::bind(&real).expect("a socket");
        symlink("run-1", base.join("run-2")).expect("a link");
        make(&base.join("run-3"));
        symlink(&real, base.join("run-3").join(STATUS_SOCKET)).expect("a link");
        make(&base.join("run-4"));
        std::fs::write(base.join("run-4").join(STATUS_SOCKET), "").expect("a file");
        let open = open_of(&base, user).expect("ours");
        let found = |name: &str, user| socket_of(open.as_fd(), OsStr::new(name), user);
        for name in ["run-2", "run-3", "run-4", "run-5"] {
            assert!(found(name, user).is_none(), "{name}");
        }
        assert!(found("run-1", user + 1).is_none(), "another user's");
        let socket = found("run-1", user).expect("a socket");
        let said = bytes(&run(keeper, None, "sleep"));
        let serves = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut peer, _) = listener.accept().expect("a call");
                let _ = std::io::Write::write_all(&mut peer, &said);
            }
        });
        assert!(of_socket(&socket, user + 1, PATIENCE).is_none());
        assert!(of_socket(&socket, user, PATIENCE).is_some());
        serves.join().expect("it ends");
        assert!(open_of(&base, user + 1).is_none());
    }
}
