//! `undercroft run`: turns the parsed options into the keeper's, after every check that is possible
//! before.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use undercroft_base::{Bytes, PageSize, TierId};
use undercroft_policy::reclaim::ReclaimName;
use undercroft_proto::options::{ClientOptions, ReportTo, Rights, RunOptions};
use undercroft_tier::dram;
use undercroft_tier::spec::TierSpec;

use crate::args::RunArgs;
use crate::memory::Memory;
use crate::plugin;
use crate::preflight;
use crate::values::Policy;
use undercroft_terminal::{Failure, log_message, status};

/// Everything before the run itself: checks and defaults. Nothing is started, and nothing left
/// behind.
///
/// Errors: as printed, with the exit status.
pub(crate) fn options(args: RunArgs) -> Result<RunOptions, Failure> {
    preflight::check(&args.command[0])?;
    options_of_checked(args)
}

/// The same, for a program that is ours.
pub(crate) fn options_of_checked(args: RunArgs) -> Result<RunOptions, Failure> {
    let memory_max = memory_max(&args)?;
    if let Some(path) = &args.trace {
        check_writable(path)?;
    }
    let tiers = if args.tiers.is_empty() {
        default_tiers()?
    } else {
        args.tiers
    };
    check_count(&tiers)?;
    let (reclaim, plugin) = match args.reclaim {
        Policy::Name(name) => (name, None),
        Policy::File(path) => (ReclaimName::default(), Some(plugin::open(&path)?)),
    };
    let takeovers_asked = args.takeovers_max.or(args.no_takeover.then_some(0));
    let takeovers_max = takeovers(takeovers_asked, &tiers, args.trace.is_some())?;
    let client = ClientOptions {
        memory_max: Bytes(memory_max),
        tiers,
        reclaim,
        prefetch: args.prefetch,
        placement: args.placement,
        when_full: args.when_full.into(),
        quiet: args.quiet,
        trace: args.trace,
        access_scan: args.access_scan,
        latency: args.latency.map(|asked| asked.bound),
        latency_control: !args.latency.is_some_and(|asked| asked.measure_only),
        takeovers_max,
        class: None,
        memory_price: args.memory_price,
        rights: Rights::default(),
        name: args.name,
        compressors: args.compressors,
        page_size: PageSize::Base,
        plugin,
    };
    Ok(RunOptions {
        client,
        command: args.command,
        guest: None,
        locks: None,
        launcher: Vec::new(),
        report: args.report.map(ReportTo::of),
        daemon: args.daemon,
        wait_all: args.wait_all,
        log: args.log.into(),
    })
}

/// The limit in bytes; one that does not fit is warned of.
fn memory_max(args: &RunArgs) -> Result<u64, Failure> {
    let memory = Memory::here()?;
    let memory_max = args.memory_max.bytes(memory.all()).map_err(|why| {
        Failure::new(
            status::USAGE,
            "--memory-max is too small",
            why,
            "give a larger share, or a size such as 512M",
        )
    })?;
    let is_the_daemons = args.daemon.is_some() && memory_max == u64::MAX;
    if !args.quiet
        && !is_the_daemons
        && let Some(warning) = memory.warning(memory_max)
    {
        let text = log_message(args.log.into(), &warning);
        let _ = std::io::stderr().write_all(text.as_bytes()); // it may be closed
    }
    Ok(memory_max)
}

/// Whether an entry has room for as many tiers.
pub(crate) fn check_count(tiers: &[TierSpec]) -> Result<(), Failure> {
    if tiers.len() <= TierId::MAX {
        return Ok(());
    }
    Err(Failure::new(
        status::USAGE,
        format!("{} tiers are too many", tiers.len()),
        format!("a page entry has room for {}", TierId::MAX),
        "leave some --tier options out",
    ))
}

/// Takeovers of a run of which the user says nothing. Managers that die again and again at once are
/// given up on long before.
const TAKEOVERS_MAX: u32 = 1000;

/// How often another manager may take over. Error: it is asked for where none can.
fn takeovers(asked: Option<u32>, tiers: &[TierSpec], traces: bool) -> Result<u32, Failure> {
    let mut kinds = tiers.iter().map(TierSpec::kind);
    let hindrance = if traces {
        let what = "no manager can continue a trace of another".to_owned();
        Some((what, "its books begin anew"))
    } else if let Some(lost) = kinds.find(|kind| kind.version.is_none()) {
        let what = format!("no manager can take over a {} tier yet", lost.facts.kind);
        Some((what, "its copies would have no owner"))
    } else {
        None
    };
    match (asked, hindrance) {
        (Some(1..), Some((what, why))) => {
            let fix = "leave --takeovers-max out";
            Err(Failure::new(status::USAGE, what, why, fix))
        }
        (None, Some(_)) => Ok(0),
        (None, None) => Ok(TAKEOVERS_MAX),
        (Some(most), _) => Ok(most),
    }
}

/// `ram`, then a nameless file in the tier directory.
fn default_tiers() -> Result<Vec<TierSpec>, Failure> {
    let directory = tier_directory(
        std::env::var_os("UNDERCROFT_DIR").map(PathBuf::from),
        std::env::temp_dir(),
    )?;
    let text = directory.to_str().filter(|text| !text.contains(','));
    let tiers = text.map(|text| ["ram".parse(), format!("file:{text}").parse()]);
    match tiers {
        Some([Ok(first), Ok(second)]) => Ok(vec![first, second]),
        _ => Err(Failure::new(
            status::RUN_FAILED,
            format!("cannot use {} for the file tier", directory.display()),
            "its name has a comma or is not UTF-8, which a tier specification cannot express",
            "set UNDERCROFT_DIR to another directory",
        )),
    }
}

/// `UNDERCROFT_DIR` if it is set; otherwise the temporary directory, or /var/tmp if that one is in
/// memory.
pub(crate) fn tier_directory(
    chosen: Option<PathBuf>,
    temporary: PathBuf,
) -> Result<PathBuf, Failure> {
    if let Some(directory) = chosen.filter(|path| !path.as_os_str().is_empty()) {
        return match fs::metadata(&directory) {
            Ok(metadata) if metadata.is_dir() => Ok(directory),
            Ok(_) => Err(bad_directory(
                &directory,
                "it is not a directory".to_owned(),
            )),
            Err(error) => Err(bad_directory(&directory, error.to_string())),
        };
    }
    if is_memory(&temporary) && !is_memory(Path::new("/var/tmp")) {
        return Ok(PathBuf::from("/var/tmp"));
    }
    Ok(temporary)
}

fn bad_directory(directory: &Path, why: String) -> Failure {
    Failure::new(
        status::RUN_FAILED,
        format!("cannot use UNDERCROFT_DIR={}", directory.display()),
        why,
        "make the directory, or set UNDERCROFT_DIR to one that exists",
    )
}

/// True if files there are in memory, or if it cannot be opened: such a directory is not used
/// either.
fn is_memory(directory: &Path) -> bool {
    dram::holds_path(directory).unwrap_or(true)
}

/// The trace must not fail once the program runs. So its directory is tried now, without touching
/// an older file.
fn check_writable(path: &Path) -> Result<(), Failure> {
    let refuse = |why: String| {
        Failure::new(
            status::RUN_FAILED,
            format!("cannot write the trace {}", path.display()),
            why,
            "choose another --trace FILE, or make its directory writable",
        )
    };
    let existed = path.symlink_metadata().is_ok();
    fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .map_err(|error| refuse(error.to_string()))?;
    if !existed {
        fs::remove_file(path).map_err(|error| refuse(error.to_string()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_directory_prefers_the_users_choice_and_refuses_a_missing_one() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let chosen = tier_directory(Some(here.path().to_owned()), "/".into());
        assert_eq!(chosen, Ok(here.path().to_owned()));
        let error =
            tier_directory(Some(here.path().join("none")), "/".into()).expect_err("missing");
        assert_eq!(error.status, status::RUN_FAILED);
        assert!(error.what.contains("UNDERCROFT_DIR"), "{error}");
    }

    #[test]
    fn tier_directory_avoids_a_temporary_directory_that_is_memory() {
        if !is_memory(Path::new("/dev/shm")) || is_memory(Path::new("/var/tmp")) {
            crate::skip(
                "tier_directory_avoids_a_temporary_directory_that_is_memory: needs /dev/shm on \
                 tmpfs and /var/tmp on a disk",
            );
            return;
        }
        assert_eq!(
            tier_directory(None, "/dev/shm".into()),
            Ok("/var/tmp".into())
        );
        assert_eq!(
            tier_directory(Some("/dev/shm".into()), "/".into()),
            Ok("/dev/shm".into())
        );
    }

    #[test]
    fn trace_check_leaves_nothing_and_keeps_what_is_there() {
        let here = tempfile::tempdir().expect("a temporary directory");
        let path = here.path().join("run.uct");
        assert_eq!(check_writable(&path), Ok(()));
        assert!(!path.exists());
        fs::write(&path, "old").expect("write");
        assert_eq!(check_writable(&path), Ok(()));
        assert_eq!(fs::read_to_string(&path).expect("read"), "old");
        assert!(check_writable(&here.path().join("none/run.uct")).is_err());
    }
}
