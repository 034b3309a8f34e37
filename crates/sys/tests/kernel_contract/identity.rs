//! The identity of a process, and which handles to it can never come to mean another process.

use std::os::fd::AsFd;

use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::ThreadStatus;
use undercroft_sys::uffd::{Features, MessageBuf, Uffd};

use crate::bed::*;

crate::facts! {
    open_memory_is_of_the_old_address_space_after_exec,
    a_thread_s_pidfd_and_status_end_with_it_though_its_process_goes_on,
    messages_are_read_without_waiting_from_a_descriptor_made_blocking,
    only_a_userfaultfd_is_taken_for_one,
    a_filter_for_all_threads_is_refused_where_one_has_another,
}

fn open_memory_is_of_the_old_address_space_after_exec() {
    static WORD: u64 = 0x5eed;
    let address = &raw const WORD as u64;
    let client = child(|parent| {
        parent.wait();
        crate::death::exec_sleep()
    });
    let memory = ProcessMemory::open(client.pid).unwrap();
    let mut bytes = [0u8; 8];
    memory.read(address, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), WORD);
    client.go();
    until("exec", || memory.read(address, &mut bytes).is_err());
    assert!(!PidFd::open(client.pid).unwrap().has_exited());
    client.kill();
}

fn a_thread_s_pidfd_and_status_end_with_it_though_its_process_goes_on() {
    let (say, hear) = std::sync::mpsc::channel();
    let (end, wait) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        say.send(process::thread_id()).unwrap();
        let _ = wait.recv();
    });
    let tid = hear.recv().unwrap();
    assert!(ThreadStatus::open(1, tid).is_err(), "of another process");
    let status = ThreadStatus::open(std::process::id(), tid).unwrap();
    assert!(matches!(status.read().unwrap().state, 'S' | 'R'));
    let Ok(pidfd) = PidFd::open_thread(tid) else {
        crate::skip("no descriptors of threads before Linux 6.9")
    };
    assert!(!pidfd.has_exited());
    drop(end);
    thread.join().unwrap();
    until("the thread has ended", || pidfd.has_exited());
    assert!(status.read().is_err());
}

fn messages_are_read_without_waiting_from_a_descriptor_made_blocking() {
    let (ear, _area) = Ear::with_area(Features::default(), 1);
    let flags = rustix::fs::fcntl_getfl(ear.as_fd()).unwrap();
    let blocking = flags - rustix::fs::OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(ear.as_fd(), blocking).unwrap();
    let uffd = ear.as_fd().try_clone_to_owned().unwrap();
    let read = doing(move || {
        let uffd = Uffd::from(uffd);
        let mut buffer = MessageBuf::default();
        uffd.read_messages(&mut buffer)
            .map(|messages| messages.count())
    });
    match read.within(1000) {
        Some(count) => assert_eq!(count.unwrap(), 0),
        None => crate::skip("no RWF_NOWAIT on userfaultfds before Linux 6.10"),
    }
}

fn only_a_userfaultfd_is_taken_for_one() {
    let (read, write) = pipe();
    let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    for fd in [read, write, memory] {
        assert!(Uffd::from_stranger(fd).is_err());
    }
    let ear = Ear::new(Features::default());
    let fd = ear.as_fd().try_clone_to_owned().unwrap();
    assert!(Uffd::from_stranger(fd).is_ok());
}

/// Why the agent has no filter of its own.
fn a_filter_for_all_threads_is_refused_where_one_has_another() {
    fn filter(flags: libc::c_ulong) -> libc::c_long {
        let mut code = [libc::sock_filter {
            code: 0x06, // return
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ALLOW,
        }];
        let program = libc::sock_fprog {
            len: 1,
            filter: code.as_mut_ptr(),
        };
        let none: libc::c_ulong = 0;
        // SAFETY: numbers only.
        unsafe {
            libc::prctl(
                libc::PR_SET_NO_NEW_PRIVS,
                1 as libc::c_ulong,
                none,
                none,
                none,
            )
        };
        let set = libc::SECCOMP_SET_MODE_FILTER;
        // SAFETY: the kernel copies the program, a live local that allows every call.
        unsafe { libc::syscall(libc::SYS_seccomp, set, flags, &program) }
    }
    let (say, hear) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        assert_eq!(filter(0), 0);
        say.send(process::thread_id()).unwrap();
        std::thread::park();
    });
    let tid = hear.recv().unwrap();
    let refused = filter(libc::SECCOMP_FILTER_FLAG_TSYNC);
    assert_eq!(refused, i64::from(tid), "it names the thread");
}
