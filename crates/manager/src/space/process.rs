//! An address space of the client, with all that is needed to serve its faults and to evict its
//! pages.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::{Duration, Instant};

use undercroft_base::{PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_proto::legacy::{Number, Row};
use undercroft_sys::maps::Maps;
use undercroft_sys::pagemap::{Category, Pagemap};
use undercroft_sys::process::PidFd;
use undercroft_sys::process::robust_list_head;
use undercroft_sys::procfs;

use crate::cpus::pin::Program;
use crate::gauges::scale::Spell;
use crate::space::agent::Agent;
use crate::space::backlog::Backlog;
use crate::space::command::Commands;
use crate::space::dropping::Dropping;
use crate::space::ground::Ground;
use crate::space::guest::Guest;
use crate::space::handed::Handed;
use crate::space::identity::Identity;
use crate::space::order::EventOrder;
use crate::space::partners::Partners;
use crate::space::port::Space;
use crate::space::refused::Refused;
use crate::space::relatives::Relatives;
use crate::sync::lock;

/// The first page beyond all addresses.
const BEYOND: VirtPage = VirtPage(0x7_ffff_ffff);

/// Time in which the program registers memory that was given up for that.
const YIELDED: Duration = Duration::from_secs(15);

/// Longest wait of a thread that serves other processes too for an agent to finish a few MOVEs,
/// which take some 20 us.
pub(crate) const EXCLUDE_MAX: Duration = Duration::from_millis(2);

/// Bytes around a thread's robust-list head that belong to its control block (glibc: the head is
/// 0x2e0 into `struct pthread`, of about 0x900 bytes). The kernel writes there when the thread
/// ends, past userfaultfd.
const CONTROL_BLOCK: (u64, u64) = (0x300, 0x700);

/// Guest memory, and the process that maps it.
pub(crate) struct Hosted {
    pub guest: Arc<Guest>,
    pub host: Arc<Process>,
}

/// An address space, or the memory of a virtual machine. A fork child starts with its userfaultfd
/// only; identity and agent come when it announces itself.
pub(crate) struct Process {
    /// The row for a successor. First, because fields are dropped in this order.
    pub row: Row,
    pub space: SpaceId,
    pub memory: Arc<dyn Space>,
    /// The memory is that of a virtual machine: it has neither identity nor agent, but a host.
    pub hosted: Option<Hosted>,
    /// The memory is that of a machine that was handed over: it has a process, but nothing of ours
    /// in it.
    pub handed: Option<Handed>,
    /// Every page that it can have registered.
    pub all_pages: VirtRange,
    /// Written while messages are read and layout events applied; read while pages are installed.
    /// So no page is installed between an event's acknowledgement and its bookkeeping.
    pub layout: RwLock<()>,
    /// Layout events that were read and not applied yet. Used with the layout lock held.
    pub order: Mutex<EventOrder>,
    pub identity: OnceLock<Identity>,
    pub agent: OnceLock<Agent>,
    pub relatives: Relatives,
    pub backlog: Backlog,
    pub refused: Refused,
    /// Whether it is registered with the kernel, because pressure has come.
    pub managed: AtomicBool,
    pub partners: Partners,
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
    /// Threads that have just started, and had no control block when they were last looked at.
    pub threads_started: Mutex<Vec<u32>>,
    /// Where registrations may begin and end.
    pub ground: Ground,
    /// Memory that was not registered for a moment, while a move to it was under way
    /// ([`crate::space::foreign`]).
    pub exposed: Mutex<Vec<VirtRange>>,
    /// Ranges that the program is about to register with a userfaultfd of its own, and when that
    /// was heard.
    yielded: Mutex<Vec<(VirtRange, Instant)>>,
    /// Ranges that the program drops: pages there are not counted.
    pub dropping: Dropping,
    /// Faults that named a page which is resident by the books.
    pub puzzled: AtomicU32,
    /// The kernel has no memory to give its messages, to poison its pages, to show its mappings.
    pub short_reads: Spell,
    pub short_poisons: Spell,
    pub short_looks: Spell,
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
        let all_pages = VirtRange::new(memory.lowest(), BEYOND);
        Process {
            order: Mutex::new(EventOrder::new(row.clone(), Vec::new())),
            row,
            space,
            all_pages,
            memory,
            hosted: None,
            handed: None,
            layout: RwLock::new(()),
            identity: OnceLock::new(),
            agent: OnceLock::new(),
            relatives: Relatives::new(beacon, parent, family.unwrap_or(space)),
            backlog: Backlog::default(),
            refused: Refused::default(),
            managed: AtomicBool::new(false),
            partners: Partners::default(),
            exited: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            threads_seen: Mutex::default(),
            threads_started: Mutex::default(),
            ground: Ground::new(all_pages),
            exposed: Mutex::default(),
            yielded: Mutex::default(),
            dropping: Dropping::default(),
            puzzled: AtomicU32::new(0),
            short_reads: Spell::default(),
            short_poisons: Spell::default(),
            short_looks: Spell::default(),
        }
    }

    /// Guest memory that `host` maps. It is managed from the beginning.
    /// * `row`: not committed yet.
    pub(crate) fn of_guest(space: SpaceId, guest: Guest, host: Arc<Process>, row: Row) -> Process {
        let guest = Arc::new(guest);
        let memory: Arc<dyn Space> = guest.clone();
        let no_page = VirtPage(BEYOND.0 - 1);
        let process = Process::new(space, memory, no_page, None, None, row);
        process.managed.store(true, Ordering::Relaxed);
        Process {
            hosted: Some(Hosted { guest, host }),
            ..process
        }
    }

    /// Memory that was handed over. It is managed from the beginning.
    /// * `row`: not committed yet.
    pub(crate) fn of_machine(
        space: SpaceId,
        memory: Arc<dyn Space>,
        handed: Handed,
        row: Row,
    ) -> Process {
        let no_page = VirtPage(BEYOND.0 - 1);
        let process = Process::new(space, memory, no_page, None, None, row);
        process.managed.store(true, Ordering::Relaxed);
        Process {
            handed: Some(handed),
            ..process
        }
    }

    /// The process whose threads use this memory.
    pub(crate) fn host(self: &Arc<Process>) -> &Arc<Process> {
        match &self.hosted {
            Some(hosted) => &hosted.host,
            None => self,
        }
    }

    /// Size of its pages.
    pub(crate) fn page_size(&self) -> PageSize {
        (self.hosted.as_ref()).map_or(PageSize::Base, |hosted| hosted.guest.page_size())
    }

    /// False for a fork child whose books may still be those of its parent.
    pub(crate) fn is_corrected(&self) -> bool {
        self.relatives.is_corrected()
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.identity.get().map(|identity| identity.pid)
    }

    /// True if it has announced itself and was not seen to exit.
    pub(crate) fn has_running_identity(&self) -> bool {
        self.identity.get().is_some() && !self.exited.load(Ordering::Relaxed)
    }

    /// The process as the kernel knows it. `None`: it has not announced itself, or it is a guest.
    pub(crate) fn pidfd(&self) -> Option<&PidFd> {
        let handed = self.handed.as_ref().map(|handed| &handed.pidfd);
        handed.or_else(|| self.identity.get().map(|identity| &identity.pidfd))
    }

    /// False once the process has exited, or its address space was found gone.
    pub(crate) fn is_alive(&self) -> bool {
        !self.gone.load(Ordering::Relaxed) && self.pidfd().is_none_or(|pidfd| !pidfd.has_exited())
    }

    /// The pagemap of this address space (not of what the process may exec later).
    pub(crate) fn pagemap(&self) -> io::Result<&Pagemap> {
        if let Some(handed) = &self.handed {
            return Ok(&handed.pagemap);
        }
        let identity = self.identity.get();
        Ok(&identity.ok_or(io::ErrorKind::NotFound)?.pagemap)
    }

    /// The thread that a message names, or 0 if the number is of another pid namespace. Before the
    /// process has announced itself it may be.
    pub(crate) fn known_thread(&self, thread: u32) -> u32 {
        match self.identity.get() {
            Some(identity) if !identity.is_below => thread,
            _ => 0,
        }
    }

    /// The mappings of this address space (not of what the process may exec later).
    pub(crate) fn maps(&self) -> io::Result<&Maps> {
        let identity = self.identity.get();
        Ok(&identity.ok_or(io::ErrorKind::NotFound)?.maps)
    }

    /// True if nothing is in `range`, no guard page either. Only `thread` can put one there: it
    /// waits, the process has no other, and no other process has this memory. Cost: five system
    /// calls.
    pub(crate) fn is_vacant(&self, range: VirtRange, thread: u32) -> bool {
        let thread = self.known_thread(thread);
        let Some(identity) = self.identity.get().filter(|known| known.pid == thread) else {
            return false;
        };
        if !identity.tasks.count().is_ok_and(|count| count == 1) {
            return false;
        }
        if self.commands().is_some_and(Commands::is_starting) {
            return false; // the process that makes the agent has this memory, and is no partner
        }
        let agent = self.agent.get().map_or(0, Agent::tid);
        if (self.partners).may_be(identity.pid, agent, &identity.tasks, &self.row) {
            return false;
        }
        // A guard page shows as swapped.
        let any = Category(Category::PRESENT.0 | Category::SWAPPED.0);
        matches!(identity.pagemap.first(range, any), Ok(None))
    }

    pub(crate) fn kill(&self) {
        if let Some(hosted) = &self.hosted {
            return hosted.host.kill();
        }
        if let Some(pidfd) = self.pidfd() {
            let _ = pidfd.kill();
        }
    }

    /// Ends this process, and tells the user why.
    pub(crate) fn end(&self, why: &str) {
        if !self.ended.swap(true, Ordering::Relaxed) {
            let host = self.hosted.as_ref().map_or(self, |hosted| &*hosted.host);
            let handed = host.handed.as_ref().map(|handed| handed.pid);
            let pid = handed.or(host.pid()).unwrap_or(0);
            crate::log::say(&format!("process {pid} was ended: {why}"));
        }
        self.kill();
    }

    /// Anonymous memory in use, in pages. It is what counts before the process is managed.
    pub(crate) fn anonymous_pages(&self, statm: &procfs::Statm) -> u64 {
        statm.read().unwrap_or_default().anonymous().0
    }

    /// Its agent's commands, if it has announced one.
    pub(crate) fn commands(&self) -> Option<&Commands> {
        self.agent.get().map(|agent| &agent.commands)
    }

    /// True if it has an agent that lives.
    pub(crate) fn has_agent(&self) -> bool {
        let agent = self.agent.get();
        agent.is_some_and(|agent| !agent.has_ended())
    }

    /// True if its agent was killed, and the process goes on.
    pub(crate) fn lost_its_agent(&self) -> bool {
        let agent = self.agent.get();
        let killed = agent.is_some_and(|agent| agent.has_ended() && !agent.commands.has_quit());
        killed && self.is_alive()
    }

    /// True if its mappings are to be read: it is not managed yet, or could not be counted.
    pub(crate) fn wants_discovery(&self) -> bool {
        let recount =
            self.backlog.recount.load(Ordering::Relaxed) && !self.unread.load(Ordering::Relaxed);
        recount || !self.managed.load(Ordering::Relaxed)
    }

    /// `range` is not registered from now on, for [`YIELDED`]. By then it is the program's own.
    pub(crate) fn yields(&self, range: VirtRange) {
        lock(&self.yielded).push((range, Instant::now()));
    }

    /// Allows `range` to be registered again.
    pub(crate) fn yields_no_more(&self, range: VirtRange) {
        lock(&self.yielded).retain(|(yielded, _)| *yielded != range);
    }

    /// Whether a part of `range` is such a one.
    pub(crate) fn has_yielded(&self, range: VirtRange) -> bool {
        let mut yielded = lock(&self.yielded);
        yielded.retain(|(_, since)| since.elapsed() < YIELDED);
        yielded
            .iter()
            .any(|(of, _)| !of.intersect(range).is_empty())
    }

    /// True if the address space no longer exists (exec or exit).
    pub(crate) fn has_lost_its_memory(&self) -> bool {
        self.memory.is_gone()
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

/// The pages of a thread's control block. `None`: it is not set up yet, or the C library is not
/// glibc.
pub(crate) fn control_block(tid: u32) -> Option<VirtRange> {
    let head = robust_list_head(tid)?;
    let first = VirtPage::of(head.saturating_sub(CONTROL_BLOCK.0));
    let last = VirtPage::of(head + CONTROL_BLOCK.1);
    Some(VirtRange::new(first, last.plus(1)))
}
