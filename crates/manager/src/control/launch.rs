//! What keeper and manager say to each other.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::books::tiers::TierLaunch;
use crate::options::ClientOptions;
use crate::report::Report;

/// Everything the keeper gives its manager: options, and numbers of inherited descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub struct Launch {
    /// The client's options.
    pub options: ClientOptions,
    /// Program and arguments, for status.
    pub command: Vec<String>,
    /// Process id of the keeper.
    pub keeper: u32,
    /// The shim, without links in its path, and the path of its socket: they mark the program's
    /// processes.
    pub shim: (PathBuf, PathBuf),
    /// Listening socket of the shims.
    pub listener: i32,
    /// Stream to the keeper.
    pub link: i32,
    /// Listening socket for status.
    pub status: i32,
    /// Ledger memfd, and the chunks it is laid out for.
    pub ledger: i32,
    /// Chunks of the ledger.
    pub ledger_chunks: usize,
    /// What each tier keeps its pages in, in order.
    pub tiers: Vec<TierLaunch>,
}

/// What the keeper asks.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// The client has ended: report and exit.
    Finish {
        /// What the run exits with.
        exit_status: i32,
        /// Start to end.
        wall_ns: u64,
    },
    /// The keeper stops, because this program has: it is to be woken when the program goes on.
    Paused {
        /// Process id of the program.
        program: u32,
    },
}

/// What the manager says to its keeper, one JSON value a line.
#[derive(Debug, Serialize, Deserialize)]
pub enum Notice {
    /// Ready for clients.
    Ready {
        /// Process id of the holder.
        holder: u32,
    },
    /// It cannot serve, and why.
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
