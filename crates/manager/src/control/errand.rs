//! Requests of users that may take a while: a thread does the work, and tells the user the outcome.
//! The control thread keeps the limit meanwhile.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;

use undercroft_proto::messages::Answered;

/// Errands of one kind. One at a time.
pub(super) struct Errand {
    is_under_way: AtomicBool,
    busy: &'static str,
}

impl Errand {
    /// * `busy`: the answer to a user who asks while one is under way.
    pub(super) const fn new(busy: &'static str) -> Errand {
        Errand {
            is_under_way: AtomicBool::new(false),
            busy,
        }
    }

    /// Has a thread of this name do `work`, and tell `peer` that it is done, or why it is not.
    ///
    /// Errors: why not, at once.
    pub(super) fn begin(
        &'static self,
        name: &str,
        mut peer: File,
        work: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Result<(), (String, File)> {
        if self.is_under_way.swap(true, Ordering::Relaxed) {
            return Err((self.busy.to_owned(), peer));
        }
        let started = peer.try_clone().and_then(|mut answers| {
            Builder::new().name(name.into()).spawn(move || {
                let answer = work().map_or_else(Answered::Refused, |()| Answered::Yes);
                self.is_under_way.store(false, Ordering::Relaxed);
                tell(&mut answers, &answer);
            })
        });
        if let Err(error) = started {
            self.is_under_way.store(false, Ordering::Relaxed);
            tell(
                &mut peer,
                &Answered::Refused(format!("no thread for it: {error}")),
            );
        }
        Ok(())
    }
}

fn tell(peer: &mut File, answer: &Answered) {
    if let Ok(bytes) = serde_json::to_vec(answer) {
        let _: io::Result<()> = peer.write_all(&bytes);
    }
}
