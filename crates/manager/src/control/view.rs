//! Views of a machine's memory: processes other than its monitor that map it, each registered
//! before its program can touch it. The shim asks for that (`shim/src/view.rs`).
//!
//! A process of the run may have a view, and one that `undercroft view` has started: it is outside
//! of the run, and of the same user, which the kernel says. That asks for the memory's descriptor,
//! and becomes the program, which the run then treats as its own. To other processes the memory's
//! descriptor is not sent: the shim asks before.
//!
//! Nothing of it is written down for a successor. That finds the mappings again, and by their flags
//! which of them are registered.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_base::{VirtPage, VirtRange};
use undercroft_engine::LedgerFull;
use undercroft_sys::object::{FileId, MemoryObject};
use undercroft_sys::procfs::Vma;
use undercroft_sys::uffd::UffdError;
use undercroft_sys::{fdpass, process, procfs};
use undercroft_wire::parse::{JOIN, PASS_ON, View as Asked, answer_with};
use undercroft_wire::protocol::NO_MACHINE_YET;

use super::Control;
use crate::log::warn;
use crate::signals::Doom;
use crate::space::foreign;
use crate::space::guest::Guest;
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::space::views::View;

/// How long a view may take to end after its machine. Its faults are not served any more.
const GRACE: Duration = Duration::from_secs(2);

const REFUSED: u32 = 1;

/// Why the memory of a virtual machine cannot be managed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error(
        "process {0} has not mapped all of it in one piece and once; it has to be mapped from its \
         first byte to its last, with MAP_SHARED"
    )]
    Parts(u32),
    #[error(
        "children of process {0} would inherit it, and read zeros where pages are away; the process \
         has to call madvise(MADV_DONTFORK) for it"
    )]
    Inherited(u32),
    #[error(
        "process {1} maps it besides process {0}, and was not heard when it did; another process may \
         map it by mmap of the C library, and `undercroft view` starts one"
    )]
    Shared(u32, u32),
    #[error(
        "process {0} does not map a part of it there, in order, whole pages and with MAP_SHARED"
    )]
    Part(u32),
    #[error("process {0} has mapped it at another place since")]
    Moved(u32),
    #[error("the process that had mapped it has ended, and process {0} maps it again")]
    Again(u32),
    #[error("process {0} maps it, and is not managed itself")]
    Stray(u32),
    #[error("the kernel refuses to register it: {0}")]
    Register(#[from] UffdError),
    #[error("{0}")]
    NoNumber(#[from] LedgerFull),
    #[error("its mappings cannot be read: {0}")]
    Unreadable(#[from] std::io::Error),
    #[error("no thread can hear what is given back of it: {0}")]
    Unheard(std::io::Error),
}

/// A mapping of the memory: where, from which byte on, and whether it is shared.
type Mapping = (VirtRange, u64, bool);

/// Whether a first message is about views.
pub(super) fn is_of_view(bytes: &[u8]) -> bool {
    bytes == JOIN || bytes == PASS_ON || Asked::parse(bytes).is_some()
}

impl Control {
    /// Answers a process that has mapped the memory, or wants to.
    /// * `pid`: of the process. `None`: it is outside of the run.
    pub(super) fn hear_of_view(
        &self,
        socket: &OwnedFd,
        (uid, pid): (u32, Option<u32>),
        (bytes, fds): (&[u8], &[OwnedFd]),
    ) -> io::Result<()> {
        let own = rustix::process::getuid().as_raw();
        let mut given = Vec::new();
        let code = match (Asked::parse(bytes), pid) {
            (Some(asked), Some(pid)) => self.take_view(pid, asked),
            (None, _) if bytes == JOIN && uid == own => self.joins(&mut given),
            (None, Some(pid)) if bytes == PASS_ON => self.passes_on(pid, fds),
            _ => REFUSED,
        };
        fdpass::send(socket.as_fd(), &answer_with(code), &given)
    }

    /// Gives the descriptors of the memory and of its page locks.
    fn joins<'a>(&'a self, given: &mut Vec<BorrowedFd<'a>>) -> u32 {
        let Some(object) = &self.shared.guest else {
            return REFUSED;
        };
        given.push(object.as_fd());
        given.extend(self.shared.locks.as_ref().map(|locks| locks.as_fd()));
        0
    }

    /// Whether process `pid` may send the memory's descriptor by this socket: to a process whose
    /// mappings are heard of.
    fn passes_on(&self, pid: u32, fds: &[OwnedFd]) -> u32 {
        let peer = fds.first().and_then(|socket| fdpass::peer(socket).ok());
        let to = peer.and_then(|peer| peer.pidfd.numbers().ok()?.first().copied());
        let known = to.and_then(|to| self.shared.processes.of_pid(to));
        if known.is_some_and(|of| of.has_agent()) {
            return 0;
        }
        let to = to.map_or("a process".to_owned(), |to| format!("process {to}"));
        warn(&format!(
            "process {pid} may not send the machine's memory to {to}, which would read zeros where \
             pages are away; start that by `undercroft view`"
        ));
        REFUSED
    }

    /// Registers what a process has mapped. Returns the code of the answer.
    fn take_view(&self, pid: u32, asked: Asked) -> u32 {
        let process = self.shared.processes.of_pid(pid);
        let Some(process) = process.filter(|of| of.has_agent()) else {
            return REFUSED;
        };
        let Some(guest) = self.guest.managed() else {
            return NO_MACHINE_YET; // found when the machine's memory is
        };
        if guest.host().space == process.space {
            return NO_MACHINE_YET; // it is the monitor
        }
        let range = VirtRange::of_addresses(asked.start, asked.end);
        match register(&self.shared, guest, &process, range) {
            Ok(()) => 0,
            Err(why) => {
                warn(&format!("process {pid} has no view of the machine: {why}"));
                REFUSED
            }
        }
    }

    /// Ends those views that have not ended in time after their machine.
    pub(super) fn end_orphans(&mut self) {
        let Some(object) = self.shared.guest.clone() else {
            return;
        };
        self.guest.orphans.retain(|(process, since)| {
            let lives = process.is_alive() && process.has_running_identity();
            if lives && since.elapsed() >= GRACE {
                let pid = process.pid().unwrap_or(0);
                if !mappings(pid, object.id()).is_empty() {
                    process.end("the machine whose memory it maps has ended");
                }
            }
            lives && since.elapsed() < GRACE
        });
    }

    /// The run ends, and so do processes that it had from outside.
    pub(super) fn end_views(&self) {
        if self.shared.guest.is_none() {
            return;
        }
        let until = Instant::now() + GRACE;
        let all = self.shared.processes.all();
        let outside = all.iter().filter(|of| of.has_running_identity());
        for process in outside {
            let left = until.saturating_duration_since(Instant::now());
            if process.pidfd().is_some_and(|pidfd| !pidfd.wait_exit(left)) {
                process.end("the machine whose memory it may map has ended");
            }
        }
    }
}

/// Mappings of a file in a process. None if that cannot be read: it has ended.
fn mappings(pid: u32, file: FileId) -> Vec<Mapping> {
    let mut text = String::new();
    match procfs::read_maps(pid, &mut text) {
        Ok(()) => procfs::mappings_of(&text, file).collect(),
        Err(_) => Vec::new(),
    }
}

/// The pages of the object that are mapped in all of `range`, in order. `None`: something else is.
fn pages_in(found: &[Mapping], range: VirtRange, object: &MemoryObject) -> Option<VirtRange> {
    let (mut at, mut start) = (range.start, None);
    for (mapped, offset, shared) in found.iter().filter(|of| of.0.end > range.start) {
        if at >= range.end {
            break;
        }
        let here = offset + at.address().checked_sub(mapped.start.address())?;
        let begun = *start.get_or_insert(here);
        if !shared || here != begun + VirtPage(at.0 - range.start.0).address() {
            return None;
        }
        at = mapped.end;
    }
    let (start, bytes) = (start?, range.count().bytes().0);
    let each = object.page_size().bytes() as u64;
    let page = |byte: u64| VirtPage(byte / each);
    let pages = VirtRange::new(page(start), page(start + bytes));
    let whole = start.is_multiple_of(each) && bytes.is_multiple_of(each);
    let fits = pages.end <= object.whole().end;
    (at >= range.end && whole && fits).then_some(pages)
}

/// Registers what `process` maps at `range`.
fn register(
    shared: &Shared,
    guest: &Process,
    process: &Arc<Process>,
    range: VirtRange,
) -> Result<(), Unfit> {
    let Some(hosted) = &guest.hosted else {
        return Ok(());
    };
    let pid = process.pid().unwrap_or(0);
    let object = hosted.guest.object();
    let pages = pages_in(&mappings(pid, object.id()), range, object).ok_or(Unfit::Part(pid))?;
    let agent = process.agent.get().ok_or(Unfit::Stray(pid))?;
    let add = || -> Result<(), Unfit> {
        let at = (range.start, pages);
        let view = View::new(process.space, agent.quiet_uffd()?, at, object.page_size());
        let _layout = guest.layout.write();
        Ok(hosted.guest.add_view(view)?)
    };
    match add() {
        Err(Unfit::Register(UffdError::Busy { .. })) => {
            // It was registered along with private memory around it.
            foreign::release(process, range.start);
            add()?;
        }
        result => result?,
    }
    shared.follow_again();
    Ok(())
}

/// The processes that may have views: all of the run but the monitor, and those that have its
/// memory.
fn others<'a>(
    guest: &'a Arc<Process>,
    processes: &'a [Arc<Process>],
) -> impl Iterator<Item = (&'a Arc<Process>, u32)> {
    let host = guest.host();
    let own = host.pid().unwrap_or(0);
    processes.iter().filter_map(move |process| {
        let pid = process.pid().filter(|_| process.has_running_identity())?;
        let is_host = process.space == host.space;
        (!is_host && !process::share_memory(own, pid).unwrap_or(false)).then_some((process, pid))
    })
}

/// Registers what other processes have mapped before the machine's memory was managed. Nothing has
/// left it yet.
pub(super) fn adopt(shared: &Shared, guest: &Arc<Process>, processes: &[Arc<Process>]) {
    let Some(hosted) = &guest.hosted else {
        return;
    };
    for (process, pid) in others(guest, processes) {
        let found = mappings(pid, hosted.guest.object().id());
        if found.is_empty() {
            continue;
        }
        let mut kept = Vec::new();
        let read = procfs::mappings_with_flags(pid, &mut [("dc", &mut kept)]);
        let result = read.map_err(Unfit::from).and_then(|()| {
            let inherits = |of: &Mapping| !of.0.minus(&kept).is_empty();
            if found.iter().any(inherits) {
                return Err(Unfit::Inherited(pid));
            }
            (found.iter()).try_for_each(|of| register(shared, guest, process, of.0))
        });
        if let Err(why) = result {
            shared.signals.doom(Doom::Guest(why.to_string()));
        }
    }
}

/// Finds the views of `guest` that a dead manager had registered. All processes are listed.
pub(super) fn find_again(shared: &Shared, guest: &Arc<Process>) {
    let Some(hosted) = &guest.hosted else {
        return;
    };
    for (process, pid) in others(guest, &shared.processes.all()) {
        let found = mappings(pid, hosted.guest.object().id());
        let mut registered = Vec::new();
        let wanted = &mut [("um", &mut registered)];
        if found.is_empty() || procfs::mappings_with_flags(pid, wanted).is_err() {
            continue;
        }
        for (range, ..) in found {
            // Another was mapped past the shim, or the shim asks again. Or the next look ends the
            // run.
            if range.minus(&registered).is_empty() {
                let _ = register(shared, guest, process, range);
            }
        }
    }
}

/// Looks whether views are still as they were, and whether there are mappings that are none.
pub(super) fn look(
    shared: &Shared,
    guest: &Arc<Process>,
    processes: &[Arc<Process>],
) -> Result<(), Unfit> {
    let Some(hosted) = &guest.hosted else {
        return Ok(());
    };
    let (memory, doubted) = (&hosted.guest, hosted.guest.take_doubt());
    let views = memory.views();
    let mut text = String::new();
    for (process, pid) in others(guest, processes) {
        if procfs::read_maps(pid, &mut text).is_err() {
            continue;
        }
        let found: Vec<Mapping> = procfs::mappings_of(&text, memory.object().id()).collect();
        let own = views.iter().filter(|of| of.space == process.space);
        let mut registered = closed(&text);
        for view in own {
            let parts = left_of(view, &found);
            registered.extend(parts.iter().copied());
            if parts != [view.range()] && keep_parts(memory, view, &parts)? {
                shared.follow_again();
            }
        }
        let is_none = |of: &Mapping| !of.0.minus(&registered).is_empty();
        if found.iter().any(is_none) {
            return Err(Unfit::Shared(guest.host().pid().unwrap_or(0), pid));
        }
    }
    let views = memory.views();
    match views.iter().find(|view| doubted && !view.is_registered()) {
        Some(view) => {
            let process = shared.processes.get(view.space);
            Err(Unfit::Moved(process.and_then(|of| of.pid()).unwrap_or(0)))
        }
        None => Ok(()),
    }
}

/// Mappings that nothing can touch: the shim asks for their registration.
fn closed(maps: &str) -> Vec<VirtRange> {
    let all = maps.lines().filter_map(Vma::parse);
    let closed = all.filter(|of| of.shared && !of.read && !of.write && !of.exec);
    closed.map(|of| of.range).collect()
}

/// The parts of a view that are still mapped as it was.
fn left_of(view: &View, found: &[Mapping]) -> Vec<VirtRange> {
    let mut parts: Vec<VirtRange> = Vec::new();
    for (range, offset, shared) in found {
        let part = range.intersect(view.range());
        let from = offset + VirtPage(part.start.0.saturating_sub(range.start.0)).address();
        if part.is_empty() || !shared || from != view.offset(part.start) {
            continue;
        }
        match parts.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => parts.push(part),
        }
    }
    parts
}

/// Has parts of a view in its place.
fn keep_parts(guest: &Guest, view: &View, parts: &[VirtRange]) -> io::Result<bool> {
    let parts: io::Result<Vec<View>> = parts.iter().map(|part| view.part(*part)).collect();
    Ok(guest.replace_view(view.number, parts?))
}

#[cfg(test)]
mod tests {
    use undercroft_base::{Bytes, PageSize};
    use undercroft_sys::object;

    use super::*;

    #[test]
    fn a_view_is_any_part_of_the_memory_mapped_in_order() {
        let memfd = object::create("views", Bytes(16 * 4096), PageSize::Base).expect("a memfd");
        let object = MemoryObject::of(memfd.as_fd()).expect("it opens anew");
        let range = |start: u64, end: u64| VirtRange::new(VirtPage(start), VirtPage(end));
        let map = |start, end, page: u64, shared| (range(start, end), page * 4096, shared);
        let whole = vec![map(100, 116, 0, true)];
        let two = vec![map(100, 104, 2, true), map(104, 108, 6, true)];
        for (found, at, expected) in [
            (&whole, range(100, 116), Some(range(0, 16))),
            (&whole, range(103, 105), Some(range(3, 5))),
            (&whole, range(99, 105), None),
            (&whole, range(110, 117), None),
            (&two, range(101, 108), Some(range(3, 10))),
            (&vec![], range(1, 2), None),
            (&vec![map(100, 104, 2, false)], range(100, 104), None),
            (
                &vec![map(100, 104, 2, true), map(104, 108, 7, true)],
                range(100, 108),
                None,
            ),
            (
                &vec![map(100, 104, 2, true), map(105, 108, 7, true)],
                range(100, 108),
                None,
            ),
            (&vec![map(100, 104, 14, true)], range(100, 104), None),
        ] {
            assert_eq!(pages_in(found, at, &object), expected, "{found:?} {at:?}");
        }
    }

    #[test]
    fn a_mapping_without_access_is_not_yet_a_view() {
        let maps = "1000-3000 ---s 00000000 00:01 77 /memfd:a (deleted)\n\
                    3000-4000 r--s 00002000 00:01 77 /memfd:a (deleted)\n\
                    4000-5000 ---p 00000000 00:00 0 \n";
        assert_eq!(closed(maps), [VirtRange::new(VirtPage(1), VirtPage(3))]);
    }
}
