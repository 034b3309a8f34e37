//! What all connections share: the source, the rights of callers, and what is known of the clients.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use undercroft_manager::report::Snapshot;

use crate::source::Source;

/// Age of what is known of the clients, before they are asked again.
const FRESH: Duration = Duration::from_millis(500);

/// What callers may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Nothing can be changed.
    Read,
    /// Callers may change running clients. Only over a Unix socket, whose callers are known.
    Change,
}

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) source: Box<dyn Source>,
    pub(crate) rights: Rights,
    pub(crate) is_tcp: bool,
    known: Mutex<Option<(Instant, Arc<Vec<Snapshot>>)>>,
    /// How many are open.
    pub(crate) connections: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(source: Box<dyn Source>, rights: Rights, is_tcp: bool) -> Shared {
        Shared {
            source,
            rights,
            is_tcp,
            known: Mutex::new(None),
            connections: AtomicUsize::new(0),
        }
    }

    /// The clients as they were at most [`FRESH`] ago. One caller asks, the others wait for it.
    pub(crate) fn clients(&self) -> Arc<Vec<Snapshot>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, clients)) = known.as_ref()
            && at.elapsed() < FRESH
        {
            return Arc::clone(clients);
        }
        let clients = Arc::new(self.source.clients());
        *known = Some((Instant::now(), Arc::clone(&clients)));
        clients
    }

    /// What is known is old: a client was changed.
    pub(crate) fn forget(&self) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
