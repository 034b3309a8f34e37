//! Parses each option's value, and refuses with what, why and the fix. The argument parser uses it.

use std::path::PathBuf;
use std::time::Duration;

use undercroft_base::{Bytes, Nanos};
use undercroft_policy::{place, prefetch, reclaim};
use undercroft_proto::options::{AccessScan, COMPRESSORS_MAX};
use undercroft_qos::{BoundError, LatencyBound};
use undercroft_tier::spec::TierSpec;

/// Reclaim policy when none is named.
pub(crate) const RECLAIM_DEFAULT: &str = reclaim::NAMES[0];
/// Placement policy when none is named.
pub(crate) const PLACEMENT_DEFAULT: &str = place::NAMES[0];
/// Prefetch policy when none is named.
pub(crate) const PREFETCH_DEFAULT: &str = prefetch::NAMES[0];
/// Smallest limit. Below it, the reserve and the pages of one instruction leave no room for
/// progress.
pub(crate) const MEMORY_MAX_MIN: Bytes = Bytes(1 << 20);
/// Shortest and longest `--access-scan`.
const ACCESS_SCAN_MIN: Duration = Duration::from_millis(10);
const ACCESS_SCAN_MAX: Duration = Duration::from_secs(3600);
/// Smallest `demo --size`. Below it the store itself outweighs its values.
const DEMO_SIZE_MIN: Bytes = Bytes(16 << 20);

/// `--memory-max` as typed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MemoryMax {
    /// No limit.
    Max,
    /// A size in bytes.
    Size(Bytes),
    /// A share of the memory that there is, above 0 up to 100.
    Percent(f64),
}

impl MemoryMax {
    /// In bytes, of this much memory; `u64::MAX` = no limit. Errors: the share is below the
    /// smallest limit; the text is for the user.
    pub(crate) fn bytes(self, whole: Bytes) -> Result<u64, String> {
        match self {
            MemoryMax::Max => Ok(u64::MAX),
            MemoryMax::Size(size) => Ok(size.0),
            MemoryMax::Percent(percent) => {
                let size = Bytes((whole.0 as f64 * percent / 100.0) as u64);
                enough(size).map_err(|why| format!("{percent}% of {whole} is {size}: {why}"))?;
                Ok(size.0)
            }
        }
    }
}

fn enough(size: Bytes) -> Result<(), String> {
    if size >= MEMORY_MAX_MIN {
        return Ok(());
    }
    Err(format!(
        "below {MEMORY_MAX_MIN} a program cannot make progress, because the pages that one instruction needs must be \
         in memory together; give more, or `max` for no limit"
    ))
}

/// `auto`: what the kernel charges to a control group, and we do not count, takes the rest.
const AUTO_PERCENT: f64 = 90.0;

/// `--memory-max`: a size, a percentage, `auto` or `max`.
pub(crate) fn memory_max(text: &str) -> Result<MemoryMax, String> {
    let text = text.trim();
    match text {
        "max" => return Ok(MemoryMax::Max),
        "auto" => return Ok(MemoryMax::Percent(AUTO_PERCENT)),
        _ => {}
    }
    if let Some(number) = text.strip_suffix('%') {
        return match number.trim().parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(MemoryMax::Percent(percent)),
            Ok(_) => Err(
                "a percentage is of this machine's memory, or of its control group's limit, above 0 and up to 100; use \
                 e.g. 25%"
                    .to_owned(),
            ),
            Err(_) => Err(format!(
                "`{number}` before the % is not a number; use e.g. 25%"
            )),
        };
    }
    let size = text
        .parse::<Bytes>()
        .map_err(|error| format!("{error}, or a share such as 50%, or auto, or max"))?;
    // A number without a unit is of bytes, and a small one seldom meant so.
    let has_no_unit = text.bytes().all(|byte| byte.is_ascii_digit());
    enough(size).map_err(|why| {
        if has_no_unit && size > Bytes(0) {
            format!("{text} bytes: did you mean {text}M? {why}")
        } else {
            why
        }
    })?;
    Ok(MemoryMax::Size(size))
}

/// `vm --memory`: a size of at least a page.
pub(crate) fn guest_memory(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.trim().parse().map_err(|error| format!("{error}"))?;
    let is_enough = size.pages_floor().0 > 0;
    is_enough
        .then_some(size)
        .ok_or_else(|| format!("{text} is less than a page of 4 KiB"))
}

/// `top --interval`: 100 ms (shorter, the runs would be asked all the time) to an hour.
pub(crate) fn refresh(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is no time from 100ms to 1h; use e.g. 1s");
    let time: Nanos = text.trim().parse().map_err(|_| wrong())?;
    let time = Duration::from_nanos(time.0);
    let useful = Duration::from_millis(100)..=Duration::from_secs(3600);
    useful.contains(&time).then_some(time).ok_or_else(wrong)
}

/// `--access-scan`: an interval of at least 10 ms (shorter, scanning would take all the time),
/// `auto` or `never`.
pub(crate) fn access_scan(text: &str) -> Result<AccessScan, String> {
    match text {
        "auto" => return Ok(AccessScan::Auto),
        "never" => return Ok(AccessScan::Never),
        _ => {}
    }
    let interval = text
        .parse::<Nanos>()
        .map_err(|error| format!("{error}; or auto, or never"))?;
    let interval = Duration::from_nanos(interval.0);
    if (ACCESS_SCAN_MIN..=ACCESS_SCAN_MAX).contains(&interval) {
        Ok(AccessScan::Every(interval))
    } else {
        Err(format!(
            "an interval of {ACCESS_SCAN_MIN:?} to {ACCESS_SCAN_MAX:?} is useful, such as 100ms; or auto, or never"
        ))
    }
}

/// `--policy` as typed.
#[derive(Clone, Debug)]
pub(crate) enum Policy {
    /// A policy of ours.
    Name(reclaim::ReclaimName),
    /// A file of the user's.
    File(PathBuf),
}

/// `--policy`: a name, or a file whose name ends in `.wasm`.
pub(crate) fn reclaim(text: &str) -> Result<Policy, String> {
    if text.ends_with(".wasm") {
        return Ok(Policy::File(PathBuf::from(text)));
    }
    if RULES_GONE.contains(&text) {
        return Err(format!(
            "an earlier version had it; use --policy {text}.wasm, {POLICY_FILES}"
        ));
    }
    let name = text.parse().map(Policy::Name);
    name.map_err(|error: undercroft_policy::UnknownPolicy| format!("{error}, or a FILE.wasm"))
}

/// `--placement`: a name.
pub(crate) fn placement(text: &str) -> Result<place::PlacementName, String> {
    if PLACEMENTS_GONE.contains(&text) {
        return Err(format!(
            "an earlier version had it; use --placement waterfall --policy {text}.wasm, {POLICY_FILES}"
        ));
    }
    let name = text.parse();
    name.map_err(|error: undercroft_policy::UnknownPolicy| error.to_string())
}

/// Rules that are policy files now.
const RULES_GONE: [&str; 2] = ["clock", "clock_w"];
const PLACEMENTS_GONE: [&str; 3] = ["latency_group", "locality", "temperature"];

/// Where policy files of papers are.
const POLICY_FILES: &str = "which packages have in /usr/share/undercroft/policies, and which \
                            `make -C policies` builds in the sources";

/// `--compressors`: a number of threads.
pub(crate) fn compressors(text: &str) -> Result<usize, String> {
    let count = text.parse().ok();
    let count = count.filter(|count| (1..=COMPRESSORS_MAX).contains(count));
    count.ok_or_else(|| format!("`{text}` is no number of threads from 1 to {COMPRESSORS_MAX}"))
}

/// `--latency` as typed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Latency {
    pub bound: LatencyBound,
    /// No control keeps it.
    pub measure_only: bool,
}

/// `--latency`: a bound, and perhaps `,measure`.
pub(crate) fn latency(text: &str) -> Result<Latency, String> {
    let (bound, measure_only) = match text.split_once(',') {
        Some((bound, more)) if more.trim() == "measure" => (bound, true),
        Some((_, more)) => {
            return Err(format!(
                "`{more}` is not known here; use e.g. p99=200us,measure"
            ));
        }
        None => (text, false),
    };
    let bound = bound
        .trim()
        .parse()
        .map_err(|error: BoundError| error.to_string())?;
    Ok(Latency {
        bound,
        measure_only,
    })
}

/// `--tier`: a tier specification.
pub(crate) fn tier(text: &str) -> Result<TierSpec, String> {
    let spec = text
        .parse::<TierSpec>()
        .map_err(|error| error.to_string())?;
    if spec.facts().is_source {
        return Err(format!(
            "{} is only read, and takes no page; use undercroft vm --memory-file",
            spec.facts().kind
        ));
    }
    Ok(spec)
}

/// `demo --size`.
pub(crate) fn demo_size(text: &str) -> Result<Bytes, String> {
    let size = text.parse::<Bytes>().map_err(|error| error.to_string())?;
    if size < DEMO_SIZE_MIN {
        return Err(format!(
            "below {DEMO_SIZE_MIN} the store itself outweighs its values and nothing is shown; give more, e.g. 384M"
        ));
    }
    Ok(size)
}

/// Checks what must hold of every value, whatever the user types: a refusal has words, and an
/// accepted value is within its bounds and stays the same when it is written and read. For the fuzz
/// target, which includes this file, and its test. Returns how many options accept it.
#[allow(
    dead_code,
    reason = "a fuzz target and a test call it, the program does not"
)]
pub(crate) fn check(text: &str) -> usize {
    let said = |error: String| assert!(!error.is_empty());
    let memory = memory_max(text).map_err(said);
    if let Ok(memory) = memory {
        let machine = Bytes(24 << 30);
        let bytes = memory.bytes(machine).map_err(said);
        assert!(bytes.is_err() || bytes >= Ok(MEMORY_MAX_MIN.0));
        if let (MemoryMax::Percent(_), Ok(bytes)) = (memory, bytes) {
            assert!(bytes <= machine.0, "{text}: more than the machine has");
        }
    }
    let scan = access_scan(text).map_err(said);
    if let Ok(AccessScan::Every(interval)) = scan {
        assert!((ACCESS_SCAN_MIN..=ACCESS_SCAN_MAX).contains(&interval));
    }
    let demo = demo_size(text).map_err(said);
    let tier = tier(text).map_err(said);
    assert!(undercroft_tier::spec::check(text) || tier.is_err());
    let policies = [
        text.parse::<reclaim::ReclaimName>()
            .map(|name| drop(name.make()))
            .is_ok(),
        text.parse::<prefetch::PrefetchName>()
            .map(|name| drop(name.make()))
            .is_ok(),
        text.parse::<place::PlacementName>()
            .map(|name| drop(name.make()))
            .is_ok(),
    ];
    let accepted = [
        memory.is_ok(),
        scan.is_ok(),
        demo.is_ok(),
        latency(text).map_err(said).is_ok(),
        tier.is_ok(),
    ];
    accepted.iter().chain(&policies).filter(|is| **is).count()
}

#[cfg(test)]
mod tests {
    use undercroft_seeded::Random;

    use super::*;
    use crate::args::{Cli, Command};

    /// Values that some option accepts, and pieces to put into them.
    const VALUES: [&str; 22] = [
        "512M",
        "1.5GiB",
        "50%",
        "max",
        "100ms",
        "auto",
        "never",
        "4K",
        "ram,zstd,max=12.5%",
        "file:/a:b,size=20G",
        "ram, lz4 , max = 64M",
        "lru",
        "readahead:8",
        "window:5",
        "worth",
        "majority",
        "pcm/hdd-7200",
        "zipf:pages=2000,refs=2000",
        "nvme,ratio=3",
        "1M,16,64",
        "1/16",
        "250ns",
    ];
    const PIECES: [&str; 14] = [
        "",
        " ",
        ",",
        "=",
        ":",
        "%",
        "-1",
        "NaN",
        "inf",
        "1e308",
        "99999999999999999999",
        ".",
        "µ",
        "/",
    ];

    fn mutated(random: &mut Random) -> String {
        let mut text: Vec<char> = VALUES[random.index(VALUES.len())].chars().collect();
        for _ in 0..random.below(3) {
            let at = random.index(text.len() + 1);
            let to = (at + random.index(3)).min(text.len());
            let piece = match random.below(3) {
                0 => VALUES[random.index(VALUES.len())],
                _ => PIECES[random.index(PIECES.len())],
            };
            match random.below(3) {
                0 => text.insert(at, char::from(b'0' + random.below(10) as u8)),
                1 => drop(text.drain(at..to)),
                _ => drop(text.splice(at..to, piece.chars())),
            }
        }
        text.into_iter().collect()
    }

    #[test]
    fn mutated_values_keep_every_promise() {
        let (mut random, mut taken) = (Random::new(31), 0);
        for _ in 0..60_000 {
            taken += check(&mutated(&mut random));
        }
        assert!(taken > 20_000, "{taken} prove nothing");
    }

    /// Every option that takes a value, of every command, by the names that the parser has.
    #[test]
    fn no_value_of_any_option_is_a_panic() {
        use clap::{CommandFactory, Parser};

        fn lines(command: &clap::Command, path: &[String], all: &mut Vec<(Vec<String>, String)>) {
            for inner in command.get_subcommands() {
                let mut path = path.to_vec();
                path.push(inner.get_name().to_owned());
                lines(inner, &path, all);
            }
            for option in command.get_arguments().filter_map(clap::Arg::get_long) {
                all.push((path.to_vec(), format!("--{option}")));
            }
        }
        let mut all = Vec::new();
        lines(&Cli::command(), &["undercroft".to_owned()], &mut all);
        assert!(all.len() > 40, "{} options", all.len());
        let (mut random, mut refused) = (Random::new(32), 0);
        for (path, option) in &all {
            for _ in 0..60 {
                let value = format!("{option}={}", mutated(&mut random));
                let words = path.iter().chain([&value]);
                refused += usize::from(Cli::try_parse_from(words).is_err());
            }
        }
        assert!(refused > 60 * all.len() / 2, "{refused}");
    }

    #[test]
    fn memory_max_takes_sizes_shares_and_max() {
        assert_eq!(memory_max("512M"), Ok(MemoryMax::Size(Bytes(512 << 20))));
        assert_eq!(memory_max("1.5GiB"), Ok(MemoryMax::Size(Bytes(3 << 29))));
        assert_eq!(memory_max("50%"), Ok(MemoryMax::Percent(50.0)));
        assert_eq!(memory_max("max"), Ok(MemoryMax::Max));
        assert_eq!(memory_max("auto"), Ok(MemoryMax::Percent(90.0)));
    }

    #[test]
    fn memory_max_refuses_nonsense_with_a_way_out() {
        for (text, word) in [
            ("0", "max"),
            ("1023K", "progress"),
            ("lots", "512M"),
            ("0%", "25%"),
            ("101%", "25%"),
            ("-5%", "25%"),
            ("NaN%", "25%"),
            ("x%", "25%"),
            ("", "512M"),
        ] {
            let error = memory_max(text).expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn memory_max_percent_is_of_what_there_is_and_has_the_same_floor() {
        assert_eq!(MemoryMax::Percent(25.0).bytes(Bytes(4 << 30)), Ok(1 << 30));
        assert_eq!(MemoryMax::Max.bytes(Bytes(4 << 30)), Ok(u64::MAX));
        assert!(MemoryMax::Percent(0.001).bytes(Bytes(1 << 30)).is_err());
    }

    #[test]
    fn a_latency_bound_may_be_measured_only() {
        let of = |text| latency(text).map(|it| (it.bound.to_string(), it.measure_only));
        assert_eq!(of("p99=200us"), Ok(("p99=200us".to_owned(), false)));
        assert_eq!(of("p99=200us, measure"), Ok(("p99=200us".to_owned(), true)));
        assert!(
            of("p99=200us,control")
                .expect_err("control")
                .contains("measure")
        );
        assert!(of("p99=200us,").is_err() && of(",measure").is_err());
    }

    #[test]
    fn tiers_are_parsed_here_not_in_the_manager() {
        assert_eq!(
            tier("ram, zstd").map(|spec| spec.to_string()).as_deref(),
            Ok("ram,zstd")
        );
        assert!(
            tier("tape:/dev/st0")
                .expect_err("tape")
                .contains("use ram, nvm:PATH, file:PATH")
        );
    }

    #[test]
    fn policies_keep_what_the_user_gave_and_unknown_ones_are_refused() {
        use clap::Parser;

        let run = |option: &str, name: &str| {
            let words = ["undercroft", "run", option, name, "--", "true"];
            let Command::Run(args) = Cli::try_parse_from(words)
                .map_err(|e| e.to_string())?
                .command
            else {
                panic!("`run` is another command");
            };
            Ok::<_, String>(args)
        };
        let args = run("--prefetch", "readahead:8").expect("a policy");
        assert_eq!(args.prefetch.to_string(), "readahead:8");
        assert!(
            run("--policy", "fifo")
                .expect_err("fifo")
                .contains("active_inactive")
        );
        let psychic = run("--prefetch", "psychic").expect_err("psychic");
        assert!(psychic.contains("majority"), "{psychic}");
        assert!(
            run("--placement", "top")
                .expect_err("top")
                .contains("waterfall")
        );
    }
}
