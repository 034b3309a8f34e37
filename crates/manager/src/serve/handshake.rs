//! Handshakes: a shim announces its process, the manager checks who it is and takes it over.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use undercroft_base::{PAGE_BYTES, SpaceId, VirtPage, VirtRange};
use undercroft_sys::fdpass;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::PidFd;
use undercroft_sys::procfs::{self, Statm};
use undercroft_sys::uffd::{Features, RegisterMode, Uffd};
use undercroft_wire::protocol::{KIND_FORK, STAGING_PAGES};

use super::Control;
use crate::command::Commands;
use crate::discover;
use crate::process::{Agent, Identity, Process};
use crate::protocol::{Hello, Ready, answer};
use crate::shared::lock;

/// Longest a handshake may take.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);

/// How long a process that is being ended may take after its descriptors are closed.
const DYING: Duration = Duration::from_millis(20);

impl Control {
    /// One shim announces itself.
    pub(super) fn welcome(&mut self) {
        let Ok(socket) =
            rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC)
        else {
            return;
        };
        let timeout = Some(HANDSHAKE);
        let receive = rustix::net::sockopt::Timeout::Recv;
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, receive, timeout);
        if let Err(error) = self.handshake(socket.as_fd()) {
            let _ = fdpass::send(socket.as_fd(), &answer(true), &[]);
            // One that ends in the middle of it needs no manager.
            let gone = fdpass::peer(socket.as_fd())
                .and_then(|peer| PidFd::open(peer.pid))
                .map_or(true, |process| process.wait_exit(DYING));
            if !gone {
                crate::log::say(&format!(
                    "a process of the program could not be managed: {error}"
                ));
            }
        }
    }

    fn handshake(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let peer = fdpass::peer(socket)?;
        if !self.is_descendant(peer.pid) {
            return Err(io::Error::other(format!(
                "process {} is not the program's",
                peer.pid
            )));
        }
        let mut bytes = [0u8; 64];
        let (got, _) = fdpass::receive(socket, &mut bytes)?;
        let hello = Hello::parse(&bytes[..got]).ok_or_else(|| io::Error::other("unknown shim"))?;
        let page = SharedMemory::create("uc-command", PAGE_BYTES)?;
        fdpass::send(socket, &answer(false), &[self.device.as_fd(), page.as_fd()])?;
        let (got, fds) = fdpass::receive(socket, &mut bytes)?;
        let ready =
            Ready::parse(&bytes[..got]).ok_or_else(|| io::Error::other("the shim gave up"))?;
        let mut fds = fds.into_iter();
        let beacon = VirtPage::of(ready.beacon);
        let process = match (hello.kind, hello.nonce) {
            (KIND_FORK, nonce) if nonce != 0 => {
                let space = SpaceId(nonce as u32);
                let process = self.shared.process(space);
                process
                    .filter(|p| p.identity.get().is_none() && p.beacon == beacon)
                    .ok_or_else(|| io::Error::other("a fork child named no space of its own"))?
            }
            _ => {
                let uffd: Uffd = fds.next().ok_or(io::ErrorKind::InvalidData)?.into();
                let features = Features::EVENTS.with(Features::THREAD_ID);
                uffd.api(features).map_err(|error| {
                    io::Error::other(format!(
                        "userfaultfd fork events were refused ({error}); run as root or with CAP_SYS_PTRACE"
                    ))
                })?;
                self.shared.placement.pin.restarted(peer.pid);
                // The same process with a new address space: it called exec, and the old one is gone.
                for old in self.shared.all_processes() {
                    if old.pid() == Some(peer.pid) {
                        self.forget(&old);
                    }
                }
                let space = self.shared.engine().add_space();
                // Forked before there was anything to manage: no event told of it.
                let family = match hello.kind {
                    KIND_FORK => self.family_of(peer.pid),
                    _ => None,
                };
                Arc::new(Process::new(space, uffd, beacon, None, family))
            }
        };
        let staging: Uffd = fds.next().ok_or(io::ErrorKind::InvalidData)?.into();
        let _ = process.identity.set(Identity {
            pid: peer.pid,
            pidfd: PidFd::open(peer.pid)?,
        });
        let staging_end = ready.staging + (STAGING_PAGES * PAGE_BYTES) as u64;
        let area = VirtRange::of_addresses(ready.staging, staging_end);
        process.uffd.register(area, RegisterMode::MISSING)?;
        let agent = Agent {
            commands: Commands::new(page),
            _staging_uffd: staging,
            holding: staging_end,
            private: VirtRange::of_addresses(ready.staging, ready.private_end),
        };
        let _ = process.agent.set(agent);
        if self.shared.process(process.space).is_none() {
            self.shared.add_process(process.clone());
        }
        self.statm.insert(process.space, Statm::open(peer.pid)?);
        crate::layout::place_agents(&self.shared);
        if self.managing {
            self.watch(&process);
            discover::manage(&self.shared, &process, &mut self.maps);
        } else if hello.kind == KIND_FORK {
            // A fork doubles what can be written to: it is looked at while the child waits.
            self.look_around();
        }
        if hello.kind == KIND_FORK && process.parent.is_none() {
            crate::cow::protect(&self.shared, &process, peer.pid); // its one thread waits for the answer
        }
        self.look_soon();
        fdpass::send(socket, &answer(false), &[process.uffd.as_fd()])
    }

    /// The family of the process that forked `pid`, if it is known.
    fn family_of(&self, pid: u32) -> Option<SpaceId> {
        let parent = procfs::status_number(pid, "PPid")?;
        let known = self.shared.all_processes();
        let of = known
            .iter()
            .find(|p| p.pid().map(u64::from) == Some(parent))?;
        Some(of.family)
    }

    fn is_descendant(&self, pid: u32) -> bool {
        let mut at = pid;
        for _ in 0..256 {
            if at == self.launch.keeper {
                return true;
            }
            match procfs::status_number(at, "PPid") {
                Some(parent) if parent > 1 => at = parent as u32,
                _ => return false,
            }
        }
        false
    }

    pub(super) fn watch(&self, process: &Process) {
        if let (Some(sideband), Some(pid)) = (lock(&self.watch).as_mut(), process.pid()) {
            let _ = sideband.watch(pid);
        }
    }
}
