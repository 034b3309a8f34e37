//! Which descriptors pass from one process to the next. The program gets those it was given; no
//! other process keeps a copy.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Descriptors that this process was started with, besides the standard three. A program that it
/// starts gets them too.
#[derive(Debug)]
pub struct Given(Vec<i32>);

impl Given {
    /// The open descriptors that survive exec. Call it before this process opens others that do.
    pub fn now() -> io::Result<Given> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc/self/fd")? {
            let name = entry?.file_name();
            let Some(number) = name.to_str().and_then(|text| text.parse().ok()) else {
                continue;
            };
            if number > 2 && is_kept_by_exec(number) {
                found.push(number);
            }
        }
        Ok(Given(found))
    }

    /// Closes the given descriptors here. A process that waits for their end, or for a lock on
    /// them, then waits for the program only.
    pub fn close(self) {
        for number in self.0 {
            // SAFETY: open when this process began and owned by nothing in it (`now`); each is
            // closed once.
            unsafe { libc::close(number) };
        }
    }
}

/// A descriptor for what `number` is open for, which no other process gets. For a descriptor that
/// this process was started with and told the number of.
///
/// Errors: it is not open.
pub fn copy_of(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only, and fails when the descriptor is not open.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

fn is_kept_by_exec(number: i32) -> bool {
    // SAFETY: F_GETFD takes numbers only, and fails when the descriptor is not open.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// Gives the process that `command` starts its standard streams and `fds`, nothing else. The caller
/// keeps `fds` open until it has started.
pub fn only(command: &mut Command, fds: &[BorrowedFd<'_>]) {
    let kept: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let choose = move || {
        let flags = libc::CLOSE_RANGE_CLOEXEC as i32;
        // SAFETY: marks descriptors, closes none; numbers only.
        if unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, flags) } != 0 {
            return Err(io::Error::last_os_error());
        }
        for number in &kept {
            // SAFETY: F_SETFD takes numbers only, and fails when the descriptor is not open.
            if unsafe { libc::fcntl(*number, libc::F_SETFD, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: runs between fork and exec: two async-signal-safe calls, and nothing is allocated.
    unsafe { command.pre_exec(choose) };
}

/// Closes standard input and output here. A reader of the other end then sees the end of file when
/// the program closes its own.
pub fn leave_streams() -> io::Result<()> {
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(())
}

/// Closes standard error here. What is written to it from now on is lost.
pub fn leave_errors() -> io::Result<()> {
    let null = std::fs::File::options().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stderr(&null)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_process_gets_what_it_is_given_and_nothing_else() {
        let file = || std::fs::File::open("/dev/null").expect("a file");
        let (wanted, stray) = (file(), file());
        // As if this process had been given it.
        rustix::io::fcntl_setfd(&stray, rustix::io::FdFlags::empty()).expect("an open file");
        let mut command = Command::new("sh");
        let (yes, no) = (wanted.as_raw_fd(), stray.as_raw_fd());
        command.args([
            "-c",
            &format!("[ -e /proc/self/fd/{yes} ] && ! [ -e /proc/self/fd/{no} ]"),
        ]);
        only(&mut command, &[wanted.as_fd()]);
        assert!(command.status().expect("sh runs").success());
        assert!(Given::now().expect("/proc").0.contains(&no));
        assert!(!Given::now().expect("/proc").0.contains(&yes), "CLOEXEC");
    }
}
