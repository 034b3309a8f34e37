//! Takes connections, each on a thread of its own, and stops when it is dropped.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::answer::Answer;
use crate::connections::Seat;
use crate::http::{self, PATIENCE, Stream};
use crate::listen::{Listen, Listener};
use crate::routes;
use crate::shared::{Rights, Shared};
use crate::source::Source;
use crate::token::Token;

/// A running server. Dropping it ends it: it takes no more calls; those under way end within the
/// time that a request may take.
pub struct Server {
    address: Listen,
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens, and serves on threads of its own.
    ///
    /// * `token`: what callers must say, if anything.
    ///
    /// Errors: the address is in use or not ours; `Unsupported`: changes over TCP.
    pub fn start(
        listen: &Listen,
        source: Box<dyn Source>,
        rights: Rights,
        token: Option<Token>,
    ) -> io::Result<Server> {
        let is_tcp = matches!(listen, Listen::Tcp(_));
        if is_tcp && rights == Rights::Change {
            let why = "changes need a Unix socket: TCP does not say which user calls";
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let listener = Listener::open(listen)?;
        let address = listener.address()?;
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let shared = Arc::new(Shared::new(source, rights, is_tcp, token));
        let thread = std::thread::Builder::new()
            .name("uc-api".into())
            .spawn(move || serve(&listener, &stopped, &shared))?;
        Ok(Server {
            address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where it listens, with the port that it got.
    pub fn address(&self) -> &Listen {
        &self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None; // the thread sees the pipe's end
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &Listener, stopped: &OwnedFd, shared: &Arc<Shared>) {
    loop {
        let calls = match listener {
            Listener::Tcp(listener) => PollFd::new(listener, PollFlags::IN),
            Listener::Unix(listener, _) => PollFd::new(listener, PollFlags::IN),
        };
        let mut fds = [calls, PollFd::new(stopped, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        if !fds[1].revents().is_empty() {
            return;
        }
        let stream: io::Result<Box<dyn Stream>> = match listener {
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Box::new(stream) as _),
            Listener::Unix(listener, _) => {
                listener.accept().map(|(stream, _)| Box::new(stream) as _)
            }
        };
        match stream {
            Ok(stream) => take(stream, shared),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // No descriptor is left, perhaps: it must not spin.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Gives the connection a thread, or refuses it.
fn take(mut stream: Box<dyn Stream>, shared: &Arc<Shared>) {
    let Some(place) = shared.connections.admit(stream.as_ref()) else {
        let why = "too many requests wait for their answers";
        let full = Answer::error(503, "the server is busy", why, "try again");
        let _ = http::write(
            stream.as_mut(),
            &full.bytes(false),
            Duration::from_millis(1),
        );
        return;
    };
    let of_thread = Arc::clone(shared);
    // If no thread starts, the connection is closed.
    let _ = std::thread::Builder::new()
        .name("uc-api-call".into())
        .spawn(move || answer(stream.as_mut(), &place, &of_thread));
}

fn answer(stream: &mut dyn Stream, place: &Seat, shared: &Shared) {
    let (answer, head) = match http::read(stream, PATIENCE) {
        Ok(request) => {
            place.has_asked(true);
            let answer = routes::answer(&request, shared);
            place.has_asked(false);
            (answer, request.method == "HEAD")
        }
        Err(Some(answer)) => (answer, false),
        Err(None) => return,
    };
    let _ = http::write(stream, &answer.bytes(head), PATIENCE);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    use std::net::TcpStream;

    use undercroft_proto::report::Snapshot;

    use super::*;
    use crate::source::{Change, NotChanged};

    struct Empty;

    impl Source for Empty {
        fn clients(&self) -> Vec<Snapshot> {
            Vec::new()
        }

        fn change(&self, _: u32, _: Change) -> Result<(), NotChanged> {
            Err(NotChanged::NoAnswer)
        }
    }

    fn status(path: &Path) -> u16 {
        status_of(UnixStream::connect(path).expect("it listens"))
    }

    /// The status of an answer; 0 if there is none.
    fn status_of(mut stream: impl Read + Write) -> u16 {
        let mut answer = String::new();
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        let _ = stream.read_to_string(&mut answer);
        let status = answer.split(' ').nth(1).unwrap_or_default();
        status.parse().unwrap_or(0)
    }

    #[test]
    fn connections_that_send_no_request_make_room_for_those_that_do() {
        let listen = "127.0.0.1:0".parse().expect("an address");
        let server = Server::start(&listen, Box::new(Empty), Rights::Read, None);
        let server = server.expect("a server");
        let Listen::Tcp(address) = *server.address() else {
            panic!("{} is another address", server.address());
        };
        let connect = || TcpStream::connect(address).expect("it listens");
        let mut held: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
        for stream in &mut held {
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHo"); // it may be closed
        }
        let began = std::time::Instant::now();
        for _ in 0..5 {
            assert_eq!(status_of(connect()), 200);
        }
        assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    }

    #[test]
    fn a_server_removes_its_socket_and_takes_the_place_of_a_dead_one() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("socket");
        let listen = Listen::Unix(path.clone());
        let start = || Server::start(&listen, Box::new(Empty), Rights::Change, None);
        let server = start().expect("a server");
        assert_eq!(status(&path), 200);
        assert!(start().is_err(), "another server is there");
        drop(server);
        assert!(!path.exists());
        // What a dead server left is in no one's way; a file is.
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
        drop(start().expect("a server"));
        std::fs::write(&path, "mine").expect("a file");
        assert!(start().is_err());
        assert_eq!(std::fs::read_to_string(&path).expect("a file"), "mine");
    }

    #[test]
    fn changes_over_tcp_are_refused() {
        let listen = "127.0.0.1:0".parse().expect("an address");
        let refused = Server::start(&listen, Box::new(Empty), Rights::Change, None);
        let kind = refused.err().map(|error| error.kind());
        assert_eq!(kind, Some(io::ErrorKind::Unsupported));
    }
}
