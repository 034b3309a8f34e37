//! The descriptors that the control thread waits for, and the events that it hears of.

use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_sys::process::PidFd;

/// Descriptors of the whole run.
pub(super) struct Doors {
    /// To the keeper.
    pub(super) link: OwnedFd,
    /// Shims connect here.
    pub(super) listener: OwnedFd,
    /// Users and the daemon connect here.
    pub(super) status: OwnedFd,
    pub(super) keeper: PidFd,
    pub(super) holder: (u32, PidFd),
    /// Epoll of the pidfds of all processes that have announced themselves.
    pub(super) ends: OwnedFd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The keeper says something.
    Keeper,
    KeeperGone,
    HolderGone,
    /// A shim connects.
    Connection,
    /// Handshake of this index: the shim says something.
    Greeted(usize),
    /// A user or the daemon connects.
    Question,
    /// Processes have exited.
    Ends,
    /// Another thread kicked.
    Kick,
    /// Kernel swap has changed.
    Swap,
}

impl Doors {
    /// Waits for at most this time. Returns what has happened.
    ///
    /// * `kick`: written by other threads.
    /// * `swap`: polled for `POLLPRI`, if this kernel's swap matters.
    /// * `listens`: for what the listener is polled.
    /// * `greetings`: sockets of handshakes, in order.
    pub(super) fn wait<'a>(
        &self,
        time: Duration,
        kick: BorrowedFd<'_>,
        swap: Option<&File>,
        listens: PollFlags,
        greetings: impl Iterator<Item = &'a OwnedFd>,
    ) -> Vec<Event> {
        let input = PollFlags::IN;
        let of_run = [
            (Event::Keeper, PollFd::new(&self.link, input)),
            (Event::Connection, PollFd::new(&self.listener, listens)),
            (Event::Question, PollFd::new(&self.status, input)),
            (Event::KeeperGone, PollFd::new(&self.keeper, input)),
            (Event::HolderGone, PollFd::new(&self.holder.1, input)),
            (Event::Ends, PollFd::new(&self.ends, input)),
            (Event::Kick, PollFd::from_borrowed_fd(kick, input)),
        ];
        let swap = swap.map(|file| (Event::Swap, PollFd::new(file, PollFlags::PRI)));
        let greeted = greetings.enumerate();
        let greeted = greeted.map(|(at, fd)| (Event::Greeted(at), PollFd::new(fd, input)));
        let all = of_run.into_iter().chain(swap).chain(greeted);
        let (events, mut fds): (Vec<Event>, Vec<PollFd<'_>>) = all.unzip();
        let timeout = rustix::fs::Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: i64::from(time.subsec_nanos()),
        };
        let _ = poll(&mut fds, Some(&timeout));
        let ready = events
            .into_iter()
            .zip(&fds)
            .filter(|(_, fd)| !fd.revents().is_empty());
        ready.map(|(event, _)| event).collect()
    }
}
