//! `undercroft-lab trace record`: a program under valgrind's lackey. Its log comes through a pipe
//! and is never kept.

use std::ffi::OsString;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use undercroft_references::Recorder;
use undercroft_references::import::{ImportError, lackey::Lackey};
use undercroft_trace::{Header, TimeUnit};

use super::args::RecordArgs;
use super::files::{Output, cannot_write};
use super::{PROGRESS_EVERY, TEXT_BUFFER_BYTES, granularity, progress, written};
use undercroft_terminal::{Failure, status};

const VALGRIND: &str = "valgrind";
/// Longest time until a request to end is noticed while the program is silent.
const REQUEST_CHECK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Lackey writes line by line. A reader that takes each line at once wakes for each, and the writer
/// pays for it. So after a read of less than `READ_ENOUGH` it waits this long, while the pipe
/// fills.
const GATHER: Duration = Duration::from_millis(2);
const READ_ENOUGH: usize = 256 << 10;

/// Records a program. Returns its status.
pub(super) fn record(args: &RecordArgs) -> Result<u8, Failure> {
    let version = version()?;
    let cache = args.cache.spec();
    let header = Header {
        granularity: granularity(args.granularity),
        time_unit: TimeUnit::References,
        command: args
            .command
            .iter()
            .map(|word| word.to_string_lossy().into_owned())
            .collect(),
        source: match &cache {
            None => format!("{version} lackey"),
            Some(cache) => format!("{version} lackey, cache {cache}"),
        },
        ..Header::default()
    };
    let cannot_write = |why: String| Failure {
        status: status::RUN_FAILED,
        ..cannot_write(&args.out, why)
    };
    let output = Output::new(&args.out).map_err(|failure| Failure {
        status: status::RUN_FAILED,
        ..failure
    })?;
    let mut recorder =
        Recorder::new(output, header, cache).map_err(|error| cannot_write(error.to_string()))?;
    let (mut child, log) = start(&args.command)?;
    let ended = take(log, &child, &mut recorder, args.quiet);
    if ended.is_err() {
        // The program is our child. Without a reader of its log it would only wait.
        let _ = child.kill();
    }
    let exit = child.wait();
    let touches = ended?;
    let exit = exit.map_err(|error| failed("cannot wait for valgrind", error))?;
    if touches == 0 {
        return Err(Failure::new(
            match exit.code() {
                Some(code @ (126 | 127)) => code as u8,
                _ => status::RUN_FAILED,
            },
            format!(
                "nothing of {} was recorded",
                args.command[0].to_string_lossy()
            ),
            format!("valgrind could not run it ({exit}); its own words are above"),
            "name a program that can be executed and that valgrind can run",
        ));
    }
    let filtered = recorder.cache_counts().copied();
    let (totals, output) = recorder
        .finish(touches)
        .map_err(|error| cannot_write(error.to_string()))?;
    let bytes = output.keep()?;
    if let Some(signal) = exit.signal() {
        // A user who stops a server wants the trace so far. A user who did not should know that it
        // ended.
        eprintln!(
            "undercroft-lab: signal {signal} ended {}: the trace ends there",
            args.command[0].to_string_lossy()
        );
    }
    if !args.quiet {
        if let Some(counts) = filtered {
            let share = 100.0 * counts.misses as f64 / counts.touches.max(1) as f64;
            eprintln!(
                "undercroft-lab: {touches} references seen; the cache missed {share:.2} % and wrote back {} lines",
                counts.write_backs
            );
        }
        written(&args.out, &totals, bytes);
    }
    Ok(status_of(exit))
}

/// The program's status, as a shell gives it.
fn status_of(exit: ExitStatus) -> u8 {
    match (exit.code(), exit.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128u8.wrapping_add(signal as u8),
        (None, None) => status::RUN_FAILED,
    }
}

fn failed(what: &str, why: impl ToString) -> Failure {
    Failure::new(
        status::RUN_FAILED,
        what,
        why.to_string(),
        "see whether `valgrind --tool=lackey --trace-mem=yes CMD` works by itself",
    )
}

/// Valgrind's name and version. Errors: it is not installed.
fn version() -> Result<String, Failure> {
    let output = Command::new(VALGRIND).arg("--version").output();
    match output {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        Ok(output) => Err(failed(
            "valgrind does not work",
            format!(
                "{}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            ),
        )),
        Err(error) => Err(Failure::new(
            status::RUN_FAILED,
            "cannot start valgrind, which does the recording",
            error.to_string(),
            "install it (Debian, Ubuntu: apt-get install valgrind) and have it in PATH; or record elsewhere and use \
             `undercroft-lab trace import`",
        )),
    }
}

/// Starts the program under valgrind. Returns it and the reading end of its log.
fn start(command: &[OsString]) -> Result<(Child, OwnedFd), Failure> {
    // The writing end is inherited under its own number. Valgrind moves it out of the program's
    // reach, and closes it on exec.
    let no_pipe = |error: rustix::io::Errno| failed("cannot make a pipe for valgrind's log", error);
    let (log, end) = pipe_with(PipeFlags::empty()).map_err(no_pipe)?;
    fcntl_setfd(&log, FdFlags::CLOEXEC).map_err(no_pipe)?;
    // For fewer wake-ups. A smaller pipe works as well.
    let _ = fcntl_setpipe_size(&log, TEXT_BUFFER_BYTES);
    let child = Command::new(VALGRIND)
        .args([
            "-q",
            "--tool=lackey",
            "--trace-mem=yes",
            "--basic-counts=no",
        ])
        // A forked child would write into the same log, line within line.
        .args(["--trace-children=no", "--child-silent-after-fork=yes"])
        .arg(format!("--log-fd={}", end.as_raw_fd()))
        .arg("--")
        .args(command)
        .spawn()
        .map_err(|error| failed("cannot start valgrind", error))?;
    Ok((child, log))
}

/// Records the log to its end. Returns how many touches it had.
fn take(
    log: OwnedFd,
    child: &Child,
    recorder: &mut Recorder<Output>,
    quiet: bool,
) -> Result<u64, Failure> {
    let [interrupted, terminated, hung_up] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let flags = [
        (SIGINT, &interrupted),
        (SIGTERM, &terminated),
        (SIGHUP, &hung_up),
    ];
    for (signal, flag) in flags {
        signal_hook::flag::register(signal, flag.clone())
            .map_err(|error| failed("cannot handle signals", error))?;
    }
    let pid = Pid::from_child(child);
    let log = Log {
        pipe: log,
        // A terminal sends SIGINT to the program as well; the trace ends with the program.
        requests: [(terminated, Signal::TERM), (hung_up, Signal::HUP)],
        pid,
        short: false,
    };
    let bar = if quiet {
        indicatif::ProgressBar::hidden()
    } else {
        progress(None)
    };
    let mut lackey = Lackey::new(BufReader::with_capacity(TEXT_BUFFER_BYTES, log));
    while let Some(touch) = lackey.next() {
        let touch = match touch {
            Ok(touch) => touch,
            // The program was killed in the middle of a line.
            Err(ImportError::Cut { .. }) => break,
            Err(error) => return Err(failed("valgrind's log cannot be read", error)),
        };
        recorder
            .touch(touch)
            .map_err(|error| failed("the trace cannot be written", error))?;
        if lackey.touches().is_multiple_of(PROGRESS_EVERY) {
            let kept = recorder.totals().references() as f64 / 1e6;
            let seen = lackey.touches() as f64 / 1e6;
            bar.set_message(format!("{seen:.1} M references seen, {kept:.2} M recorded"));
            bar.tick();
        }
    }
    bar.finish_and_clear();
    Ok(lackey.touches())
}

/// The pipe. It passes a request to end on to the program while it waits.
struct Log {
    pipe: OwnedFd,
    requests: [(Arc<AtomicBool>, Signal); 2],
    pid: Pid,
    /// The last read found little: the writer is slower than this reader.
    short: bool,
}

impl Read for Log {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            for (request, signal) in &self.requests {
                if request.swap(false, Ordering::Relaxed) {
                    // It may have ended by itself. This process waits for it only after the log has
                    // ended, so the number is still its own.
                    let _ = kill_process(self.pid, *signal);
                }
            }
            let mut ready = [PollFd::from_borrowed_fd(self.pipe.as_fd(), PollFlags::IN)];
            match poll(&mut ready, Some(&REQUEST_CHECK)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => {
                    if self.short {
                        std::thread::sleep(GATHER);
                    }
                    let got = rustix::io::read(&self.pipe, buffer)?;
                    self.short = got < READ_ENOUGH;
                    return Ok(got);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
