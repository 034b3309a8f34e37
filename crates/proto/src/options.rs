//! The options of a run. The command line parses them, and the keeper hands them to the manager
//! unchanged.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use undercroft_base::{Bytes, Cpus, PageSize, Price};
use undercroft_engine::reclaim::MOVES_A_SECOND;
use undercroft_policy::place::PlacementName;
use undercroft_policy::prefetch::PrefetchName;
use undercroft_policy::reclaim::ReclaimName;
use undercroft_qos::LatencyBound;
use undercroft_terminal::LogFormat;
use undercroft_tier::spec::TierSpec;

use crate::name::RunName;

/// The manager's choice when every tier is full and the limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenFull {
    /// Pages stay in memory; the limit is exceeded, with a warning and a counter.
    #[default]
    Stay,
    /// The client is ended with status 125.
    Kill,
}

/// How often the Accessed bits of resident pages are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessScan {
    /// Twice a second while pages leave memory, if the machine allows it.
    #[default]
    Auto,
    /// At this interval. The run is refused if the machine does not allow it.
    Every(Duration),
    /// Not at all.
    Never,
}

/// Options of one client. The caller has validated them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientOptions {
    /// DRAM for the client; `u64::MAX` bytes = no limit.
    #[serde(with = "as_number")]
    pub memory_max: Bytes,
    /// Fastest first; never empty.
    #[serde(with = "as_text")]
    pub tiers: Vec<TierSpec>,
    /// Which reclaim policy.
    #[serde(with = "as_name")]
    pub reclaim: ReclaimName,
    /// Which prefetch policy, with its size.
    #[serde(with = "as_name")]
    pub prefetch: PrefetchName,
    /// Which placement policy.
    #[serde(with = "as_name")]
    pub placement: PlacementName,
    /// The manager's choice when every tier is full.
    pub when_full: WhenFull,
    /// Suppress everything but errors on stderr.
    pub quiet: bool,
    /// Where to record the page faults; `None` = nowhere.
    pub trace: Option<PathBuf>,
    /// How often Accessed bits are read.
    pub access_scan: AccessScan,
    /// The bound of page-ins; `None` = none.
    #[serde(with = "as_bound")]
    pub latency: Option<LatencyBound>,
    /// False: the bound is only measured.
    pub latency_control: bool,
    /// How often a new manager may take over from one that died.
    pub takeovers_max: u32,
    /// The class in which a daemon gives memory; `None` = no daemon does.
    pub class: Option<String>,
    /// Price of a GiB of DRAM; `None` = the report has no cost of the whole.
    #[serde(with = "as_bound")]
    pub memory_price: Option<Price>,
    /// The manager's rights on the machine.
    pub rights: Rights,
    /// The name that a person gave to the run; `None` = none.
    #[serde(default, with = "as_bound")]
    pub name: Option<RunName>,
    /// Threads that compress, with the evictor; `None` = by the number of CPUs.
    pub compressors: Option<usize>,
    /// Size of the pages of guest memory, and of all tiers' copies. The pages of processes stay
    /// where they are if it is not theirs.
    #[serde(default, with = "as_name")]
    pub page_size: PageSize,
    /// A policy of the user's that names pages first; `None` = none.
    #[serde(default)]
    pub plugin: Option<PluginFile>,
}

/// A policy file, as it was when it was given to the run: it may change or go meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginFile {
    /// The path that the user gave, for reports.
    pub file: String,
    /// Its bytes.
    #[serde(with = "as_hex")]
    pub module: Vec<u8>,
    /// Values that a user gave to its parameters, by name.
    #[serde(default)]
    pub parameters: BTreeMap<String, i64>,
}

impl PluginFile {
    /// Bytes of a file at most.
    pub const BYTES_MAX: usize = 1 << 20;

    /// Reads a file. Does not look at what it holds, and reads no more than tells that it is too
    /// large. Errors: it cannot be read, or is a pipe, a directory or a device.
    pub fn read(path: &Path) -> io::Result<PluginFile> {
        // A pipe would be waited for.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        let mut module = Vec::new();
        let most = PluginFile::BYTES_MAX as u64 + 1;
        file.take(most).read_to_end(&mut module)?;
        Ok(PluginFile {
            file: path.display().to_string(),
            module,
            parameters: BTreeMap::new(),
        })
    }
}

/// Most threads that compress.
pub const COMPRESSORS_MAX: usize = 16;

/// Least that may move between tiers in a second: a slab of 1 MiB.
pub const MOVES_MIN: Bytes = Bytes(1 << 20);

/// Rights of a manager on the machine, besides memory. A daemon grants it by class.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rights {
    /// CPUs of its threads; `None` = all that the keeper may use.
    #[serde(with = "as_bound")]
    pub cpus: Option<Cpus>,
    /// Real-time priority for the threads that must not be late.
    pub realtime: bool,
    /// Bytes a second that move between tiers in the background.
    #[serde(with = "as_number")]
    pub moves: Bytes,
}

impl Default for Rights {
    fn default() -> Rights {
        Rights {
            cpus: None,
            realtime: true,
            moves: MOVES_A_SECOND,
        }
    }
}

/// Where a report goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReportTo {
    /// Standard output, behind what the program writes.
    Output,
    /// A file: an absolute path, because the keeper leaves its folder if it outlives the program.
    File(PathBuf),
}

impl ReportTo {
    /// The place that a user names. `-` is standard output, and so are the kernel's names of it.
    pub fn of(path: PathBuf) -> ReportTo {
        const OUTPUT: [&str; 4] = ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
        if OUTPUT.iter().any(|name| path.as_os_str() == *name) {
            ReportTo::Output
        } else {
            ReportTo::File(std::path::absolute(&path).unwrap_or(path))
        }
    }
}

/// The memory in which programs lock pages of a guest.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LockMemory {
    /// The descriptor of its memfd.
    pub memfd: i32,
    /// Pages that one program may lock.
    pub each_max: u64,
}

/// Options of one `undercroft run`.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The client's options.
    pub client: ClientOptions,
    /// Program and arguments; never empty.
    pub command: Vec<std::ffi::OsString>,
    /// Words before those: a command that becomes the program.
    pub launcher: Vec<std::ffi::OsString>,
    /// The descriptor of the memory of a virtual machine, which the program is given; `None`: it is
    /// no monitor of one.
    pub guest: Option<i32>,
    /// The memory in which the program locks pages of it.
    pub locks: Option<LockMemory>,
    /// Where to write the report.
    pub report: Option<ReportTo>,
    /// The class to ask the daemon for; `None`: no daemon is asked.
    pub daemon: Option<String>,
    /// Wait until everything that the program started has ended, too.
    pub wait_all: bool,
    /// Form of what is printed on standard error.
    pub log: LogFormat,
}

/// A size in JSON: its number of bytes.
mod as_number {
    use serde::{Deserialize, Deserializer, Serializer};
    use undercroft_base::Bytes;

    pub(super) fn serialize<S: Serializer>(size: &Bytes, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(size.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        u64::deserialize(from).map(Bytes)
    }
}

/// A policy's name in JSON: its text, which is parsed on the other side.
mod as_name {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<T: Display, S: Serializer>(name: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(name)
    }

    pub(super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = String::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

/// Bytes in JSON: two digits each.
mod as_hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let text: String = digits
            .map(|digit| char::from(DIGITS[usize::from(digit)]))
            .collect();
        to.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes = pairs
            .iter()
            .map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?));
        let bytes: Option<Vec<u8>> = bytes.collect();
        bytes
            .filter(|_| rest.is_empty())
            .ok_or_else(|| D::Error::custom("these are no bytes in hexadecimal"))
    }
}

/// A bound, a price or a name in JSON: its text, or null.
pub(crate) mod as_bound {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(
        bound: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        bound.as_ref().map(T::to_string).serialize(to)
    }

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<Option<T>, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        let text = Option::<String>::deserialize(from)?;
        let parsed = text.map(|text| text.parse().map_err(D::Error::custom));
        parsed.transpose()
    }
}

/// Tiers in JSON: each as its canonical text, which parses to an equal value.
mod as_text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use undercroft_tier::spec::TierSpec;

    pub(super) fn serialize<S: Serializer>(tiers: &[TierSpec], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(tiers.iter().map(TierSpec::to_string))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<TierSpec>, D::Error> {
        let texts = Vec::<String>::deserialize(from)?;
        let parsed = texts
            .iter()
            .map(|text| text.parse().map_err(D::Error::custom));
        parsed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(texts: &[&str]) -> ClientOptions {
        ClientOptions {
            memory_max: Bytes(u64::MAX),
            tiers: (texts.iter().map(|text| text.parse().expect("a tier"))).collect(),
            reclaim: "lru".parse().expect("a policy"),
            prefetch: "window:5".parse().expect("a policy"),
            placement: "worth".parse().expect("a policy"),
            when_full: WhenFull::Kill,
            quiet: true,
            trace: None,
            access_scan: AccessScan::Never,
            latency: Some("p99.9=1.5ms".parse().expect("a bound")),
            latency_control: true,
            takeovers_max: 7,
            class: Some("web".to_owned()),
            memory_price: Some("4.5".parse().expect("a price")),
            rights: Rights {
                cpus: Some("0-3,6".parse().expect("CPUs")),
                realtime: false,
                moves: Bytes(5 << 20),
            },
            name: Some("web".parse().expect("a name")),
            compressors: Some(3),
            page_size: PageSize::Large,
            plugin: Some(PluginFile {
                file: "mine.wasm".to_owned(),
                module: vec![0, 0x61, 0xff],
                parameters: BTreeMap::from([("behind".to_owned(), i64::MIN)]),
            }),
        }
    }

    #[test]
    fn options_are_the_same_on_the_other_side() {
        let options = options(&[
            "ram,zstd,max=12.5%",
            "file:/a:b,size=20G,price=0.1,tbw=600T",
        ]);
        let sent = serde_json::to_string(&options).expect("JSON");
        let got: ClientOptions = serde_json::from_str(&sent).expect("options");
        assert_eq!(
            (got.memory_max, &got.tiers, &got.prefetch, got.latency),
            (
                options.memory_max,
                &options.tiers,
                &options.prefetch,
                options.latency
            )
        );
        assert_eq!(got.memory_price, options.memory_price);
        assert_eq!(got.name, options.name);
        assert_eq!(got.rights.cpus, options.rights.cpus);
        assert_eq!(got.rights.moves, options.rights.moves);
        for (right, wrong) in [
            ("ram,zstd", "rum,zstd"),
            ("window:5", "window:500"),
            ("p99.9=", "p100="),
            ("4.5", "-4.5"),
            ("0-3,6", "3-0"),
            ("600T", "600"),
        ] {
            let wrong = sent.replace(right, wrong);
            assert!(serde_json::from_str::<ClientOptions>(&wrong).is_err());
        }
    }
}
