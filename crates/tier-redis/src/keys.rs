//! Keys, and the masters that they go to.
//!
//! ```text
//! PREFIX:{TAG}:RUN:NUMBER      a copy        PREFIX:owner      which run uses the prefix
//! ```
//! A cluster puts a key on the master that its hash tag chooses, the text in braces. There are 4096
//! tags, so each master has many. The two copies of a page have the same number, and tags of two
//! masters. A page keeps its tags, so after a failover or a move of hash slots the map of the
//! cluster says where its copies are.

use std::fmt::Write;

use super::table::{Copies, TAGS};
use crate::spec::Node;

/// Hash slots of a cluster.
pub(super) const HASH_SLOTS: usize = 1 << 14;
const NONE: u16 = u16::MAX;

/// The names of one run's keys.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
    run: u64,
}

impl Keys {
    pub(super) fn new(prefix: &str, run: u64) -> Keys {
        let prefix = prefix.to_owned();
        Keys { prefix, run }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The key of a copy.
    pub(super) fn copy(&self, tag: u16, number: u64) -> String {
        let mut key = String::with_capacity(self.prefix.len() + 40);
        let (prefix, run) = (&self.prefix, self.run);
        let _ = write!(key, "{prefix}:{{{tag:x}}}:{run:016x}:{number:x}");
        key
    }

    /// The key of copy `which` of a place.
    pub(super) fn of(&self, place: Copies, which: usize) -> String {
        self.copy(place.tags[which], place.number)
    }

    /// The key that says which run uses the prefix.
    pub(super) fn owner(&self) -> String {
        format!("{}:owner", self.prefix)
    }

    /// Pattern that finds the copies of all runs with this prefix.
    pub(super) fn pattern(&self) -> String {
        format!("{}:{{*}}:*", self.prefix)
    }
}

/// CRC-16/XMODEM, as the cluster specification has it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        let mut crc = crc ^ u16::from(*byte) << 8;
        for _ in 0..8 {
            let over = crc & 0x8000 != 0;
            crc = crc << 1 ^ if over { 0x1021 } else { 0 };
        }
        crc
    })
}

/// The hash slot of a key.
pub(super) fn hash_slot(key: &str) -> usize {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    let hashed = match tag {
        Some((tag, _)) if !tag.is_empty() => tag,
        _ => key,
    };
    usize::from(crc16(hashed.as_bytes())) % HASH_SLOTS
}

/// Which master has which hash slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Map {
    masters: Vec<Node>,
    /// All nodes, for asking.
    pub nodes: Vec<Node>,
    of_tag: Vec<u16>,
    of_slot: Vec<u16>,
    tags: Vec<Vec<u16>>,
}

impl Map {
    /// * `ranges`: hash slots, first and last, and their master.   * `nodes`: all nodes.
    pub(super) fn new(ranges: &[(usize, usize, Node)], nodes: Vec<Node>) -> Map {
        let (mut masters, mut of_slot) = (Vec::<Node>::new(), vec![NONE; HASH_SLOTS]);
        for (first, last, node) in ranges {
            let known = masters.iter().position(|master| master == node);
            let at = known.unwrap_or_else(|| {
                masters.push(node.clone());
                masters.len() - 1
            });
            let range = *first..(*last + 1).min(HASH_SLOTS);
            if let Some(slots) = of_slot.get_mut(range) {
                slots.fill(at as u16);
            }
        }
        let of_tag = (0..TAGS).map(|tag| of_slot[hash_slot(&format!("{tag:x}"))]);
        let of_tag: Vec<u16> = of_tag.collect();
        let mut tags = vec![Vec::new(); masters.len()];
        for (tag, at) in of_tag.iter().enumerate().filter(|(_, at)| **at != NONE) {
            tags[usize::from(*at)].push(tag as u16);
        }
        Map {
            masters,
            nodes,
            of_tag,
            of_slot,
            tags,
        }
    }

    /// Masters that have tags.
    pub(super) fn masters(&self) -> impl Iterator<Item = (usize, &Node)> {
        let with = |(at, _): &(usize, &Node)| !self.tags[*at].is_empty();
        self.masters.iter().enumerate().filter(with)
    }

    /// How many hosts have masters.
    pub(super) fn hosts(&self) -> usize {
        let mut hosts: Vec<&str> = self.masters().map(|(_, node)| &node.host[..]).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts.len()
    }

    /// Whether two masters are on one host.
    pub(super) fn share_host(&self, one: usize, other: usize) -> bool {
        let host = |at: usize| self.masters.get(at).map(|node| &node.host);
        host(one) == host(other)
    }

    /// Whether the masters of two tags are on one host.
    pub(super) fn are_together(&self, tags: [u16; 2]) -> bool {
        match tags.map(|tag| self.master_of(tag)) {
            [Some(one), Some(other)] => self.share_host(one, other),
            _ => false,
        }
    }

    /// How many hash slots no master has.
    pub(super) fn uncovered(&self) -> usize {
        self.of_slot.iter().filter(|at| **at == NONE).count()
    }

    /// The number of the master of a tag.
    pub(super) fn master_of(&self, tag: u16) -> Option<usize> {
        let at = *self.of_tag.get(usize::from(tag))?;
        (at != NONE).then_some(usize::from(at))
    }

    /// The master of a tag.
    pub(super) fn node_of(&self, tag: u16) -> Option<&Node> {
        self.master_of(tag).map(|at| &self.masters[at])
    }

    /// The master of any key.
    pub(super) fn node_of_key(&self, key: &str) -> Option<&Node> {
        self.masters.get(usize::from(self.of_slot[hash_slot(key)]))
    }

    /// A tag of a master; `spread` chooses which.
    pub(super) fn tag_of(&self, master: usize, spread: usize) -> Option<u16> {
        let tags = self.tags.get(master)?;
        (!tags.is_empty()).then(|| tags[spread % tags.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values from the cluster specification, and of redis-server.
    #[test]
    fn hash_slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(hash_slot("foo"), 12182);
        assert_eq!(hash_slot("a{foo}b{bar}"), 12182);
        assert_eq!(
            hash_slot("foo{}{bar}"),
            usize::from(crc16(b"foo{}{bar}")) % HASH_SLOTS
        );
    }

    #[test]
    fn keys_are_on_the_master_of_their_tag() {
        let node = |port| Node {
            host: "h".to_owned(),
            port,
        };
        let ranges = [
            (0, 5460, node(1)),
            (5461, 10922, node(2)),
            (10923, 16382, node(3)),
        ];
        let map = Map::new(&ranges, Vec::new());
        assert_eq!((map.masters().count(), map.uncovered()), (3, 1));
        let keys = Keys::new("pre:fix", 9);
        for (at, _) in map.masters() {
            for spread in 0..5000 {
                let tag = map.tag_of(at, spread).expect("each master has tags");
                assert_eq!(map.master_of(tag), Some(at));
                let key = keys.copy(tag, spread as u64);
                assert_eq!(map.node_of_key(&key), map.node_of(tag), "{key}");
            }
        }
        assert_eq!(keys.copy(0xabc, 255), "pre:fix:{abc}:0000000000000009:ff");
    }
}
