//! The address spaces of a client, by space, by process id and by family, and the changes since a
//! fault thread asked last. The cost of a fork, exec or exit does not grow with their number.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use undercroft_base::{SpaceId, VirtPage, VirtRange};

use crate::space::process::Process;
use crate::sync::lock;

/// Most fork relatives that are asked whether they share a page.
const RELATIVES_MAX: usize = 32;

/// A change of the set.
pub(crate) enum Change {
    Came(Arc<Process>),
    Went(SpaceId),
}

#[derive(Default)]
struct Known {
    spaces: BTreeMap<SpaceId, Arc<Process>>,
    /// Fork children whose books are not complete yet. The layout lock of each is held meanwhile.
    forming: HashMap<SpaceId, Arc<Process>>,
    /// The newest address space of each process that has announced itself.
    pids: HashMap<u32, Arc<Process>>,
    families: HashMap<SpaceId, BTreeMap<SpaceId, Arc<Process>>>,
}

impl Known {
    /// False if it was listed already.
    fn list(&mut self, process: &Arc<Process>) -> bool {
        let (space, family) = (process.space, process.relatives.family);
        let members = self.families.entry(family).or_default();
        members.insert(space, process.clone());
        self.spaces.insert(space, process.clone()).is_none()
    }

    /// False if it was not listed.
    fn strike(&mut self, process: &Process) -> bool {
        if let Some(pid) = process.pid()
            && self.pids.get(&pid).map(|of| of.space) == Some(process.space)
        {
            self.pids.remove(&pid);
        }
        if let Some(members) = self.families.get_mut(&process.relatives.family) {
            members.remove(&process.space);
            if members.is_empty() {
                self.families.remove(&process.relatives.family);
            }
        }
        self.spaces.remove(&process.space).is_some()
    }
}

/// The processes of one client.
pub(crate) struct Processes {
    known: RwLock<Known>,
    /// Incremented at each change of `known`.
    generation: AtomicU64,
    /// For each fault thread, the changes that it has not read yet.
    news: Vec<Mutex<News>>,
}

/// Changes that a fault thread has not read yet.
#[derive(Default)]
struct News {
    changes: Vec<Change>,
    /// There were others while it was not active.
    missed: bool,
}

impl Processes {
    /// An empty set.
    /// * `threads`: fault threads that follow its changes.
    pub(crate) fn new(threads: usize) -> Processes {
        Processes {
            known: RwLock::default(),
            generation: AtomicU64::new(0),
            news: (0..threads).map(|_| Mutex::default()).collect(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Known> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that changes with the set. Cost: one load.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// A thing of one of them has changed that threads follow.
    pub(crate) fn touch(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// The process of an address space, even if its books are not complete yet: a thread that needs
    /// them waits at its layout lock.
    pub(crate) fn get(&self, space: SpaceId) -> Option<Arc<Process>> {
        let known = self.read();
        let found = known.spaces.get(&space);
        found.or_else(|| known.forming.get(&space)).cloned()
    }

    /// The process of this number, with its newest address space.
    pub(crate) fn of_pid(&self, pid: u32) -> Option<Arc<Process>> {
        self.read().pids.get(&pid).cloned()
    }

    /// All processes, in order of their numbers. Cost: O(all), so not for each event.
    pub(crate) fn all(&self) -> Vec<Arc<Process>> {
        self.read().spaces.values().cloned().collect()
    }

    /// True if `wanted` is true of any process.
    pub(crate) fn any(&self, wanted: impl Fn(&Process) -> bool) -> bool {
        self.read().spaces.values().any(|process| wanted(process))
    }

    /// Address spaces that may share frames with this one by fork, and have an agent: those
    /// with the lowest numbers.
    pub(crate) fn relatives(&self, process: &Process) -> Vec<SpaceId> {
        let known = self.read();
        let family = known.families.get(&process.relatives.family);
        let others = family.into_iter().flatten().map(|(_, other)| other);
        let wanted =
            |other: &&Arc<Process>| other.space != process.space && other.agent.get().is_some();
        let spaces = others.filter(wanted).map(|other| other.space);
        spaces.take(RELATIVES_MAX).collect()
    }

    /// Whether a family has this number. Its first process may be gone.
    pub(crate) fn is_family(&self, space: SpaceId) -> bool {
        self.read().families.contains_key(&space)
    }

    /// Wakes the threads that wait on these pages.
    pub(crate) fn wake_pages(&self, pages: &mut Vec<(SpaceId, VirtPage)>) {
        for (space, page) in pages.drain(..) {
            if let Some(process) = self.get(space) {
                process.memory.wake(VirtRange::one(page));
            }
        }
    }

    /// Adds a fork child whose books are not complete yet; the caller holds its layout lock. Until
    /// [`Processes::add`] it can be found only by its space.
    pub(crate) fn add_forming(&self, process: Arc<Process>) {
        self.write().forming.insert(process.space, process);
    }

    /// Adds an address space, or notes that its process has announced itself. False if it was
    /// known.
    /// * `is_active`: whether a fault thread follows changes.
    pub(crate) fn add(&self, process: &Arc<Process>, is_active: impl Fn(usize) -> bool) -> bool {
        let mut known = self.write();
        if let Some(pid) = process.pid() {
            known.pids.insert(pid, process.clone());
        }
        known.forming.remove(&process.space);
        let is_new = known.list(process);
        if is_new {
            self.tell(is_active, || Change::Came(process.clone()));
        }
        is_new
    }

    /// Removes an address space. False if it was not known.
    /// * `is_active`: as for [`Processes::add`].
    pub(crate) fn remove(&self, process: &Process, is_active: impl Fn(usize) -> bool) -> bool {
        let mut known = self.write();
        let was = known.strike(process);
        if was {
            self.tell(is_active, || Change::Went(process.space));
        }
        was
    }

    /// Called with `known` locked, so that all threads read changes in one order. Threads that are
    /// not active keep no process alive.
    fn tell(&self, is_active: impl Fn(usize) -> bool, change: impl Fn() -> Change) {
        for (thread, news) in self.news.iter().enumerate() {
            let mut news = lock(news);
            if is_active(thread) {
                news.changes.push(change());
            } else {
                (news.changes, news.missed) = (Vec::new(), true);
            }
        }
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Takes the changes that a fault thread has not read yet, oldest first. `None`: there were
    /// more while it was not active.
    pub(crate) fn news(&self, thread: usize) -> Option<Vec<Change>> {
        let news = std::mem::take(&mut *lock(&self.news[thread]));
        (!news.missed).then_some(news.changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::model_tests::{options, shared};
    use crate::space::model::{ModelMemory, agent};

    /// Each that is asked costs a system call, for each page that a batch finds shared.
    #[test]
    fn relatives_that_are_asked_are_the_lowest_of_those_with_an_agent() {
        let shared = shared(options("ram"));
        let page = VirtPage(512);
        let mut all = Vec::new();
        for at in 0..2 * RELATIVES_MAX + 2 {
            let space = shared.books.engine().layout().add_space();
            let memory = Arc::new(ModelMemory::new(VirtRange::one(page)));
            let family = all.first().map(|first: &Arc<Process>| first.space);
            let row = shared.books.row(space);
            let process = Arc::new(Process::new(space, memory, page, None, family, row));
            if at % 2 == 0 {
                assert!(process.agent.set(agent(&shared, &process)).is_ok());
            }
            shared.add_process(&process);
            all.push(process);
        }
        let wanted = |of: usize| {
            let others = all.iter().step_by(2).filter(|it| it.space != all[of].space);
            others
                .map(|it| it.space)
                .take(RELATIVES_MAX)
                .collect::<Vec<_>>()
        };
        for of in [0, 1, all.len() - 1] {
            let found = shared.processes.relatives(&all[of]);
            assert_eq!((found.len(), found), (RELATIVES_MAX, wanted(of)));
        }
    }
}
