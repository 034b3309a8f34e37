//! The directories of runs. The program loads code from there, so no other user may change them.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, StatVfsMountFlags, fchmod, flock, fstat, fstatvfs,
    mkdirat, open, openat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
pub(super) use undercroft_wire::protocol::SHIM_LINK;

use super::stub::stub;

/// The shim, compiled with this crate.
const SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libundercroft_shim.so"));
/// The shim's file name, as mappings show it.
pub(super) const SHIM_NAME: &str = "libundercroft_shim.so";
/// The beginning of both names.
pub(super) const SHIM_STEM: &str = "libundercroft_shim";

/// The sockets of a run: for its shims, and for `undercroft status`.
pub(super) const SHIM_SOCKET: &str = "shim.sock";
pub(crate) const STATUS_SOCKET: &str = "status.sock";
/// The keeper's own, for `undercroft upgrade`.
pub(super) const UPGRADE_SOCKET: &str = "keeper.sock";

/// The files that a run's directory may hold, besides [`STUB_DIR`] and [`PLATFORMS`].
const FILES: [&str; 5] = [
    SHIM_NAME,
    SHIM_LINK,
    SHIM_SOCKET,
    STATUS_SOCKET,
    UPGRADE_SOCKET,
];

/// Directory of the 32-bit stub.
const STUB_DIR: &str = "32";
/// Words that loaders put in place of `$PLATFORM` (`BY_PLATFORM`), and where it leads. That of
/// 64-bit glibc depends on the processor, up to version 2.36.
const PLATFORMS: [(&str, &str); 7] = [
    ("i386", STUB_DIR),
    ("i486", STUB_DIR),
    ("i586", STUB_DIR),
    ("i686", STUB_DIR),
    ("x86_64", "."),
    ("haswell", "."),
    ("xeon_phi", "."),
];

/// Longest path of a socket, with its terminator.
const SOCKET_PATH_MAX: usize = 108;

/// Names tried for a run's directory. The second and later are needed where runs of several pid
/// namespaces share a directory.
const NAMES_MAX: u32 = 100;

/// The longest of these names: the kernel's largest process number, and the last of the names.
const LONGEST_NAME: &str = "/run-4194304-99/";

// A number below this has the two digits that the longest name has room for.
const _: () = assert!(NAMES_MAX <= 100);

/// A directory that may hold those of runs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    path: PathBuf,
    /// The user chose it. If it is not safe, the run is refused.
    chosen: bool,
}

/// The fix for a directory that is not fit.
const FIX: &str = "set UNDERCROFT_DIR to a directory of your own";

/// Why a directory cannot hold runs. Each text has the fix, or is part of one that has it.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Something else has its name.
    #[error("{} is no directory: remove it, or {FIX}", .0.display())]
    NotADirectory(PathBuf),
    /// Another user has it.
    #[error(
        "{} belongs to user {owner}, who could put other code in place of undercroft's: remove \
         it, or {FIX}",
        .path.display()
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Other users may write to it.
    #[error(
        "others may write to {shown}, and could put other code in place of undercroft's: `chmod \
         go-w {shown}`, or {FIX}",
        shown = .0.display()
    )]
    OpenToOthers(PathBuf),
    /// Another directory could be put in its place.
    #[error(
        "another user can change {}, and so replace {}: {FIX}",
        .above.display(),
        .path.display()
    )]
    OpenAbove {
        /// The directory.
        path: PathBuf,
        /// The one above that can be changed.
        above: PathBuf,
    },
    /// A system call failed.
    #[error("cannot use {}: {why}; {FIX}", .path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// The loader maps nothing executable from there.
    #[error("{}: its file system is mounted noexec", .0.display())]
    NoExec(PathBuf),
    /// The loader would take the path for two.
    #[error("{}: the loader splits such a name at blanks, colons and dollars", .0.display())]
    Splits(PathBuf),
    /// No socket can have such a path.
    #[error("{}: the path is too long for a socket", .0.display())]
    TooLong(PathBuf),
    /// Each candidate, and why it is not fit.
    #[error(
        "no directory is fit for the run's files: {}. {FIX}, without blanks or colons in its path",
        all_of(.0)
    )]
    NoneFits(Vec<PlaceError>),
    /// All names of one number are taken.
    #[error("{} has too many runs of one number: remove the old ones", .0.display())]
    Full(PathBuf),
}

impl PlaceError {
    fn unusable(path: &Path, why: impl Into<io::Error>) -> PlaceError {
        PlaceError::Unusable {
            path: path.to_owned(),
            why: why.into(),
        }
    }

    /// The directory is safe, but the loader or a socket cannot use it. Another one is tried, even
    /// if the user chose this one.
    fn allows_another(&self) -> bool {
        matches!(
            self,
            PlaceError::NoExec(_) | PlaceError::Splits(_) | PlaceError::TooLong(_)
        )
    }
}

/// The texts of several errors, each once, without the fix that they share.
fn all_of(errors: &[PlaceError]) -> String {
    let mut texts: Vec<String> = Vec::new();
    for error in errors {
        let text = error.to_string();
        let without = [", or ", "; ", ": "].iter();
        let mut without = without.filter_map(|sign| text.strip_suffix(FIX)?.strip_suffix(sign));
        let text = without.next().unwrap_or(&text).to_owned();
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    texts.join("; ")
}

/// Facts on which the choice depends.
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

    /// The candidates, best first.
    fn candidates(&self) -> Vec<Candidate> {
        let mut found = Vec::new();
        let mut add = |path: PathBuf, chosen| {
            let path = std::path::absolute(&path).unwrap_or(path);
            found.push(Candidate { path, chosen });
        };
        if let Some(chosen) = &self.chosen {
            add(chosen.clone(), true);
        }
        // For root, /run/undercroft comes first. A program may become another user, and still has
        // to load the shim when it calls exec; a runtime directory is closed to other users.
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

/// The first candidate that is fit: where runs of this user have their directories, and the daemon
/// its socket. Returns it open, too. Errors: the user's own choice is not safe, or none is fit.
pub fn directory() -> Result<(PathBuf, OwnedFd), PlaceError> {
    let now = Surroundings::now();
    let mut unfit = Vec::new();
    for candidate in now.candidates() {
        match prepare(&candidate, now.user) {
            Ok(found) => return Ok(found),
            Err(why) if candidate.chosen && !why.allows_another() => return Err(why),
            Err(why) => unfit.push(why),
        }
    }
    Err(PlaceError::NoneFits(unfit))
}

/// Whether the loader takes files from there.
fn is_loadable(path: &Path) -> bool {
    let noexec = |path: &Path| {
        let mounted = rustix::fs::statvfs(path);
        mounted.is_ok_and(|of| of.f_flag.contains(StatVfsMountFlags::NOEXEC))
    };
    check_loadable(path).is_ok() && !noexec(path)
}

/// Directories in which runs of this user may be found now: the user's choice alone, if there is
/// one that runs can use.
pub(crate) fn bases() -> Vec<PathBuf> {
    let now = Surroundings::now();
    let mut found: Vec<PathBuf> = Vec::new();
    for candidate in now.candidates() {
        let path = place_of(&candidate, now.user);
        // Runs go elsewhere only if their files cannot be loaded from the user's choice.
        let alone = candidate.chosen && path.as_ref().is_ok_and(|path| is_loadable(path));
        if let Ok(path) = path
            && path.is_dir()
            && check(&path, now.user).is_ok()
            && !found.contains(&path)
        {
            found.push(path);
        }
        if alone {
            break;
        }
    }
    found
}

/// The directory inside a candidate for this user's runs. A chosen directory that all users may
/// write to, such as `/tmp`, has one for each user.
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

/// Another user's directory of runs, open. `None`: there is none that is fit.
pub(crate) fn open_of(path: &Path, user: u32) -> Option<OwnedFd> {
    let path = std::fs::canonicalize(path.parent()?)
        .ok()?
        .join(path.file_name()?);
    check(&path, user).ok()
}

/// Opens a candidate, making it when it is missing.
fn prepare(candidate: &Candidate, user: u32) -> Result<(PathBuf, OwnedFd), PlaceError> {
    let make = |path: &Path| {
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o755).recursive(candidate.chosen);
        match builder.create(path) {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => {
                Err(PlaceError::unusable(path, why))
            }
            _ => Ok(()),
        }
    };
    if candidate.chosen {
        make(&candidate.path)?;
    }
    let path =
        place_of(candidate, user).map_err(|why| PlaceError::unusable(&candidate.path, why))?;
    check_loadable(&path)?;
    make(&path)?;
    let base = check(&path, user)?;
    let mounted = fstatvfs(&base).map_err(|why| PlaceError::unusable(&path, why))?;
    if mounted.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(PlaceError::NoExec(path));
    }
    if mounted.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(PlaceError::unusable(&path, Errno::ROFS));
    }
    Ok((path, base))
}

/// Refuses a path that the loader would split, or that is too long for a socket in it.
fn check_loadable(path: &Path) -> Result<(), PlaceError> {
    let bytes = path.as_os_str().as_bytes();
    // Blanks and colons end a name in LD_PRELOAD, and a dollar begins a variable.
    let splits = |byte: &u8| byte.is_ascii_whitespace() || b":$".contains(byte);
    if bytes.iter().any(splits) {
        return Err(PlaceError::Splits(path.to_owned()));
    }
    let longest = bytes.len() + LONGEST_NAME.len() + STATUS_SOCKET.len();
    if longest >= SOCKET_PATH_MAX {
        return Err(PlaceError::TooLong(path.to_owned()));
    }
    Ok(())
}

/// Opens `path`. Refuses it if another user owns it, can change it, or can put another directory in
/// its place.
fn check(path: &Path, user: u32) -> Result<OwnedFd, PlaceError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let base = open(path, flags, Mode::empty()).map_err(|why| match why {
        Errno::LOOP | Errno::NOTDIR => PlaceError::NotADirectory(path.to_owned()),
        why => PlaceError::unusable(path, why),
    })?;
    let found = fstat(&base).map_err(|why| PlaceError::unusable(path, why))?;
    if found.st_uid != user {
        return Err(PlaceError::Foreign {
            path: path.to_owned(),
            owner: found.st_uid,
        });
    }
    if found.st_mode & 0o022 != 0 {
        return Err(PlaceError::OpenToOthers(path.to_owned()));
    }
    for above in path.ancestors().skip(1) {
        let found =
            std::fs::symlink_metadata(above).map_err(|why| PlaceError::unusable(above, why))?;
        let safe = found.mode() & 0o022 == 0 || found.mode() & 0o1000 != 0;
        if !safe || ![0, user].contains(&found.uid()) || found.is_symlink() {
            return Err(PlaceError::OpenAbove {
                path: path.to_owned(),
                above: above.to_owned(),
            });
        }
    }
    Ok(base)
}

/// A run's directory, removed with the run. It is locked while the run lasts: one without a lock
/// was left behind.
pub(super) struct RunDir {
    path: PathBuf,
    name: String,
    base: OwnedFd,
    own: OwnedFd,
}

impl RunDir {
    /// Makes it in the first candidate that is fit. Errors: the user's own choice is not safe, or
    /// no candidate is fit.
    pub(super) fn create() -> Result<RunDir, PlaceError> {
        let (path, base) = directory()?;
        RunDir::create_in(&path, base)
    }

    fn create_in(path: &Path, base: OwnedFd) -> Result<RunDir, PlaceError> {
        remove_leftovers(path, &base);
        match RunDir::take_name(path, base) {
            Ok(Some(dir)) => Ok(dir),
            Ok(None) => Err(PlaceError::Full(path.to_owned())),
            Err(why) => Err(PlaceError::unusable(path, why)),
        }
    }

    /// Makes the directory under the first free name. `None`: all names are taken.
    fn take_name(path: &Path, base: OwnedFd) -> io::Result<Option<RunDir>> {
        for number in 0..NAMES_MAX {
            let name = match number {
                0 => format!("run-{}", std::process::id()),
                n => format!("run-{}-{n}", std::process::id()),
            };
            match mkdirat(&base, &name, Mode::from_raw_mode(0o755)) {
                Err(Errno::EXIST) => continue,
                made => made?,
            }
            // Without a lock it looks left behind, and may be removed.
            let Some(own) = locked(&base, &name, FlockOperation::LockExclusive)? else {
                continue;
            };
            let dir = RunDir {
                path: path.join(&name),
                name,
                base,
                own,
            };
            dir.fill()?;
            return Ok(Some(dir));
        }
        Ok(None)
    }

    fn fill(&self) -> io::Result<()> {
        // The umask may have removed rights that the program needs once it has changed its user.
        fchmod(&self.own, Mode::from_raw_mode(0o755))?;
        write_program(&self.own, SHIM_NAME, SHIM)?;
        symlinkat(SHIM_NAME, &self.own, SHIM_LINK)?;
        mkdirat(&self.own, STUB_DIR, Mode::from_raw_mode(0o755))?;
        let stub_dir = open_dir(&self.own, STUB_DIR)?;
        fchmod(&stub_dir, Mode::from_raw_mode(0o755))?;
        write_program(&stub_dir, SHIM_LINK, &stub())?;
        for (platform, to) in PLATFORMS {
            symlinkat(to, &self.own, platform)?;
        }
        Ok(())
    }

    /// The path of one of the run's files.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.path.join(file)
    }

    /// Makes a listening socket in the directory.
    pub(super) fn listen(&self, name: &str, kind: SocketType, mode: u32) -> io::Result<OwnedFd> {
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

/// Makes a file that every user can load.
fn write_program(dir: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o755);
    let file = openat(dir, name, flags, mode)?;
    fchmod(&file, mode)?;
    io::Write::write_all(&mut std::fs::File::from(file), bytes)
}

fn open_dir(base: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(base, name, flags, Mode::empty())?)
}

/// Opens and locks a directory. `None`: it was removed meanwhile, or another has its name.
fn locked(base: &OwnedFd, name: &str, how: FlockOperation) -> io::Result<Option<OwnedFd>> {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let own = match open_dir(base, name) {
        Err(error) if is_gone(&error) => return Ok(None),
        own => own?,
    };
    flock(&own, how)?;
    let number = fstat(&own)?.st_ino;
    let named = statat(base, name, AtFlags::SYMLINK_NOFOLLOW);
    Ok(named
        .is_ok_and(|named| named.st_ino == number)
        .then_some(own))
}

/// Removes directories of runs whose keepers are dead: no process holds their lock. The process
/// number in the name proves nothing: it may belong to another process by now, or to another pid
/// namespace.
///
/// * `path`, `base`: from [`directory`].
pub fn remove_leftovers(path: &Path, base: &OwnedFd) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| is_run(OsStr::new(name))) else {
            continue;
        };
        if let Ok(Some(own)) = locked(base, name, FlockOperation::NonBlockingLockExclusive) {
            remove_run(base, &own, name);
        }
    }
}

/// True if a run's directory may have this name.
pub(crate) fn is_run(name: &OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix("run-"));
    number.is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit() || b == b'-')
    })
}

fn remove_run(base: &OwnedFd, own: &OwnedFd, name: &str) {
    let platforms = PLATFORMS.iter().map(|(platform, _)| *platform);
    for file in FILES.into_iter().chain(platforms) {
        let _ = unlinkat(own, file, AtFlags::empty());
    }
    if let Ok(stub_dir) = open_dir(own, STUB_DIR) {
        let _ = unlinkat(stub_dir, SHIM_LINK, AtFlags::empty());
        let _ = unlinkat(own, STUB_DIR, AtFlags::REMOVEDIR);
    }
    let _ = unlinkat(base, name, AtFlags::REMOVEDIR);
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
