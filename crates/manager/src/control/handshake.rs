//! Handshakes: a shim announces its process, the manager finds out who that is and takes it over.
//!
//! Who connects is asked of the kernel, never of the message: whether it descends from the keeper,
//! by pidfd. Anybody may connect where the keeper is root, so whoever else comes is let go without
//! a word, and when many do, they are heard slowly. A peer that says nothing is waited for beside
//! everything else (`greetings`), not instead of it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use undercroft_base::{PAGE_BYTES, SpaceId, VirtPage, VirtRange};
use undercroft_sys::fdpass;
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::maps::Maps;
use undercroft_sys::memory::ProcessMemory;
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::PidFd;
use undercroft_sys::procfs::{self, Statm};
use undercroft_sys::uffd::{Features, RegisterMode, Uffd};
use undercroft_wire::parse::{Hello, Ready, answer};
use undercroft_wire::protocol::{KIND_FORK, STAGING_PAGES};

use super::Control;
use crate::gauges::scale::is_out_of_descriptors;
use crate::space::agent::{Agent, Proof};
use crate::space::anonymous::Anonymous;
use crate::space::command::Commands;
use crate::space::discover;
use crate::space::process::{Identity, Process};
use crate::sync::lock;

/// Longest a handshake may take.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(2);

/// How long a process that is being ended may take after its descriptors are closed.
const DYING: Duration = Duration::from_millis(20);

/// Handshakes in progress at once, of all users and of one.
const GREETINGS_MAX: usize = 64;
const GREETINGS_OF_ONE: usize = 48;

/// Strangers within [`STRANGERS_TIME`] before the next are heard one at a time, so long apart.
const STRANGERS_MAX: u32 = 64;
const STRANGERS_TIME: Duration = Duration::from_secs(1);
const STRANGERS_PACE: Duration = Duration::from_millis(5);

/// Ancestors looked at.
const ANCESTORS_MAX: usize = 256;

/// Messages about processes that could not be managed.
const COMPLAINTS_MAX: u32 = 20;

/// Who is in the middle of a handshake.
#[derive(Default)]
pub(super) struct Greetings {
    open: Vec<Greeting>,
    /// Nobody is let in until then.
    deaf_until: Option<Instant>,
    strangers: u32,
    strangers_since: Option<Instant>,
    complaints: u32,
}

struct Greeting {
    socket: OwnedFd,
    uid: u32,
    pid: u32,
    pidfd: PidFd,
    /// What it said first, and the command page that it was given.
    hello: Option<(Hello, SharedMemory)>,
    until: Instant,
}

impl Greetings {
    /// What the listener is to be asked for now.
    pub fn listens(&self) -> PollFlags {
        let deaf = self.deaf_until.is_some_and(|until| until > Instant::now());
        if deaf || self.open.len() >= GREETINGS_MAX {
            PollFlags::empty()
        } else {
            PollFlags::IN
        }
    }

    /// Their sockets, in order.
    pub fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        self.open.iter().map(|greeting| &greeting.socket)
    }

    /// When something is due without a message: somebody's time is up, or the listener's turn.
    pub fn due(&self) -> Option<Duration> {
        let now = Instant::now();
        let ends = self.open.iter().map(|greeting| greeting.until);
        let deaf = self.deaf_until.filter(|until| *until > now);
        let next = ends.chain(deaf).min()?;
        Some(next.saturating_duration_since(now))
    }

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
    /// Lets in whoever has connected, if it is the program's.
    pub(super) fn welcome(&mut self) {
        use rustix::net::SocketFlags;
        self.greetings.deaf_until = None;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match rustix::net::accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            // Out of descriptors or memory: the peer stays in the queue, and asking again at once
            // would do nothing else.
            Err(_) => {
                self.greetings.deaf_until = Some(Instant::now() + STRANGERS_PACE);
                return self.shared.gauges.shortages.no_descriptor();
            }
        };
        let of_one = |uid| {
            let open = self.greetings.open.iter();
            open.filter(|greeting| greeting.uid == uid).count()
        };
        let Some((uid, pid, pidfd)) = self.who_is(&socket) else {
            return self.greetings.stranger();
        };
        if of_one(uid) >= GREETINGS_OF_ONE {
            return;
        }
        match pidfd.numbers() {
            Ok(numbers) if numbers.len() == 1 => {}
            _ => {
                let _ = fdpass::send(socket.as_fd(), &answer(true), &[]);
                return self.complain(&pidfd, &io::Error::other(
                    "it is in a pid namespace of its own, where its threads have other numbers than here",
                ));
            }
        }
        self.greetings.open.push(Greeting {
            socket,
            uid,
            pid,
            pidfd,
            hello: None,
            until: Instant::now() + HANDSHAKE,
        });
    }

    /// The peer, if it descends from the keeper: of the same user, or of any where that is root,
    /// who can become any.
    fn who_is(&self, socket: &OwnedFd) -> Option<(u32, u32, PidFd)> {
        let own = rustix::process::getuid();
        let peer = fdpass::peer(socket).ok()?;
        if peer.uid != own.as_raw() && !own.is_root() {
            return None;
        }
        let pid = *peer.pidfd.numbers().ok()?.first()?;
        // While it lives its number is its own, and so are its ancestors.
        let descends = self.is_descendant(pid) && !peer.pidfd.has_exited();
        descends.then_some((peer.uid, pid, peer.pidfd))
    }

    /// Hears those whose turn it is; `ready`: bit for each of [`Greetings::sockets`].
    pub(super) fn hear(&mut self, ready: &[bool]) {
        let now = Instant::now();
        let all = std::mem::take(&mut self.greetings.open);
        for (at, mut greeting) in all.into_iter().enumerate() {
            if !ready.get(at).copied().unwrap_or(false) {
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

    fn complain(&mut self, process: &PidFd, error: &io::Error) {
        if is_out_of_descriptors(error) {
            self.shared.gauges.shortages.no_descriptor();
        }
        // One that ends in the middle of it needs no manager.
        if self.greetings.complaints >= COMPLAINTS_MAX || process.wait_exit(DYING) {
            return;
        }
        self.greetings.complaints += 1;
        crate::log::say(&format!(
            "a process of the program could not be managed: {error}"
        ));
    }

    /// One message of a peer; true when that was the last.
    fn hear_one(&mut self, greeting: &mut Greeting) -> io::Result<bool> {
        let mut bytes = [0u8; 64];
        let (got, fds) = match fdpass::receive(greeting.socket.as_fd(), &mut bytes) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        if got == 0 {
            return Ok(true); // it is gone
        }
        match greeting.hello.take() {
            None => {
                let hello = Hello::parse(&bytes[..got]);
                let hello = hello.ok_or_else(|| io::Error::other("unknown shim"))?;
                let page = SharedMemory::create_sealed("uc-command", PAGE_BYTES)?;
                let given = [self.device.as_fd(), page.as_fd()];
                fdpass::send(greeting.socket.as_fd(), &answer(false), &given)?;
                greeting.hello = Some((hello, page));
                Ok(false)
            }
            Some((hello, page)) => {
                let ready = Ready::parse(&bytes[..got]);
                let ready = ready.ok_or_else(|| io::Error::other("the shim gave up"))?;
                self.take_over(greeting, hello, page, ready, fds)?;
                Ok(true)
            }
        }
    }

    /// The process has what it needs, and its manager has what it sent: from here on it is managed.
    fn take_over(
        &mut self,
        greeting: &Greeting,
        hello: Hello,
        page: SharedMemory,
        ready: Ready,
        fds: Vec<OwnedFd>,
    ) -> io::Result<()> {
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
            ready.staging + (STAGING_PAGES * PAGE_BYTES) as u64,
            ready.staging + 2 * (STAGING_PAGES * PAGE_BYTES) as u64,
        );
        let holding = holding_area.start.address();
        // Nobody answers faults there, so no place may be empty while no order is carried out: a
        // program that reads or locks all its mappings would wait for ever, or with
        // `Features::SIGBUS` be ended.
        holding_uffd.api(Features::default())?;
        holding_uffd.register(holding_area, RegisterMode::MISSING)?;
        let memory = ProcessMemory::open(pid)?;
        let (pagemap, maps) = (Pagemap::open(pid)?, Maps::open(pid)?);
        let statm = Statm::open(pid)?;
        let proof = Proof::install(pid, &memory, &holding_uffd, holding)?;
        let pidfd = greeting.pidfd.as_fd().try_clone_to_owned()?;
        let process = match own_uffd {
            Some(uffd) => self.newcomer(uffd, hello, beacon, pid)?,
            None => self.fork_child(hello.nonce, beacon, pid)?,
        };
        let staging_area = VirtRange::of_addresses(ready.staging, holding);
        process
            .memory
            .register(staging_area, RegisterMode::MISSING)?;
        let _ = process.identity.set(Identity {
            pid,
            pidfd: pidfd.into(),
            pagemap,
            maps,
        });
        let private = VirtRange::of_addresses(ready.staging, ready.private_end);
        let commands = Commands::new(page);
        let agent = Agent::new(commands, holding_uffd, holding, private, memory, proof);
        let _ = process.agent.set(agent);
        self.shared.add_process(&process);
        self.statm.insert(process.space, statm);
        self.hear_end(&process)?;
        crate::space::layout::place_agents(&self.shared.processes, &self.shared.placement);
        if self.managing {
            self.watch(&process);
            discover::manage(&self.shared, &process, &mut self.maps);
        } else if hello.kind == KIND_FORK {
            // A fork doubles what can be written to: it is looked at while the child waits.
            self.check();
        }
        if hello.kind == KIND_FORK && process.parent.is_none() {
            crate::space::cow::protect(&self.shared.books, &process, pid); // its one thread waits for the answer
        }
        self.check_soon();
        let given = [process.memory.as_fd()];
        fdpass::send(greeting.socket.as_fd(), &answer(false), &given)
    }

    /// A fork child that the kernel told of; it names its space by what it alone was told.
    fn fork_child(&self, nonce: u64, beacon: VirtPage, pid: u32) -> io::Result<Arc<Process>> {
        let known = self.shared.processes.all();
        let mut nameless = known.iter().filter(|p| p.identity.get().is_none());
        let process = nameless.find(|p| p.beacon == beacon && p.redeem(nonce, pid));
        let process =
            process.ok_or_else(|| io::Error::other("a fork child named no space of its own"))?;
        Ok(process.clone())
    }

    /// A process that nobody knows yet: it has just started, or was forked before there was
    /// anything to manage.
    fn newcomer(
        &mut self,
        uffd: Uffd,
        hello: Hello,
        beacon: VirtPage,
        pid: u32,
    ) -> io::Result<Arc<Process>> {
        let features = Features::EVENTS.with(Features::THREAD_ID);
        uffd.api(features).map_err(|error| {
            io::Error::other(format!(
                "userfaultfd fork events were refused ({error}); run as root or with CAP_SYS_PTRACE"
            ))
        })?;
        self.shared.placement.pin.restarted(pid);
        // The same process with a new address space: it called exec, and the old one is gone.
        if let Some(old) = self.shared.processes.of_pid(pid) {
            self.part_with(&old);
        }
        let space = self.shared.books.engine().layout().add_space();
        // Forked before there was anything to manage: no event told of it.
        let family = match hello.kind {
            KIND_FORK => self.family_of(pid),
            _ => None,
        };
        let memory = Arc::new(Anonymous::new(uffd));
        Ok(Arc::new(Process::new(space, memory, beacon, None, family)))
    }

    /// The family of the process that forked `pid`, if it is known.
    fn family_of(&self, pid: u32) -> Option<SpaceId> {
        let parent = procfs::status_number(pid, "PPid")?;
        let of = self.shared.processes.of_pid(parent as u32)?;
        Some(of.family)
    }

    fn is_descendant(&self, pid: u32) -> bool {
        let mut at = pid;
        for _ in 0..ANCESTORS_MAX {
            if at == self.launch.keeper {
                return true;
            }
            match procfs::status_number(at, "PPid") {
                Some(parent) if parent > 1 => at = parent as u32,
                _ => return false,
            }
        }
        false
    }

    /// Hears of the process's new mappings from now on, unless it does by inheritance. Where that
    /// is refused they are found by looking.
    pub(super) fn watch(&self, process: &Process) {
        if let (Some(sideband), Some(pid)) = (lock(&self.watch).as_mut(), process.pid())
            && let Err(error) = sideband.watch(pid)
            && (error.kind() == io::ErrorKind::QuotaExceeded || is_out_of_descriptors(&error))
        {
            self.shared.gauges.shortages.no_descriptor();
        }
    }
}
