//! Connections to nodes, and the questions that are asked of a cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::{
    Client, ClientTlsConfig, Cmd, Connection, ConnectionAddr, ConnectionLike, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, TlsCertificates, Value, cmd,
};

use super::RemoteError;
use super::keys::Map;
use crate::spec::{Authorities, Node, RemoteSpec};

/// Longest wait for a connection, and for an answer on a new one.
const CONNECT: Duration = Duration::from_millis(400);

/// Access to a node: credentials, and TLS if it is used. Its text form has no secret.
#[derive(Clone)]
pub(super) struct Access {
    user: Option<String>,
    password: Option<String>,
    tls: Option<TlsCertificates>,
}

fn read(path: &Path) -> Result<Vec<u8>, RemoteError> {
    std::fs::read(path).map_err(|error| RemoteError::File(path.to_owned(), error))
}

impl Access {
    /// Reads the files that `spec` names.
    pub(super) fn new(spec: &RemoteSpec) -> Result<Access, RemoteError> {
        let password = |path: &PathBuf| {
            let text = String::from_utf8(read(path)?);
            let text = text.map_err(|_| RemoteError::NotText(path.clone()))?;
            let line = text.lines().next().unwrap_or_default().to_owned();
            if line.is_empty() {
                return Err(RemoteError::NoPassword(path.clone()));
            }
            Ok(line)
        };
        let tls = match &spec.tls {
            None => None,
            Some(authorities) => Some(TlsCertificates {
                client_tls: match &spec.identity {
                    None => None,
                    Some((cert, key)) => Some(ClientTlsConfig {
                        client_cert: read(cert)?,
                        client_key: read(key)?,
                    }),
                },
                root_cert: match authorities {
                    Authorities::System => None,
                    Authorities::File(path) => Some(read(path)?),
                },
            }),
        };
        Ok(Access {
            user: spec.user.clone(),
            password: spec.password_file.as_ref().map(password).transpose()?,
            tls,
        })
    }

    /// A connection that has answered. Takes [`CONNECT`] and a half at most.
    pub(super) fn connect(&self, node: &Node) -> Result<Connection, RedisError> {
        let (host, port) = (node.host.clone(), node.port);
        let address = match &self.tls {
            None => ConnectionAddr::Tcp(host, port),
            Some(_) => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            },
        };
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        let info = address.into_connection_info()?.set_redis_settings(settings);
        let client = match &self.tls {
            None => Client::open(info)?,
            Some(certificates) => Client::build_with_tls(info, certificates.clone())?,
        };
        let mut connection = client.get_connection_with_timeout(CONNECT)?;
        connection.set_read_timeout(Some(CONNECT))?;
        connection.set_write_timeout(Some(CONNECT))?;
        // Without a password, nothing has been said yet.
        ask(&mut connection, &cmd("PING"))?;
        Ok(connection)
    }
}

/// Sends a command and reads its answer. An error of the server is an error.
pub(super) fn ask(connection: &mut Connection, command: &Cmd) -> Result<Value, RedisError> {
    match connection.req_command(command)? {
        Value::ServerError(error) => Err(error.into()),
        value => Ok(value),
    }
}

/// The text of an answer; empty if it is not text.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Value::SimpleString(text) => text.clone(),
        Value::VerbatimString { text, .. } => text.clone(),
        Value::Okay => "OK".to_owned(),
        _ => String::new(),
    }
}

/// The value of `key:` in the answer of INFO or CLUSTER INFO.
pub(super) fn field<'a>(info: &'a str, key: &str) -> Option<&'a str> {
    let of = |line: &'a str| line.strip_prefix(key)?.strip_prefix(':').map(str::trim);
    info.lines().find_map(of)
}

/// Asks a node who has which hash slots.
pub(super) fn map(connection: &mut Connection, asked: &Node) -> Result<Map, RedisError> {
    let mut command = cmd("CLUSTER");
    let answer = ask(connection, command.arg("SLOTS"))?;
    Ok(parse_map(&answer, asked))
}

fn parse_map(answer: &Value, asked: &Node) -> Map {
    let (mut ranges, mut nodes) = (Vec::new(), Vec::new());
    let Value::Array(rows) = answer else {
        return Map::new(&[], Vec::new());
    };
    for row in rows {
        let Value::Array(parts) = row else { continue };
        let [Value::Int(first), Value::Int(last), members @ ..] = &parts[..] else {
            continue;
        };
        let members: Vec<Node> = members.iter().filter_map(|it| node(it, asked)).collect();
        if let Some(master) = members.first() {
            ranges.push((*first as usize, *last as usize, master.clone()));
        }
        nodes.extend(members);
    }
    nodes.sort();
    nodes.dedup();
    Map::new(&ranges, nodes)
}

/// A node that does not know its own address gives none: it is the one that was asked.
fn node(value: &Value, asked: &Node) -> Option<Node> {
    let Value::Array(parts) = value else {
        return None;
    };
    let [host, Value::Int(port), ..] = &parts[..] else {
        return None;
    };
    let host = match text(host) {
        host if host.is_empty() || host == "?" => asked.host.clone(),
        host => host,
    };
    let port = u16::try_from(*port).ok()?;
    Some(Node { host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_of_nodes_without_a_name_name_the_one_that_was_asked() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let member = |host: Value, port| Value::Array(vec![host, Value::Int(port), text("id")]);
        let range = |first, last, members: Vec<Value>| {
            let ends = [Value::Int(first), Value::Int(last)];
            Value::Array(ends.into_iter().chain(members).collect())
        };
        let answer = Value::Array(vec![
            range(0, 8191, vec![member(text(""), 1), member(text("b"), 2)]),
            range(8192, 16383, vec![member(Value::Nil, 3)]),
            Value::Int(1),
            range(1, 2, vec![]),
        ]);
        let asked = Node {
            host: "a".to_owned(),
            port: 9,
        };
        let map = parse_map(&answer, &asked);
        let names: Vec<String> = map.nodes.iter().map(Node::to_string).collect();
        assert_eq!(names, ["a:1", "a:3", "b:2"]);
        let masters: Vec<String> = map.masters().map(|(_, node)| node.to_string()).collect();
        assert_eq!(
            (masters, map.uncovered()),
            (vec!["a:1".into(), "a:3".into()], 0)
        );
        assert_eq!(parse_map(&Value::Nil, &asked).uncovered(), 16384);
    }
}
