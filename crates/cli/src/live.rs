//! The only module that calls the live system: it starts a run, acts as its manager, and asks
//! running managers for their state.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};

use undercroft_manager::control::{Answered, Ask};
use undercroft_manager::keeper::upgrade::Told;
use undercroft_manager::options::RunOptions;
use undercroft_manager::report::Snapshot;
use undercroft_manager::{control, keeper};

use crate::failure::{Failure, status as code};

/// Runs a program to its end. Returns its exit status.
pub(crate) fn run(options: RunOptions) -> Result<u8, Failure> {
    Ok(keeper::run(&options) as u8)
}

/// `undercroft manager`, the manager of one run; started by `run`, never by hand.
/// * `launch`: the launch description, as JSON.
pub(crate) fn serve(launch: &OsStr) -> Result<u8, Failure> {
    let failed = |why: String| {
        Failure::new(
            code::RUN_FAILED,
            "the manager cannot serve",
            &why,
            "`undercroft manager` is started by `undercroft run`, not by hand; `undercroft doctor` \
             says what is missing",
        )
    };
    let launch = serde_json::from_str(launch.to_str().unwrap_or(""))
        .map_err(|error| failed(error.to_string()))?;
    control::serve(launch).map_err(|error| failed(error.to_string()))?;
    Ok(0)
}

/// Every running client that this user may see.
pub(crate) fn snapshots() -> Result<Vec<Snapshot>, Failure> {
    Ok(keeper::status::snapshots())
}

/// Has run `pid` do something. `None`: it does not answer.
pub(crate) fn ask(pid: u32, what: Ask) -> Option<Answered> {
    keeper::status::ask(pid, what)
}

/// Has the keeper of run `pid` replace its manager by one of `binary`. `None`: it does not answer.
pub(crate) fn upgrade(pid: u32, binary: &OwnedFd, news: impl FnMut(&Told)) -> Option<Told> {
    keeper::upgrade::ask(pid, binary.as_fd(), news)
}

/// There is no run of this process id.
pub(crate) fn no_run(pid: u32) -> Failure {
    Failure::new(
        code::FAILED,
        format!("no run has process id {pid}"),
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
