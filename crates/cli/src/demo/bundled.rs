//! The demo's key-value store. A thread for each connection, values on the heap.

use std::collections::HashMap;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use undercroft_resp::{self as resp, Reply};

/// Keys and values.
pub(super) type Store = HashMap<Vec<u8>, Box<[u8]>>;

/// Serves connections until a client sends SHUTDOWN. The caller then ends the process, and with it
/// the threads of other connections.
pub(super) fn serve(socket: &Path) -> io::Result<()> {
    let listener = UnixListener::bind(socket)?;
    let store = Arc::new(Mutex::new(Store::new()));
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (store, ended) = (store.clone(), ended.clone());
            std::thread::spawn(
                move || match stream.and_then(|stream| converse(&store, stream)) {
                    Ok(true) => _ = ended.send(()),
                    Ok(false) => {}
                    // A client that breaks off does not harm the others.
                    Err(error) => eprintln!("demo store: {error}"),
                },
            );
        }
    });
    // It ends without a message only if the listener's thread is gone.
    end.recv().map_err(io::Error::other)
}

/// Serves one connection. True if the client asked to shut down.
pub(super) fn converse(store: &Mutex<Store>, stream: UnixStream) -> io::Result<bool> {
    let mut out = BufWriter::with_capacity(256 << 10, stream.try_clone()?);
    let mut input = BufReader::with_capacity(256 << 10, stream);
    loop {
        // Replies of a pipeline leave together.
        if input.buffer().is_empty() {
            out.flush()?;
        }
        let Some(words) = resp::read_request(&mut input)? else {
            return Ok(false);
        };
        let mut store = store.lock().unwrap_or_else(PoisonError::into_inner);
        let reply = answer(&mut store, words);
        drop(store);
        match reply {
            Some(reply) => resp::write_reply(&mut out, &reply)?,
            None => return Ok(true),
        }
    }
}

/// The reply to one request; `None` = shut down.
fn answer(store: &mut Store, words: Vec<Vec<u8>>) -> Option<Reply> {
    let mut words = words.into_iter();
    let name = words.next().unwrap_or_default().to_ascii_uppercase();
    let reply = match (name.as_slice(), words.next(), words.next()) {
        (b"PING", ..) => Reply::Status("PONG".to_owned()),
        (b"DBSIZE", ..) => Reply::Number(store.len() as i64),
        (b"SHUTDOWN", ..) => return None,
        (b"GET", Some(key), None) => store.get(&key).map_or(Reply::Bytes(None), |value| {
            Reply::Bytes(Some(value.to_vec()))
        }),
        (b"SET", Some(key), Some(value)) => {
            store.insert(key, value.into_boxed_slice());
            Reply::Status("OK".to_owned())
        }
        _ => Reply::Failure(format!(
            "unknown or malformed command `{}`",
            String::from_utf8_lossy(&name)
        )),
    };
    Some(reply)
}
