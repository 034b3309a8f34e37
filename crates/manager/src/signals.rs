//! How the manager's threads wake each other, hand work to each other, and stop.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use undercroft_base::{SpaceId, VirtPage};
use undercroft_sys::futex;

use crate::sync::lock;

/// Why a client cannot go on. The control thread ends it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Doom {
    #[error(
        "the process that holds its descriptors (uc-fds) died: if the manager died too, memory \
         would read as zeros"
    )]
    HolderDied,
    #[error("its page faults cannot be read: {0}")]
    NoFaults(std::io::Error),
    /// As the user chose.
    #[error(
        "every tier is full (--when-full kill); add room with `--tier file:PATH,size=SIZE`, or \
         raise --memory-max"
    )]
    TiersFull,
    #[error(
        "the stored copy of a page failed to verify, and the kernel cannot poison the page; check \
         the device of the tiers"
    )]
    NotPoisoned,
    #[error("the memory of its virtual machine cannot be managed: {0}")]
    Guest(String),
}

/// The signals of one run.
pub(crate) struct Signals {
    /// Eventfds of the fault threads.
    wakeups: Vec<OwnedFd>,
    /// Pages that fault threads are to load, although no thread of the client waits for them.
    to_bring: Mutex<Vec<(SpaceId, VirtPage)>>,
    /// The futex on which the evictor sleeps.
    evict_kick: AtomicU32,
    evictor_sleeps: AtomicBool,
    /// Eventfd of the control thread: books are waiting to be forgotten.
    control_kick: OwnedFd,
    /// The control thread checks seldom, because nothing happens.
    calm: AtomicBool,
    /// Records of new mappings were lost. The control thread reads all mappings again.
    pub discover_again: AtomicBool,
    /// Why the client must be ended, if it must.
    doom: Mutex<Option<Doom>>,
    stop: AtomicBool,
}

fn new_eventfd() -> std::io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Signals {
    /// * `threads`: how many fault threads there are.
    pub(crate) fn new(threads: usize) -> std::io::Result<Signals> {
        Ok(Signals {
            wakeups: (0..threads)
                .map(|_| new_eventfd())
                .collect::<Result<_, _>>()?,
            to_bring: Mutex::default(),
            evict_kick: AtomicU32::new(0),
            evictor_sleeps: AtomicBool::new(false),
            control_kick: new_eventfd()?,
            calm: AtomicBool::new(false),
            discover_again: AtomicBool::new(false),
            doom: Mutex::default(),
            stop: AtomicBool::new(false),
        })
    }

    /// The eventfd that fault thread `thread` polls.
    pub(crate) fn wakeup(&self, thread: usize) -> &OwnedFd {
        &self.wakeups[thread]
    }

    pub(crate) fn fault_threads(&self) -> usize {
        self.wakeups.len()
    }

    pub(crate) fn wake_fault_threads(&self) {
        self.wake_followers(|_| true);
    }

    /// Wakes the fault threads that follow changes of the set of processes.
    pub(crate) fn wake_followers(&self, is_active: impl Fn(usize) -> bool) {
        for (thread, wakeup) in self.wakeups.iter().enumerate() {
            if is_active(thread) {
                let _ = rustix::io::write(wakeup, &1u64.to_ne_bytes());
            }
        }
    }

    /// Has fault threads load pages later. The caller does not wait for them.
    pub(crate) fn bring_in(&self, space: SpaceId, pages: impl Iterator<Item = VirtPage>) {
        lock(&self.to_bring).extend(pages.map(|page| (space, page)));
        self.wake_fault_threads();
    }

    /// Takes the pages that [`Signals::bring_in`] was given.
    pub(crate) fn take_to_bring(&self) -> Vec<(SpaceId, VirtPage)> {
        std::mem::take(&mut *lock(&self.to_bring))
    }

    /// Wakes the evictor if it sleeps. Cost if it does not: one load.
    pub(crate) fn kick_evictor(&self) {
        if self.evictor_sleeps.load(Ordering::SeqCst) {
            self.evict_kick.fetch_add(1, Ordering::SeqCst);
            futex::wake(&self.evict_kick, 1);
        }
    }

    /// Announces that the evictor is about to sleep. After this call the evictor checks whether it
    /// is wanted. If not, it passes the returned value to [`Signals::evictor_sleep`].
    pub(crate) fn evictor_rests(&self) -> u32 {
        let kick = self.evict_kick.load(Ordering::SeqCst);
        self.evictor_sleeps.store(true, Ordering::SeqCst);
        kick
    }

    /// Sleeps until a kick that is newer than `kick`. False if none came within `nap`.
    pub(crate) fn evictor_sleep(&self, kick: u32, nap: Duration) -> bool {
        futex::wait(&self.evict_kick, kick, Some(nap))
    }

    pub(crate) fn evictor_works(&self) {
        self.evictor_sleeps.store(false, Ordering::SeqCst);
    }

    /// Wakes the control thread: books are waiting to be forgotten.
    pub(crate) fn kick_control(&self) {
        let _ = rustix::io::write(&self.control_kick, &1u64.to_ne_bytes());
    }

    /// Something changes: the control thread checks soon, and as often as it does while the client
    /// is busy. Cost if it does so already: one load.
    pub(crate) fn stir(&self) {
        if self.is_calm() && self.calm.swap(false, Ordering::Relaxed) {
            self.kick_control();
        }
    }

    /// The control thread checks seldom from now on, until something stirs.
    pub(crate) fn set_calm(&self) {
        self.calm.store(true, Ordering::Relaxed);
    }

    /// The control thread has seen something happen, and checks often again.
    pub(crate) fn end_calm(&self) {
        self.calm.store(false, Ordering::Relaxed);
    }

    /// Whether nothing has happened for long.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    /// The eventfd that the control thread polls.
    pub(crate) fn control(&self) -> &OwnedFd {
        &self.control_kick
    }

    /// Has the control thread end the client, which cannot go on, and say why. Only the first
    /// reason is kept.
    pub(crate) fn doom(&self, why: Doom) {
        lock(&self.doom).get_or_insert(why);
        self.kick_control();
    }

    /// Why the client must be ended, if it must.
    pub(crate) fn doomed(&self) -> Option<String> {
        lock(&self.doom).as_ref().map(Doom::to_string)
    }

    /// Stops all threads.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_fault_threads();
        self.evict_kick.fetch_add(1, Ordering::SeqCst);
        futex::wake(&self.evict_kick, 1);
    }

    /// Cost: one load.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stirs_ends_the_calm_and_wakes_the_control_thread_once() {
        let signals = Signals::new(1).expect("eventfds");
        let woken = || rustix::io::read(signals.control(), &mut [0u8; 8]).is_ok();
        signals.stir();
        assert!(!woken(), "it was not calm");
        signals.set_calm();
        signals.stir();
        assert!(woken() && !signals.is_calm());
        signals.stir();
        assert!(!woken());
        signals.set_calm();
        signals.end_calm();
        assert!(!woken() && !signals.is_calm());
    }

    #[test]
    fn the_first_reason_to_end_the_client_stays() {
        let signals = Signals::new(1).expect("eventfds");
        assert_eq!(signals.doomed(), None);
        signals.doom(Doom::TiersFull);
        signals.doom(Doom::NotPoisoned);
        let why = signals.doomed().expect("a reason");
        assert_eq!(why, Doom::TiersFull.to_string());
    }
}
