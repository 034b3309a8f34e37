//! The output of `status` and `tiers`, as text and as JSON.

use std::io::{self, Write};

use serde::Serialize;
use undercroft_base::{Bytes, Nanos};
use undercroft_manager::report::{SCHEMA_VERSION, Snapshot, bound_summary};

use crate::curve;
use crate::failure::{Failure, status};

/// One option of a tier specification.
#[derive(Debug, Serialize)]
pub(crate) struct TierOption {
    name: &'static str,
    default: &'static str,
    meaning: &'static str,
}

/// One kind of tier.
#[derive(Debug, Serialize)]
pub(crate) struct TierKindHelp {
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

/// Prints `value` as indented JSON on standard output.
pub(crate) fn json<T: Serialize>(value: &T) -> Result<(), Failure> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| cannot_print(&error.to_string()))?;
    line(&text)
}

/// Prints one line on standard output. A closed pipe is no error.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    match writeln!(io::stdout(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(cannot_print(&error.to_string()))
        }
        _ => Ok(()),
    }
}

/// Whether colours are allowed (`NO_COLOR`). The caller also checks for a terminal.
pub(crate) fn colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn cannot_print(why: &str) -> Failure {
    Failure::new(
        status::FAILED,
        "cannot print the result",
        why,
        "check where standard output goes",
    )
}

/// How `undercroft status` shows runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatusForm {
    /// A few lines a run.
    Text,
    /// What other limits would have cost.
    Curve,
    /// How long it waits for pages, in the format of the kernel's pressure files.
    Pressure,
    /// All of it.
    Json,
}

/// `undercroft status`, of the run `pid` alone if there is one.
pub(crate) fn status(
    snapshots: &[Snapshot],
    pid: Option<u32>,
    form: StatusForm,
) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Status<'a> {
        schema_version: u32,
        clients: Vec<&'a Snapshot>,
    }
    let wanted = |snapshot: &Snapshot| pid.is_none_or(|pid| snapshot.pid == pid);
    let snapshots: Vec<_> = snapshots.iter().filter(|of| wanted(of)).collect();
    if let (Some(pid), true) = (pid, snapshots.is_empty()) {
        return Err(Failure::new(
            status::FAILED,
            format!("no run has process id {pid}"),
            "it has ended, or belongs to another user, or to another UNDERCROFT_DIR",
            "`undercroft status` lists the runs",
        ));
    }
    if form == StatusForm::Json {
        json(&Status {
            schema_version: SCHEMA_VERSION,
            clients: snapshots,
        })?;
        return Ok(0);
    }
    if snapshots.is_empty() {
        line("Nothing runs under undercroft now.")?;
    }
    for snapshot in snapshots {
        let text = match form {
            StatusForm::Curve => curve::table(snapshot),
            StatusForm::Pressure if pid.is_some() => snapshot.pressure_line(),
            StatusForm::Pressure => {
                let command = snapshot.command.join(" ");
                format!("{}  {command}\n{}", snapshot.pid, snapshot.pressure_line())
            }
            StatusForm::Text | StatusForm::Json => client(snapshot),
        };
        line(text.trim_end())?;
    }
    Ok(0)
}

fn client(snapshot: &Snapshot) -> String {
    let limit = snapshot
        .memory_max_bytes
        .map_or("no limit".to_owned(), |max| format!("limit {}", Bytes(max)));
    let mut text = format!("{}  {}\n", snapshot.pid, snapshot.command.join(" "));
    text.push_str(&format!(
        "  up {}{}{}\n",
        Nanos((snapshot.uptime_seconds * 1e9) as u64),
        (snapshot.class.as_ref()).map_or(String::new(), |class| format!("; class {class}")),
        if snapshot.paused {
            "; paused: no page leaves, and the limit is not kept"
        } else {
            ""
        }
    ));
    text.push_str(&format!(
        "  DRAM {} ({limit}), resident {}\n",
        Bytes(snapshot.dram_bytes),
        Bytes(snapshot.resident_bytes)
    ));
    for (at, tier) in snapshot.tiers.iter().enumerate() {
        let ratio = tier
            .ratio
            .map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        text.push_str(&format!(
            "  tier {}, {}{}: logical {}, stored {}, ratio {ratio}\n",
            at + 1,
            tier.name,
            if tier.emulated { " (emulated)" } else { "" },
            Bytes(tier.logical_bytes),
            Bytes(tier.stored_bytes)
        ));
        if let Some(drain) = &tier.drain {
            text.push_str(&format!("    {}\n", crate::drain::progress(drain)));
        }
    }
    if let Some(cost) = &snapshot.cost {
        text.push_str(&format!("  cost {cost}\n"));
    }
    if let Some(bound) = &snapshot.latency_bound {
        text.push_str(&format!("  bound {}\n", bound_summary(bound)));
    }
    if let Some(bound) = &snapshot.stall_bound {
        text.push_str(&format!("  bound {bound}\n"));
    }
    text.push_str(&format!(
        "  now {:.0} faults/s, {:.0} pages in/s, {:.0} pages out/s; {} faults so far\n",
        snapshot.rates.faults_per_second,
        snapshot.rates.swapped_in_per_second,
        snapshot.rates.swapped_out_per_second,
        snapshot.faults.total
    ));
    text
}

/// `undercroft tiers`.
pub(crate) fn tiers(as_json: bool) -> Result<u8, Failure> {
    #[derive(Serialize)]
    struct Tiers {
        schema_version: u32,
        tiers: &'static [TierKindHelp],
    }
    if as_json {
        json(&Tiers {
            schema_version: SCHEMA_VERSION,
            tiers: TIER_KINDS,
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
