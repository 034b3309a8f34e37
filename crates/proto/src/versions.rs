//! The versions of all that managers of one run share. A binary of other versions cannot take over,
//! and is refused before anything is touched.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use undercroft_tier::spec::KINDS;

/// Version of a binary, and the versions of state that it can continue. `undercroft versions`
/// prints it as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// Version of the program.
    pub undercroft: String,
    /// For each kind of shared state: the oldest and the newest version that it reads. It writes
    /// the newest.
    pub reads: BTreeMap<String, (u64, u64)>,
}

impl Versions {
    /// The versions of this binary.
    pub fn of_this() -> Versions {
        let only = [
            ("messages", crate::messages::VERSION),
            ("ledger", undercroft_engine::LEDGER_VERSION),
            ("legacy", crate::legacy::VERSION),
            ("shim", u64::from(undercroft_wire::protocol::MAGIC & 0xffff)),
        ];
        let tiers = KINDS
            .iter()
            .filter_map(|kind| Some((kind.facts.kind, kind.version?)));
        let tiers = tiers.map(|(kind, of)| (format!("{kind} tier"), of));
        let all = only
            .map(|(name, of)| (name.to_owned(), of))
            .into_iter()
            .chain(tiers);
        Versions {
            undercroft: env!("CARGO_PKG_VERSION").to_owned(),
            reads: all.map(|(name, of)| (name, (of, of))).collect(),
        }
    }

    /// Why `other` cannot continue what this binary has begun; names both versions.
    pub fn refusal_of(&self, other: &Versions) -> Option<String> {
        let mut begun = self.reads.iter();
        begun.find_map(|(name, (_, written))| match other.reads.get(name) {
            Some((oldest, newest)) if (oldest..=newest).contains(&written) => None,
            Some((oldest, newest)) if oldest == newest => Some(format!(
                "it reads version {newest} of the {name}, and the run has version {written}"
            )),
            Some((oldest, newest)) => Some(format!(
                "it reads versions {oldest} to {newest} of the {name}, and the run has version {written}"
            )),
            None => Some(format!(
                "it reads no version of the {name}, and the run has version {written}"
            )),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binary_that_reads_other_versions_is_refused_with_both() {
        let run = Versions::of_this();
        assert_eq!(run.refusal_of(&run), None);
        let with = |name: &str, range: Option<(u64, u64)>| {
            let mut other = run.clone();
            match range {
                Some(range) => other.reads.insert(name.to_owned(), range),
                None => other.reads.remove(name),
            };
            run.refusal_of(&other)
        };
        let (_, has) = run.reads["ledger"];
        assert_eq!(with("ledger", Some((1, has + 4))), None);
        assert_eq!(with("another", Some((1, 1))), None, "the run has none");
        for (range, part) in [
            (
                Some((has + 1, has + 1)),
                format!("reads version {} of", has + 1),
            ),
            (
                Some((has + 1, has + 2)),
                format!("versions {} to {} of", has + 1, has + 2),
            ),
            (Some((0, has - 1)), format!("the run has version {has}")),
            (None, "no version of the ledger".to_owned()),
        ] {
            let why = with("ledger", range).expect("refused");
            assert!(why.contains(&part), "{why}");
        }
    }
}
