//! What all managers of a run are given, and how one is started: the first, or a successor.

use std::io::{self, BufReader};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use undercroft_sys::inherit;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::PidFd;
use undercroft_tier::open::OpenTier;

use super::place::{RunDir, SHIM_LINK, SHIM_SOCKET, STATUS_SOCKET, UPGRADE_SOCKET};
use super::said::{Log, notice_by};
use super::{Killed, LEDGER_CHUNKS, Manager, READY, RunError, STARTING, end_child, stays, upgrade};
use crate::books::{ledger, tiers};
use crate::control::{Launch, Notice};
use crate::legacy;
use crate::options::{ClientOptions, RunOptions};

/// What every manager of the run is given. It survives them.
pub(super) struct Estate {
    launch: Launch,
    listener: OwnedFd,
    status: OwnedFd,
    ledger: SharedMemory,
    pub(super) legacy: SharedMemory,
    tiers: Vec<OpenTier>,
    /// The binary of the next manager. It is held open: whatever is put in its place, the next
    /// manager is this one.
    pub(super) binary: OwnedFd,
    /// Where users ask for another binary.
    pub(super) upgrades: OwnedFd,
}

impl Estate {
    pub(super) fn make(
        options: &RunOptions,
        dir: &RunDir,
        tiers: Vec<OpenTier>,
    ) -> Result<Estate, RunError> {
        let listener = dir.listen(SHIM_SOCKET, SocketType::SEQPACKET, 0o777)?;
        let status = dir.listen(STATUS_SOCKET, SocketType::STREAM, 0o600)?;
        let upgrades = dir.listen(UPGRADE_SOCKET, SocketType::SEQPACKET, 0o600)?;
        let ledger = SharedMemory::create("uc-ledger", ledger::bytes_for(LEDGER_CHUNKS))?;
        let legacy = legacy::fresh()?;
        let command = options.command.iter();
        let launch = Launch {
            options: options.client.clone(),
            command: command
                .map(|part| part.to_string_lossy().into_owned())
                .collect(),
            keeper: std::process::id(),
            shim: (dir.path(SHIM_LINK).canonicalize()?, dir.path(SHIM_SOCKET)),
            listener: listener.as_raw_fd(),
            link: -1,
            status: status.as_raw_fd(),
            ledger: ledger.as_fd().as_raw_fd(),
            ledger_chunks: LEDGER_CHUNKS,
            tiers: tiers.iter().map(tiers::launch).collect(),
            legacy: legacy.as_fd().as_raw_fd(),
            handover: -1,
            predecessor: None,
        };
        Ok(Estate {
            launch,
            listener,
            status,
            ledger,
            legacy,
            tiers,
            binary: upgrade::own_binary()?,
            upgrades,
        })
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
            theirs.as_fd(),
            holders.as_fd(),
        ];
        inherited.extend(predecessor.map(AsFd::as_fd));
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

fn spawn_manager(
    binary: &OwnedFd,
    launch: &Launch,
    inherited: &[BorrowedFd<'_>],
    said: Stdio,
) -> io::Result<Child> {
    let mut command = upgrade::command(binary);
    command
        .arg("manager")
        .arg(serde_json::to_string(launch)?)
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(said)
        .process_group(0); // a Ctrl-C at the terminal is for the program
    inherit::only(&mut command, inherited);
    command.spawn() // `command` closes our copy of the pipe's other end
}
