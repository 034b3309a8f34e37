//! Rights that a process gives up for good: a new program, new processes, other users, mounts,
//! modules, debugging, sockets of its own, descriptors of other processes, new io_urings. An
//! attacker who takes it over gets no more than its open descriptors.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    sock_filter,
};

/// Refused with `EPERM`.
const REFUSED: [libc::c_long; 50] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_capset,
    libc::SYS_chroot,
    libc::SYS_clock_settime,
    libc::SYS_connect,
    libc::SYS_delete_module,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
    libc::SYS_fork,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_init_module,
    // A ring carries out calls that no filter sees. Those that exist do nothing of the kind
    // (`crate::ring`), and stay as they are.
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_setdomainname,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_settimeofday,
    libc::SYS_setuid,
    libc::SYS_socket,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_vfork,
];

/// Whether a process may still make connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// The process makes no sockets.
    None,
    /// The process makes sockets of the Internet families only, and connects them.
    Internet,
}

/// Gives up these rights, for the calling thread and all threads that it starts. No new privileges,
/// no core, only root can look into its memory, and the calls of [`REFUSED`] fail. Threads can
/// still be made.
///
/// Errors: the kernel has no seccomp.
pub fn give_up_rights(network: Network) -> io::Result<()> {
    let wrong = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
    // SAFETY: prctl with numbers only; nothing of this process's memory is named.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    let arch = std::env::consts::ARCH.try_into().map_err(|e| wrong(&e))?;
    let threads = libc::CLONE_THREAD as u64;
    let is_process = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Qword,
        SeccompCmpOp::MaskedEq(threads),
        0,
    )
    .and_then(|condition| SeccompRule::new(vec![condition]))
    .map_err(|e| wrong(&e))?;
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    refused.insert(libc::SYS_clone, vec![is_process]);
    if network == Network::Internet {
        refused.remove(&libc::SYS_connect);
        let is_not = |family: libc::c_int| {
            let (length, operation) = (SeccompCmpArgLen::Dword, SeccompCmpOp::Ne);
            SeccompCondition::new(0, length, operation, family as u64).map_err(|e| wrong(&e))
        };
        let other = vec![is_not(libc::AF_INET)?, is_not(libc::AF_INET6)?];
        let other = SeccompRule::new(other).map_err(|e| wrong(&e))?;
        refused.insert(libc::SYS_socket, vec![other]);
    }
    let refuse = |rules, error: i32| -> io::Result<()> {
        let action = SeccompAction::Errno(error as u32);
        let filter =
            SeccompFilter::new(rules, SeccompAction::Allow, action, arch).map_err(|e| wrong(&e))?;
        let program: seccompiler::BpfProgram = filter.try_into().map_err(|e| wrong(&e))?;
        seccompiler::apply_filter(&program).map_err(|e| wrong(&e))
    };
    refuse(refused, libc::EPERM)?;
    #[cfg(target_arch = "x86_64")]
    seccompiler::apply_filter(&no_x32()).map_err(|e| wrong(&e))?;
    // Its flags are in memory, which a filter cannot read. The C library then calls clone.
    refuse(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        libc::ENOSYS,
    )
}

/// Refuses the numbers of the x32 ABI: the same calls under numbers of their own, which the other
/// filters do not list. The kernel gives them the architecture of the usual ones.
#[cfg(target_arch = "x86_64")]
fn no_x32() -> [sock_filter; 4] {
    const X32: u32 = 0x4000_0000;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let [load, at_least, answer] = [
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    ];
    let step = |code: u32, jf: u8, k: u32| sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    [
        step(load, 0, 0), // the number is the first word of what a filter sees
        step(at_least, 1, X32),
        step(answer, 0, refuse),
        step(answer, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The errno of a system call that takes no memory.
    fn errno(number: libc::c_long) -> Option<i32> {
        // SAFETY: the numbers of the test below, all of which are refused or take numbers only.
        let result = unsafe { libc::syscall(number, -1, -1, 0, 0) };
        (result < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// Calls that a filter which lists the usual numbers alone would let pass.
    #[test]
    fn no_way_around_the_list_is_open() {
        const X32_SOCKET: libc::c_long = 0x4000_0000 + 41;
        const X32_PTRACE: libc::c_long = 0x4000_0000 + 521;
        let open = [libc::SYS_pidfd_getfd, libc::SYS_io_uring_register];
        let before = open.map(errno);
        assert!(!before.contains(&Some(libc::EPERM)), "{before:?}");
        let tested = std::thread::spawn(|| {
            give_up_rights(Network::Internet).expect("seccomp");
            let refused = [
                X32_SOCKET,
                X32_PTRACE,
                0x4000_0000,
                libc::SYS_pidfd_getfd,
                libc::SYS_io_uring_setup,
                libc::SYS_io_uring_register,
            ];
            (refused.map(errno), errno(libc::SYS_getpid))
        });
        let (refused, getpid) = tested.join().expect("the thread");
        assert_eq!(refused, [Some(libc::EPERM); 6]);
        assert_eq!(getpid, None);
    }

    /// In a thread of its own: the filter is that thread's, and stays.
    #[test]
    fn threads_are_made_and_processes_are_not() {
        let tested = std::thread::spawn(|| {
            give_up_rights(Network::None).expect("seccomp");
            let word = std::thread::spawn(|| 7).join().expect("a thread");
            let program = std::process::Command::new("/bin/true").spawn();
            // SAFETY: the call takes numbers only, and is refused.
            let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0) };
            let error = io::Error::last_os_error().raw_os_error();
            (
                word,
                program.is_err(),
                socket,
                error,
                std::fs::read("/proc/self/status").is_ok(),
            )
        });
        assert_eq!(
            tested.join().expect("the thread"),
            (7, true, -1, Some(libc::EPERM), true)
        );
    }

    /// A process with a remote tier connects to other machines, and to nothing on this one.
    #[test]
    fn connections_are_made_to_the_internet_only() {
        let tested = std::thread::spawn(|| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
            let to = listener.local_addr().expect("an address");
            give_up_rights(Network::Internet).expect("seccomp");
            let connected = std::net::TcpStream::connect(to).is_ok();
            let v6 = std::net::UdpSocket::bind("[::]:0").map_err(|error| error.kind());
            let unix = std::os::unix::net::UnixDatagram::unbound();
            let program = std::process::Command::new("/bin/true").spawn();
            let refused = |error: Option<io::Error>| error.and_then(|it| it.raw_os_error());
            (
                connected,
                v6.err() != Some(io::ErrorKind::PermissionDenied),
                refused(unix.err()),
                program.is_err(),
            )
        });
        assert_eq!(
            tested.join().expect("the thread"),
            (true, true, Some(libc::EPERM), true)
        );
    }
}
