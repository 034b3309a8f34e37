//! Reads /proc: the machine's memory, and of a process its mappings, sizes, threads, and the CPU
//! that a thread runs on.
//!
//! The names in these texts are the program's: of files that it maps, and of its threads. They may
//! be any bytes, so no text here has to be UTF-8. A byte that is not becomes `\u{fffd}`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use undercroft_base::{Bytes, PageCount, VirtRange};

use crate::object::FileId;

/// Physical memory of this machine. `None` if `/proc/meminfo` does not say.
pub fn total_memory() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let mut lines = text.lines();
    let rest = lines.find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.checked_mul(1024)?))
}

/// Reads a file of /proc to its end, whatever bytes the names in it have. `text` is reused.
pub(crate) fn read_text(file: &mut impl Read, text: &mut String) -> io::Result<()> {
    let mut bytes = std::mem::take(text).into_bytes();
    bytes.clear();
    file.read_to_end(&mut bytes)?;
    *text = String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    Ok(())
}

/// Room for the text of most files. An empty buffer grows from 32 bytes on, with a read for each
/// size.
const TEXT_BYTES: usize = 16 << 10;

/// The text of a file of /proc.
pub(crate) fn text_of(path: &str) -> io::Result<String> {
    let mut text = String::with_capacity(TEXT_BYTES);
    read_text(&mut File::open(path)?, &mut text)?;
    Ok(text)
}

/// A line of `/proc/PID/maps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vma<'a> {
    /// Its pages.
    pub range: VirtRange,
    /// `r`.
    pub read: bool,
    /// `w`.
    pub write: bool,
    /// `x`.
    pub exec: bool,
    /// `s` rather than `p`.
    pub shared: bool,
    /// 0 for anonymous memory.
    pub inode: u64,
    /// Path or `[name]`; empty for plain anonymous memory.
    pub name: &'a str,
}

impl<'a> Vma<'a> {
    /// Parses one line. `None` if it is not one.
    pub fn parse(line: &'a str) -> Option<Vma<'a>> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let perms = fields.next()?.as_bytes();
        let (_offset, _device) = (fields.next()?, fields.next()?);
        let inode = fields.next()?.parse().ok()?;
        let name = fields.next().unwrap_or("").trim();
        let address = |text| u64::from_str_radix(text, 16).ok();
        Some(Vma {
            range: VirtRange::of_addresses(address(start)?, address(end)?),
            read: perms.first() == Some(&b'r'),
            write: perms.get(1) == Some(&b'w'),
            exec: perms.get(2) == Some(&b'x'),
            shared: perms.get(3) == Some(&b's'),
            inode,
            name,
        })
    }

    /// Private anonymous memory, the heap included: what can be managed. Stacks and kernel mappings
    /// have names.
    pub fn is_private_anonymous(&self) -> bool {
        !self.shared
            && self.inode == 0
            && (self.name.is_empty() || self.name == "[heap]" || self.name.starts_with("[anon:"))
    }
}

/// The mappings of this file in a text of `/proc/PID/maps`, by address: each with the byte of the
/// file at which it begins, and whether it is shared.
pub fn mappings_of(maps: &str, file: FileId) -> impl Iterator<Item = (VirtRange, u64, bool)> {
    maps.lines().filter_map(move |line| {
        let vma = Vma::parse(line).filter(|vma| vma.inode == file.inode)?;
        let mut fields = line.split(' ').skip(2);
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let offset = hex(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let device = rustix::fs::makedev(hex(major)? as u32, hex(minor)? as u32);
        (device == file.device).then_some((vma.range, offset, vma.shared))
    })
}

/// An open `/proc/PID/task/TID/status`. It stays with that thread, even if another gets its number.
#[derive(Debug)]
pub struct ThreadStatus(File);

impl From<OwnedFd> for ThreadStatus {
    fn from(fd: OwnedFd) -> ThreadStatus {
        ThreadStatus(File::from(fd))
    }
}

impl AsFd for ThreadStatus {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Some lines of a thread's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// State letter: `T` stopped, `Z` ended.
    pub state: char,
}

impl ThreadStatus {
    /// Errors: thread `tid` is not one of process `pid`.
    pub fn open(pid: u32, tid: u32) -> io::Result<ThreadStatus> {
        let path = format!("/proc/{pid}/task/{tid}/status");
        Ok(ThreadStatus(File::open(path)?))
    }

    /// Reads it: 9 us. Errors: it has ended.
    pub fn read(&self) -> io::Result<Status> {
        let mut buffer = [0u8; 4096];
        let got = self.0.read_at(&mut buffer, 0)?;
        let text = String::from_utf8_lossy(&buffer[..got]);
        Status::parse(&text).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Status {
    /// `None`: the text has no state.
    pub(crate) fn parse(text: &str) -> Option<Status> {
        // The name may contain anything except a line's end.
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
        Some(Status {
            state: value("State:")?.trim_start().chars().next()?,
        })
    }
}

/// True while the kernel writes the core of process `pid`.
pub fn is_dumping_core(pid: u32) -> bool {
    let text = text_of(&format!("/proc/{pid}/status")).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.strip_prefix("CoreDumping:"))
        .any(|value| value.trim() == "1")
}

/// True when `tid` is a thread of process `pid`.
pub fn is_thread_of(pid: u32, tid: u32) -> bool {
    std::fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or(false)
}

/// Reads `/proc/PID/maps` into `text` (reused).
pub fn read_maps(pid: u32, text: &mut String) -> io::Result<()> {
    read_text(&mut File::open(format!("/proc/{pid}/maps"))?, text)
}

/// An open `/proc/PID/task`, which counts the threads of a process.
#[derive(Debug)]
pub struct Tasks(File);

impl From<OwnedFd> for Tasks {
    fn from(fd: OwnedFd) -> Tasks {
        Tasks(File::from(fd))
    }
}

impl AsFd for Tasks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Tasks {
    /// Opens it.
    pub fn open(pid: u32) -> io::Result<Tasks> {
        Ok(Tasks(File::open(format!("/proc/{pid}/task"))?))
    }

    /// The threads of the process; 0 after it has exited. Processes that share its memory do not
    /// count. Cost: one fstat(2).
    pub fn count(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.nlink().saturating_sub(2)) // `.` and `..`
    }

    /// The children of thread `tid`. Errors: it has ended, or the kernel was built without this
    /// list. Cost: some 3 us and the children.
    pub fn children(&self, tid: u32) -> io::Result<Vec<u32>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.0, format!("{tid}/children"), flags, Mode::empty())?;
        let mut text = String::new();
        read_text(&mut File::from(file), &mut text)?;
        let numbers = text.split_ascii_whitespace();
        Ok(numbers.filter_map(|id| id.parse().ok()).collect())
    }
}

/// An open `/proc/PID/statm`: address space and resident size.
#[derive(Debug)]
pub struct Statm(File);

/// The sizes in `statm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Address space.
    pub virtual_size: PageCount,
    /// In memory, with file pages and shared memory.
    pub resident: PageCount,
    /// The part of these that are file pages and shared memory.
    pub shared: PageCount,
}

impl Statm {
    /// Opens it.
    pub fn open(pid: u32) -> io::Result<Statm> {
        Ok(Statm(File::open(format!("/proc/{pid}/statm"))?))
    }

    /// Reads it; about 2 us. Zeros when the process has exited.
    pub fn read(&self) -> io::Result<Sizes> {
        let mut buffer = [0u8; 128];
        let got = self.0.read_at(&mut buffer, 0)?;
        Ok(Sizes::parse(&buffer[..got]))
    }
}

impl Sizes {
    /// Pages in memory that are neither of files nor shared memory.
    pub fn anonymous(&self) -> PageCount {
        PageCount(self.resident.0.saturating_sub(self.shared.0))
    }

    /// A number that is missing is 0.
    pub(crate) fn parse(text: &[u8]) -> Sizes {
        let text = std::str::from_utf8(text).unwrap_or("");
        let mut numbers = text
            .split_ascii_whitespace()
            .map(|n| PageCount(n.parse().unwrap_or(0)));
        Sizes {
            virtual_size: numbers.next().unwrap_or_default(),
            resident: numbers.next().unwrap_or_default(),
            shared: numbers.next().unwrap_or_default(),
        }
    }
}

/// Ids of the processes that exist.
pub fn processes() -> io::Result<Vec<u32>> {
    let entries = std::fs::read_dir("/proc")?;
    let number = |entry: io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    };
    Ok(entries.filter_map(number).collect())
}

/// The environment that a process was started with, if it has not overwritten it: `NAME=VALUE`,
/// each ended by a zero byte.
pub fn environment(pid: u32) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/environ"))
}

/// Ids of a process's threads, or of the children of all of them.
pub fn thread_ids(pid: u32) -> io::Result<Vec<u32>> {
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        ids.extend(
            entry?
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<u32>().ok()),
        );
    }
    Ok(ids)
}

/// Ids of a process's children.
pub fn children(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for tid in thread_ids(pid).unwrap_or_default() {
        let path = format!("/proc/{pid}/task/{tid}/children");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        found.extend(
            text.split_ascii_whitespace()
                .filter_map(|id| id.parse::<u32>().ok()),
        );
    }
    found
}

/// The CPU that a thread last ran on, from field 39 of its `stat`. About 10 us.
pub fn thread_cpu(tid: u32) -> Option<usize> {
    ThreadStat::open(tid).ok()?.read().map(|(_, cpu)| cpu)
}

/// The name of a thread, at most 15 bytes. `None`: it has ended.
pub fn thread_name(tid: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{tid}/comm")).ok()?;
    Some(name.trim_end().to_owned())
}

/// An open `/proc/TID/task/TID/stat`: in `/proc/TID/stat` the kernel adds up all threads of the
/// process. It stays with that thread, even if another gets its number.
#[derive(Debug)]
pub struct ThreadStat(File);

impl ThreadStat {
    /// Errors: there is no thread `tid`.
    pub fn open(tid: u32) -> io::Result<ThreadStat> {
        let path = format!("/proc/{tid}/task/{tid}/stat");
        Ok(ThreadStat(File::open(path)?))
    }

    /// Its state letter (`R`: it runs, or could run), and the CPU that it runs on or waits for.
    /// `None`: it has ended. About 5 us.
    pub fn read(&self) -> Option<(char, usize)> {
        let mut buffer = [0u8; 1024];
        let got = self.0.read_at(&mut buffer, 0).ok()?;
        let stat = &buffer[..got];
        let state = stat_field(stat, 3)?.chars().next()?;
        Some((state, stat_field(stat, 39)?.parse().ok()?))
    }
}

/// An open `/proc/TID/schedstat`. It stays with that thread, even if another gets its number.
#[derive(Debug)]
pub struct RunTime(File);

impl RunTime {
    /// Errors: there is no thread `tid`.
    pub fn open(tid: u32) -> io::Result<RunTime> {
        Ok(RunTime(File::open(format!("/proc/{tid}/schedstat"))?))
    }

    /// CPU time that the thread has used; exact to the nanosecond while it does not run. About 2
    /// us. `None`: it has ended, or the kernel does not count.
    pub fn read(&self) -> Option<Duration> {
        let mut buffer = [0u8; 128];
        let got = self.0.read_at(&mut buffer, 0).ok()?;
        let text = std::str::from_utf8(&buffer[..got]).ok()?;
        let nanos = text.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Duration::from_nanos(nanos)).filter(|time| !time.is_zero())
    }
}

/// An open `/proc/loadavg`.
#[derive(Debug)]
pub struct Running(File);

impl Running {
    /// Errors: there is no such file here, or it is not the kernel's own. In some containers
    /// another program makes it up.
    pub fn open() -> io::Result<Running> {
        let file = File::open("/proc/loadavg")?;
        if rustix::fs::fstatfs(&file)?.f_type != rustix::fs::PROC_SUPER_MAGIC {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(Running(file))
    }

    /// Threads of the machine that run or could run, the reader too. A thread that the kernel holds
    /// back for its group's share of CPU time is not among them. `None`: the file says nothing.
    /// About 1 us, and more on many CPUs: the kernel sums over them.
    pub fn read(&self) -> Option<u32> {
        let mut buffer = [0u8; 128];
        let got = self.0.read_at(&mut buffer, 0).ok()?;
        running_of(std::str::from_utf8(&buffer[..got]).ok()?)
    }
}

/// The fourth field of `/proc/loadavg` up to its slash.
pub(crate) fn running_of(text: &str) -> Option<u32> {
    let (running, _) = text.split_ascii_whitespace().nth(3)?.split_once('/')?;
    running.parse().ok()
}

/// The state letter of a process (`Z` for a zombie).
pub fn process_state(pid: u32) -> Option<char> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    stat_field(&text, 3)?.chars().next()
}

/// How a process has ended, as wait(2) gives it, of one that its parent has not waited for; or its
/// first thread, of one with others. `None`: it runs, is gone, or may not be looked at.
pub fn exit_status(pid: u32) -> Option<i32> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let has_ended = stat_field(&text, 3)? == "Z";
    let status = stat_field(&text, 52)?.parse().ok()?;
    has_ended.then_some(status)
}

/// True if a process is stopped, by job control or in the hands of a debugger.
pub fn is_stopped(pid: u32) -> bool {
    matches!(process_state(pid), Some('T' | 't'))
}

/// True if a process is about to end: it has a SIGKILL that it has not seen, or is in its exit.
pub fn is_ending(pid: u32) -> bool {
    const KILL: u64 = 1 << 8;
    const EXITING: u64 = 4;
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let flags: Option<u64> = stat_field(&stat, 9).and_then(|flags| flags.parse().ok());
    let status = text_of(&format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().filter_map(|line| {
        let set = line
            .strip_prefix("SigPnd:")
            .or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(set.trim(), 16).ok()
    });
    flags.is_some_and(|flags| flags & EXITING != 0)
        || pending.fold(0, |all, set| all | set) & KILL != 0
}

/// User and system time of a process, in clock ticks.
pub fn cpu_ticks(pid: u32) -> Option<u64> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let user: u64 = stat_field(&text, 14)?.parse().ok()?;
    let system: u64 = stat_field(&text, 15)?.parse().ok()?;
    Some(user + system)
}

/// User and system time that one thread has used: exact to a tick.
pub fn thread_time(tid: u32) -> Option<Duration> {
    // See `ThreadStat`.
    let text = std::fs::read(format!("/proc/{tid}/task/{tid}/stat")).ok()?;
    let user: u64 = stat_field(&text, 14)?.parse().ok()?;
    let system: u64 = stat_field(&text, 15)?.parse().ok()?;
    // A tick is a hundredth of a second for every program.
    Some(Duration::from_millis(10 * (user + system)))
}

/// How a thread has spent its time since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTimes {
    /// On a CPU.
    pub running: Duration,
    /// Able to run, and waiting for a CPU.
    pub queued: Duration,
    /// Of `running`, in the kernel: exact to a tick.
    pub system: Duration,
    /// Times that it gave up its CPU to wait for something.
    pub waits: u64,
}

impl ThreadTimes {
    /// Thread `tid` of process `pid`. `None`: it has ended, or the kernel does not count. About 20
    /// us.
    pub fn read(pid: u32, tid: u32) -> Option<ThreadTimes> {
        let text = |file| std::fs::read(format!("/proc/{pid}/task/{tid}/{file}")).ok();
        let status = text("status")?;
        ThreadTimes::parse(&text("schedstat")?, &text("stat")?, &status)
    }

    /// `None`: a number is missing, or the kernel does not count.
    pub(crate) fn parse(schedstat: &[u8], stat: &[u8], status: &[u8]) -> Option<ThreadTimes> {
        let mut numbers = std::str::from_utf8(schedstat)
            .ok()?
            .split_ascii_whitespace();
        let mut next = || numbers.next()?.parse().ok().map(Duration::from_nanos);
        let (running, queued) = (next()?, next()?);
        let ticks: u64 = stat_field(stat, 15)?.parse().ok()?;
        let status = String::from_utf8_lossy(status);
        let waits = status_line(&status, "voluntary_ctxt_switches")?
            .trim()
            .parse();
        Some(ThreadTimes {
            running,
            queued,
            system: Duration::from_millis(10 * ticks),
            waits: waits.ok()?,
        })
        .filter(|times| !times.running.is_zero())
    }
}

/// Field `number` (as in proc(5), from 3 on) of a stat line, whatever the command name holds.
pub(crate) fn stat_field(stat: &[u8], number: usize) -> Option<&str> {
    let close = stat.iter().rposition(|byte| *byte == b')')?;
    let rest = std::str::from_utf8(stat.get(close + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(number - 3)
}

/// A number from `/proc/PID/status`: `VmLck`, `VmPin` (kB), `Threads`, `PPid`.
pub fn status_number(pid: u32, key: &str) -> Option<u64> {
    let path = format!("/proc/{pid}/status");
    let mut room = [0u8; STATUS_ROOM];
    let begin = beginning_of(&path, &mut room).ok()?;
    let number = |text: &str| {
        status_line(text, key)?
            .split_ascii_whitespace()
            .next()?
            .parse()
            .ok()
    };
    match number(&String::from_utf8_lossy(begin)) {
        // A long list of groups comes before some keys.
        None if begin.len() == STATUS_ROOM => number(&text_of(&path).ok()?),
        found => found,
    }
}

/// `/proc/PID/status` is shorter, unless the process has hundreds of groups.
const STATUS_ROOM: usize = 4096;

/// The beginning of a file of /proc, as much as there is room for, by one read.
pub(crate) fn beginning_of<'a>(path: &str, room: &'a mut [u8]) -> io::Result<&'a [u8]> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty())?;
    let got = rustix::io::read(&file, &mut *room)?;
    Ok(&room[..got])
}

/// The text behind `key:` in a status text.
pub(crate) fn status_line<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
}

/// How many mappings the kernel allows one process (`vm.max_map_count`).
pub fn mappings_max() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(65_530)
}

/// For each (VmFlag, list): appends the process's mappings that have the flag: `wf` wiped on fork,
/// `dc` not copied, `lo` locked. Reads smaps, for which the kernel walks every page: a few ms a
/// GiB.
pub fn mappings_with_flags(pid: u32, wanted: &mut [(&str, &mut Vec<VirtRange>)]) -> io::Result<()> {
    let text = text_of(&format!("/proc/{pid}/smaps"))?;
    flagged(&text, wanted);
    Ok(())
}

/// [`mappings_with_flags`] of this text.
pub(crate) fn flagged(text: &str, wanted: &mut [(&str, &mut Vec<VirtRange>)]) {
    let mut current = None;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            for (flag, found) in wanted.iter_mut() {
                let has = flags.split_ascii_whitespace().any(|f| f == *flag);
                found.extend(current.filter(|_| has));
            }
        } else if let Some(vma) = Vma::parse(line) {
            // Every line is tried: keys such as `Anonymous:` begin with a hexadecimal digit too.
            current = Some(vma.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_lines_parse_with_and_without_names() {
        let line = "7f0000000000-7f0000002000 rw-p 00000000 00:00 0 ";
        let vma = Vma::parse(line).unwrap();
        assert_eq!((vma.range.count().0, vma.write, vma.name), (2, true, ""));
        assert!(vma.is_private_anonymous());
        let line = "5600-7000 r-xp 0001 fe:00 1234                     /usr/bin/a b";
        let vma = Vma::parse(line).unwrap();
        assert_eq!(
            (vma.name, vma.inode, vma.exec),
            ("/usr/bin/a b", 1234, true)
        );
        assert!(!vma.is_private_anonymous());
        assert!(Vma::parse("nonsense").is_none());
    }

    #[test]
    fn mappings_of_a_file_are_told_from_those_of_others_with_its_number() {
        let maps = "1000-3000 rw-s 00000000 00:01 77 /memfd:a (deleted)\n\
                    3000-4000 r--p 00002000 00:01 77 /memfd:a (deleted)\n\
                    4000-5000 rw-s 00000000 fe:01 77 /home/b\n\
                    5000-6000 rw-s 00000000 00:01 78 /memfd:c (deleted)\n";
        let file = FileId {
            device: 1,
            inode: 77,
        };
        let found: Vec<_> = mappings_of(maps, file).collect();
        let range = VirtRange::of_addresses;
        assert_eq!(
            found,
            [
                (range(0x1000, 0x3000), 0, true),
                (range(0x3000, 0x4000), 0x2000, false)
            ]
        );
    }

    #[test]
    fn a_killed_process_is_ending_and_others_are_not() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        assert!(!is_ending(child.id()) && !is_ending(std::process::id()));
        child.kill().unwrap();
        assert!(is_ending(child.id()), "at once, and until it is waited for");
        child.wait().unwrap();
        assert!(!is_ending(child.id()), "it is gone");
    }

    #[test]
    fn stat_fields_are_found_behind_odd_command_names() {
        let stat = b"7 (a) b) c) S 1 7 7 0 -1 4194560 97 0 0 0 12 34 0 0";
        assert_eq!(stat_field(stat, 3), Some("S"));
        assert_eq!(
            (stat_field(stat, 14), stat_field(stat, 15)),
            (Some("12"), Some("34"))
        );
    }

    #[test]
    fn own_numbers_make_sense() {
        let pid = std::process::id();
        assert!(Statm::open(pid).unwrap().read().unwrap().resident.0 > 0);
        assert!(thread_cpu(pid).is_some());
        let (state, cpu) = ThreadStat::open(pid).unwrap().read().unwrap();
        assert!("RSD".contains(state) && cpu < 4096);
        assert!(Running::open().unwrap().read().unwrap() >= 1, "this thread");
        for (text, running) in [
            ("0.20 1.77 3.02 2/312 4711\n", Some(2)),
            ("0.20 1.77 3.02 2", None),
            ("0.20 1.77 3.02 -1/312 4711", None),
            ("", None),
        ] {
            assert_eq!(running_of(text), running, "{text}");
        }
        let this = crate::process::thread_id();
        let before = RunTime::open(this).unwrap();
        // The kernel counts at its next look at this thread.
        std::thread::sleep(Duration::from_millis(5));
        let before = before.read().unwrap();
        let ran = crate::process::thread_run_time(this).unwrap();
        assert!(ran >= before && ran < Duration::from_secs(60));
        assert!(status_number(pid, "Threads").unwrap() >= 1);
        assert_eq!(status_number(pid, "NoSuchKey"), None);
        assert!(thread_ids(pid).unwrap().contains(&pid));
    }
}
