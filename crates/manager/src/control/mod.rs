//! The control thread of the manager: handshakes, exits, pressure, discovery, status. `start.rs`
//! sets the manager up.

mod add;
mod beside;
mod bound;
mod check;
mod core;
mod doors;
pub(crate) mod ending;
mod errand;
mod given_back;
mod guest;
mod handed;
mod handshake;
mod obey;
mod onset;
mod parting;
mod policy;
mod reaper;
mod resize;
mod stall;
mod start;
mod still;
mod strays;
mod swap;
mod takeover;
mod tell;
mod told;
mod toll;
mod view;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use undercroft_base::SpaceId;
use undercroft_proto::legacy::Flag;
use undercroft_proto::messages::{Launch, Notice, Request, tell};
use undercroft_sys::process;
use undercroft_sys::procfs::Statm;

use self::beside::Presence;
use self::bound::Bounds;
use self::check::{Checks, Sizes};
use self::doors::{Doors, Event};
use self::ending::Mark;
use self::guest::GuestWatch;
use self::handshake::Greetings;
use self::parting::Parting;
use self::policy::Policies;
pub use self::start::serve;
use self::swap::SwapWatch;
use self::tell::Since;
pub use crate::evict::advised::ReadPlugin;
use crate::log;
use crate::record::Record;
use crate::signals::Doom;
use crate::space::discover;
use crate::space::layout;
use crate::space::parts;
use crate::space::process::Process;
use crate::space::shared::Shared;
use crate::space::watch::Watch;

/// Exits noted at once.
const ENDS_MAX: usize = 64;

/// Time after a takeover until pages are counted again. A page may be present that the program
/// drops at this moment, and only the dead manager has heard of it (`space/dropping.rs`).
const RECOUNT_AFTER: Duration = Duration::from_millis(1500);

/// Why the manager ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    /// The client has ended; the keeper said so.
    Finished,
    /// The keeper is gone, or wants the client ended: the manager has to end it.
    Orphaned,
}

struct Control {
    shared: Arc<Shared>,
    launch: Launch,
    mark: Mark,
    doors: Doors,
    greetings: Greetings,
    watch: Watch,
    sizes: Sizes,
    managing: bool,
    checks: Checks,
    parting: Parting,
    presence: Presence,
    /// The thread that moves pages between tiers runs.
    migrates: bool,
    bounds: Bounds,
    guest: GuestWatch,
    swap: SwapWatch,
    policies: Policies,
    since: Since,
}

impl Control {
    fn notify(&self, notice: &Notice) -> io::Result<()> {
        tell(&self.doors.link, notice)
    }

    /// Serves until the client has ended; ends the client if the keeper cannot.
    fn run_to_the_end(&mut self) {
        if self.run() == Over::Orphaned {
            let _ = process::set_fair(0);
            self.mark.end_all();
        }
        self.end_record();
    }

    /// Ends the holder if no address space needs it. Otherwise it stays until they are gone, and
    /// ends their processes if the keeper does not.
    fn let_holder_go(&self) {
        if ending::nothing_held() {
            let _ = self.doors.holder.1.kill();
        }
    }

    /// Serves until the keeper says that the client has ended, or is gone itself.
    fn run(&mut self) -> Over {
        self.watch_for_strays();
        // Real-time priority until the client is managed: if a check comes a millisecond late, the
        // client may have grown by megabytes.
        if !self.managing {
            self.shared.cpu_plan.be_prompt(1);
        }
        loop {
            let events = self.wait();
            let heard = |event: Event| events.contains(&event);
            self.note_swap(heard(Event::Swap));
            let runs = |process: &Process| process.has_running_identity() && process.has_agent();
            self.note_presence(self.shared.processes.any(runs));
            self.forget_some(heard(Event::Kick));
            if heard(Event::Ends) {
                self.note_ends();
            }
            self.forget_parted();
            self.note_cores();
            if heard(Event::KeeperGone) {
                return Over::Orphaned;
            }
            if heard(Event::HolderGone) {
                // Without the holder, this process must not die, and that cannot be promised.
                self.shared.signals.doom(Doom::HolderDied);
            }
            self.hear(&events);
            if heard(Event::Connection) {
                self.welcome();
            }
            if heard(Event::Question) {
                self.tell_status();
            }
            if heard(Event::Keeper)
                && let Some(over) = self.answer_keeper()
            {
                return over;
            }
            if self.is_doomed() {
                return Over::Orphaned;
            }
            self.recount_if_due();
            self.check_if_due();
            self.note_page_ins();
            self.note_stall();
            (self.shared.gauges.shortages.news().into_iter()).for_each(log::warn);
        }
    }

    /// Waits until something happens, or is due.
    fn wait(&self) -> Vec<Event> {
        let check = self.until_check();
        let time = self.greetings.due().map_or(check, |due| due.min(check));
        let time = self.parting.until_look(time);
        let kick = self.shared.signals.control().as_fd();
        let (listens, sockets) = (self.greetings.listens(), self.greetings.sockets());
        self.doors
            .wait(time, kick, self.swap.fd(), listens, sockets)
    }

    /// Goes on where a dead manager stopped. The threads run.
    fn go_on(&mut self, mut settled: takeover::Settled) {
        for process in self.shared.processes.all() {
            self.managing |= process.managed.load(Ordering::Relaxed);
            if let Some(statm) = process.pid().and_then(|pid| Statm::open(pid).ok()) {
                self.sizes.statm.insert(process.space, statm);
            }
            if self.hear_end(&process).is_err() {
                self.shared.gauges.shortages.no_descriptor();
            }
            if process.managed.load(Ordering::Relaxed) {
                discover::note_fences(&self.shared, &process, &mut self.checks.maps);
                self.watch(&process);
            }
        }
        if self.managing {
            self.scan_on_demand();
            self.guard_threads();
            self.checks.recount_at = Some(Instant::now() + RECOUNT_AFTER);
        }
        self.begin_curve_when_known();
        settled.greet();
        takeover::wake_everyone(&self.shared);
    }

    /// Has the pages of all processes counted again, if that is due. A dead manager may have been
    /// counting, or loading pages that are in no book now.
    fn recount_if_due(&mut self) {
        if self
            .checks
            .recount_at
            .is_some_and(|at| Instant::now() >= at)
        {
            self.checks.recount_at = None;
            for process in self.shared.processes.all() {
                process.backlog.recount.store(true, Ordering::Release);
            }
        }
    }

    /// Parts with the processes that have exited.
    fn note_ends(&mut self) {
        let mut events = Vec::with_capacity(ENDS_MAX);
        let none = rustix::fs::Timespec::default();
        let _ = epoll::wait(&self.doors.ends, spare_capacity(&mut events), Some(&none));
        for event in events {
            let space = SpaceId(event.data.u64() as u32);
            if let Some(process) = self.shared.processes.get(space) {
                self.hear_no_end(&process);
                self.part_with(&process);
            }
        }
    }

    /// Forgets a few chunks of books that are gone.
    /// * `kicked`: there are more since the last call.
    fn forget_some(&mut self, kicked: bool) {
        if kicked {
            let mut word = [0u8; 8];
            let _ = rustix::io::read(self.shared.signals.control(), &mut word);
            self.check_if_stirred();
            if self.guest.doubts_views() {
                self.check_soon();
            }
        }
        self.parting.forgets = !parts::forget_some(&self.shared);
    }

    /// Watches for the end of the process.
    fn hear_end(&self, process: &Process) -> io::Result<()> {
        if let Some(pidfd) = process.pidfd() {
            let data = epoll::EventData::new_u64(process.space.0.into());
            epoll::add(&self.doors.ends, pidfd, data, epoll::EventFlags::IN)?;
        }
        Ok(())
    }

    fn hear_no_end(&self, process: &Process) {
        if let Some(pidfd) = process.pidfd() {
            let _ = epoll::delete(&self.doors.ends, pidfd);
        }
    }

    /// Ends the client and waits for the keeper, if a thread has decided so. False otherwise.
    fn is_doomed(&mut self) -> bool {
        let Some(why) = self.shared.signals.doomed() else {
            return false;
        };
        // Told first: otherwise the keeper takes this for the program's own end.
        let _ = self.notify(&Notice::Doomed(why));
        self.end_known();
        self.end_record();
        self.wait_for_keeper();
        true
    }

    /// The process called exec or has ended. Its books are forgotten, unless its address space
    /// lives on in another process that shares it (`CLONE_VM`, vfork). Such a process is served by
    /// the same userfaultfd until it ends.
    fn part_with(&mut self, process: &Arc<Process>) {
        process.row.set(Flag::Exited);
        process.exited.store(true, Ordering::Relaxed);
        if process.has_lost_its_memory() {
            self.forget(process);
            return;
        }
        self.sizes.statm.remove(&process.space);
        if let Some(agent) = process.agent.get() {
            agent.commands.wake_agent();
        }
        self.parting.add(process);
    }

    /// Forgets a process whose address space is gone.
    fn forget(&mut self, process: &Arc<Process>) {
        self.sizes.forget(process.space);
        if let Some(guest) = self.guest.ends(&self.shared, process) {
            self.forget(&guest);
        }
        if self.guest.forget_views(process) {
            self.shared.follow_again();
        }
        self.hear_no_end(process);
        layout::ended(&self.shared, process);
    }

    /// Forgets all processes whose address space is gone.
    fn forget_ended(&mut self) {
        for process in self.shared.processes.all() {
            if process.has_lost_its_memory() {
                self.forget(&process);
            }
        }
    }

    /// Ends every process of the client that has announced itself. The keeper ends the rest.
    fn end_known(&self) {
        for process in self.shared.processes.all() {
            process.kill();
        }
    }

    fn wait_for_keeper(&self) {
        let mut byte = [0u8; 1];
        while matches!(rustix::io::read(&self.doors.link, &mut byte), Ok(1..)) {}
    }

    /// Answers the keeper's requests. Returns why the manager is to end, if it is.
    fn answer_keeper(&mut self) -> Option<Over> {
        let mut bytes = vec![0u8; 4096];
        let got = match rustix::io::read(&self.doors.link, &mut bytes) {
            Ok(got) if got > 0 => got,
            _ => return Some(Over::Orphaned),
        };
        // Two requests may arrive in one read.
        for request in serde_json::Deserializer::from_slice(&bytes[..got]).into_iter() {
            match request {
                Ok(Request::Finish {
                    exit_status,
                    wall_ns,
                }) => {
                    self.end_last_window();
                    self.end_machines();
                    self.end_views();
                    let report = self.report(exit_status, wall_ns);
                    if self.shared.books.record.is_some() {
                        self.forget_ended(); // a trace has the end of every process
                    }
                    self.end_record();
                    let _ = self.notify(&Notice::Report(Box::new(report)));
                    return Some(Over::Finished);
                }
                Ok(Request::Leave {
                    exit_status,
                    wall_ns,
                }) => {
                    self.launch.front = None;
                    let report = self.report(exit_status, wall_ns);
                    let _ = self.notify(&Notice::Report(Box::new(report)));
                }
                Err(_) => return None,
            }
        }
        None
    }

    /// Ends the trace of `--trace`, and warns if it is incomplete.
    fn end_record(&self) {
        match self.shared.books.record.as_deref().map(Record::finish) {
            None | Some(Ok(0)) => {}
            Some(Ok(dropped)) => {
                log::warn(&format!(
                    "the trace lacks {dropped} faults and movements of pages, so a replay differs from this run"
                ));
            }
            Some(Err(why)) => log::warn(&why.to_string()),
        }
    }
}
