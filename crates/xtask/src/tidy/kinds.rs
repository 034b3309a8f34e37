//! Kinds of tiers are known in their crates only: other code asks their facts (`TierFacts`).

use std::collections::BTreeSet;

use super::tables::{KIND_HOMES, KIND_NAMES};
use super::tree::{Tree, crate_of};

/// Marks of a line that decides by a name. What stands behind an arrow is only a result.
const DECIDES: [&str; 3] = ["==", "!=", "matches!"];
const ARROW: &str = "=>";

/// Places outside the tiers' crates that decide by the name of a kind, and exceptions that are not
/// needed.
pub(super) fn named(tree: &Tree) -> Vec<String> {
    let kinds = kinds(tree);
    if kinds.len() < 4 {
        return vec![format!("only these kinds were found: {kinds:?}")];
    }
    let (mut wrong, mut needed) = (Vec::new(), BTreeSet::new());
    for (path, text) in &tree.sources {
        let tests = path.contains("/tests") || path.ends_with("tests.rs");
        if KIND_HOMES.contains(&crate_of(path)) || path.starts_with("fuzz/") || tests {
            continue;
        }
        let found = decisions(&kinds, path, text);
        if KIND_NAMES.iter().any(|(known, _)| known == path) {
            needed.extend((!found.is_empty()).then_some(path.as_str()));
        } else {
            wrong.extend(found);
        }
    }
    let idle = KIND_NAMES.iter().filter(|(path, _)| !needed.contains(path));
    wrong.extend(idle.map(|(path, _)| format!("KIND_NAMES: {path} needs no exception")));
    wrong
}

/// The names in the tiers' facts, in quotes.
fn kinds(tree: &Tree) -> BTreeSet<String> {
    let homes = (tree.sources.iter()).filter(|(path, _)| KIND_HOMES.contains(&crate_of(path)));
    let facts = homes.filter_map(|(_, text)| text.split_once("TierFacts::of("));
    let names = facts.filter_map(|(_, of)| Some(of.split_once(',')?.0.to_owned()));
    names.collect()
}

fn decisions(kinds: &BTreeSet<String>, path: &str, text: &str) -> Vec<String> {
    // Unit tests may name kinds. They stand at the end of a file.
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let mut wrong = Vec::new();
    for (at, line) in code.lines().enumerate() {
        if line.trim_start().starts_with("//") {
            continue;
        }
        let compares = DECIDES.iter().any(|mark| line.contains(mark));
        let pattern = line.split_once(ARROW).map_or("", |(pattern, _)| pattern);
        let decides = if compares { line } else { pattern };
        if let Some(kind) = kinds.iter().find(|kind| decides.contains(kind.as_str())) {
            wrong.push(format!("{path}:{} decides by {kind}", at + 1));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_by_name_is_found_and_a_description_is_not() {
        let kinds = BTreeSet::from(["\"ram\"".to_owned()]);
        for (line, count) in [
            ("if tier.kind == \"ram\" {", 1),
            ("    \"ram\" => true,", 1),
            ("    Choice::Pool => \"ram\",", 0),
            ("let tiers = [\"ram\", \"file:/a\"];", 0),
            ("// not == \"ram\"", 0),
            ("#[cfg(test)]\nmod tests {\n x == \"ram\"", 0),
        ] {
            assert_eq!(decisions(&kinds, "a.rs", line).len(), count, "{line}");
        }
    }
}
