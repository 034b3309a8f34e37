//! The daemon's grant to this run: asks for it, holds it for the run's life, and claims it
//! again from the next daemon when one dies.
//!
//! A thread of its own (`uc-grant`) answers the daemon. It asks the manager over the run's status
//! socket, as `undercroft status` and `undercroft set` do. Without a daemon the run goes on with
//! what it has.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use undercroft_base::Bytes;
use undercroft_proto::grant::{
    ADMISSION_MAX, COMMAND_BYTES_MAX, Claim, DaemonStatus, Figures, Grant, Hello, Lines, Refusal,
    SOCKET, StorageClaim, StorageFigures, ToDaemon, ToKeeper, UNKNOWN, VERSION, line,
};
use undercroft_proto::messages::{Answered, Ask, Word};
use undercroft_proto::options::{MOVES_MIN, PluginFile, RunOptions};
use undercroft_proto::report::{ShownCommand, command_line};
use undercroft_sys::fdpass::{self, FDS_MAX};
use undercroft_sys::sealed;
use undercroft_sys::signal::{Received, SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals, is_ignored};
use undercroft_tier::file::{Room, Taken};
use undercroft_tier::open::{OpenError, OpenTier};
use undercroft_tier::spec::TierSpec;

use super::place::bases;
use super::status;
use super::voice::Voice;

/// How long the daemon may take to answer a claim.
const ANSWER: Duration = Duration::from_secs(20);

/// How long it may take to answer a new run: other clients make room first.
const ADMISSION: Duration = Duration::from_secs(ADMISSION_MAX.as_secs() + 10);

/// Signals by which a user ends a run that waits.
pub(super) const STOPPING: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// The user is told why, if it takes longer than this.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// Time between two questions to a daemon that ended before it answered: it may begin anew.
const AGAIN: Duration = Duration::from_millis(50);

/// How long such daemons are asked. One whose configuration is changed again and again begins anew
/// as often.
const AGAIN_FOR: Duration = Duration::from_secs(60);

/// How long a message may take to be sent, and the manager to answer.
const SENDING: Duration = Duration::from_secs(5);

/// Pauses between two attempts to find a daemon: the first, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Why the daemon gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum HeldError {
    /// There is none.
    #[error(
        "no daemon answers{0}\n  fix: start `undercroft daemon --config FILE`, or leave --daemon out"
    )]
    Away(String),
    /// The daemon ended, or began anew, before it answered.
    #[error("the daemon ended before it answered\n  fix: start it again, or leave --daemon out")]
    Ended,
    /// The daemon refuses.
    #[error("the daemon refuses this run: {}{}", .0.why, could(.0))]
    Refused(Refusal),
    /// A grant that cannot be used.
    #[error("the daemon's grant cannot be used: {0}")]
    Unusable(String),
    /// This signal came meanwhile.
    #[error("ended by signal {0} while the daemon was asked")]
    Stopped(i32),
}

/// The figure of a refusal.
fn could(refusal: &Refusal) -> String {
    let figure = refusal.could.map(Bytes);
    figure.map_or(String::new(), |bytes| {
        format!(" ({bytes} could be granted)")
    })
}

/// The grant, and the connection by which it is held.
pub(super) struct Held {
    stream: UnixStream,
    lines: Lines,
    hello: Hello,
    grant: Grant,
    /// Emulated devices that other clients of the daemon use, too: of which tier, and the memory of
    /// each.
    devices: Vec<(u8, OwnedFd)>,
    /// The policy file of its class.
    policy: Option<PluginFile>,
    /// Tiers that have a budget, in their order.
    stores: Vec<Store>,
    /// Eventfd that they ring when half of what a quota left is full.
    bell: Option<OwnedFd>,
}

/// A tier of which the daemon grants storage.
struct Store {
    /// Its number, counted from 0.
    tier: usize,
    /// The room by which its quota is changed; `None`: it has what was granted, as long as it is
    /// there.
    room: Option<Room>,
    granted: u64,
}

impl Store {
    fn figures(&self) -> StorageFigures {
        match &self.room {
            Some(room) => figures(room.read()),
            None => StorageFigures {
                quota: self.granted,
                held: self.granted,
                used: self.granted,
            },
        }
    }
}

fn figures(taken: Taken) -> StorageFigures {
    StorageFigures {
        quota: taken.quota.0,
        held: taken.held.0,
        used: taken.used.0,
    }
}

impl Held {
    /// Asks the daemon for a grant of this class. A user who has to wait for it is told why.
    pub(super) fn ask(
        class: &str,
        options: &RunOptions,
        waiting: &mut Waiting<'_>,
    ) -> Result<Held, HeldError> {
        let kept = ShownCommand::of(&options.command);
        let mut command = command_line(&kept.words, kept.arguments);
        let end = (0..=COMMAND_BYTES_MAX.min(command.len()))
            .rev()
            .find(|at| command.is_char_boundary(*at));
        command.truncate(end.unwrap_or(0));
        let limit = options.client.memory_max;
        let hello = Hello {
            version: VERSION,
            class: class.to_owned(),
            command,
            memory_max: (limit != Bytes(u64::MAX)).then_some(limit.0),
            claim: None,
        };
        let until = Instant::now() + AGAIN_FOR;
        let mut begins_anew = false;
        loop {
            match Held::greet(hello.clone(), &[], Some(waiting)) {
                Err(HeldError::Ended) if Instant::now() < until => begins_anew = true,
                Err(HeldError::Away(_)) if begins_anew && Instant::now() < until => {}
                answer => return answer,
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// * `devices`: those of a claim.
    /// * `waiting`: how a new run waits for the answer.
    fn greet(
        hello: Hello,
        devices: &[(u8, OwnedFd)],
        waiting: Option<&mut Waiting<'_>>,
    ) -> Result<Held, HeldError> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let ended = |error: io::Error| match error.kind() {
            BrokenPipe | ConnectionReset | UnexpectedEof => HeldError::Ended,
            _ => HeldError::Away(format!(": {error}")),
        };
        let stream = connect().ok_or_else(|| HeldError::Away(String::new()))?;
        let mut lines = Lines::default();
        let memories: Vec<_> = devices.iter().map(|(_, memory)| memory.as_fd()).collect();
        let said = line(&ToDaemon::Hello(hello.clone()));
        fdpass::send(stream.as_fd(), &said, &memories).map_err(ended)?;
        let mut deadline = Instant::now() + ANSWER;
        if let Some(waiting) = waiting {
            deadline = Instant::now() + ADMISSION;
            waiting.wait(&stream, deadline)?;
        }
        match receive(&stream, &mut lines, Some(deadline)).map_err(ended)? {
            (ToKeeper::Granted(grant), mut memories) => {
                let file = grant.policy.clone();
                let policy = file
                    .map(|file| came_along(file, memories.pop()))
                    .transpose()?;
                if grant.devices.len() != memories.len() {
                    let why = "a device does not come along".to_owned();
                    return Err(HeldError::Unusable(why));
                }
                let devices = grant.devices.iter().copied().zip(memories).collect();
                Ok(Held {
                    stream,
                    lines,
                    hello,
                    grant,
                    devices,
                    policy,
                    stores: Vec::new(),
                    bell: None,
                })
            }
            (ToKeeper::Refused(refusal), _) => Err(HeldError::Refused(refusal)),
            _ => Err(HeldError::Unusable("its answer is no grant".to_owned())),
        }
    }

    /// The options of the run with what was granted. The limit is the largest that it may ever
    /// have, because the size of a pool's memory is chosen by it. [`Held::keep`] sets the one in
    /// force.
    pub(super) fn options(&self, options: &RunOptions) -> Result<RunOptions, HeldError> {
        let mut granted = options.clone();
        let client = &mut granted.client;
        let wrong = |what: &str, why: String| HeldError::Unusable(format!("{what}: {why}"));
        client.memory_max = Bytes(self.grant.memory_most);
        if !self.grant.tiers.is_empty() {
            let tiers = self.grant.tiers.iter().map(|spec| {
                let parsed = spec.parse();
                parsed.map_err(|why| wrong(spec, format!("{why}")))
            });
            client.tiers = tiers.collect::<Result<_, _>>()?;
        }
        if let (None, Some(bound)) = (&client.latency, &self.grant.latency) {
            client.latency = Some(
                bound
                    .parse()
                    .map_err(|why| wrong(bound, format!("{why}")))?,
            );
        }
        if client.plugin.is_none() {
            client.plugin.clone_from(&self.policy);
        }
        client.class = Some(self.grant.class.clone());
        if let Some(cpus) = &self.grant.cpus {
            let parsed = cpus
                .parse()
                .map_err(|why| wrong("cpus", format!("{why}")))?;
            client.rights.cpus = Some(parsed);
        }
        client.rights.realtime = self.grant.realtime;
        if let Some(moves) = self.grant.moves.map(Bytes) {
            if moves < MOVES_MIN {
                return Err(wrong("moves", format!("{moves} a second is too little")));
            }
            client.rights.moves = moves;
        }
        Ok(granted)
    }

    /// Has the tiers keep to what was granted of them, and use the emulated devices that the
    /// daemon's clients share.
    ///
    /// Errors: one of these is no such device, or no memory.
    pub(super) fn fit(
        &mut self,
        specs: &[TierSpec],
        tiers: &mut [OpenTier],
    ) -> Result<(), OpenError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).map_err(io::Error::from)?;
        let all = specs.iter().zip(tiers.iter_mut()).enumerate();
        let budgets = all.filter(|(_, (spec, _))| spec.path.is_some());
        for ((tier, (_, open)), granted) in budgets.zip(&self.grant.storage) {
            let (room, granted) = (open.room()?, *granted);
            if let Some(room) = &room {
                room.begin(Bytes(granted));
                open.bell = Some(bell.try_clone()?);
            }
            self.stores.push(Store {
                tier,
                room,
                granted,
            });
        }
        self.bell = Some(bell);
        for (at, memory) in &self.devices {
            let at = usize::from(*at);
            if let (Some(spec), Some(tier)) = (specs.get(at), tiers.get_mut(at)) {
                tier.share_device(spec, memory.try_clone()?)?;
            }
        }
        Ok(())
    }

    /// Has the manager keep to the grant, and holds it until this process ends. Call it after
    /// signals are blocked: the thread inherits the mask.
    ///
    /// * `socket`: the run's status socket.
    pub(super) fn keep(mut self, socket: PathBuf) -> Result<(), HeldError> {
        match status::ask_at(&socket, Ask::MemoryMax(self.grant.memory)) {
            Some(Answered::Yes) => {}
            Some(Answered::Refused(why)) => return Err(HeldError::Unusable(why)),
            None => {
                return Err(HeldError::Unusable(
                    "the manager does not answer".to_owned(),
                ));
            }
        }
        let hold = move || {
            loop {
                // It ends when the daemon goes, or says what it must not say.
                let _ = self.serve(&socket);
                self.find_again();
            }
        };
        let thread = std::thread::Builder::new().name("uc-grant".into());
        match thread.spawn(hold) {
            Ok(_) => Ok(()),
            Err(error) => Err(HeldError::Unusable(error.to_string())),
        }
    }

    /// Answers the daemon until the connection ends.
    fn serve(&mut self, socket: &Path) -> io::Result<()> {
        loop {
            if self.is_rung()? {
                send(&self.stream, &ToDaemon::Fills(self.storage()))?;
                continue;
            }
            let answer = match receive(&self.stream, &mut self.lines, None)?.0 {
                ToKeeper::Tell => ToDaemon::Figures {
                    client: self.figures(socket),
                    storage: self.storage(),
                },
                ToKeeper::Keep { memory } => self.change(socket, memory),
                ToKeeper::Quotas(quotas) => self.set_quotas(&quotas),
                ToKeeper::Turn(turn) => {
                    let _ = status::pass_on(socket, &Word::Turn(turn));
                    continue;
                }
                ToKeeper::Granted(_) | ToKeeper::Status(_) => continue,
                ToKeeper::Refused(_) => return Err(io::ErrorKind::ConnectionRefused.into()),
            };
            send(&self.stream, &answer)?;
        }
    }

    /// Waits until the daemon says something or a tier rings. Whether one does.
    fn is_rung(&self) -> io::Result<bool> {
        let Some(bell) = &self.bell else {
            return Ok(false);
        };
        if self.lines.has_line() {
            return Ok(false);
        }
        let mut fds = [
            PollFd::new(&self.stream, PollFlags::IN),
            PollFd::new(bell, PollFlags::IN),
        ];
        loop {
            match poll(&mut fds, None) {
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(false),
                // It may ring again from now on.
                Ok(_) => return Ok(rustix::io::read(bell, &mut [0; 8]).is_ok()),
            }
        }
    }

    /// Its room in each tier that has a budget.
    fn storage(&self) -> Vec<StorageFigures> {
        self.stores.iter().map(Store::figures).collect()
    }

    /// Figures for the daemon.
    fn figures(&self, socket: &Path) -> Figures {
        let told = status::pass_on(socket, &Word::Figures).flatten();
        told.unwrap_or_else(|| Figures {
            // It is busy. It may not have come down to its limit.
            dram: UNKNOWN,
            limit: Some(self.grant.memory),
            ..Figures::default()
        })
    }

    fn change(&mut self, socket: &Path, memory: u64) -> ToDaemon {
        let refused = match status::ask_at(socket, Ask::MemoryMax(memory)) {
            Some(Answered::Yes) => {
                self.grant.memory = memory;
                None
            }
            Some(Answered::Refused(why)) => Some(why),
            None => {
                // It may be in force. A claim has the larger of both.
                self.grant.memory = self.grant.memory.max(memory);
                Some("the manager does not answer".to_owned())
            }
        };
        ToDaemon::Kept { memory, refused }
    }

    /// Sets quotas. It needs no manager: one that takes over keeps to them, too.
    fn set_quotas(&self, quotas: &[u64]) -> ToDaemon {
        let set = |(store, quota): (&Store, &u64)| match &store.room {
            Some(room) => figures(room.set(Bytes(*quota))),
            None => store.figures(),
        };
        ToDaemon::Quotas(self.stores.iter().zip(quotas).map(set).collect())
    }

    /// Looks for a daemon until one takes the claim.
    fn find_again(&mut self) {
        let (mut pause, longest) = PAUSE;
        loop {
            std::thread::sleep(pause);
            pause = (2 * pause).min(longest);
            let claim = Claim {
                memory: self.grant.memory,
                storage: self.stores.iter().map(|it| self.claim_of(it)).collect(),
                devices: self.shared_tiers(),
            };
            let hello = Hello {
                class: self.grant.class.clone(),
                claim: Some(claim),
                ..self.hello.clone()
            };
            if let Ok(found) = Held::greet(hello, &self.devices, None) {
                *self = Held {
                    grant: Grant {
                        tiers: std::mem::take(&mut self.grant.tiers),
                        ..found.grant
                    },
                    devices: std::mem::take(&mut self.devices),
                    stores: std::mem::take(&mut self.stores),
                    bell: self.bell.take(),
                    ..found
                };
                return;
            }
        }
    }

    fn claim_of(&self, store: &Store) -> StorageClaim {
        StorageClaim {
            tier: self
                .grant
                .tiers
                .get(store.tier)
                .cloned()
                .unwrap_or_default(),
            figures: store.figures(),
        }
    }

    /// Descriptions of the tiers whose devices it shares.
    fn shared_tiers(&self) -> Vec<String> {
        let tiers = &self.grant.tiers;
        let of = |at: &u8| tiers.get(usize::from(*at)).cloned();
        let devices = self.devices.iter();
        devices.map(|(at, _)| of(at).unwrap_or_default()).collect()
    }
}

/// The policy file of a grant, and its bytes.
fn came_along(file: String, memfd: Option<OwnedFd>) -> Result<PluginFile, HeldError> {
    let unusable = |why: &dyn Display| HeldError::Unusable(format!("{file}: {why}"));
    let memfd = memfd.ok_or_else(|| unusable(&"it does not come along"))?;
    let module = sealed::read(memfd, PluginFile::BYTES_MAX).map_err(|why| unusable(&why))?;
    Ok(PluginFile {
        file,
        module,
        parameters: BTreeMap::new(),
    })
}

/// The daemon's socket in the first directory of this user that has one that answers.
fn connect() -> Option<UnixStream> {
    let sockets = bases().into_iter().map(|base| base.join(SOCKET));
    sockets
        .into_iter()
        .find_map(|socket| status::call(&socket, SENDING))
}

fn send(mut stream: &UnixStream, message: &ToDaemon) -> io::Result<()> {
    stream.write_all(&line(message))
}

/// How a new run waits for its grant: the user is told why, and may end it.
pub(super) struct Waiting<'a> {
    pub signals: &'a Signals,
    /// `None`: the user wants to hear nothing.
    pub voice: Option<&'a Voice>,
    /// Signals that came meanwhile and end nothing.
    pub early: Vec<Received>,
}

impl Waiting<'_> {
    /// Waits until there is something to read, or `deadline` has passed. Errors: a signal ends the
    /// run.
    fn wait(&mut self, stream: &UnixStream, deadline: Instant) -> Result<(), HeldError> {
        let mut told = Instant::now() + TOLD_AFTER;
        loop {
            let left = told.min(deadline).saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            let mut polled = [
                PollFd::new(stream, PollFlags::IN),
                PollFd::new(self.signals, PollFlags::IN),
            ];
            if poll(&mut polled, left.as_ref()) == Err(Errno::INTR) {
                continue;
            }
            let is_readable = !polled[0].revents().is_empty();
            self.take_signals()?;
            let now = Instant::now();
            if is_readable || now >= deadline {
                return Ok(());
            }
            if now >= told {
                told = deadline;
                self.tell();
            }
        }
    }

    fn take_signals(&mut self) -> Result<(), HeldError> {
        while let Some(received) = self.signals.next() {
            let number = received.number;
            if STOPPING.contains(&number) && !is_ignored(number) {
                return Err(HeldError::Stopped(number));
            }
            self.early.push(received);
        }
        Ok(())
    }

    fn tell(&self) {
        if let Some(voice) = self.voice {
            let most = ADMISSION.as_secs();
            voice.say(&format!(
                "waiting for memory: the daemon has other runs give some back ({most} s at most)"
            ));
        }
    }
}

/// The next message, and the descriptors that came until then. Errors: the connection ended,
/// `deadline` has passed, or it is no message.
fn receive(
    stream: &UnixStream,
    lines: &mut Lines,
    deadline: Option<Instant>,
) -> io::Result<(ToKeeper, Vec<OwnedFd>)> {
    let mut bytes = [0; 4096];
    let mut descriptors = Vec::new();
    loop {
        if let Some(line) = lines.next_line() {
            return Ok((serde_json::from_slice(&line)?, descriptors));
        }
        let left = deadline.map(|deadline| {
            // A timeout of zero means none.
            let left = deadline.saturating_duration_since(Instant::now());
            left.max(Duration::from_millis(1))
        });
        stream.set_read_timeout(left)?;
        let (got, more) = match fdpass::receive(stream.as_fd(), &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            got => got?,
        };
        descriptors.extend(more);
        descriptors.truncate(FDS_MAX);
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if lines.take(&bytes[..got]).is_err() {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Asks the daemon of this user for its status. `None`: there is none, or it does not answer.
pub fn daemon_status() -> Option<DaemonStatus> {
    let again = || {
        std::thread::sleep(AGAIN); // it may have begun anew just now
        ask_status()
    };
    ask_status().or_else(again)
}

fn ask_status() -> Option<DaemonStatus> {
    let stream = connect()?;
    send(&stream, &ToDaemon::Status).ok()?;
    let deadline = Instant::now() + SENDING;
    match receive(&stream, &mut Lines::default(), Some(deadline))
        .ok()?
        .0
    {
        ToKeeper::Status(status) => Some(*status),
        _ => None,
    }
}
