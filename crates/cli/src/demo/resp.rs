//! The part of the Redis protocol (RESP2) that the demo speaks: requests as arrays of strings, four
//! kinds of replies.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// No reply for so long means the store hangs: the demo stops instead of waiting for ever.
const REPLY_PATIENCE: Duration = Duration::from_secs(60);
/// Largest string taken from the other side.
const STRING_MAX: usize = 64 << 20;
/// Most words of one request.
const WORDS_MAX: usize = 64;

/// One reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+OK` and other short texts, and numbers.
    Text(String),
    /// A value.
    Value(Vec<u8>),
    /// There is no such key.
    Absent,
    /// The store refused.
    Refused(String),
}

/// One connection to a store.
pub struct Client {
    reader: BufReader<UnixStream>,
    writer: BufWriter<UnixStream>,
}

impl Client {
    /// Connects to the store that listens on `socket`.
    pub fn connect(socket: &Path) -> io::Result<Client> {
        Client::over(UnixStream::connect(socket)?)
    }

    /// Talks over a connection that exists.
    pub fn over(stream: UnixStream) -> io::Result<Client> {
        stream.set_read_timeout(Some(REPLY_PATIENCE))?;
        let writer = BufWriter::with_capacity(256 << 10, stream.try_clone()?);
        Ok(Client {
            reader: BufReader::with_capacity(256 << 10, stream),
            writer,
        })
    }

    /// Queues a request; `flush` sends what is queued.
    pub fn send(&mut self, words: &[&[u8]]) -> io::Result<()> {
        write_request(&mut self.writer, words)
    }

    /// Sends what is queued.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Waits for the next reply.
    pub fn receive(&mut self) -> io::Result<Reply> {
        read_reply(&mut self.reader)
    }

    /// One request and its reply.
    pub fn call(&mut self, words: &[&[u8]]) -> io::Result<Reply> {
        self.send(words)?;
        self.flush()?;
        self.receive()
    }
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
        Reply::Text(text) => write!(out, "+{text}\r\n"),
        Reply::Refused(why) => write!(out, "-ERR {why}\r\n"),
        Reply::Absent => out.write_all(b"$-1\r\n"),
        Reply::Value(value) => {
            write!(out, "${}\r\n", value.len())?;
            out.write_all(value)?;
            out.write_all(b"\r\n")
        }
    }
}

/// Reads one reply.
pub fn read_reply(input: &mut impl BufRead) -> io::Result<Reply> {
    let head = line(input)?;
    let text = || String::from_utf8_lossy(&head[1..]).into_owned();
    match head.first() {
        Some(b'+' | b':') => Ok(Reply::Text(text())),
        Some(b'-') => Ok(Reply::Refused(text())),
        Some(b'$') if head == b"$-1" => Ok(Reply::Absent),
        Some(b'$') => {
            let size = number(&head, b'$', STRING_MAX)?;
            string(input, size).map(Reply::Value)
        }
        _ => Err(malformed("a reply of unknown kind")),
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the store's protocol is broken: {what}"),
    )
}

fn line(input: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(32);
    let taken = input.take(4096).read_until(b'\n', &mut line)?;
    if taken == 0 {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the store closed the connection",
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
            Reply::Text("OK".into()),
            Reply::Value(vec![13, 10, 0]),
            Reply::Value(vec![]),
            Reply::Absent,
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
        ] {
            assert!(
                read_reply(&mut &wire[..]).is_err(),
                "{:?}",
                String::from_utf8_lossy(wire)
            );
        }
    }
}
