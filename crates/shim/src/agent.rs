//! The agent: a process of its own in the program's memory, which carries out the manager's
//! commands.
//!
//! It is no thread of the program, and no child: the program counts its threads, waits for its
//! children and enters namespaces as without it. So a process between the two makes it and ends at
//! once, and the agent becomes the keeper's child.

use core::arch::asm;
use core::sync::atomic::Ordering::{Relaxed, Release};

use undercroft_wire::command;
use undercroft_wire::protocol::{CommandPage, OP_MOVE, STAGING_PAGES, places_of};

use crate::life::Life;
use crate::move_out::{fill_holding, move_out};
use crate::namespace;
use crate::page::Page;
use crate::powerless::{drop_rights, keep_few_calls};
use crate::raw::{call3, call6, nr};

/// Start values of an agent. It copies them before it says that it is ready.
#[derive(Clone, Copy)]
pub(crate) struct Start {
    /// Address of the command page.
    pub(crate) command: usize,
    /// Address of the staging area, and the end of the stack.
    pub(crate) staging: usize,
    pub(crate) stack_top: usize,
    pub(crate) holding_uffd: usize,
    pub(crate) process_uffd: usize,
    pub(crate) life: Life,
}

/// Flags of clone(2).
mod clone {
    pub(super) const VM: usize = crate::alone::CLONE_VM;
    pub(super) const FS: usize = 0x200;
    pub(super) const FILES: usize = 0x400;
    pub(super) const SIGHAND: usize = 0x800;
    pub(super) const CHILD_CLEARTID: usize = 0x20_0000;
    pub(super) const UNTRACED: usize = 0x80_0000;
    pub(super) const CHILD_SETTID: usize = 0x100_0000;
}

/// The process in between shares everything, so it costs little. No tracer of the program (`strace
/// -f`) gets either process. Neither has an exit signal.
const BETWEEN: usize = clone::VM | clone::FS | clone::FILES | clone::SIGHAND | clone::UNTRACED;

/// The agent has its own descriptor table: the program may close any descriptor, and sees none of
/// ours. It has its own working directory, too: a program may enter a namespace, or become another
/// user by exec, only if it shares none.
const AGENT: usize = clone::VM | clone::UNTRACED | clone::CHILD_CLEARTID | clone::CHILD_SETTID;

/// `__WALL`: children without an exit signal are waited for too.
const WALL: usize = 0x4000_0000;
const WNOHANG: usize = 1;

/// Starts the agent and waits until it has what it needs.
///
/// # Safety
/// All signals are blocked. The areas are mapped as long as the address space lives, and nothing
/// else uses them. This process has no agent.
pub(crate) unsafe fn start_agent(start: &Start) -> bool {
    // SAFETY: the caller's promise.
    let page = Page(unsafe { &*(start.command as *const CommandPage) });
    page.starting.store(1, Release);
    // Otherwise the process in between would be the first of another namespace.
    let may = namespace::children_are_in_it();
    // SAFETY: the caller's promise.
    let started = may && unsafe { start_by_another(start, &page) };
    if !started {
        page.ready.store(1, Release); // no agent comes any more
    }
    page.starting.store(0, Release);
    started
}

/// As [`start_agent`]: a process in between makes the agent. It is gone at the end.
///
/// # Safety
/// That of [`start_agent`].
unsafe fn start_by_another(start: &Start, page: &Page) -> bool {
    let between: isize;
    // SAFETY: the first new process touches no memory: it makes the second and ends, and says
    // whether it could. The second runs `agent` on its own stack and never returns. The word that
    // the kernel clears when it ends is in the command page, which the manager shares.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 3f",
            "mov eax, {clone}",
            "mov edi, {flags}",
            "syscall",
            "test rax, rax",
            "jz 2f",
            "shr rax, 63",
            "mov edi, eax",
            "mov eax, {exit}",
            "syscall",
            "ud2",
            "2:",
            "xor ebp, ebp",
            "mov rdi, r12",
            "and rsp, -16",
            "call {agent}",
            "ud2",
            "3:",
            clone = const nr::CLONE,
            exit = const nr::EXIT,
            flags = const AGENT,
            agent = sym agent,
            inlateout("rax") nr::CLONE as isize => between,
            in("rdi") BETWEEN,
            in("rsi") start.stack_top,
            in("rdx") 0usize,
            in("r10") core::ptr::from_ref(&page.agent) as usize,
            in("r8") 0usize,
            in("r12") core::ptr::from_ref(start),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if between < 0 {
        return false;
    }
    // The agent runs by now, or soon: one sleep is enough for both.
    let mut ended = None;
    let started = command::wait_for_agent(page, || {
        ended = ended.or_else(|| reap(between as usize, WNOHANG));
        ended != Some(false)
    });
    match ended {
        Some(made) => made,
        None => reap(between as usize, 0).is_some() && started,
    }
}

/// Whether the process in between, which has ended, has made the agent. `None`: it has not ended.
fn reap(between: usize, options: usize) -> Option<bool> {
    let mut failed = 0u32;
    let at = core::ptr::from_mut(&mut failed) as usize;
    // SAFETY: a child that was made here; the kernel writes one live word.
    let waited = unsafe { call6(nr::WAIT4, between, at, WALL | options, 0, 0, 0) };
    // SAFETY: live; volatile because the kernel wrote it behind the compiler's back.
    let failed = unsafe { core::ptr::read_volatile(&failed) };
    (waited == between as isize).then_some(failed == 0)
}

const PR_SET_NAME: usize = 15;

/// The agent's life.
///
/// # Safety
/// `start` is what [`start_agent`] was given, and lives until the agent is ready.
unsafe extern "C" fn agent(start: *const Start) -> ! {
    // SAFETY: the caller's promise.
    let start = unsafe { *start };
    // A process group of its own: a signal or a priority that is for the program's is not for it.
    // The session stays: another one is another group to the scheduler (autogroup), and waits for
    // its turn behind all others when the manager lets it have the CPU.
    // SAFETY: takes numbers.
    unsafe { call3(nr::SETPGID, 0, 0, 0) };
    // SAFETY: the name lives for ever; a thread's own.
    unsafe { call3(nr::PRCTL, PR_SET_NAME, c"uc-agent".as_ptr() as usize, 0) };
    // SAFETY: the path lives for ever. The working directory is this process's own, and shall not
    // keep a file system busy that the program unmounts.
    unsafe { call3(nr::CHDIR, c"/".as_ptr() as usize, 0, 0) };
    keep_descriptors(start.process_uffd, start.holding_uffd);
    drop_rights();
    keep_few_calls();
    // SAFETY: the command page lives as long as the address space.
    let page = &Page(unsafe { &*(start.command as *const CommandPage) });
    let mut life = start.life;
    command::announce(page);
    let mut seq = 0;
    loop {
        seq = command::next_command(page, seq, |last| life.sleep(page, last));
        let count = (page.count.load(Relaxed) as usize).min(STAGING_PAGES);
        let from = (page.from.load(Relaxed) as usize).min(count);
        if page.op.load(Relaxed) == OP_MOVE {
            // SAFETY: the staging area is the shim's own, and lives as long as the address space.
            unsafe { move_out(page, seq, from..count, start.staging) };
        }
        command::answer(page, seq);
        // SAFETY: as above.
        unsafe { fill_holding(1, page, places_of(from, count), start.staging) };
    }
}

/// Makes the process's userfaultfd descriptor 0, and the holding area's 1. No other descriptor
/// stays open. The table is the agent's own.
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
