//! Whether valgrind interprets this program. It cannot run the agent, which is a thread made by a
//! raw `clone`, and ends a program that makes one. Such a program goes on unmanaged.

use core::arch::asm;

/// valgrind's request RUNNING_ON_VALGRIND (`valgrind.h`).
const RUNNING: u64 = 0x1001;

/// Asks valgrind whether it is there. A processor runs the same instructions without effect.
pub(crate) fn by_valgrind() -> bool {
    let request: [u64; 6] = [RUNNING, 0, 0, 0, 0, 0];
    let answer: u64;
    // SAFETY: the turns of rdi add up to 128 bits, so it is what it was, and rbx is exchanged with
    // itself. valgrind takes the five instructions for a request: it reads the six words at rax,
    // and answers in rdx.
    unsafe {
        asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") request.as_ptr(),
            inout("rdx") 0u64 => answer,
            options(nostack),
        );
    }
    answer != 0
}
