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
    // FS
    // SIGHAND
    // THREAD
    // SYSVSEM
    // CHILD_CLEARTID
    // CHILD_SETTID: a thread of the program, but *without* FILES. With its own descriptor table,
    // the program may close any descriptor, and sees none of ours.
    let flags: usize = 0x100 | 0x200 | 0x800 | 0x1_0000 | 0x4_0000 | 0x20_0000 | 0x100_0000;
    // SAFETY: the new thread runs `agent` on its own mapped stack and never returns; registers
    // carry its arguments. The word that the kernel clears when it dies is in the command page,
    // which is shared with the manager.
    unsafe {
        let tid = core::ptr::addr_of!((*page).agent) as usize;
        let result: isize;
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
        if result < 0 {
            return false;
        }
        command::wait_for_agent(&Page(&*page));
        true
    }
}

/// The agent thread.
unsafe extern "C" fn agent(
    page: *const CommandPage,
    staging: usize,
    holding_uffd: usize,
    process_uffd: usize,
) -> ! {
    // SAFETY: the command page and staging area live as long as the address space; descriptors are
    // this thread's own.
    unsafe {
        call3(nr::PRCTL, 15, c"uc-agent".as_ptr() as usize, 0);
        // 0: the process's userfaultfd. 1: the holding area's. No other descriptor stays open.
        let (holding, process) = (
            call3(nr::FCNTL, holding_uffd, 0, 10),
            call3(nr::FCNTL, process_uffd, 0, 10),
        );
        call3(nr::DUP2, process as usize, 0, 0);
        call3(nr::DUP2, holding as usize, 1, 0);
        call3(nr::CLOSE_RANGE, 2, u32::MAX as usize, 0);
        drop_rights();
        let page = &Page(&*page);
        command::announce(page);
        let mut seq = 0;
        loop {
            seq = command::next_command(page, seq);
            let count = (page.count.load(Relaxed) as usize).min(STAGING_PAGES);
            if page.op.load(Relaxed) == OP_MOVE {
                move_out(page, seq, count, staging);
            }
            command::answer(page, seq);
            fill_holding(1, page, staging);
        }
    }
}
