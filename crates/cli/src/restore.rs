//! `undercroft restore`: restores a machine of Cloud Hypervisor from a snapshot, as its offload
//! daemon does. Cloud Hypervisor gets empty memory from here, and asks for its pages one by one.
//!
//! The memory is mapped here, too, and handed over to a run of `vm --socket`. A page that is asked
//! for is touched: that run fills it, whichever manager it has. So this process is to the run a
//! monitor like others, and parses what Cloud Hypervisor says outside of the manager.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use undercroft_base::{BASE_PAGE_BYTES, VirtPage, VirtRange};
use undercroft_proto::handover::cloud_hypervisor::{
    self, Asks, Command, FAULT, HEADER, ROLE, Slots, Wrong,
};
use undercroft_proto::handover::{Order, Refused, Taken};
use undercroft_sys::fdpass;
use undercroft_sys::lent::Lent;
use undercroft_sys::uffd::{Features, RegisterMode, Uffd, UffdError};
use undercroft_sys::uffd_source::UffdSource;
use undercroft_terminal::{Failure, line, status};

use crate::args::RestoreArgs;

/// Most bytes of a file of the snapshot.
const FILE_MAX: u64 = 256 << 20;

/// Pages of a slot, spread over it, that are compared with the snapshot's file.
const COMPARED: u64 = 32;

/// Why a machine is not restored. For the user.
#[derive(Debug, thiserror::Error)]
enum NotRestored {
    #[error("{0}: {1}")]
    Snapshot(String, io::Error),
    #[error("the snapshot cannot be used: {0}")]
    Config(Wrong),
    #[error("the run cannot have its memory: {0}")]
    Said(#[from] Refused),
    #[error("memory of {0} pages cannot be made: {1}")]
    Memory(u64, io::Error),
    #[error("no userfaultfd can be had here ({0}); `undercroft doctor` says why")]
    Uffd(io::Error),
    #[error("its memory cannot be registered: {0}")]
    Register(#[from] UffdError),
    #[error("no run answers at {0}: {1}")]
    NoRun(String, io::Error),
    #[error("the run has ended the connection: its standard error says why")]
    Unanswered,
    #[error("the run refuses: {0}")]
    Refused(String),
    #[error("the run has the memory of another snapshot: page {1} of slot {0} is not that of {2}")]
    Other(u32, u64, String),
    #[error("Cloud Hypervisor does not answer at {0}: {1}")]
    NoMachine(String, io::Error),
    #[error("Cloud Hypervisor has ended the connection at {0:?}: {1}")]
    Ended(Command, io::Error),
    #[error("Cloud Hypervisor refuses {0:?}: {1}")]
    Heard(Command, Wrong),
    #[error("Cloud Hypervisor is not served any more: {0}")]
    Asked(Wrong),
    #[error("Cloud Hypervisor has ended the connection in the middle of a request: {0}")]
    Half(io::Error),
    #[error("page {1} of slot {0} cannot be read from the snapshot's memory: {2}")]
    Lost(u32, u64, io::Error),
    #[error("the machine has ended when it had {0} of its {1} pages")]
    Early(usize, usize),
    #[error("it cannot be served: {0}")]
    Thread(io::Error),
}

/// A snapshot, besides its memory.
struct Snapshot {
    config: Vec<u8>,
    state: Vec<u8>,
    slots: Slots,
}

impl Snapshot {
    fn read(folder: &Path) -> Result<Snapshot, NotRestored> {
        let read = |name: &str| {
            let path = folder.join(name);
            let failed = |error| NotRestored::Snapshot(path.display().to_string(), error);
            let file = fs::File::open(&path).map_err(failed)?;
            let mut bytes = Vec::new();
            let got = file.take(FILE_MAX + 1).read_to_end(&mut bytes);
            match got.map_err(failed)? as u64 {
                0..=FILE_MAX => Ok(bytes),
                _ => Err(failed(io::ErrorKind::FileTooLarge.into())),
            }
        };
        let (config, state) = (read("migration_config.json")?, read("state.json")?);
        Ok(Snapshot {
            slots: Slots::parse(&config).map_err(NotRestored::Config)?,
            config,
            state,
        })
    }
}

/// The machine's memory, slot by slot.
struct Memory {
    parts: Vec<Lent>,
    uffd: Uffd,
}

impl Memory {
    fn make(slots: &Slots) -> Result<Memory, NotRestored> {
        let failed = |error| NotRestored::Memory(slots.pages().0, error);
        let uffd = UffdSource::open().and_then(|source| source.create());
        let uffd = uffd.map_err(NotRestored::Uffd)?;
        uffd.api(Features::MISSING_SHMEM)?;
        let make = |slot: &cloud_hypervisor::Slot| {
            let part = Lent::create("undercroft-machine", slot.before, slot.guest.count());
            let part = part.map_err(failed)?;
            uffd.register(part.range(), RegisterMode::MISSING)?;
            Ok(part)
        };
        let parts: Result<_, NotRestored> = slots.all().iter().map(make).collect();
        Ok(Memory {
            parts: parts?,
            uffd,
        })
    }

    /// Has the run at `path` fill it.
    fn hand_over(&self, slots: &Slots, path: &Path) -> Result<(), NotRestored> {
        let starts = self.parts.iter().map(|part| part.range().start);
        let order = Order::bytes(&slots.handover(starts)?);
        let no_run = |error| NotRestored::NoRun(path.display().to_string(), error);
        let mut run = UnixStream::connect(path).map_err(no_run)?;
        let sent = fdpass::send(run.as_fd(), &order, &[self.uffd.as_fd()]);
        sent.map_err(no_run)?;
        let mut answer = Vec::new();
        run.read_to_end(&mut answer).map_err(no_run)?;
        match serde_json::from_slice(&answer) {
            Ok(Taken::Yes) => Ok(()),
            Ok(Taken::Refused(why)) => Err(NotRestored::Refused(why)),
            Ok(Taken::Already) | Err(_) => Err(NotRestored::Unanswered),
        }
    }
}

/// Compares pages that the run has filled with the snapshot's own files, where those are there.
fn compare(folder: &Path, slots: &Slots, memory: &Memory) -> Result<(), NotRestored> {
    for (slot, part) in slots.all().iter().zip(&memory.parts) {
        let path = folder.join(format!("memory-{}", slot.number));
        let Ok(file) = fs::File::open(&path) else {
            continue;
        };
        let count = slot.guest.count().0;
        for page in (0..count).step_by(count.div_ceil(COMPARED) as usize) {
            let page = VirtPage(page);
            let (mut filled, mut own) = ([0; BASE_PAGE_BYTES], [0; BASE_PAGE_BYTES]);
            let brought = part.bring(VirtRange::one(page));
            let brought = brought.and_then(|()| part.read(page, &mut filled));
            brought.map_err(|error| NotRestored::Lost(slot.number, page.0, error))?;
            let read = file.read_exact_at(&mut own, page.address());
            if read.is_err() || filled != own {
                let path = path.display().to_string();
                return Err(NotRestored::Other(slot.number, page.0, path));
            }
        }
    }
    Ok(())
}

/// The call by which Cloud Hypervisor is told what to restore.
struct Call(UnixStream);

impl Call {
    fn begin(path: &Path) -> Result<UnixStream, NotRestored> {
        let failed = |error| NotRestored::NoMachine(path.display().to_string(), error);
        UnixStream::connect(path).map_err(failed)
    }

    /// Gives a command with what belongs to it, and waits until it is obeyed.
    fn give(
        &mut self,
        command: Command,
        bytes: &[u8],
        memfd: Option<BorrowedFd<'_>>,
    ) -> Result<(), NotRestored> {
        let ended = |error| NotRestored::Ended(command, error);
        let header = command.header(bytes.len() as u64);
        self.0.write_all(&header).map_err(ended)?;
        match memfd {
            // The descriptor comes with what follows the header, which is short.
            Some(memfd) => fdpass::send(self.0.as_fd(), bytes, &[memfd]).map_err(ended)?,
            None => self.0.write_all(bytes).map_err(ended)?,
        }
        let mut answer = [0; HEADER];
        self.0.read_exact(&mut answer).map_err(ended)?;
        cloud_hypervisor::heard(&answer).map_err(|wrong| NotRestored::Heard(command, wrong))
    }
}

/// The call by which Cloud Hypervisor asks for pages.
struct Faults<'a> {
    call: UnixStream,
    /// The other call, ended with this one if something is wrong.
    first: UnixStream,
    slots: &'a Slots,
    memory: &'a Memory,
    /// Of each page of the machine: it was asked for.
    seen: Vec<bool>,
}

impl Faults<'_> {
    /// Brings what is asked for, until nothing is any more.
    ///
    /// Errors: also if some pages were not asked for. Both calls are ended then.
    fn serve(&mut self) -> Result<(), NotRestored> {
        let served = self.serve_some();
        let had = self.seen.iter().filter(|seen| **seen).count();
        let why = match served {
            Ok(()) if had == self.seen.len() => return Ok(()),
            Ok(()) => NotRestored::Early(had, self.seen.len()),
            Err(why) => why,
        };
        // It may have ended them.
        let _ = self.call.write_all(&cloud_hypervisor::answer(false));
        let _ = self.call.shutdown(Shutdown::Both);
        let _ = self.first.shutdown(Shutdown::Both);
        Err(why)
    }

    fn serve_some(&mut self) -> Result<(), NotRestored> {
        while let Some(asked) = self.hear()? {
            self.bring(asked)?;
            let answer = cloud_hypervisor::answer(true);
            if self.call.write_all(&answer).is_err() {
                break; // it has ended
            }
        }
        Ok(())
    }

    /// The next request. `None`: it wants no more.
    fn hear(&mut self) -> Result<Option<(usize, VirtRange)>, NotRestored> {
        let mut header = [0; HEADER];
        match self.call.read(&mut header) {
            Ok(0) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            got => {
                let rest = &mut header[got.map_err(NotRestored::Half)?..];
                self.call.read_exact(rest).map_err(NotRestored::Half)?;
            }
        }
        match cloud_hypervisor::asks(&header).map_err(NotRestored::Asked)? {
            Asks::Abandon => {
                let _ = self.call.write_all(&cloud_hypervisor::answer(true)); // it may have ended
                return Ok(None);
            }
            Asks::Pages => {}
        }
        let mut fault = [0; FAULT];
        self.call
            .read_exact(&mut fault)
            .map_err(NotRestored::Half)?;
        let asked = self.slots.asked(&fault).map_err(NotRestored::Asked)?;
        Ok(Some(asked))
    }

    fn bring(&mut self, (at, pages): (usize, VirtRange)) -> Result<(), NotRestored> {
        let slot = &self.slots.all()[at];
        let lost = |error| NotRestored::Lost(slot.number, pages.start.0, error);
        let part = &self.memory.parts[at];
        for page in pages.pages() {
            // One that was there, and is missing again, was given back by the guest.
            if std::mem::replace(&mut self.seen[(slot.at + page.0) as usize], true) {
                part.fill(page).map_err(lost)?;
            }
        }
        part.bring(pages).map_err(lost)
    }
}

/// Tells Cloud Hypervisor what to restore, and gives it its pages meanwhile and later.
fn restore_by(args: &RestoreArgs, snapshot: &Snapshot, memory: &Memory) -> Result<(), NotRestored> {
    let mut call = Call(Call::begin(&args.to)?);
    call.give(Command::Start, &[], None)?;
    for (slot, part) in snapshot.slots.all().iter().zip(&memory.parts) {
        let number = slot.number.to_le_bytes();
        call.give(Command::MemoryFd, &number, Some(part.as_fd()))?;
    }
    call.give(Command::Config, &snapshot.config, None)?;
    let mut second = Call::begin(&args.to)?;
    let no_machine = |error| NotRestored::NoMachine(args.to.display().to_string(), error);
    second.write_all(&ROLE).map_err(no_machine)?;
    let mut faults = Faults {
        call: second,
        first: call.0.try_clone().map_err(NotRestored::Thread)?,
        slots: &snapshot.slots,
        memory,
        seen: vec![false; snapshot.slots.pages().0 as usize],
    };
    thread::scope(|scope| {
        let end = faults.call.try_clone().map_err(NotRestored::Thread)?;
        let served = thread::Builder::new().spawn_scoped(scope, move || faults.serve());
        let served = served.map_err(NotRestored::Thread)?;
        let last = if args.paused {
            Command::CompletePaused
        } else {
            Command::Complete
        };
        let told = call.give(Command::State, &snapshot.state, None);
        let told = told.and_then(|()| call.give(last, &[], None));
        if told.is_err() {
            let _ = end.shutdown(Shutdown::Both); // it may have ended
        }
        let panicked = |_| NotRestored::Thread(io::Error::other("a thread has failed"));
        let served = served.join().map_err(panicked)?;
        match (served, told) {
            // Its second call was ended here, because it refuses a command.
            (Err(NotRestored::Early(..)), Err(why @ NotRestored::Heard(..))) => Err(why),
            (served, told) => served.and(told),
        }
    })
}

fn try_restore(args: &RestoreArgs) -> Result<(), NotRestored> {
    let snapshot = Snapshot::read(&args.snapshot)?;
    let memory = Memory::make(&snapshot.slots)?;
    memory.hand_over(&snapshot.slots, &args.socket)?;
    compare(&args.snapshot, &snapshot.slots, &memory)?;
    restore_by(args, &snapshot, &memory)
}

/// The body of `undercroft restore`.
pub(crate) fn restore(args: &RestoreArgs) -> Result<u8, Failure> {
    if let Err(why) = try_restore(args) {
        let what = format!("the machine of {} is not restored", args.snapshot.display());
        let fix = "`undercroft restore --help` has an example; end that Cloud Hypervisor, and \
                   start another";
        return Err(Failure::new(status::FAILED, what, why.to_string(), fix));
    }
    line("the machine has all of its memory")?;
    Ok(0)
}
