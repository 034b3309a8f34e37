//! The cluster as it is now: who has which hash slots, and the links to the masters.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use redis::{ServerErrorKind, Value};

use super::connect::Access;
use super::keys::Map;
use super::link::{Done, Link, Reply, Request};
use crate::spec::Node;

/// A master whose requests wait for longer than this is not asked first.
pub(super) const PATIENCE: Duration = Duration::from_millis(20);

/// Reads and writes have connections of their own, so that no read waits for the bytes of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Role {
    Read,
    Write,
}

/// Reasons for which the chores' thread is woken.
#[derive(Debug, Default)]
pub(super) struct Rung {
    /// The map may be old.
    pub stale: bool,
    /// Copies may be missing.
    pub missing: bool,
    pub stop: bool,
}

/// Wakes the thread that looks after the cluster.
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung: Mutex<Rung>,
    ready: Condvar,
}

impl Bell {
    pub(super) fn ring(&self, change: impl FnOnce(&mut Rung)) {
        change(&mut self.rung.lock().unwrap_or_else(PoisonError::into_inner));
        self.ready.notify_all();
    }

    /// Waits until something is wanted, or `limit`. Takes what is wanted; a stop stays.
    pub(super) fn wait(&self, limit: Duration) -> Rung {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = |rung: &mut Rung| !(rung.stale || rung.stop);
        let waited = self.ready.wait_timeout_while(rung, limit, idle);
        let (mut rung, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let stop = rung.stop;
        std::mem::replace(
            &mut *rung,
            Rung {
                stop,
                ..Rung::default()
            },
        )
    }
}

pub(super) struct Net {
    pub access: Arc<Access>,
    map: RwLock<Arc<Map>>,
    links: RwLock<HashMap<(Node, Role), Arc<Link>>>,
    pub bell: Arc<Bell>,
    /// Times that a connection broke or could not be made.
    pub breaks: Arc<AtomicU64>,
    turn: AtomicUsize,
}

impl Net {
    pub(super) fn new(access: Access, map: Map) -> Net {
        Net {
            access: Arc::new(access),
            map: RwLock::new(Arc::new(map)),
            links: RwLock::default(),
            bell: Arc::default(),
            breaks: Arc::default(),
            turn: AtomicUsize::new(0),
        }
    }

    pub(super) fn map(&self) -> Arc<Map> {
        (self.map.read().unwrap_or_else(PoisonError::into_inner)).clone()
    }

    /// The cluster has changed. Links to nodes that are no masters any more end. True if it is
    /// another map.
    pub(super) fn set_map(&self, new: Map) -> bool {
        if *self.map() == new {
            return false;
        }
        let new = Arc::new(new);
        *self.map.write().unwrap_or_else(PoisonError::into_inner) = new.clone();
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        links.retain(|(node, _), link| {
            let stays = new.masters().any(|(_, master)| master == node);
            if !stays {
                link.stop();
            }
            stays
        });
        true
    }

    /// The link to a node; it is started if there is none. `None`: no thread can be made.
    pub(super) fn link(&self, node: &Node, role: Role) -> Option<Arc<Link>> {
        let key = (node.clone(), role);
        let known = self.links.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = known.get(&key) {
            return Some(link.clone());
        }
        drop(known);
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = links.get(&key) {
            return Some(link.clone());
        }
        let (bell, breaks) = (self.bell.clone(), self.breaks.clone());
        let on_break = move || {
            breaks.fetch_add(1, Relaxed);
            bell.ring(|rung| (rung.stale, rung.missing) = (true, true));
        };
        let link = Link::start(node.clone(), self.access.clone(), Box::new(on_break)).ok()?;
        links.insert(key, link.clone());
        Some(link)
    }

    /// The link for reads to a node, if there is one.
    pub(super) fn link_if_any(&self, node: &Node) -> Option<Arc<Link>> {
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        links.get(&(node.clone(), Role::Read)).cloned()
    }

    /// The link to the master of a tag.
    pub(super) fn of_tag(&self, tag: u16, role: Role) -> Option<Arc<Link>> {
        self.link(self.map().node_of(tag)?, role)
    }

    /// True if the master of the tag answers reads, as far as is known.
    pub(super) fn is_well(&self, tag: u16) -> bool {
        self.of_tag(tag, Role::Read)
            .is_some_and(|link| link.is_well(PATIENCE))
    }

    /// A tag of a master that takes writes, other than those of `not` and `copies`. It is on a host
    /// of none of `copies`, if there is one that takes writes. Each call begins with the next
    /// master.
    ///
    /// * `copies`: masters that have a copy of the page. A host that dies takes all of its masters
    ///   along, and what their replicas elsewhere lack yet.
    pub(super) fn pick(&self, map: &Map, not: &[usize], copies: &[usize]) -> Option<u16> {
        let turn = self.turn.fetch_add(1, Relaxed);
        let masters: Vec<(usize, &Node)> = map.masters().collect();
        let count = masters.len();
        let from = |at: usize| masters[(turn + at) % count];
        let takes = |(at, node): &(usize, &Node)| {
            let link = || self.link(node, Role::Write);
            let is_other = !not.contains(at) && !copies.contains(at);
            is_other && link().is_some_and(|link| link.is_well(PATIENCE))
        };
        let is_apart = |(at, _): &(usize, &Node)| !copies.iter().any(|it| map.share_host(*it, *at));
        let apart = (0..count).map(from).filter(is_apart).find(takes);
        let (master, _) = apart.or_else(|| (0..count).map(from).find(takes))?;
        map.tag_of(master, turn / count.max(1))
    }

    pub(super) fn stop(&self) {
        self.bell.ring(|rung| rung.stop = true);
        let links = self.links.read().unwrap_or_else(PoisonError::into_inner);
        links.values().for_each(|link| link.stop());
    }
}

/// Outcome of one of several requests.
#[derive(Debug, Default)]
pub(super) enum Answer {
    /// Nothing yet.
    #[default]
    Waits,
    Value(Value),
    /// There is none. The node may have done it all the same.
    Unreachable,
}

impl Answer {
    pub(super) fn is_ok(&self) -> bool {
        matches!(self, Answer::Value(Value::Okay))
    }

    /// The server has no memory for it.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, Answer::Value(Value::ServerError(error)) if error.code() == "OOM")
    }
}

/// True if an error says that the map is old.
pub(super) fn is_moved(value: &Value) -> bool {
    use ServerErrorKind::{ClusterDown, MasterDown, Moved, ReadOnly};
    let Value::ServerError(error) = value else {
        return false;
    };
    matches!(
        error.kind(),
        Some(ClusterDown | MasterDown | Moved | ReadOnly)
    )
}

/// The answers of requests that were sent together.
#[derive(Debug, Default)]
pub(super) struct Gather {
    answers: Mutex<Vec<Answer>>,
    ready: Condvar,
}

impl Gather {
    /// Sends each request to the master of its tag.
    pub(super) fn send(net: &Net, role: Role, requests: Vec<(u16, Vec<u8>)>) -> Arc<Gather> {
        let answers = requests.iter().map(|_| Answer::Waits).collect();
        let gather = Arc::new(Gather {
            answers: Mutex::new(answers),
            ready: Condvar::new(),
        });
        for (at, (tag, packed)) in requests.into_iter().enumerate() {
            let (to, bell) = (gather.clone(), net.bell.clone());
            let done: Done = Box::new(move |reply| {
                let answer = match reply {
                    Reply::Value(value) => {
                        if is_moved(&value) {
                            bell.ring(|rung| (rung.stale, rung.missing) = (true, true));
                        }
                        Answer::Value(value)
                    }
                    Reply::Unreachable => Answer::Unreachable,
                };
                to.put(at, answer);
            });
            let skipped = 0;
            let request = Request {
                packed,
                skipped,
                done,
            };
            let sent = net.of_tag(tag, role).map(|link| link.push(request));
            if !matches!(sent, Some(Ok(()))) {
                gather.put(at, Answer::Unreachable);
            }
        }
        gather
    }

    fn put(&self, at: usize, answer: Answer) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        // Not after `wait`, which took them.
        if let Some(place) = answers.get_mut(at) {
            *place = answer;
        }
        drop(answers);
        self.ready.notify_one();
    }

    /// Waits for all answers until `limit`; from `soon` on, until `enough` is true of them.
    pub(super) fn wait(
        &self,
        soon: Instant,
        limit: Instant,
        enough: impl Fn(&[Answer]) -> bool,
    ) -> Vec<Answer> {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let now = Instant::now();
            let waits = answers.iter().any(|it| matches!(it, Answer::Waits));
            if !waits || now >= limit || (now >= soon && enough(&answers)) {
                return std::mem::take(&mut *answers);
            }
            let until = if now < soon { soon.min(limit) } else { limit };
            let waited = self.ready.wait_timeout(answers, until - now);
            answers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits for all answers.
    pub(super) fn wait_for_all(&self, limit: Duration) -> Vec<Answer> {
        let limit = Instant::now() + limit;
        self.wait(limit, limit, |_| false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cluster whose masters are on these hosts, none of which is ever asked.
    fn net(hosts: &[&str]) -> Net {
        let spec = crate::spec::parsed("redis:a:1").expect("settings");
        let share = super::super::keys::HASH_SLOTS / hosts.len();
        let range = |(at, host): (usize, &&str)| {
            let node = Node {
                host: (*host).to_owned(),
                port: 1 + at as u16,
            };
            (at * share, at * share + share - 1, node)
        };
        let ranges: Vec<_> = hosts.iter().enumerate().map(range).collect();
        Net::new(
            Access::new(&spec).expect("access"),
            Map::new(&ranges, vec![]),
        )
    }

    /// The masters that are picked, in many turns.
    fn picked(net: &Net, not: &[usize], copies: &[usize]) -> Vec<usize> {
        let map = net.map();
        let tags = (0..40).filter_map(|_| net.pick(&map, not, copies));
        let mut masters: Vec<usize> = tags.filter_map(|tag| map.master_of(tag)).collect();
        masters.sort_unstable();
        masters.dedup();
        masters
    }

    fn breaks(net: &Net, master: usize) {
        let map = net.map();
        let (_, node) = map.masters().nth(master).expect("a master");
        net.link(node, Role::Write).expect("a link").stop();
    }

    #[test]
    fn second_copies_go_to_another_host_as_long_as_one_takes_writes() {
        let net = net(&["a", "a", "b", "b"]);
        assert_eq!(picked(&net, &[], &[]), [0, 1, 2, 3]);
        assert_eq!(picked(&net, &[], &[0]), [2, 3]);
        assert_eq!(picked(&net, &[], &[3]), [0, 1]);
        // A master that failed is passed over, and its host is not.
        assert_eq!(picked(&net, &[2], &[0]), [3]);
        assert_eq!(picked(&net, &[0], &[3]), [1]);
        breaks(&net, 2);
        assert_eq!(picked(&net, &[], &[0]), [3]);
        breaks(&net, 3);
        assert_eq!(
            picked(&net, &[], &[0]),
            [1],
            "two on one host are better than one"
        );
        assert!(picked(&net, &[1], &[0]).is_empty());
    }

    #[test]
    fn copies_of_one_host_are_known() {
        let net = net(&["a", "b", "b"]);
        let map = net.map();
        let tag = |master| map.tag_of(master, 7).expect("a tag");
        assert!(map.are_together([tag(1), tag(2)]));
        assert!(!map.are_together([tag(0), tag(2)]));
        assert_eq!(map.hosts(), 2);
    }
}
