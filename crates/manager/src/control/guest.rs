//! The memory of a virtual machine: found in the process that maps it, and managed from then on.
//! Before pressure it only counts.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use undercroft_base::{Bytes, PageCount, PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_engine::EVERYTHING;
use undercroft_proto::legacy::{Fds, Flag, Heir, Number, Row};
use undercroft_proto::report::GuestMemory;
use undercroft_sys::huge_pages::HugePages;
use undercroft_sys::object::MemoryObject;
use undercroft_sys::uffd::{RegisterMode, Uffd};
use undercroft_sys::{process, procfs};

use super::Control;
use super::given_back::GivenBack;
use super::handed;
use super::handshake::descends;
use super::told;
use super::view::{self, Unfit};
use crate::signals::Doom;
use crate::space::discover;
use crate::space::foreign;
use crate::space::guest::Guest;
use crate::space::parts::{CHUNKS, next_parts};
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::space::views::View;
use crate::sync::lock;

/// How long a monitor may take to map the memory whole, and to keep it from its children.
const SETTING_UP: Duration = Duration::from_secs(2);

/// Time between two looks at memory that is managed: whether it is still mapped as it was. One look
/// may meet a change half-way, so a second one follows after [`CHANGES`].
const LOOK_AGAIN: Duration = Duration::from_secs(1);
const CHANGES: Duration = Duration::from_millis(100);

/// The guest memory of the run: the control thread looks for it.
#[derive(Default)]
pub(super) struct GuestWatch {
    /// Its state in the books, once it is managed.
    process: Option<Arc<Process>>,
    /// Since when a process maps it that is not as it must be.
    unfit: Option<Instant>,
    /// When it was looked at last.
    looked: Option<Instant>,
    /// Its state when its process ended.
    last: Option<GuestMemory>,
    given_back: GivenBack,
    /// Processes that had views of it when it ended, and when that was.
    pub(super) orphans: Vec<(Arc<Process>, Instant)>,
}

impl GuestWatch {
    /// Goes on where a dead manager stopped, if that had found it.
    pub(super) fn new(shared: &Arc<Shared>) -> std::io::Result<GuestWatch> {
        let mut all = shared.processes.all().into_iter();
        let process = all.find(|process| process.hosted.is_some());
        if let Some(process) = &process {
            told::listen(shared, process)?;
        }
        Ok(GuestWatch {
            process,
            ..GuestWatch::default()
        })
    }

    /// Its state, if it is managed now.
    pub(super) fn managed(&self) -> Option<&Arc<Process>> {
        let process = self.process.as_ref();
        process.filter(|of| !of.gone.load(Ordering::Relaxed))
    }

    /// Whether a page could not be protected in a view.
    pub(super) fn doubts_views(&self) -> bool {
        let hosted = self.managed().and_then(|of| of.hosted.as_ref());
        hosted.is_some_and(|hosted| hosted.guest.doubts_views())
    }

    /// The address space of `process` is gone. True if it had views.
    pub(super) fn forget_views(&self, process: &Process) -> bool {
        let hosted = self.process.as_ref().and_then(|of| of.hosted.as_ref());
        let is_its = |view: &View| view.space == process.space;
        hosted.is_some_and(|hosted| hosted.guest.forget_views(is_its))
    }

    /// Pages of it that the books do not have yet.
    pub(super) fn unmanaged(&self, shared: &Shared) -> PageCount {
        let object = shared.guest.as_ref().filter(|_| self.process.is_none());
        let allocated = object.and_then(|object| object.allocated().ok());
        allocated.unwrap_or_default().pages_floor()
    }

    /// How much of it is in memory, and how much in tiers.
    pub(super) fn now(&self, shared: &Shared) -> Option<GuestMemory> {
        let object = shared.guest.as_ref()?;
        if self.last.is_some() {
            return self.last;
        }
        let (mut left, mut away) = (EVERYTHING, 0);
        while let Some(process) = &self.process
            && !left.is_empty()
        {
            let engine = shared.books.engine_for_many();
            for part in next_parts(&engine, process.space, &mut left, CHUNKS) {
                let ranges = engine.books().away(process.space, part);
                let pages: u64 = ranges.iter().map(|range| range.count().0).sum();
                away += pages * process.page_size().bytes() as u64;
            }
        }
        let locks = shared.locks.as_ref().map(|locks| locks.now());
        let (locked, locks_ignored) = locks.unwrap_or_default();
        Some(GuestMemory {
            bytes: object.bytes().0,
            resident_bytes: object.allocated().unwrap_or_default().0,
            stored_bytes: away,
            given_back_bytes: (self.process.as_ref())
                .and_then(|process| process.hosted.as_ref())
                .map_or(0, |hosted| hosted.guest.given_back().bytes().0),
            locked_bytes: locked.0 * object.page_size().bytes() as u64,
            locks_ignored,
            huge_pages_short: (object.page_size() == PageSize::Large)
                .then(|| shared.gauges.pool_short.load(Ordering::Relaxed)),
            handed_over: None,
            views: (self.managed().and_then(|of| of.hosted.as_ref()))
                .map_or(0, |hosted| hosted.guest.views().len() as u64),
            access: *lock(&shared.gauges.scans.guest),
        })
    }

    /// `process` has ended, and its books are about to be forgotten. Returns the guest memory that
    /// ends with it.
    pub(super) fn ends(&mut self, shared: &Shared, process: &Process) -> Option<Arc<Process>> {
        if let Some(hosted) = &process.hosted {
            self.last = self.now(shared);
            let views = hosted.guest.views().into_iter();
            let processes = views.filter_map(|view| shared.processes.get(view.space));
            let orphans = processes.map(|process| (process, Instant::now()));
            self.orphans.extend(orphans);
            hosted.guest.forget_views(|_| true);
        }
        let of = self.process.as_ref()?;
        (of.space != process.space && of.host().space == process.space).then(|| of.clone())
    }
}

/// Whether guest memory is where it was registered.
fn is_at(known: &Process, host: &Process, base: VirtPage) -> bool {
    let hosted = known.hosted.as_ref();
    hosted.is_some_and(|of| of.host.space == host.space && of.guest.base() == base)
}

/// Where a process maps all `bytes` of an object in one piece, by its mappings of it. `None`: it
/// does not.
fn place(found: &[(VirtRange, u64, bool)], bytes: Bytes) -> Option<VirtPage> {
    let base = found.first()?.0.start;
    let mut at = base;
    for (range, offset, shared) in found {
        if !shared || range.start != at || *offset != VirtPage(at.0 - base.0).address() {
            return None;
        }
        at = range.end;
    }
    (at.0 - base.0 == bytes.pages_floor().0).then_some(base)
}

impl Control {
    /// The pool of huge pages had run out: lets the guest have half of what is free there now.
    fn look_at_pool(&mut self) {
        let gauges = &self.shared.gauges;
        let allowed = gauges.pool_max();
        let free = HugePages::now().unwrap_or_default().available.div_ceil(2);
        if allowed == Bytes(u64::MAX) || free == 0 {
            return;
        }
        let more = Bytes(allowed.0 + free * PageSize::Large.bytes() as u64);
        gauges.allow_pool(if more < gauges.memory_max() {
            more
        } else {
            Bytes(u64::MAX)
        });
        self.keep_to_limit();
    }

    /// Manages the memory of a virtual machine as soon as a process maps it.
    pub(super) fn look_for_guest(&mut self, processes: &[Arc<Process>]) {
        let Some(object) = self.shared.guest.clone() else {
            return;
        };
        let known = self.guest.managed().cloned();
        if let Some(known) = &known
            && self.guest.given_back.look(&self.shared, known)
        {
            self.check_soon();
        }
        let looked = self.guest.looked.map_or(Duration::MAX, |at| at.elapsed());
        let doubts = self.guest.unfit.is_some() || self.guest.doubts_views();
        if known.is_some() && !doubts && looked < LOOK_AGAIN {
            return;
        }
        self.guest.looked = Some(Instant::now());
        self.look_at_pool();
        let patience = if known.is_some() { CHANGES } else { SETTING_UP };
        let found = self.find_guest(&object, processes, known.as_ref());
        let managed = found.and_then(|found| match (found, known) {
            (Some((host, base)), None) => {
                let guest = self.manage_guest(object, host, base, processes);
                guest.map(Some)
            }
            (Some((host, base)), Some(known)) if !is_at(&known, &host, base) => {
                Err(Unfit::Moved(host.pid().unwrap_or(0)))
            }
            (_, Some(known)) => view::look(&self.shared, &known, processes).map(|()| None),
            _ => Ok(None),
        });
        match managed {
            Ok(Some(process)) => self.guest.process = Some(process),
            Ok(None) => self.guest.unfit = None,
            Err(why) => {
                let since = *self.guest.unfit.get_or_insert_with(Instant::now);
                if since.elapsed() > patience {
                    self.shared.signals.doom(Doom::Guest(why.to_string()));
                }
                self.check_soon();
            }
        }
    }

    /// The process that maps it, and where.
    /// * `known`: it is managed already. Then only its monitor is asked after.
    ///
    /// Errors: a process maps it, and it cannot be managed there.
    fn find_guest(
        &mut self,
        object: &MemoryObject,
        processes: &[Arc<Process>],
        known: Option<&Arc<Process>>,
    ) -> Result<Option<(Arc<Process>, VirtPage)>, Unfit> {
        let managed = known.is_some();
        let text = &mut self.checks.maps;
        let mut mapped_by = |pid: u32| -> Vec<_> {
            // One that cannot be read has ended, or is none of ours.
            match procfs::read_maps(pid, text) {
                Ok(()) => procfs::mappings_of(text, object.id()).collect(),
                Err(_) => Vec::new(),
            }
        };
        let monitor = known.map(|known| known.host().space);
        let may_be = |of: &&Arc<Process>| monitor.is_none_or(|space| of.space == space);
        let hosts = processes.iter().filter(may_be);
        let hosts = hosts.filter(|of| of.has_running_identity());
        let hosts = hosts.filter_map(|of| Some((of, of.pid()?)));
        // A view may have mapped it before the monitor does.
        let keeper = self.launch.keeper;
        let mut hosts = hosts.filter(|(_, pid)| managed || descends(*pid, keeper, |_| false));
        let Some((host, pid, found)) = hosts.find_map(|(host, pid)| {
            let found = mapped_by(pid);
            (!found.is_empty()).then_some((host, pid, found))
        }) else {
            return Ok(None);
        };
        if self.guest.process.is_some() && !managed {
            return Err(Unfit::Again(pid));
        }
        let base = place(&found, object.bytes()).ok_or(Unfit::Parts(pid))?;
        // The flags cost a walk through all page tables, so they are not read again.
        let mut kept = Vec::new();
        if !managed {
            procfs::mappings_with_flags(pid, &mut [("dc", &mut kept)])?;
        }
        let inherits = |(range, ..): &(VirtRange, u64, bool)| !range.minus(&kept).is_empty();
        if !managed && found.iter().any(inherits) {
            return Err(Unfit::Inherited(pid));
        }
        if managed {
            return Ok(Some((host.clone(), base)));
        }
        // Those of the run become views.
        let of_run = processes.iter().filter(|of| of.has_agent());
        let of_run: Vec<u32> = of_run.filter_map(|of| of.pid()).collect();
        let is_other = |other: &u32| {
            let shares = |of: &u32| process::share_memory(*of, *other).unwrap_or(false);
            let maps = *other != pid && !mapped_by(*other).is_empty();
            maps && !of_run.contains(other) && !of_run.iter().any(shares)
        };
        let others = procfs::processes()?;
        match others.into_iter().find(is_other) {
            Some(other) => Err(Unfit::Shared(pid, other)),
            None => Ok(Some((host.clone(), base))),
        }
    }

    /// Registers the memory that `host` maps at `base`, and counts what is there.
    fn manage_guest(
        &self,
        object: Arc<MemoryObject>,
        host: Arc<Process>,
        base: VirtPage,
        processes: &[Arc<Process>],
    ) -> Result<Arc<Process>, Unfit> {
        let shared = &self.shared;
        let agent = host.agent.get();
        let stray = || Unfit::Stray(host.pid().unwrap_or(0));
        let uffd = agent.ok_or_else(stray)?.quiet_uffd()?;
        let whole = object.whole();
        // Counted after it is registered: pages that come later come by faults.
        let view = VirtRange::new(base, base.plus(object.bytes().pages_floor().0));
        if let Err(error) = uffd.register(view, RegisterMode::MISSING_WP) {
            // It may be registered along with private memory around it. Then the next try succeeds.
            foreign::release(&host, base);
            return Err(error.into());
        }
        let is_family = |space| shared.processes.is_family(space);
        let space = (shared.books.engine().layout()).new_space(object.page_size(), is_family)?;
        let row = shared.books.row(space);
        row.put_fd(Fds::Uffd, Some(uffd.as_fd()));
        row.put(Number::VIEW, base.0);
        row.put(Number::HOST, host.space.0.into());
        row.set(Flag::Guest);
        let guest = Guest::new(object, uffd, base)?.with_locks(shared.locks.clone());
        let process = Arc::new(Process::of_guest(space, guest, host, row));
        told::listen(shared, &process).map_err(Unfit::Unheard)?;
        shared.books.engine().layout().attached(space, whole);
        process.row.commit(space, None, space);
        shared.add_process(&process);
        view::adopt(shared, &process, processes);
        each_run(&process, |run| {
            discover::add_present(&shared.books, &process, &[], run.start, &[run], &[]);
        });
        shared.signals.kick_evictor();
        Ok(process)
    }
}

/// Does `act` for each run of pages that are in the memory.
fn each_run(process: &Process, mut act: impl FnMut(VirtRange)) {
    let guest = process.hosted.as_ref().map(|hosted| &hosted.guest);
    let mut at = VirtPage(0);
    while let Some(Ok(Some(run))) = guest.map(|guest| guest.data(at)) {
        act(run);
        at = run.end;
    }
}

/// Makes the guest memory that a row describes. Its host lives, and is listed. Or the machine that
/// was handed over.
pub(super) fn revive(
    shared: &Shared,
    row: Row,
    heir: &Heir,
    fds: &mut [Option<OwnedFd>],
) -> Option<Arc<Process>> {
    if heir.has(Flag::Handed) {
        return handed::revive(row, heir, fds);
    }
    let host = SpaceId(heir.number(Number::HOST) as u32);
    let host = shared.processes.get(host)?;
    let uffd = Uffd::from_stranger(fds[Fds::Uffd as usize].take()?).ok()?;
    let base = VirtPage(heir.number(Number::VIEW));
    let guest = Guest::new(shared.guest.clone()?, uffd, base).ok()?;
    let guest = guest.with_locks(shared.locks.clone());
    let process = Arc::new(Process::of_guest(heir.space, guest, host, row));
    view::find_again(shared, &process);
    Some(process)
}

/// Brings the books up to date with guest memory: pages that are there are resident. A load had
/// installed them, or they were published and not punched: then they are as their copies, and the
/// copies are given up. No thread changes the books meanwhile.
pub(super) fn correct(shared: &Shared, process: &Process) {
    each_run(process, |run| {
        shared.books.engine().reconcile_present(process.space, run);
        discover::add_present(&shared.books, process, &[], run.start, &[run], &[]);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_mapping_in_order_has_a_place() {
        let map = |start: u64, end: u64, offset: u64, shared| {
            let range = VirtRange::new(VirtPage(start), VirtPage(end));
            (range, offset * 4096, shared)
        };
        let whole = Bytes(8 * 4096);
        for (found, expected) in [
            (vec![map(100, 108, 0, true)], Some(100)),
            // The monitor has changed the protection of a part.
            (
                vec![map(100, 103, 0, true), map(103, 108, 3, true)],
                Some(100),
            ),
            (vec![], None),
            (vec![map(100, 108, 0, false)], None),
            (vec![map(100, 108, 1, true)], None),
            (vec![map(100, 107, 0, true)], None),
            (vec![map(100, 109, 0, true)], None),
            (vec![map(100, 103, 0, true), map(104, 109, 3, true)], None),
            (vec![map(100, 103, 0, true), map(103, 108, 4, true)], None),
            (vec![map(100, 108, 0, true), map(200, 208, 0, true)], None),
        ] {
            assert_eq!(place(&found, whole), expected.map(VirtPage), "{found:?}");
        }
    }
}
