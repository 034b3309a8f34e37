//! Chores of one thread beside reads and writes: it asks for the cluster's map when that may be
//! old, deletes copies of freed pages, makes lost copies anew, and says that the run lives.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{Value, cmd};

use super::Shared;
use super::connect;
use super::keys::Map;
use super::link::{Done, Reply, Request};
use super::net::{Answer, Gather, Role};
use super::table::{Copies, SlotInUse};
use super::{owner, value};
use crate::spec::Node;

/// Time between two looks at the chores.
const TICK: Duration = Duration::from_millis(50);
/// Time between two questions for a map that may be old.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// How often the map is asked for when nothing is wrong.
const ASK_MAP: Duration = Duration::from_secs(2);
/// How often the run says that it lives.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Time from the last trouble to the look for copies that it cost: a failover is over by then.
const SETTLED: Duration = Duration::from_millis(500);

/// Longest wait for the answers of one step.
const WAIT: Duration = Duration::from_secs(1);

/// Copies deleted, looked for and made anew in one step.
const UNLINKS_AT_ONCE: usize = 4096;
const LOOKS_AT_ONCE: u64 = 512;
const MENDS_AT_ONCE: usize = 64;

/// Copies that wait to be deleted or made anew, at most. More are forgotten: deleted at the end,
/// or found by the next look.
const UNLINKS_MAX: usize = 1 << 22;
const MENDS_MAX: usize = 1 << 20;

/// Work that is to be done.
#[derive(Debug, Default)]
pub(super) struct Chores {
    unlinks: Mutex<Vec<(u16, u64)>>,
    mends: Mutex<Mends>,
    /// Copies may be left that no row names: they are looked for at the end.
    pub forgot: AtomicBool,
}

#[derive(Debug, Default)]
struct Mends {
    queue: VecDeque<u64>,
    /// Slots of the queue.
    queued: HashSet<u64>,
    /// Slots that were taken from the queue, and are not done.
    taken: u64,
}

impl Chores {
    fn unlinks(&self) -> MutexGuard<'_, Vec<(u16, u64)>> {
        self.unlinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mends(&self) -> MutexGuard<'_, Mends> {
        self.mends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy is not needed any more, or may have been written in vain.
    pub(super) fn unlink(&self, tag: u16, number: u64) {
        let mut unlinks = self.unlinks();
        if unlinks.len() < UNLINKS_MAX {
            unlinks.push((tag, number));
        } else {
            self.forgot.store(true, Relaxed);
        }
    }

    /// The copies of a page are not needed any more.
    pub(super) fn unlink_both(&self, place: Copies) {
        self.unlink(place.tags[0], place.number);
        if !place.is_single() {
            self.unlink(place.tags[1], place.number);
        }
    }

    /// A slot lacks a copy.
    pub(super) fn mend(&self, slot: u64) {
        let mut mends = self.mends();
        if mends.queue.len() < MENDS_MAX && mends.queued.insert(slot) {
            mends.queue.push_back(slot);
        }
    }

    /// Slots that are known to lack a copy.
    pub(super) fn to_mend(&self) -> u64 {
        let mends = self.mends();
        mends.queue.len() as u64 + mends.taken
    }

    fn take_mends(&self) -> Vec<u64> {
        let mut mends = self.mends();
        let count = mends.queue.len().min(MENDS_AT_ONCE);
        let taken: Vec<u64> = mends.queue.drain(..count).collect();
        taken.iter().for_each(|slot| _ = mends.queued.remove(slot));
        mends.taken = taken.len() as u64;
        taken
    }
}

/// The body of the chores' thread.
pub(super) fn run(shared: &Shared) {
    let (mut asked, mut beat, mut trouble) = (Instant::now(), Instant::now(), None);
    let (mut stale, mut lives) = (false, HashMap::new());
    loop {
        let rung = shared.net.bell.wait(TICK);
        if rung.stop {
            return;
        }
        if rung.missing {
            trouble = Some(Instant::now());
        }
        stale |= rung.stale;
        let since = asked.elapsed();
        if (stale && since >= ASK_AGAIN) || since >= ASK_MAP {
            asked = Instant::now();
            let changed = refresh(shared);
            stale &= changed.is_none();
            if changed == Some(true) || have_restarted(shared, &mut lives) {
                trouble = Some(Instant::now());
                // A replica that became the master may not have heard of the last deletions.
                shared.chores.forgot.store(true, Relaxed);
            }
        }
        if beat.elapsed() >= HEARTBEAT {
            beat = Instant::now();
            owner::beat(shared);
        }
        unlink_some(shared);
        if trouble.is_some_and(|at: Instant| at.elapsed() >= SETTLED) {
            trouble = (!look_for_missing(shared)).then(Instant::now);
        }
        for _ in 0..16 {
            if shared.is_stopped() || !mend_some(shared) {
                break;
            }
        }
        if rung.stale {
            std::thread::sleep(Duration::from_millis(5)); // a storm of errors is one question
        }
    }
}

/// Asks the nodes for the map, first those that have answered lately. `None`: no node gave one
/// with all hash slots.
fn refresh(shared: &Shared) -> Option<bool> {
    let map = shared.net.map();
    let mut nodes = map.nodes.clone();
    nodes.extend(shared.spec.nodes.iter().cloned());
    // True sorts after false.
    nodes.sort_by_key(|node| {
        let link = shared.net.link_if_any(node);
        !link.is_some_and(|link| link.is_well(super::net::PATIENCE))
    });
    for node in nodes {
        let Ok(mut connection) = shared.net.access.connect(&node) else {
            continue;
        };
        let Ok(new) = connect::map(&mut connection, &node) else {
            continue;
        };
        if new.uncovered() == 0 {
            return Some(shared.net.set_map(new));
        }
    }
    None
}

/// Deletes copies of freed pages, those of one master by one request.
fn unlink_some(shared: &Shared) {
    let mut some = {
        let mut unlinks = shared.chores.unlinks();
        let count = unlinks.len().min(UNLINKS_AT_ONCE);
        unlinks.drain(..count).collect::<Vec<_>>()
    };
    let map = shared.net.map();
    some.sort_unstable_by_key(|(tag, _)| map.master_of(*tag));
    let (mut sent, mut requests) = (Vec::new(), Vec::new());
    for of_one in some.chunk_by(|a, b| map.master_of(a.0) == map.master_of(b.0)) {
        for part in of_one.chunks(512) {
            let mut packed = Vec::new();
            for (tag, number) in part {
                let key = shared.keys.copy(*tag, *number);
                packed.extend(cmd("UNLINK").arg(key).get_packed_command());
            }
            requests.push((part[0].0, packed, part.len() - 1));
            sent.push(part);
        }
    }
    let (to, answers) = std::sync::mpsc::channel();
    for (at, (tag, packed, skipped)) in requests.into_iter().enumerate() {
        let told = to.clone();
        let done: Done = Box::new(move |reply| {
            let _ = told.send((at, matches!(reply, Reply::Value(Value::Int(_)))));
        });
        let request = Request {
            packed,
            skipped,
            done,
        };
        let link = shared.net.of_tag(tag, Role::Write);
        if link.is_none_or(|link| link.push(request).is_err()) {
            let _ = to.send((at, false));
        }
    }
    drop(to);
    let until = Instant::now() + WAIT;
    let mut open: HashSet<usize> = (0..sent.len()).collect();
    for _ in 0..sent.len() {
        let left = until.saturating_duration_since(Instant::now());
        match answers.recv_timeout(left) {
            Ok((at, true)) => _ = open.remove(&at),
            Ok((_, false)) => {}
            Err(_) => break,
        }
    }
    for at in open {
        sent[at]
            .iter()
            .for_each(|(tag, number)| shared.chores.unlink(*tag, *number));
    }
}

/// The rows of slots `from..to` that are in use.
fn rows(shared: &Shared, from: u64, to: u64) -> Vec<(u64, SlotInUse)> {
    let row = |slot| shared.table.row(slot).map(|row| (slot, row));
    (from..to).filter_map(row).collect()
}

/// Whether a master is another process than before: one that came back may have lost its keys.
///
/// * `lives`: the number that each master gave itself at its start.
fn have_restarted(shared: &Shared, lives: &mut HashMap<Node, String>) -> bool {
    let map = shared.net.map();
    let with_tag = |(at, node): (usize, &Node)| Some((map.tag_of(at, 0)?, node.clone()));
    let masters: Vec<(u16, Node)> = map.masters().filter_map(with_tag).collect();
    let info = cmd("INFO").arg("server").get_packed_command();
    let requests = masters
        .iter()
        .map(|(tag, _)| (*tag, info.clone()))
        .collect();
    let answers = Gather::send(&shared.net, Role::Write, requests).wait_for_all(WAIT);
    let mut restarted = false;
    for (answer, (_, node)) in answers.iter().zip(masters) {
        let Answer::Value(value) = answer else {
            continue;
        };
        let info = connect::text(value);
        if let Some(id) = connect::field(&info, "run_id") {
            let before = lives.insert(node, id.to_owned());
            restarted |= before.is_some_and(|before| before != id);
        }
    }
    restarted
}

/// Looks at all copies, and queues pages that lack one, or have both on one host although there is
/// another: a replica became the master. False if a master did not answer.
fn look_for_missing(shared: &Shared) -> bool {
    let slots = shared.table.slots();
    let map = shared.net.map();
    let is_poor = |tags: [u16; 2]| map.hosts() > 1 && map.are_together(tags);
    let (mut from, mut all) = (0, true);
    while from < slots && !shared.is_stopped() {
        let rows = rows(shared, from, (from + LOOKS_AT_ONCE).min(slots));
        from += LOOKS_AT_ONCE;
        let of = |(_, row): &(u64, SlotInUse)| {
            let place = row.place;
            [0, 1].map(|which| {
                let exists = cmd("EXISTS")
                    .arg(shared.keys.of(place, which))
                    .get_packed_command();
                (place.tags[which], exists)
            })
        };
        let requests = rows.iter().flat_map(of).collect();
        let gather = Gather::send(&shared.net, Role::Write, requests);
        let answers = gather.wait_for_all(WAIT);
        for (pair, (slot, row)) in answers.chunks_exact(2).zip(rows) {
            let missing = |answer: &Answer| matches!(answer, Answer::Value(Value::Int(0)));
            if pair.iter().any(missing) {
                shared.counters.missing.fetch_add(1, Relaxed);
                shared.chores.mend(slot);
            } else if is_poor(row.place.tags) {
                shared.chores.mend(slot);
            }
            all &= (pair.iter()).all(|it| matches!(it, Answer::Value(Value::Int(_))));
        }
    }
    all
}

/// Stores pages anew that lack a copy. Both copies get new keys: a late write or deletion of an old
/// key then cannot harm them. False if there is no more to do now.
fn mend_some(shared: &Shared) -> bool {
    let slots = shared.chores.take_mends();
    let row = |slot: u64| shared.table.row(slot).map(|row| (slot, row));
    let rows: Vec<(u64, SlotInUse)> = slots.into_iter().filter_map(row).collect();
    if rows.is_empty() {
        return false;
    }
    let get = |(_, row): &(u64, SlotInUse)| {
        let place = row.place;
        [0, 1].map(|which| {
            let get = cmd("GET")
                .arg(shared.keys.of(place, which))
                .get_packed_command();
            (place.tags[which], get)
        })
    };
    let gets = rows.iter().flat_map(get).collect();
    let answers = Gather::send(&shared.net, Role::Write, gets).wait_for_all(WAIT);
    let map = shared.net.map();
    let (mut mends, mut sets, mut again) = (Vec::new(), Vec::new(), Vec::new());
    for (pair, (slot, row)) in answers.chunks_exact(2).zip(rows) {
        let verified = |answer: &Answer| match answer {
            Answer::Value(Value::BulkString(bytes)) => {
                value::decode(bytes, &shared.key, &row).map(|_| bytes.clone())
            }
            _ => None,
        };
        let (one, other) = (verified(&pair[0]), verified(&pair[1]));
        let is_whole = one.is_some() && other.is_some() && !row.place.is_single();
        if is_whole && !map.are_together(row.place.tags) {
            continue;
        }
        let Some(bytes) = one.or(other) else {
            continue; // a read will say what is left of it
        };
        let Some(new) = two_places(shared, &map) else {
            again.push(slot);
            continue;
        };
        if is_whole && map.are_together(new.tags) {
            continue; // no other host takes writes
        }
        for which in [0, 1] {
            let key = shared.keys.of(new, which);
            let set = cmd("SET").arg(key).arg(&bytes[..]).get_packed_command();
            sets.push((new.tags[which], set));
        }
        mends.push((slot, row.place, new));
    }
    let answers = Gather::send(&shared.net, Role::Write, sets).wait_for_all(WAIT);
    for (pair, (slot, old, new)) in answers.chunks_exact(2).zip(mends) {
        let stored = pair.iter().all(Answer::is_ok);
        if stored && shared.table.replace(slot, old, new) {
            shared.counters.mended.fetch_add(1, Relaxed);
            if old.is_single() {
                shared.counters.single.fetch_sub(1, Relaxed);
            }
            shared.chores.unlink_both(old);
            continue;
        }
        shared.chores.unlink_both(new);
        if !stored {
            again.push(slot);
        }
    }
    let more = again.is_empty();
    again.into_iter().for_each(|slot| shared.chores.mend(slot));
    more
}

/// Where a page may be stored anew: on two masters that take writes.
fn two_places(shared: &Shared, map: &Map) -> Option<Copies> {
    let first = shared.net.pick(map, &[], &[])?;
    let copies: Vec<usize> = map.master_of(first).into_iter().collect();
    let second = shared.net.pick(map, &[], &copies)?;
    Some(Copies {
        number: shared.table.number()?,
        tags: [first, second],
    })
}

/// Deletes what is left of this run, until `limit`. True if all of it is gone.
pub(super) fn delete_all(shared: &Shared, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    for slot in 0..shared.table.slots() {
        if let Some(row) = shared.table.empty(slot) {
            shared.chores.unlink_both(row.place);
        }
    }
    while !shared.chores.unlinks().is_empty() {
        if Instant::now() >= until {
            return false;
        }
        unlink_some(shared);
    }
    // A master that broke may be replaced by a replica, and that was not seen yet.
    !shared.chores.forgot.load(Relaxed) && shared.net.breaks.load(Relaxed) == 0
}
