//! One address space of the client, with all that is needed to serve its faults and to evict its
//! pages.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;

use undercroft_base::{PAGE_BYTES, SpaceId, VirtPage, VirtRange};
use undercroft_sys::maps::Maps;
use undercroft_sys::pagemap::{Category, Pagemap};
use undercroft_sys::process::PidFd;
use undercroft_sys::procfs::{self, Tasks};
use undercroft_sys::uffd::UffdError;

use crate::legacy::{Fds, Number, Row};
use crate::placement::pin::Program;
use crate::space::agent::Agent;
use crate::space::dropping::Dropping;
use crate::space::order::EventOrder;
use crate::space::port::{Space, Wake};
use crate::space::trail::Trail;
use crate::sync::lock;

/// The first page above what `vm.mmap_min_addr` keeps free, and the first beyond all addresses.
const LOWEST: VirtPage = VirtPage(16);
const BEYOND: VirtPage = VirtPage(0x7_ffff_ffff);

/// Every page that a program can have.
pub(crate) const ALL_PAGES: VirtRange = VirtRange {
    start: LOWEST,
    end: BEYOND,
};

/// Ranges that are kept apart for another discovery.
const RECHECK_MAX: usize = 64;

/// Longest wait of a thread that serves other processes too for an agent to finish a few MOVEs,
/// which take some 20 us.
pub(crate) const EXCLUDE_MAX: Duration = Duration::from_millis(2);

/// Identity of the process, once known.
pub(crate) struct Identity {
    pub pid: u32,
    pub pidfd: PidFd,
    /// These belong to the address space of the handshake, whatever the process executes later.
    pub pagemap: Pagemap,
    pub maps: Maps,
    pub tasks: Tasks,
}

impl Identity {
    /// Writes it down for a successor.
    pub(crate) fn note(&self, row: &Row) {
        row.put(Number::Pid, self.pid.into());
        row.put_fd(Fds::Pidfd, Some(self.pidfd.as_fd()));
        row.put_fd(Fds::Pagemap, Some(self.pagemap.as_fd()));
        row.put_fd(Fds::Maps, Some(self.maps.as_fd()));
        row.put_fd(Fds::Tasks, Some(self.tasks.as_fd()));
    }
}

/// The number by which a fork child is to announce itself, and the thread that may do so.
pub(crate) struct Ticket {
    pub nonce: u64,
    pub thread: u32,
}

/// Ranges to be discovered again: a few, or one that covers them all.
#[derive(Default)]
pub(crate) struct Recheck(Mutex<Vec<VirtRange>>);

impl Recheck {
    pub(crate) fn add(&self, range: VirtRange) {
        let mut ranges = lock(&self.0);
        ranges.push(range);
        if ranges.len() > RECHECK_MAX {
            let start = ranges.iter().map(|range| range.start).min();
            let end = ranges.iter().map(|range| range.end).max();
            *ranges = start
                .zip(end)
                .map(|(s, e)| VirtRange::new(s, e))
                .into_iter()
                .collect();
        }
    }

    pub(crate) fn take(&self) -> Vec<VirtRange> {
        std::mem::take(&mut *lock(&self.0))
    }
}

/// One address space. A fork child starts with its userfaultfd only; identity and agent come when
/// it announces itself.
pub(crate) struct Process {
    /// What a successor needs to know of it. First, because fields are dropped in this order.
    pub row: Row,
    pub space: SpaceId,
    pub memory: Arc<dyn Space>,
    /// Written while messages are read and layout events applied; read while pages are installed.
    /// So no page is installed between an event's acknowledgement and its bookkeeping.
    pub layout: RwLock<()>,
    /// Layout events that were read and not applied yet. Used with the layout lock held.
    pub order: Mutex<EventOrder>,
    pub identity: OnceLock<Identity>,
    pub agent: OnceLock<Agent>,
    /// A page that is always missing. Its fault shows which userfaultfd a fork child has.
    pub beacon: VirtPage,
    /// The address space from which it was forked under management: its books are a copy of the
    /// parent's.
    pub parent: Option<SpaceId>,
    /// The first address space of its tree of forks. Processes of one family may share frames.
    pub family: SpaceId,
    pub trail: Trail,
    /// Threads that are counting the pages of new regions. A child that is forked now inherits
    /// books that lack them.
    pub counting: AtomicU32,
    /// The parent was still being counted at the fork, or a count of this process failed: its pages
    /// are to be counted again.
    pub recount: AtomicBool,
    /// The books of this fork child have been corrected by its own mappings.
    pub corrected: AtomicBool,
    /// Held while they are corrected.
    pub correction: Mutex<()>,
    /// The only thread of this fork child: its memory held the number on the beacon.
    pub proven: OnceLock<u32>,
    /// Its mappings cannot be read, so its books stay wrong.
    pub unreadable: AtomicBool,
    /// It is registered with the kernel, because pressure has come.
    pub managed: AtomicBool,
    /// The process has exited; its address space may live on in another that shares it.
    pub exited: AtomicBool,
    /// Set when the address space is known to be gone.
    pub gone: AtomicBool,
    /// Its agent did not answer its last command in time.
    pub is_late: AtomicBool,
    /// Its events are left unread, because its agent is about to move pages and does not run.
    pub unread: AtomicBool,
    /// We have ended it, and told the user.
    ended: AtomicBool,
    /// Threads whose control blocks are excluded from eviction.
    pub threads_seen: Mutex<HashSet<u32>>,
    /// Valid for one announcement.
    pub ticket: Mutex<Option<Ticket>>,
    /// Mappings that cannot be managed, as of the last discovery, and those that were seen since.
    /// In ascending order.
    pub fences: Mutex<Vec<VirtRange>>,
    /// Ranges whose mappings went away: new mappings there are to be discovered.
    pub recheck: Recheck,
    /// Ranges that were moved while pages were counted: pages there are to be counted again.
    pub uncounted: Recheck,
    /// Ranges that the program drops: pages there are not counted.
    pub dropping: Dropping,
    /// Faults that named a page which is resident by the books.
    pub puzzled: AtomicU32,
}

impl Process {
    /// A process that connected, or one that `parent` forked under management.
    /// * `family`: the family of the process that forked it.
    /// * `row`: not committed yet.
    pub(crate) fn new(
        space: SpaceId,
        memory: Arc<dyn Space>,
        beacon: VirtPage,
        parent: Option<SpaceId>,
        family: Option<SpaceId>,
        row: Row,
    ) -> Process {
        row.put(Number::Beacon, beacon.0);
        Process {
            order: Mutex::new(EventOrder::new(row.clone(), Vec::new())),
            row,
            space,
            memory,
            layout: RwLock::new(()),
            identity: OnceLock::new(),
            agent: OnceLock::new(),
            beacon,
            parent,
            family: family.unwrap_or(space),
            trail: Trail::default(),
            counting: AtomicU32::new(0),
            recount: AtomicBool::new(false),
            corrected: AtomicBool::new(false),
            correction: Mutex::default(),
            proven: OnceLock::new(),
            unreadable: AtomicBool::new(false),
            managed: AtomicBool::new(false),
            exited: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            threads_seen: Mutex::default(),
            ticket: Mutex::default(),
            fences: Mutex::default(),
            recheck: Recheck::default(),
            uncounted: Recheck::default(),
            dropping: Dropping::default(),
            puzzled: AtomicU32::new(0),
        }
    }

    /// False for a fork child whose books may still be those of its parent.
    pub(crate) fn is_corrected(&self) -> bool {
        self.parent.is_none() || self.corrected.load(Ordering::Acquire)
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.identity.get().map(|identity| identity.pid)
    }

    /// True if it has announced itself and was not seen to exit.
    pub(crate) fn has_running_identity(&self) -> bool {
        self.identity.get().is_some() && !self.exited.load(Ordering::Relaxed)
    }

    /// True if it has an agent that lives.
    pub(crate) fn has_agent(&self) -> bool {
        let agent = self.agent.get();
        agent.is_some_and(|agent| !agent.has_ended())
    }

    /// True if its mappings are to be read: it is not managed yet, or could not be counted.
    pub(crate) fn wants_discovery(&self) -> bool {
        let recount = self.recount.load(Ordering::Relaxed) && !self.unread.load(Ordering::Relaxed);
        recount || !self.managed.load(Ordering::Relaxed)
    }

    /// False once the process has exited, or its address space was found gone.
    pub(crate) fn is_alive(&self) -> bool {
        !self.gone.load(Ordering::Relaxed)
            && self
                .identity
                .get()
                .is_none_or(|identity| !identity.pidfd.has_exited())
    }

    /// The pagemap of this address space (not of what the process may exec later).
    pub(crate) fn pagemap(&self) -> io::Result<&Pagemap> {
        let identity = self.identity.get();
        Ok(&identity.ok_or(io::ErrorKind::NotFound)?.pagemap)
    }

    /// The thread that a message names, or 0 before the process has announced itself: until then
    /// the number may be of another pid namespace.
    pub(crate) fn known_thread(&self, thread: u32) -> u32 {
        match self.identity.get() {
            Some(_) => thread,
            None => 0,
        }
    }

    /// Puts a new number on the beacon of a fork child, by which thread `thread` is to announce the
    /// process. The caller holds no lock, and wakes the threads that wait there. Errors: the
    /// page is not missing, the layout is changing, or there are no random numbers.
    pub(crate) fn issue_ticket(&self, thread: u32) -> Result<u64, UffdError> {
        let bytes = undercroft_sys::process::random_bytes();
        let bytes = bytes.map_err(|_| UffdError::NoMemory { done: 0 })?;
        let nonce = u64::from_ne_bytes(bytes).max(1); // 0: not managed
        let mut page = [0u8; PAGE_BYTES];
        page[..8].copy_from_slice(&nonce.to_ne_bytes());
        let _layout = self.layout.read();
        let mut ticket = lock(&self.ticket);
        // First: a number that the child has read must be known to a successor, too.
        self.row.put(Number::NonceThread, thread.into());
        self.row.put(Number::Nonce, nonce);
        if let Err(refused) = (self.memory).install(self.beacon, &page, Wake::Later) {
            let before = ticket
                .as_ref()
                .map_or((0, 0), |old| (old.nonce, old.thread));
            self.row.put(Number::Nonce, before.0);
            self.row.put(Number::NonceThread, before.1.into());
            return Err(refused);
        }
        *ticket = Some(Ticket { nonce, thread });
        Ok(nonce)
    }

    /// The ticket is thread `thread`'s.
    pub(crate) fn give_ticket(&self, thread: u32) {
        if let Some(ticket) = lock(&self.ticket).as_mut() {
            ticket.thread = thread;
            self.row.put(Number::NonceThread, thread.into());
        }
    }

    /// Takes the ticket. False unless `nonce` is its number and it was given to a thread of process
    /// `pid`.
    pub(crate) fn redeem(&self, nonce: u64, pid: u32) -> bool {
        let mut ticket = lock(&self.ticket);
        let good = ticket.as_ref().is_some_and(|ticket| {
            ticket.nonce == nonce && procfs::is_thread_of(pid, ticket.thread)
        });
        good && ticket.take().is_some()
    }

    /// The mappings of this address space (not of what the process may exec later).
    pub(crate) fn maps(&self) -> io::Result<&Maps> {
        let identity = self.identity.get();
        Ok(&identity.ok_or(io::ErrorKind::NotFound)?.maps)
    }

    /// All addresses between the nearest mappings that cannot be managed. `None` if one of those is
    /// in `range`.
    pub(crate) fn between_fences(&self, range: VirtRange) -> Option<VirtRange> {
        let fences = lock(&self.fences);
        let at = range.overlapping(&fences);
        let below = at.start.checked_sub(1).map(|at| fences[at].end);
        let above = fences.get(at.end).map(|fence| fence.start);
        let whole = VirtRange::new(below.unwrap_or(LOWEST), above.unwrap_or(BEYOND));
        (at.is_empty() && whole.intersect(range) == range).then_some(whole)
    }

    /// Notes a mapping that cannot be managed, until the next discovery.
    pub(crate) fn fence(&self, range: VirtRange) {
        let mut fences = lock(&self.fences);
        let at = range.overlapping(&fences);
        let old = &fences[at.clone()];
        // Old ones may be gone by now. One that covers them all is still right: it only makes the
        // next registrations smaller.
        let start = old.first().map_or(range.start, |old| old.start);
        let end = old.last().map_or(range.end, |old| old.end);
        let all = VirtRange::new(start.min(range.start), end.max(range.end));
        fences.splice(at, [all]);
    }

    /// True if nothing is in `range`, no guard page either. Only `thread` can put one there: it
    /// waits, and the process has no other. Cost: two system calls.
    pub(crate) fn is_vacant(&self, range: VirtRange, thread: u32) -> bool {
        let Some(identity) = self.identity.get().filter(|known| known.pid == thread) else {
            return false;
        };
        let ours = u64::from(
            self.agent
                .get()
                .is_some_and(|agent| agent.commands.agent() != 0),
        );
        if !identity.tasks.count().is_ok_and(|count| count == 1 + ours) {
            return false;
        }
        // A guard page shows as swapped.
        let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
        matches!(identity.pagemap.first(range, any), Ok(None))
    }

    /// True if the address space no longer exists (exec or exit).
    /// * `zeros`: any page.
    pub(crate) fn has_lost_its_memory(&self, zeros: &[u8]) -> bool {
        self.memory.is_gone(zeros)
    }

    /// True if a layout event waits to be read. The kernel's view of the address space is then
    /// ahead of the books.
    pub(crate) fn event_pending(&self) -> bool {
        self.memory.is_event_pending()
    }

    /// True if every layout event that was read is in the books. Call it with the layout lock held.
    pub(crate) fn has_applied_all(&self) -> bool {
        lock(&self.order).has_applied_all()
    }

    /// True if the books know of every layout event, read or not. Call it with the layout lock
    /// held.
    pub(crate) fn books_are_current(&self) -> bool {
        !self.event_pending() && self.has_applied_all()
    }

    pub(crate) fn kill(&self) {
        if let Some(identity) = self.identity.get() {
            let _ = identity.pidfd.kill();
        }
    }

    /// Ends this process, and tells the user why.
    pub(crate) fn end(&self, why: &str) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            let pid = self.pid().unwrap_or(0);
            crate::log::say(&format!("process {pid} was ended: {why}"));
        }
        self.kill();
    }

    /// Anonymous memory in use, in pages. It is what counts before the process is managed.
    pub(crate) fn anonymous_pages(&self, statm: &procfs::Statm) -> u64 {
        let sizes = statm.read().unwrap_or_default();
        sizes.resident.0.saturating_sub(sizes.shared.0)
    }
}

impl Program for Process {
    fn binds(&self, tid: u32, cpus: &[usize]) {
        if let Some(agent) = self.agent.get() {
            agent.commands.bind(tid, cpus);
        }
    }

    fn is_bound(&self, tid: u32) -> bool {
        self.agent
            .get()
            .is_none_or(|agent| agent.commands.bound() == tid)
    }

    fn lets_go(&self, tid: u32) {
        if let Some(agent) = self.agent.get() {
            agent.commands.unbind(tid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::model::ModelMemory;

    const NONCE: u64 = 0x5eed;

    /// A fork child whose ticket was given to the calling thread.
    fn child() -> Process {
        let pages = VirtRange::new(VirtPage(0), VirtPage(1));
        let memory = Arc::new(ModelMemory::new(pages));
        let process = Process::new(
            SpaceId(1),
            memory,
            VirtPage(1),
            Some(SpaceId(0)),
            None,
            Row::default(),
        );
        *lock(&process.ticket) = Some(Ticket {
            nonce: NONCE,
            thread: undercroft_sys::process::thread_id(),
        });
        process
    }

    #[test]
    fn redeem_accepts_the_process_of_the_thread_once() {
        let process = child();
        assert!(process.redeem(NONCE, std::process::id()));
        assert!(!process.redeem(NONCE, std::process::id()), "a second use");
    }

    /// A refusal leaves the ticket to the process that it belongs to.
    #[test]
    fn redeem_refuses_another_process_and_another_number() {
        let process = child();
        let parent = std::os::unix::process::parent_id();
        for pid in [parent, 1, 0, u32::MAX] {
            assert!(!process.redeem(NONCE, pid), "process {pid}");
        }
        for nonce in [0, 1, NONCE + 1, NONCE << 1, !NONCE] {
            assert!(!process.redeem(nonce, std::process::id()), "number {nonce}");
        }
        assert!(process.redeem(NONCE, std::process::id()));
    }

    /// 0 stands for "not managed". No process has it, and without a ticket no number is good.
    #[test]
    fn redeem_without_a_ticket_refuses_every_number() {
        let process = child();
        *lock(&process.ticket) = None;
        for nonce in [0, NONCE] {
            assert!(!process.redeem(nonce, std::process::id()), "number {nonce}");
        }
    }

    #[test]
    fn redeem_refuses_the_process_from_which_the_ticket_went_to_another_thread() {
        let process = child();
        process.give_ticket(1); // the first process of the machine
        assert!(!process.redeem(NONCE, std::process::id()));
        assert!(process.redeem(NONCE, 1));
    }
}
