//! Reads one request from a hostile peer. Sizes and time are bounded.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::answer::Answer;

/// Most bytes of a request's first line and headers.
pub(crate) const HEAD_BYTES_MAX: usize = 8 << 10;
/// Most headers.
const HEADERS_MAX: usize = 64;
/// Most bytes of a body.
pub(crate) const BODY_BYTES_MAX: usize = 4 << 10;
/// Time for a whole request, and once more for its answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A connection.
pub(crate) trait Stream: Read + Write + Send {
    /// * `left`: above zero.
    fn set_patience(&self, left: Duration) -> io::Result<()>;

    /// Another handle of it.
    fn another(&self) -> io::Result<Box<dyn Stream>>;

    /// Ends it for all its handles: reads see its end, writes fail.
    fn close(&self);
}

impl Stream for TcpStream {
    fn set_patience(&self, left: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(left))?;
        self.set_write_timeout(Some(left))
    }

    fn another(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.try_clone()?))
    }

    fn close(&self) {
        let _ = self.shutdown(Shutdown::Both); // the peer may be gone
    }
}

impl Stream for UnixStream {
    fn set_patience(&self, left: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(left))?;
        self.set_write_timeout(Some(left))
    }

    fn another(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(self.try_clone()?))
    }

    fn close(&self) {
        let _ = self.shutdown(Shutdown::Both); // the peer may be gone
    }
}

/// A request, whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Without the query.
    pub(crate) path: String,
    /// HTTP/1.0, in which `Host` may be missing. Browsers do not speak it.
    pub(crate) is_old: bool,
    pub(crate) host: Option<String>,
    pub(crate) authorization: Option<String>,
    pub(crate) origin: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) body: Vec<u8>,
}

/// Reads a request. `Err(None)`: the peer is gone.
pub(crate) fn read(stream: &mut dyn Stream, patience: Duration) -> Result<Request, Option<Answer>> {
    let deadline = Instant::now() + patience;
    let mut bytes = Vec::new();
    loop {
        if let Some((request, length, head)) = parse(&bytes).map_err(Some)? {
            return read_body(stream, deadline, request, bytes.split_off(head), length);
        }
        if bytes.len() >= HEAD_BYTES_MAX {
            return Err(Some(too_large_head()));
        }
        more(stream, deadline, &mut bytes, HEAD_BYTES_MAX)?;
    }
}

fn read_body(
    stream: &mut dyn Stream,
    deadline: Instant,
    mut request: Request,
    mut body: Vec<u8>,
    length: usize,
) -> Result<Request, Option<Answer>> {
    while body.len() < length {
        more(stream, deadline, &mut body, length)?;
    }
    body.truncate(length);
    request.body = body;
    Ok(request)
}

/// Reads some bytes; `into` has `most` of them at most.
fn more(
    stream: &mut dyn Stream,
    deadline: Instant,
    into: &mut Vec<u8>,
    most: usize,
) -> Result<(), Option<Answer>> {
    let late = || {
        let why = "the request was not complete in 5 seconds";
        Answer::error(408, "the request is late", why, "send it at once")
    };
    let left = deadline.checked_duration_since(Instant::now());
    let left = left
        .filter(|left| !left.is_zero())
        .ok_or_else(|| Some(late()))?;
    stream.set_patience(left).map_err(|_| None)?;
    let mut some = [0; 2048];
    let room = some.len().min(most - into.len());
    match stream.read(&mut some[..room]) {
        Ok(0) => Err(None),
        Ok(got) => {
            into.extend_from_slice(&some[..got]);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Some(late())),
        Err(_) => Err(None),
    }
}

fn bad(why: &str) -> Answer {
    Answer::error(
        400,
        "the request cannot be read",
        why,
        "send HTTP/1.1, as curl does",
    )
}

fn too_large_head() -> Answer {
    let why = "the first line and the headers may take 8 KiB, in 64 headers";
    Answer::error(431, "the headers are too large", why, "send fewer")
}

/// The request, the length of its body, and that of its head. `None`: more bytes are needed.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Request, usize, usize)>, Answer> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let head = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(too_large_head()),
        Err(error) => return Err(bad(&error.to_string())),
    };
    let mut request = Request {
        method: parsed.method.unwrap_or_default().to_owned(),
        path: parsed.path.unwrap_or_default().to_owned(),
        is_old: parsed.version == Some(0),
        ..Request::default()
    };
    if let Some(at) = request.path.find('?') {
        request.path.truncate(at);
    }
    let mut length = None;
    for header in parsed.headers.iter() {
        let value = std::str::from_utf8(header.value).map_err(|_| bad("a header is not UTF-8"))?;
        let once = |slot: &mut Option<String>| match slot.replace(value.trim().to_owned()) {
            Some(_) => Err(bad("a header is there twice")),
            None => Ok(()),
        };
        match header.name.to_ascii_lowercase().as_str() {
            "host" => once(&mut request.host)?,
            "authorization" => once(&mut request.authorization)?,
            "origin" => once(&mut request.origin)?,
            "content-type" => once(&mut request.content_type)?,
            "content-length" => once(&mut length)?,
            "transfer-encoding" => {
                let why = "a body without its length is not taken";
                return Err(Answer::error(
                    411,
                    "the length is missing",
                    why,
                    "send Content-Length",
                ));
            }
            _ => {}
        }
    }
    let length = match length {
        Some(text) if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) => {
            return Err(bad("Content-Length is no number"));
        }
        // A number too large for the type is too large for us.
        Some(text) => text.parse().unwrap_or(usize::MAX),
        None => 0,
    };
    if length > BODY_BYTES_MAX {
        let why = "a body may take 4 KiB";
        return Err(Answer::error(
            413,
            "the body is too large",
            why,
            "send less",
        ));
    }
    Ok(Some((request, length, head)))
}

/// Whether a Host header names this server for certain: an address or `localhost`. A page of
/// another site reaches a local server by a name of its own (DNS rebinding).
pub(crate) fn is_address(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'));
    name.eq_ignore_ascii_case("localhost") || bare.unwrap_or(name).parse::<IpAddr>().is_ok()
}

/// Writes all of it, or gives up after `patience`.
pub(crate) fn write(stream: &mut dyn Stream, bytes: &[u8], patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    let mut rest = bytes;
    while !rest.is_empty() {
        let left = deadline.checked_duration_since(Instant::now());
        let left = left.filter(|left| !left.is_zero());
        stream.set_patience(left.ok_or(io::ErrorKind::TimedOut)?)?;
        match stream.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(sent) => rest = &rest[sent..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(text: &str) -> u16 {
        match parse(text.as_bytes()) {
            Ok(Some(_)) => 200,
            Ok(None) => 0,
            Err(answer) => answer.status,
        }
    }

    #[test]
    fn requests_that_are_wrong_or_too_large_are_refused_with_their_status() {
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), 200);
        assert_eq!(status("GET / HTTP/1.1\r\nHo"), 0);
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
        assert_eq!(status("\x01\x02\r\n\r\n"), 400);
        assert_eq!(status("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), 400);
        assert_eq!(
            status("POST / HTTP/1.1\r\nContent-Length: 4097\r\n\r\n"),
            413
        );
        let huge = "9".repeat(40);
        assert_eq!(
            status(&format!(
                "POST / HTTP/1.1\r\nContent-Length: {huge}\r\n\r\n"
            )),
            413
        );
        assert_eq!(
            status("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"),
            411
        );
        let many = "a: b\r\n".repeat(65);
        assert_eq!(status(&format!("GET / HTTP/1.1\r\n{many}\r\n")), 431);
    }

    #[test]
    fn a_host_is_an_address_or_localhost() {
        for host in [
            "127.0.0.1:9750",
            "localhost",
            "LOCALHOST:1",
            "[::1]:9750",
            "10.0.0.1",
        ] {
            assert!(is_address(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9750",
            "127.0.0.1.evil.example",
            "",
            "a:b",
        ] {
            assert!(!is_address(host), "{host}");
        }
    }
}
