//! The kinds of tiers, one row each ([`KINDS`]), and the argument of `--tier`:
//! `KIND[:PATH][,key=value]...`, parsed once into a type that cannot be wrong.
//!
//! ```text
//! ram    ram,zstd    ram,lz4,max=64M    ram,max=30%    ram,shape=cxl-dram
//! nvm:/mnt/pmem,size=8G    nvm:/dev/dax0.0    nvm:/tmp,size=1G,shape=optane-dimm
//! file:/var/swap,size=20G    file:/dev/nvme0n1
//! redis:10.0.0.1:6379,10.0.0.2:6379,size=20G
//! ```
//! Each takes `price=DOLLARS` a GiB, and those that wear out `tbw=SIZE` (`rated.rs`).
//!
//! No crate but this one names a kind to decide something (`cargo xtask tidy`): others ask the
//! facts of a row, or the fields of a description.

mod file;
mod nvm;
mod paths;
mod ram;
mod rated;
#[cfg(feature = "redis")]
mod redis;
mod snapshot;
mod words;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;

use undercroft_base::{Bytes, Exact, PageSize, TierFacts};
use undercroft_sys::mapping::SharedMemory;

use crate::made::{Below, Handed, OpenError};
use crate::ram::Compressor;
use crate::shape::ShapeName;
pub use rated::Rated;
use words::{FILE_BYTES_MIN, Words, parse_limit, parse_size, parse_yes};
pub use words::{Limit, SpecError};

/// Every kind in this build. A new one adds a row.
pub static KINDS: &[&Kind] = &[
    &ram::KIND,
    &nvm::KIND,
    &file::KIND,
    #[cfg(feature = "redis")]
    &redis::KIND,
    &snapshot::KIND,
];

/// Kinds that this build was made without. A feature of the same name brings each.
const LEFT_OUT: &[&str] = &[
    #[cfg(not(feature = "redis"))]
    "redis",
];

/// Makes the keeper's side of a tier of a specification, or of what a dead keeper's side was.
type Inherit =
    fn(&TierSpec, PageSize, Option<Handed<OwnedFd>>) -> Result<Box<dyn Below>, OpenError>;

/// A kind of tier.
pub struct Kind {
    /// Facts of its tiers.
    pub facts: TierFacts,
    /// Version of what another manager takes over; `None`: none can.
    pub version: Option<u64>,
    /// How a tier of it is described, such as `file:PATH[,size=SIZE]`.
    pub syntax: &'static str,
    /// A description.
    pub example: &'static str,
    /// A sentence or two on it.
    pub meaning: &'static str,
    /// Settings of a description.
    pub settings: &'static [Setting],
    parse: fn(&'static Kind, Words<'_>) -> Result<TierSpec, SpecError>,
    /// The canonical text up to the settings that kinds share.
    head: fn(&TierSpec) -> String,
    /// Tells a tier without a path from others of its kind.
    identity: fn(&TierSpec) -> String,
    pub(crate) open: fn(&TierSpec, PageSize, Bytes) -> Result<Opened, OpenError>,
    pub(crate) inherit: Inherit,
}

/// Refuses pages of another size, for kinds that have none.
fn base_pages_only(spec: &TierSpec, page: PageSize) -> Result<(), OpenError> {
    match page {
        PageSize::Base => Ok(()),
        other => Err(OpenError::PageSize(spec.to_string(), other)),
    }
}

/// A tier's memory, and what is below it.
pub(crate) type Opened = (SharedMemory, Box<dyn Below>);

/// A setting of a description, for `undercroft tiers`.
#[derive(Debug, serde::Serialize)]
pub struct Setting {
    /// As it is written, such as `size=SIZE`.
    pub name: &'static str,
    /// Value that holds without it.
    pub default: &'static str,
    /// Value that it sets.
    pub meaning: &'static str,
}

/// Of every kind whose times can be those of another device.
const SHAPE: Setting = Setting {
    name: "shape=DEVICE",
    default: "none",
    meaning: "times of another device, for experiments; reports then say `emulated`",
};

/// Of kinds other than DRAM.
const PRICE: Setting = Setting {
    name: "price=DOLLARS",
    default: "none",
    meaning: "price of a GiB, such as 0.1: report and status then say what it costs",
};

/// Of kinds that wear out.
const TBW: Setting = Setting {
    name: "tbw=SIZE",
    default: "none",
    meaning: "writes in all that the data sheet promises, base 1000, such as 600T",
};

impl Kind {
    fn has(&self, key: &str) -> bool {
        let names = self.settings.iter().map(|setting| setting.name);
        names
            .filter_map(|name| name.split_once('='))
            .any(|(name, _)| name == key)
    }

    fn unknown_key(&self, key: &str) -> SpecError {
        let names: Vec<_> = self.settings.iter().map(|setting| setting.name).collect();
        SpecError::UnknownKey {
            kind: self.facts.kind,
            key: key.to_owned(),
            valid: names.join(", "),
        }
    }

    fn missing(&self, what: &'static str) -> SpecError {
        SpecError::Missing {
            kind: self.facts.kind,
            what,
            example: self.example,
        }
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.facts.kind)
    }
}

impl PartialEq for Kind {
    fn eq(&self, other: &Kind) -> bool {
        self.facts.kind == other.facts.kind
    }
}

/// A tier as the user described it.
#[derive(Clone, Debug, PartialEq)]
pub struct TierSpec {
    kind: &'static Kind,
    /// A file to create, an existing directory for a nameless file, or a device; `None`: this kind
    /// has none.
    pub path: Option<PathBuf>,
    /// Most bytes it may use of its path. `None`: all of a device; for a file the manager decides.
    pub size: Option<Bytes>,
    /// Most memory a pool may hold. `None`: the manager decides.
    pub max: Option<Limit>,
    /// The device whose times it is given.
    pub shape: Option<ShapeName>,
    /// Costs of it.
    pub rated: Rated,
    /// How a pool compresses.
    compressor: Compressor,
    /// Whether a file does; `None`: as files mostly do.
    compress: Option<bool>,
    #[cfg(feature = "redis")]
    cluster: Option<Box<undercroft_tier_redis::spec::RemoteSpec>>,
}

impl TierSpec {
    fn of(kind: &'static Kind) -> TierSpec {
        TierSpec {
            kind,
            path: None,
            size: None,
            max: None,
            shape: None,
            rated: Rated::default(),
            compressor: Compressor::default(),
            compress: None,
            #[cfg(feature = "redis")]
            cluster: None,
        }
    }

    /// Its row.
    pub fn kind(&self) -> &'static Kind {
        self.kind
    }

    /// Facts of its kind.
    pub fn facts(&self) -> &'static TierFacts {
        &self.kind.facts
    }

    /// Tells its device from others of its kind, where it has no path.
    pub(crate) fn identity(&self) -> String {
        (self.kind.identity)(self)
    }

    /// Takes a setting if it says what the tier costs. False: it is another one.
    fn rate(&mut self, key: &str, value: Option<&str>) -> Result<bool, SpecError> {
        let kind = self.kind;
        self.rated.set(kind.facts.kind, kind.has("tbw"), key, value)
    }

    /// Takes a setting if it is one of those that kinds share. False: it is another one.
    fn set(&mut self, key: &str, value: Option<&str>) -> Result<bool, SpecError> {
        if self.rate(key, value)? {
            return Ok(true);
        }
        let value = value.unwrap_or_default();
        let twice = match key {
            _ if !self.kind.has(key) => return Ok(false),
            "shape" => {
                let name = value
                    .parse::<ShapeName>()
                    .map_err(|error| SpecError::Value {
                        key: "shape",
                        why: error.to_string(),
                    });
                self.shape.replace(name?).is_some()
            }
            "size" => (self.size)
                .replace(parse_size("size", value, FILE_BYTES_MIN)?)
                .is_some(),
            "compress" => self
                .compress
                .replace(parse_yes("compress", value)?)
                .is_some(),
            "max" => self.max.replace(parse_limit(value)?).is_some(),
            _ => return Ok(false),
        };
        if twice {
            let (kind, key) = (self.kind.facts.kind, key.to_owned());
            return Err(SpecError::Twice { kind, key });
        }
        Ok(true)
    }
}

impl FromStr for TierSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (name, words) = Words::of(text);
        if let Some(kind) = KINDS.iter().find(|kind| kind.facts.kind == name) {
            return (kind.parse)(kind, words);
        }
        if let Some(kind) = LEFT_OUT.iter().find(|kind| **kind == name) {
            return Err(SpecError::NotBuilt { kind });
        }
        let known = KINDS
            .iter()
            .map(|kind| kind.syntax.split(['[', ',']).next());
        let known: Vec<_> = known.flatten().collect();
        Err(SpecError::UnknownKind {
            kind: name.to_owned(),
            known: known.join(", "),
        })
    }
}

/// The canonical text; parses to an equal value.
impl fmt::Display for TierSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&(self.kind.head)(self))?;
        if let Some(size) = self.size {
            write!(f, ",size={}", Exact(size))?;
        }
        if let Some(compress) = self.compress {
            write!(f, ",compress={}", if compress { "yes" } else { "no" })?;
        }
        if let Some(max) = self.max {
            write!(f, ",max={max}")?;
        }
        if let Some(shape) = self.shape {
            write!(f, ",shape={shape}")?;
        }
        self.rated.fmt(f)
    }
}

/// Checks what must hold of every text: if it is accepted, its canonical text stands for an equal
/// tier and for itself, no limit is above the memory limit, and no size is below the smallest. A
/// refusal names a fix. For the fuzz target of option values and its test. True if it is accepted.
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
    for limit in [0, 1 << 20, (1 << 53) + 3, u64::MAX].map(Bytes) {
        let most = spec.max.map_or(limit, |max| max.resolve(limit));
        assert!(most <= limit, "{spec:?} of {limit}");
    }
    assert!(spec.size.is_none_or(|size| size.0 >= FILE_BYTES_MIN));
    true
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
            (
                "file:/x, compress = yes ,size=1G",
                "file:/x,size=1G,compress=yes",
            ),
            ("file:/x,compress=no", "file:/x,compress=no"),
            ("ram,price=4.50,max=1M", "ram,lz4,max=1M,price=4.5"),
            (
                "file:/x, tbw = 1.2P ,price=0.1,size=1G",
                "file:/x,size=1G,price=0.1,tbw=1200T",
            ),
            ("nvm:/x,price=0,tbw=292P", "nvm:/x,price=0,tbw=292P"),
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
            ("disk:/x", "disk", "file:PATH"),
            ("ram,shape=floppy", "`floppy`", "hdd-7200"),
            ("file:/x,shape", "shape", "optane-dimm"),
            ("nvm:/x,shape=pcm,shape=pcm", "`shape`", "twice"),
            ("ram,lzo", "`lzo`", "lz4|zstd"),
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
            ("file:/x,compress=zstd", "`zstd`", "yes or no"),
            ("file:/x,compress", "``", "yes or no"),
            ("file:/x,compress=no,compress=no", "`compress`", "twice"),
            ("nvm:/x,compress=yes", "`compress`", "size=SIZE"),
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
        ] {
            let error = text.parse::<TierSpec>().expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
            assert!(error.contains(fix), "{text}: {error}");
        }
    }

    #[test]
    fn every_row_has_an_example_that_is_read_and_facts_of_its_own() {
        let mut names = std::collections::BTreeSet::new();
        for kind in KINDS {
            let spec: TierSpec = kind.example.parse().expect(kind.example);
            assert_eq!(spec.kind(), *kind);
            assert!(kind.syntax.starts_with(kind.facts.kind));
            assert!(names.insert(kind.facts.kind), "two of {kind:?}");
        }
    }

    /// Storms and the manager's tests trust the fakes. Storms have no snapshots.
    #[test]
    fn the_fakes_have_the_facts_of_the_kinds_that_they_stand_for() {
        use undercroft_model::tier::{CLUSTER, DEVICE, MAPPED, POOL};
        for kind in KINDS.iter().filter(|kind| !kind.facts.is_source) {
            let fakes = [&POOL, &MAPPED, &DEVICE, &CLUSTER];
            let fake = fakes.into_iter().find(|fake| fake.kind == kind.facts.kind);
            assert_eq!(fake, Some(&kind.facts));
        }
    }

    #[test]
    fn a_kind_that_was_left_out_is_refused_with_the_feature_that_brings_it() {
        for kind in LEFT_OUT {
            let error = format!("{kind}:host:1")
                .parse::<TierSpec>()
                .expect_err(kind);
            assert!(
                error.to_string().contains(&format!("--features {kind}")),
                "{error}"
            );
        }
        assert_eq!(KINDS.len() + LEFT_OUT.len(), 5);
    }
}
