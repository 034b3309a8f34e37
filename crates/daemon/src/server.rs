//! The daemon's socket, and the loop around [`Members`]: one thread, no wait that a client can
//! prolong.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, Timespec, flock, openat};
use sd_notify::NotifyState;
use undercroft_base::Bytes;
use undercroft_keeper::place::{PlaceError, directory, remove_leftovers};
use undercroft_keeper::status;
use undercroft_proto::grant::{Lines, SOCKET, ToDaemon, ToKeeper, line};
use undercroft_sys::fdpass::{self, FDS_MAX};
use undercroft_sys::{inherit, process, sealed};
use undercroft_terminal::LogFormat;

use crate::config::Config;
use crate::devices::Devices;
use crate::journal::{Event, Journal, RunName};
use crate::members::{Members, Said};

/// The file whose lock says that a daemon runs.
const LOCK: &str = "daemon.lock";

/// Connections at once.
const PEERS_MAX: usize = 1024;

/// A connection on which nothing was said for this long is ended, unless it is a client's.
const SILENCE: Duration = Duration::from_secs(5);

/// Bytes that wait to be sent to one peer. A peer that reads nothing is ended.
const OUT_BYTES_MAX: usize = 1 << 20;

/// After a client has gone, what its keeper left is looked for at every tick for this long: until
/// its last process has ended, its directory is not given up.
const LEAVING: Duration = Duration::from_secs(5);

/// Time between two ticks: while memory moves, while bounds are kept, and while neither is.
const TICKS: [Duration; 3] = [
    Duration::from_millis(20),
    Duration::from_millis(100),
    Duration::from_millis(500),
];

/// Why the daemon does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// There is no directory for its socket.
    #[error(transparent)]
    Position(#[from] PlaceError),
    /// Another daemon has it.
    #[error("process {pid} is the daemon of {} already", .directory.display())]
    Taken {
        /// The directory.
        directory: PathBuf,
        /// Its process, or a question mark.
        pid: String,
    },
    /// The socket that this process was started with is not the one that runs look for.
    #[error(
        "cannot serve on the socket that was given: {why}\n  fix: have systemd listen on \
         ListenStream={}, or start the daemon without a socket",
        .expected.display()
    )]
    Given {
        /// Where runs look for the daemon.
        expected: PathBuf,
        /// The error of the socket.
        why: String,
    },
    /// Another process listens for a daemon, as systemd does.
    #[error(
        "another process listens at {}, though no daemon runs\n  fix: `systemctl start \
         undercroft`; or `systemctl stop undercroft.socket`, and then start this daemon",
        .0.display()
    )]
    Held(PathBuf),
    /// A system call failed.
    #[error("cannot serve: {0}")]
    System(#[from] io::Error),
}

/// Serves until `ended` has something to read and `next` has no configuration to go on with.
///
/// Another configuration is as another daemon: clients connect again and claim what they have.
///
/// * `log`: how the log is written.
/// * `next`: takes what was written to `ended`, and gives the configuration from then on.
/// * `ready`: called with the socket's path and the memory once clients can connect.
pub fn serve(
    config: Config,
    log: LogFormat,
    ended: &impl AsFd,
    mut next: impl FnMut() -> Option<Config>,
    ready: impl Fn(&Path, Bytes),
) -> Result<(), ServeError> {
    let (place, base) = directory()?;
    let _lock = lock(&place, &base)?;
    let path = place.join(SOCKET);
    let given = given(&path)?;
    let is_ours = given.is_none();
    let listener = match given {
        Some(listener) => listener,
        None => own(&path)?,
    };
    listener.set_nonblocking(true)?;
    // The usual soft limit is less than the connections take, and one that cannot be accepted would
    // wake the loop again and again.
    process::raise_open_files_limit();
    process::share_one_heap();
    let mut outcome = Ok(());
    // The runs of this user that a daemon gave memory to: they come back.
    let runs = status::snapshots().into_iter();
    let mut expected = runs
        .filter(|run| run.class.is_some())
        .map(|run| run.pid)
        .collect();
    let mut config = Some(config);
    let mut devices = Devices::default();
    while let Some(now) = config.take() {
        ready(&path, now.memory);
        devices.keep_only(&now.tiers);
        let mut server = Server::new(now, expected, devices, log);
        let _ = sd_notify::notify(&[NotifyState::Ready]);
        outcome = server.run(&listener, ended, || remove_leftovers(&place, &base));
        expected = server.members.pids();
        devices = server.devices;
        config = next();
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    if is_ours {
        let _ = std::fs::remove_file(&path);
    }
    Ok(outcome?)
}

/// A socket at `path`. Errors: another process listens there, though no daemon runs.
fn own(path: &Path) -> Result<UnixListener, ServeError> {
    if UnixStream::connect(path).is_ok() {
        return Err(ServeError::Held(path.to_owned()));
    }
    // It was left behind: this process has the lock.
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// The socket that systemd listens on for the daemon, if it started it so. It outlives the daemon:
/// who calls while there is none waits for the next.
///
/// Errors: it is not one that listens at `path`.
fn given(path: &Path) -> Result<Option<UnixListener>, ServeError> {
    let wrong = |why: String| ServeError::Given {
        expected: path.to_owned(),
        why,
    };
    let mut numbers = sd_notify::listen_fds().map_err(|error| wrong(error.to_string()))?;
    let Some(number) = numbers.next() else {
        return Ok(None);
    };
    if numbers.next().is_some() {
        return Err(wrong("there are several".to_owned()));
    }
    let socket = inherit::copy_of(number).map_err(|error| wrong(error.to_string()))?;
    if !rustix::net::sockopt::socket_acceptconn(&socket).unwrap_or(false) {
        return Err(wrong("it is no socket that listens".to_owned()));
    }
    let listener = UnixListener::from(socket);
    let at = listener.local_addr().ok();
    let at = at.as_ref().and_then(|at| at.as_pathname());
    if at != Some(path) {
        let at = at.map_or("no path".to_owned(), |at| at.display().to_string());
        return Err(wrong(format!("it listens at {at}")));
    }
    // This call is answered later, and ends.
    if let Err(error) = UnixStream::connect(path) {
        let why = format!("nothing reaches it ({error}): `systemctl restart undercroft.socket`");
        return Err(wrong(why));
    }
    Ok(Some(listener))
}

/// Locks the directory for one daemon.
fn lock(place: &Path, base: &OwnedFd) -> Result<OwnedFd, ServeError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let lock = openat(base, LOCK, flags, Mode::from_raw_mode(0o600)).map_err(io::Error::from)?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        let pid = std::fs::read_to_string(place.join(LOCK)).unwrap_or_default();
        let is_number = !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit());
        return Err(ServeError::Taken {
            directory: place.to_owned(),
            pid: if is_number { pid } else { "?".to_owned() },
        });
    }
    rustix::fs::ftruncate(&lock, 0).map_err(io::Error::from)?;
    let pid = std::process::id().to_string();
    rustix::io::write(&lock, pid.as_bytes()).map_err(io::Error::from)?;
    Ok(lock)
}

/// A connection.
struct Peer {
    stream: UnixStream,
    lines: Lines,
    /// Descriptors that came with what it said.
    brought: Vec<OwnedFd>,
    out: Vec<u8>,
    /// Descriptors that go with the first byte of `out`.
    sends: Vec<OwnedFd>,
    pid: u32,
    since: Instant,
    /// Whether it has said who it is.
    is_client: bool,
    /// The class and the command that it has said, for the log.
    says: (String, String),
    /// Whether it is ended once everything is sent.
    is_last: bool,
}

struct Server {
    members: Members,
    devices: Devices,
    peers: BTreeMap<u64, Peer>,
    next: u64,
    begun: Instant,
    journal: Journal,
    user: u32,
    /// A client has gone at this time.
    gone: Option<Instant>,
}

impl Server {
    /// * `expected`: keepers that have memory already.
    fn new(config: Config, expected: BTreeSet<u32>, devices: Devices, log: LogFormat) -> Server {
        let journal = Journal::new(log);
        journal.write(&Event::Serves {
            memory_bytes: config.memory.0,
        });
        Server {
            journal,
            members: Members::new(config, expected),
            devices,
            peers: BTreeMap::new(),
            next: 0,
            begun: Instant::now(),
            user: rustix::process::geteuid().as_raw(),
            // Clients may have gone while there was no daemon.
            gone: Some(Instant::now()),
        }
    }

    /// * `tidy`: removes what dead keepers left.
    fn run(
        &mut self,
        listener: &UnixListener,
        ended: &impl AsFd,
        tidy: impl Fn(),
    ) -> io::Result<()> {
        let watchdog = sd_notify::watchdog_enabled().map(|time| time / 3);
        loop {
            let is_awake = self.members.keeps_bounds() || self.gone.is_some();
            let tick = match (self.members.is_busy(), is_awake) {
                (true, _) => TICKS[0],
                (false, true) => TICKS[1],
                (false, false) => TICKS[2],
            };
            let tick = watchdog.map_or(tick, |time| tick.min(time));
            let (stop, calls, ready) = self.wait(listener, ended, tick)?;
            if stop {
                return Ok(());
            }
            for id in ready {
                self.hear(id);
            }
            if calls {
                self.answer_calls(listener);
            }
            let now = self.begun.elapsed();
            self.members.tick(now);
            self.journal.follow(self.members.all(), now);
            self.speak();
            self.end_silent();
            if let Some(gone) = self.gone {
                tidy();
                self.gone = Some(gone).filter(|gone| gone.elapsed() < LEAVING);
            }
            if watchdog.is_some() {
                let _ = sd_notify::notify(&[NotifyState::Watchdog]);
            }
        }
    }

    /// Waits for something to do. Returns whether to stop, whether someone calls, and the peers
    /// that have said something or can be told more.
    fn wait(
        &self,
        listener: &UnixListener,
        ended: &impl AsFd,
        tick: Duration,
    ) -> io::Result<(bool, bool, Vec<u64>)> {
        let mut fds = vec![
            PollFd::new(ended, PollFlags::IN),
            PollFd::new(listener, PollFlags::IN),
        ];
        for peer in self.peers.values() {
            let mut flags = PollFlags::IN;
            flags.set(PollFlags::OUT, !peer.out.is_empty());
            fds.push(PollFd::new(&peer.stream, flags));
        }
        let tick = Timespec {
            tv_sec: tick.as_secs() as i64,
            tv_nsec: i64::from(tick.subsec_nanos()),
        };
        match poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let ready: Vec<bool> = ready.collect();
        let peers = self.peers.keys().zip(&ready[2..]);
        let peers = peers.filter(|(_, ready)| **ready).map(|(id, _)| *id);
        Ok((ready[0], ready[1], peers.collect()))
    }

    fn answer_calls(&mut self, listener: &UnixListener) {
        while let Ok((stream, _)) = listener.accept() {
            let Ok(peer) = fdpass::peer(&stream) else {
                continue; // it has ended
            };
            let is_ours = peer.uid == self.user || peer.uid == 0;
            if !is_ours || self.peers.len() >= PEERS_MAX || stream.set_nonblocking(true).is_err() {
                continue; // the connection ends here
            }
            let peer = Peer {
                stream,
                lines: Lines::default(),
                brought: Vec::new(),
                out: Vec::new(),
                sends: Vec::new(),
                // 0: it is outside of this pid namespace.
                pid: (peer.pidfd.numbers().ok())
                    .and_then(|numbers| numbers.first().copied())
                    .unwrap_or(0),
                since: Instant::now(),
                is_client: false,
                says: (String::new(), String::new()),
                is_last: false,
            };
            self.peers.insert(self.next, peer);
            self.next += 1;
        }
    }

    /// Reads what a peer has said, and does it.
    fn hear(&mut self, id: u64) {
        let mut bytes = [0; 1 << 14];
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        match fdpass::receive(peer.stream.as_fd(), &mut bytes) {
            Ok((0, _)) => return self.drop_peer(id, ""),
            Ok((got, brought)) => {
                peer.brought.extend(brought);
                peer.brought.truncate(FDS_MAX);
                if peer.lines.take(&bytes[..got]).is_err() {
                    return self.drop_peer(id, "its message is too long");
                }
            }
            Err(error) if is_later(&error) => {}
            Err(_) => return self.drop_peer(id, ""),
        }
        while let Some(peer) = self.peers.get_mut(&id) {
            let Some(line) = peer.lines.next_line() else {
                return;
            };
            match serde_json::from_slice(&line) {
                Ok(message) => self.take(id, message),
                Err(_) => return self.drop_peer(id, "it sends what is no message"),
            }
        }
    }

    fn take(&mut self, id: u64, message: ToDaemon) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        match message {
            ToDaemon::Hello(hello) => {
                peer.is_client = true;
                peer.says = (hello.class.clone(), hello.command.clone());
                let pid = peer.pid;
                let brought = std::mem::take(&mut peer.brought);
                if let Some(claim) = &hello.claim {
                    let devices = claim.devices.iter().zip(brought);
                    let tiers = self.members.tiers();
                    devices.for_each(|(spec, memory)| self.devices.claim(tiers, spec, memory));
                }
                self.members.hello(id, pid, hello);
            }
            ToDaemon::Figures { client, storage } => self.members.figures(id, client, &storage),
            ToDaemon::Fills(storage) => self.members.fills(id, &storage),
            ToDaemon::Quotas(storage) => self.members.kept_quotas(id, &storage),
            ToDaemon::Kept { memory, refused } => {
                if let Some(why) = &refused {
                    let pid = peer.pid;
                    self.journal.write(&Event::LimitRefused { pid, why });
                }
                self.members.kept(id, memory, refused.as_deref());
            }
            ToDaemon::Status => {
                let status = Box::new(self.members.status(std::process::id()));
                peer.out.extend(line(&ToKeeper::Status(status)));
                peer.is_last = !peer.is_client;
            }
        }
    }

    /// Sends what is to be said.
    fn speak(&mut self) {
        for (id, said) in self.members.said() {
            let Some(peer) = self.peers.get_mut(&id) else {
                continue;
            };
            match said {
                Said::Message(ToKeeper::Granted(mut grant)) => {
                    let tiers = self.members.tiers();
                    (grant.devices, peer.sends) = self.devices.lend(tiers, &grant.devices);
                    if let (Some(_), Some(file)) = (&grant.policy, self.members.policy_of(id)) {
                        match sealed::of("uc-policy-file", &file.module) {
                            Ok(memfd) => peer.sends.push(memfd),
                            Err(_) => {
                                self.drop_peer(id, "no descriptor for its policy file");
                                continue;
                            }
                        }
                    }
                    peer.out.extend(line(&ToKeeper::Granted(grant)));
                }
                Said::Message(message) => peer.out.extend(line(&message)),
                Said::Last(message) => {
                    if let ToKeeper::Refused(refusal) = &message {
                        let run = RunName::new(peer.pid, &peer.says.0, &peer.says.1);
                        let why = &refusal.why;
                        self.journal.write(&Event::Refused { run, why });
                    }
                    peer.out.extend(line(&message));
                    peer.is_last = true;
                }
                Said::End(why) => self.drop_peer(id, why),
            }
        }
        let mut over = Vec::new();
        for (id, peer) in &mut self.peers {
            if peer.out.is_empty() {
                continue;
            }
            let sends: Vec<_> = peer.sends.iter().map(AsFd::as_fd).collect();
            match fdpass::send_some(peer.stream.as_fd(), &peer.out, &sends) {
                Ok(sent) => {
                    peer.sends.clear();
                    drop(peer.out.drain(..sent));
                }
                Err(error) if is_later(&error) => {}
                Err(_) => over.push(*id),
            }
            if peer.out.len() > OUT_BYTES_MAX || (peer.is_last && peer.out.is_empty()) {
                over.push(*id);
            }
        }
        over.into_iter().for_each(|id| self.drop_peer(id, ""));
    }

    fn end_silent(&mut self) {
        let is_silent = |peer: &Peer| !peer.is_client && peer.since.elapsed() > SILENCE;
        let silent = self.peers.iter().filter(|(_, peer)| is_silent(peer));
        let silent: Vec<u64> = silent.map(|(id, _)| *id).collect();
        silent.into_iter().for_each(|id| self.drop_peer(id, ""));
    }

    /// Ends a connection.
    ///
    /// * `why`: what the peer did wrong; empty = nothing.
    fn drop_peer(&mut self, id: u64, why: &str) {
        let peer = self.peers.remove(&id);
        if peer.as_ref().is_some_and(|peer| peer.is_client) {
            self.gone = Some(Instant::now());
        }
        if let Some(peer) = peer
            && !why.is_empty()
        {
            let pid = peer.pid;
            self.journal.write(&Event::Ended { pid, why });
        }
        self.members.gone(id);
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
