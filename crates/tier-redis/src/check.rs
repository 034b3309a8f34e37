//! Questions to a cluster before a run uses it, so that a cluster that would lose pages is
//! refused before the program starts.

use std::io::Read;

use redis::{Connection, RedisError, Value, cmd};
use undercroft_sys::mapping::SharedMemory;

use super::connect::{self, Access, ask, field, text};
use super::keys::{HASH_SLOTS, Keys, Map};
use super::table::Table;
use super::{RemoteError, owner};
use crate::spec::{Node, RemoteSpec};

/// Nodes whose failures a message lists.
const LISTED: usize = 4;

/// A prefix of a cluster that is this run's. When it is dropped, keys that the run left are
/// deleted.
pub struct Claimed {
    access: Access,
    map: Map,
    keys: Keys,
    run: u64,
    /// The whole cluster stops while a part of it is without a master.
    stops: bool,
}

impl std::fmt::Debug for Claimed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Claimed({:016x})", self.run)
    }
}

impl Claimed {
    /// Checks the cluster and takes the prefix for a new run.
    ///
    /// * `table`: the slot table, all zeros.
    ///
    /// Errors: the cluster cannot be used, or another run uses the prefix.
    pub fn new(spec: &RemoteSpec, table: &SharedMemory) -> Result<Claimed, RemoteError> {
        let access = Access::new(spec)?;
        let map = find_map(&access, spec)?;
        let run = random()?;
        let keys = Keys::new(&spec.prefix, run);
        let mut stops = false;
        for (_, node) in map.masters() {
            let mut connection = access
                .connect(node)
                .map_err(|e| RemoteError::of(node, &e))?;
            check_master(&mut connection, node)?;
            stops |= needs_full_coverage(&mut connection);
        }
        try_rights(&access, &map, &keys)?;
        owner::claim(&access, &map, &keys, run, spec.discard)?;
        Table::begin(table, run);
        Ok(Claimed {
            access,
            map,
            keys,
            run,
            stops,
        })
    }

    /// Warnings for the user before the run.
    pub fn warnings(&self) -> Vec<&'static str> {
        let stops = self.stops.then_some(
            "tier redis: while a master is replaced, the whole cluster refuses to read, and the \
             program waits; set cluster-require-full-coverage no on all nodes",
        );
        let is_one = (self.map.hosts() == 1).then_some(
            "tier redis: all masters are on one host, so both copies of each page are, too: if it \
             dies, pages are lost and the program ends; have masters on two hosts",
        );
        stops.into_iter().chain(is_one).collect()
    }
}

/// Writes, reads and deletes a key on each master. Without the right to delete, it writes none.
fn try_rights(access: &Access, map: &Map, keys: &Keys) -> Result<(), RemoteError> {
    for (at, node) in map.masters() {
        let of = |error: RedisError| RemoteError::of(node, &error);
        let Some(tag) = map.tag_of(at, 0) else {
            continue;
        };
        let key = keys.copy(tag, 0);
        let mut connection = access.connect(node).map_err(of)?;
        for command in ["UNLINK", "GET", "EXISTS"] {
            ask(&mut connection, cmd(command).arg(&key)).map_err(of)?;
        }
        ask(&mut connection, cmd("SET").arg(&key).arg("x")).map_err(of)?;
        ask(&mut connection, cmd("UNLINK").arg(&key)).map_err(of)?;
        let mut scan = cmd("SCAN");
        scan.arg("0")
            .arg("MATCH")
            .arg(keys.pattern())
            .arg("COUNT")
            .arg(1);
        ask(&mut connection, &scan).map_err(of)?;
    }
    Ok(())
}

impl Drop for Claimed {
    fn drop(&mut self) {
        // A failover may have changed the map since.
        let nodes = self.map.nodes.clone();
        let fresh = nodes
            .iter()
            .find_map(|node| map_of(&self.access, node).ok());
        let map = fresh.as_ref().unwrap_or(&self.map);
        owner::clean(&self.access, map, &self.keys, self.run);
    }
}

/// The name in reports: the first node and the prefix.
pub(super) fn name(spec: &RemoteSpec) -> String {
    format!("redis:{},prefix={}", spec.nodes[0], spec.prefix)
}

fn random() -> Result<u64, RemoteError> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes) | 1) // not zero
}

/// Asks the nodes of the settings for the map, until one has it. The cluster must be whole.
pub(super) fn find_map(access: &Access, spec: &RemoteSpec) -> Result<Map, RemoteError> {
    let mut failures = Vec::new();
    for node in &spec.nodes {
        match map_of(access, node) {
            Ok(map) => return Ok(map),
            Err(RemoteError::Node { node, why }) => failures.push(format!("{node}: {why}")),
            Err(error) => return Err(error),
        }
    }
    failures.truncate(LISTED);
    Err(RemoteError::NoNode(failures.join("; ")))
}

fn map_of(access: &Access, node: &Node) -> Result<Map, RemoteError> {
    let of = |error: RedisError| RemoteError::of(node, &error);
    let mut connection = access.connect(node).map_err(of)?;
    let answer = ask(&mut connection, cmd("CLUSTER").arg("INFO")).map_err(of)?;
    let info = text(&answer);
    let map = connect::map(&mut connection, node).map_err(of)?;
    // A master that has failed has its hash slots until a replica takes them.
    let whole = field(&info, "cluster_slots_ok").and_then(|it| it.parse().ok());
    let failed = HASH_SLOTS.saturating_sub(whole.unwrap_or(HASH_SLOTS));
    let uncovered = map.uncovered().max(failed);
    if uncovered > 0 || field(&info, "cluster_state") != Some("ok") {
        return Err(RemoteError::Uncovered(uncovered));
    }
    match map.masters().count() {
        masters @ (0 | 1) => Err(RemoteError::TooFewMasters(masters)),
        _ => Ok(map),
    }
}

/// Whether the node refuses all requests while hash slots have no master. If it may not be asked,
/// it is thought not to.
fn needs_full_coverage(connection: &mut Connection) -> bool {
    let mut config = cmd("CONFIG");
    let config = config.arg("GET").arg("cluster-require-full-coverage");
    match ask(connection, config) {
        Ok(Value::Array(parts)) => parts.get(1).is_some_and(|value| text(value) == "yes"),
        _ => false,
    }
}

/// A master that deletes keys by itself would lose pages.
fn check_master(connection: &mut Connection, node: &Node) -> Result<(), RemoteError> {
    let answer = ask(connection, cmd("INFO").arg("memory"));
    let info = text(&answer.map_err(|error| RemoteError::of(node, &error))?);
    let policy = field(&info, "maxmemory_policy").unwrap_or_default();
    if policy.starts_with("allkeys") && field(&info, "maxmemory") != Some("0") {
        return Err(RemoteError::Evicts {
            node: node.to_string(),
            policy: policy.to_owned(),
        });
    }
    Ok(())
}

impl RemoteError {
    /// Meaning of an error of the library for the user.
    pub(super) fn of(node: &Node, error: &RedisError) -> RemoteError {
        let (node, why) = (node.to_string(), error.to_string());
        match (error.kind(), error.code()) {
            (redis::ErrorKind::AuthenticationFailed, _) | (_, Some("WRONGPASS" | "NOAUTH")) => {
                RemoteError::Refused { node, why }
            }
            (_, Some("NOPERM")) => RemoteError::NoRight { node, why },
            _ if why.contains("cluster support disabled") => RemoteError::NotACluster(node),
            _ => RemoteError::Node { node, why },
        }
    }
}
