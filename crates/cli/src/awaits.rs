//! Processes that a machine waits for before it starts: back ends of its QEMU's vhost-user devices,
//! each started by `undercroft view`. That needs the run, and QEMU needs their sockets. So the run
//! starts with this launcher, which becomes QEMU.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use undercroft_terminal::{Failure, log_message, status};

use crate::args::{AwaitArgs, Log};

const PAUSE: Duration = Duration::from_millis(20);

/// The words that start this launcher, in front of those of the program. None if it awaits nothing.
///
/// Errors: this binary has no path.
pub(crate) fn launcher(sockets: &[PathBuf], log: Log) -> io::Result<Vec<OsString>> {
    if sockets.is_empty() {
        return Ok(Vec::new());
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default().as_secs_f64().to_string();
    let log = if log == Log::Json { "json" } else { "text" };
    let own = std::env::current_exe()?.into_os_string();
    let mut words = vec![own, "await".into()];
    words.extend(["--since", &since, "--log", log].map(OsString::from));
    for socket in sockets {
        words.extend([
            "--socket".into(),
            std::path::absolute(socket)?.into_os_string(),
        ]);
    }
    words.push("--".into());
    Ok(words)
}

/// The body of `undercroft await`. Returns only why it cannot become the program.
pub(crate) fn become_program(args: &AwaitArgs) -> Result<u8, Failure> {
    for socket in &args.sockets {
        if is_made(socket, args.since) {
            continue;
        }
        let what = format!(
            "waits for a process that listens at {}; start it by `undercroft view --vm {} -- ...`",
            socket.display(),
            std::process::id()
        );
        let text = log_message(args.log.into(), &what);
        let _ = io::stderr().write_all(text.as_bytes()); // it may be closed
        while !is_made(socket, args.since) {
            thread::sleep(PAUSE);
        }
    }
    let error = Command::new(&args.command[0])
        .args(&args.command[1..])
        .exec();
    let what = format!("cannot start {}", args.command[0].display());
    let fix = "check the program";
    Err(Failure::new(
        status::RUN_FAILED,
        what,
        error.to_string(),
        fix,
    ))
}

/// Whether a socket is there, and was made after `since`: a process of an earlier run may have left
/// one.
fn is_made(path: &Path, since: f64) -> bool {
    fs::metadata(path).is_ok_and(|of| {
        let made = of.ctime() as f64 + of.ctime_nsec() as f64 * 1e-9;
        of.file_type().is_socket() && made >= since
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_of_before_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        assert!(!is_made(&path, 0.0));
        fs::write(&path, "").expect("written");
        assert!(!is_made(&path, 0.0), "a file");
        fs::remove_file(&path).expect("removed");
        let _listener = UnixListener::bind(&path).expect("it listens");
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a time");
        assert!(is_made(&path, now.as_secs_f64() - 60.0));
        assert!(!is_made(&path, now.as_secs_f64() + 60.0));
    }
}
