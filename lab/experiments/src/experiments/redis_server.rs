//! A redis-server on a rig: started on a free loopback port without persistence, queried, shut
//! down.

use crate::rig::{CommandLine, Finished, Rig, RigError, Running, Stdout};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use undercroft_base::Bytes;

const READY_WITHIN: Duration = Duration::from_secs(30);

/// Whether `redis-server` can be started.
pub(crate) fn installed(program: &str) -> bool {
    let mut command = Command::new(program);
    command
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A server under a rig.
pub(crate) struct Server {
    pub(crate) port: u16,
    running: Running,
}

impl Server {
    /// Starts the server and waits for PONG. Its log goes to `log`.
    pub(crate) fn start(rig: &dyn Rig, limit: Bytes, log: &Path) -> Result<Server, RigError> {
        let port = free_port().map_err(RigError::failed("find a free port"))?;
        let words = format!(
            "redis-server --port {port} --bind 127.0.0.1 --appendonly no --daemonize no --protected-mode no --save"
        );
        let mut words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        words.push("".into());
        let command = CommandLine {
            words,
            stdout: Stdout::File(log.to_owned()),
        };
        let mut server = Server {
            port,
            running: rig.set_up(limit)?.spawn(&command)?,
        };
        let until = Instant::now() + READY_WITHIN;
        while server.ask(&["PING"]).ok().as_deref() != Some("+PONG") {
            if !server.running.is_running()
                || Instant::now() > until
                || crate::rig::interrupt::requested()
            {
                let text = std::fs::read_to_string(log).unwrap_or_default();
                let last = text.lines().last().unwrap_or("no output").to_owned();
                return Err(RigError::CommandFailed {
                    what: format!("start redis-server on rig {}", rig.name()),
                    how: last,
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// Sends one command. Returns the first line of its reply.
    pub(crate) fn ask(&self, words: &[&str]) -> io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut text = format!("*{}\r\n", words.len());
        words
            .iter()
            .for_each(|word| text += &format!("${}\r\n{word}\r\n", word.len()));
        stream.write_all(text.as_bytes())?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// SHUTDOWN NOSAVE. Returns the rig's outcome. A server that had already died (killed) is an
    /// error.
    pub(crate) fn shut_down(self, rig: &'static str) -> Result<Finished, RigError> {
        // If the command succeeds, the connection closes without a reply.
        let _ = self.ask(&["SHUTDOWN", "NOSAVE"]);
        self.running.finish()?.successful(rig, "redis-server")
    }
}

/// A port that is free now. If another program takes it before the server does, the server fails to
/// start.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
