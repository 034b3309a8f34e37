//! How a fork child announces itself: by a number that it reads on its beacon.

use undercroft_base::BASE_PAGE_BYTES;
use undercroft_proto::legacy::Number;
use undercroft_sys::procfs;
use undercroft_sys::uffd::UffdError;

use crate::space::port::Wake;
use crate::space::process::Process;
use crate::space::relatives::Ticket;
use crate::sync::lock;

impl Process {
    /// Puts a new number on the beacon of a fork child, by which thread `thread` is to announce the
    /// process. The caller holds no lock, and wakes the threads that wait there. Errors: the
    /// page is not missing, the layout is changing, or there are no random numbers.
    pub(crate) fn issue_ticket(&self, thread: u32) -> Result<u64, UffdError> {
        let bytes = undercroft_sys::process::random_bytes();
        let bytes = bytes.map_err(|_| UffdError::NoMemory { done: 0 })?;
        let nonce = u64::from_ne_bytes(bytes).max(1); // 0: not managed
        let mut page = [0u8; BASE_PAGE_BYTES];
        page[..8].copy_from_slice(&nonce.to_ne_bytes());
        let _layout = self.layout.read();
        let mut ticket = lock(&self.relatives.ticket);
        // First: a number that the child has read must be known to a successor, too.
        self.row.put(Number::NonceThread, thread.into());
        self.row.put(Number::Nonce, nonce);
        let beacon = self.relatives.beacon;
        if let Err(refused) = (self.memory).install(beacon, &page, Wake::Later) {
            let before = ticket
                .as_ref()
                .map_or((0, 0), |old| (old.nonce, old.thread));
            self.row.put(Number::Nonce, before.0);
            self.row.put(Number::NonceThread, before.1.into());
            return Err(refused);
        }
        *ticket = Some(Ticket { nonce, thread });
        Ok(nonce)
    }

    /// The ticket is thread `thread`'s.
    pub(crate) fn give_ticket(&self, thread: u32) {
        if let Some(ticket) = lock(&self.relatives.ticket).as_mut() {
            ticket.thread = thread;
            self.row.put(Number::NonceThread, thread.into());
        }
    }

    /// Takes the ticket. False unless `nonce` is its number and it was given to a thread of process
    /// `pid`.
    pub(crate) fn redeem(&self, nonce: u64, pid: u32) -> bool {
        let mut ticket = lock(&self.relatives.ticket);
        let good = ticket.as_ref().is_some_and(|ticket| {
            ticket.nonce == nonce && procfs::is_thread_of(pid, ticket.thread)
        });
        good && ticket.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use undercroft_base::{SpaceId, VirtPage, VirtRange};

    use super::*;
    use crate::space::model::ModelMemory;
    use undercroft_proto::legacy::Row;

    const NONCE: u64 = 0x5eed;

    /// A fork child whose ticket was given to the calling thread.
    fn child() -> Process {
        let pages = VirtRange::new(VirtPage(0), VirtPage(1));
        let memory = Arc::new(ModelMemory::new(pages));
        let process = Process::new(
            SpaceId(1),
            memory,
            VirtPage(1),
            Some(SpaceId(0)),
            None,
            Row::default(),
        );
        *lock(&process.relatives.ticket) = Some(Ticket {
            nonce: NONCE,
            thread: undercroft_sys::process::thread_id(),
        });
        process
    }

    #[test]
    fn redeem_accepts_the_process_of_the_thread_once() {
        let process = child();
        assert!(process.redeem(NONCE, std::process::id()));
        assert!(!process.redeem(NONCE, std::process::id()), "a second use");
    }

    /// A refusal leaves the ticket to the process that it belongs to.
    #[test]
    fn redeem_refuses_another_process_and_another_number() {
        let process = child();
        let parent = std::os::unix::process::parent_id();
        for pid in [parent, 1, 0, u32::MAX] {
            assert!(!process.redeem(NONCE, pid), "process {pid}");
        }
        for nonce in [0, 1, NONCE + 1, NONCE << 1, !NONCE] {
            assert!(!process.redeem(nonce, std::process::id()), "number {nonce}");
        }
        assert!(process.redeem(NONCE, std::process::id()));
    }

    /// 0 stands for "not managed". No process has it, and without a ticket no number is good.
    #[test]
    fn redeem_without_a_ticket_refuses_every_number() {
        let process = child();
        *lock(&process.relatives.ticket) = None;
        for nonce in [0, NONCE] {
            assert!(!process.redeem(nonce, std::process::id()), "number {nonce}");
        }
    }

    #[test]
    fn redeem_refuses_the_process_from_which_the_ticket_went_to_another_thread() {
        let process = child();
        process.give_ticket(1); // the first process of the machine
        assert!(!process.redeem(NONCE, std::process::id()));
        assert!(process.redeem(NONCE, 1));
    }
}
