//! Hands open descriptors over by their numbers. A process that shares the descriptor table of a
//! dead one answers; its successor asks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::fdpass::{self, FDS_MAX};

/// Stands for no descriptor.
pub const NONE: i32 = -1;

/// Most descriptors of one question.
pub const ASK_MAX: usize = FDS_MAX;

/// Asks the other end of `socket` for descriptors by number. The answer has one for each, `None`
/// for [`NONE`].
///
/// Errors: the other end is gone, or has not all of them.
pub fn ask(socket: BorrowedFd<'_>, numbers: &[i32]) -> io::Result<Vec<Option<OwnedFd>>> {
    assert!(numbers.len() <= ASK_MAX);
    let question: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
    fdpass::send(socket, &question, &[])?;
    let mut answer = [0u8; 1];
    let (got, given) = fdpass::receive(socket, &mut answer)?;
    let wanted = numbers.iter().filter(|number| **number != NONE).count();
    if got != 1 || answer[0] != 1 || given.len() != wanted {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut given = given.into_iter();
    let of = |number: &i32| (*number != NONE).then(|| given.next()).flatten();
    Ok(numbers.iter().map(of).collect())
}

/// Answers one question. False if the other end is gone.
///
/// Errors: the answer cannot be sent.
pub fn answer(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut question = [0u8; 4 * ASK_MAX];
    let (got, _) = fdpass::receive(socket, &mut question)?;
    if got == 0 {
        return Ok(false);
    }
    let (numbers, _) = question[..got].as_chunks::<4>();
    let numbers = numbers.iter().map(|bytes| i32::from_ne_bytes(*bytes));
    let given: Vec<BorrowedFd<'_>> = numbers
        .filter(|number| *number != NONE && *number > 2 && *number != socket.as_raw_fd())
        // SAFETY: the number is only passed to one system call, which fails if nothing is open
        // there. No other thread of this process closes descriptors.
        .map(|number| unsafe { BorrowedFd::borrow_raw(number) })
        .collect();
    if fdpass::send(socket, &[1], &given).is_err() {
        fdpass::send(socket, &[0], &[])?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn descriptors_come_by_number_and_a_closed_one_is_refused() {
        let made = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let (here, there) = made.unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let served = std::thread::spawn(move || {
            let mut answered = 0;
            while answer(there.as_fd()).unwrap() {
                answered += 1;
            }
            answered
        });
        let given = ask(here.as_fd(), &[NONE, file.as_raw_fd(), NONE]).unwrap();
        assert!(given[0].is_none() && given[2].is_none());
        let given = std::fs::File::from(given.into_iter().flatten().next().unwrap());
        use std::os::unix::fs::MetadataExt;
        assert_eq!(
            given.metadata().unwrap().ino(),
            file.metadata().unwrap().ino()
        );
        assert!(ask(here.as_fd(), &[1 << 20]).is_err());
        drop(here);
        assert_eq!(served.join().unwrap(), 2);
    }
}
