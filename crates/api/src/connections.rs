//! The open connections. Where a further one finds no room, the oldest that waits for its peer
//! makes room: peers that send no request keep no others out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::http::Stream;

/// Most connections at a time.
pub(crate) const CONNECTIONS_MAX: usize = 32;

/// All open connections.
#[derive(Default)]
pub(crate) struct Connections(Mutex<Open>);

#[derive(Default)]
struct Open {
    /// Oldest first.
    all: VecDeque<One>,
    /// The number of the next.
    next: u64,
}

struct One {
    number: u64,
    stream: Box<dyn Stream>,
    /// The request is read, and the answer is made.
    has_asked: bool,
}

/// A connection's place among the open ones, until it is dropped.
pub(crate) struct Seat {
    of: Arc<Connections>,
    number: u64,
}

impl Connections {
    /// A place for a connection. `None`: all others have sent their requests, and wait for answers.
    pub(crate) fn admit(self: &Arc<Self>, stream: &dyn Stream) -> Option<Seat> {
        let stream = stream.another().ok()?;
        let mut open = self.lock();
        if open.all.len() >= CONNECTIONS_MAX {
            let oldest = open.all.iter().position(|one| !one.has_asked)?;
            if let Some(one) = open.all.remove(oldest) {
                one.stream.close(); // its thread sees the end
            }
        }
        let number = open.next;
        open.next += 1;
        open.all.push_back(One {
            number,
            stream,
            has_asked: false,
        });
        drop(open);
        Some(Seat {
            of: Arc::clone(self),
            number,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Notes whether the peer has sent its request, and waits for us.
    pub(crate) fn has_asked(&self, has_asked: bool) {
        let mut open = self.of.lock();
        let ours = open.all.iter_mut().find(|one| one.number == self.number);
        if let Some(one) = ours {
            one.has_asked = has_asked;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.of.lock().all.retain(|one| one.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_oldest_that_has_not_asked_makes_room_and_none_that_waits_for_an_answer() {
        let all = Arc::new(Connections::default());
        let admit = || {
            let (ours, peer) = UnixStream::pair().expect("a pair");
            (all.admit(&ours), ours, peer)
        };
        let mut held: Vec<_> = (0..CONNECTIONS_MAX).map(|_| admit()).collect();
        let has_asked = |of: &(Option<Seat>, UnixStream, UnixStream), is| {
            of.0.as_ref().expect("a place").has_asked(is);
        };
        held.iter().for_each(|one| has_asked(one, true));
        assert!(admit().0.is_none(), "all wait for answers");
        has_asked(&held[3], false);
        has_asked(&held[7], false);
        let further = admit();
        assert!(further.0.is_some());
        assert_eq!(held[3].2.read(&mut [0]).ok(), Some(0), "it is closed");
        has_asked(&further, true);
        held.truncate(7); // drops a place of one that waits for its peer, and others
        drop(held.remove(3)); // has no place any more
        assert_eq!(all.lock().all.len(), 7);
    }
}
