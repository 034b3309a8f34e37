//! Where the server listens: a TCP address or a Unix socket.

use std::fmt;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// An IP address and port; port 0: a free one.
    Tcp(SocketAddr),
    /// The path of a Unix socket, which is made for this user alone.
    Unix(PathBuf),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("`unix:` needs a path, such as unix:/run/undercroft.sock".to_owned()),
                path => Ok(Listen::Unix(path.into())),
            };
        }
        let wrong = |_| {
            format!(
                "`{text}` is neither IP:PORT, such as 127.0.0.1:9750, nor localhost:PORT, nor unix:PATH"
            )
        };
        let address = match text.strip_prefix("localhost:") {
            Some(port) => format!("127.0.0.1:{port}").parse(),
            None => text.parse(),
        };
        address.map(Listen::Tcp).map_err(wrong)
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Tcp(address) => write!(f, "http://{address}/"),
            Listen::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Listen {
    /// Whether programs of this machine alone can call.
    pub fn is_local(&self) -> bool {
        match self {
            Listen::Tcp(address) => address.ip().is_loopback(),
            Listen::Unix(_) => true,
        }
    }
}

/// A socket that listens. Dropping it removes the file of a Unix socket.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Errors: the address is in use, or not ours to use.
    pub(crate) fn open(listen: &Listen) -> io::Result<Listener> {
        match listen {
            Listen::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
            Listen::Unix(path) => {
                // A socket that a dead server left takes no calls. Anything else is left alone.
                let is_socket = |data: fs::Metadata| data.file_type().is_socket();
                if fs::symlink_metadata(path).is_ok_and(is_socket)
                    && UnixStream::connect(path)
                        .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
                {
                    fs::remove_file(path)?;
                }
                let listener = private(path)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Unix(listener, path.clone()))
            }
        }
    }

    /// Address that it listens on, with the port that it got.
    pub(crate) fn address(&self) -> io::Result<Listen> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Listen::Tcp),
            Listener::Unix(_, path) => Ok(Listen::Unix(path.clone())),
        }
    }
}

/// A Unix socket of mode 0600. It gets its name only with that mode: it is made in a new folder of
/// this user alone, beside the path, and renamed.
fn private(path: &std::path::Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok() {
        return Err(io::ErrorKind::AddrInUse.into());
    }
    let folder = path.with_extension(format!("{}.new", std::process::id()));
    std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700).create(&folder)?;
    let made = folder.join("s");
    let listener = UnixListener::bind(&made).and_then(|listener| {
        fs::set_permissions(&made, fs::Permissions::from_mode(0o600))?;
        fs::rename(&made, path)?;
        Ok(listener)
    });
    let _ = fs::remove_file(&made);
    let _ = fs::remove_dir(&folder);
    listener
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_ip_and_port_or_a_path() {
        let of = |text: &str| text.parse::<Listen>();
        assert!(of("127.0.0.1:9750").is_ok_and(|listen| listen.is_local()));
        assert!(of("[::1]:0").is_ok_and(|listen| listen.is_local()));
        assert!(of("0.0.0.0:80").is_ok_and(|listen| !listen.is_local()));
        assert_eq!(of("localhost:80"), of("127.0.0.1:80"));
        assert_eq!(of("unix:/a"), Ok(Listen::Unix("/a".into())));
        for wrong in ["unix:", "localhost", "localhost:x", "127.0.0.1", "", ":1"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
