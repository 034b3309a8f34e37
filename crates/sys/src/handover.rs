//! Hands open descriptors over by their numbers. A process that shares the descriptor table of a
//! dead one answers; its successor asks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::fdpass::{self, FDS_MAX};
use crate::process;

/// Stands for no descriptor.
pub const NONE: i32 = -1;

/// Most descriptors of one question.
pub const ASK_MAX: usize = FDS_MAX;

/// Bytes before the numbers of a question, and in its answer: they say to which it belongs.
const TAG_BYTES: usize = 8;

/// Asks the other end of `socket` for descriptors by number. The answer has one for each, `None`
/// for [`NONE`]. An asker that died may have left an answer in the socket: it is dropped.
///
/// Errors: the other end is gone, or has not all of them; there are no random numbers.
pub fn ask(socket: BorrowedFd<'_>, numbers: &[i32]) -> io::Result<Vec<Option<OwnedFd>>> {
    assert!(numbers.len() <= ASK_MAX);
    let tag: [u8; TAG_BYTES] = process::random_bytes()?;
    let numbers_given = numbers.iter().flat_map(|n| n.to_ne_bytes());
    let question: Vec<u8> = tag.into_iter().chain(numbers_given).collect();
    fdpass::send(socket, &question, &[])?;
    let (is_good, given) = loop {
        let mut answer = [0u8; TAG_BYTES + 1];
        let (got, given) = fdpass::receive(socket, &mut answer)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if answer[..TAG_BYTES] == tag {
            break (got == answer.len() && answer[TAG_BYTES] == 1, given);
        }
    };
    let wanted = numbers.iter().filter(|number| **number != NONE).count();
    if !is_good || given.len() != wanted {
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
    let mut question = [0u8; TAG_BYTES + 4 * ASK_MAX];
    let (got, _) = fdpass::receive(socket, &mut question)?;
    if got == 0 {
        return Ok(false);
    }
    let Some((tag, numbers)) = question[..got].split_first_chunk::<TAG_BYTES>() else {
        return Ok(true); // no question, so no one waits
    };
    let (numbers, _) = numbers.as_chunks::<4>();
    let numbers = numbers.iter().map(|bytes| i32::from_ne_bytes(*bytes));
    let given: Vec<BorrowedFd<'_>> = numbers
        .filter(|number| *number != NONE && *number > 2 && *number != socket.as_raw_fd())
        // SAFETY: the number is only passed to one system call, which fails if nothing is open
        // there. No other thread of this process closes descriptors.
        .map(|number| unsafe { BorrowedFd::borrow_raw(number) })
        .collect();
    let with = |word: u8| -> Vec<u8> { tag.iter().copied().chain([word]).collect() };
    if fdpass::send(socket, &with(1), &given).is_err() {
        fdpass::send(socket, &with(0), &[])?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let made = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        made.unwrap()
    }

    #[test]
    fn descriptors_come_by_number_and_a_closed_one_is_refused() {
        let (here, there) = pair();
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

    /// A successor died after its question. The next one asks on the same socket, and must not take
    /// the descriptors of one process for those of another.
    #[test]
    fn the_answer_to_an_asker_that_died_is_not_taken_for_another() {
        let (here, there) = pair();
        let null = std::fs::File::open("/dev/null").unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let question: Vec<u8> = [7; TAG_BYTES]
            .into_iter()
            .chain(zero.as_raw_fd().to_ne_bytes())
            .collect();
        fdpass::send(here.as_fd(), &question, &[]).unwrap();
        assert!(answer(there.as_fd()).unwrap());
        let served = std::thread::spawn(move || answer(there.as_fd()).unwrap());
        let given = ask(here.as_fd(), &[null.as_raw_fd()]).unwrap();
        let given = std::fs::File::from(given.into_iter().flatten().next().unwrap());
        use std::os::unix::fs::MetadataExt;
        assert_eq!(
            given.metadata().unwrap().rdev(),
            null.metadata().unwrap().rdev()
        );
        assert!(served.join().unwrap());
    }
}
