//! The argument of `--tier`: `KIND[:PATH][,key=value]...`, parsed once into a type that cannot be
//! wrong.
//!
//! ```text
//! ram    ram,zstd    ram,lz4,max=64M    ram,max=30%    ram,shape=cxl-dram
//! nvm:/mnt/pmem,size=8G    nvm:/dev/dax0.0    nvm:/tmp,size=1G,shape=optane-dimm
//! file:/var/swap,size=20G    file:/dev/nvme0n1
//! redis:10.0.0.1:6379,10.0.0.2:6379,size=20G    (its settings: `remote.rs`)
//! ```
//! Each takes `price=DOLLARS` a GiB, and those that wear out `tbw=SIZE` (`rated.rs`).

mod rated;
pub mod remote;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use undercroft_base::{Bytes, PAGE_BYTES, ParseUnitError};

use crate::ram::Compressor;
use crate::shape::ShapeName;
pub use rated::Rated;
use rated::Wears;
use remote::RemoteSpec;

/// One tier as the user described it.
#[derive(Clone, Debug, PartialEq)]
pub enum TierSpec {
    /// Compressed memory.
    Ram(RamSpec),
    /// Mapped non-volatile memory.
    Nvm(NvmSpec),
    /// A file or block device.
    File(FileSpec),
    /// A Redis or Valkey cluster.
    Remote(RemoteSpec),
}

/// `ram[,lz4|zstd][,max=SIZE|PERCENT][,shape=DEVICE][,price=DOLLARS]`
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RamSpec {
    /// How pages are compressed.
    pub compressor: Compressor,
    /// Most memory it may hold. `None`: the manager decides.
    pub max: Option<Limit>,
    /// The device whose times it is given.
    pub shape: Option<ShapeName>,
    /// What it costs.
    pub rated: Rated,
}

/// `nvm:PATH[,size=SIZE][,shape=DEVICE][,price=DOLLARS][,tbw=SIZE]`
#[derive(Clone, Debug, PartialEq)]
pub struct NvmSpec {
    /// A file to create, an existing directory for a nameless file, or a DAX device.
    pub path: PathBuf,
    /// Most bytes it may use; a file has all of them from the start, and needs it. `None`: all of a
    /// device.
    pub size: Option<Bytes>,
    /// The device whose times it is given.
    pub shape: Option<ShapeName>,
    /// What it costs.
    pub rated: Rated,
}

/// `file:PATH[,size=SIZE][,shape=DEVICE][,price=DOLLARS][,tbw=SIZE]`
#[derive(Clone, Debug, PartialEq)]
pub struct FileSpec {
    /// A file to create, an existing directory for a nameless file, or a block device.
    pub path: PathBuf,
    /// Most bytes it may use. `None`: all of a block device; for a file the manager decides.
    pub size: Option<Bytes>,
    /// The device whose times it is given.
    pub shape: Option<ShapeName>,
    /// What it costs.
    pub rated: Rated,
}

/// An amount of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// A size in bytes.
    Bytes(Bytes),
    /// A part of the client's `--memory-max`, above 0 and at most 100.
    PercentOfMemoryMax(f64),
}

/// Why a tier description was refused; the text names the fix.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// An unknown kind.
    #[error(
        "unknown tier kind `{0}`; use ram, nvm:PATH, file:PATH or redis:HOST:PORT (example: ram, \
         file:/var/swap,size=20G)"
    )]
    UnknownKind(String),
    /// A planned kind.
    #[error(
        "tier kind `{0}` is not available yet; use ram, nvm:PATH, file:PATH or redis:HOST:PORT"
    )]
    KindNotYet(String),
    /// A key that this kind does not have.
    #[error("tier `{kind}` has no setting `{key}`; it has: {valid}")]
    UnknownKey {
        /// The kind.
        kind: &'static str,
        /// The key as written.
        key: String,
        /// The keys that there are.
        valid: &'static str,
    },
    /// A setting, or the compressor, was given twice.
    #[error("tier `{kind}`: `{key}` is given twice; keep one")]
    Twice {
        /// The kind.
        kind: &'static str,
        /// The setting.
        key: String,
    },
    /// `file` or `nvm` without a path.
    #[error("tier `{0}` needs a path: {0}:/var/swap,size=20G")]
    PathMissing(&'static str),
    /// `redis` without a node.
    #[error("tier `redis` needs a node of the cluster: redis:10.0.0.1:6379")]
    NodeMissing,
    /// `ram` with a path.
    #[error("tier `ram` takes no path (`{0}`); for a file write file:{0}")]
    PathUnwanted(String),
    /// A size or percentage that is not valid.
    #[error("tier setting `{key}`: {why}")]
    Value {
        /// The setting.
        key: &'static str,
        /// What is wrong.
        why: String,
    },
}

const RAM_KEYS: &str =
    "lz4, zstd, max=SIZE, max=PERCENT (of --memory-max), shape=DEVICE, price=DOLLARS (a GiB)";
const PATH_KEYS: &str = "size=SIZE, shape=DEVICE, price=DOLLARS (a GiB), tbw=SIZE";
/// The smallest useful sizes: a file or mapping of 1 MiB, a pool of a few blocks.
const FILE_BYTES_MIN: u64 = 1 << 20;
const RAM_BYTES_MIN: u64 = 64 * PAGE_BYTES as u64;

impl FromStr for TierSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut parts = text.split(',');
        let head = parts.next().unwrap_or_default();
        let (kind, path) = match head.split_once(':') {
            Some((kind, path)) => (kind.trim(), Some(path)),
            None => (head.trim(), None),
        };
        let settings: Vec<(&str, Option<&str>)> = parts
            .map(|part| match part.split_once('=') {
                Some((key, value)) => (key.trim(), Some(value.trim())),
                None => (part.trim(), None),
            })
            .collect();
        match kind {
            "ram" => match path {
                Some(path) => Err(SpecError::PathUnwanted(path.to_owned())),
                None => parse_ram(&settings).map(TierSpec::Ram),
            },
            "nvm" => {
                let (path, size, shape, rated) = parse_path("nvm", path, &settings)?;
                Ok(TierSpec::Nvm(NvmSpec {
                    path,
                    size,
                    shape,
                    rated,
                }))
            }
            "file" => {
                let (path, size, shape, rated) = parse_path("file", path, &settings)?;
                Ok(TierSpec::File(FileSpec {
                    path,
                    size,
                    shape,
                    rated,
                }))
            }
            "redis" => remote::parse(path, &settings).map(TierSpec::Remote),
            "disk" => Err(SpecError::KindNotYet(kind.to_owned())),
            _ => Err(SpecError::UnknownKind(kind.to_owned())),
        }
    }
}

fn parse_ram(settings: &[(&str, Option<&str>)]) -> Result<RamSpec, SpecError> {
    let (mut compressor, mut max, mut shape) = (None, None, None);
    let mut rated = Rated::default();
    for &(key, value) in settings {
        if rated.set("ram", Wears::No, key, value)? {
            continue;
        }
        let twice = || SpecError::Twice {
            kind: "ram",
            key: key.to_owned(),
        };
        match (key, value) {
            ("max", value) => {
                let limit = parse_limit(value.unwrap_or_default())?;
                if max.replace(limit).is_some() {
                    return Err(twice());
                }
            }
            ("shape", value) => set_shape("ram", &mut shape, value)?,
            (name, None) if name.parse::<Compressor>().is_ok() => {
                if compressor
                    .replace(name.parse::<Compressor>().unwrap_or_default())
                    .is_some()
                {
                    return Err(twice());
                }
            }
            _ => return Err(unknown_key("ram", key, RAM_KEYS)),
        }
    }
    Ok(RamSpec {
        compressor: compressor.unwrap_or_default(),
        max,
        shape,
        rated,
    })
}

/// The path and the settings of a tier that has one.
fn parse_path(
    kind: &'static str,
    path: Option<&str>,
    settings: &[(&str, Option<&str>)],
) -> Result<(PathBuf, Option<Bytes>, Option<ShapeName>, Rated), SpecError> {
    let Some(path) = path.filter(|path| !path.is_empty()) else {
        return Err(SpecError::PathMissing(kind));
    };
    let (mut size, mut shape) = (None, None);
    let mut rated = Rated::default();
    for &(key, value) in settings {
        if rated.set(kind, Wears::Yes, key, value)? {
            continue;
        }
        if key == "shape" {
            set_shape(kind, &mut shape, value)?;
            continue;
        }
        if key != "size" {
            return Err(unknown_key(kind, key, PATH_KEYS));
        }
        let bytes = parse_size("size", value.unwrap_or_default(), FILE_BYTES_MIN)?;
        if size.replace(bytes).is_some() {
            return Err(SpecError::Twice {
                kind,
                key: key.to_owned(),
            });
        }
    }
    Ok((PathBuf::from(path), size, shape, rated))
}

fn set_shape(
    kind: &'static str,
    shape: &mut Option<ShapeName>,
    value: Option<&str>,
) -> Result<(), SpecError> {
    let name = value.unwrap_or_default().parse::<ShapeName>();
    let name = name.map_err(|error| SpecError::Value {
        key: "shape",
        why: error.to_string(),
    })?;
    match shape.replace(name) {
        None => Ok(()),
        Some(_) => Err(SpecError::Twice {
            kind,
            key: "shape".to_owned(),
        }),
    }
}

pub(crate) fn unknown_key(kind: &'static str, key: &str, valid: &'static str) -> SpecError {
    SpecError::UnknownKey {
        kind,
        key: key.to_owned(),
        valid,
    }
}

pub(crate) fn parse_size(key: &'static str, text: &str, min: u64) -> Result<Bytes, SpecError> {
    let bytes: Bytes = text
        .parse()
        .map_err(|error: ParseUnitError| SpecError::Value {
            key,
            why: error.to_string(),
        })?;
    if bytes.0 < min {
        return Err(SpecError::Value {
            key,
            why: format!("`{text}` is too small; the least is {}", Bytes(min)),
        });
    }
    Ok(bytes)
}

fn parse_limit(text: &str) -> Result<Limit, SpecError> {
    let Some(percent) = text.strip_suffix('%') else {
        return parse_size("max", text, RAM_BYTES_MIN).map(Limit::Bytes);
    };
    match percent.trim().parse::<f64>() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(Limit::PercentOfMemoryMax(percent)),
        _ => Err(SpecError::Value {
            key: "max",
            why: format!("`{text}` is not a percentage above 0 and up to 100 (example: 30%)"),
        }),
    }
}

impl Limit {
    /// The bytes it stands for if the client's memory limit is `memory_max`; at most that.
    pub fn resolve(self, memory_max: Bytes) -> Bytes {
        match self {
            Limit::Bytes(bytes) => bytes.min(memory_max),
            Limit::PercentOfMemoryMax(percent) => {
                // Large numbers are rounded, and may be rounded up.
                Bytes((memory_max.0 as f64 * percent / 100.0) as u64).min(memory_max)
            }
        }
    }
}

/// A size written so that it parses to the same number of bytes.
pub(crate) struct Exact(pub(crate) Bytes);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.0;
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if bytes > 0 && bytes.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", bytes >> shift);
            }
        }
        write!(f, "{bytes}")
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Bytes(bytes) => Exact(*bytes).fmt(f),
            Limit::PercentOfMemoryMax(percent) => write!(f, "{percent}%"),
        }
    }
}

/// The canonical text; parses to an equal value.
impl fmt::Display for TierSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TierSpec::Ram(ram) => {
                write!(f, "ram,{}", ram.compressor)?;
                ram.max.map_or(Ok(()), |max| write!(f, ",max={max}"))?;
                with_shape(f, ram.shape)?;
            }
            TierSpec::Nvm(nvm) => {
                with_path(f, "nvm", &nvm.path, nvm.size)?;
                with_shape(f, nvm.shape)?;
            }
            TierSpec::File(file) => {
                with_path(f, "file", &file.path, file.size)?;
                with_shape(f, file.shape)?;
            }
            TierSpec::Remote(remote) => remote.fmt(f)?,
        }
        self.rated().fmt(f)
    }
}

/// What must hold of every text: if it is accepted, its canonical text stands for an equal tier and
/// for itself, no limit is above the memory limit, and no size is below the smallest. A refusal
/// names a fix. For the fuzz target of option values and its test. True if it is accepted.
pub fn check(text: &str) -> bool {
    let spec = match text.parse::<TierSpec>() {
        Ok(spec) => spec,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    let canonical = spec.to_string();
    let again = canonical.parse::<TierSpec>();
    assert_eq!(again.as_ref(), Ok(&spec), "{canonical}");
    assert_eq!(again.map(|spec| spec.to_string()), Ok(canonical));
    match spec {
        TierSpec::Ram(ram) => {
            for limit in [0, 1 << 20, (1 << 53) + 3, u64::MAX].map(Bytes) {
                let most = ram.max.map_or(limit, |max| max.resolve(limit));
                assert!(most <= limit, "{ram:?} of {limit}");
            }
        }
        TierSpec::Nvm(nvm) => assert!(nvm.size.is_none_or(|size| size.0 >= FILE_BYTES_MIN)),
        TierSpec::File(file) => assert!(file.size.is_none_or(|size| size.0 >= FILE_BYTES_MIN)),
        TierSpec::Remote(remote) => assert!(!remote.nodes.is_empty() && remote.size.0 > 0),
    }
    true
}

fn with_path(
    f: &mut fmt::Formatter<'_>,
    kind: &str,
    path: &Path,
    size: Option<Bytes>,
) -> fmt::Result {
    write!(f, "{kind}:{}", path.display())?;
    size.map_or(Ok(()), |size| write!(f, ",size={}", Exact(size)))
}

fn with_shape(f: &mut fmt::Formatter<'_>, shape: Option<ShapeName>) -> fmt::Result {
    shape.map_or(Ok(()), |shape| write!(f, ",shape={shape}"))
}

impl TierSpec {
    /// The device whose times it is given, if any.
    pub fn shape(&self) -> Option<ShapeName> {
        match self {
            TierSpec::Ram(ram) => ram.shape,
            TierSpec::Nvm(nvm) => nvm.shape,
            TierSpec::File(file) => file.shape,
            TierSpec::Remote(_) => None,
        }
    }

    /// What the user says that it costs.
    pub fn rated(&self) -> Rated {
        match self {
            TierSpec::Ram(ram) => ram.rated,
            TierSpec::Nvm(nvm) => nvm.rated,
            TierSpec::File(file) => file.rated,
            TierSpec::Remote(remote) => remote.rated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_parse_and_print_the_same_again() {
        for (text, canonical) in [
            ("ram", "ram,lz4"),
            ("ram,zstd", "ram,zstd"),
            ("ram, lz4 , max = 64M", "ram,lz4,max=64M"),
            ("ram,max=1.5GiB,zstd", "ram,zstd,max=1536M"),
            ("ram,max=12.5%", "ram,lz4,max=12.5%"),
            ("file:/var/swap,size=20G", "file:/var/swap,size=20G"),
            ("file:/a:b", "file:/a:b"),
            ("nvm:/mnt/pmem, size = 2G", "nvm:/mnt/pmem,size=2G"),
            ("nvm:/dev/dax0.0", "nvm:/dev/dax0.0"),
            ("ram,shape=cxl-dram,max=1M", "ram,lz4,max=1M,shape=cxl-dram"),
            ("nvm:/x,shape=pcm,size=1M", "nvm:/x,size=1M,shape=pcm"),
            ("file:/x,shape=hdd-7200", "file:/x,shape=hdd-7200"),
            ("ram,price=4.50,max=1M", "ram,lz4,max=1M,price=4.5"),
            (
                "file:/x, tbw = 1.2P ,price=0.1,size=1G",
                "file:/x,size=1G,price=0.1,tbw=1200T",
            ),
            ("nvm:/x,price=0,tbw=292P", "nvm:/x,price=0,tbw=292P"),
            ("redis:h:1,price=3", "redis:h:1,size=4G,prefix=uc,price=3"),
        ] {
            let spec: TierSpec = text
                .parse()
                .unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(spec.to_string(), canonical);
            assert_eq!(canonical.parse::<TierSpec>().unwrap(), spec);
        }
    }

    #[test]
    fn refused_specs_say_what_and_how_to_do_better() {
        for (text, named, fix) in [
            ("", "``", "file:PATH"),
            ("rma", "`rma`", "use ram"),
            ("disk:/x", "disk", "not available yet"),
            ("ram,shape=floppy", "`floppy`", "hdd-7200"),
            ("file:/x,shape", "shape", "optane-dimm"),
            ("nvm:/x,shape=pcm,shape=pcm", "`shape`", "twice"),
            ("ram,lzo", "`lzo`", "lz4, zstd"),
            ("ram,lz4=1", "`lz4`", "max=SIZE"),
            ("ram,lz4,zstd", "`zstd`", "twice"),
            ("ram,max=1M,max=2M", "`max`", "twice"),
            ("ram,max=lots", "`lots`", "512M"),
            ("ram,max", "`max`", "512M"),
            ("ram,max=0", "`0`", "the least is"),
            ("ram,max=0%", "`0%`", "30%"),
            ("ram,max=101%", "`101%`", "30%"),
            ("ram,max=nan%", "`nan%`", "30%"),
            ("ram:/tmp/x", "`/tmp/x`", "file:/tmp/x"),
            ("file", "file", "needs a path"),
            ("file:,size=1G", "file", "needs a path"),
            ("file:/x,size=", "`size`", "512M"),
            ("file:/x,size=0", "`0`", "the least is"),
            ("file:/x,size=1G,size=1G", "`size`", "twice"),
            ("file:/x,max=1G", "`max`", "size=SIZE"),
            ("file:/x,", "``", "size=SIZE"),
            ("nvm", "nvm", "needs a path"),
            ("nvm:/x,size=4K", "`4K`", "the least is"),
            ("nvm:/x,size=1G,size=1G", "`size`", "twice"),
            ("nvm:/x,max=1G", "`max`", "size=SIZE"),
            ("file:/x,price=", "`price`", "example: 4.5"),
            ("file:/x,price", "`price`", "example: 4.5"),
            ("file:/x,price=-1", "`-1`", "dollars a GiB"),
            ("file:/x,price=nan", "`nan`", "dollars a GiB"),
            ("nvm:/x,price=1,price=1", "`price`", "twice"),
            ("nvm:/x,tbw=600", "`600`", "600T"),
            ("file:/x,tbw=0T", "`0T`", "data sheet"),
            ("file:/x,tbw=1T,tbw=1T", "`tbw`", "twice"),
            ("ram,tbw=1T", "`tbw`", "does not wear out"),
            ("redis:h:1,tbw=1T", "`tbw`", "does not wear out"),
            ("redis:h:1,price=x", "`x`", "example: 4.5"),
        ] {
            let error = text.parse::<TierSpec>().expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
            assert!(error.contains(fix), "{text}: {error}");
        }
    }

    #[test]
    fn limits_resolve_within_the_memory_limit() {
        let limit = |text: &str| parse_limit(text).unwrap().resolve(Bytes(1 << 30));
        assert_eq!(limit("25%"), Bytes(1 << 28));
        assert_eq!(limit("64M"), Bytes(64 << 20));
        assert_eq!(limit("4G"), Bytes(1 << 30));
    }
}
