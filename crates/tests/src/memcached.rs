//! A small client of memcached's text protocol: set and get.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A connection.
#[derive(Debug)]
pub struct Memcached {
    stream: BufReader<TcpStream>,
}

impl Memcached {
    /// Connects to loopback. Tries until the server listens or `patience` is over.
    ///
    /// Errors: the last refusal.
    pub fn connect(port: u16, patience: Duration) -> Result<Memcached> {
        let begin = Instant::now();
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                    return Ok(Memcached {
                        stream: BufReader::new(stream),
                    });
                }
                Err(error) if begin.elapsed() > patience => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Stores a value. Errors: anything but `STORED`.
    pub fn set(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let mut bytes = format!("set {key} 0 0 {}\r\n", value.len()).into_bytes();
        bytes.extend_from_slice(value);
        bytes.extend_from_slice(b"\r\n");
        self.stream.get_mut().write_all(&bytes)?;
        match self.line()?.as_str() {
            "STORED" => Ok(()),
            other => Err(Error::new(ErrorKind::InvalidData, other.to_owned())),
        }
    }

    /// The value of a key; `None` if the server has none.
    pub fn get(&mut self, key: &str) -> Result<Option<Vec<u8>>> {
        self.stream
            .get_mut()
            .write_all(format!("get {key}\r\n").as_bytes())?;
        let head = self.line()?;
        if head == "END" {
            return Ok(None);
        }
        let length: usize = head
            .rsplit(' ')
            .next()
            .filter(|_| head.starts_with("VALUE "))
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| Error::new(ErrorKind::InvalidData, head.clone()))?;
        let mut value = vec![0; length + 2];
        self.stream.read_exact(&mut value)?;
        value.truncate(length);
        match self.line()?.as_str() {
            "END" => Ok(Some(value)),
            other => Err(Error::new(ErrorKind::InvalidData, other.to_owned())),
        }
    }
}
