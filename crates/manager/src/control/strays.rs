//! Finds processes of the program that have not loaded the shim, or whose shim has not announced
//! them. They are not managed, and their memory is outside the limit.
//!
//! A thread of its own looks: a look reads files of every process of the program, and some may
//! block. What is seen once may be a process that starts or ends; what two looks see is told.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::Bytes;
use undercroft_sys::image::Image;
use undercroft_sys::procfs::Statm;
use undercroft_sys::{process, procfs};
use undercroft_wire::protocol::SOCKET_VARIABLE;

use super::Control;
use crate::log::warn;
use crate::space::command::COMMAND_PAGE;
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Time between two looks, at least. A look takes at most one part in [`PART`] of the time.
const EVERY: Duration = Duration::from_secs(2);
const PART: u32 = 100;

/// Most processes that one look asks about.
const LOOK_MAX: usize = 1024;

/// The bits of a file's mode that give its program another user or group.
const SET_ID: u32 = 0o6000;

/// The program of this and other runs: it is not part of the client.
const OWN: &[u8] = b"undercroft";

/// Whose descendants are looked at.
struct Family {
    keeper: u32,
    /// Children of the keeper that are no part of the program.
    own: [u32; 2],
    shim: PathBuf,
    quiet: bool,
}

impl Control {
    /// Starts the thread that looks for processes that are not managed.
    pub(super) fn watch_for_strays(&self) {
        let shared = self.shared.clone();
        let family = Family {
            keeper: self.launch.keeper,
            own: [std::process::id(), self.doors.holder.0],
            shim: self.launch.shim.0.clone(),
            quiet: self.launch.options.quiet,
        };
        let thread = std::thread::Builder::new().name("uc-strays".into());
        if let Err(error) = thread.spawn(move || watch(&shared, &family)) {
            warn(&format!(
                "the thread that looks for processes without a manager did not start ({error}): \
                 they go unnoticed"
            ));
        }
    }
}

/// Body of the thread. Warns of one of them, and counts the most at once.
fn watch(shared: &Arc<Shared>, family: &Family) {
    let (mut seen, mut told) = (BTreeSet::new(), false);
    while !shared.signals.stopped() {
        let began = Instant::now();
        let now = family.strays(shared);
        let again: Vec<u32> = seen.intersection(&now).copied().collect();
        let count = again.len() as u64;
        let bytes = again.iter().map(|pid| anonymous(*pid).0).sum();
        shared.gauges.footprint.note_strays(Bytes(bytes));
        shared
            .gauges
            .strays_peak
            .fetch_max(count, Ordering::Relaxed);
        if let Some(pid) = again.first()
            && !std::mem::replace(&mut told, true)
            && !family.quiet
        {
            warn(&family.story(*pid));
        }
        seen = now;
        std::thread::sleep(EVERY.max(PART * began.elapsed()));
    }
}

impl Family {
    /// Descendants of the keeper that are not managed. None while no process is managed: then
    /// the control thread says so.
    fn strays(&self, shared: &Shared) -> BTreeSet<u32> {
        let processes = shared.processes.all();
        // One that was forked and has called exec may still be known, without an agent.
        let serves = |of: &&Arc<Process>| of.has_running_identity() && of.has_agent();
        let serving = processes.iter().filter(serves);
        let managed: BTreeSet<u32> = serving.filter_map(|of| of.pid()).collect();
        let mut found = BTreeSet::new();
        if managed.is_empty() {
            return found;
        }
        let mut left = procfs::children(self.keeper);
        left.retain(|pid| !self.own.contains(pid));
        let mut at = 0;
        while let Some(pid) = left.get(at).copied()
            && at < LOOK_MAX
        {
            at += 1;
            if is_ours(pid) {
                continue; // a run inside this run: it manages what it starts
            }
            if !managed.contains(&pid) && self.is_outside(pid) {
                found.insert(pid);
            }
            left.extend(procfs::children(pid));
        }
        found
    }

    /// Whether a process has memory in which there is no shim, or no page for the manager's
    /// commands. Agents, and others that have a managed process's memory, have both.
    fn is_outside(&self, pid: u32) -> bool {
        let mut maps = String::new();
        // A process that ends has no mapping.
        procfs::read_maps(pid, &mut maps).is_ok()
            && !maps.is_empty()
            && !(maps.contains(self.shim_name()) && maps.contains(COMMAND_PAGE))
            && process::is_running(pid)
    }

    fn shim_name(&self) -> &str {
        let name = self.shim.file_name();
        name.and_then(OsStr::to_str).unwrap_or_default()
    }

    /// Whether the shim is in a process.
    fn has_shim(&self, pid: u32) -> bool {
        let mut maps = String::new();
        procfs::read_maps(pid, &mut maps).is_ok() && maps.contains(self.shim_name())
    }

    fn story(&self, pid: u32) -> String {
        let name = procfs::thread_name(pid).unwrap_or_default();
        let why = if self.has_shim(pid) {
            "has the shim, but is not announced: it was forked by a system call that the C library \
             does not see, the manager is out of its reach (as behind another root), or the manager \
             refused it and said why"
        } else {
            why_not(pid).unwrap_or(
                "has not loaded the shim: LD_PRELOAD was replaced, or the loader ignored it",
            )
        };
        format!(
            "process {pid} ({name}) is not managed, so its memory is outside the limit: it {why}. \
             The report counts such processes"
        )
    }
}

/// Anonymous memory of a process; nothing if it has ended.
fn anonymous(pid: u32) -> Bytes {
    let sizes = Statm::open(pid).and_then(|statm| statm.read());
    sizes.unwrap_or_default().anonymous().bytes()
}

/// Whether a process runs undercroft itself.
fn is_ours(pid: u32) -> bool {
    let path = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let name = path.file_name().unwrap_or_default();
    name.as_bytes().starts_with(OWN)
}

/// Why the loader may not have brought the shim into a process. `None`: nothing speaks against it.
pub(super) fn why_not(pid: u32) -> Option<&'static str> {
    let file = File::open(format!("/proc/{pid}/exe")).ok()?;
    let mode = file.metadata().map_or(0, |of| of.permissions().mode());
    let environment = procfs::environment(pid).ok();
    let lacks = |name: &str| {
        let begins = |entry: &[u8]| entry.starts_with(name.as_bytes());
        let entries = environment.as_deref();
        entries.is_some_and(|bytes| !bytes.split(|byte| *byte == 0).any(begins))
    };
    match Image::of(&file).ok() {
        Some(Image::Foreign) => Some("is no 64-bit x86 program"),
        Some(Image::Static | Image::Relocates) => {
            Some("is linked statically, so it has no loader to bring the shim in")
        }
        _ if lacks("LD_PRELOAD=") || lacks(SOCKET_VARIABLE) => Some(
            "was started without LD_PRELOAD or UNDERCROFT_SOCKET in its environment (as behind \
                 another root, where the shim is out of reach)",
        ),
        _ if mode & SET_ID != 0 => Some("is setuid or setgid, so its loader brings no shim in"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_the_variables_is_named_so() {
        let why = why_not(std::process::id()).expect("a test has no shim");
        assert!(why.contains("LD_PRELOAD"));
    }

    #[test]
    fn the_shim_is_found_by_its_mapping() {
        let family = |shim: &str| Family {
            keeper: 0,
            own: [0; 2],
            shim: shim.into(),
            quiet: true,
        };
        let this = std::process::id();
        assert!(!family("/nowhere/shim-of-no-run").has_shim(this));
        let exe = std::env::current_exe().expect("a path");
        let family = family(exe.to_str().expect("text"));
        assert!(family.has_shim(this));
        assert!(family.is_outside(this), "it has no command page");
        let mut ended = std::process::Command::new("true").spawn().expect("true");
        ended.wait().expect("it ends");
        assert!(!family.is_outside(ended.id()));
    }
}
