//! Checks the program before anything starts: does it exist, can it run, and will the loader load
//! our library into it?
//!
//! The client library is loaded by `LD_PRELOAD`. A static program has no loader, and for programs
//! that gain privileges the loader ignores the variable. Both would run unmanaged without a
//! message, so both are refused.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use undercroft_sys::image::Image;

use undercroft_terminal::{Failure, status};

/// Most nested interpreters that are followed: as many as the kernel follows.
const INTERPRETERS_MAX: usize = 5;

/// The path of the program to start, after all checks.
///
/// Errors: 127 not found, 126 not executable, 125 if it could run but not be managed.
pub(crate) fn check(program: &OsStr) -> Result<PathBuf, Failure> {
    let path = find(program, std::env::var_os("PATH"))?;
    check_image(&path)?;
    null()?;
    Ok(path)
}

/// Whether there is a /dev/null: a run leaves its streams by it.
pub(crate) fn null() -> Result<(), Failure> {
    let opened = File::options().read(true).write(true).open("/dev/null");
    opened.map(drop).map_err(|error| {
        Failure::new(
            status::RUN_FAILED,
            "cannot open /dev/null",
            error.to_string(),
            "mount /dev; in a chroot make the file: mknod -m 666 /dev/null c 1 3",
        )
    })
}

/// As execvp(3): a name with a slash is a path; any other is searched in `PATH`.
fn find(program: &OsStr, search: Option<OsString>) -> Result<PathBuf, Failure> {
    if program.is_empty() {
        return Err(not_found(program, "the name is empty"));
    }
    if program.as_bytes().contains(&b'/') {
        let path = PathBuf::from(program);
        return match fs::metadata(&path) {
            Ok(_) => executable(&path).map(|()| path),
            Err(error) => Err(not_found(program, &error.to_string())),
        };
    }
    let search = search.unwrap_or_else(|| OsString::from("/usr/local/bin:/usr/bin:/bin"));
    let mut refused = None;
    for directory in std::env::split_paths(&search) {
        let path = directory.join(program);
        if !path.is_file() {
            continue;
        }
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(failure) => refused = refused.or(Some(failure)),
        }
    }
    Err(refused.unwrap_or_else(|| not_found(program, "no directory of PATH has it")))
}

fn not_found(program: &OsStr, why: &str) -> Failure {
    Failure::new(
        status::NOT_FOUND,
        format!("program `{}` not found", program.to_string_lossy()),
        why,
        "check the spelling, give its full path, or install it",
    )
}

fn executable(path: &Path) -> Result<(), Failure> {
    let refuse = |why: &str, fix: String| {
        Err(Failure::new(
            status::NOT_EXECUTABLE,
            format!("cannot execute {}", path.display()),
            why,
            fix,
        ))
    };
    if path.is_dir() {
        return refuse("it is a directory", "name a program inside it".to_owned());
    }
    if rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_err() {
        return refuse(
            "its permissions do not allow it",
            format!("chmod +x {}", path.display()),
        );
    }
    Ok(())
}

fn check_image(program: &Path) -> Result<(), Failure> {
    let unmanaged = |path: &Path, why: &str, fix: &str| {
        let what = if path == program {
            format!("cannot manage {}", program.display())
        } else {
            format!(
                "cannot manage {}, which runs {}",
                program.display(),
                path.display()
            )
        };
        Err(Failure::new(status::RUN_FAILED, what, why, fix))
    };
    let mut path = program.to_owned();
    for depth in 0..=INTERPRETERS_MAX {
        let unreadable = |error: io::Error| unreadable(program, &path, &error);
        let metadata = fs::metadata(&path).map_err(unreadable)?;
        // The kernel ignores these bits and capabilities on scripts, so only the last program
        // counts.
        match image(&path).map_err(unreadable)? {
            Image::Dynamic => {
                return match gains_privileges(&path, &metadata) {
                    None => Ok(()),
                    Some(why) => unmanaged(
                        &path,
                        &why,
                        "run a copy without that privilege, as the user it needs",
                    ),
                };
            }
            Image::Static | Image::Relocates => {
                return unmanaged(
                    &path,
                    "it is statically linked: it has no loader that would bring undercroft's library in",
                    "use a dynamically linked build of it; attaching to static programs is not available yet",
                );
            }
            Image::Foreign => {
                return unmanaged(
                    &path,
                    "it is not an x86-64 program, and undercroft's library is",
                    "use a 64-bit x86 build of it",
                );
            }
            Image::Script(interpreter) if depth < INTERPRETERS_MAX => path = interpreter.into(),
            Image::Script(_) => {
                return unmanaged(
                    &path,
                    "its interpreters are scripts of scripts, too deep to follow",
                    "name the interpreter itself",
                );
            }
            Image::Unknown => {
                return Err(Failure::new(
                    status::NOT_EXECUTABLE,
                    format!("cannot execute {}", path.display()),
                    "it is neither a program nor a script with a #! line",
                    "if it is a shell script, run it as `sh FILE`",
                ));
            }
        }
    }
    Ok(())
}

/// * `path`: the program, or an interpreter that its `#!` line names.
fn unreadable(program: &Path, path: &Path, error: &io::Error) -> Failure {
    let (shown, interpreter) = (program.display(), path.display());
    if path == program {
        return Failure::new(
            status::NOT_EXECUTABLE,
            format!("cannot read {shown}"),
            error.to_string(),
            "undercroft must read a program to see how it is linked: check the path and its permissions",
        );
    }
    Failure::new(
        status::NOT_EXECUTABLE,
        format!("cannot execute {shown}"),
        format!("its #! line leads to {interpreter}: {error}"),
        format!("mend the first line of {shown}, or install {interpreter}"),
    )
}

/// Why the loader would ignore our library, if it would.
fn gains_privileges(path: &Path, metadata: &fs::Metadata) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let mode = metadata.permissions().mode();
    let me = rustix::process::geteuid().as_raw();
    let group = rustix::process::getegid().as_raw();
    // Secure execution starts when an id changes; root running root's setuid program gains nothing.
    if mode & 0o4000 != 0 && metadata.uid() != me {
        return Some(
            "it is setuid to another user, so the loader ignores preloaded libraries".to_owned(),
        );
    }
    if mode & 0o2010 == 0o2010 && metadata.gid() != group {
        return Some(
            "it is setgid to another group, so the loader ignores preloaded libraries".to_owned(),
        );
    }
    let mut value = [0u8; 64];
    if me != 0
        && rustix::fs::getxattr(path, "security.capability", &mut value[..])
            .is_ok_and(|size| size > 0)
    {
        return Some(
            "it has file capabilities (setcap), so the loader ignores preloaded libraries"
                .to_owned(),
        );
    }
    None
}

/// [`Image::Relocates`] is not among the answers: a static program is [`Image::Static`], and the
/// loader itself (`/lib64/ld-linux-x86-64.so.2 PROGRAM`) is [`Image::Dynamic`], because it obeys
/// LD_PRELOAD.
fn image(path: &Path) -> std::io::Result<Image> {
    let name = path.file_name();
    let is_loader = name.is_some_and(|name| name.as_bytes().starts_with(b"ld-linux"));
    Ok(match Image::of(&File::open(path)?)? {
        Image::Relocates if is_loader => Image::Dynamic,
        Image::Relocates => Image::Static,
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(directory: &Path, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
        let path = directory.join(name);
        fs::write(&path, bytes).expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
        path
    }

    /// An ELF header with one program header of the given type.
    fn elf(machine: u16, kind: u32) -> Vec<u8> {
        let mut bytes = vec![0u8; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        bytes[64..68].copy_from_slice(&kind.to_le_bytes());
        bytes
    }

    #[test]
    fn programs_are_refused_by_what_is_wrong_with_them() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let d = here.path();
        let cases = [
            (
                file(d, "static", &elf(62, 1), 0o755),
                125,
                "statically linked",
            ),
            (file(d, "arm", &elf(183, 3), 0o755), 125, "x86-64"),
            (file(d, "text", b"hello", 0o755), 126, "#!"),
            (file(d, "empty", b"", 0o755), 126, "#!"),
            (file(d, "short", b"\x7fELF\x02\x01", 0o755), 126, "#!"),
            (file(d, "plain", &elf(62, 3), 0o644), 126, "chmod +x"),
            (d.to_owned(), 126, "directory"),
            (d.join("none"), 127, "not found"),
        ];
        for (path, code, word) in cases {
            let failure = check(path.as_os_str()).expect_err(&path.display().to_string());
            assert_eq!(failure.status, code, "{failure}");
            assert!(failure.to_string().contains(word), "{failure}");
        }
    }

    #[test]
    fn scripts_are_followed_to_the_program_that_runs_them() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let d = here.path();
        let good = file(d, "good", &elf(62, 3), 0o755);
        let bad = file(d, "bad", &elf(62, 1), 0o755);
        let script = |name: &str, of: &Path| {
            file(
                d,
                name,
                format!("#! {} -x\n", of.display()).as_bytes(),
                0o755,
            )
        };
        assert_eq!(
            check(script("runs-good", &good).as_os_str()),
            Ok(d.join("runs-good"))
        );
        let outer = script("outer", &script("inner", &bad));
        let failure = check(outer.as_os_str()).expect_err("static interpreter");
        assert!(
            failure.what.contains("which runs") && failure.why.contains("statically"),
            "{failure}"
        );
        let ring = d.join("ring");
        let failure =
            check(script("ring", &ring).as_os_str()).expect_err("a script that runs itself");
        assert!(failure.why.contains("too deep"), "{failure}");
    }

    #[test]
    fn setuid_to_another_user_is_refused() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let path = file(here.path(), "su", &elf(62, 3), 0o4755);
        assert_eq!(
            check(path.as_os_str()),
            Ok(path.clone()),
            "setuid to oneself gains nothing"
        );
        let other = std::os::unix::fs::chown(&path, Some(65534), None)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)));
        if let Err(error) = other {
            crate::skip(&format!(
                "setuid_to_another_user_is_refused: only root can give a file away ({error})"
            ));
            return;
        }
        let failure = check(path.as_os_str()).expect_err("setuid");
        assert!(
            failure.status == 125 && failure.why.contains("setuid"),
            "{failure}"
        );
    }

    #[test]
    fn path_is_searched_in_order_and_skips_what_cannot_run() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let (a, b) = (here.path().join("a"), here.path().join("b"));
        fs::create_dir_all(&a)
            .and_then(|()| fs::create_dir_all(&b))
            .expect("mkdir");
        file(&a, "tool", b"", 0o644);
        let search = Some(std::env::join_paths([&a, &b]).expect("no colon in it"));
        let refused = find(OsStr::new("tool"), search.clone()).expect_err("not executable");
        assert_eq!(refused.status, status::NOT_EXECUTABLE);
        let good = file(&b, "tool", b"", 0o755);
        assert_eq!(find(OsStr::new("tool"), search.clone()), Ok(good));
        assert_eq!(
            find(OsStr::new("tool2"), search)
                .expect_err("absent")
                .status,
            status::NOT_FOUND
        );
    }

    #[test]
    fn this_machines_shell_passes() {
        assert!(check(OsStr::new("sh")).is_ok());
    }
}
