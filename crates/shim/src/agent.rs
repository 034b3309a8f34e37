//! The agent: a thread of the program that carries out the manager's commands.

use core::arch::asm;
use core::sync::atomic::Ordering::Relaxed;

use undercroft_wire::command;
use undercroft_wire::protocol::{CommandPage, OP_MOVE, STAGING_PAGES};

use crate::move_out::{fill_holding, move_out};
use crate::page::Page;
use crate::powerless::drop_rights;
use crate::raw::{call3, nr};

/// Starts the agent and waits until it has its own descriptor table.
pub(crate) unsafe fn start_agent(
    command: usize,
    staging: usize,
    holding_uffd: usize,
    process_uffd: usize,
    stack_top: usize,
) -> bool {
    let page = command as *const CommandPage;
    // VM
    // SIGHAND
    // THREAD
    // SYSVSEM
    // CHILD_CLEARTID
    // CHILD_SETTID: a thread of the program, but *without* FILES. With its own descriptor table,
    // the program may close any descriptor, and sees none of ours. Without FS, too: a program may
    // enter a mount namespace (setns) only if it shares root and working directory with no thread.
    let flags: usize = 0x100 | 0x800 | 0x1_0000 | 0x4_0000 | 0x20_0000 | 0x100_0000;
    // SAFETY: the page is mapped for as long as the address space lives.
    let page = Page(unsafe { &*page });
    let tid = core::ptr::from_ref(&page.agent) as usize;
    let result: isize;
    // SAFETY: the new thread runs `agent` on its own mapped stack and never returns; registers
    // carry its arguments. The word that the kernel clears when it dies is in the command page,
    // which is shared with the manager.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "mov rsi, r13",
            "mov rdx, r14",
            "mov rcx, r15",
            "and rsp, -16",
            "call {agent}",
            "ud2",
            "2:",
            agent = sym agent,
            inlateout("rax") 56isize => result,
            in("rdi") flags,
            in("rsi") stack_top,
            in("rdx") tid,
            in("r10") tid,
            in("r8") 0usize,
            in("r12") command,
            in("r13") staging,
            in("r14") holding_uffd,
            in("r15") process_uffd,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if result < 0 {
        return false;
    }
    command::wait_for_agent(&page);
    true
}

const PR_SET_NAME: usize = 15;

/// The agent thread.
unsafe extern "C" fn agent(
    page: *const CommandPage,
    staging: usize,
    holding_uffd: usize,
    process_uffd: usize,
) -> ! {
    // SAFETY: the name lives for ever; a thread's own.
    unsafe { call3(nr::PRCTL, PR_SET_NAME, c"uc-agent".as_ptr() as usize, 0) };
    // SAFETY: the path lives for ever. The working directory is this thread's own, and shall not
    // keep a file system busy that the program unmounts.
    unsafe { call3(nr::CHDIR, c"/".as_ptr() as usize, 0, 0) };
    keep_descriptors(process_uffd, holding_uffd);
    drop_rights();
    // SAFETY: the command page lives as long as the address space.
    let page = &Page(unsafe { &*page });
    command::announce(page);
    let mut seq = 0;
    loop {
        seq = command::next_command(page, seq);
        let count = (page.count.load(Relaxed) as usize).min(STAGING_PAGES);
        if page.op.load(Relaxed) == OP_MOVE {
            // SAFETY: the staging area is the shim's own, and lives as long as the address space.
            unsafe { move_out(page, seq, count, staging) };
        }
        command::answer(page, seq);
        // SAFETY: as above.
        unsafe { fill_holding(1, page, staging) };
    }
}

/// Makes the process's userfaultfd descriptor 0, and the holding area's 1. No other descriptor
/// stays open. The table is this thread's own.
fn keep_descriptors(process_uffd: usize, holding_uffd: usize) {
    // SAFETY: takes numbers.
    let aside = |descriptor| unsafe { call3(nr::FCNTL, descriptor, 0, 10) } as usize;
    let (holding, process) = (aside(holding_uffd), aside(process_uffd));
    // SAFETY: takes numbers.
    unsafe { call3(nr::DUP2, process, 0, 0) };
    // SAFETY: takes numbers.
    unsafe { call3(nr::DUP2, holding, 1, 0) };
    // SAFETY: takes numbers; nothing here owns the others.
    unsafe { call3(nr::CLOSE_RANGE, 2, u32::MAX as usize, 0) };
}
