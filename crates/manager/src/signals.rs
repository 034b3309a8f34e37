//! How the threads of the manager wake each other, ask each other for something, and end.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use undercroft_base::{SpaceId, VirtPage};
use undercroft_sys::futex;

use crate::sync::lock;

/// The signals of one run.
pub(crate) struct Signals {
    /// Eventfds of the fault threads.
    wakeups: Vec<OwnedFd>,
    /// Pages that fault threads are to bring in though no thread waits for them.
    to_bring: Mutex<Vec<(SpaceId, VirtPage)>>,
    /// Futex: the evictor sleeps on it.
    evict_kick: AtomicU32,
    evictor_sleeps: AtomicBool,
    /// Eventfd of the control thread: there is something to forget.
    control_kick: OwnedFd,
    /// Records of new mappings were lost: the control thread reads all mappings anew.
    pub discover_again: AtomicBool,
    /// Why the client must be ended, once something decided so.
    doom: Mutex<Option<String>>,
    stop: AtomicBool,
}

fn new_eventfd() -> std::io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

impl Signals {
    /// * `threads`: how many fault threads there are.
    pub fn new(threads: usize) -> std::io::Result<Signals> {
        Ok(Signals {
            wakeups: (0..threads)
                .map(|_| new_eventfd())
                .collect::<Result<_, _>>()?,
            to_bring: Mutex::default(),
            evict_kick: AtomicU32::new(0),
            evictor_sleeps: AtomicBool::new(false),
            control_kick: new_eventfd()?,
            discover_again: AtomicBool::new(false),
            doom: Mutex::default(),
            stop: AtomicBool::new(false),
        })
    }

    /// What fault thread `thread` polls.
    pub fn wakeup(&self, thread: usize) -> &OwnedFd {
        &self.wakeups[thread]
    }

    pub fn fault_threads(&self) -> usize {
        self.wakeups.len()
    }

    pub fn wake_fault_threads(&self) {
        for wakeup in &self.wakeups {
            let _ = rustix::io::write(wakeup, &1u64.to_ne_bytes());
        }
    }

    /// Has pages brought in some time later, so that the caller does not wait for them.
    pub fn bring_in(&self, space: SpaceId, pages: impl Iterator<Item = VirtPage>) {
        lock(&self.to_bring).extend(pages.map(|page| (space, page)));
        self.wake_fault_threads();
    }

    /// The pages that [`Signals::bring_in`] was asked for.
    pub fn take_to_bring(&self) -> Vec<(SpaceId, VirtPage)> {
        std::mem::take(&mut *lock(&self.to_bring))
    }

    /// Wakes the evictor if it sleeps. Cost when it does not: one load.
    pub fn kick_evictor(&self) {
        if self.evictor_sleeps.load(Ordering::SeqCst) {
            self.evict_kick.fetch_add(1, Ordering::SeqCst);
            futex::wake(&self.evict_kick, 1);
        }
    }

    /// The evictor is about to sleep unless it is wanted. It asks for that after this, and passes
    /// what this returns to [`Signals::evictor_sleep`].
    pub fn evictor_rests(&self) -> u32 {
        let kick = self.evict_kick.load(Ordering::SeqCst);
        self.evictor_sleeps.store(true, Ordering::SeqCst);
        kick
    }

    /// Sleeps until a kick after `kick`; false when none came within `nap`.
    pub fn evictor_sleep(&self, kick: u32, nap: Duration) -> bool {
        futex::wait(&self.evict_kick, kick, Some(nap))
    }

    pub fn evictor_works(&self) {
        self.evictor_sleeps.store(false, Ordering::SeqCst);
    }

    /// Wakes the control thread: there is something to forget.
    pub fn kick_control(&self) {
        let _ = rustix::io::write(&self.control_kick, &1u64.to_ne_bytes());
    }

    /// What the control thread polls.
    pub fn control(&self) -> &OwnedFd {
        &self.control_kick
    }

    /// The client cannot go on: the control thread ends it and says why. The first reason stays.
    pub fn doom(&self, why: &str) {
        lock(&self.doom).get_or_insert_with(|| why.to_owned());
    }

    /// Why the client must be ended, if it must.
    pub fn doomed(&self) -> Option<String> {
        lock(&self.doom).clone()
    }

    /// The threads are to end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_fault_threads();
        self.evict_kick.fetch_add(1, Ordering::SeqCst);
        futex::wake(&self.evict_kick, 1);
    }

    /// Cost: one load.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}
