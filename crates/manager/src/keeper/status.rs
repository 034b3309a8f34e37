//! Asks every running client of this user for its status.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::keeper::place::{STATUS_SOCKET, bases, is_run};
use crate::report::Snapshot;

/// Longest time that one manager may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The snapshots of all runs that answer, in order of the keeper's process id. A run that ends
/// meanwhile is left out.
pub fn snapshots() -> Vec<Snapshot> {
    let mut found: Vec<Snapshot> = bases()
        .into_iter()
        .filter_map(|base| std::fs::read_dir(base).ok())
        .flat_map(Iterator::flatten)
        .filter(|entry| is_run(&entry.file_name()))
        .filter_map(|entry| ask(&entry.path().join(STATUS_SOCKET)))
        .collect();
    found.sort_by_key(|snapshot| snapshot.pid);
    found
}

fn ask(socket: &std::path::Path) -> Option<Snapshot> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}
