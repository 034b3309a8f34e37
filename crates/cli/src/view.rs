//! `undercroft view`: starts a program that maps the memory of a running machine beside its
//! monitor, such as a back end of vhost-user.

use std::ffi::OsString;

use clap::Args;
use undercroft_keeper::view::{self, NoView};
use undercroft_keeper::wanted::Wanted;
use undercroft_terminal::{Failure, status};

use crate::{live, preflight, qemu};

/// `undercroft view`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ViewArgs {
    /// The run of the machine (`undercroft vm`): any process of it, or its name (`vm --name`)
    #[arg(long = "vm", value_name = "RUN")]
    run: Wanted,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "Examples:
  undercroft vm --name web -m 1G --memory 4G -- my-monitor --vhost-user /run/blk.sock
  undercroft view --vm web -- my-back-end --socket /run/blk.sock
  undercroft view --vm web -- qemu-storage-daemon --blockdev file,node-name=d,filename=d.img \
      --export vhost-user-blk,id=e,node-name=d,writable=on,addr.type=unix,addr.path=/run/blk.sock
  undercroft view --vm 4711 -- ./reads-guest-memory

CMD may map any part of the machine's memory, with MAP_SHARED: by the descriptor that the monitor sends it, or by the
one whose number is in UNDERCROFT_MEMORY_FD. Pages that are away come when CMD touches them. Its own memory counts as
the monitor's does. It is a program of the same user that is linked to the C library dynamically. It ends within two
seconds after the machine has.

More: docs/guide/virtual-machines.md. Exit status: CMD's own; 127 not found; 126 not executable; 125 it was refused.";

/// Becomes the program.
pub(crate) fn view(args: &ViewArgs) -> Result<u8, Failure> {
    qemu::of_storage_daemon(&args.command)?;
    let run = live::run_of(&args.run)?;
    preflight::check(&args.command[0])?;
    let pid = run.pid;
    let why = view::start(pid, &args.command);
    let fix = match why {
        NoView::NoRun => "`undercroft status` lists the runs",
        NoView::Refused => {
            "give a run of `undercroft vm` without --socket, as the user who started it"
        }
        NoView::System(_) => "check CMD, and how many files may be open (ulimit -n)",
    };
    let what = format!("no view of the machine of run {pid}");
    Err(Failure::new(status::RUN_FAILED, what, why.to_string(), fix))
}
