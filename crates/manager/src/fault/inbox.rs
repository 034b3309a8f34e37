//! The inbox of a fault thread: copies that were fetched, and a descriptor that wakes the thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{EventfdFlags, eventfd};
use undercroft_base::{Fetched, Inbox};

use crate::sync::lock;

/// Pages that were fetched, and that the thread has not taken.
#[derive(Debug)]
pub(super) struct FetchInbox {
    list: Mutex<Vec<Fetched>>,
    wakeup: OwnedFd,
}

impl FetchInbox {
    pub(super) fn new() -> std::io::Result<FetchInbox> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(FetchInbox {
            list: Mutex::default(),
            wakeup: eventfd(0, flags)?,
        })
    }

    /// Takes all of them.
    pub(super) fn take(&self) -> Vec<Fetched> {
        let mut list = lock(&self.list);
        if !list.is_empty() {
            // With the lock held, so that the descriptor is ready exactly while there are some.
            let _ = rustix::io::read(&self.wakeup, &mut [0; 8]);
        }
        std::mem::take(&mut *list)
    }
}

impl Inbox for FetchInbox {
    fn deliver(&self, arrival: Fetched) {
        let mut list = lock(&self.list);
        list.push(arrival);
        if list.len() == 1 {
            let _ = rustix::io::write(&self.wakeup, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for FetchInbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use undercroft_base::LoadError;

    use super::*;

    #[test]
    fn the_descriptor_is_ready_while_there_are_arrivals() {
        let arrivals = FetchInbox::new().expect("an eventfd");
        let ready = || {
            let mut fds = [PollFd::new(&arrivals, PollFlags::IN)];
            poll(&mut fds, Some(&rustix::fs::Timespec::default())).expect("a poll") == 1
        };
        for round in 0..3 {
            assert!(!ready() && arrivals.take().is_empty());
            for token in 0..3 {
                let page = Err(LoadError::Late);
                arrivals.deliver(Fetched { token, page });
                assert!(ready(), "round {round}");
            }
            let tokens: Vec<u64> = arrivals.take().iter().map(|it| it.token).collect();
            assert_eq!(tokens, [0, 1, 2]);
        }
    }
}
