//! Profiles of tiers: what `measure` finds, kept in a file, so that later runs on the same device
//! know it. Source: RapidSwap §3.3, where a device is measured when it is registered.
//!
//! root's profiles are in `/var/lib/undercroft`, and every user's runs know them. Those of another
//! user are in `~/.local/state/undercroft`, and come first. Where `XDG_STATE_HOME` is set, only
//! those in its `undercroft` count.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock, major, minor};
use rustix::process::geteuid;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shape::ShapeName;
use crate::spec::TierSpec;

/// Most bytes of the file that are read: some thousand profiles.
const FILE_MAX: u64 = 4 << 20;
/// More channels than any device has.
const CHANNELS_MAX: u32 = 4096;
/// Longer than any operation on a page takes.
const SECONDS_MAX: f64 = 100.0;
/// More bytes a second than any memory passes.
const SPEED_MAX: f64 = 1e15;
/// Others are waited for this long while they keep a profile.
const PATIENCE: Duration = Duration::from_secs(10);

const NAME: &str = "profiles.json";
const OF_ALL: &str = "/var/lib/undercroft";

/// Times of one operation, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Times {
    /// Half of them took no longer.
    pub p50: f64,
    /// 99 of 100 took no longer.
    pub p99: f64,
}

/// Figures of a tier, as they were measured once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Profile {
    /// As the user gave it.
    pub name: String,
    /// `ram`, `nvm`, `file` or `redis`.
    pub kind: String,
    /// Its times, or the memory itself, are not real.
    pub emulated: bool,
    /// Most it held.
    pub capacity_bytes: u64,
    /// Reads of one page, in random order.
    pub read_seconds: Times,
    /// Writes of one page, with the allocation of its slot.
    pub write_seconds: Times,
    /// Frees of one page.
    pub free_seconds: Times,
    /// Bytes of pages read in sequence.
    pub read_bytes_per_second: f64,
    /// Bytes of pages written in sequence.
    pub write_bytes_per_second: f64,
    /// Reads of a device that are served at the same time; null for memory and clusters.
    pub channels: Option<u32>,
    /// When, in seconds since 1970.
    pub measured_at: u64,
}

impl Profile {
    fn is_sound(&self) -> bool {
        let times = [self.read_seconds, self.write_seconds, self.free_seconds];
        let speeds = [self.read_bytes_per_second, self.write_bytes_per_second];
        let mut figures = times.iter().flat_map(|times| [times.p50, times.p99]);
        figures.all(|seconds| (0.0..=SECONDS_MAX).contains(&seconds))
            && speeds.iter().all(|speed| (0.0..=SPEED_MAX).contains(speed))
            && (self.channels).is_none_or(|count| (1..=CHANNELS_MAX).contains(&count))
    }
}

/// A profile, and what it is of: see [`device_of`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    device: String,
    #[serde(flatten)]
    profile: Profile,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Listed {
    profiles: Vec<Kept>,
}

/// Why profiles cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file cannot be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    /// The file is not what was written.
    #[error("{0} is no file of profiles ({1}); remove it and measure again")]
    Damaged(PathBuf, String),
    /// The profile cannot be true.
    #[error("the figures that were measured of {0} cannot be, so they are not kept; measure again")]
    Unsound(String),
    /// The environment names no place.
    #[error("neither HOME nor XDG_STATE_HOME says where profiles are kept; set one of them")]
    NoPlace,
}

/// Profiles in a folder.
#[derive(Clone, Debug)]
pub struct Profiles(PathBuf);

impl Profiles {
    /// Profiles in `folder`, which need not exist yet.
    pub fn at(folder: &Path) -> Profiles {
        Profiles(folder.to_owned())
    }

    /// Where this user's are kept.
    ///
    /// Errors: `NoPlace`.
    pub fn of_user() -> Result<Profiles, ProfileError> {
        if let Some(state) = set("XDG_STATE_HOME") {
            return Ok(Profiles(Path::new(&state).join("undercroft")));
        }
        if geteuid().is_root() {
            return Ok(Profiles::at(Path::new(OF_ALL)));
        }
        let home = set("HOME").ok_or(ProfileError::NoPlace)?;
        Ok(Profiles(Path::new(&home).join(".local/state/undercroft")))
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.0.join(NAME)
    }

    /// All of them, the newest last. None if there is no file.
    ///
    /// Errors: it cannot be read, or is damaged.
    pub fn all(&self) -> Result<Vec<Profile>, ProfileError> {
        Ok(self.read()?.into_iter().map(|kept| kept.profile).collect())
    }

    /// That of the tier that `spec` describes.
    ///
    /// Errors: the file cannot be read, or is damaged.
    pub fn find(&self, spec: &TierSpec) -> Result<Option<Profile>, ProfileError> {
        let device = device_of(spec);
        let mut all = self.read()?.into_iter().rev();
        Ok(all
            .find(|kept| kept.device == device)
            .map(|kept| kept.profile))
    }

    /// Keeps a profile in place of the one before of the same device.
    ///
    /// Errors: the file cannot be read or written. What was kept before is still there.
    pub fn keep(&self, spec: &TierSpec, profile: &Profile) -> Result<(), ProfileError> {
        if !profile.is_sound() {
            return Err(ProfileError::Unsound(profile.name.clone()));
        }
        let failed = |error| ProfileError::File(self.path(), error);
        let _folder = self.locked().map_err(failed)?;
        let kept = Kept {
            device: device_of(spec),
            profile: profile.clone(),
        };
        let mut profiles = self.read()?;
        profiles.retain(|other| other.device != kept.device);
        profiles.push(kept);
        self.write(&Listed { profiles }).map_err(failed)
    }

    /// The folder, which is made if it is missing. Others wait until it is closed.
    fn locked(&self) -> io::Result<File> {
        if !self.0.is_dir() {
            fs::create_dir_all(&self.0)?;
            fs::set_permissions(&self.0, fs::Permissions::from_mode(0o755))?;
        }
        let folder = File::open(&self.0)?;
        let begun = Instant::now();
        // Any user may hold the lock of root's folder, so nothing waits for it without end.
        while let Err(error) = flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            if begun.elapsed() > PATIENCE {
                return Err(error.into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(folder)
    }

    fn read(&self) -> Result<Vec<Kept>, ProfileError> {
        let path = self.path();
        // Not to be read is as not to be there: root's may be.
        let none = [
            io::ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::NotADirectory,
        ];
        // A pipe in its place holds up no run.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = match OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&path)
        {
            Err(error) if none.contains(&error.kind()) => return Ok(Vec::new()),
            opened => opened,
        };
        let mut text = String::new();
        let read = file.and_then(|file| file.take(FILE_MAX).read_to_string(&mut text));
        if let Err(error) = read {
            return Err(ProfileError::File(path, error));
        }
        let listed: Listed = match serde_json::from_str(&text) {
            Ok(listed) => listed,
            Err(error) => return Err(ProfileError::Damaged(path, error.to_string())),
        };
        if let Some(bad) = (listed.profiles.iter()).find(|kept| !kept.profile.is_sound()) {
            let why = format!("the figures of {} cannot be", bad.profile.name);
            return Err(ProfileError::Damaged(path, why));
        }
        Ok(listed.profiles)
    }

    /// A reader sees all of it, or what was there before.
    fn write(&self, listed: &Listed) -> io::Result<()> {
        let fresh = self.0.join(format!("{NAME}.{}", std::process::id()));
        let _: io::Result<()> = fs::remove_file(&fresh); // of one that died
        let written = || {
            // Never through a link that somebody has put there.
            let mut file = File::create_new(&fresh)?;
            file.set_permissions(fs::Permissions::from_mode(0o644))?;
            serde_json::to_writer_pretty(&mut file, listed)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            fs::rename(&fresh, self.path())
        };
        written().inspect_err(|_: &io::Error| {
            let _: io::Result<()> = fs::remove_file(&fresh);
        })
    }
}

/// The profile that this user or root has of the tier that `spec` describes.
///
/// Errors: a file cannot be read, or is damaged.
pub fn known(spec: &TierSpec) -> Result<Option<Profile>, ProfileError> {
    for profiles in places() {
        if let Some(profile) = profiles.find(spec)? {
            return Ok(Some(profile));
        }
    }
    Ok(None)
}

/// Channels that a device is thought to have of which none were measured. NVSwap's had nine.
const CHANNELS: u32 = 9;

/// The channels of a device: those of its shape, or as they were measured, or a guess.
pub fn channels(shape: Option<ShapeName>, profile: Option<&Profile>) -> u32 {
    let emulated = shape.map(|shape| shape.profile().channels);
    emulated.or_else(|| profile?.channels).unwrap_or(CHANNELS)
}

/// Where profiles are looked for, the first place first.
pub fn places() -> Vec<Profiles> {
    let mut places: Vec<Profiles> = Profiles::of_user().into_iter().collect();
    let of_all = Profiles::at(Path::new(OF_ALL));
    let elsewhere = set("XDG_STATE_HOME").is_some();
    if !elsewhere && places.iter().all(|place| place.0 != of_all.0) {
        places.push(of_all);
    }
    places
}

/// A variable of the environment that is not empty.
fn set(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Device that a profile is of. Two files on one disk have the same.
///
/// A pool is known by its compressor, a cluster by its nodes, the rest by the device below, and all
/// by the device whose times they are given.
fn device_of(spec: &TierSpec) -> String {
    let below = match &spec.path {
        Some(path) => below(path),
        None => spec.identity(),
    };
    let below = format!("{} {below}", spec.facts().kind);
    match spec.shape {
        Some(shape) => format!("{below} as {shape}"),
        None => below,
    }
}

/// The disk of a file or of a block device; the mount point where there is no disk; the path of any
/// other device. The file need not exist.
fn below(path: &Path) -> String {
    let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let existing = path.ancestors().find_map(|at| at.canonicalize().ok());
    let Some((path, meta)) = existing.and_then(|at| Some((at.clone(), at.metadata().ok()?))) else {
        return path.display().to_string();
    };
    let kind = meta.file_type();
    if kind.is_char_device() {
        return path.display().to_string();
    }
    let device = if kind.is_block_device() {
        meta.rdev()
    } else {
        meta.dev()
    };
    disk(device).unwrap_or_else(|| {
        let is_there = |at: &&Path| at.metadata().is_ok_and(|at| at.dev() == device);
        let mount = path.ancestors().take_while(is_there).last();
        mount.unwrap_or(&path).display().to_string()
    })
}

/// The name of a disk that the kernel has, such as `nvme0n1`, and what says that it is still the
/// same disk after a restart, where there is that. Of a partition, its disk.
fn disk(device: u64) -> Option<String> {
    let entry = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let mut at = fs::canonicalize(entry).ok()?;
    if at.join("partition").exists() {
        at.pop();
    }
    let name = at.file_name()?.to_str()?;
    let identities = ["wwid", "device/wwid", "device/serial", "serial", "dm/uuid"];
    let read = |of| fs::read_to_string(at.join(of)).ok();
    let found = identities.into_iter().find_map(read).unwrap_or_default();
    Some(format!("{name} {}", found.trim()).trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(name: &str, channels: Option<u32>) -> Profile {
        let times = Times {
            p50: 8e-5,
            p99: 3e-4,
        };
        Profile {
            name: name.to_owned(),
            kind: "file".to_owned(),
            emulated: false,
            capacity_bytes: 1 << 30,
            read_seconds: times,
            write_seconds: times,
            free_seconds: times,
            read_bytes_per_second: 1e9,
            write_bytes_per_second: 5e8,
            channels,
            measured_at: 1_800_000_000,
        }
    }

    fn spec(text: &str) -> TierSpec {
        text.parse().expect(text)
    }

    #[test]
    fn a_profile_is_found_by_its_device_and_the_last_one_counts() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let profiles = Profiles::at(&folder.path().join("state"));
        let file = |name: &str| format!("file:{}/{name},size=1G", folder.path().display());
        let (swap, other) = (spec(&file("swap")), spec(&file("no/such/folder/swap")));
        assert_eq!(profiles.find(&swap).unwrap(), None);
        profiles.keep(&swap, &profile("swap", Some(4))).unwrap();
        profiles
            .keep(&spec("ram,zstd"), &profile("pool", None))
            .unwrap();
        profiles.keep(&other, &profile("other", Some(9))).unwrap();
        let found = profiles.find(&swap).unwrap();
        assert_eq!(found, Some(profile("other", Some(9))));
        for unlike in ["ram", "ram,zstd,shape=cxl-dram"] {
            assert_eq!(profiles.find(&spec(unlike)).unwrap(), None, "{unlike}");
        }
        let slow = format!("{},shape=nvme", file("swap"));
        assert_eq!(profiles.find(&spec(&slow)).unwrap(), None);
        assert_eq!(
            profiles.find(&spec("ram,zstd,max=9M")).unwrap(),
            Some(profile("pool", None))
        );
        assert_eq!(profiles.all().unwrap().len(), 2);
        let files = fs::read_dir(profiles.path().parent().unwrap()).unwrap();
        assert_eq!(files.count(), 1, "nothing else is left");
    }

    #[test]
    fn damage_is_refused_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let profiles = Profiles::at(folder.path());
        let pool = spec("ram");
        profiles.keep(&pool, &profile("pool", Some(4))).unwrap();
        let good = fs::read_to_string(profiles.path()).unwrap();
        let whole = good.len();
        let bad = [
            good[..whole / 2].to_owned(),
            good.replace("\"channels\": 4", "\"channels\": 0"),
            good.replace("\"channels\": 4", "\"channels\": 100000"),
            good.replace("\"channels\": 4", "\"channels\": -1"),
            good.replace("1000000000.0", "-1.0"),
            good.replace("0.00008", "1e12"),
            good.replace("0.00008", "null"),
            good.replace("1000000000.0", "\"fast\""),
            String::new(),
        ];
        for text in bad {
            assert_ne!(text, good);
            fs::write(profiles.path(), &text).unwrap();
            let refused = profiles.find(&pool).unwrap_err().to_string();
            assert!(refused.contains("measure again"), "{refused}");
            profiles.keep(&pool, &profile("pool", Some(4))).unwrap_err();
            assert_eq!(fs::read_to_string(profiles.path()).unwrap(), text);
        }
    }

    #[test]
    fn what_cannot_be_is_not_kept_and_a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let profiles = Profiles::at(&folder.path().join("state"));
        let pool = spec("ram");
        for speed in [f64::NAN, f64::INFINITY, -1.0] {
            let mut unsound = profile("pool", None);
            unsound.read_bytes_per_second = speed;
            profiles.keep(&pool, &unsound).unwrap_err();
        }
        assert_eq!(profiles.all().unwrap(), []);
        let victim = folder.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        fs::create_dir_all(folder.path().join("state")).unwrap();
        let planted = format!("profiles.json.{}", std::process::id());
        let planted = folder.path().join("state").join(planted);
        std::os::unix::fs::symlink(&victim, planted).unwrap();
        profiles.keep(&pool, &profile("pool", None)).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(profiles.find(&pool).unwrap(), Some(profile("pool", None)));
        // No folder: there is none to be read.
        assert_eq!(Profiles::at(&victim).find(&pool).unwrap(), None);
    }

    #[test]
    fn channels_are_those_of_the_shape_or_measured_or_nine() {
        let measured = profile("disk", Some(3));
        let shape: ShapeName = "nvme".parse().unwrap();
        assert_eq!(
            channels(Some(shape), Some(&measured)),
            shape.profile().channels
        );
        assert_eq!(channels(None, Some(&measured)), 3);
        assert_eq!(channels(None, Some(&profile("pool", None))), 9);
        assert_eq!(channels(None, None), 9);
    }

    #[test]
    fn a_relative_path_is_of_the_disk_that_it_is_on() {
        let here = std::env::current_dir().unwrap();
        let absolute = format!("file:{}/no-such-file", here.display());
        assert_eq!(
            device_of(&spec("file:no-such-file")),
            device_of(&spec(&absolute))
        );
    }

    #[test]
    fn two_that_keep_at_once_lose_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let profiles = Profiles::at(folder.path());
        let specs = [
            "ram",
            "ram,zstd",
            "ram,shape=cxl-dram",
            "ram,zstd,shape=cxl-dram",
        ];
        std::thread::scope(|scope| {
            for text in specs {
                let profiles = &profiles;
                scope.spawn(move || {
                    for _ in 0..20 {
                        profiles.keep(&spec(text), &profile(text, None)).unwrap();
                    }
                });
            }
        });
        let mut names: Vec<String> = profiles
            .all()
            .unwrap()
            .into_iter()
            .map(|it| it.name)
            .collect();
        names.sort();
        let mut expected = specs.map(str::to_owned);
        expected.sort();
        assert_eq!(names, expected);
    }
}
