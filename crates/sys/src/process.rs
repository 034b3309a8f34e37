//! Other processes and threads: their memory, their CPUs, their lives.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::procfs;

fn pid(id: u32) -> io::Result<Pid> {
    Pid::from_raw(id as i32).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// The instruction at which a thread waits: in a fault that of the access, in a call of the kernel
/// that of the call. `None`: it runs, is gone, or may not be looked at. Cost: three system calls.
pub fn instruction_of(process: u32, thread: u32) -> Option<u64> {
    let mut room = [0u8; 256];
    let path = format!("/proc/{process}/task/{thread}/syscall");
    instruction_in(procfs::beginning_of(&path, &mut room).ok()?)
}

/// The last word of `NUMBER ARGUMENTS SP PC`, `-1 SP PC`, or of `running`, which is no number.
fn instruction_in(text: &[u8]) -> Option<u64> {
    let last = text.trim_ascii_end().rsplit(|byte| *byte == b' ').next()?;
    let digits = std::str::from_utf8(last).ok()?.strip_prefix("0x")?;
    u64::from_str_radix(digits, 16).ok()
}

/// A process, by descriptor: never another one that took its number.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// The process that has number `id` now.
    pub fn open(id: u32) -> io::Result<PidFd> {
        Ok(PidFd(rustix::process::pidfd_open(
            pid(id)?,
            PidfdFlags::empty(),
        )?))
    }

    /// The process's numbers: here, then in each pid namespace below, down to its own.
    ///
    /// Errors: it has been reaped, or is not in this pid namespace.
    pub fn numbers(&self) -> io::Result<Vec<u32>> {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let mut room = [0u8; 1024];
        let text = String::from_utf8_lossy(crate::procfs::beginning_of(&path, &mut room)?);
        let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let numbers = line.unwrap_or_default().split_ascii_whitespace();
        let numbers: Vec<u32> = numbers.filter_map(|number| number.parse().ok()).collect();
        match numbers.first() {
            None | Some(0) => Err(io::ErrorKind::NotFound.into()),
            Some(_) => Ok(numbers),
        }
    }

    /// True if it is in a pid namespace below ours, where it has another number.
    pub fn is_below(&self) -> bool {
        self.numbers().is_ok_and(|numbers| numbers.len() > 1)
    }

    /// Kills it.
    pub fn kill(&self) -> io::Result<()> {
        Ok(rustix::process::pidfd_send_signal(&self.0, Signal::KILL)?)
    }

    /// True if it has exited (it may still be a zombie).
    pub fn has_exited(&self) -> bool {
        self.wait_exit(Duration::ZERO)
    }

    /// Waits for at most `timeout` until it has exited. True if it has.
    pub fn wait_exit(&self, timeout: Duration) -> bool {
        let mut fds = [rustix::event::PollFd::new(
            &self.0,
            rustix::event::PollFlags::IN,
        )];
        let timeout = rustix::fs::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        matches!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(n) if n > 0)
    }
}

impl From<OwnedFd> for PidFd {
    fn from(fd: OwnedFd) -> PidFd {
        PidFd(fd)
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The session of process `id`. `None` if its leader is outside this pid namespace, or `id` is
/// gone.
pub fn session_of(id: u32) -> Option<u32> {
    // SAFETY: takes and returns numbers only.
    let session = unsafe { libc::getsid(id as i32) };
    u32::try_from(session).ok().filter(|&id| id != 0)
}

/// The group of process `id`. `None` if its leader is outside this pid namespace, or `id` is gone.
pub fn group_of(id: u32) -> Option<u32> {
    // SAFETY: takes and returns numbers only.
    let group = unsafe { libc::getpgid(id as i32) };
    u32::try_from(group).ok().filter(|&id| id != 0)
}

/// True while a thread of the process `id` runs. A leader that has ended counts while other threads
/// live. If in doubt, it runs.
pub fn is_running(id: u32) -> bool {
    match PidFd::open(id) {
        Ok(process) => !process.has_exited(),
        Err(error) => error.raw_os_error() != Some(libc::ESRCH),
    }
}

/// A child of this process that has ended and is not reaped. It stays so.
pub fn ended_child() -> Option<u32> {
    // SAFETY: an all-zero siginfo_t is valid.
    let mut ended: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `ended` is live and written only.
    let found = unsafe { libc::waitid(libc::P_ALL, 0, &mut ended, options) };
    if found != 0 {
        return None;
    }
    // SAFETY: the kernel has filled it, or left it zero; both are what waitid(2) fills in.
    let id = unsafe { ended.si_pid() };
    u32::try_from(id).ok().filter(|&id| id != 0)
}

/// Whether two processes have one address space now.
///
/// Errors: one of them is gone, this process may not trace both, or the kernel was built without
/// kcmp(2).
pub fn share_memory(one: u32, other: u32) -> io::Result<bool> {
    const KCMP_VM: usize = 1;
    // SAFETY: takes numbers only.
    match unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        order => Ok(order == 0),
    }
}

/// Reads `dst.len()` bytes of the process's memory at `address`. A missing page there faults to its
/// userfaultfd: never call this from a thread that serves it.
///
/// Errors: fewer bytes than asked, or none of them readable.
pub fn read_memory(id: u32, address: u64, dst: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec {
        iov_base: dst.as_mut_ptr().cast(),
        iov_len: dst.len(),
    };
    let remote = libc::iovec {
        iov_base: address as *mut _,
        iov_len: dst.len(),
    };
    // SAFETY: the kernel writes at most `dst.len()` bytes into `dst`, exclusively borrowed; the
    // remote address is only read, in the other process.
    let got = unsafe { libc::process_vm_readv(id as i32, &local, 1, &remote, 1, 0) };
    match got {
        -1 => Err(io::Error::last_os_error()),
        n if n as usize == dst.len() => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// The address of a thread's robust-futex list head. glibc keeps it in the thread's control block,
/// so it shows where that is. `None` if the thread has none or is gone.
pub fn robust_list_head(tid: u32) -> Option<u64> {
    let (mut head, mut len) = (0u64, 0usize);
    // SAFETY: get_robust_list writes one pointer and one size through the two pointers, both live
    // locals.
    let result = unsafe {
        let head = std::ptr::from_mut(&mut head);
        let len = std::ptr::from_mut(&mut len);
        libc::syscall(libc::SYS_get_robust_list, tid, head, len)
    };
    (result == 0 && head != 0).then_some(head)
}

/// Takes a descriptor by its number, with which this process was started. It is closed on exec from
/// now on. Each number is taken once.
///
/// Errors: no such descriptor.
pub fn take_inherited(number: i32) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: F_SETFD takes numbers only, and fails when the descriptor is not open.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: open (checked), and handed to us alone by the process that started this one; nothing
    // else here owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Bytes that cannot be guessed.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0u8; N];
    // SAFETY: the kernel writes at most `N` bytes into `bytes`, a live local.
    match unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) } {
        got if got == N as isize => Ok(bytes),
        -1 => Err(io::Error::last_os_error()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Gives the memory of the heap that is free back to the kernel. Some 100 us; other threads that
/// allocate wait meanwhile.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointer, and the allocator locks its own lists.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The calling thread's id.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// CPU time that a thread of this process has used, exact to the nanosecond. 0.3 us. For other
/// processes see `procfs::thread_run_time`.
///
/// Errors: it has ended.
pub fn thread_run_time(tid: u32) -> io::Result<Duration> {
    // The clock of thread `tid`, as the kernel numbers clocks: see `clock_getcpuclockid`.
    let clock = (!(tid as libc::clockid_t) << 3) | 6;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is live and written only.
    match unsafe { libc::clock_gettime(clock, &mut time) } {
        0 => Ok(Duration::new(time.tv_sec as u64, time.tv_nsec as u32)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// CPU time that the calling thread has used. One system call, some 0.2 us.
pub fn own_run_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The CPU that the caller runs on, as of now.
pub fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

/// CPUs that a thread (0: the caller) may run on, ascending, of the first 1024.
pub fn allowed_cpus(tid: u32) -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(Pid::from_raw(tid as i32))?;
    Ok((0..1024).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Binds a thread (0: the caller) to CPUs.
pub fn set_affinity(tid: u32, cpus: &[usize]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    Ok(rustix::thread::sched_setaffinity(
        Pid::from_raw(tid as i32),
        &set,
    )?)
}

/// Gives a thread (0: the caller) real-time FIFO priority. Needs `CAP_SYS_NICE`. Threads that it
/// starts do not inherit it.
pub fn set_fifo(tid: u32, priority: i32) -> io::Result<()> {
    set_scheduler(tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, priority)
}

/// Ends the priority that [`set_fifo`] gave.
pub fn set_fair(tid: u32) -> io::Result<()> {
    set_scheduler(tid, libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0)
}

/// Has a thread run only while no other wants its CPU. Threads that it starts run as others do.
pub fn set_idle(tid: u32) -> io::Result<()> {
    set_scheduler(tid, libc::SCHED_IDLE | libc::SCHED_RESET_ON_FORK, 0)
}

fn set_scheduler(tid: u32, policy: i32, priority: i32) -> io::Result<()> {
    // The call itself: musl's function of that name always refuses.
    // SAFETY: the kernel's sched_param is one int, which is live and read only.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setscheduler, tid as i32, policy, &priority) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Keeps all present and future memory of this process in RAM.
pub fn lock_all_memory() -> io::Result<()> {
    use rustix::mm::MlockAllFlags;
    Ok(rustix::mm::mlockall(
        MlockAllFlags::CURRENT | MlockAllFlags::ONFAULT | MlockAllFlags::FUTURE,
    )?)
}

/// Makes orphaned descendants this process's children.
pub fn become_subreaper() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(
        rustix::process::getpid(),
    ))?)
}

/// Asks the kernel to kill others first when memory is short: other processes need what this one
/// holds. Without CAP_SYS_RESOURCE it can only undo a worse score.
pub fn spare_from_oom() {
    const FILE: &str = "/proc/self/oom_score_adj";
    let now = std::fs::read_to_string(FILE).unwrap_or_default();
    let now: i32 = now.trim().parse().unwrap_or(0);
    for score in [-900, 0] {
        if score < now && std::fs::write(FILE, score.to_string()).is_ok() {
            return;
        }
    }
}

/// Raises the limit of open descriptors as far as allowed. Returns it.
pub fn raise_open_files_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: now.maximum,
            maximum: now.maximum,
        },
    );
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Starts a process that shares this one's *descriptor table* and runs `job`. When this process is
/// killed, all its descriptors stay open there, even those received a moment before. The process
/// ends when `job` returns. If `job` panics, it waits for ever with everything open. Returns its
/// id.
///
/// Call it while the process has one thread: the child is a copy of that thread, and of the heap
/// and the locks.
pub fn spawn_fd_holder(job: impl FnOnce()) -> io::Result<u32> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // The child has its name before it has run: until then nothing else tells it from its parent.
    let name = rustix::thread::name()?;
    rustix::thread::set_name(c"uc-fds")?;
    // SAFETY: clone without CLONE_VM is fork with a shared descriptor table; the caller's process
    // has one thread, so no thread holds a lock of the copy, and the child never returns.
    let id = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if id == 0 {
        hold_while(job);
    }
    let failed = io::Error::last_os_error();
    let _ = rustix::thread::set_name(&name);
    if id < 0 {
        return Err(failed);
    }
    Ok(id as u32)
}

fn hold_while(job: impl FnOnce()) -> ! {
    let all = u64::MAX;
    // Nothing of the parent's state is touched.
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) };
    // SAFETY: the set is live, and of 8 bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, 0, 8) };
    // SAFETY: takes no arguments.
    unsafe { libc::setsid() };
    // The caller's hook might end the process, which would close everything.
    std::panic::set_hook(Box::new(|_| {}));
    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)).is_ok() {
        // SAFETY: ends this process; nothing of it is needed any more.
        unsafe { libc::_exit(0) }
    }
    pause_for_ever()
}

/// Has all threads of this process share one heap. Otherwise the allocator of glibc makes up to
/// eight for each CPU, and keeps what they had at their peak. For processes that seldom allocate.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator's; it takes its own lock.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Closes the standard streams: readers of their other ends must not wait for this process.
pub fn close_standard_streams() {
    for number in 0..=2 {
        // SAFETY: takes a number; nothing here owns these three.
        unsafe { libc::close(number) };
    }
}

/// Forks. Returns the child's id, and `None` in the child.
///
/// Call it while the process has one thread: the child is a copy of that thread, and of the heap
/// and the locks.
pub fn fork() -> io::Result<Option<u32>> {
    // SAFETY: the caller's process has one thread (above), so no thread holds a lock of the copy.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        id => Ok(Some(id as u32)),
    }
}

/// Waits for the end of a child. `None`: it is none of ours.
pub fn wait_for(id: u32) -> Option<std::process::ExitStatus> {
    use std::os::unix::process::ExitStatusExt;
    let pid = pid(id).ok()?;
    loop {
        match rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()) {
            Ok(Some((_, status))) => {
                return Some(std::process::ExitStatus::from_raw(status.as_raw()));
            }
            Err(rustix::io::Errno::INTR) => {}
            _ => return None,
        }
    }
}

/// Moves this process to a process group of its session; 0: to one of its own.
pub fn move_to_group(group: u32) -> io::Result<()> {
    Ok(rustix::process::setpgid(None, Pid::from_raw(group as i32))?)
}

/// Begins a session without a terminal. Errors: the process leads a process group.
pub fn begin_session() -> io::Result<()> {
    rustix::process::setsid()?;
    Ok(())
}

/// Forks a process that does nothing until it is killed; it dies with the caller's thread. Its
/// memory is a copy of this process's. The caller kills and reaps it.
pub(crate) fn spawn_waiting_child() -> io::Result<u32> {
    // SAFETY: clone without flags is fork; the child uses raw system calls only, touches no lock or
    // heap, never returns.
    let id = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    match id {
        -1 => Err(io::Error::last_os_error()),
        0 => wait_for_death(),
        id => Ok(id as u32),
    }
}

fn wait_for_death() -> ! {
    // Nothing of the parent's state is touched.
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    pause_for_ever()
}

fn pause_for_ever() -> ! {
    loop {
        // SAFETY: takes no arguments.
        unsafe { libc::syscall(libc::SYS_pause) };
    }
}

/// CAP_SYS_PTRACE.
const CAP_SYS_PTRACE: u32 = 19;
/// CAP_SYS_NICE.
const CAP_SYS_NICE: u32 = 23;

/// Whether a user's process has CAP_SYS_PTRACE for those that it starts: in its ambient set, as
/// setpriv(1) and systemd put it there. Root's processes have it by their user.
pub fn passes_ptrace_on() -> bool {
    let ambient = status_hex(std::process::id(), "CapAmb").unwrap_or(0);
    ambient >> CAP_SYS_PTRACE & 1 == 1 && !rustix::process::geteuid().is_root()
}

/// Whether this process has CAP_SYS_PTRACE. Inside a user namespace that says little.
pub fn has_ptrace() -> bool {
    has_effective(CAP_SYS_PTRACE)
}

/// Whether this process may advise the kernel about the memory of another one (CAP_SYS_NICE).
pub fn has_sys_nice() -> bool {
    has_effective(CAP_SYS_NICE)
}

fn has_effective(capability: u32) -> bool {
    let effective = status_hex(std::process::id(), "CapEff").unwrap_or(0);
    effective >> capability & 1 == 1
}

/// Makes this process's files in /proc its own again, as those of a program are: file capabilities
/// on its binary had closed them. Another process of the user still needs the same capabilities to
/// trace it.
pub fn become_dumpable() -> io::Result<()> {
    let dumpable = rustix::process::DumpableBehavior::Dumpable;
    Ok(rustix::process::set_dumpable_behavior(dumpable)?)
}

/// Has `command` started without CAP_SYS_PTRACE in its ambient set.
pub fn keep_ptrace_from(command: &mut Command) {
    let lower = || {
        // SAFETY: PR_CAP_AMBIENT_LOWER takes numbers only, and changes this process alone.
        let result = unsafe {
            libc::prctl(
                libc::PR_CAP_AMBIENT,
                libc::PR_CAP_AMBIENT_LOWER as libc::c_ulong,
                libc::c_ulong::from(CAP_SYS_PTRACE),
                0 as libc::c_ulong,
                0 as libc::c_ulong,
            )
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: runs between fork and exec: prctl(2) is a system call, and nothing is allocated.
    unsafe { command.pre_exec(lower) };
}

/// A hexadecimal number from `/proc/PID/status`: `CapEff`, `SigBlk`.
pub(crate) fn status_hex(id: u32, key: &str) -> Option<u64> {
    let text = procfs::text_of(&format!("/proc/{id}/status")).ok()?;
    u64::from_str_radix(procfs::status_line(&text, key)?.trim(), 16).ok()
}
