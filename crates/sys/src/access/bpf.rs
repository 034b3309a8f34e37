//! The `bpf` calls that are needed: array maps, one iterator program, its runs. See bpf(2) and
//! `include/uapi/linux/bpf.h`.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use undercroft_base::BASE_PAGE_BYTES;

use super::AccessError;
use crate::mapping::SharedMemory;

const MAP_CREATE: u32 = 0;
const PROG_LOAD: u32 = 5;
const LINK_CREATE: u32 = 28;
const ITER_CREATE: u32 = 33;

const MAP_TYPE_ARRAY: u32 = 2;
const MMAPABLE: u32 = 1 << 10;
const PROG_TYPE_TRACING: u32 = 26;
const TRACE_ITER: u32 = 28;

/// Room for the verifier's log; the end of it matters.
const LOG_BYTES: usize = 1 << 18;

/// Most repetitions of a load that was interrupted.
const LOADS_MAX: u32 = 20;

const NAME_BYTES: usize = 16;

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    name: [u8; NAME_BYTES],
    rest: [u32; 5],
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    name: [u8; NAME_BYTES],
    ifindex: u32,
    expected_attach_type: u32,
    btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    line_info_rec_size: u32,
    line_info: u64,
    line_info_cnt: u32,
    attach_btf_id: u32,
    attach_prog_fd: u32,
    rest: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
    iter_info: u64,
    iter_info_len: u32,
    rest: u32,
}

/// `union bpf_iter_link_info`, of an iterator over tasks.
#[repr(C)]
#[derive(Default)]
struct TaskInfo {
    tid: u32,
    pid: u32,
    pid_fd: u32,
    rest: u32,
}

#[repr(C)]
#[derive(Default)]
struct IterCreate {
    link_fd: u32,
    flags: u32,
}

const _: () = assert!(size_of::<MapCreate>() == 64 && size_of::<ProgLoad>() == 120);

/// Issues one command that returns a descriptor.
///
/// # Safety
/// `T` is the `repr(C)` head of `union bpf_attr` for `command`. What it points to is live, and as
/// long as it says.
unsafe fn call<T>(command: u32, attributes: &mut T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of a live structure, and what it points to
    // (caller's promise).
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn name(text: &CStr) -> [u8; NAME_BYTES] {
    let mut name = [0; NAME_BYTES];
    let bytes = text.to_bytes();
    name[..bytes.len()].copy_from_slice(bytes);
    name
}

/// An array map of `count` values of `bytes` each (a multiple of 8), mapped.
pub(super) fn array(of: &CStr, bytes: usize, count: usize) -> Result<SharedMemory, AccessError> {
    let failed = |error| AccessError::of("a BPF map", error, String::new());
    let mut create = MapCreate {
        map_type: MAP_TYPE_ARRAY,
        key_size: 4,
        value_size: bytes as u32,
        max_entries: count as u32,
        map_flags: MMAPABLE,
        name: name(of),
        ..MapCreate::default()
    };
    // SAFETY: MAP_CREATE takes these 64 bytes, which point to nothing.
    let fd = unsafe { call(MAP_CREATE, &mut create) }.map_err(failed)?;
    let len = (bytes * count).next_multiple_of(BASE_PAGE_BYTES);
    SharedMemory::of_length(fd, len).map_err(failed)
}

/// A loaded program.
#[derive(Debug)]
pub(super) struct Program(OwnedFd);

impl Program {
    /// Loads an iterator.
    ///
    /// * `target`: number of the function that it extends.
    pub(super) fn load_iterator(code: &[u64], target: u32) -> Result<Program, AccessError> {
        let mut load = ProgLoad {
            prog_type: PROG_TYPE_TRACING,
            insn_cnt: code.len() as u32,
            insns: code.as_ptr() as u64,
            license: c"Dual MIT/GPL".as_ptr() as u64,
            name: name(c"uc_access"),
            expected_attach_type: TRACE_ITER,
            attach_btf_id: target,
            ..ProgLoad::default()
        };
        let mut tries = 0;
        let error = loop {
            // SAFETY: PROG_LOAD takes these 120 bytes; code and licence are live slices, and there
            // is no log.
            match unsafe { call(PROG_LOAD, &mut load) } {
                Ok(fd) => return Ok(Program(fd)),
                // The verifier gives up when other work waits for this thread: a signal, or
                // something that an io_uring left.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries < LOADS_MAX => {
                    tries += 1;
                }
                Err(error) => break error,
            }
        };
        // Load once more, to get the log.
        let mut log = vec![0u8; LOG_BYTES];
        load.log_level = 1;
        load.log_size = LOG_BYTES as u32;
        load.log_buf = log.as_mut_ptr() as u64;
        // SAFETY: as above; the kernel writes at most `log_size` bytes of text into `log`, which
        // outlives the call.
        let result = unsafe { call(PROG_LOAD, &mut load) };
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(0);
        let text = String::from_utf8_lossy(&log[..end]);
        let last: Vec<&str> = text.lines().rev().take(4).collect();
        let log: String = last.iter().rev().map(|line| format!("; {line}")).collect();
        match result {
            Ok(fd) => Ok(Program(fd)),
            // The first error: this one may only say that the log is too short.
            Err(_) => Err(AccessError::of("the BPF program", error, log)),
        }
    }

    /// Attaches the program to the threads of one process.
    pub(super) fn on(&self, pid: u32) -> Result<Link, AccessError> {
        self.attach(TaskInfo {
            pid,
            ..TaskInfo::default()
        })
    }

    /// Attaches the program to one thread.
    pub(super) fn on_thread(&self, tid: u32) -> Result<Link, AccessError> {
        self.attach(TaskInfo {
            tid,
            ..TaskInfo::default()
        })
    }

    fn attach(&self, mut info: TaskInfo) -> Result<Link, AccessError> {
        let mut create = LinkCreate {
            prog_fd: self.0.as_raw_fd() as u32,
            attach_type: TRACE_ITER,
            iter_info: std::ptr::from_mut(&mut info) as u64,
            iter_info_len: size_of::<TaskInfo>() as u32,
            ..LinkCreate::default()
        };
        // SAFETY: LINK_CREATE takes this structure; `info` is a live local of the length it says,
        // read during the call.
        let link = unsafe { call(LINK_CREATE, &mut create) };
        match link {
            Ok(link) => Ok(Link(link)),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(AccessError::Gone),
            Err(error) => Err(AccessError::of("a BPF iterator", error, String::new())),
        }
    }
}

/// A program attached to one process or thread.
pub(super) struct Link(OwnedFd);

fn no_run(error: io::Error) -> AccessError {
    AccessError::of("a run of the BPF iterator", error, String::new())
}

impl Link {
    fn begin(&self) -> Result<OwnedFd, AccessError> {
        let mut create = IterCreate {
            link_fd: self.0.as_raw_fd() as u32,
            flags: 0,
        };
        // SAFETY: ITER_CREATE takes these 8 bytes, which point to nothing.
        unsafe { call(ITER_CREATE, &mut create) }.map_err(no_run)
    }

    /// Runs it until it has written a record. False: it has written none.
    pub(super) fn read_record(&self, record: &mut [u8]) -> Result<bool, AccessError> {
        let run = self.begin()?;
        for _ in 0..READS_MAX {
            match rustix::io::read(&run, &mut *record) {
                Ok(bytes) => return Ok(bytes == record.len()),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(no_run(error.into())),
            }
        }
        Ok(false)
    }

    /// Runs it once for each thread.
    pub(super) fn read_once(&self) -> Result<(), AccessError> {
        let run = self.begin()?;
        let mut bytes = [0u8; 64];
        // The program writes no text, so the first read is the last. Some kernels want another read
        // after many threads.
        for _ in 0..READS_MAX {
            match rustix::io::read(&run, &mut bytes) {
                Ok(0) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(no_run(error.into())),
            }
        }
        Ok(())
    }
}

/// Most reads of one run: enough for a million threads.
const READS_MAX: usize = 64;
