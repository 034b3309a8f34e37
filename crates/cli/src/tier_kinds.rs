//! `undercroft tiers`: which kinds of tiers there are, and what was measured.

use serde::Serialize;
use undercroft_manager::report::SCHEMA_VERSION;
use undercroft_tier::profile::{self, Profile, ProfileError};

use crate::failure::{Failure, status};
use crate::measure;
use crate::show::{json, line};

/// One option of a tier specification.
#[derive(Debug, Serialize)]
struct TierOption {
    name: &'static str,
    default: &'static str,
    meaning: &'static str,
}

/// One kind of tier.
#[derive(Debug, Serialize)]
struct TierKindHelp {
    kind: &'static str,
    syntax: &'static str,
    example: &'static str,
    meaning: &'static str,
    options: &'static [TierOption],
}

/// An option of every kind but `redis`.
const SHAPE: TierOption = TierOption {
    name: "shape=DEVICE",
    default: "none",
    meaning: "times of another device, for experiments; reports then say `emulated`",
};

/// What kinds other than DRAM cost.
const PRICE: TierOption = TierOption {
    name: "price=DOLLARS",
    default: "none",
    meaning: "price of a GiB, such as 0.1: report and status then say what it costs",
};

const TBW: TierOption = TierOption {
    name: "tbw=SIZE",
    default: "none",
    meaning: "writes in all that the data sheet promises, base 1000, such as 600T",
};

const TIER_KINDS: &[TierKindHelp] = &[
    TierKindHelp {
        kind: "ram",
        syntax: "ram[,lz4|zstd][,max=SIZE|PERCENT][,shape=DEVICE][,price=DOLLARS]",
        example: "ram,zstd,max=64M",
        meaning: "Compressed memory. It counts towards --memory-max. Pages of one repeated word cost nothing.",
        options: &[
            TierOption {
                name: "lz4|zstd",
                default: "lz4",
                meaning: "compressor: lz4 is faster, zstd smaller",
            },
            TierOption {
                name: "max=SIZE|PERCENT",
                default: "50% above another tier, 95% alone",
                meaning: "most memory it may hold; a percentage is of --memory-max",
            },
            SHAPE,
            TierOption {
                name: "price=DOLLARS",
                default: "what --memory-price says",
                meaning: "price of a GiB, if it stands for memory that is not DRAM",
            },
        ],
    },
    TierKindHelp {
        kind: "nvm",
        syntax: "nvm:PATH,size=SIZE[,shape=DEVICE][,price=DOLLARS][,tbw=SIZE]",
        example: "nvm:/mnt/pmem,size=8G",
        meaning: "Mapped memory that is not DRAM: a DAX device, a new file, or a directory to make a \
                  nameless file in. A file that is not on a DAX file system only stands for it, and \
                  counts as emulated. Nothing of it outlives the run.",
        options: &[
            TierOption {
                name: "size=SIZE",
                default: "all of a device; a file needs it",
                meaning: "bytes it takes, all of them at the start",
            },
            SHAPE,
            PRICE,
            TBW,
        ],
    },
    TierKindHelp {
        kind: "file",
        syntax: "file:PATH[,size=SIZE][,shape=DEVICE][,price=DOLLARS][,tbw=SIZE]",
        example: "file:/var/swap,size=20G",
        meaning: "A new file, a block device, or a directory to make a nameless file in. Nothing of \
                  it outlives the run.",
        options: &[
            TierOption {
                name: "size=SIZE",
                default: "all of a block device; for a file, what the disk leaves",
                meaning: "most bytes it may take",
            },
            SHAPE,
            PRICE,
            TBW,
        ],
    },
    TierKindHelp {
        kind: "redis",
        syntax: "redis:HOST:PORT[,HOST:PORT]...[,size=SIZE][,prefix=NAME][,user=NAME]\
                 [,password-file=PATH][,tls=PATH|system][,cert=PATH,key=PATH][,leftover=discard][,price=DOLLARS]",
        example: "redis:10.0.0.1:6379,10.0.0.2:6379,size=20G",
        meaning: "A Redis or Valkey cluster: each page compressed, on two masters. Its machines see \
                  the program's memory in clear. Nothing of it outlives the run.",
        options: &[
            TierOption {
                name: "size=SIZE",
                default: "4G",
                meaning: "most bytes in the cluster, both copies counted",
            },
            TierOption {
                name: "prefix=NAME",
                default: "uc",
                meaning: "first part of all keys; each run needs its own",
            },
            TierOption {
                name: "user=NAME",
                default: "the default user",
                meaning: "user of the cluster's access list",
            },
            TierOption {
                name: "password-file=PATH",
                default: "no password",
                meaning: "its first line is the password",
            },
            TierOption {
                name: "tls=PATH|system",
                default: "not encrypted",
                meaning: "encrypts; trusts the authorities in the file, or the system's",
            },
            TierOption {
                name: "cert=PATH,key=PATH",
                default: "none",
                meaning: "the certificate that the cluster asks for, and its key",
            },
            TierOption {
                name: "leftover=discard",
                default: "refuse",
                meaning: "deletes what a run left that was not heard of for a minute",
            },
            PRICE,
        ],
    },
];

/// `undercroft tiers`: prints both.
///
/// Errors: a file of profiles is damaged.
pub(crate) fn print(as_json: bool) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Tiers {
        schema_version: u32,
        tiers: &'static [TierKindHelp],
        profiles: Vec<Profile>,
    }
    let mut profiles = Vec::new();
    for place in profile::places() {
        let damaged = |error: ProfileError| {
            let path = place.path().display().to_string();
            let fix = format!("`rm {path}`, then `undercroft tiers --measure` again");
            Failure::new(
                status::FAILED,
                "cannot read profiles",
                error.to_string(),
                fix,
            )
        };
        profiles.extend(place.all().map_err(damaged)?);
    }
    if as_json {
        json(&Tiers {
            schema_version: SCHEMA_VERSION,
            tiers: TIER_KINDS,
            profiles,
        })?;
        return Ok(0);
    }
    for tier in TIER_KINDS {
        line(&format!(
            "{}\n  {}\n  example: --tier {}",
            tier.syntax, tier.meaning, tier.example
        ))?;
        for option in tier.options {
            line(&format!(
                "  {:<18} {} (default: {})",
                option.name, option.meaning, option.default
            ))?;
        }
    }
    line(&format!(
        "\nDEVICE is one of: {}.",
        undercroft_tier::shape::names()
    ))?;
    line("\nGive --tier once for each tier, fastest first. Full tiers overflow into the next.")?;
    if profiles.is_empty() {
        line("Nothing is measured yet: `undercroft tiers --measure SPEC`.")?;
    } else {
        line("\nMeasured before (`--measure`):")?;
        measure::table(&profiles)?;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_examples_are_specifications_the_parser_takes() {
        for tier in TIER_KINDS {
            let parsed = tier.example.parse::<undercroft_tier::spec::TierSpec>();
            assert!(parsed.is_ok(), "{}: {parsed:?}", tier.example);
            assert!(tier.example.starts_with(tier.kind));
        }
    }
}
