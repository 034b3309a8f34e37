//! Which run uses a prefix. The key `PREFIX:owner` says it, and when the run was last heard of. A
//! run that has ended has no such key. Nothing of another run is deleted unless the user says so.

use std::time::Duration;

use redis::{Connection, RedisError, Value, cmd};

use super::connect::{self, Access, ask, text};
use super::keys::{Keys, Map};
use super::{RemoteError, Shared};
use crate::spec::Node;

/// A run that was not heard of for this long may be told to have ended.
const SILENT: Duration = Duration::from_secs(60);

/// Keys that a scan looks at in one step.
const SCAN: u32 = 1000;

/// Content of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Claim {
    run: u64,
    host: String,
    pid: u32,
    /// Seconds by the node's clock.
    heard: u64,
}

impl Claim {
    fn of(text: &str) -> Option<Claim> {
        let mut words = text.split(' ');
        let run = u64::from_str_radix(words.next()?, 16).ok()?;
        let host = words.next()?.to_owned();
        let (pid, heard) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(Claim {
            run,
            host,
            pid,
            heard,
        })
    }

    fn text(&self) -> String {
        let Claim {
            run,
            host,
            pid,
            heard,
        } = self;
        format!("{run:016x} {host} {pid} {heard}")
    }
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(|c| !c.is_whitespace()).collect();
    if name.is_empty() {
        "?".to_owned()
    } else {
        name
    }
}

fn seconds(connection: &mut Connection) -> Result<u64, RedisError> {
    let answer = ask(connection, &cmd("TIME"))?;
    let Value::Array(parts) = answer else {
        return Ok(0);
    };
    Ok(parts
        .first()
        .and_then(|it| text(it).parse().ok())
        .unwrap_or(0))
}

fn connect_to_owner(access: &Access, map: &Map, keys: &Keys) -> Result<Connection, RemoteError> {
    let node = map
        .node_of_key(&keys.owner())
        .ok_or(RemoteError::Uncovered(1))?;
    access
        .connect(node)
        .map_err(|error| RemoteError::of(node, &error))
}

/// Takes the prefix for `run`.
///
/// * `discard`: delete what a run left that was not heard of lately.
pub(super) fn claim(
    access: &Access,
    map: &Map,
    keys: &Keys,
    run: u64,
    discard: bool,
) -> Result<(), RemoteError> {
    let node = map.node_of_key(&keys.owner()).cloned();
    let of = |error: RedisError| RemoteError::of(node.as_ref().unwrap_or(&Node::unknown()), &error);
    let mut connection = connect_to_owner(access, map, keys)?;
    let now = seconds(&mut connection).map_err(of)?;
    let mine = Claim {
        run,
        host: host(),
        pid: std::process::id(),
        heard: now,
    };
    let mut set = cmd("SET");
    set.arg(keys.owner()).arg(mine.text());
    let first = ask(&mut connection, set.clone().arg("NX")).map_err(of)?;
    if first == Value::Okay {
        return Ok(());
    }
    let old = ask(&mut connection, cmd("GET").arg(keys.owner())).map_err(of)?;
    let text = text(&old);
    let Some(other) = Claim::of(&text) else {
        return Err(RemoteError::ForeignKey(keys.owner()));
    };
    let silent = Duration::from_secs(now.saturating_sub(other.heard));
    if silent < SILENT || !discard {
        return Err(RemoteError::InUse {
            prefix: keys.prefix().to_owned(),
            host: other.host,
            pid: other.pid,
            silent,
            may_discard: silent >= SILENT,
        });
    }
    // If two runs do this at once, one of them sees the other's claim.
    let seen = ask(&mut connection, set.arg("XX").arg("GET")).map_err(of)?;
    if connect::text(&seen) != text {
        return Err(RemoteError::Raced(keys.prefix().to_owned()));
    }
    delete_by_scan(access, map, &keys.pattern(), |_| true)
}

/// Deletes the keys of the pattern that are `wanted`, on all masters.
fn delete_by_scan(
    access: &Access,
    map: &Map,
    pattern: &str,
    wanted: impl Fn(&str) -> bool,
) -> Result<(), RemoteError> {
    for (_, node) in map.masters() {
        let of = |error: RedisError| RemoteError::of(node, &error);
        let mut connection = access.connect(node).map_err(of)?;
        let mut cursor = "0".to_owned();
        loop {
            let mut scan = cmd("SCAN");
            scan.arg(&cursor)
                .arg("MATCH")
                .arg(pattern)
                .arg("COUNT")
                .arg(SCAN);
            let answer = ask(&mut connection, &scan).map_err(of)?;
            let Value::Array(parts) = &answer else { break };
            let [next, Value::Array(found)] = &parts[..] else {
                break;
            };
            let found: Vec<String> = found.iter().map(text).filter(|key| wanted(key)).collect();
            if !found.is_empty() {
                let mut pipe = redis::pipe();
                found
                    .iter()
                    .for_each(|key| _ = pipe.cmd("UNLINK").arg(key).ignore());
                pipe.query::<()>(&mut connection).map_err(of)?;
            }
            cursor = text(next);
            if cursor == "0" || cursor.is_empty() {
                break;
            }
        }
    }
    Ok(())
}

/// Says that the run lives.
pub(super) fn beat(shared: &Shared) {
    let (map, keys) = (shared.net.map(), &shared.keys);
    let Ok(mut connection) = connect_to_owner(&shared.net.access, &map, keys) else {
        return;
    };
    let Ok(heard) = seconds(&mut connection) else {
        return;
    };
    let Ok(old) = ask(&mut connection, cmd("GET").arg(keys.owner())) else {
        return;
    };
    // A failover may have lost the key. Another run's claim stays.
    let run = shared.table.run();
    match Claim::of(&text(&old)) {
        Some(claim) if claim.run != run => {}
        claim => {
            let (host, pid) = claim.map_or_else(|| (host(), 0), |it| (it.host, it.pid));
            let mine = Claim {
                run,
                host,
                pid,
                heard,
            };
            let _ = ask(
                &mut connection,
                cmd("SET").arg(keys.owner()).arg(mine.text()),
            );
        }
    }
}

/// Gives the prefix back, if it is this run's. True if it was.
pub(super) fn release(access: &Access, map: &Map, keys: &Keys, run: u64) -> bool {
    let Ok(mut connection) = connect_to_owner(access, map, keys) else {
        return false;
    };
    let claim = ask(&mut connection, cmd("GET").arg(keys.owner()));
    let ours = claim.is_ok_and(|old| Claim::of(&text(&old)).is_some_and(|it| it.run == run));
    ours && ask(&mut connection, cmd("UNLINK").arg(keys.owner())).is_ok()
}

/// Work of the keeper at the end: if the manager did not delete the run's keys, this does.
pub(super) fn clean(access: &Access, map: &Map, keys: &Keys, run: u64) {
    let Ok(mut connection) = connect_to_owner(access, map, keys) else {
        return;
    };
    let claim = ask(&mut connection, cmd("GET").arg(keys.owner()));
    if !claim.is_ok_and(|old| Claim::of(&text(&old)).is_some_and(|it| it.run == run)) {
        return;
    }
    let part = format!(":{run:016x}:");
    if delete_by_scan(access, map, &keys.pattern(), |key| key.contains(&part)).is_ok() {
        let _ = ask(&mut connection, cmd("UNLINK").arg(keys.owner()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_read_back_and_other_texts_are_none() {
        let claim = Claim {
            run: 0xabc,
            host: "h".to_owned(),
            pid: 7,
            heard: 9,
        };
        assert_eq!(Claim::of(&claim.text()), Some(claim));
        for text in ["", "x", "1 h 2", "1 h x 3", "zz h 1 2"] {
            assert_eq!(Claim::of(text), None, "{text}");
        }
        assert!(!host().contains(' '));
    }
}
