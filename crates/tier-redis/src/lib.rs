//! The remote tier: copies of pages in a Redis or Valkey cluster, each page on two masters.
//!
//! Level 2: depends on `base` (the Tier port) and `sys` (shared memory). No `unsafe`. The product
//! has it with the feature `redis` only: the client and its TLS take long to build.
//!
//! A page is compressed, and written to two masters (`store.rs`). A read asks one of them, and the
//! other if the first is late or has nothing (`fetch.rs`). If a master fails, new pages go to the
//! others, and pages that lost a copy are stored anew (`chores.rs`). The cluster's own failover
//! then gives its hash slots to a replica. Replication is not waited for: a replica may lack the
//! newest copies, and the other master has them.
//!
//! ```text
//! callers ── store ──┬─ link: queue, thread, connection ── master 1
//!         ── fetch ──┴─ link ...                        ── master 2 ...
//! uc-hedge: reads that are late      uc-chores: map, deletions, lost copies
//! ```
//! What verifies a copy, its checksum and stamp, is in the slot table (`table.rs`) and never leaves
//! this machine. Locks are held for bookkeeping only, never during I/O. docs/design/0026.

#![forbid(unsafe_code)]

mod check;
mod chores;
mod connect;
mod fetch;
mod keys;
mod link;
mod net;
mod owner;
pub mod spec;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod value;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use undercroft_base::{
    Bytes, Inbox, LatencyClass, LoadError, Loaded, Nanos, PageKey, PageSize, RemoteCounts, Slot,
    Stamp, Store, Tier, TierFacts, TierInfo, TierUsage,
};
use undercroft_sys::mapping::SharedMemory;

pub use check::Claimed;
use chores::Chores;
use fetch::Flights;
use keys::Keys;
use net::Net;
use spec::RemoteSpec;
use table::Table;

/// Facts of a cluster.
pub const FACTS: TierFacts = TierFacts {
    remote: true,
    ..TierFacts::of("redis", LatencyClass::Device, Nanos(300_000))
};

/// How long the end of a run may take to delete its copies.
const CLOSING: Duration = Duration::from_secs(3);

/// Why a cluster cannot be used. The text has the fix.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// A file of the settings cannot be read.
    #[error("tier redis: {}: {}", .0.display(), .1)]
    File(PathBuf, std::io::Error),
    /// A password that is not text.
    #[error("tier redis: {}: the password is not UTF-8 text", .0.display())]
    NotText(PathBuf),
    /// An empty password.
    #[error("tier redis: {}: the first line, the password, is empty", .0.display())]
    NoPassword(PathBuf),
    /// No node of the settings answers.
    #[error("tier redis: no node answers: {0}; check the addresses, the network and tls=")]
    NoNode(String),
    /// A node refuses the user or the password.
    #[error(
        "tier redis: {node} refuses the user or password: {why}; check user= and password-file="
    )]
    Refused {
        /// The node.
        node: String,
        /// Its message.
        why: String,
    },
    /// The user may not do what is needed.
    #[error(
        "tier redis: {node}: the user lacks a right: {why}; it needs ~PREFIX:* and \
         +get +set +unlink +exists +scan +time +info +ping +asking +cluster|slots +cluster|info"
    )]
    NoRight {
        /// The node.
        node: String,
        /// Its message.
        why: String,
    },
    /// A node does not belong to a cluster.
    #[error("tier redis: {0} is not part of a cluster; start it with cluster-enabled yes")]
    NotACluster(String),
    /// The cluster is not whole.
    #[error(
        "tier redis: the cluster is not whole ({0} hash slots have no master, or it says that it \
         is down); repair it (`redis-cli --cluster check`)"
    )]
    Uncovered(usize),
    /// Only one copy would be kept.
    #[error("tier redis: the cluster has {0} master; two copies need two masters at least")]
    TooFewMasters(usize),
    /// The node would throw pages away.
    #[error(
        "tier redis: {node} may delete pages when it is full (maxmemory-policy {policy}); set \
         noeviction or volatile-lru"
    )]
    Evicts {
        /// The node.
        node: String,
        /// Its policy.
        policy: String,
    },
    /// Another run uses the prefix.
    #[error(
        "tier redis: prefix `{prefix}` is used by another run (host {host}, process {pid}, last \
         heard of {} s ago); give another prefix={}", silent.as_secs(), or_discard(*may_discard)
    )]
    InUse {
        /// The prefix.
        prefix: String,
        /// Where the other run is.
        host: String,
        /// Its keeper.
        pid: u32,
        /// Since it was heard of.
        silent: Duration,
        /// The other run was not heard of for long.
        may_discard: bool,
    },
    /// A key with the name of ours.
    #[error("tier redis: the key {0} is not ours; give another prefix=")]
    ForeignKey(String),
    /// Two runs wanted it at once.
    #[error("tier redis: another run took the prefix `{0}` at the same moment; try again")]
    Raced(String),
    /// Another failure of a node.
    #[error("tier redis: {node}: {why}")]
    Node {
        /// The node.
        node: String,
        /// Description of what happened.
        why: String,
    },
    /// The memory handed over is no slot table: a defect.
    #[error("tier redis: the shared memory holds no slot table for it")]
    Table,
    /// No threads.
    #[error("tier redis: {0}")]
    System(#[from] std::io::Error),
}

fn or_discard(may: bool) -> &'static str {
    if may {
        ", or leftover=discard if that run has ended: it deletes what is left of it"
    } else {
        ""
    }
}

#[derive(Debug, Default)]
struct Counters {
    single: AtomicU64,
    missing: AtomicU64,
    mended: AtomicU64,
    hedged: AtomicU64,
    late: AtomicU64,
    damaged: AtomicU64,
    lost: AtomicU64,
}

/// State that the threads of a tier share.
struct Shared {
    info: TierInfo,
    key: PageKey,
    spec: RemoteSpec,
    table: Table,
    keys: Keys,
    net: Net,
    flights: Flights,
    chores: Chores,
    counters: Counters,
    pause: Mutex<store::Pause>,
    logical: AtomicU64,
    stored: AtomicU64,
    held: AtomicU64,
    stopped: std::sync::atomic::AtomicBool,
    /// Whether pages may be stored. Each batch holds it for reading.
    open: RwLock<bool>,
}

impl Shared {
    fn pause(&self) -> MutexGuard<'_, store::Pause> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }
}

/// A tier in a cluster.
pub struct RemoteTier {
    shared: Arc<Shared>,
    /// The chores' thread, until the tier is closed.
    chores: Mutex<Option<JoinHandle<()>>>,
    /// The claim of this process. It goes last, and takes what is left of the run along.
    _claimed: Option<Claimed>,
}

impl RemoteTier {
    /// Length of the slot table for a tier of `size`.
    pub fn table_bytes(size: Bytes) -> usize {
        Table::bytes_for(size)
    }

    /// A new, empty tier. `table`: as [`Claimed::new`] filled it. `claimed`: if this process made
    /// the claim.
    ///
    /// Errors: no node answers any more; no threads.
    pub fn new(
        spec: &RemoteSpec,
        table: SharedMemory,
        claimed: Option<Claimed>,
        key: &PageKey,
    ) -> Result<RemoteTier, RemoteError> {
        let table = Table::new(table, spec.size)?;
        let access = connect::Access::new(spec)?;
        let map = check::find_map(&access, spec)?;
        let shared = Arc::new(Shared {
            info: TierInfo {
                name: check::name(spec),
                facts: &FACTS,
                page: PageSize::Base,
                emulated: false,
                capacity: spec.size,
            },
            key: key.clone(),
            spec: spec.clone(),
            keys: Keys::new(&spec.prefix, table.run()),
            table,
            net: Net::new(access, map),
            flights: Flights::new(),
            chores: Chores::default(),
            counters: Counters::default(),
            pause: Mutex::default(),
            logical: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            held: AtomicU64::new(0),
            stopped: false.into(),
            open: RwLock::new(true),
        });
        let of = shared.clone();
        let thread = Builder::new().name("uc-hedge".into());
        thread.spawn(move || of.flights.watch())?;
        let of = shared.clone();
        let thread = Builder::new().name("uc-chores".into());
        let thread = thread.spawn(move || chores::run(&of))?;
        Ok(RemoteTier {
            shared,
            chores: Mutex::new(Some(thread)),
            _claimed: claimed,
        })
    }
}

impl Tier for RemoteTier {
    fn info(&self) -> &TierInfo {
        &self.shared.info
    }

    fn usage(&self) -> TierUsage {
        TierUsage {
            logical: Bytes(self.shared.logical.load(Relaxed)),
            stored: Bytes(self.shared.stored.load(Relaxed)),
            held: Bytes(self.shared.held.load(Relaxed)),
        }
    }

    fn dram(&self) -> Bytes {
        self.shared.table.dram()
    }

    fn store(&self, batch: &mut [Store<'_>]) {
        store::store(&self.shared, batch);
    }

    fn load(&self, slot: Slot, stamp: Stamp, _dst: &mut [u8]) -> Result<Loaded, LoadError> {
        let row = self.shared.table.row(slot.0);
        match row.filter(|row| row.stamp == stamp) {
            Some(_) => Ok(Loaded::Fetch),
            None => Err(LoadError::Corrupt),
        }
    }

    fn fetch(&self, slot: Slot, stamp: Stamp, token: u64, inbox: &Arc<dyn Inbox>) {
        fetch::begin(&self.shared, slot, stamp, token, inbox);
    }

    fn remote_counts(&self) -> Option<RemoteCounts> {
        let counters = &self.shared.counters;
        Some(RemoteCounts {
            degraded: (counters.single.load(Relaxed)).max(self.shared.chores.to_mend()),
            missing: counters.missing.load(Relaxed),
            mended: counters.mended.load(Relaxed),
            hedged: counters.hedged.load(Relaxed),
            late: counters.late.load(Relaxed),
            damaged: counters.damaged.load(Relaxed),
            lost: counters.lost.load(Relaxed),
            breaks: self.shared.net.breaks.load(Relaxed),
        })
    }

    fn checksum(&self, slot: Slot, stamp: Stamp) -> Option<u64> {
        let row = self.shared.table.row(slot.0)?;
        (row.stamp == stamp).then_some(row.checksum)
    }

    fn free(&self, slots: &[Slot]) {
        store::free(&self.shared, slots);
    }

    fn close(&self) {
        let shared = &self.shared;
        shared.stopped.store(true, Relaxed);
        shared.net.bell.ring(|rung| rung.stop = true);
        let chores = self.chores.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = { chores }.take().map(JoinHandle::join);
        // Batches that are being stored end first. A later one would stay in the cluster.
        *shared.open.write().unwrap_or_else(PoisonError::into_inner) = false;
        // The thread deletes and makes copies, too: it must not do so beside this.
        if matches!(ended, Some(Ok(()))) && chores::delete_all(shared, CLOSING) {
            let (map, run) = (shared.net.map(), shared.table.run());
            owner::release(&shared.net.access, &map, &shared.keys, run);
        }
        shared.net.stop();
        shared.flights.stop();
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Relaxed);
        self.shared.net.stop();
        self.shared.flights.stop();
    }
}
