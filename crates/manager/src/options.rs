//! What a run is asked for: parsed by the command line, carried to the manager unchanged.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use undercroft_base::Bytes;
use undercroft_tier::spec::TierSpec;

/// What to do when no tier has room and the limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenFull {
    /// Pages stay in memory; the limit is exceeded, with a warning and a counter.
    #[default]
    Stay,
    /// The client is ended with status 125.
    Kill,
}

/// How often the pages in memory are looked at for use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessScan {
    /// Now and then while pages leave memory, where the machine allows it.
    #[default]
    Auto,
    /// At this interval; refused where the machine does not allow it.
    Every(Duration),
    /// Not at all.
    Never,
}

/// Options of one client, validated by whoever builds it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientOptions {
    /// DRAM for the client; `u64::MAX` bytes = no limit.
    #[serde(with = "as_number")]
    pub memory_max: Bytes,
    /// Fastest first; never empty.
    #[serde(with = "as_text")]
    pub tiers: Vec<TierSpec>,
    /// Reclaim policy name.
    pub reclaim: String,
    /// Prefetch policy name.
    pub prefetch: String,
    /// When every tier is full.
    pub when_full: WhenFull,
    /// Suppress everything but errors on stderr.
    pub quiet: bool,
    /// Where to record the page faults; `None` = nowhere.
    pub trace: Option<PathBuf>,
    /// Looks at which pages in memory were used.
    pub access_scan: AccessScan,
}

/// One `undercroft run`.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The client's options.
    pub client: ClientOptions,
    /// Program and arguments; never empty.
    pub command: Vec<std::ffi::OsString>,
    /// Where to write the report.
    pub report: Option<PathBuf>,
}

/// Sizes between keeper and manager: a number of bytes.
mod as_number {
    use serde::{Deserialize, Deserializer, Serializer};
    use undercroft_base::Bytes;

    pub fn serialize<S: Serializer>(size: &Bytes, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(size.0)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
        u64::deserialize(from).map(Bytes)
    }
}

/// Tiers between keeper and manager: each in its canonical text, which parses to an equal value.
mod as_text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use undercroft_tier::spec::TierSpec;

    pub fn serialize<S: Serializer>(tiers: &[TierSpec], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(tiers.iter().map(TierSpec::to_string))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<TierSpec>, D::Error> {
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

    #[test]
    fn options_are_the_same_on_the_other_side() {
        let texts = ["ram,zstd,max=12.5%", "file:/a:b,size=20G"];
        let options = ClientOptions {
            memory_max: Bytes(u64::MAX),
            tiers: texts.map(|text| text.parse().expect("a tier")).to_vec(),
            reclaim: "clock".to_owned(),
            prefetch: "none".to_owned(),
            when_full: WhenFull::Kill,
            quiet: true,
            trace: None,
            access_scan: AccessScan::Never,
        };
        let sent = serde_json::to_string(&options).expect("JSON");
        let got: ClientOptions = serde_json::from_str(&sent).expect("options");
        assert_eq!(
            (got.memory_max, &got.tiers),
            (options.memory_max, &options.tiers)
        );
        let wrong = sent.replace("ram,zstd", "rum,zstd");
        assert!(serde_json::from_str::<ClientOptions>(&wrong).is_err());
    }
}
