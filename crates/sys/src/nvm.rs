//! Memory that is not DRAM, or a file that stands for it: mapped, read by plain loads, written by
//! stores that pass the caches.
//!
//! A load or store may find that the page is gone: the file was cut short, or the memory is
//! damaged. The kernel then sends SIGBUS. Here that becomes an error: the copy runs in a few
//! instructions of assembly, and a handler leads a SIGBUS among them to their way out. Any other
//! SIGBUS ends the process, as it does without the handler.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::mapping::OwnMapping;

/// The kernel could not provide a page of the mapping: the file is too short, or the memory bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the mapped page cannot be reached: the file was cut short, or its memory is damaged")]
pub struct Unreachable;

/// How the kernel maps a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappedAs {
    /// With MAP_SYNC: loads and stores reach the device itself.
    Sync,
    /// As any shared file: its pages may be copies in DRAM.
    Shared,
}

/// A file or device, mapped shared. No reference into it is ever given out: bytes are copied.
#[derive(Debug)]
pub struct MappedFile {
    file: File,
    map: OwnMapping,
    mapped_as: MappedAs,
}

impl MappedFile {
    /// Maps the first `len` bytes of `file`, with MAP_SYNC where the kernel allows that.
    ///
    /// Errors: the kernel's. Panics if `len` is 0 or not whole pages.
    pub fn new(file: File, len: usize) -> io::Result<MappedFile> {
        assert!(len > 0 && len.is_multiple_of(undercroft_base::BASE_PAGE_BYTES));
        guard::install()?;
        let sync = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
        let (start, mapped_as) = match map(&file, len, sync) {
            Ok(start) => (start, MappedAs::Sync),
            Err(_) => (map(&file, len, libc::MAP_SHARED)?, MappedAs::Shared),
        };
        Ok(MappedFile {
            file,
            map: OwnMapping { start, len },
            mapped_as,
        })
    }

    /// The mapped file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// How it is mapped.
    pub fn mapped_as(&self) -> MappedAs {
        self.mapped_as
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.map.len
    }

    /// Never: an empty one cannot be made.
    pub fn is_empty(&self) -> bool {
        false
    }

    fn address(&self, offset: usize, len: usize) -> *mut u8 {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.map.len),
            "access outside the mapped file"
        );
        self.map.start.as_ptr().wrapping_add(offset)
    }

    /// Copies bytes out. A racing writer leaves torn bytes, so the reader verifies a checksum.
    /// Errors: a part could not be read; `dst` then has some of the bytes.
    pub fn load(&self, offset: usize, dst: &mut [u8]) -> Result<(), Unreachable> {
        let src = self.address(offset, dst.len()).cast_const();
        // SAFETY: the source is inside the mapping (checked); `dst` is exclusive and not part of
        // it. A racing writer makes the bytes unpredictable; they are used only if they verify.
        unsafe { guard::copy(dst.as_mut_ptr(), src, dst.len()) }
    }

    /// Copies bytes in by stores that leave no trace in the caches. Other threads may see them
    /// only after [`MappedFile::fence`]. The caller is the only writer of the range. Both ends of
    /// the range are multiples of 64.
    ///
    /// Errors: a part could not be written; what is there now is unknown.
    pub fn store(&self, offset: usize, src: &[u8]) -> Result<(), Unreachable> {
        assert!(offset.is_multiple_of(64) && src.len().is_multiple_of(64));
        let dst = self.address(offset, src.len());
        // SAFETY: the target is inside the mapping (checked), aligned to 64 and a multiple of it
        // (asserted); `src` is not part of it, because no reference into it is given out.
        unsafe { guard::store(dst, src.as_ptr(), src.len()) }
    }

    /// Orders stores: those before are seen before those after.
    pub fn fence(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: orders stores; needs SSE, which every x86-64 has.
        unsafe {
            core::arch::x86_64::_mm_sfence()
        };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    }
}

fn map(file: &File, len: usize, flags: i32) -> io::Result<NonNull<u8>> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping at an address the kernel chooses; it overlaps nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Copies that survive a SIGBUS.
#[cfg(target_arch = "x86_64")]
mod guard {
    use super::*;
    use core::arch::global_asm;

    // Two copies, and the way out of both. They use no stack and no register that a caller keeps,
    // so the way out may be entered from each of their instructions.
    global_asm!(
        ".hidden uc_guarded_copy, uc_guarded_store, uc_guarded_end, uc_guarded_way_out",
        ".globl uc_guarded_copy, uc_guarded_store, uc_guarded_end, uc_guarded_way_out",
        "uc_guarded_copy:", // rdi: to, rsi: from, rdx: bytes
        "mov rcx, rdx",
        "rep movsb",
        "xor eax, eax",
        "ret",
        "uc_guarded_store:", // the same; rdi and rdx are multiples of 64
        "test rdx, rdx",
        "jz 3f",
        "2:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + 32]",
        "movups xmm3, [rsi + 48]",
        "movntdq [rdi], xmm0",
        "movntdq [rdi + 16], xmm1",
        "movntdq [rdi + 32], xmm2",
        "movntdq [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "sub rdx, 64",
        "jnz 2b",
        "3:",
        "xor eax, eax",
        "ret",
        "uc_guarded_end:",
        "uc_guarded_way_out:",
        "mov eax, 1",
        "ret",
    );

    unsafe extern "C" {
        fn uc_guarded_copy(to: *mut u8, from: *const u8, bytes: usize) -> u32;
        fn uc_guarded_store(to: *mut u8, from: *const u8, bytes: usize) -> u32;
        fn uc_guarded_end();
        fn uc_guarded_way_out();
    }

    /// # Safety
    /// Both ranges are mapped or part of a [`MappedFile`], and do not overlap.
    pub(super) unsafe fn copy(
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Unreachable> {
        // SAFETY: the caller's promise; a page that is missing leads to the way out.
        match unsafe { uc_guarded_copy(to, from, bytes) } {
            0 => Ok(()),
            _ => Err(Unreachable),
        }
    }

    /// # Safety
    /// As [`copy`]; `to` and `bytes` are multiples of 64.
    pub(super) unsafe fn store(
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Unreachable> {
        // SAFETY: the caller's promise; a page that is missing leads to the way out.
        match unsafe { uc_guarded_store(to, from, bytes) } {
            0 => Ok(()),
            _ => Err(Unreachable),
        }
    }

    extern "C" fn on_sigbus(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        let context: *mut libc::ucontext_t = context.cast();
        let at = libc::REG_RIP as usize;
        // SAFETY: the kernel passes a handler with SA_SIGINFO the registers of the thread that was
        // interrupted. Nothing else uses them before it returns.
        let registers = unsafe { &mut (*context).uc_mcontext.gregs };
        let begin = uc_guarded_copy as *const () as i64;
        let end = uc_guarded_end as *const () as i64;
        if (begin..end).contains(&registers[at]) {
            registers[at] = uc_guarded_way_out as *const () as i64;
            return;
        }
        // SAFETY: signal is safe in a handler. The instruction runs again and ends the process.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }

    /// Installs the handler, once a process.
    pub(super) fn install() -> io::Result<()> {
        static DONE: OnceLock<Option<i32>> = OnceLock::new();
        let failed = DONE.get_or_init(|| {
            // SAFETY: an all-zero sigaction is valid: no flags, an empty mask.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            action.sa_sigaction = on_sigbus as *const () as usize;
            // SAFETY: the handler uses registers only, takes no lock and allocates nothing.
            let result = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
            (result != 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
        });
        failed.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }
}

/// Without the handler: a page that is missing ends the process.
#[cfg(not(target_arch = "x86_64"))]
mod guard {
    use super::*;

    /// # Safety
    /// Both ranges are mapped and do not overlap.
    pub(super) unsafe fn copy(
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), Unreachable> {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    pub(super) use copy as store;

    pub(super) fn install() -> io::Result<()> {
        static DONE: OnceLock<()> = OnceLock::new();
        DONE.get_or_init(|| ());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_base::BASE_PAGE_BYTES;

    fn file(pages: usize) -> MappedFile {
        let file = tempfile::tempfile().unwrap();
        file.set_len((pages * BASE_PAGE_BYTES) as u64).unwrap();
        MappedFile::new(file, pages * BASE_PAGE_BYTES).unwrap()
    }

    #[test]
    fn mapped_bytes_come_back_and_are_the_files() {
        let mapped = file(4);
        let bytes: Vec<u8> = (0..BASE_PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        mapped.store(2 * BASE_PAGE_BYTES, &bytes).unwrap();
        mapped.fence();
        let mut back = vec![0; BASE_PAGE_BYTES];
        mapped.load(2 * BASE_PAGE_BYTES, &mut back).unwrap();
        assert_eq!(back, bytes);
        use std::os::unix::fs::FileExt;
        let mut read = vec![0; BASE_PAGE_BYTES];
        let at = 2 * BASE_PAGE_BYTES as u64;
        mapped.file().read_exact_at(&mut read, at).unwrap();
        assert_eq!(read, bytes);
        mapped.load(3 * BASE_PAGE_BYTES, &mut back).unwrap();
        assert!(back.iter().all(|byte| *byte == 0));
    }

    /// The file is cut short in the middle of use: an error, also in other threads, and the pages
    /// that are left still work.
    #[test]
    fn pages_of_a_file_that_was_cut_short_are_errors() {
        let mapped = file(8);
        let page = [7; BASE_PAGE_BYTES];
        (0..8).for_each(|at| mapped.store(at * BASE_PAGE_BYTES, &page).unwrap());
        mapped.file().set_len(4 * BASE_PAGE_BYTES as u64).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let mut back = [0; BASE_PAGE_BYTES];
                        let gone = mapped.load(5 * BASE_PAGE_BYTES, &mut back);
                        assert_eq!(gone, Err(Unreachable));
                        assert_eq!(mapped.store(7 * BASE_PAGE_BYTES, &page), Err(Unreachable));
                        // Half of it is there.
                        let mut both = [0; 2 * BASE_PAGE_BYTES];
                        assert_eq!(
                            mapped.load(3 * BASE_PAGE_BYTES, &mut both),
                            Err(Unreachable)
                        );
                        mapped.load(3 * BASE_PAGE_BYTES, &mut back).unwrap();
                        assert_eq!(back, page);
                    }
                });
            }
        });
        mapped.file().set_len(8 * BASE_PAGE_BYTES as u64).unwrap();
        mapped.store(7 * BASE_PAGE_BYTES, &page).unwrap();
    }

    /// Another SIGBUS still ends the process. Run in a process of its own.
    #[test]
    fn a_bus_error_of_other_code_still_ends_the_process() {
        if std::env::var_os("UNDERCROFT_TEST_BUS").is_some() {
            let mapped = file(2);
            mapped.file().set_len(0).unwrap();
            let fd = mapped.file().as_raw_fd();
            // SAFETY: a fresh mapping, never read but by the line that ends this process.
            let other = unsafe {
                let prot = libc::PROT_READ;
                libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, fd, 0)
            };
            // SAFETY: ends the process, which is what is tested.
            let byte = unsafe { other.cast::<u8>().read_volatile() };
            panic!("read {byte} from nowhere");
        }
        let name = "nvm::tests::a_bus_error_of_other_code_still_ends_the_process";
        let ended = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("UNDERCROFT_TEST_BUS", "1")
            .output()
            .unwrap();
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{ended:?}");
    }

    #[test]
    #[should_panic(expected = "outside")]
    fn access_beyond_the_end_panics() {
        file(1).store(BASE_PAGE_BYTES, &[0; 64]).unwrap();
    }
}
