//! `undercroft serve`: the web page, the API and the metrics, until a signal ends it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use undercroft_api::{Listen, Live, Rights, Server, Token};

use crate::args::ServeArgs;
use crate::{live, show};
use undercroft_terminal::{Failure, status};

/// Serves until SIGINT or SIGTERM.
pub(crate) fn serve(args: &ServeArgs) -> Result<u8, Failure> {
    let rights = check(args)?;
    live::check_all(args.all)?;
    let source = Live { of_all: args.all };
    // Before the first thread starts: a signal then finds its handler.
    let (mut ended, _signal) = signals().map_err(|error| failed(args, &error))?;
    let server = Server::start(&args.listen, Box::new(source), rights, token(args)?);
    let server = server.map_err(|error| failed(args, &error))?;
    if !args.listen.is_local() {
        let _ = writeln!(
            io::stderr(),
            "undercroft: other machines can read the programs' names and figures of all {}runs{}; \
             nothing is encrypted",
            if args.all { "users' " } else { "" },
            if args.token_file.is_some() {
                ", if they have the token"
            } else {
                ""
            }
        );
    }
    show::line(&format!("Serving {}", server.address()))?;
    let _ = ended.read_exact(&mut [0]);
    Ok(0)
}

/// The first gets a byte at SIGINT, at SIGTERM, and for each byte that is written to the second.
pub(crate) fn signals() -> io::Result<(UnixStream, UnixStream)> {
    let (ended, signal) = UnixStream::pair()?;
    pipe::register(SIGINT, signal.try_clone()?)?;
    pipe::register(SIGTERM, signal.try_clone()?)?;
    Ok((ended, signal))
}

/// Rights of callers. Errors: options that do not go together.
fn check(args: &ServeArgs) -> Result<Rights, Failure> {
    if !args.listen.is_local() && !args.allow_remote {
        return Err(Failure::new(
            status::USAGE,
            "the server does not start",
            "other machines can reach this address, and what is served is not protected",
            "listen on 127.0.0.1 or unix:PATH, or give --allow-remote, with --token-file for who may read",
        ));
    }
    match (args.allow_changes, &args.listen) {
        (false, _) => Ok(Rights::Read),
        (true, Listen::Unix(_)) => Ok(Rights::Change),
        (true, Listen::Tcp(_)) => Err(Failure::new(
            status::USAGE,
            "the server does not start",
            "--allow-changes over TCP would let every user of this machine change your programs",
            "use --listen unix:PATH, which is of your user alone",
        )),
    }
}

/// The secret that callers must say, if one is wanted.
fn token(args: &ServeArgs) -> Result<Option<Token>, Failure> {
    let Some(path) = &args.token_file else {
        return Ok(None);
    };
    let what = "the server does not start";
    if let Listen::Unix(_) = args.listen {
        let why = "a Unix socket is of your user alone, and needs no token";
        return Err(Failure::new(
            status::USAGE,
            what,
            why,
            "leave --token-file out",
        ));
    }
    Token::read(path).map(Some).map_err(|why| {
        let why = format!("no token in {}: {why}", path.display());
        let fix = "make one: (umask 077; openssl rand -hex 32 > FILE)";
        Failure::new(status::FAILED, what, why, fix)
    })
}

fn failed(args: &ServeArgs, error: &io::Error) -> Failure {
    Failure::new(
        status::FAILED,
        format!("cannot serve on {}", args.listen),
        error.to_string(),
        "another server may be there: choose another address with --listen",
    )
}
