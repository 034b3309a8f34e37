//! Requests and replies as bytes.

use std::io::{self, BufRead, Read, Write};

/// Longest string accepted from the other side.
const STRING_MAX: usize = 64 << 20;
/// Most words of one request, and most elements of one list.
const WORDS_MAX: usize = 64;
/// Deepest list within a list.
const DEPTH_MAX: usize = 4;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+text`.
    Status(String),
    /// `-text`: the server refused.
    Failure(String),
    /// `:number`.
    Number(i64),
    /// `$bytes`; `None` if there is no such key.
    Bytes(Option<Vec<u8>>),
    /// `*...`.
    List(Vec<Reply>),
}

/// Writes one request.
pub fn write_request(out: &mut impl Write, words: &[&[u8]]) -> io::Result<()> {
    write!(out, "*{}\r\n", words.len())?;
    for word in words {
        write!(out, "${}\r\n", word.len())?;
        out.write_all(word)?;
        out.write_all(b"\r\n")?;
    }
    Ok(())
}

/// Reads one request; `None` at the end of the connection.
pub fn read_request(input: &mut impl BufRead) -> io::Result<Option<Vec<Vec<u8>>>> {
    if input.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let count = number(&line(input)?, b'*', WORDS_MAX)?;
    let words: io::Result<Vec<_>> = (0..count)
        .map(|_| {
            let size = number(&line(input)?, b'$', STRING_MAX)?;
            string(input, size)
        })
        .collect();
    words.map(Some)
}

/// Writes one reply.
pub fn write_reply(out: &mut impl Write, reply: &Reply) -> io::Result<()> {
    match reply {
        Reply::Status(text) => write!(out, "+{text}\r\n"),
        Reply::Failure(why) => write!(out, "-ERR {why}\r\n"),
        Reply::Number(number) => write!(out, ":{number}\r\n"),
        Reply::Bytes(None) => out.write_all(b"$-1\r\n"),
        Reply::Bytes(Some(value)) => {
            write!(out, "${}\r\n", value.len())?;
            out.write_all(value)?;
            out.write_all(b"\r\n")
        }
        Reply::List(replies) => {
            write!(out, "*{}\r\n", replies.len())?;
            replies.iter().try_for_each(|reply| write_reply(out, reply))
        }
    }
}

/// Reads one reply.
pub fn read_reply(input: &mut impl BufRead) -> io::Result<Reply> {
    reply(input, DEPTH_MAX)
}

fn reply(input: &mut impl BufRead, depth: usize) -> io::Result<Reply> {
    let head = line(input)?;
    let text = || String::from_utf8_lossy(&head[1..]).into_owned();
    match head.first() {
        Some(b'+') => Ok(Reply::Status(text())),
        Some(b'-') => Ok(Reply::Failure(text())),
        Some(b':') => match text().parse() {
            Ok(number) => Ok(Reply::Number(number)),
            Err(_) => Err(malformed("a number that is none")),
        },
        Some(b'$') if head == b"$-1" => Ok(Reply::Bytes(None)),
        Some(b'$') => {
            let size = number(&head, b'$', STRING_MAX)?;
            Ok(Reply::Bytes(Some(string(input, size)?)))
        }
        Some(b'*') if depth > 0 => {
            let count = number(&head, b'*', WORDS_MAX)?;
            let replies = (0..count).map(|_| reply(input, depth - 1));
            Ok(Reply::List(replies.collect::<io::Result<_>>()?))
        }
        _ => Err(malformed("a reply of unknown kind")),
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the server's protocol is broken: {what}"),
    )
}

fn line(input: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(32);
    let taken = input.take(4096).read_until(b'\n', &mut line)?;
    if taken == 0 {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the server closed the connection",
        ));
    }
    if !line.ends_with(b"\r\n") {
        return Err(malformed("a line without its end"));
    }
    line.truncate(line.len() - 2);
    Ok(line)
}

fn number(line: &[u8], kind: u8, max: usize) -> io::Result<usize> {
    let digits = line
        .strip_prefix(&[kind])
        .ok_or_else(|| malformed("an unexpected kind of word"))?;
    let text = std::str::from_utf8(digits).map_err(|_| malformed("a length that is no number"))?;
    match text.parse::<usize>() {
        Ok(value) if value <= max => Ok(value),
        _ => Err(malformed("a length out of bounds")),
    }
}

fn string(input: &mut impl BufRead, size: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; size + 2];
    input.read_exact(&mut bytes)?;
    if !bytes.ends_with(b"\r\n") {
        return Err(malformed("a string without its end"));
    }
    bytes.truncate(size);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_survive_the_wire() {
        let mut wire = Vec::new();
        write_request(&mut wire, &[b"SET", b"k", b"a\r\nb\0"]).expect("a vector takes all");
        let request = read_request(&mut &wire[..]).expect("well formed");
        assert_eq!(
            request,
            Some(vec![b"SET".to_vec(), b"k".to_vec(), b"a\r\nb\0".to_vec()])
        );
        for reply in [
            Reply::Status("OK".into()),
            Reply::Number(-3),
            Reply::Bytes(Some(vec![13, 10, 0])),
            Reply::Bytes(Some(vec![])),
            Reply::Bytes(None),
            Reply::List(vec![Reply::Number(1), Reply::List(vec![])]),
        ] {
            let mut wire = Vec::new();
            write_reply(&mut wire, &reply).expect("a vector takes all");
            assert_eq!(read_reply(&mut &wire[..]).expect("well formed"), reply);
        }
    }

    #[test]
    fn broken_replies_are_errors_not_values() {
        for wire in [
            &b""[..],
            b"+OK",
            b"$5\r\nabc\r\n",
            b"$99999999999\r\n",
            b"$x\r\n",
            b"!3\r\n",
            b"$3\r\nabcde",
            b":x\r\n",
            b"*99\r\n",
            b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*0\r\n",
        ] {
            assert!(
                read_reply(&mut &wire[..]).is_err(),
                "{:?}",
                String::from_utf8_lossy(wire)
            );
        }
    }
}
