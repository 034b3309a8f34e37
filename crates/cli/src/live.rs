//! The only module that calls the live system: it starts a run, acts as its manager, and asks
//! running managers for their state.

use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use undercroft_keeper as keeper;
use undercroft_keeper::upgrade::Told;
use undercroft_keeper::wanted::{Found, Wanted, find};
use undercroft_manager::control;
use undercroft_proto::messages::{Answered, Ask, MANAGER_TITLE};
use undercroft_proto::options::RunOptions;
use undercroft_proto::report::Snapshot;

use crate::plugin;
use undercroft_terminal::{Failure, status as code};

/// Runs a program to its end. Returns its exit status.
pub(crate) fn run(options: RunOptions) -> Result<u8, Failure> {
    Ok(keeper::run(&options) as u8)
}

/// Whether a process of this name (`argv[0]`) is to be the manager of a run.
pub(crate) fn is_manager(name: Option<&OsStr>) -> bool {
    name.is_some_and(|name| name.as_bytes().starts_with(MANAGER_TITLE.as_bytes()))
}

/// The manager of one run; started by `run`, never by hand. Standard input has the launch
/// description, as JSON.
pub(crate) fn serve() -> Result<u8, Failure> {
    let failed = |why: String| {
        Failure::new(
            code::RUN_FAILED,
            "the manager cannot serve",
            &why,
            "managers are started by `undercroft run`, not by hand; `undercroft doctor` says what is \
             missing",
        )
    };
    let mut bytes = Vec::new();
    let read = std::io::stdin().read_to_end(&mut bytes);
    read.map_err(|error| failed(error.to_string()))?;
    let launch = serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))?;
    drop(bytes);
    control::serve(launch, plugin::read).map_err(|error| failed(error.to_string()))?;
    Ok(0)
}

/// Every running client of this user.
pub(crate) fn snapshots() -> Result<Vec<Snapshot>, Failure> {
    Ok(keeper::status::snapshots())
}

/// The same, and if `all`, those of other users. Error: it is not root that asks for these.
pub(crate) fn snapshots_of(all: bool) -> Result<Vec<Snapshot>, Failure> {
    check_all(all)?;
    if all {
        Ok(keeper::others::snapshots_of_all())
    } else {
        snapshots()
    }
}

/// Error: the runs of other users are asked for, and this is not root.
pub(crate) fn check_all(all: bool) -> Result<(), Failure> {
    if all && keeper::status::user() != 0 {
        return Err(Failure::new(
            code::FAILED,
            "--all is for root",
            "the runs of other users are closed to this user",
            "leave --all out, or ask as root",
        ));
    }
    Ok(())
}

/// The run that the user means, among all of this user.
pub(crate) fn run_of(wanted: &Wanted) -> Result<Snapshot, Failure> {
    one_of(&snapshots()?, wanted).cloned()
}

/// The run that the user means, among these. Errors: none, or several.
pub(crate) fn one_of<'a>(runs: &'a [Snapshot], wanted: &Wanted) -> Result<&'a Snapshot, Failure> {
    let (what, why, fix) = match (find(runs, wanted), wanted) {
        (Found::One(run), _) => return Ok(run),
        (Found::Several(runs), _) => (
            format!("{} runs are called {wanted}", runs.len()),
            format!("which of them is not said:{}", listed(&runs)),
            "give the process id of one",
        ),
        (Found::None, Wanted::Process(pid)) => return Err(no_run(*pid)),
        (Found::None, Wanted::Name(name)) => (
            format!("no run is called {name}"),
            "none has this name or runs this program; or it belongs to another user, or to another UNDERCROFT_DIR"
                .to_owned(),
            "`undercroft status` lists the runs",
        ),
    };
    Err(Failure::new(code::FAILED, what, why, fix))
}

/// The runs, a line each.
fn listed(runs: &[&Snapshot]) -> String {
    let line = |run: &&Snapshot| {
        let name = run.name.as_ref().map(|name| format!("{name}  "));
        let name = name.unwrap_or_default();
        format!("\n    {}  {name}{}", run.pid, run.command_line())
    };
    runs.iter().map(line).collect()
}

/// Has run `pid` do something. `None`: it does not answer.
pub(crate) fn ask(pid: u32, what: Ask) -> Option<Answered> {
    keeper::status::ask(pid, what)
}

/// Has a policy file name the pages of run `pid`. `None`: it does not answer.
pub(crate) fn ask_policy(pid: u32, file: &Path) -> Option<Answered> {
    keeper::status::ask_policy(pid, file)
}

/// Has the run of process `pid` bring all its pages in. `None`: it has no run.
pub(crate) fn bring_home(pid: u32, patience: Duration) -> Option<Answered> {
    keeper::status::ask_about(pid, &Ask::Core(pid), patience)
}

/// Has the keeper of run `pid` replace its manager by one of `binary`. `None`: it does not answer.
pub(crate) fn upgrade(pid: u32, binary: &OwnedFd, news: impl FnMut(&Told)) -> Option<Told> {
    keeper::upgrade::ask(pid, binary.as_fd(), news)
}

/// There is no run of this process id.
pub(crate) fn no_run(pid: u32) -> Failure {
    Failure::new(
        code::FAILED,
        format!("process {pid} belongs to no run"),
        "it has ended, or belongs to another user, or to another UNDERCROFT_DIR",
        "`undercroft status` lists the runs",
    )
}

/// The run did not answer in time.
pub(crate) fn no_answer(pid: u32) -> Failure {
    Failure::new(
        code::FAILED,
        format!("run {pid} does not answer"),
        "it has ended, or its manager is very busy",
        "try again; `undercroft status` shows whether it runs",
    )
}
