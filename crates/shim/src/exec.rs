//! Stands in for the calls that start a program image, so that no loader complains of the shim
//! (`preload.rs`). The C library's own functions do all the rest: the search in `PATH`, the file
//! actions, the errors. Raw system calls bypass this.
//!
//! A child of vfork calls these. So the C library's functions are looked up when the shim starts.

use core::arch::naked_asm;
use core::ffi::{CStr, c_void};
use core::sync::atomic::AtomicUsize;

use crate::image::{HERE, Target, open};
use crate::library::{environment, next, variable_of};
use crate::preload::{Environment, start_with};
use crate::raw::{call6, close, fail, nr};

/// A null-terminated array of C strings.
type Arguments = *const *const u8;

const ENOSYS: i32 = 38;
const AT_EMPTY_PATH: i32 = 0x1000;

/// A function of the C library.
struct Real(&'static CStr, AtomicUsize);

impl Real {
    const fn named(name: &'static CStr) -> Real {
        Real(name, AtomicUsize::new(0))
    }

    /// Its address as a function, or `None`.
    fn get<F: Copy>(&self) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<usize>()) };
        match next(self.0, &self.1) {
            0 => None,
            // SAFETY: each use below names the type of the function that has this name.
            at => Some(unsafe { core::mem::transmute_copy::<usize, F>(&at) }),
        }
    }
}

#[unsafe(link_section = ".data")]
static EXECVE: Real = Real::named(c"execve");
#[unsafe(link_section = ".data")]
static EXECVPE: Real = Real::named(c"execvpe");
#[unsafe(link_section = ".data")]
static FEXECVE: Real = Real::named(c"fexecve");
#[unsafe(link_section = ".data")]
static SPAWN: Real = Real::named(c"posix_spawn");
#[unsafe(link_section = ".data")]
static SPAWN_NAMED: Real = Real::named(c"posix_spawnp");

/// Looks up what stands behind these calls.
pub(crate) fn look_up() {
    for real in [&EXECVE, &EXECVPE, &FEXECVE, &SPAWN, &SPAWN_NAMED] {
        next(real.0, &real.1);
    }
}

type Exec = unsafe extern "C" fn(*const u8, Arguments, Environment) -> i32;
type ExecOpen = unsafe extern "C" fn(i32, Arguments, Environment) -> i32;
type Spawn = unsafe extern "C" fn(
    *mut i32,
    *const u8,
    *const c_void,
    *const c_void,
    Arguments,
    Environment,
) -> i32;

fn missing() -> i32 {
    fail(-ENOSYS as isize) as i32
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execve(path: *const u8, argv: Arguments, envp: Environment) -> i32 {
    let Some(real) = EXECVE.get::<Exec>() else {
        return missing();
    };
    // SAFETY: the program's own call, passed on.
    let mut start = |envp| unsafe { real(path, argv, envp) };
    // SAFETY: the program passed them.
    unsafe { start_with(envp, &Target::Path(HERE, path), &mut start) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const u8, argv: Arguments) -> i32 {
    // SAFETY: the program's own call, passed on.
    unsafe { execve(path, argv, environment()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(name: *const u8, argv: Arguments, envp: Environment) -> i32 {
    let Some(real) = EXECVPE.get::<Exec>() else {
        return missing();
    };
    // SAFETY: the program's own call, passed on.
    let mut start = |envp| unsafe { real(name, argv, envp) };
    // SAFETY: the program passed them.
    unsafe { start_with(envp, &Target::Name(name), &mut start) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(name: *const u8, argv: Arguments) -> i32 {
    // SAFETY: the program's own call, passed on.
    unsafe { execvpe(name, argv, environment()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(file: i32, argv: Arguments, envp: Environment) -> i32 {
    let Some(real) = FEXECVE.get::<ExecOpen>() else {
        return missing();
    };
    // SAFETY: the program's own call, passed on.
    let mut start = |envp| unsafe { real(file, argv, envp) };
    // SAFETY: the program passed them.
    unsafe { start_with(envp, &Target::Open(file as usize), &mut start) }
}

/// The system call itself: older C libraries have no such function.
#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    directory: i32,
    path: *const u8,
    argv: Arguments,
    envp: Environment,
    flags: i32,
) -> i32 {
    let (at, path_at, argv_at) = (directory as usize, path as usize, argv as usize);
    let mut start = |envp: Environment| {
        let flags = flags as u32 as usize;
        // SAFETY: the program's own call, passed on.
        let result = unsafe { call6(nr::EXECVEAT, at, path_at, argv_at, envp as usize, flags, 0) };
        fail(result) as i32
    };
    // SAFETY: the program passed a C string.
    let is_empty = !path.is_null() && unsafe { path.read() } == 0;
    let target = match flags & AT_EMPTY_PATH != 0 && is_empty {
        true => Target::Open(at),
        false => Target::Path(at, path),
    };
    // SAFETY: the program passed them.
    unsafe { start_with(envp, &target, &mut start) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn(
    pid: *mut i32,
    path: *const u8,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Arguments,
    envp: Environment,
) -> i32 {
    let Some(real) = SPAWN.get::<Spawn>() else {
        return ENOSYS;
    };
    // SAFETY: the program's own call, passed on.
    let mut start = |envp| unsafe { real(pid, path, actions, attributes, argv, envp) };
    // SAFETY: the program passed them.
    unsafe { start_with(envp, &Target::Path(HERE, path), &mut start) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawnp(
    pid: *mut i32,
    name: *const u8,
    actions: *const c_void,
    attributes: *const c_void,
    argv: Arguments,
    envp: Environment,
) -> i32 {
    let Some(real) = SPAWN_NAMED.get::<Spawn>() else {
        return ENOSYS;
    };
    // SAFETY: the program's own call, passed on.
    let mut start = |envp| unsafe { real(pid, name, actions, attributes, argv, envp) };
    // SAFETY: the program passed them.
    unsafe { start_with(envp, &Target::Name(name), &mut start) }
}

/// A function whose arguments are its image's. Those in registers are put below those on the stack,
/// where they make one array; then `listed` is called with the path and the array.
macro_rules! with_listed_arguments {
    ($name:ident, $listed:path) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(path: *const u8) -> i32 {
            naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {listed}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                listed = sym $listed,
            )
        }
    };
}

with_listed_arguments!(execl, execv);
with_listed_arguments!(execlp, execvp);
with_listed_arguments!(execle, execve_behind);

/// The environment comes after the null of the arguments.
unsafe extern "C" fn execve_behind(path: *const u8, argv: Arguments) -> i32 {
    let mut last = argv;
    // SAFETY: the arguments go on up to their null.
    while !unsafe { last.read() }.is_null() {
        last = last.wrapping_add(1);
    }
    // SAFETY: the program passes its environment there.
    let envp = unsafe { last.wrapping_add(1).read() }.cast();
    // SAFETY: the program's own call, passed on.
    unsafe { execve(path, argv, envp) }
}

#[unsafe(link_section = ".data")]
static SYSTEM: Real = Real::named(c"system");
#[unsafe(link_section = ".data")]
static POPEN: Real = Real::named(c"popen");
#[unsafe(link_section = ".data")]
static SETENV: Real = Real::named(c"setenv");
#[unsafe(link_section = ".data")]
static UNSETENV: Real = Real::named(c"unsetenv");

#[unsafe(no_mangle)]
unsafe extern "C" fn system(command: *const u8) -> i32 {
    let Some(real) = SYSTEM.get::<unsafe extern "C" fn(*const u8) -> i32>() else {
        return missing();
    };
    prepare_for_shell();
    // SAFETY: the program's own call, passed on.
    unsafe { real(command) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn popen(command: *const u8, kind: *const u8) -> *mut c_void {
    type Popen = unsafe extern "C" fn(*const u8, *const u8) -> *mut c_void;
    let Some(real) = POPEN.get::<Popen>() else {
        missing();
        return core::ptr::null_mut();
    };
    prepare_for_shell();
    // SAFETY: the program's own call, passed on.
    unsafe { real(command, kind) }
}

/// The C library is about to start a shell with the program's own environment. If the shell's
/// loader could not load the shim, the C library changes the environment itself: from this root no
/// later image could load it either.
fn prepare_for_shell() {
    type Setenv = unsafe extern "C" fn(*const u8, *const u8, i32) -> i32;
    type Unsetenv = unsafe extern "C" fn(*const u8) -> i32;
    let (Some(setenv), Some(unsetenv)) = (SETENV.get::<Setenv>(), UNSETENV.get::<Unsetenv>())
    else {
        return;
    };
    // SAFETY: a path that lives for ever.
    let root = unsafe { open(HERE, c"/".as_ptr().cast()) };
    if root < 0 {
        return; // Without a descriptor no shell starts, and later ones may be able to.
    }
    close(root as usize);
    let own = environment();
    let name = c"LD_PRELOAD".as_ptr().cast();
    let mut change = |changed: Environment| {
        if changed == own {
            return 0;
        }
        // SAFETY: a changed environment goes on up to its null, and stays as it is.
        match unsafe { variable_of(changed, b"LD_PRELOAD=") } {
            // SAFETY: the C library's own; the value goes on to the end of its C string.
            Some(value) => unsafe { setenv(name, value.as_ptr(), 1) },
            // SAFETY: the C library's own.
            None => unsafe { unsetenv(name) },
        }
    };
    let shell = Target::Path(HERE, c"/bin/sh".as_ptr().cast());
    // SAFETY: the program's own environment, which it changes in no other thread meanwhile.
    unsafe { start_with(own, &shell, &mut change) };
}
