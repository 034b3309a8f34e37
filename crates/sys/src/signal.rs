//! Signals that one process takes for another. They are read with their origin and passed on as
//! they came. The program that the process starts gets the original settings back.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

pub use libc::{
    SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM, SIGTSTP, SIGTTIN,
    SIGTTOU, SIGUSR1, SIGWINCH, SIGXFSZ,
};

/// Signals that are not passed on: faults of the process's own code, its own CPU time.
const OWN: [i32; 11] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGXCPU,
    libc::SIGVTALRM,
    libc::SIGPROF,
];

/// SIGPIPE was ignored when this process was started. Rust's runtime ignores it before `main`.
static PIPE_WAS_IGNORED: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_PIPE: extern "C" fn() = note_pipe;

extern "C" fn note_pipe() {
    PIPE_WAS_IGNORED.store(is_ignored(SIGPIPE), Ordering::Relaxed);
}

/// Whether this process ignores a signal.
pub fn is_ignored(number: i32) -> bool {
    let mut old = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: sigaction without a new action only writes the old one into a live local.
    let told = unsafe { libc::sigaction(number, std::ptr::null(), old.as_mut_ptr()) } == 0;
    // SAFETY: written by the call above when it returned 0.
    told && unsafe { old.assume_init() }.sa_sigaction == libc::SIG_IGN
}

fn set_disposition(number: i32, disposition: libc::sighandler_t) {
    // SAFETY: SIG_DFL and SIG_IGN only (callers below): no code of ours runs in a handler.
    unsafe { libc::signal(number, disposition) };
}

/// A signal that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Signal number.
    pub number: i32,
    /// The sender. `None`: the kernel (a terminal, a timer, the end of a child).
    pub sender: Option<u32>,
    /// The value that sigqueue(3) sent with it.
    value: Option<usize>,
}

impl Received {
    /// A signal as kill(2) sends it.
    pub fn new(number: i32, sender: Option<u32>) -> Received {
        Received {
            number,
            sender,
            value: None,
        }
    }
}

impl Received {
    /// Size of [`Received::bytes`].
    pub const BYTES: usize = 24;

    /// For another process of this program.
    pub fn bytes(&self) -> [u8; Received::BYTES] {
        let mut bytes = [0; Received::BYTES];
        let has = [self.sender.is_some(), self.value.is_some()];
        bytes[..4].copy_from_slice(&self.number.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.sender.unwrap_or(0).to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.value.unwrap_or(0).to_ne_bytes());
        bytes[16..18].copy_from_slice(&has.map(u8::from));
        bytes
    }

    /// The signal of [`Received::bytes`].
    pub fn of_bytes(bytes: &[u8; Received::BYTES]) -> Received {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let value = [word(8), word(12)].concat();
        let value = <[u8; 8]>::try_from(value).map_or(0, usize::from_ne_bytes);
        Received {
            number: i32::from_ne_bytes(word(0)),
            sender: (bytes[16] != 0).then_some(u32::from_ne_bytes(word(4))),
            value: (bytes[17] != 0).then_some(value),
        }
    }
}

/// The signals of this process, taken from their default actions.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
    child_was_ignored: bool,
}

impl Signals {
    /// Blocks every signal that may be meant for the program, and reads them from now on. Call it
    /// before the first thread is started: threads inherit the mask.
    pub fn take() -> io::Result<Signals> {
        let child_was_ignored = is_ignored(SIGCHLD);
        // Otherwise the kernel reaps our children, and their status is lost.
        set_disposition(SIGCHLD, libc::SIG_DFL);
        let mut taken = empty_set();
        for number in (1..=31).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()) {
            if !OWN.contains(&number) {
                // SAFETY: adds one valid number to a live, initialised set.
                unsafe { libc::sigaddset(&mut taken, number) };
            }
        }
        let before = change_mask(libc::SIG_BLOCK, &taken)?;
        // SAFETY: a valid set; the kernel makes a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &taken, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Signals {
            fd,
            before,
            child_was_ignored,
        })
    }

    /// The next signal that has arrived, if any.
    pub fn next(&self) -> Option<Received> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the kernel writes at most `size` bytes into the live local of that size.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size) };
        if got != size as isize {
            return None;
        }
        // SAFETY: plain numbers, zeroed and then written in full.
        let info = unsafe { info.assume_init() };
        Some(Received {
            number: info.ssi_signo as i32,
            sender: (info.ssi_code <= 0).then_some(info.ssi_pid),
            value: (info.ssi_code == libc::SI_QUEUE).then_some(info.ssi_ptr as usize),
        })
    }

    /// Gives the program that `command` starts the signal settings of this process's start: the
    /// mask, and what was ignored.
    pub fn put_back_in(&self, command: &mut Command) {
        let (before, child) = (self.before, self.child_was_ignored);
        let pipe = PIPE_WAS_IGNORED.load(Ordering::Relaxed);
        let put_back = move || {
            if pipe {
                set_disposition(SIGPIPE, libc::SIG_IGN);
            }
            if child {
                set_disposition(SIGCHLD, libc::SIG_IGN);
            }
            change_mask(libc::SIG_SETMASK, &before).map(drop)
        };
        // SAFETY: runs between fork and exec: signal(2) and sigprocmask(2) are async-signal-safe,
        // and nothing is allocated.
        unsafe { command.pre_exec(put_back) };
    }

    /// True if a job-control stop waits to be read. It came after every SIGCONT that was read: the
    /// kernel drops a stop that waits when a SIGCONT comes.
    pub fn is_stop_pending(&self) -> bool {
        let mut waiting = empty_set();
        // SAFETY: writes the waiting signals into a live, initialised set.
        unsafe { libc::sigpending(&mut waiting) };
        [SIGTSTP, SIGTTIN, SIGTTOU].iter().any(|number| {
            // SAFETY: reads a live, initialised set.
            unsafe { libc::sigismember(&waiting, *number) == 1 }
        })
    }

    /// Stops this process as a job-control signal would. Returns when it continues, or at once
    /// where the kernel does not stop it (an orphaned process group).
    pub fn stop_by(&self, number: i32) {
        let mut one = empty_set();
        // SAFETY: adds one number to a live, initialised set; an invalid one changes nothing.
        unsafe { libc::sigaddset(&mut one, number) };
        send_self(number); // blocked, it joins one that waits already: one stop
        let _ = change_mask(libc::SIG_UNBLOCK, &one); // it stops here
        let _ = change_mask(libc::SIG_BLOCK, &one);
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn empty_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the whole set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: initialised by the call above.
    unsafe { set.assume_init() }
}

/// Changes the calling thread's mask. Returns the old one.
fn change_mask(how: i32, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = empty_set();
    // SAFETY: both sets are live and initialised.
    match unsafe { libc::pthread_sigmask(how, set, &mut before) } {
        0 => Ok(before),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Passes a signal on to a process, with its value. The process may be gone already.
pub fn pass_on(signal: &Received, pid: u32) {
    match signal.value {
        None => send(signal.number, pid),
        Some(value) => {
            let value = libc::sigval {
                sival_ptr: value as *mut _,
            };
            // SAFETY: the value is the receiver's to understand; here it is a number.
            unsafe { libc::sigqueue(pid as i32, signal.number, value) };
        }
    }
}

/// Sends a signal to a process, which may be gone already.
pub fn send(number: i32, pid: u32) {
    if pid > 1 {
        // SAFETY: kill takes numbers only; `pid` names one process, never a group or all processes.
        unsafe { libc::kill(pid as i32, number) };
    }
}

/// Ends this process as signal `number` ends one that does not handle it, without a core dump.
/// Returns only if that signal does not end a process.
pub fn end_by(number: i32) {
    let none = rustix::process::Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
    set_disposition(number, libc::SIG_DFL);
    let mut one = empty_set();
    // SAFETY: adds one number to a live, initialised set; an invalid one changes nothing.
    unsafe { libc::sigaddset(&mut one, number) };
    send_self(number);
    let _ = change_mask(libc::SIG_UNBLOCK, &one);
}

/// Sends a signal to this process.
fn send_self(number: i32) {
    // SAFETY: takes no arguments.
    let id = unsafe { libc::getpid() };
    // SAFETY: takes numbers only.
    unsafe { libc::kill(id, number) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All in a single test, because the mask and the dispositions belong to the whole process.
    /// Threads of the test harness do not matter: signals are sent to this thread alone.
    #[test]
    fn signals_arrive_with_their_sender_and_go_back_as_they_were() {
        let signals = Signals::take().expect("a signalfd");
        assert_eq!(signals.next(), None);
        // SAFETY: raise takes a number only, and it is blocked in this thread.
        unsafe { libc::raise(SIGUSR1) };
        let own = std::process::id();
        assert_eq!(
            signals.next(),
            Some(Received::new(SIGUSR1, Some(own))),
            "what a process sends has a sender"
        );
        assert_eq!(signals.next(), None);
        let queued = Received {
            number: 40,
            sender: None,
            value: Some(usize::MAX - 7),
        };
        for signal in [queued, Received::new(SIGTERM, Some(0))] {
            assert_eq!(Received::of_bytes(&signal.bytes()), signal);
        }
        let mut shell = Command::new("grep");
        shell.args(["-E", "SigBlk|SigIgn", "/proc/self/status"]);
        signals.put_back_in(&mut shell);
        let told = shell.output().expect("grep runs").stdout;
        let told = String::from_utf8_lossy(&told).into_owned();
        let word = |key: &str| {
            let line = told.lines().find_map(|line| line.strip_prefix(key));
            u64::from_str_radix(line.unwrap_or("0").trim(), 16).expect("a number")
        };
        let bit = |number: i32| 1u64 << (number - 1);
        assert_eq!(word("SigBlk:") & bit(SIGUSR1), 0, "the mask is put back");
        let pipe = PIPE_WAS_IGNORED.load(Ordering::Relaxed);
        assert_eq!(word("SigIgn:") & bit(SIGPIPE) != 0, pipe);
        assert!(change_mask(libc::SIG_SETMASK, &signals.before).is_ok());
    }
}
