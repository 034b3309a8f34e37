//! Handshakes: a shim announces its process, and the manager verifies the process and takes it
//! over.
//!
//! The kernel says which process has connected, by pidfd; the message is not believed. Only
//! descendants of the keeper are accepted. If the keeper is root, any process may connect: a
//! stranger is dropped without an answer, and many strangers are accepted slowly. While a peer is
//! silent, the control thread serves everything else (`greetings`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use undercroft_base::{BASE_PAGE_BYTES, PageSize, SpaceId, VirtPage, VirtRange};
use undercroft_engine::LedgerFull;
use undercroft_proto::handover::{MESSAGE_MAX, Order};
use undercroft_proto::legacy::{Fds, Flag};
use undercroft_sys::fdpass;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::maps::Maps;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::PidFd;
use undercroft_sys::procfs::{self, Statm, Tasks};
use undercroft_sys::uffd::{Features, RegisterMode, Uffd, UffdError};
use undercroft_sys::uffd_source::UffdSource;
use undercroft_wire::parse::{GiveWay, Hello, Ready, answer};
use undercroft_wire::protocol::{KIND_FORK, STAGING_PAGES};

use super::Control;
use super::doors::Event;
use super::reaper::{ANCESTORS_MAX, reaps};
use super::view::is_of_view;
use crate::gauges::scale::is_out_of_descriptors;
use crate::space::agent::{Agent, Proof, ProofError};
use crate::space::anonymous::Anonymous;
use crate::space::command::{COMMAND_PAGE, Commands};
use crate::space::correction::{ChildBooks, Who, correct};
use crate::space::discover;
use crate::space::give_way::give_way;
use crate::space::identity::Identity;
use crate::space::process::Process;
use crate::space::still;
use crate::sync::lock;

/// Ranges that are being given up, and the most at once.
static GIVING_WAY: AtomicU32 = AtomicU32::new(0);
const GIVING_WAY_MAX: u32 = 16;

/// Longest a handshake may take.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);

/// How long a process may take to end after the kernel has closed its descriptors.
const DYING: Duration = Duration::from_millis(20);

/// Handshakes in progress at once: of all users, and of one.
const GREETINGS_MAX: usize = 64;
const GREETINGS_OF_ONE: usize = 48;

// One user leaves room for the others.
const _: () = assert!(GREETINGS_OF_ONE < GREETINGS_MAX);

/// After this many strangers within [`STRANGERS_TIME`], connections are accepted one at a time,
/// [`STRANGERS_PACE`] apart.
const STRANGERS_MAX: u32 = 64;
const STRANGERS_TIME: Duration = Duration::from_secs(1);
const STRANGERS_PACE: Duration = Duration::from_millis(5);

const _: () = assert!(STRANGERS_PACE.as_nanos() < STRANGERS_TIME.as_nanos());
const _: () = assert!(DYING.as_nanos() < HANDSHAKE.as_nanos());

/// Longest wait for the events that a fork child's books need, and the pause between two tries.
const CORRECTION: Duration = Duration::from_millis(500);
const CORRECTION_PAUSE: Duration = Duration::from_micros(50);

/// Most messages about processes that could not be managed.
const COMPLAINTS_MAX: u32 = 20;

/// Why a process of the program is not managed. Its memory is then outside the limit.
#[derive(Debug, thiserror::Error)]
enum Unmanaged {
    #[error(
        "process 1 of its pid namespace does not wait for children that it did not start, and the \
         agent of each process that ends would stay there"
    )]
    Unreaped,
    #[error("its first message is not one of this version's shim")]
    UnknownShim,
    #[error("its shim could not set its memory up")]
    GaveUp,
    /// No fork event announced it, or it is not the process that was announced.
    #[error("it says that it is a fork child, and no fork of a managed process is known for it")]
    UnknownFork,
    #[error("its mappings cannot be read")]
    Unreadable,
    #[error("userfaultfd fork events were refused ({0}); run as root or with CAP_SYS_PTRACE")]
    NoForkEvents(UffdError),
    #[error("no number is free for its address space: {0}")]
    NoNumber(#[from] LedgerFull),
    #[error(transparent)]
    Proof(#[from] ProofError),
    /// A request to one of its userfaultfds.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    #[error(transparent)]
    System(#[from] io::Error),
}

impl Unmanaged {
    fn is_for_want_of_descriptors(&self) -> bool {
        match self {
            Unmanaged::System(error) | Unmanaged::Proof(ProofError::System(error)) => {
                is_out_of_descriptors(error)
            }
            _ => false,
        }
    }
}

/// The handshakes in progress.
pub(super) struct Greetings {
    device: UffdSource,
    open: Vec<Greeting>,
    /// No connection is accepted before this time.
    deaf_until: Option<Instant>,
    strangers: u32,
    strangers_since: Option<Instant>,
    complaints: u32,
}

struct Greeting {
    socket: OwnedFd,
    uid: u32,
    pid: u32,
    /// Whether it is in a pid namespace below ours.
    is_below: bool,
    /// Whether it is no process of the program, and may ask for the memory of its machine.
    is_outside: bool,
    pidfd: PidFd,
    /// Its first message, and the command page that it was given.
    hello: Option<(Hello, SharedMemory)>,
    until: Instant,
}

impl Greetings {
    pub(super) fn new(device: UffdSource) -> Greetings {
        Greetings {
            device,
            open: Vec::new(),
            deaf_until: None,
            strangers: 0,
            strangers_since: None,
            complaints: 0,
        }
    }

    /// The poll flags of the listener: none while no connection may be accepted.
    pub(super) fn listens(&self) -> PollFlags {
        let deaf = self.deaf_until.is_some_and(|until| until > Instant::now());
        if deaf || self.open.len() >= GREETINGS_MAX {
            PollFlags::empty()
        } else {
            PollFlags::IN
        }
    }

    /// The sockets of the handshakes, in order.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        self.open.iter().map(|greeting| &greeting.socket)
    }

    /// Time until a handshake ends for lack of an answer, or the listener's turn comes.
    pub(super) fn due(&self) -> Option<Duration> {
        let now = Instant::now();
        let ends = self.open.iter().map(|greeting| greeting.until);
        let deaf = self.deaf_until.filter(|until| *until > now);
        let next = ends.chain(deaf).min()?;
        Some(next.saturating_duration_since(now))
    }

    /// Notes a connection of a process that is not the program's.
    fn stranger(&mut self) {
        let now = Instant::now();
        let recent = |since: Instant| now - since < STRANGERS_TIME;
        if !self.strangers_since.is_some_and(recent) {
            (self.strangers, self.strangers_since) = (0, Some(now));
        }
        self.strangers += 1;
        if self.strangers > STRANGERS_MAX {
            self.deaf_until = Some(now + STRANGERS_PACE);
        }
    }
}

impl Control {
    /// Accepts a connection, if it is from a process of the program.
    pub(super) fn welcome(&mut self) {
        use rustix::net::SocketFlags;
        self.greetings.deaf_until = None;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&self.doors.listener, flags) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            // Out of descriptors or memory: the peer stays in the queue, and a second try now would
            // fail too.
            Err(_) => {
                self.greetings.deaf_until = Some(Instant::now() + STRANGERS_PACE);
                return self.shared.gauges.shortages.no_descriptor();
            }
        };
        let of_one = |uid| {
            let open = self.greetings.open.iter();
            open.filter(|greeting| greeting.uid == uid).count()
        };
        let Some((uid, numbers, pidfd, is_outside)) = self.who_is(&socket) else {
            return self.greetings.stranger();
        };
        if of_one(uid) >= GREETINGS_OF_ONE {
            return;
        }
        if !reaps(&numbers) {
            let _ = fdpass::send(socket.as_fd(), &answer(true), &[]);
            return self.complain(&pidfd, &Unmanaged::Unreaped);
        }
        self.greetings.open.push(Greeting {
            socket,
            uid,
            pid: numbers[0],
            is_below: numbers.len() > 1,
            is_outside,
            pidfd,
            hello: None,
            until: Instant::now() + HANDSHAKE,
        });
    }

    /// The peer's user, numbers (see [`PidFd::numbers`]) and pidfd, and whether it is outside the
    /// run. `None` unless it descends from the keeper and has its user. If the keeper is root, the
    /// peer may have any user, because root can become any.
    ///
    /// A run with a machine has views, too: processes of the keeper's user, and no other, that run
    /// this run's shim. And others of that user, which are outside, may ask how to become one.
    fn who_is(&self, socket: &OwnedFd) -> Option<(u32, Vec<u32>, PidFd, bool)> {
        let own = rustix::process::getuid();
        let peer = fdpass::peer(socket).ok()?;
        let is_own = peer.uid == own.as_raw();
        if !is_own && !own.is_root() {
            return None;
        }
        let numbers = peer.pidfd.numbers().ok()?;
        let pid = *numbers.first()?;
        // While the peer lives, its number and its ancestors are its own.
        let descends = self.is_descendant(pid);
        let may_view = !descends && is_own && self.shared.guest.is_some();
        let is_view = may_view && self.mark.is_on(pid, &mut String::new());
        let known = (descends || may_view) && !peer.pidfd.has_exited();
        known.then_some((peer.uid, numbers, peer.pidfd, may_view && !is_view))
    }

    /// Goes on with the handshakes that have a message, and drops those that are late.
    pub(super) fn hear(&mut self, events: &[Event]) {
        let now = Instant::now();
        let all = std::mem::take(&mut self.greetings.open);
        for (at, mut greeting) in all.into_iter().enumerate() {
            if !events.contains(&Event::Greeted(at)) {
                if greeting.until > now {
                    self.greetings.open.push(greeting);
                }
                continue;
            }
            match self.hear_one(&mut greeting) {
                Ok(true) => {}
                Ok(false) => self.greetings.open.push(greeting),
                Err(error) => {
                    let _ = fdpass::send(greeting.socket.as_fd(), &answer(true), &[]);
                    self.complain(&greeting.pidfd, &error);
                }
            }
        }
    }

    /// Tells the user that a process is not managed.
    fn complain(&mut self, process: &PidFd, why: &Unmanaged) {
        if why.is_for_want_of_descriptors() {
            self.shared.gauges.shortages.no_descriptor();
        }
        // A process that ends during its handshake needs no manager.
        if self.greetings.complaints >= COMPLAINTS_MAX || process.wait_exit(DYING) {
            return;
        }
        self.greetings.complaints += 1;
        crate::log::say(&format!(
            "a process of the program could not be managed, and is outside the limit: {why}"
        ));
    }

    /// Handles one message of a peer. True if it was the last.
    fn hear_one(&mut self, greeting: &mut Greeting) -> Result<bool, Unmanaged> {
        // Locked memory is taken whole, so a run without machines has little.
        let takes_machines = self.shared.books.source().is_some();
        let mut bytes = vec![0u8; if takes_machines { MESSAGE_MAX } else { 64 }];
        let (got, fds) = match fdpass::receive(greeting.socket.as_fd(), &mut bytes) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        if got == 0 {
            return Ok(true); // the peer is gone
        }
        if greeting.hello.is_none() && Order::is_one(&bytes[..got]) {
            let taken = self.take_machine(&bytes[..got], fds);
            let said = serde_json::to_vec(&taken).map_err(io::Error::from)?;
            fdpass::send(greeting.socket.as_fd(), &said, &[])?;
            return Ok(true);
        }
        if greeting.hello.is_none() && (greeting.is_outside || is_of_view(&bytes[..got])) {
            let who = (greeting.uid, (!greeting.is_outside).then_some(greeting.pid));
            self.hear_of_view(&greeting.socket, who, (&bytes[..got], &fds))?;
            return Ok(true);
        }
        let asked = GiveWay::parse(&bytes[..got]);
        match (greeting.hello.take(), asked) {
            (None, Some(asked)) => {
                self.begin_to_give_way(greeting, asked)?;
                Ok(true)
            }
            (None, None) => {
                let hello = Hello::parse(&bytes[..got]).ok_or(Unmanaged::UnknownShim)?;
                let page = SharedMemory::create_sealed(COMMAND_PAGE, BASE_PAGE_BYTES)?;
                if let Some(guest) = &self.shared.guest {
                    Commands::say_machine(&page, guest.id());
                }
                let given = [self.greetings.device.as_fd(), page.as_fd()];
                fdpass::send(greeting.socket.as_fd(), &answer(false), &given)?;
                greeting.hello = Some((hello, page));
                Ok(false)
            }
            (Some((hello, page)), _) => {
                let ready = Ready::parse(&bytes[..got]).ok_or(Unmanaged::GaveUp)?;
                self.take_over(greeting, hello, page, ready, fds)?;
                Ok(true)
            }
        }
    }

    /// Has a thread give memory up that a managed process wants for itself, and answer it.
    ///
    /// Errors: no thread for it. The process is refused.
    fn begin_to_give_way(&self, greeting: &Greeting, asked: GiveWay) -> io::Result<()> {
        let socket = greeting.socket.try_clone()?;
        let range = VirtRange::of_addresses(asked.start, asked.end);
        let process = self.shared.processes.of_pid(greeting.pid);
        let process = process.filter(|of| of.has_agent());
        let process = process.filter(|_| GIVING_WAY.load(Relaxed) < GIVING_WAY_MAX);
        let Some(process) = process else {
            return fdpass::send(socket.as_fd(), &answer(true), &[]);
        };
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("uc-give-way".into());
        GIVING_WAY.fetch_add(1, Relaxed);
        let started = thread.spawn(move || {
            let refused = !give_way(&shared, &process, range);
            let _ = fdpass::send(socket.as_fd(), &answer(refused), &[]); // it may have ended
            GIVING_WAY.fetch_sub(1, Relaxed);
        });
        if started.is_err() {
            GIVING_WAY.fetch_sub(1, Relaxed);
        }
        started.map(|_| ())
    }

    /// Takes the process over: it has all it needs, and the manager has its descriptors.
    fn take_over(
        &mut self,
        greeting: &Greeting,
        hello: Hello,
        page: SharedMemory,
        ready: Ready,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Unmanaged> {
        let pid = greeting.pid;
        let mut fds = fds.into_iter().map(Uffd::from_stranger);
        let mut uffd = || fds.next().ok_or(io::ErrorKind::InvalidData)?;
        let beacon = VirtPage::of(ready.beacon);
        let own_uffd = match hello.nonce {
            0 => Some(uffd()?),
            _ => None,
        };
        let holding_uffd = uffd()?;
        let holding_area = VirtRange::of_addresses(
            ready.staging + (STAGING_PAGES * BASE_PAGE_BYTES) as u64,
            ready.staging + 2 * (STAGING_PAGES * BASE_PAGE_BYTES) as u64,
        );
        let holding = holding_area.start.address();
        begin_holding(&holding_uffd, holding_area)?;
        let memory = ProcessMemory::open(pid)?;
        let (pagemap, maps) = (Pagemap::open(pid)?, Maps::open(pid)?);
        let tasks = Tasks::open(pid)?;
        let statm = Statm::open(pid)?;
        let proof = Proof::install(pid, &memory, &holding_uffd, holding)?;
        let pidfd: PidFd = greeting.pidfd.as_fd().try_clone_to_owned()?.into();
        let process = match own_uffd {
            Some(uffd) => self.newcomer(uffd, hello, beacon, pid)?,
            None => self.fork_child(hello.nonce, beacon, pid)?,
        };
        let staging_area = VirtRange::of_addresses(ready.staging, holding);
        process
            .memory
            .register(staging_area, RegisterMode::MISSING)?;
        let row = process.row.clone();
        let identity = Identity {
            pid,
            is_below: greeting.is_below,
            pidfd,
            pagemap,
            maps,
            tasks,
        };
        let private = VirtRange::of_addresses(ready.staging, ready.private_end);
        let commands = Commands::new(page);
        let of_row = row.clone();
        let agent = Agent::new(
            commands,
            holding_uffd,
            holding,
            private,
            memory,
            proof,
            of_row,
        );
        self.sizes.statm.insert(process.space, statm);
        self.enlist(&process, identity, agent)?;
        row.put_fd(Fds::Greeting, Some(greeting.socket.as_fd()));
        self.begin_to_manage(&process, hello.kind == KIND_FORK, pid);
        let given = [process.memory.as_fd()];
        let sent = fdpass::send(greeting.socket.as_fd(), &answer(false), &given);
        row.put_fd(Fds::Greeting, None);
        Ok(sent?)
    }

    /// Lists a process that has all it needs.
    fn enlist(
        &mut self,
        process: &Arc<Process>,
        identity: Identity,
        agent: Agent,
    ) -> io::Result<()> {
        identity.note(&process.row);
        let _ = process.identity.set(identity);
        let _ = process.agent.set(agent);
        still::agent_has_come(&self.shared, process);
        process.row.set(Flag::Announced);
        (process.row).commit(
            process.space,
            process.relatives.parent,
            process.relatives.family,
        );
        self.shared.add_process(process);
        self.hear_end(process)
    }

    /// Manages a new process if there is pressure. Its only thread waits for the answer meanwhile.
    fn begin_to_manage(&mut self, process: &Arc<Process>, is_fork: bool, pid: u32) {
        if self.managing {
            self.watch(process);
            discover::manage(&self.shared, process, &mut self.checks.maps);
        } else if is_fork {
            // A fork doubles the memory that may be written: pressure is checked while the child
            // waits.
            self.check();
        }
        if is_fork && process.relatives.parent.is_none() {
            crate::space::cow::protect(&self.shared.books, process, pid);
        }
        self.check_soon();
    }

    /// Finds the process of a fork child that a fork event announced. The child names it by the
    /// number that only it was given.
    fn fork_child(
        &self,
        nonce: u64,
        beacon: VirtPage,
        pid: u32,
    ) -> Result<Arc<Process>, Unmanaged> {
        let known = self.shared.processes.all();
        let mut nameless = known.iter().filter(|p| p.identity.get().is_none());
        let process = nameless.find(|p| p.relatives.beacon == beacon && p.redeem(nonce, pid));
        let process = process.cloned().ok_or(Unmanaged::UnknownFork)?;
        self.correct(&process, pid)?;
        Ok(process)
    }

    /// Corrects the books of a fork child, if no fault of it has come yet: another process's read
    /// of its memory may have put the number there. From now on its pages may leave.
    fn correct(&self, process: &Process, pid: u32) -> Result<(), Unmanaged> {
        let until = Instant::now() + CORRECTION;
        loop {
            match correct(&self.shared, process, Who::Known(pid)) {
                ChildBooks::Right => return Ok(()),
                ChildBooks::Short => {
                    return Err(io::Error::from(rustix::io::Errno::MFILE).into());
                }
                ChildBooks::Later if Instant::now() < until => {
                    std::thread::sleep(CORRECTION_PAUSE);
                }
                _ => return Err(Unmanaged::Unreadable),
            }
        }
    }

    /// Makes the process of a peer that is new: it has just started, or it was forked before
    /// anything was managed.
    fn newcomer(
        &mut self,
        uffd: Uffd,
        hello: Hello,
        beacon: VirtPage,
        pid: u32,
    ) -> Result<Arc<Process>, Unmanaged> {
        let features = Features::EVENTS.with(Features::THREAD_ID);
        uffd.api(features).map_err(Unmanaged::NoForkEvents)?;
        self.shared.cpu_plan.pin.restarted(pid);
        // The process is known: it called exec, and its old address space is gone.
        if let Some(old) = self.shared.processes.of_pid(pid) {
            self.part_with(&old);
        }
        // Relatives that outlived the first of their family still have its number.
        let is_family = |space| self.shared.processes.is_family(space);
        let space = (self.shared.books.engine().layout()).new_space(PageSize::Base, is_family)?;
        // It was forked before anything was managed, so no event announced it.
        let family = match hello.kind {
            KIND_FORK => self.family_of(pid),
            _ => None,
        };
        let row = self.shared.books.row(space);
        row.put_fd(Fds::Uffd, Some(uffd.as_fd()));
        let memory = Arc::new(Anonymous::new(uffd));
        let process = Process::new(space, memory, beacon, None, family, row);
        Ok(Arc::new(process))
    }

    /// The family of the parent of `pid`, if that is known.
    fn family_of(&self, pid: u32) -> Option<SpaceId> {
        let parent = procfs::status_number(pid, "PPid")?;
        let of = self.shared.processes.of_pid(parent as u32)?;
        Some(of.relatives.family)
    }

    /// Cost: three system calls for each ancestor up to the first whose handshake is done.
    fn is_descendant(&self, pid: u32) -> bool {
        descends(pid, self.launch.keeper, |at| {
            // A number is not given to another process while the one that had it lives.
            let known = (at != pid).then(|| self.shared.processes.of_pid(at));
            let known = known.flatten().filter(|of| of.has_running_identity());
            known.is_some_and(|of| of.is_alive())
        })
    }

    /// Watches the process for new mappings from now on, unless it inherits its parent's watch. If
    /// the kernel refuses that, checks find the mappings.
    pub(super) fn watch(&mut self, process: &Process) {
        let Some(pid) = process.pid() else { return };
        let watched = lock(&self.watch).as_mut().map(|of| of.watch(pid));
        if !matches!(watched, Some(Ok(()))) {
            self.checks.quiet.is_blind();
        }
        if let Some(Err(error)) = watched
            && (error.kind() == io::ErrorKind::QuotaExceeded || is_out_of_descriptors(&error))
        {
            self.shared.gauges.shortages.no_descriptor();
        }
    }
}

/// Registers a holding area.
fn begin_holding(uffd: &Uffd, area: VirtRange) -> Result<(), UffdError> {
    // Faults in the holding area are not answered. So no place in it may be empty while no
    // command is carried out. A program that reads or locks all its mappings would wait there
    // for ever, or with `Features::SIGBUS` be ended. Guest memory may be registered with it, too.
    uffd.api(Features::THREAD_ID)?;
    uffd.register(area, RegisterMode::MISSING)
}

/// Whether process `pid` descends from `keeper`, or from one that `is_known`.
pub(super) fn descends(pid: u32, keeper: u32, is_known: impl Fn(u32) -> bool) -> bool {
    let mut at = pid;
    for _ in 0..ANCESTORS_MAX {
        if at == keeper || is_known(at) {
            return true;
        }
        match procfs::status_number(at, "PPid") {
            // In a pid namespace of its own, the keeper may be process 1.
            Some(parent) if parent > 0 => at = parent as u32,
            _ => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_descriptor_is_counted_as_one() {
        let short = || io::Error::from(rustix::io::Errno::MFILE);
        assert!(Unmanaged::from(short()).is_for_want_of_descriptors());
        assert!(Unmanaged::from(ProofError::from(short())).is_for_want_of_descriptors());
        let denied = io::Error::from(rustix::io::Errno::PERM);
        assert!(!Unmanaged::from(denied).is_for_want_of_descriptors());
        assert!(!Unmanaged::from(ProofError::OtherProcess).is_for_want_of_descriptors());
        assert!(!Unmanaged::UnknownShim.is_for_want_of_descriptors());
    }

    #[test]
    fn no_connection_is_accepted_while_all_handshakes_that_may_be_are_open() {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").expect("it is there"));
        let mut greetings = Greetings::new(UffdSource::Call(null()));
        for _ in 0..GREETINGS_MAX {
            assert_eq!(greetings.listens(), PollFlags::IN);
            greetings.open.push(Greeting {
                socket: null(),
                uid: 0,
                pid: 1,
                is_below: false,
                is_outside: false,
                pidfd: PidFd::from(null()),
                hello: None,
                until: Instant::now() + HANDSHAKE,
            });
        }
        assert_eq!(greetings.listens(), PollFlags::empty());
        let due = greetings.due().expect("the first of them ends");
        assert!(due <= HANDSHAKE, "{due:?}");
        greetings.open.pop();
        assert_eq!(greetings.listens(), PollFlags::IN);
    }
}
