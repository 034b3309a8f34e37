//! Kind of program in a file: whether its loader can load the shim.
//!
//! The questions are asked with `openat`, `read` and `close` alone. The loader makes these calls
//! too, so a seccomp filter that lets a program start lets them pass.

use crate::raw::{EBADF, PAGE, call3, call6, close, nr};

/// `AT_FDCWD`.
pub(crate) const HERE: usize = -100isize as usize;

/// Bytes that the kernel reads of a file to see its kind.
const HEAD: usize = 256;

/// Most interpreters of interpreters that the kernel follows.
const INTERPRETERS_MAX: usize = 5;

const CLASS_AT: usize = 4;
const MACHINE_AT: usize = 18;
const CLASS_32: u8 = 1;
const CLASS_64: u8 = 2;
const MACHINE_386: u16 = 3;
const MACHINE_X86_64: u16 = 62;

/// Longest name that is looked for in `PATH`, with its directory. A longer one is not looked at.
const PATH_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The shim's own kind, or nothing that can be told.
    Own,
    /// 32-bit x86.
    Narrow,
    /// A program of another machine, whose loader refuses the shim.
    Foreign,
}

/// Where the next image comes from.
pub(crate) enum Target {
    /// A path, from this directory on.
    Path(usize, *const u8),
    /// An open file.
    Open(usize),
    /// A name that is searched in `PATH` unless it has a slash.
    Name(*const u8),
}

impl Target {
    /// * `search`: the value of `PATH`, if there is one.
    ///
    /// # Safety
    /// Names are C strings that stay as they are meanwhile.
    pub(crate) unsafe fn kind(&self, search: Option<&[u8]>) -> Kind {
        match *self {
            Target::Path(directory, path) => {
                // SAFETY: the caller's promise.
                let head = unsafe { Head::of(directory, path) };
                head.map_or(Kind::Own, |head| head.kind())
            }
            Target::Open(file) => {
                let head = Head::read(file).or_else(|| Head::read_again(file));
                head.map_or(Kind::Own, |head| head.kind())
            }
            Target::Name(name) => {
                // SAFETY: the caller's promise.
                let bytes = unsafe { crate::library::bytes_of(name) };
                if bytes.contains(&b'/') {
                    // SAFETY: the caller's promise.
                    return unsafe { Target::Path(HERE, name).kind(None) };
                }
                search_for(bytes, search.unwrap_or(b"/bin:/usr/bin"))
            }
        }
    }
}

/// The kind of the first file of that name. The C library's search decides what runs, and it may
/// pass over a file that may not be executed.
fn search_for(name: &[u8], search: &[u8]) -> Kind {
    if name.is_empty() {
        return Kind::Own;
    }
    for directory in search.split(|byte| *byte == b':') {
        let mut path = [0u8; PATH_MAX];
        let slash = usize::from(!directory.is_empty());
        let name_at = directory.len() + slash;
        if name_at + name.len() >= PATH_MAX {
            continue;
        }
        path[..directory.len()].copy_from_slice(directory);
        path[directory.len()..name_at].fill(b'/');
        path[name_at..name_at + name.len()].copy_from_slice(name);
        // SAFETY: a C string: the last byte is still 0.
        if let Some(head) = unsafe { Head::of(HERE, path.as_ptr()) } {
            return head.kind();
        }
    }
    Kind::Own
}

/// The beginning of a file.
struct Head {
    bytes: [u8; HEAD],
    count: usize,
}

impl Head {
    /// `None`: it cannot be read.
    ///
    /// # Safety
    /// `path` is a C string that stays as it is meanwhile.
    unsafe fn of(directory: usize, path: *const u8) -> Option<Head> {
        // SAFETY: the caller's promise.
        let file = usize::try_from(unsafe { open(directory, path) }).ok()?;
        let mut head = Head::empty();
        let at = head.bytes.as_mut_ptr() as usize;
        // SAFETY: `bytes` is live and of that length.
        let count = unsafe { call3(nr::READ, file, at, HEAD) };
        close(file);
        head.filled(count)
    }

    /// The same of an open file, whose position stays.
    fn read(file: usize) -> Option<Head> {
        let mut head = Head::empty();
        let at = head.bytes.as_mut_ptr() as usize;
        // SAFETY: `bytes` is live and of that length.
        let count = unsafe { call6(nr::PREAD64, file, at, HEAD, 0, 0, 0) };
        head.filled(count)
    }

    /// The same of a file that was opened by `O_PATH`, which cannot be read.
    fn read_again(file: usize) -> Option<Head> {
        const DIRECTORY: &[u8] = b"/proc/self/fd/";
        const DIGITS: usize = 10;
        let mut path = [0u8; DIRECTORY.len() + DIGITS + 1];
        let (directory, number) = path.split_at_mut(DIRECTORY.len());
        directory.copy_from_slice(DIRECTORY);
        let (mut rest, mut length) = (file as u32, 0);
        while length == 0 || rest > 0 {
            number.copy_within(0..length, 1);
            number[0] = b'0' + (rest % 10) as u8;
            (rest, length) = (rest / 10, length + 1);
        }
        // SAFETY: a C string: the last byte is still 0.
        unsafe { Head::of(HERE, path.as_ptr()) }
    }

    fn empty() -> Head {
        Head {
            bytes: [0; HEAD],
            count: 0,
        }
    }

    fn filled(mut self, count: isize) -> Option<Head> {
        self.count = usize::try_from(count).ok()?;
        Some(self)
    }

    fn kind(mut self) -> Kind {
        for _ in 0..INTERPRETERS_MAX {
            // The kernel wrote the bytes behind the compiler's back.
            let head = core::hint::black_box(&self.bytes[..self.count]);
            let Some(interpreter) = interpreter(head) else {
                return elf_kind(head);
            };
            // Ended by a byte that is no part of it, so there is room.
            let mut path = [0u8; HEAD];
            path[..interpreter.len()].copy_from_slice(interpreter);
            // SAFETY: a C string: the last byte is still 0.
            match unsafe { Head::of(HERE, path.as_ptr()) } {
                Some(next) => self = next,
                None => return Kind::Own,
            }
        }
        Kind::Own
    }
}

/// The interpreter of a script. `None`: it is no script.
fn interpreter(head: &[u8]) -> Option<&[u8]> {
    let is_blank = |byte: &u8| *byte == b' ' || *byte == b'\t';
    let line = head.strip_prefix(b"#!")?;
    let begin = line.iter().position(|byte| !is_blank(byte))?;
    let line = &line[begin..];
    let ends = |byte: &u8| is_blank(byte) || *byte == b'\n' || *byte == 0;
    Some(&line[..line.iter().position(ends).unwrap_or(line.len())])
}

fn elf_kind(head: &[u8]) -> Kind {
    if head.len() < MACHINE_AT + 2 || !head.starts_with(b"\x7fELF") {
        return Kind::Own;
    }
    let machine = u16::from_le_bytes([head[MACHINE_AT], head[MACHINE_AT + 1]]);
    match (head[CLASS_AT], machine) {
        (CLASS_64, MACHINE_X86_64) => Kind::Own,
        (CLASS_32, MACHINE_386) => Kind::Narrow,
        _ => Kind::Foreign,
    }
}

/// Opens a file to read, without waiting. Returns the descriptor or the negative error.
///
/// # Safety
/// `path` is a C string that stays as it is meanwhile.
pub(crate) unsafe fn open(directory: usize, path: *const u8) -> isize {
    const FLAGS: usize = 0o2000000 | 0o4000 | 0o400; // O_CLOEXEC, O_NONBLOCK, O_NOCTTY
    // SAFETY: the caller's promise.
    unsafe { call6(nr::OPENAT, directory, path as usize, FLAGS, 0, 0, 0) }
}

/// With no descriptor free now: whether one is free in the next image, because it closes at exec.
pub(crate) fn descriptor_will_be_free() -> bool {
    const NUMBER_OF_FILES: usize = 7;
    const GETFD: usize = 1;
    let mut limit = [u64::MAX; 2];
    let at = limit.as_mut_ptr() as usize;
    // SAFETY: a live pair of numbers, which the kernel writes.
    unsafe { call6(nr::PRLIMIT64, 0, NUMBER_OF_FILES, 0, at, 0, 0) };
    // SAFETY: live; volatile because the kernel wrote behind the compiler's back.
    let limit = unsafe { core::ptr::read_volatile(&limit[0]) };
    // Of a table that is larger, some descriptor is taken to close.
    limit > PAGE as u64
        || (0..limit as usize).any(|descriptor| {
            // SAFETY: takes numbers.
            let flags = unsafe { call3(nr::FCNTL, descriptor, GETFD, 0) };
            flags == EBADF || flags > 0
        })
}
