//! State that all connections share: the source, the rights of callers, and what is known of the
//! clients.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use undercroft_proto::report::Snapshot;

use crate::connections::Connections;
use crate::source::Source;
use crate::token::Token;

/// Age of what is known of the clients, before they are asked again.
const FRESH: Duration = Duration::from_millis(500);

/// Rights of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Nothing can be changed.
    Read,
    /// Callers may change running clients. Only over a Unix socket, whose callers are known.
    Change,
}

/// State that all connections share.
pub(crate) struct Shared {
    pub(crate) source: Box<dyn Source>,
    pub(crate) rights: Rights,
    pub(crate) is_tcp: bool,
    /// The secret that callers must say, if any.
    pub(crate) token: Option<Token>,
    known: Mutex<Option<(Instant, Arc<Vec<Snapshot>>)>>,
    pub(crate) connections: Arc<Connections>,
}

impl Shared {
    pub(crate) fn new(
        source: Box<dyn Source>,
        rights: Rights,
        is_tcp: bool,
        token: Option<Token>,
    ) -> Shared {
        Shared {
            source,
            rights,
            is_tcp,
            token,
            known: Mutex::new(None),
            connections: Arc::default(),
        }
    }

    /// The clients as they were at most [`FRESH`] ago. One caller asks, the others wait for it.
    /// Over TCP without the arguments of their programs: every user of the machine may call.
    pub(crate) fn clients(&self) -> Arc<Vec<Snapshot>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, clients)) = known.as_ref()
            && at.elapsed() < FRESH
        {
            return Arc::clone(clients);
        }
        let mut clients = self.source.clients();
        if self.is_tcp {
            clients.iter_mut().for_each(Snapshot::hide_arguments);
        }
        let clients = Arc::new(clients);
        *known = Some((Instant::now(), Arc::clone(&clients)));
        clients
    }

    /// Notes that the known state is old: a client was changed.
    pub(crate) fn forget(&self) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
