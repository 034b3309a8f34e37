//! Starts a program that maps the memory of a run's machine beside its monitor (`undercroft view`).
//! This process asks the manager for the descriptors, and becomes the program.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use undercroft_sys::fdpass;
use undercroft_wire::parse::{JOIN, refused};
use undercroft_wire::protocol::{SOCKET_VARIABLE, VIEW_VARIABLE};

use super::place::{SHIM_LINK, SHIM_SOCKET};
use super::{GUEST_VARIABLE, LOCKS_VARIABLE, preload, status};

/// How long a manager may take to answer. Another may have to take over first.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why the program was not started.
#[derive(Debug, thiserror::Error)]
pub enum NoView {
    /// There is no such run.
    #[error("there is no such run, or it does not answer")]
    NoRun,
    /// The run has no memory of a machine that can be mapped, or refuses.
    #[error("the run has no machine whose memory undercroft made, or it belongs to another user")]
    Refused,
    /// A call of the system, or the program cannot be executed.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Becomes `command`, with what it needs to map the memory of run `run`. Returns only why not.
pub fn start(run: u32, command: &[OsString]) -> NoView {
    match try_start(run, command) {
        Ok(never) => match never {},
        Err(why) => why,
    }
}

fn try_start(run: u32, command: &[OsString]) -> Result<Infallible, NoView> {
    let folder = status::folder_of(run).ok_or(NoView::NoRun)?;
    let (name, arguments) = command.split_first().ok_or(NoView::NoRun)?;
    let [memory, locks] = descriptors(&folder.join(SHIM_SOCKET))?;
    // Opened anew: the manager uses the other.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let memory = File::options().read(true).write(true).open(path)?;
    for given in [memory.as_fd(), locks.as_fd()] {
        fcntl_setfd(given, FdFlags::empty()).map_err(io::Error::from)?;
    }
    let before = std::env::var_os("LD_PRELOAD");
    let error = Command::new(name)
        .args(arguments)
        .env(
            "LD_PRELOAD",
            preload(before.as_deref(), &folder.join(SHIM_LINK)),
        )
        .env(SOCKET_VARIABLE, folder.join(SHIM_SOCKET))
        .env(GUEST_VARIABLE, memory.as_raw_fd().to_string())
        .env(LOCKS_VARIABLE, locks.as_raw_fd().to_string())
        .env(VIEW_VARIABLE, "1")
        .exec();
    Err(error.into())
}

/// The descriptors of the memory and of its page locks.
fn descriptors(socket: &Path) -> Result<[OwnedFd; 2], NoView> {
    match ask(socket)? {
        (0, fds) => fds.try_into().map_err(|_| NoView::Refused),
        _ => Err(NoView::Refused),
    }
}

/// Asks the manager once. One that does not know the question says nothing.
fn ask(path: &Path) -> Result<(u32, Vec<OwnedFd>), NoView> {
    let address = SocketAddrUnix::new(path).map_err(io::Error::from)?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).map_err(io::Error::from)?;
    let limit = Some(PATIENCE);
    set_socket_timeout(&socket, Timeout::Recv, limit).map_err(io::Error::from)?;
    connect(&socket, &address).map_err(|_| NoView::NoRun)?;
    let sent = fdpass::send(socket.as_fd(), &JOIN, &[]);
    let mut bytes = [0; 64];
    let received = sent.and_then(|()| fdpass::receive(socket.as_fd(), &mut bytes));
    let (got, fds) = received.map_err(|_| NoView::Refused)?;
    let code = refused(&bytes[..got]).ok_or(NoView::Refused)?;
    Ok((code, fds))
}
