//! The door: listens where monitors of virtual machines hand over the memory that they restore, and
//! has the run's manager take it. It is the program of the run (`vm --socket`), so what a monitor
//! says is parsed outside the manager. If it ends, the run ends, and so do its machines.
//!
//! A monitor connects, and sends a message and its userfaultfd. The kernel tells which process it
//! is. Then the door asks the manager, and keeps the userfaultfd until that has it: a manager that
//! dies meanwhile leaves the question to the next one.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use undercroft_base::Bytes;
use undercroft_keeper::SOCKET_VARIABLE;
use undercroft_proto::handover::{self, Form, MESSAGE_MAX, Order, Refused, Taken};
use undercroft_sys::fdpass;
use undercroft_sys::inherit;
use undercroft_sys::pagemap::Pagemap;
use undercroft_sys::process::PidFd;
use undercroft_sys::signal::{SIGHUP, SIGINT, SIGTERM, Signals};
use undercroft_terminal::{Failure, LogFormat, log_message, status};

use crate::args::DoorArgs;

/// Monitors that are heard at once. More wait in the kernel's queue.
const CALLERS_MAX: usize = 64;

/// How long a monitor may take to say what it has to say.
const PATIENCE: Duration = Duration::from_secs(5);

/// Pause before the manager is asked again: the next one takes over.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Monitors that were refused and live on. Further ones are ended.
const KEPT_MAX: usize = 64;

/// Most refusals that are told.
const TOLD_MAX: u32 = 1000;

/// Listens at `path`. A socket that no process listens at any more is replaced.
///
/// Errors: as printed.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, Failure> {
    let refuse = |why: String, fix: &str| {
        let what = format!("cannot listen at {}", path.display());
        Failure::new(status::RUN_FAILED, what, why, fix)
    };
    if let Ok(there) = fs::symlink_metadata(path) {
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        let left = there.file_type().is_socket()
            && UnixStream::connect(path).is_err_and(|error| refused(&error));
        if !left {
            let why = "something is there, and may be in use".to_owned();
            return Err(refuse(why, "choose another path, or remove what is there"));
        }
        let removed = fs::remove_file(path);
        removed.map_err(|error| refuse(error.to_string(), "remove it, or choose another path"))?;
    }
    let listening = UnixListener::bind(path).and_then(|listener| {
        listener.set_nonblocking(true)?;
        rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty())?;
        Ok(listener)
    });
    listening.map_err(|error| {
        let fix = "choose a path of at most 107 bytes, in a folder that exists and may be written";
        refuse(error.to_string(), fix)
    })
}

/// A monitor that has connected.
struct Caller {
    socket: OwnedFd,
    pidfd: PidFd,
    pid: u32,
    /// Descriptors that have come: one when it has said all, its userfaultfd.
    fds: Vec<OwnedFd>,
    /// How it speaks, once it has begun.
    form: Option<Form>,
}

/// Outcome of a step with a caller.
enum Next {
    Waits(Stage),
    /// Connected, and left without a word.
    Gone,
    Served,
}

enum Stage {
    /// The monitor speaks, until this time at most.
    Speaks { text: Vec<u8>, until: Instant },
    /// The manager is to be asked, at this time.
    Asks { wish: Wish, at: Instant },
    /// The manager was asked by this socket.
    Asked { wish: Wish, manager: OwnedFd },
}

/// Everything that the manager needs.
struct Wish {
    order: Vec<u8>,
    pagemap: Pagemap,
    /// A manager was asked that may have died after it took the memory.
    again: bool,
}

/// Why a machine is not served. For the user.
#[derive(Debug, thiserror::Error)]
enum NotServed {
    #[error(transparent)]
    Said(#[from] Refused),
    #[error("it sent {0} descriptors; one is expected, its userfaultfd")]
    Descriptors(usize),
    #[error("it ended the connection before its message was whole")]
    Ended,
    #[error("its message was not whole after {} s", PATIENCE.as_secs())]
    Late,
    #[error("its memory cannot be looked at ({0}); run undercroft as root, or as its user")]
    Closed(io::Error),
    #[error("it has handed its memory over already, and that is served")]
    Twice,
    #[error("{0}")]
    ByManager(String),
    #[error("this run is about to end")]
    Leaves,
}

struct Door {
    /// `None`: no monitor may come any more.
    listener: Option<UnixListener>,
    bytes: Bytes,
    manager: SocketAddrUnix,
    callers: Vec<(Caller, Stage)>,
    /// The monitors whose memory is served.
    served: Vec<(u32, PidFd)>,
    /// Monitors that were refused, and what they sent: with the last copy of its userfaultfd
    /// closed, missing memory would be zeros.
    kept: Vec<(PidFd, Vec<OwnedFd>)>,
    log: LogFormat,
    told: u32,
}

/// The body of `undercroft door`.
pub(crate) fn serve(args: &DoorArgs) -> Result<u8, Failure> {
    let failed = |error: io::Error| {
        let what = "cannot listen for virtual machines";
        let fix = "doors are opened by `undercroft vm --socket`, not by hand";
        Failure::new(status::RUN_FAILED, what, error.to_string(), fix)
    };
    let signals = Signals::take().map_err(failed)?;
    let listener = inherit::copy_of(args.listener).map_err(failed)?;
    let path = std::env::var_os(SOCKET_VARIABLE).unwrap_or_default();
    let manager = SocketAddrUnix::new(Path::new(&path)).map_err(|error| failed(error.into()))?;
    let mut door = Door {
        listener: Some(listener.into()),
        bytes: Bytes(args.bytes),
        manager,
        callers: Vec::new(),
        served: Vec::new(),
        kept: Vec::new(),
        log: args.log.into(),
        told: 0,
    };
    while door.listener.is_some() || !door.served.is_empty() || !door.callers.is_empty() {
        let until = door.due();
        let ready = door.wait(&signals, until);
        door.served.retain(|(_, monitor)| !monitor.has_exited());
        door.kept.retain(|(monitor, _)| !monitor.has_exited());
        door.hear(&ready);
        if ready.first() == Some(&true) {
            door.welcome();
        }
        let leaves = std::iter::from_fn(|| signals.next())
            .filter(|received| [SIGHUP, SIGINT, SIGTERM].contains(&received.number))
            .count();
        for _ in 0..leaves {
            door.leave(&args.socket);
        }
    }
    let _ = fs::remove_file(&args.socket);
    for (monitor, _) in &door.kept {
        let _ = monitor.kill();
    }
    Ok(0)
}

impl Stage {
    /// The socket that says what comes next.
    fn heard<'a>(&'a self, caller: &'a Caller) -> Option<BorrowedFd<'a>> {
        match self {
            Stage::Speaks { .. } => Some(caller.socket.as_fd()),
            Stage::Asks { .. } => None,
            Stage::Asked { manager, .. } => Some(manager.as_fd()),
        }
    }

    /// When something is to be done, whatever is heard.
    fn due(&self) -> Option<Instant> {
        match self {
            Stage::Speaks { until, .. } => Some(*until),
            Stage::Asks { at, .. } => Some(*at),
            Stage::Asked { .. } => None,
        }
    }
}

impl Door {
    fn due(&self) -> Option<Duration> {
        let next = (self.callers.iter()).filter_map(|(_, stage)| stage.due());
        let next = next.min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Waits until something happens. Returns whether the listener has a connection, and each
    /// caller something to hear.
    fn wait(&self, signals: &Signals, until: Option<Duration>) -> Vec<bool> {
        let none = signals.as_fd();
        let mut fds = vec![PollFd::from_borrowed_fd(none, PollFlags::IN)];
        let has_room = self.callers.len() < CALLERS_MAX;
        fds.push(match self.listener.as_ref().filter(|_| has_room) {
            Some(listener) => PollFd::new(listener, PollFlags::IN),
            None => PollFd::from_borrowed_fd(none, PollFlags::empty()),
        });
        let callers = self.callers.iter();
        fds.extend(callers.map(|(caller, stage)| match stage.heard(caller) {
            Some(socket) => PollFd::from_borrowed_fd(socket, PollFlags::IN),
            None => PollFd::from_borrowed_fd(none, PollFlags::empty()),
        }));
        let monitors = self.served.iter();
        fds.extend(monitors.map(|monitor| PollFd::new(&monitor.1, PollFlags::IN)));
        let until = until.and_then(|time| rustix::fs::Timespec::try_from(time).ok());
        let _ = poll(&mut fds, until.as_ref());
        let heard = fds.iter().skip(1).take(1 + self.callers.len());
        heard.map(|fd| !fd.revents().is_empty()).collect()
    }

    /// Accepts a monitor.
    fn welcome(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(listener, flags) else {
            // It has gone. If this process has no descriptor, the next round tries again.
            return std::thread::sleep(Duration::from_millis(1));
        };
        let peer = fdpass::peer(&socket);
        let known = peer.and_then(|peer| Ok((peer.pidfd.numbers()?[0], peer.pidfd)));
        let Ok((pid, pidfd)) = known else { return };
        // One process keeps no other from being heard.
        if self.callers.iter().any(|(caller, _)| caller.pid == pid) {
            return self.tell(&format!(
                "process {pid} has connected a second time before its first message was whole; only \
                 the first is heard"
            ));
        }
        let caller = Caller {
            socket,
            pidfd,
            pid,
            fds: Vec::new(),
            form: None,
        };
        let speaks = Stage::Speaks {
            text: Vec::new(),
            until: Instant::now() + PATIENCE,
        };
        self.callers.push((caller, speaks));
    }

    /// Goes on with each caller that has said something, or that is due.
    ///
    /// * `ready`: as of [`Door::wait`].
    fn hear(&mut self, ready: &[bool]) {
        let callers = std::mem::take(&mut self.callers);
        for (at, (mut caller, stage)) in callers.into_iter().enumerate() {
            let is_due = stage.due().is_some_and(|due| due <= Instant::now());
            let has_said = ready.get(at + 1) == Some(&true);
            match self.go_on(&mut caller, stage, has_said, is_due) {
                Ok(Next::Waits(stage)) => self.callers.push((caller, stage)),
                Ok(Next::Gone) => {}
                Ok(Next::Served) => {
                    caller.answer(&Taken::Yes);
                    self.served.push((caller.pid, caller.pidfd));
                }
                Err(why) => self.refuse(caller, &why),
            }
        }
    }

    fn refuse(&mut self, caller: Caller, why: &NotServed) {
        self.tell(&format!(
            "the machine of process {} is not served, and its memory is missing: {why}",
            caller.pid
        ));
        caller.answer(&Taken::Refused(why.to_string()));
        if caller.fds.is_empty() {
            return;
        }
        if self.kept.len() >= KEPT_MAX {
            let _ = caller.pidfd.kill();
        }
        self.kept.push((caller.pidfd, caller.fds));
    }

    /// Goes one step on with a caller.
    fn go_on(
        &self,
        caller: &mut Caller,
        stage: Stage,
        has_said: bool,
        is_due: bool,
    ) -> Result<Next, NotServed> {
        let stage = match stage {
            Stage::Speaks { mut text, until } if has_said => {
                if !hear_more(caller, &mut text)? {
                    return Ok(Next::Gone);
                }
                caller.form = Form::of(&text)?;
                match (handover::parse(&text, self.bytes)?, caller.fds.len()) {
                    (_, 2..) => return Err(NotServed::Descriptors(caller.fds.len())),
                    // Its descriptor may come after its message.
                    (None, _) | (_, 0) => Stage::Speaks { text, until },
                    (Some(_), _) if self.serves(caller.pid) => return Err(NotServed::Twice),
                    (Some(handover), _) => {
                        let wish = Wish::of(Order::bytes(&handover), caller)?;
                        self.ask(caller, wish, Instant::now())
                    }
                }
            }
            Stage::Speaks { text, .. } if is_due => {
                let is_whole = handover::parse(&text, self.bytes)?.is_some();
                return Err(if is_whole && caller.fds.is_empty() {
                    NotServed::Descriptors(0)
                } else {
                    NotServed::Late
                });
            }
            Stage::Asks { wish, at } if is_due => self.ask(caller, wish, at),
            Stage::Asked { wish, manager } if has_said => match answer(&manager) {
                Some(Taken::Yes) => return Ok(Next::Served),
                Some(Taken::Already) if wish.again => return Ok(Next::Served),
                Some(Taken::Already) => return Err(NotServed::Twice),
                Some(Taken::Refused(why)) => return Err(NotServed::ByManager(why)),
                // It has died.
                None => Stage::Asks {
                    wish: Wish {
                        again: true,
                        ..wish
                    },
                    at: Instant::now() + ASK_AGAIN,
                },
            },
            stage => stage,
        };
        Ok(Next::Waits(stage))
    }

    /// Whether the memory of this process is served. Its number is no other's while it lives.
    fn serves(&self, pid: u32) -> bool {
        let mut served = self.served.iter();
        served.any(|(of, monitor)| *of == pid && !monitor.has_exited())
    }

    /// Asks the manager, or has it asked later if there is none at the moment.
    fn ask(&self, caller: &Caller, wish: Wish, at: Instant) -> Stage {
        match self.try_ask(caller, &wish) {
            Ok(manager) => Stage::Asked { wish, manager },
            Err(_) => Stage::Asks {
                wish,
                at: at + ASK_AGAIN,
            },
        }
    }

    fn try_ask(&self, caller: &Caller, wish: &Wish) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let manager = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&manager, &self.manager)?;
        let mut fds: Vec<_> = caller.fds.iter().map(OwnedFd::as_fd).collect();
        fds.extend([caller.pidfd.as_fd(), wish.pagemap.as_fd()]);
        fdpass::send(manager.as_fd(), &wish.order, &fds)?;
        Ok(manager)
    }

    /// A signal asks the run to end. The first lets no more machine in; a further one ends those
    /// that run.
    fn leave(&mut self, path: &Path) {
        if self.listener.take().is_some() {
            let _ = fs::remove_file(path);
            let callers = std::mem::take(&mut self.callers);
            for (caller, stage) in callers {
                match stage {
                    Stage::Speaks { .. } => self.refuse(caller, &NotServed::Leaves),
                    stage => self.callers.push((caller, stage)),
                }
            }
            match self.served.len() + self.callers.len() {
                0 => {}
                count => self.tell(&format!(
                    "{count} of the machines still run; this run ends with the last of them, or ends them \
                     when it is told to end once more"
                )),
            }
            return;
        }
        for (caller, _) in std::mem::take(&mut self.callers) {
            self.refuse(caller, &NotServed::Leaves);
        }
        for (_, monitor) in self.served.drain(..) {
            let _ = monitor.kill();
        }
    }

    fn tell(&mut self, what: &str) {
        self.told += 1;
        if self.told <= TOLD_MAX {
            let text = log_message(self.log, what);
            let _ = io::stderr().write_all(text.as_bytes()); // it may be closed
        }
    }
}

impl Caller {
    /// Answers, if it waits for that. It may have gone.
    fn answer(&self, taken: &Taken) {
        if self.form == Some(Form::Order) {
            let answer = serde_json::to_vec(taken).unwrap_or_default(); // words alone
            let _ = fdpass::send(self.socket.as_fd(), &answer, &[]);
        }
    }
}

impl Wish {
    fn of(order: Vec<u8>, caller: &Caller) -> Result<Wish, NotServed> {
        let pagemap = Pagemap::open(caller.pid).map_err(NotServed::Closed)?;
        // The number is not another's by now.
        if caller.pidfd.has_exited() {
            return Err(NotServed::Ended);
        }
        Ok(Wish {
            order,
            pagemap,
            again: false,
        })
    }
}

/// Adds what a monitor says to the text and the descriptors that have come. False: it has
/// connected, and said nothing.
fn hear_more(caller: &mut Caller, text: &mut Vec<u8>) -> Result<bool, NotServed> {
    let mut room = [0; 16 << 10];
    match fdpass::receive(caller.socket.as_fd(), &mut room) {
        Ok((0, _)) if text.is_empty() && caller.fds.is_empty() => return Ok(false),
        Ok((0, _)) => return Err(NotServed::Ended),
        Ok((got, more)) => {
            text.extend(&room[..got]);
            caller.fds.extend(more);
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(_) => return Err(NotServed::Ended),
    }
    if text.len() > MESSAGE_MAX {
        return Err(Refused::TooLong.into());
    }
    Ok(true)
}

/// The manager's answer. `None`: there is none, and it has died.
fn answer(manager: &OwnedFd) -> Option<Taken> {
    let mut room = [0; 4096];
    let (got, _) = fdpass::receive(manager.as_fd(), &mut room).ok()?;
    serde_json::from_slice(&room[..got]).ok()
}
