//! Virtual machines whose monitors hand their memory over: taken, revived by a successor, counted,
//! and ended with the run.
//!
//! The process that listens for monitors (`vm --socket`) is the run's program. It has parsed what a
//! monitor says, and passes it on by a handshake of its own. Its order is checked here again.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use undercroft_base::{PageCount, PageSize, Slot, SpaceId, VirtRange};
use undercroft_engine::{EVERYTHING, LedgerFull};
use undercroft_proto::handover::{Handover, Order, Refused, Region, Taken};
use undercroft_proto::legacy::{Fds, Flag, Heir, Number, Row};
use undercroft_proto::report::GuestMemory;
use undercroft_sys::process::PidFd;
use undercroft_sys::uffd::{RegisterMode, Uffd, UffdError};

use super::Control;
use crate::space::anonymous::Anonymous;
use crate::space::handed::Handed;
use crate::space::parts::{CHUNKS, next_parts, pause};
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::space::still;

/// Pages whose entries are written under one hold of the engine.
const AT_ONCE: u64 = 2048;

/// Why a machine cannot be served. For the user.
#[derive(Debug, thiserror::Error)]
enum Unfit {
    #[error("this run serves no snapshot")]
    NoSnapshot,
    #[error(transparent)]
    Said(#[from] Refused),
    #[error("its descriptors did not come along")]
    Descriptors,
    #[error("the descriptor that it sent is no userfaultfd")]
    NoUffd,
    #[error(
        "its memory from address {0:#x} on is not mapped or not its own, or its userfaultfd has not \
         had UFFDIO_API: {1}"
    )]
    NotRegistered(u64, UffdError),
    #[error("it has ended: {0}")]
    Ended(std::io::Error),
    #[error("{0}")]
    NoNumber(#[from] LedgerFull),
    #[error("too many machines have the same snapshot")]
    TooMany,
}

impl Control {
    /// Takes a machine over. Its descriptors are `fds`: userfaultfd, pidfd, page map.
    pub(super) fn take_machine(&mut self, order: &[u8], fds: Vec<OwnedFd>) -> Taken {
        match self.try_machine(order, fds) {
            Ok(true) => Taken::Yes,
            Ok(false) => Taken::Already,
            Err(why) => Taken::Refused(why.to_string()),
        }
    }

    /// False if the memory of the same process is served already.
    fn try_machine(&mut self, order: &[u8], fds: Vec<OwnedFd>) -> Result<bool, Unfit> {
        let shared = self.shared.clone();
        let source = shared.books.source().ok_or(Unfit::NoSnapshot)?;
        let file = shared.books.tiers[usize::from(source.0)]
            .tier
            .info()
            .capacity;
        let handover = Order::parse(order, file)?;
        let [uffd, pidfd, pagemap]: [OwnedFd; 3] =
            fds.try_into().map_err(|_| Unfit::Descriptors)?;
        let uffd = Uffd::from_stranger(uffd).map_err(|_| Unfit::NoUffd)?;
        let pidfd = PidFd::from(pidfd);
        let pid = pidfd.numbers().map_err(Unfit::Ended)?[0];
        let machines = machines(&shared);
        let is_it = |known: &Arc<Process>| known.handed.as_ref().is_some_and(|of| of.pid == pid);
        if machines.iter().any(is_it) {
            return Ok(false);
        }
        // The monitor has done so. Again, because what is not registered would never fault.
        for region in handover.regions() {
            let at = region.range.start.address();
            let registered = uffd.register(region.range, RegisterMode::MISSING);
            registered.map_err(|why| Unfit::NotRegistered(at, why))?;
        }
        let handed = Handed {
            pid,
            pidfd,
            pagemap: pagemap.into(),
            first: free_slots(&machines, file.pages_floor()).ok_or(Unfit::TooMany)?,
            bytes: handover.pages().bytes(),
        };
        let is_family = |space| shared.processes.is_family(space);
        let space = (shared.books.engine().layout()).new_space(PageSize::Base, is_family)?;
        let (row, first) = (shared.books.row(space), handed.first);
        handed.note(&row);
        row.put_fd(Fds::Uffd, Some(uffd.as_fd()));
        let memory = Arc::new(Anonymous::new(uffd));
        let process = Arc::new(Process::of_machine(space, memory, handed, row));
        refuse_the_rest(&process, handover.regions().iter().map(|of| of.range));
        still::no_way_out(&shared, &process);
        if let Err(full) = self.provide(space, &handover, first) {
            process.row.free();
            shared.books.engine().layout().remove_space(space);
            shared.books.free_released();
            return Err(full.into());
        }
        process.row.commit(space, None, space);
        shared.add_process(&process);
        if self.hear_end(&process).is_err() {
            shared.gauges.shortages.no_descriptor(); // checks find that it has ended
        }
        self.check_soon();
        Ok(true)
    }

    /// Has the pages of a machine begin as those of the file.
    ///
    /// Errors: the ledger is full. Some pages are in it.
    fn provide(&self, space: SpaceId, of: &Handover, first: Slot) -> Result<(), LedgerFull> {
        let books = &self.shared.books;
        let Some(source) = books.source() else {
            return Ok(());
        };
        for Region { range, at } in of.regions() {
            books.engine().layout().attached(space, *range);
            let mut next = range.start;
            while next < range.end {
                let end = next.plus(AT_ONCE).min(range.end);
                let slot = Slot(first.0 + at + (next.0 - range.start.0));
                let part = VirtRange::new(next, end);
                (books.engine_for_many().layout()).provided(space, part, source, slot)?;
                pause();
                next = end;
            }
        }
        Ok(())
    }

    /// Ends the machines that are left: what they have not read yet would be missing.
    pub(super) fn end_machines(&self) {
        for machine in machines(&self.shared) {
            if machine.is_alive() {
                machine.end("the run that served its memory has ended");
            }
        }
    }
}

/// The machines that are served.
fn machines(shared: &Shared) -> Vec<Arc<Process>> {
    let all = shared.processes.all().into_iter();
    let lives = |of: &Arc<Process>| of.handed.is_some() && !of.gone.load(Ordering::Relaxed);
    all.filter(lives).collect()
}

/// Slots that no machine has, as many as the file has pages. The lowest, because a successor has a
/// bit for each.
fn free_slots(machines: &[Arc<Process>], file: PageCount) -> Option<Slot> {
    let taken = |first: Slot| {
        let mut all = machines.iter().filter_map(|of| of.handed.as_ref());
        all.any(|handed| handed.first == first)
    };
    let mut all = (0..=machines.len() as u64).map(|at| Slot(at * file.0));
    let free = all.find(|first| !taken(*first))?;
    (free.0 + file.0 <= Slot::LIMIT).then_some(free)
}

/// A page that the monitor has registered and not named has contents that are not known: a touch
/// is an error.
fn refuse_the_rest(process: &Process, regions: impl Iterator<Item = VirtRange>) {
    let regions: Vec<VirtRange> = regions.collect();
    for rest in process.all_pages.minus(&regions) {
        process.refused.add(rest);
    }
}

/// Makes the machine that a row describes.
pub(super) fn revive(row: Row, heir: &Heir, fds: &mut [Option<OwnedFd>]) -> Option<Arc<Process>> {
    let of = [Fds::Uffd, Fds::Pidfd, Fds::Pagemap];
    let [uffd, pidfd, pagemap] = of.map(|of| fds[of as usize].take());
    let memory = Arc::new(Anonymous::new(Uffd::from_stranger(uffd?).ok()?));
    let pages = heir.regions.iter().map(|range| range.count().0);
    let handed = Handed {
        pid: heir.number(Number::Pid) as u32,
        pidfd: pidfd?.into(),
        pagemap: pagemap?.into(),
        first: Slot(heir.number(Number::SLOT)),
        bytes: PageCount(pages.sum()).bytes(),
    };
    let process = Process::of_machine(heir.space, memory, handed, row);
    process
        .exited
        .store(heir.has(Flag::Exited), Ordering::Relaxed);
    refuse_the_rest(&process, heir.regions.iter().copied());
    Some(Arc::new(process))
}

/// How much of the machines is in memory, and how much was not read yet. `None`: the run serves no
/// snapshot.
pub(super) fn now(shared: &Shared) -> Option<GuestMemory> {
    shared.books.source()?;
    let mut all = GuestMemory {
        handed_over: Some(0),
        ..GuestMemory::default()
    };
    for machine in machines(shared) {
        let Some(handed) = &machine.handed else {
            continue;
        };
        let (mut left, mut here, mut away) = (EVERYTHING, PageCount(0), PageCount(0));
        while !left.is_empty() {
            let engine = shared.books.engine_for_many();
            for part in next_parts(&engine, machine.space, &mut left, CHUNKS) {
                let (present, stored) = engine.books().places(machine.space, part);
                (here, away) = (PageCount(here.0 + present.0), PageCount(away.0 + stored.0));
            }
        }
        all.handed_over = all.handed_over.map(|count| count + 1);
        all.bytes += handed.bytes.0;
        all.resident_bytes += here.bytes().0;
        all.stored_bytes += away.bytes().0;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use undercroft_base::{Bytes, VirtPage};

    use super::*;
    use crate::fault::model_tests::{options, shared, this_process};
    use crate::space::model::ModelMemory;

    #[test]
    fn each_machine_has_slots_of_its_own_and_the_lowest_are_given_first() {
        let shared = shared(options("ram"));
        let machine = |first: u64| {
            let space = shared.books.engine().layout().add_space();
            let memory = Arc::new(ModelMemory::new(VirtRange::one(VirtPage(512))));
            let identity = this_process();
            let handed = Handed {
                pid: identity.pid,
                pidfd: identity.pidfd,
                pagemap: identity.pagemap,
                first: Slot(first),
                bytes: Bytes(0),
            };
            let row = shared.books.row(space);
            Arc::new(Process::of_machine(space, memory, handed, row))
        };
        let free = |machines: &[Arc<Process>], file| free_slots(machines, PageCount(file));
        assert_eq!(free(&[], 100), Some(Slot(0)));
        let two = [machine(0), machine(200)];
        assert_eq!(free(&two, 100), Some(Slot(100)));
        let three = [machine(0), machine(100), machine(200)];
        assert_eq!(free(&three, 100), Some(Slot(300)));
        assert_eq!(free(&[machine(0)], Slot::LIMIT), None);
    }
}
