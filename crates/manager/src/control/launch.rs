//! The messages between keeper and manager.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::books::tiers::TierLaunch;
use crate::options::ClientOptions;
use crate::report::Report;

/// Everything that the keeper gives its manager: options, and the numbers of inherited descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct Launch {
    /// The client's options.
    pub options: ClientOptions,
    /// Program and arguments, for status.
    pub command: Vec<String>,
    /// Process id of the keeper.
    pub keeper: u32,
    /// The path of the shim, without links, and that of its socket. They mark the program's
    /// processes.
    pub shim: (PathBuf, PathBuf),
    /// Listening socket of the shims.
    pub listener: i32,
    /// Stream to the keeper.
    pub link: i32,
    /// Listening socket for status.
    pub status: i32,
    /// Memfd of the ledger.
    pub ledger: i32,
    /// Chunks that the ledger is laid out for.
    pub ledger_chunks: usize,
    /// Descriptors of each tier, fastest first.
    pub tiers: Vec<TierLaunch>,
}

/// A request of the keeper.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The client has ended: report and exit.
    Finish {
        /// The exit status of the run.
        exit_status: i32,
        /// Time from the program's start to its end.
        wall_ns: u64,
    },
    /// The keeper stops, because the program has. It is to be woken when the program goes on.
    Paused {
        /// Process id of the program.
        program: u32,
    },
}

/// A message of the manager, one JSON value a line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Notice {
    /// The manager is ready for clients.
    Ready {
        /// Process id of the holder.
        holder: u32,
    },
    /// The manager cannot serve, and why.
    Failed(String),
    /// The client was ended, and why.
    Doomed(String),
    /// The answer to `Finish`.
    Report(Box<Report>),
}

/// Writes one notice to the keeper.
pub(super) fn tell(link: &OwnedFd, notice: &Notice) -> io::Result<()> {
    let mut line = serde_json::to_vec(notice)?;
    line.push(b'\n');
    let mut rest = &line[..];
    while !rest.is_empty() {
        let sent = rustix::io::write(link, rest)?;
        rest = &rest[sent..];
    }
    Ok(())
}
