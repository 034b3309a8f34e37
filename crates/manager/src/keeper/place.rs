//! Where runs have their own directories: one that nobody but this user can change, since the
//! program loads code from it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, StatVfsMountFlags, fchmod, flock, fstat, fstatvfs,
    mkdirat, open, openat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The shim, compiled with this crate.
const SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libundercroft_shim.so"));
/// Its file name, as mappings show it.
const SHIM_NAME: &str = "libundercroft_shim.so";
/// The name it is loaded by: a link. An AddressSanitizer that is a shared library refuses to start
/// unless the first library's name has its own in it; one linked statically refuses to start when a
/// mapping's has.
pub(super) const SHIM_LINK: &str = "libundercroft_shim-beside-libasan.so";
/// What both begin with.
pub(super) const SHIM_STEM: &str = "libundercroft_shim";

/// Sockets of a run: for its shims, and for `undercroft status`.
pub(super) const SHIM_SOCKET: &str = "shim.sock";
pub(crate) const STATUS_SOCKET: &str = "status.sock";

/// Everything that a run's directory may hold.
const FILES: [&str; 4] = [SHIM_NAME, SHIM_LINK, SHIM_SOCKET, STATUS_SOCKET];

/// Longest path of a socket, with its terminator.
const SOCKET_PATH_MAX: usize = 108;

/// Names tried for a run's directory. The second and later are needed where runs of several pid
/// namespaces share a directory.
const NAMES_MAX: u32 = 100;

/// A directory that may hold those of runs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    path: PathBuf,
    /// The user's own choice: no other is taken when it is not safe.
    chosen: bool,
}

/// Why a candidate is not taken.
#[derive(Debug)]
enum Unfit {
    /// Somebody else could change it, or it cannot be used at all: text and fix.
    Refused(String),
    /// The loader cannot take a library from there.
    NotForLoading(String),
}

/// What the choice depends on.
struct Surroundings {
    chosen: Option<PathBuf>,
    runtime: Option<PathBuf>,
    temporary: PathBuf,
    user: u32,
}

impl Surroundings {
    fn now() -> Surroundings {
        let variable = |name| {
            let value = std::env::var_os(name).filter(|value| !value.is_empty());
            value.map(PathBuf::from)
        };
        Surroundings {
            chosen: variable("UNDERCROFT_DIR"),
            runtime: variable("XDG_RUNTIME_DIR"),
            temporary: std::env::temp_dir(),
            user: rustix::process::geteuid().as_raw(),
        }
    }

    /// Best first.
    fn candidates(&self) -> Vec<Candidate> {
        let mut found = Vec::new();
        let mut add = |path: PathBuf, chosen| {
            let path = std::path::absolute(&path).unwrap_or(path);
            found.push(Candidate { path, chosen });
        };
        if let Some(chosen) = &self.chosen {
            add(chosen.clone(), true);
        }
        // Root's own comes first for root: a runtime directory is closed to other users, and a
        // program that becomes one of them still loads the shim when it calls exec.
        if self.user == 0 {
            add("/run/undercroft".into(), false);
        } else if let Some(runtime) = &self.runtime
            && std::fs::metadata(runtime).is_ok_and(|found| found.uid() == self.user)
        {
            add(runtime.join("undercroft"), false);
        }
        let own = format!("undercroft-{}", self.user);
        for parent in [
            self.temporary.as_path(),
            "/tmp".as_ref(),
            "/var/tmp".as_ref(),
        ] {
            add(parent.join(&own), false);
        }
        found
    }
}

/// Directories in which runs of this user may be found now.
pub(crate) fn bases() -> Vec<PathBuf> {
    let now = Surroundings::now();
    let mut found: Vec<PathBuf> = Vec::new();
    for candidate in now.candidates() {
        let Ok(path) = place_of(&candidate, now.user) else {
            continue;
        };
        if path.is_dir() && check(&path, now.user).is_ok() && !found.contains(&path) {
            found.push(path);
        }
    }
    found
}

/// Where in a candidate this user's runs are. A chosen directory that everybody may write to, as
/// `/tmp`, has one of each user inside.
fn place_of(candidate: &Candidate, user: u32) -> io::Result<PathBuf> {
    if !candidate.chosen {
        let (above, name) = (candidate.path.parent(), candidate.path.file_name());
        return Ok(match (above, name) {
            (Some(above), Some(name)) => std::fs::canonicalize(above)?.join(name),
            _ => candidate.path.clone(),
        });
    }
    let path = std::fs::canonicalize(&candidate.path)?;
    let found = std::fs::metadata(&path)?;
    let for_all = found.mode() & 0o1000 != 0 && [0, user].contains(&found.uid());
    Ok(if for_all {
        path.join(format!("undercroft-{user}"))
    } else {
        path
    })
}

/// Opens a candidate, making it when it is missing.
fn prepare(candidate: &Candidate, user: u32) -> Result<(PathBuf, OwnedFd), Unfit> {
    let cannot = |path: &Path, why: &dyn std::fmt::Display| {
        Unfit::Refused(format!("cannot use {}: {why}", path.display()))
    };
    let make = |path: &Path| {
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o755).recursive(candidate.chosen);
        match builder.create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(cannot(path, &error)),
            _ => Ok(()),
        }
    };
    if candidate.chosen {
        make(&candidate.path)?;
    }
    let path = place_of(candidate, user).map_err(|why| cannot(&candidate.path, &why))?;
    if let Some(why) = unloadable(&path) {
        return Err(Unfit::NotForLoading(format!("{}: {why}", path.display())));
    }
    make(&path)?;
    let base = check(&path, user).map_err(Unfit::Refused)?;
    let mounted = fstatvfs(&base).map_err(|why| cannot(&path, &why))?;
    if mounted.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        let why = "its file system is mounted noexec";
        return Err(Unfit::NotForLoading(format!("{}: {why}", path.display())));
    }
    Ok((path, base))
}

/// Why the loader, or a socket, could not use files below `path`.
fn unloadable(path: &Path) -> Option<&'static str> {
    let bytes = path.as_os_str().as_bytes();
    // What ends a name in LD_PRELOAD, and what is replaced in one.
    let splits = |byte: &u8| byte.is_ascii_whitespace() || b":$".contains(byte);
    if bytes.iter().any(splits) {
        return Some("the loader splits such a name at blanks, colons and dollars");
    }
    let longest = bytes.len() + "/run-4194304-99/".len() + STATUS_SOCKET.len();
    (longest >= SOCKET_PATH_MAX).then_some("the path is too long for a socket")
}

/// Opens `path` if it belongs to `user` and nobody else can change it, or put another in its place.
/// The error names the fix.
fn check(path: &Path, user: u32) -> Result<OwnedFd, String> {
    let fix = "set UNDERCROFT_DIR to a directory of your own";
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let shown = path.display();
    let base = open(path, flags, Mode::empty()).map_err(|why| match why {
        Errno::LOOP | Errno::NOTDIR => format!("{shown} is no directory: remove it, or {fix}"),
        why => format!("cannot use {shown}: {why}; {fix}"),
    })?;
    let found = fstat(&base).map_err(|why| format!("cannot use {shown}: {why}; {fix}"))?;
    if found.st_uid != user {
        return Err(format!(
            "{shown} belongs to user {}, who could put other code in place of undercroft's: \
            remove it, or {fix}",
            found.st_uid
        ));
    }
    if found.st_mode & 0o022 != 0 {
        return Err(format!(
            "others may write to {shown}, and could put other code in place of undercroft's: \
            `chmod go-w {shown}`, or {fix}"
        ));
    }
    for above in path.ancestors().skip(1) {
        let found = std::fs::symlink_metadata(above)
            .map_err(|why| format!("cannot use {shown}: {}: {why}; {fix}", above.display()))?;
        let safe = found.mode() & 0o022 == 0 || found.mode() & 0o1000 != 0;
        if !safe || ![0, user].contains(&found.uid()) || found.is_symlink() {
            return Err(format!(
                "somebody else can change {}, and so what is at {shown}; {fix}",
                above.display()
            ));
        }
    }
    Ok(base)
}

/// The run's directory; removed with the run. It is locked while the run lasts: what is not locked
/// was left behind.
pub(super) struct RunDir {
    path: PathBuf,
    name: String,
    base: OwnedFd,
    own: OwnedFd,
}

impl RunDir {
    /// Errors: no directory is fit; the text names the fix.
    pub fn create() -> io::Result<RunDir> {
        let now = Surroundings::now();
        let mut why = Vec::new();
        for candidate in now.candidates() {
            match prepare(&candidate, now.user) {
                Ok((path, base)) => return RunDir::create_in(&path, base),
                Err(Unfit::Refused(text)) if candidate.chosen => {
                    return Err(io::Error::other(text));
                }
                Err(Unfit::Refused(text) | Unfit::NotForLoading(text)) => {
                    if !why.contains(&text) {
                        why.push(text);
                    }
                }
            }
        }
        Err(io::Error::other(format!(
            "no directory for the run's files; set UNDERCROFT_DIR to one of your own, without blanks \
            or colons in its path. {}",
            why.join("; ")
        )))
    }

    fn create_in(path: &Path, base: OwnedFd) -> io::Result<RunDir> {
        remove_leftovers(path, &base);
        for number in 0..NAMES_MAX {
            let name = match number {
                0 => format!("run-{}", std::process::id()),
                n => format!("run-{}-{n}", std::process::id()),
            };
            match mkdirat(&base, &name, Mode::from_raw_mode(0o755)) {
                Err(Errno::EXIST) => continue,
                made => made?,
            }
            let own = open_dir(&base, &name)?;
            flock(&own, FlockOperation::LockExclusive)?;
            let dir = RunDir {
                path: path.join(&name),
                name,
                base,
                own,
            };
            dir.fill()?;
            return Ok(dir);
        }
        Err(io::Error::other(format!(
            "{} has too many runs of one number: clean it up",
            path.display()
        )))
    }

    fn fill(&self) -> io::Result<()> {
        // The umask may have taken rights that a program needs after it has changed its user.
        fchmod(&self.own, Mode::from_raw_mode(0o755))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o755);
        let shim = openat(&self.own, SHIM_NAME, flags, mode)?;
        fchmod(&shim, mode)?;
        io::Write::write_all(&mut std::fs::File::from(shim), SHIM)?;
        Ok(symlinkat(SHIM_NAME, &self.own, SHIM_LINK)?)
    }

    /// The path of one of its files.
    pub fn path(&self, file: &str) -> PathBuf {
        self.path.join(file)
    }

    /// A listening socket in it.
    pub fn listen(&self, name: &str, kind: SocketType, mode: u32) -> io::Result<OwnedFd> {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path(name);
        let address = SocketAddrUnix::new(&path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, 128)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        Ok(socket)
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        remove_run(&self.base, &self.own, &self.name);
    }
}

fn open_dir(base: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(base, name, flags, Mode::empty())?)
}

/// Removes directories of runs whose keepers are dead: nobody holds their lock. A process number
/// would not tell: it may be another's by now, or of another pid namespace.
fn remove_leftovers(path: &Path, base: &OwnedFd) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| is_run(OsStr::new(name))) else {
            continue;
        };
        let Ok(own) = open_dir(base, name) else {
            continue;
        };
        // A run that begins has no shim yet, and may not have its lock.
        let begun = rustix::fs::statat(&own, SHIM_LINK, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if begun && flock(&own, FlockOperation::NonBlockingLockExclusive).is_ok() {
            remove_run(base, &own, name);
        }
    }
}

/// True for names that a run's directory may have.
pub(crate) fn is_run(name: &OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix("run-"));
    number.is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit() || b == b'-')
    })
}

fn remove_run(base: &OwnedFd, own: &OwnedFd, name: &str) {
    for file in FILES {
        let _ = unlinkat(own, file, AtFlags::empty());
    }
    let _ = unlinkat(base, name, AtFlags::REMOVEDIR);
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
