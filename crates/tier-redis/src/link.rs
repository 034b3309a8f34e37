//! A connection to one node: a queue, and the thread that sends what is in it and reads the
//! answers. Requests that wait together are sent together.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use redis::{Connection, Value};

use super::connect::Access;
use crate::spec::Node;

/// Requests that are sent at once, and their bytes. Their answers wait in the kernel's buffers.
const AT_ONCE: usize = 128;
const BYTES_AT_ONCE: usize = 256 << 10;

/// Requests that may wait. A copy to read or write has another master, or waits with its caller.
const QUEUE_MAX: usize = 4096;

/// Longest silence of a node that has requests. After it, the connection is given up.
const SILENCE: Duration = Duration::from_millis(500);

/// Pause after a failed connection, twice as long each time up to the maximum.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A thread whose node has no requests for this long closes its connection.
const IDLE: Duration = Duration::from_secs(60);

/// Outcome of a request.
#[derive(Debug)]
pub(super) enum Reply {
    /// The node's answer, which may be an error of the server.
    Value(Value),
    /// There is no answer. The node may have done it all the same.
    Unreachable,
}

/// Called once, in the link's thread.
pub(super) type Done = Box<dyn FnOnce(Reply) + Send>;

/// Encoded commands, and what to do with the answer of the last.
pub(super) struct Request {
    pub packed: Vec<u8>,
    /// Answers that come before it and say nothing.
    pub skipped: usize,
    pub done: Done,
}

/// The queue of a connection.
pub(super) struct Link {
    pub node: Node,
    queue: Mutex<VecDeque<Request>>,
    ready: Condvar,
    stop: AtomicBool,
    epoch: Instant,
    /// Nanoseconds since `epoch` at which the oldest request without an answer was sent; 0: none.
    waits_since: AtomicU64,
    /// Until this time requests are refused at once; 0: they are not.
    down_until: AtomicU64,
    /// Times that the connection broke or could not be made.
    pub breaks: AtomicU64,
    /// Told when that happens.
    on_break: Box<dyn Fn() + Send + Sync>,
}

impl Link {
    /// Starts the thread of a new link. It connects with the first request.
    pub(super) fn start(
        node: Node,
        access: Arc<Access>,
        on_break: Box<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Arc<Link>> {
        let link = Arc::new(Link {
            node,
            queue: Mutex::default(),
            ready: Condvar::new(),
            stop: AtomicBool::new(false),
            epoch: Instant::now(),
            waits_since: AtomicU64::new(0),
            down_until: AtomicU64::new(0),
            breaks: AtomicU64::new(0),
            on_break,
        });
        let thread = link.clone();
        Builder::new()
            .name("uc-remote".into())
            .spawn(move || thread.run(&access))?;
        Ok(link)
    }

    /// The thread ends soon. Requests that wait are answered.
    pub(super) fn stop(&self) {
        self.stop.store(true, Release);
        self.ready.notify_one();
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Request>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64 + 1
    }

    /// Whether the node answers, as far as is known: no request waits for longer than `patience`.
    pub(super) fn is_well(&self, patience: Duration) -> bool {
        let now = self.now();
        let since = self.waits_since.load(Relaxed);
        let waits = since != 0 && now.saturating_sub(since) > patience.as_nanos() as u64;
        !waits && !self.is_down(now)
    }

    fn is_down(&self, now: u64) -> bool {
        now < self.down_until.load(Acquire) || self.stop.load(Acquire)
    }

    /// Adds a request. Refused if the node is down, or has more requests than it answers; then
    /// `done` is not called.
    pub(super) fn push(&self, request: Request) -> Result<(), Request> {
        if self.is_down(self.now()) {
            return Err(request);
        }
        let mut queue = self.queue();
        if queue.len() >= QUEUE_MAX || self.stop.load(Acquire) {
            return Err(request);
        }
        let wake = queue.is_empty();
        queue.push_back(request);
        drop(queue);
        if wake {
            self.ready.notify_one();
        }
        Ok(())
    }

    fn run(&self, access: &Access) {
        let mut connection: Option<Connection> = None;
        let mut pause = PAUSE_MIN;
        let mut batch = Vec::with_capacity(AT_ONCE);
        while self.take(&mut batch, connection.is_some()) {
            if batch.is_empty() {
                connection = None; // idle
                continue;
            }
            self.waits_since.store(self.now(), Relaxed);
            if connection.is_none() {
                connection = access.connect(&self.node).ok();
            }
            let alive = match &mut connection {
                Some(connection) => self.exchange(connection, &mut batch),
                None => false,
            };
            if alive {
                pause = PAUSE_MIN;
                self.waits_since.store(0, Relaxed);
                continue;
            }
            connection = None;
            // Before any request is answered: who hears that this node is down asks another.
            let until = self.now() + pause.as_nanos() as u64;
            self.down_until.store(until, Release);
            self.waits_since.store(0, Relaxed);
            pause = (2 * pause).min(PAUSE_MAX);
            batch.extend(self.queue().drain(..));
            for request in batch.drain(..) {
                (request.done)(Reply::Unreachable);
            }
            self.breaks.fetch_add(1, Relaxed);
            (self.on_break)();
        }
        for request in batch.drain(..).chain(self.queue().drain(..)) {
            (request.done)(Reply::Unreachable);
        }
    }

    /// Waits for requests, and takes those that are sent together. Nothing after a long time
    /// without any, if there is a connection to close. False: the end.
    fn take(&self, batch: &mut Vec<Request>, connected: bool) -> bool {
        let mut queue = self.queue();
        while queue.is_empty() && !self.stop.load(Acquire) {
            let waited = self.ready.wait_timeout(queue, IDLE);
            let (back, time) = waited.unwrap_or_else(PoisonError::into_inner);
            queue = back;
            if queue.is_empty() && time.timed_out() && connected {
                return true;
            }
        }
        let mut bytes = 0;
        while batch.len() < AT_ONCE
            && bytes < BYTES_AT_ONCE
            && let Some(request) = queue.pop_front()
        {
            bytes += request.packed.len();
            batch.push(request);
        }
        !self.stop.load(Acquire)
    }

    /// Sends a batch and hands out the answers. False: the connection broke; requests without an
    /// answer stay in the batch.
    fn exchange(&self, connection: &mut Connection, batch: &mut Vec<Request>) -> bool {
        let mut bytes = Vec::with_capacity(batch.iter().map(|it| it.packed.len()).sum());
        batch
            .iter()
            .for_each(|it| bytes.extend_from_slice(&it.packed));
        let timeouts = connection
            .set_read_timeout(Some(SILENCE))
            .and_then(|()| connection.set_write_timeout(Some(SILENCE)));
        if timeouts.is_err() || connection.send_packed_command(&bytes).is_err() {
            return false;
        }
        let mut requests = std::mem::take(batch).into_iter();
        let mut alive = true;
        while alive && let Some(request) = requests.next() {
            let silent = (0..request.skipped).all(|_| connection.recv_response().is_ok());
            match connection.recv_response() {
                Ok(value) if silent => {
                    self.waits_since.store(self.now(), Relaxed);
                    (request.done)(Reply::Value(value));
                }
                _ => {
                    batch.push(request);
                    alive = false;
                }
            }
        }
        batch.extend(requests);
        alive
    }
}
