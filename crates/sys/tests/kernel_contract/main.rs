//! The properties of the kernel that Undercroft relies on, one fact a test. When a new kernel
//! breaks a fact, the test's name says which.
//!
//! Runs without the usual harness: the main process has one thread and forks a child for each fact,
//! because a fact may hang, die or lose its memory. A child that takes too long is killed, with all
//! that it started. `cargo test -p undercroft-sys --test kernel_contract [PART OF A NAME]`.
#![allow(clippy::unwrap_used, reason = "everything here is a test")]

use std::io::Write;
use std::time::{Duration, Instant};

use undercroft_sys::uffd::{Features, UffdDevice};

mod access;
mod asking;
mod bed;
mod death;
mod faults;
mod fork;
mod huge;
mod identity;
mod layout;
mod moving;
mod objects;
mod reading;
mod side_band;

/// A fact: its name, and its test, which panics if the fact does not hold.
pub type Fact = (&'static str, fn());

/// Names functions of the calling module as facts.
macro_rules! facts {
    ($($name:ident),* $(,)?) => {
        /// The facts of this module.
        pub(crate) const FACTS: &[$crate::Fact] =
            &[$((concat!(module_path!(), "::", stringify!($name)), $name as fn())),*];
    };
}
pub(crate) use facts;

const TIME_MAX: Duration = Duration::from_secs(15);
const EXIT_FAILED: i32 = 1;
const EXIT_SKIPPED: i32 = 77;

/// Ends the fact without a verdict, and prints why.
pub fn skip(reason: &str) -> ! {
    println!("SKIPPED: {reason}");
    let _ = std::io::stdout().flush();
    // SAFETY: ends this child at once; nothing of it is needed any more.
    unsafe { libc::_exit(EXIT_SKIPPED) }
}

fn run(fact: fn()) -> Result<i32, &'static str> {
    let _ = std::io::stdout().flush();
    // SAFETY: this process has one thread, so the child may do whatever it likes.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork failed");
    if child == 0 {
        let passed = std::panic::catch_unwind(fact).is_ok();
        let _ = std::io::stdout().flush();
        // SAFETY: ends the child at once, without destructors that might wait for missing pages.
        unsafe { libc::_exit(if passed { 0 } else { EXIT_FAILED }) };
    }
    let start = Instant::now();
    let outcome = loop {
        let mut status = 0;
        // SAFETY: writes one int to a live local; the child is ours and not reaped yet.
        let got = unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) };
        match got {
            0 if start.elapsed() > TIME_MAX => break Err("took too long"),
            0 => std::thread::sleep(Duration::from_millis(2)),
            _ if libc::WIFEXITED(status) => break Ok(libc::WEXITSTATUS(status)),
            _ => break Err("was killed by a signal"),
        }
    };
    end_what_is_left();
    outcome
}

/// Ends the fact's process and every orphan of it: this process is their reaper and has no other
/// children.
fn end_what_is_left() {
    loop {
        let left = undercroft_sys::procfs::children(std::process::id());
        if left.is_empty() {
            return;
        }
        for child in left {
            // SAFETY: a child of ours that is not reaped yet, so the number is its own.
            unsafe { libc::kill(child as i32, libc::SIGKILL) };
            // SAFETY: reaps it; no status is written.
            unsafe { libc::waitpid(child as i32, std::ptr::null_mut(), 0) };
        }
    }
}

/// All facts.
const ALL: [&[Fact]; 12] = [
    access::FACTS,
    asking::FACTS,
    death::FACTS,
    faults::FACTS,
    fork::FACTS,
    huge::FACTS,
    layout::FACTS,
    moving::FACTS,
    objects::FACTS,
    reading::FACTS,
    identity::FACTS,
    side_band::FACTS,
];

/// Root, or the device node and CAP_SYS_PTRACE. Without these hardly a fact can be tested.
fn may_use_userfaultfd() -> std::io::Result<()> {
    let uffd = UffdDevice::open()?.create()?;
    uffd.api(Features::EVENTS)?;
    Ok(())
}

fn main() {
    undercroft_sys::process::become_subreaper().expect("subreaper");
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let all = ALL.iter().flat_map(|facts| facts.iter());
    let short = |name: &'static str| name.trim_start_matches("kernel_contract::");
    let facts: Vec<(&str, fn())> = all
        .map(|(name, fact)| (short(name), *fact))
        .filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|part| name.contains(*part)))
        .collect();
    if arguments.iter().any(|a| a == "--list") {
        for (name, _) in &facts {
            println!("{name}: test");
        }
        return;
    }
    if let Err(error) = may_use_userfaultfd() {
        println!(
            "SKIPPED: {} facts, no userfaultfd with layout events here: {error}",
            facts.len()
        );
        return;
    }
    let start = Instant::now();
    let (mut failed, mut skipped) = (Vec::new(), 0);
    for (name, fact) in &facts {
        let began = Instant::now();
        let verdict = match run(*fact) {
            Ok(0) => "ok",
            Ok(EXIT_SKIPPED) => {
                skipped += 1;
                "SKIPPED"
            }
            Ok(_) => {
                failed.push(*name);
                "FAILED"
            }
            Err(why) => {
                failed.push(*name);
                why
            }
        };
        println!(
            "fact {name} ... {verdict} ({} ms)",
            began.elapsed().as_millis()
        );
    }
    println!(
        "\n{} facts: {} hold, {} do not {failed:?}, {skipped} skipped; {:.1} s",
        facts.len(),
        facts.len() - failed.len() - skipped,
        failed.len(),
        start.elapsed().as_secs_f64()
    );
    if !failed.is_empty() {
        std::process::exit(1);
    }
}
