//! A small client of redis's protocol (RESP 2): enough to load, read back and compare.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// One answer of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// `+text`.
    Status(String),
    /// `-text`.
    Failure(String),
    /// `:number`.
    Number(i64),
    /// `$bytes`; `None` when the key does not exist.
    Bytes(Option<Vec<u8>>),
    /// `*...`.
    List(Vec<Reply>),
}

/// One connection.
#[derive(Debug)]
pub struct Resp {
    stream: BufReader<TcpStream>,
}

fn broken(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, text.into())
}

impl Resp {
    /// Connects to loopback, trying until the server listens or `patience` is over.
    ///
    /// Errors: the last refusal.
    pub fn connect(port: u16, patience: Duration) -> Result<Resp> {
        let begin = Instant::now();
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                    return Ok(Resp {
                        stream: BufReader::new(stream),
                    });
                }
                Err(error) if begin.elapsed() > patience => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Sends a command without waiting for its answer. At most a few thousand may be outstanding.
    pub fn send(&mut self, words: &[&[u8]]) -> Result<()> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            bytes.extend_from_slice(word);
            bytes.extend_from_slice(b"\r\n");
        }
        self.stream.get_mut().write_all(&bytes)
    }

    /// Waits for the next answer.
    pub fn receive(&mut self) -> Result<Reply> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let line = line
            .strip_suffix("\r\n")
            .ok_or_else(|| broken("the connection ended"))?;
        let (kind, rest) = line
            .split_at_checked(1)
            .ok_or_else(|| broken("an empty line"))?;
        let number = || {
            rest.parse::<i64>()
                .map_err(|_| broken(format!("`{rest}` is no number")))
        };
        Ok(match kind {
            "+" => Reply::Status(rest.to_owned()),
            "-" => Reply::Failure(rest.to_owned()),
            ":" => Reply::Number(number()?),
            "$" => match usize::try_from(number()?) {
                Err(_) => Reply::Bytes(None),
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.stream.read_exact(&mut bytes)?;
                    bytes.truncate(length);
                    Reply::Bytes(Some(bytes))
                }
            },
            "*" => {
                let count = number()?.max(0);
                Reply::List((0..count).map(|_| self.receive()).collect::<Result<_>>()?)
            }
            _ => return Err(broken(format!("an unknown answer `{line}`"))),
        })
    }

    /// Sends a command and waits for its answer.
    pub fn call(&mut self, words: &[&[u8]]) -> Result<Reply> {
        self.send(words)?;
        self.receive()
    }
}
