//! The estate of all managers of a run, and how one is started: the first, or a successor.

use std::fs::File;
use std::io::{self, BufReader, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Resource, getrlimit};
use undercroft_proto::kept;
use undercroft_proto::legacy;
use undercroft_proto::messages::{Launch, MANAGER_TITLE, Notice};
use undercroft_proto::options::{ClientOptions, LockMemory, RunOptions};
use undercroft_proto::report::ShownCommand;
use undercroft_proto::tiers;
use undercroft_sys::inherit;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::PidFd;
use undercroft_tier::open::OpenTier;

use super::place::{RunDir, SHIM_LINK, SHIM_SOCKET, STATUS_SOCKET, UPGRADE_SOCKET};
use super::said::{Log, notice_by};
use super::{
    Killed, LEDGER_CHUNKS, LEDGER_CHUNKS_LIMITED, Manager, READY, RunError, STARTING, TAKEOVER,
    TAKEOVER_PER_GIB, TAKES, TAKES_PER_GIB, end_child, stays, upgrade,
};

/// The estate that every manager of the run is given. It survives them.
pub(super) struct Estate {
    launch: Launch,
    listener: OwnedFd,
    status: OwnedFd,
    ledger: SharedMemory,
    /// The memory of a virtual machine.
    guest: Option<OwnedFd>,
    /// The locks of its pages.
    locks: Option<OwnedFd>,
    policy: SharedMemory,
    pub(super) legacy: SharedMemory,
    tiers: Vec<OpenTier>,
    /// The binary of the next manager. It is held open: whatever is put in its place, the next
    /// manager is this one.
    pub(super) binary: OwnedFd,
    /// Where users ask for another binary.
    pub(super) upgrades: OwnedFd,
}

/// How long a takeover takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pause {
    /// On a machine that has time for it.
    pub expected: Duration,
    /// A successor that takes longer is given up.
    pub longest: Duration,
}

impl Pause {
    /// * `ledger`: bytes of the ledger that are in use; one word for each page of 4 KiB.
    fn of(ledger: u64) -> Pause {
        let gib = ledger as f64 / f64::from(8 << 18);
        Pause {
            expected: TAKES + TAKES_PER_GIB.mul_f64(gib),
            longest: TAKEOVER + TAKEOVER_PER_GIB.mul_f64(gib),
        }
    }
}

impl Estate {
    /// How long another manager may take to take over now.
    pub(super) fn pause(&self) -> Pause {
        Pause::of(self.ledger.allocated().unwrap_or(0))
    }

    pub(super) fn make(
        options: &RunOptions,
        dir: &RunDir,
        tiers: Vec<OpenTier>,
        front: Option<u32>,
    ) -> Result<Estate, RunError> {
        let listener = dir.listen(SHIM_SOCKET, SocketType::SEQPACKET, 0o777)?;
        let status = dir.listen(STATUS_SOCKET, SocketType::STREAM, 0o600)?;
        let upgrades = dir.listen(UPGRADE_SOCKET, SocketType::SEQPACKET, 0o600)?;
        let ledger_chunks = ledger_chunks();
        let ledger =
            SharedMemory::create("uc-ledger", undercroft_engine::bytes_for(ledger_chunks))?;
        let legacy = legacy::fresh(is_limited())?;
        let guest = options.guest.map(inherit::copy_of).transpose()?;
        let locks = (options.locks).map(|of| inherit::copy_of(of.memfd));
        let locks = locks.transpose()?;
        let lock_memory = |memfd: &OwnedFd| {
            options.locks.map(|of| LockMemory {
                memfd: memfd.as_raw_fd(),
                ..of
            })
        };
        let policy = kept::fresh()?;
        let launch = Launch {
            options: options.client.clone(),
            command: ShownCommand::of(&options.command),
            keeper: std::process::id(),
            front,
            shim: (dir.path(SHIM_LINK).canonicalize()?, dir.path(SHIM_SOCKET)),
            listener: listener.as_raw_fd(),
            link: -1,
            status: status.as_raw_fd(),
            ledger: ledger.as_fd().as_raw_fd(),
            ledger_chunks,
            first_space: test_setting("UNDERCROFT_TEST_FIRST_SPACE").map(|first| first as u32),
            swaps: std::env::var_os("UNDERCROFT_TEST_SWAPS").map(PathBuf::from),
            tiers: tiers.iter().map(tiers::launch).collect(),
            legacy: legacy.as_fd().as_raw_fd(),
            guest: guest.as_ref().map(AsRawFd::as_raw_fd),
            locks: locks.as_ref().and_then(lock_memory),
            policy: Some(policy.as_fd().as_raw_fd()),
            handover: -1,
            predecessor: None,
        };
        Ok(Estate {
            launch,
            listener,
            status,
            ledger,
            guest,
            locks,
            policy,
            legacy,
            tiers,
            binary: upgrade::own_binary()?,
            upgrades,
        })
    }

    /// `run` has ended, so its process id is no name of the run any more.
    pub(super) fn forget_front(&mut self) {
        self.launch.front = None;
    }

    /// The options of the run.
    pub(super) fn options(&self) -> &ClientOptions {
        &self.launch.options
    }

    /// Starts the first manager and waits until it is ready.
    pub(super) fn start_manager(&self) -> Result<Manager, RunError> {
        let begun = Instant::now();
        match self.spawn(None, 0)?.until_ready(begun + STARTING) {
            Ok(manager) => Ok(manager),
            Err(mut failed) => {
                let was_late = begun.elapsed() >= STARTING;
                let killed = failed.starting.end();
                let mut said = failed.starting.log.lines();
                let pid = failed.starting.child.id();
                said.extend(was_late.then(|| format!("it was not ready within {STARTING:?}")));
                said.extend((killed == Killed::Stays).then(|| stays(pid)));
                Err(match failed.why {
                    Some(why) => RunError::CannotServe(why),
                    None => RunError::NoManager(said.join("; ")),
                })
            }
        }
    }

    /// Starts a manager.
    /// * `predecessor`: by which it asks the holder of a dead one.
    pub(super) fn spawn(
        &self,
        predecessor: Option<&OwnedFd>,
        generation: u64,
    ) -> io::Result<Starting> {
        let (link, theirs) = UnixStream::pair()?;
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let (handover, holders) = pair;
        let launch = Launch {
            link: theirs.as_raw_fd(),
            handover: holders.as_raw_fd(),
            predecessor: predecessor.map(AsRawFd::as_raw_fd),
            ..self.launch.clone()
        };
        let mut inherited: Vec<BorrowedFd<'_>> = vec![
            self.listener.as_fd(),
            self.status.as_fd(),
            self.ledger.as_fd(),
            self.legacy.as_fd(),
            self.policy.as_fd(),
            theirs.as_fd(),
            holders.as_fd(),
        ];
        inherited.extend(predecessor.map(AsFd::as_fd));
        inherited.extend(self.guest.as_ref().map(AsFd::as_fd));
        inherited.extend(self.locks.as_ref().map(AsFd::as_fd));
        inherited.extend(self.tiers.iter().flat_map(tiers::descriptors));
        let (log, said) = Log::new()?;
        let child = spawn_manager(&self.binary, &launch, &inherited, said)?;
        let pidfd = PidFd::open(child.id())?;
        // A manager that reads nothing shall not hold us.
        link.set_write_timeout(Some(READY))?;
        Ok(Starting {
            child,
            pidfd,
            handover,
            generation,
            lines: BufReader::new(link.try_clone()?),
            link,
            log,
            holder: None,
        })
    }
}

/// Whether the user's limits bound the address space of a process or the length of a file.
fn is_limited() -> bool {
    let limits = [Resource::As, Resource::Fsize].map(getrlimit);
    limits.iter().any(|limit| limit.current.is_some())
}

/// Room of the ledger.
fn ledger_chunks() -> usize {
    let room = if is_limited() {
        LEDGER_CHUNKS_LIMITED
    } else {
        LEDGER_CHUNKS
    };
    let tested = test_setting("UNDERCROFT_TEST_LEDGER_CHUNKS");
    tested.map_or(room, |chunks| (chunks as usize).clamp(1, room))
}

/// A number that a test gives this run, to come to a bound sooner.
fn test_setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A manager that did not become ready, and why, if it has said so.
pub(super) struct Failed {
    pub(super) starting: Starting,
    pub(super) why: Option<String>,
}

/// A manager that is not ready yet.
pub(super) struct Starting {
    pub(super) child: Child,
    pidfd: PidFd,
    pub(super) handover: OwnedFd,
    generation: u64,
    link: UnixStream,
    lines: BufReader<UnixStream>,
    pub(super) log: Log,
    pub(super) holder: Option<(u32, PidFd)>,
}

impl Starting {
    pub(super) fn end(&mut self) -> Killed {
        end_child(&mut self.child, &self.pidfd)
    }

    /// Kills it, and waits for its end for `most`.
    pub(super) fn kill(&self, most: Duration) {
        let _ = self.pidfd.kill();
        self.pidfd.wait_exit(most);
    }

    fn failed(self, why: Option<String>) -> Box<Failed> {
        let starting = self;
        Box::new(Failed { starting, why })
    }

    /// Waits until it is ready. Error: it is not, and why, if it says so.
    pub(super) fn until_ready(mut self, deadline: Instant) -> Result<Manager, Box<Failed>> {
        loop {
            match notice_by(&mut self.lines, &self.pidfd, deadline) {
                Some(Notice::Holder(pid)) => match PidFd::open(pid) {
                    Ok(pidfd) => self.holder = Some((pid, pidfd)),
                    Err(error) => return Err(self.failed(Some(error.to_string()))),
                },
                Some(Notice::Ready) if self.holder.is_some() => break,
                Some(Notice::Failed(why)) => return Err(self.failed(Some(why))),
                _ => return Err(self.failed(None)),
            }
        }
        if self.link.set_read_timeout(None).is_err() {
            return Err(self.failed(None));
        }
        let Some(holder) = self.holder.take() else {
            return Err(self.failed(None));
        };
        Ok(Manager {
            child: self.child,
            pidfd: self.pidfd,
            holder,
            handover: Some(self.handover),
            generation: self.generation,
            link: self.link,
            lines: self.lines,
            log: self.log,
            stays: false,
            ready: Instant::now(),
        })
    }
}

/// A description as the manager's standard input. All users may read arguments; and Linux has no
/// room for more than 128 KiB in one.
fn written(launch: &Launch) -> io::Result<Stdio> {
    let memory = memfd_create("uc-launch", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(&serde_json::to_vec(launch)?)?;
    file.rewind()?;
    Ok(file.into())
}

fn spawn_manager(
    binary: &OwnedFd,
    launch: &Launch,
    inherited: &[BorrowedFd<'_>],
    said: Stdio,
) -> io::Result<Child> {
    let title = format!("{MANAGER_TITLE}{}", launch.keeper);
    let mut command = upgrade::command(binary, &title);
    command
        .env_remove("LD_PRELOAD")
        .stdin(written(launch)?)
        .stdout(Stdio::null())
        .stderr(said)
        .process_group(0); // a Ctrl-C at the terminal is for the program
    inherit::only(&mut command, inherited);
    command.spawn() // `command` closes our copy of the pipe's other end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_takeover_of_more_pages_may_take_longer_and_is_expected_to() {
        let small = Pause::of(1 << 20);
        assert!(small.longest < TAKEOVER + Duration::from_secs(1));
        assert!(small.expected < Duration::from_millis(100));
        // 256 GiB: 2^26 words.
        let large = Pause::of(8 << 26);
        assert_eq!(large.longest, TAKEOVER + 256 * TAKEOVER_PER_GIB);
        assert_eq!(large.expected, TAKES + 256 * TAKES_PER_GIB);
        assert!(large.expected * 4 < large.longest);
    }
}
