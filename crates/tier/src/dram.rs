//! Whether what a file or device keeps lies in DRAM, so that a tier there saves none.
//!
//! A file system in memory says so itself. An overlay is where its upper directory is. Any other
//! file system is where its block device is: zram and brd are DRAM, a loop device is where its file
//! is, and a device that is made of others is where any of them is. What cannot be found out counts
//! as not DRAM: the upper directory of a container is often out of its sight.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, major, minor};

const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;
const OVERLAY_MAGIC: i64 = 0x794c_7630;

/// Files and devices below each other that are looked at.
const DEPTH_MAX: usize = 8;

/// Whether this file, directory or device keeps its bytes in DRAM.
pub fn holds(file: &File) -> bool {
    keeps(file, DEPTH_MAX)
}

/// As [`holds`], of a path. `None`: it cannot be opened.
pub fn holds_path(path: &Path) -> Option<bool> {
    open(path).map(|file| holds(&file))
}

fn open(path: &Path) -> Option<File> {
    let flags = OFlags::PATH.bits() as i32;
    (fs::OpenOptions::new().read(true).custom_flags(flags))
        .open(path)
        .ok()
}

fn keeps(file: &File, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return false;
    };
    let (Ok(metadata), Ok(system)) = (file.metadata(), rustix::fs::fstatfs(file)) else {
        return false;
    };
    let kind = metadata.file_type();
    if kind.is_block_device() {
        return device_keeps(Path::new("/sys"), metadata.rdev(), depth);
    }
    match system.f_type {
        TMPFS_MAGIC | RAMFS_MAGIC => true,
        OVERLAY_MAGIC => {
            let upper = mount_of(file).and_then(|mount| mount.option("upperdir"));
            upper.is_some_and(|path| path_keeps(&path, depth))
        }
        _ if major(metadata.dev()) != 0 => device_keeps(Path::new("/sys"), metadata.dev(), depth),
        // A file system of several devices: the mount names one.
        _ => {
            let source = mount_of(file).map(|mount| mount.source);
            let source = source.filter(|path| path.starts_with("/dev"));
            source.is_some_and(|path| path_keeps(&path, depth))
        }
    }
}

fn path_keeps(path: &Path, depth: usize) -> bool {
    open(path).is_some_and(|file| keeps(&file, depth))
}

/// Whether a block device is DRAM.
///
/// * `sys`: where sysfs is.
fn device_keeps(sys: &Path, device: u64, depth: usize) -> bool {
    let name = format!("dev/block/{}:{}", major(device), minor(device));
    fs::canonicalize(sys.join(name)).is_ok_and(|folder| folder_keeps(&folder, depth))
}

/// * `folder`: of the block device, or of a partition, in sysfs.
fn folder_keeps(folder: &Path, depth: usize) -> bool {
    let Some(depth) = depth.checked_sub(1) else {
        return false;
    };
    if folder.join("partition").exists() {
        return (folder.parent()).is_some_and(|whole| folder_keeps(whole, depth));
    }
    let name = folder.file_name().and_then(|name| name.to_str());
    let number = |prefix: &str| {
        let rest = name.and_then(|name| name.strip_prefix(prefix));
        rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|it| it.is_ascii_digit()))
    };
    if number("zram") || number("ram") {
        return true;
    }
    if let Ok(file) = fs::read(folder.join("loop/backing_file")) {
        let file = file.strip_suffix(b"\n").unwrap_or(&file);
        return path_keeps(&PathBuf::from(OsString::from_vec(file.to_vec())), depth);
    }
    let parts = fs::read_dir(folder.join("slaves")).into_iter().flatten();
    let mut parts = parts
        .flatten()
        .filter_map(|it| it.path().canonicalize().ok());
    parts.any(|part| folder_keeps(&part, depth))
}

/// A line of /proc/self/mountinfo.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    source: PathBuf,
    options: String,
}

impl Mount {
    /// The mount of this number.
    fn numbered(text: &str, number: &str) -> Option<Mount> {
        let is_it = |line: &&str| line.split(' ').next() == Some(number);
        let line = text.lines().find(is_it)?;
        let (_, rest) = line.split_once(" - ")?;
        let mut fields = rest.split(' ');
        let (_kind, source, options) = (fields.next()?, fields.next()?, fields.next()?);
        Some(Mount {
            source: unescaped(source),
            options: options.to_owned(),
        })
    }

    /// The value of an option of the file system.
    fn option(&self, name: &str) -> Option<PathBuf> {
        let of = |it: &str| it.strip_prefix(name)?.strip_prefix('=').map(unescaped);
        self.options.split(',').find_map(of)
    }
}

/// The mount that a file lies in.
fn mount_of(file: &File) -> Option<Mount> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).ok()?;
    let number = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    Mount::numbered(&String::from_utf8_lossy(&mounts), number.trim())
}

/// A text in which the kernel wrote some bytes as `\OOO`.
fn unescaped(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(byte.unwrap_or(bytes[at]));
        at += if byte.is_some() { 4 } else { 1 };
    }
    PathBuf::from(OsString::from_vec(plain))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn mounts_are_found_by_their_number_and_paths_are_as_they_were_written() {
        let text = "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
                    211 21 0:40 / /a rw - overlay o v rw,lowerdir=/l,upperdir=/x\n\
                    31 21 0:41 / /b rw - overlay none rw,lowerdir=/l,upperdir=/up\\040\\054s,workdir=/w\n";
        let mount = Mount::numbered(text, "31").expect("it is there");
        assert_eq!(mount.option("upperdir"), Some("/up ,s".into()));
        assert_eq!(mount.option("upper"), None);
        let mount = Mount::numbered(text, "21").expect("it is there");
        assert_eq!(mount.source, Path::new("/dev/sda1"));
        assert_eq!(Mount::numbered(text, "2"), None);
        assert_eq!(unescaped("a\\13"), Path::new("a\\13"));
    }

    /// A tree like sysfs: disks, a partition, zram, brd, loop devices and what is made of them.
    #[test]
    fn devices_of_dram_are_known_also_below_others() {
        let tree = tempfile::tempdir().expect("a scratch folder");
        let sys = tree.path();
        let disk = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let on_disk = disk.path().join("image");
        fs::write(&on_disk, "").expect("a file");
        let numbers = [
            "sda", "zram0", "ram1", "ramble", "loop0", "dm-0", "dm-1", "dm-2",
        ];
        fs::create_dir_all(sys.join("dev/block")).expect("a folder");
        for (minor, name) in numbers.iter().enumerate() {
            let folder = sys.join("devices").join(name);
            fs::create_dir_all(folder.join("slaves")).expect("a folder");
            symlink(&folder, sys.join(format!("dev/block/7:{minor}"))).expect("a link");
        }
        let of = |name: &str| sys.join("devices").join(name);
        fs::create_dir_all(of("zram0/zram0p1")).expect("a folder");
        fs::write(of("zram0/zram0p1/partition"), "1\n").expect("a file");
        symlink(of("zram0/zram0p1"), sys.join("dev/block/7:9")).expect("a link");
        fs::create_dir_all(of("loop0/loop")).expect("a folder");
        let backing = format!("{}\n", on_disk.display());
        fs::write(of("loop0/loop/backing_file"), backing).expect("a file");
        symlink(of("sda"), of("dm-0/slaves/sda")).expect("a link");
        symlink(of("sda"), of("dm-1/slaves/sda")).expect("a link");
        symlink(of("ram1"), of("dm-1/slaves/ram1")).expect("a link");
        symlink(of("dm-2"), of("dm-2/slaves/dm-2")).expect("a link"); // a circle ends
        let found = |minor| device_keeps(sys, rustix::fs::makedev(7, minor), DEPTH_MAX);
        let all: Vec<bool> = (0..10).map(found).collect();
        let disk_is_memory = holds_path(&on_disk) == Some(true);
        let expected = [
            false,
            true,
            true,
            false,
            disk_is_memory,
            false,
            true,
            false,
            false,
            true,
        ];
        assert_eq!(all, expected);
        if let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") {
            let backing = format!("{}\n", file.path().display());
            fs::write(of("loop0/loop/backing_file"), backing).expect("a file");
            assert!(found(4), "its file is in memory");
        } else {
            println!("SKIPPED: a loop device over a file in memory: no /dev/shm");
        }
    }

    /// An overlay whose upper directory is a tmpfs, in a mount namespace of its own.
    #[test]
    fn an_overlay_is_where_its_upper_directory_is() {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
        let script = "cd \"$1\" && mkdir low top 'me m' && mount -t tmpfs none 'me m' && \
                      mkdir 'me m/u' 'me m/w' up work disk && \
                      mount -t overlay none -o \"lowerdir=low,upperdir=$1/me m/u,workdir=$1/me m/w\" top && \
                      mount -t overlay none -o \"lowerdir=low,upperdir=$1/up,workdir=$1/work\" disk && \
                      exec \"$2\" --ignored --nocapture --exact dram::tests::overlay_inner";
        let output = Command::new("unshare")
            .args(["-m", "sh", "-c", script, "sh"])
            .arg(folder.path())
            .arg(std::env::current_exe().expect("a path"))
            .env("UNDERCROFT_TEST_OVERLAY", folder.path())
            .output();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output {
            Ok(output) if text(&output.stdout).contains("running 1 test") => {
                println!("{}", text(&output.stdout));
                assert!(output.status.success(), "{}", text(&output.stderr));
            }
            Ok(output) => println!("SKIPPED: no overlay: {}", text(&output.stderr)),
            Err(error) => println!("SKIPPED: no unshare: {error}"),
        }
    }

    #[test]
    #[ignore = "run by an_overlay_is_where_its_upper_directory_is in its mounts"]
    fn overlay_inner() {
        let Some(folder) = std::env::var_os("UNDERCROFT_TEST_OVERLAY").map(PathBuf::from) else {
            println!("SKIPPED: not in its mounts");
            return;
        };
        let open = |name: &str| {
            let size = Some(undercroft_base::Bytes(4 << 20));
            crate::file::Backing::open(&folder.join(name), size).expect("a file")
        };
        assert_eq!(holds_path(&folder.join("top")), Some(true));
        assert!(open("top").is_in_memory());
        if holds_path(&folder.join("up")) == Some(false) {
            assert!(!open("disk").is_in_memory());
        } else {
            println!("SKIPPED: an overlay on a disk: /var/tmp is in memory");
        }
    }
}
