//! The identity of a process, and which handles to it can never come to mean another process.

use std::os::fd::AsFd;

use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::process::{self, PidFd};
use undercroft_sys::procfs::ThreadStatus;
use undercroft_sys::uffd::{Features, MessageBuf, Uffd};

use crate::bed::*;

crate::facts! {
    open_memory_is_of_the_old_address_space_after_exec,
    a_process_in_shared_memory_is_known_and_hears_that_it_is_alone,
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

/// The words that a process and its partner in the same memory share with this one.
#[derive(Clone, Copy)]
enum Word {
    /// The partner's number.
    Partner,
    /// 1: the partner was refused, as it is not alone. 2: it is alone.
    Alone,
    /// The word of the first thread of the process, as the partner saw it last.
    First,
}

struct Partner {
    shared: Area,
    first: usize,
    thread: u32,
}

impl Partner {
    fn put(&self, word: Word, value: u8) {
        self.shared.write(word as usize, value);
    }
}

/// Waits for the end of the first thread, and then until it is alone.
extern "C" fn partner(of: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `with_a_partner` passes it, and it lives as long as the memory.
    let of = unsafe { &*(of as *const Partner) };
    let alone = || {
        // SAFETY: a number.
        match unsafe { libc::unshare(libc::CLONE_VM) } {
            0 => 2,
            _ => 1,
        }
    };
    of.put(Word::Alone, alone());
    let word = of.first as *const u32;
    // SAFETY: the word of the first thread, in memory that this process has too.
    let seen = || unsafe { word.read_volatile() };
    while seen() == of.thread {
        let none = std::ptr::null::<libc::timespec>();
        let wait = libc::FUTEX_WAIT;
        // SAFETY: the word is live.
        unsafe { libc::syscall(libc::SYS_futex, word, wait, of.thread, none, 0, 0) };
    }
    of.put(Word::First, 1 + seen() as u8);
    while alone() == 1 {
        std::hint::spin_loop();
    }
    of.put(Word::Alone, 2);
    0
}

/// A process, and another in its memory that is no thread and no child with a signal.
fn with_a_partner(shared: Area, parent: &Parent, end: impl FnOnce() -> i32) -> i32 {
    const PR_GET_TID_ADDRESS: libc::c_int = 40;
    let mut first = 0usize;
    // SAFETY: the kernel writes one live word.
    let asked = unsafe { libc::prctl(PR_GET_TID_ADDRESS, &raw mut first) };
    let thread = process::thread_id();
    let of = Box::leak(Box::new(Partner {
        shared,
        first,
        thread,
    }));
    let stack = Area::new(16);
    let top = (stack.address + stack.bytes()) as *mut libc::c_void;
    let at = std::ptr::from_mut(of).cast();
    // SAFETY: its own stack; it touches nothing but its argument.
    let made = unsafe { libc::clone(partner, top, libc::CLONE_VM, at) };
    let number = made.to_ne_bytes();
    (0..4).for_each(|byte| shared.write(4 + byte, number[byte]));
    shared.write(Word::Partner as usize, u8::from(asked == 0 && made > 0));
    parent.wait();
    end()
}

/// How the agent hears that its program is gone, and how the manager knows whose agent it is.
fn a_process_in_shared_memory_is_known_and_hears_that_it_is_alone() {
    let memory = SharedMemory::create("test", 16 * PAGE).unwrap();
    type End = fn() -> i32;
    let ends: [(&str, End); 3] = [
        ("exec", crate::death::exec_sleep),
        ("exit", || 0),
        ("kill", || {
            loop {
                std::thread::park();
            }
        }),
    ];
    for (how, end) in ends {
        let shared = Area::shared(&memory);
        (0..16).for_each(|page| shared.write(page, 0));
        let client = child(|parent| with_a_partner(shared, parent, end));
        until("the partner", || shared.read(Word::Partner as usize) == 1);
        until("its answer", || shared.read(Word::Alone as usize) == 1);
        let number: [u8; 4] = std::array::from_fn(|byte| shared.read(4 + byte));
        let partner = i32::from_ne_bytes(number) as u32;
        let pidfd = PidFd::open(partner).unwrap();
        let shares = |one| process::share_memory(one, partner);
        match shares(client.pid) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                crate::skip("a kernel without kcmp(2)")
            }
            same => assert!(same.unwrap()),
        }
        assert!(!shares(std::process::id()).unwrap(), "of another process");
        let status = ThreadStatus::open(partner, partner).unwrap();
        assert!(matches!(status.read().unwrap().state, 'S' | 'R'));
        assert!(!pidfd.has_exited());
        client.go();
        if how == "kill" {
            client.kill();
        }
        until("the word is cleared", || {
            shared.read(Word::First as usize) == 1
        });
        until("it is alone", || shared.read(Word::Alone as usize) == 2);
        until("it has ended", || pidfd.has_exited());
        client.kill();
    }
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

/// Why an agent that has a filter of its own is no thread of the program.
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
