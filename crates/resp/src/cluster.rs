//! A Redis cluster on loopback, for tests: real servers, started in a folder of their own, and
//! ended with the value.

use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::wire::Reply;

/// Longest wait for a step of the set-up.
const PATIENCE: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(20);
const HASH_SLOTS: usize = 1 << 14;

/// Certificates for encrypted connections: of the authority, of the nodes, and its key.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The authority's.
    pub authority: PathBuf,
    /// The nodes'.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

struct Server {
    port: u16,
    bus: u16,
    tls: u16,
    folder: PathBuf,
    child: Option<Child>,
}

/// Servers that are one cluster, or are to be.
pub struct Cluster {
    servers: Vec<Server>,
    root: PathBuf,
    arguments: Vec<String>,
}

fn other(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let open: io::Result<Vec<_>> = (0..count)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect();
    let port = |it: &TcpListener| Ok(it.local_addr()?.port());
    open?.iter().map(port).collect()
}

fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = done() {
            return Ok(value);
        }
        if begun.elapsed() > PATIENCE {
            return Err(other(format!("not in {PATIENCE:?}: {what}")));
        }
        std::thread::sleep(TICK);
    }
}

/// The value of `key:` in the answer of INFO or CLUSTER INFO.
pub fn field(reply: &Reply, key: &str) -> Option<String> {
    let Reply::Bytes(Some(bytes)) = reply else {
        return None;
    };
    let text = String::from_utf8_lossy(bytes).into_owned();
    let of = |line: &str| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_owned());
    text.lines().find_map(of)
}

impl Cluster {
    /// Starts `masters` masters and a replica of each, in a new folder below `within`, and waits
    /// until the cluster is whole. A node counts as failed after one second.
    pub fn start(within: &Path, masters: usize, tls: Option<&Certificates>) -> io::Result<Cluster> {
        let mut cluster = Cluster::servers(within, 2 * masters, tls)?;
        cluster.form(masters)?;
        Ok(cluster)
    }

    /// Starts servers that do not know each other.
    pub fn servers(within: &Path, count: usize, tls: Option<&Certificates>) -> io::Result<Cluster> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "cluster-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Relaxed)
        );
        let root = within.join(name);
        let mut arguments: Vec<String> = [
            "--bind 127.0.0.1 --protected-mode no --daemonize no --appendonly no",
            "--cluster-enabled yes --cluster-config-file nodes.conf --cluster-node-timeout 1000",
            "--cluster-replica-validity-factor 0 --repl-diskless-sync-delay 0",
            "--cluster-require-full-coverage no --repl-ping-replica-period 1 --logfile log",
            "--enable-debug-command local",
        ]
        .iter()
        .flat_map(|line| line.split(' '))
        .map(str::to_owned)
        .collect();
        arguments.extend(["--save".to_owned(), String::new()]);
        if let Some(files) = tls {
            let path = |path: &Path| path.display().to_string();
            arguments.extend(
                "--tls-cluster yes --tls-replication yes"
                    .split(' ')
                    .map(str::to_owned),
            );
            arguments.extend(["--tls-ca-cert-file".to_owned(), path(&files.authority)]);
            arguments.extend(["--tls-cert-file".to_owned(), path(&files.cert)]);
            arguments.extend(["--tls-key-file".to_owned(), path(&files.key)]);
        }
        let ports = free_ports(3 * count)?;
        let mut cluster = Cluster {
            servers: Vec::new(),
            root,
            arguments,
        };
        for (at, ports) in ports.chunks(3).enumerate() {
            let folder = cluster.root.join(at.to_string());
            std::fs::create_dir_all(&folder)?;
            cluster.servers.push(Server {
                port: ports[0],
                bus: ports[1],
                tls: if tls.is_some() { ports[2] } else { 0 },
                folder,
                child: None,
            });
            cluster.run(at)?;
        }
        for server in &cluster.servers {
            Client::to_port(server.port, PATIENCE)?;
        }
        Ok(cluster)
    }

    fn run(&mut self, at: usize) -> io::Result<()> {
        let server = &mut self.servers[at];
        let mut command = Command::new("redis-server");
        command.args(["--port", &server.port.to_string()]);
        command.args(["--cluster-port", &server.bus.to_string()]);
        if server.tls > 0 {
            command.args(["--tls-port", &server.tls.to_string()]);
        }
        command.args(&self.arguments).current_dir(&server.folder);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        server.child = Some(command.spawn()?);
        Ok(())
    }

    fn form(&mut self, masters: usize) -> io::Result<()> {
        let ports = self.ports();
        let each = HASH_SLOTS.div_ceil(masters);
        for (at, port) in ports.iter().enumerate().take(masters) {
            let range = [at * each, ((at + 1) * each).min(HASH_SLOTS) - 1].map(|it| it.to_string());
            self.ok(*port, &["CLUSTER", "ADDSLOTSRANGE", &range[0], &range[1]])?;
        }
        for (at, port) in ports.iter().enumerate() {
            self.ok(
                *port,
                &["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()],
            )?;
        }
        for server in &self.servers[1..] {
            let (port, bus) = (server.port.to_string(), server.bus.to_string());
            let port = if server.tls > 0 {
                server.tls.to_string()
            } else {
                port
            };
            self.ok(ports[0], &["CLUSTER", "MEET", "127.0.0.1", &port, &bus])?;
        }
        let count = ports.len().to_string();
        for port in &ports {
            until("all nodes know each other", || {
                let info = self.call(*port, &["CLUSTER", "INFO"]).ok()?;
                (field(&info, "cluster_known_nodes")? == count).then_some(())
            })?;
        }
        for (at, port) in ports.iter().enumerate().skip(masters) {
            let master = self.call(ports[at - masters], &["CLUSTER", "MYID"])?;
            let Reply::Bytes(Some(id)) = master else {
                return Err(other("a node has no id"));
            };
            let id = String::from_utf8_lossy(&id).into_owned();
            until("a replica knows its master", || {
                self.ok(*port, &["CLUSTER", "REPLICATE", &id]).ok()
            })?;
        }
        self.until_whole()
    }

    /// Waits until each live node says that the cluster is whole, and each replica has its
    /// master's data.
    pub fn until_whole(&self) -> io::Result<()> {
        for port in self.ports() {
            until("the cluster is whole", || {
                let info = self.call(port, &["CLUSTER", "INFO"]).ok()?;
                let whole = field(&info, "cluster_state")? == "ok"
                    && field(&info, "cluster_slots_ok")? == HASH_SLOTS.to_string();
                let info = self.call(port, &["INFO", "replication"]).ok()?;
                let role = field(&info, "role")?;
                let synced = role == "master" || field(&info, "master_link_status")? == "up";
                (whole && synced).then_some(())
            })?;
        }
        Ok(())
    }

    /// Ports of the servers that run.
    pub fn ports(&self) -> Vec<u16> {
        let alive = self.servers.iter().filter(|server| server.child.is_some());
        alive.map(|server| server.port).collect()
    }

    /// Their ports for encrypted connections.
    pub fn tls_ports(&self) -> Vec<u16> {
        let alive = self.servers.iter().filter(|server| server.child.is_some());
        alive.map(|server| server.tls).collect()
    }

    /// `127.0.0.1:PORT` of each, as a list.
    pub fn addresses(ports: &[u16]) -> String {
        let each: Vec<String> = ports
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        each.join(",")
    }

    /// Ports of the masters, as the nodes themselves say.
    pub fn masters(&self) -> Vec<u16> {
        let is_master = |port: &u16| {
            let info = self.call(*port, &["INFO", "replication"]).ok();
            info.and_then(|info| field(&info, "role"))
                .is_some_and(|role| role == "master")
        };
        self.ports().into_iter().filter(is_master).collect()
    }

    /// Kills a master that has no replica, so that its part of the keys is nowhere: one whose
    /// partner was killed before, or a master and its replica. Waits until the others know.
    pub fn halve(&mut self) -> io::Result<()> {
        let replicas = |port: &u16| {
            let info = self.call(*port, &["INFO", "replication"]).ok()?;
            field(&info, "connected_slaves")
        };
        let masters = self.masters();
        let alone = masters
            .iter()
            .find(|port| replicas(port).as_deref() == Some("0"));
        match alone.copied() {
            Some(port) => self.kill(port),
            None => {
                let at = self.servers.len() / 2;
                let pair = [self.servers[0].port, self.servers[at].port];
                pair.into_iter().for_each(|port| self.kill(port));
            }
        }
        let asked = *self
            .ports()
            .first()
            .ok_or_else(|| other("no server is left"))?;
        until("the others know of the failed part", || {
            let info = self.call(asked, &["CLUSTER", "INFO"]).ok()?;
            (field(&info, "cluster_slots_ok")? != HASH_SLOTS.to_string()).then_some(())
        })
    }

    /// Sends a request to a node, and waits for the answer.
    pub fn call(&self, port: u16, words: &[&str]) -> io::Result<Reply> {
        let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
        Client::to_port(port, Duration::ZERO)?.call(&words)
    }

    fn ok(&self, port: u16, words: &[&str]) -> io::Result<()> {
        match self.call(port, words)? {
            Reply::Status(_) => Ok(()),
            reply => Err(other(format!("{words:?}: {reply:?}"))),
        }
    }

    /// Kills a server (SIGKILL).
    pub fn kill(&mut self, port: u16) {
        let server = self.servers.iter_mut().find(|server| server.port == port);
        if let Some(mut child) = server.and_then(|server| server.child.take()) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts a killed server again; it has lost its data.
    pub fn restart(&mut self, port: u16) -> io::Result<()> {
        let at = self.servers.iter().position(|server| server.port == port);
        self.run(at.ok_or_else(|| other("no such server"))?)?;
        Client::to_port(port, PATIENCE).map(|_| ())
    }

    /// The keys of a master that match a pattern.
    pub fn scan(&self, port: u16, pattern: &str) -> io::Result<Vec<String>> {
        let (mut keys, mut cursor) = (Vec::new(), "0".to_owned());
        let mut client = Client::to_port(port, Duration::ZERO)?;
        let text = |reply: &Reply| match reply {
            Reply::Bytes(Some(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            _ => String::new(),
        };
        loop {
            // A step may give a few more than it is asked for.
            let words = ["SCAN", &cursor, "MATCH", pattern, "COUNT", "16"];
            let reply = client.call(&words.map(str::as_bytes))?;
            let Reply::List(parts) = &reply else {
                return Err(other(format!("SCAN: {reply:?}")));
            };
            if let Some(Reply::List(found)) = parts.get(1) {
                keys.extend(found.iter().map(text));
            }
            cursor = parts.first().map(text).unwrap_or_default();
            if cursor == "0" || cursor.is_empty() {
                return Ok(keys);
            }
        }
    }

    /// How many keys all masters have.
    pub fn keys(&self) -> i64 {
        let keys = |port| match self.call(port, &["DBSIZE"]) {
            Ok(Reply::Number(keys)) => keys,
            _ => 0,
        };
        self.masters().into_iter().map(keys).sum()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.ports().into_iter().for_each(|port| self.kill(port));
        let _ = std::fs::remove_dir_all(&self.root);
    }
}
