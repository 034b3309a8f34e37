//! A connection to a server.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::wire::{Reply, read_reply, write_request};

/// Longest wait for a reply: without one, the server hangs.
const REPLY_PATIENCE: Duration = Duration::from_secs(60);
/// Bytes buffered each way.
const BUFFER_BYTES: usize = 256 << 10;
/// Rest between two tries to connect.
const RETRY: Duration = Duration::from_millis(20);

/// A connection to a server.
pub struct Client {
    reader: BufReader<Box<dyn Read + Send>>,
    writer: BufWriter<Box<dyn Write + Send>>,
}

impl Client {
    /// Connects to the server that listens on `socket`.
    pub fn connect(socket: &Path) -> io::Result<Client> {
        Client::over(UnixStream::connect(socket)?)
    }

    /// Uses an existing connection.
    pub fn over(stream: UnixStream) -> io::Result<Client> {
        stream.set_read_timeout(Some(REPLY_PATIENCE))?;
        let writer = stream.try_clone()?;
        Ok(Client::of(Box::new(stream), Box::new(writer)))
    }

    /// Connects to `port` of this machine. Tries until the server listens, or `patience` is over.
    ///
    /// Errors: the last refusal.
    pub fn to_port(port: u16, patience: Duration) -> io::Result<Client> {
        let begin = Instant::now();
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(REPLY_PATIENCE))?;
                    let writer = stream.try_clone()?;
                    return Ok(Client::of(Box::new(stream), Box::new(writer)));
                }
                Err(error) if begin.elapsed() > patience => return Err(error),
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    fn of(reader: Box<dyn Read + Send>, writer: Box<dyn Write + Send>) -> Client {
        Client {
            reader: BufReader::with_capacity(BUFFER_BYTES, reader),
            writer: BufWriter::with_capacity(BUFFER_BYTES, writer),
        }
    }

    /// Queues a request; [`Client::flush`] sends the queue.
    pub fn queue(&mut self, words: &[&[u8]]) -> io::Result<()> {
        write_request(&mut self.writer, words)
    }

    /// Sends what is queued.
    pub fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }

    /// Sends a request without waiting for its reply.
    pub fn send(&mut self, words: &[&[u8]]) -> io::Result<()> {
        self.queue(words)?;
        self.flush()
    }

    /// Waits for the next reply.
    pub fn receive(&mut self) -> io::Result<Reply> {
        read_reply(&mut self.reader)
    }

    /// Sends a request and waits for its reply.
    pub fn call(&mut self, words: &[&[u8]]) -> io::Result<Reply> {
        self.send(words)?;
        self.receive()
    }
}
