//! The settings of `redis:`, parsed once.
//!
//! ```text
//! redis:10.0.0.1:6379,10.0.0.2:6379,size=20G,user=swap,password-file=/etc/undercroft.password
//! redis:db:6379,tls=/etc/ca.pem,cert=/etc/me.pem,key=/etc/me.key,prefix=host7
//! ```

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use undercroft_base::{Bytes, Exact};

/// Most bytes that it holds, both copies counted, if the user does not say.
const SIZE_DEFAULT: Bytes = Bytes(4 << 30);
const SIZE_MIN: u64 = 1 << 20;
const PREFIX_DEFAULT: &str = "uc";
const PREFIX_MAX: usize = 64;

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// Name or address.
    pub host: String,
    /// Its port for clients.
    pub port: u16,
}

/// Whose certificates are trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Authorities {
    /// Authorities that the system trusts.
    System,
    /// Authorities in this file (PEM).
    File(PathBuf),
}

/// Why a setting was refused; the text names the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingError {
    /// Without a node.
    NoNode,
    /// There is no such setting.
    Unknown(String),
    /// A setting was given twice.
    Twice(String),
    /// A setting, and why its value is not valid.
    Value(&'static str, String),
}

/// `redis:HOST:PORT[,HOST:PORT]...[,key=value]...`
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteSpec {
    /// Nodes to ask for the others; at least one.
    pub nodes: Vec<Node>,
    /// Most bytes it may use in the cluster, both copies counted.
    pub size: Bytes,
    /// First part of every key.
    pub prefix: String,
    /// User of the cluster's access list.
    pub user: Option<String>,
    /// File with the password.
    pub password_file: Option<PathBuf>,
    /// Encrypts connections, and trusts these.
    pub tls: Option<Authorities>,
    /// Certificate that the cluster asks for, and its key (PEM).
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Keys that a run left behind which has not been heard of for a minute are deleted.
    pub discard: bool,
}

impl Node {
    /// For messages about a node that is not known.
    pub(crate) fn unknown() -> Node {
        let host = "?".to_owned();
        Node { host, port: 0 }
    }
}

impl FromStr for Node {
    type Err = String;

    fn from_str(text: &str) -> Result<Node, String> {
        let wrong = || format!("`{text}` is not HOST:PORT (example: 10.0.0.1:6379)");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = bare.unwrap_or(host);
        let odd = |c: char| !(c.is_ascii_alphanumeric() || "._-:".contains(c));
        // Only brackets make the port of an IPv6 address clear.
        let port = port.parse().ok().filter(|port| *port > 0);
        match port {
            Some(port) if !host.is_empty() && !host.contains(odd) => {
                if host.contains(':') != bare.is_some() {
                    return Err(wrong());
                }
                let host = host.to_owned();
                Ok(Node { host, port })
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            return write!(f, "[{}]:{}", self.host, self.port);
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}

fn value_error(key: &'static str, why: impl Into<String>) -> SettingError {
    SettingError::Value(key, why.into())
}

fn size(text: &str) -> Result<Bytes, SettingError> {
    let size: Result<Bytes, _> = text.parse();
    let size = size.map_err(|error| value_error("size", error.to_string()))?;
    if size.0 < SIZE_MIN {
        let why = format!("`{text}` is too small; the least is {}", Bytes(SIZE_MIN));
        return Err(value_error("size", why));
    }
    Ok(size)
}

fn node(text: &str) -> Result<Node, SettingError> {
    let node = text.trim().parse();
    node.map_err(|why: String| value_error("node", why))
}

impl RemoteSpec {
    /// Reads the part after `redis:` up to the first comma, and the settings.
    ///
    /// Errors: as the settings are refused.
    pub fn parse(
        first: Option<&str>,
        settings: &[(&str, Option<&str>)],
    ) -> Result<RemoteSpec, SettingError> {
        let first = first.filter(|first| !first.trim().is_empty());
        let first = first.ok_or(SettingError::NoNode)?;
        let mut nodes = vec![node(first)?];
        let mut seen: Vec<&str> = Vec::new();
        let (mut cert, mut key_file) = (None, None);
        let mut spec = RemoteSpec {
            nodes: Vec::new(),
            size: SIZE_DEFAULT,
            prefix: PREFIX_DEFAULT.to_owned(),
            user: None,
            password_file: None,
            tls: None,
            identity: None,
            discard: false,
        };
        for &(key, value) in settings {
            let Some(value) = value else {
                nodes.push(node(key)?);
                continue;
            };
            if seen.contains(&key) {
                return Err(SettingError::Twice(key.to_owned()));
            }
            seen.push(key);
            if value.is_empty() {
                return Err(value_error("redis", format!("`{key}=` needs a value")));
            }
            match key {
                "size" => spec.size = size(value)?,
                "prefix" => spec.prefix = prefix(value)?,
                "user" => spec.user = Some(value.to_owned()),
                "password-file" => spec.password_file = Some(PathBuf::from(value)),
                "tls" if value == "system" => spec.tls = Some(Authorities::System),
                "tls" => spec.tls = Some(Authorities::File(PathBuf::from(value))),
                "cert" => cert = Some(PathBuf::from(value)),
                "key" => key_file = Some(PathBuf::from(value)),
                "leftover" if value == "discard" => spec.discard = true,
                "leftover" => return Err(value_error("leftover", "the only value is `discard`")),
                "password" => {
                    let why =
                        "a command line is public; write it to a file and use password-file=PATH";
                    return Err(value_error("password", why));
                }
                _ => return Err(SettingError::Unknown(key.to_owned())),
            }
        }
        spec.nodes = nodes;
        spec.identity = match (cert, key_file) {
            (None, None) => None,
            (Some(cert), Some(key)) if spec.tls.is_some() => Some((cert, key)),
            (Some(_), Some(_)) => return Err(value_error("cert", "it needs tls=, too")),
            _ => return Err(value_error("cert", "cert= and key= are given together")),
        };
        if spec.user.is_some() && spec.password_file.is_none() {
            return Err(value_error("user", "it needs password-file=, too"));
        }
        Ok(spec)
    }

    /// Its nodes, in one order: what was measured of a cluster is known by them.
    pub fn identity(&self) -> String {
        let mut nodes: Vec<String> = self.nodes.iter().map(Node::to_string).collect();
        nodes.sort();
        nodes.join(" ")
    }
}

/// Braces would choose the hash slot of a key, and stars are patterns.
fn prefix(text: &str) -> Result<String, SettingError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    if text.len() > PREFIX_MAX || !text.chars().all(fits) {
        let why = format!("`{text}`: up to {PREFIX_MAX} letters, digits, and . _ - :");
        return Err(value_error("prefix", why));
    }
    Ok(text.to_owned())
}

/// The canonical text; parses to an equal value. It has no secret.
impl fmt::Display for RemoteSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<String> = self.nodes.iter().map(Node::to_string).collect();
        write!(f, "redis:{},size={}", nodes.join(","), Exact(self.size))?;
        write!(f, ",prefix={}", self.prefix)?;
        if let Some(user) = &self.user {
            write!(f, ",user={user}")?;
        }
        if let Some(path) = &self.password_file {
            write!(f, ",password-file={}", path.display())?;
        }
        match &self.tls {
            None => {}
            Some(Authorities::System) => write!(f, ",tls=system")?,
            Some(Authorities::File(path)) => write!(f, ",tls={}", path.display())?,
        }
        if let Some((cert, key)) = &self.identity {
            write!(f, ",cert={},key={}", cert.display(), key.display())?;
        }
        if self.discard {
            write!(f, ",leftover=discard")?;
        }
        Ok(())
    }
}

/// The settings in a description, as the row of the kind reads them.
#[cfg(test)]
pub(crate) fn parsed(text: &str) -> Result<RemoteSpec, SettingError> {
    let mut words = text.split(',');
    let first = words.next().and_then(|head| Some(head.split_once(':')?.1));
    let settings: Vec<_> = words
        .map(|word| match word.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim())),
            None => (word.trim(), None),
        })
        .collect();
    RemoteSpec::parse(first, &settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_parse_and_print_the_same_again() {
        for (text, canonical) in [
            ("redis:a:1", "redis:a:1,size=4G,prefix=uc"),
            (
                "redis: a:1 , [::1]:7000 ,size=2G, prefix=x:y",
                "redis:a:1,[::1]:7000,size=2G,prefix=x:y",
            ),
            (
                "redis:h:1,user=u,password-file=/p,tls=system,leftover=discard",
                "redis:h:1,size=4G,prefix=uc,user=u,password-file=/p,tls=system,leftover=discard",
            ),
            (
                "redis:h:1,key=/k,cert=/c,tls=/ca,h:2",
                "redis:h:1,h:2,size=4G,prefix=uc,tls=/ca,cert=/c,key=/k",
            ),
        ] {
            let spec = parsed(text).unwrap_or_else(|e| panic!("{text}: {e:?}"));
            assert_eq!(spec.to_string(), canonical);
            assert_eq!(parsed(canonical), Ok(spec));
        }
    }

    #[test]
    fn settings_that_cannot_be_meant_are_refused_with_the_reason() {
        for (text, reason) in [
            ("redis", "NoNode"),
            ("redis:", "NoNode"),
            ("redis:host", "HOST:PORT"),
            ("redis:host:0", "HOST:PORT"),
            ("redis:::1:7000", "HOST:PORT"),
            ("redis:h:1,lz4", "HOST:PORT"),
            ("redis:h:1,size=4K", "too small"),
            ("redis:h:1,size=1G,size=1G", "Twice"),
            ("redis:h:1,password=x", "password-file"),
            ("redis:h:1,user=x", "password-file"),
            ("redis:h:1,prefix={x}", "letters"),
            ("redis:h:1,prefix=*", "letters"),
            ("redis:h:1,cert=/c,tls=/t", "together"),
            ("redis:h:1,cert=/c,key=/k", "tls="),
            ("redis:h:1,leftover=keep", "discard"),
            ("redis:h:1,shape=pcm", "Unknown"),
            ("redis:h:1,tls=", "needs a value"),
        ] {
            let error = format!("{:?}", parsed(text).expect_err(text));
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
