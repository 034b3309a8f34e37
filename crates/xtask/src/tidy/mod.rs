//! The rules of the tree, as functions that return what breaks them. The tables are in `tables.rs`.

mod crates;
mod functions;
mod homes;
mod kinds;
mod modules;
mod tables;
mod text;
mod tree;
mod walks;

use tree::Tree;
pub(crate) use tree::root;

/// A rule: its name, and what breaks it (one line each).
type Check = (&'static str, fn(&Tree) -> Vec<String>);

const CHECKS: [Check; 19] = [
    ("crates use only what is below them", crates::arrows),
    ("crates form no circle", crates::circles),
    (
        "files and folders of a crate form no circle",
        modules::circles,
    ),
    (
        "nothing in the manager uses what is above it",
        modules::upward,
    ),
    ("the manager's order names what is there", modules::missing),
    ("unsafe is in its homes only", homes::of_unsafe),
    ("deciding crates are pure", homes::pure),
    ("the manager does not print", homes::printing),
    (
        "manager, replay and storms alone drive reclaim, by one machine",
        homes::reclaim,
    ),
    ("only tiers know the kinds of tiers", kinds::named),
    (
        "functions are short, and the list of long ones is true",
        functions::long,
    ),
    ("a policy is a few methods", functions::wide_traits),
    ("files say their job first", text::heads),
    ("files are short", text::file_lengths),
    (
        "comments are at most 100 columns wide, other lines 120",
        text::comments,
    ),
    ("text is at most 120 columns wide", text::markdown),
    (
        "texts do without phrases that are read twice",
        text::phrases,
    ),
    (
        "doc comments name their thing first, and the list of others is true",
        text::pronouns,
    ),
    ("the walks name what is there", walks::missing),
];

/// Runs every check. Errors: everything found, by rule.
pub(crate) fn run() -> Result<String, String> {
    let tree = Tree::read();
    let broken: Vec<String> = CHECKS
        .iter()
        .filter_map(|(name, check)| {
            let found = check(&tree);
            (!found.is_empty()).then(|| format!("{name}: broken\n  {}", found.join("\n  ")))
        })
        .collect();
    if broken.is_empty() {
        Ok(format!(
            "tidy: {} files, {} rules hold\n",
            tree.sources.len(),
            CHECKS.len()
        ))
    } else {
        Err(broken.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(checks: &[&str]) {
        let tree = Tree::read();
        for (name, check) in CHECKS.iter().filter(|(name, _)| checks.contains(name)) {
            let found = check(&tree);
            assert!(found.is_empty(), "{name}: broken\n{}", found.join("\n"));
        }
    }

    #[test]
    fn every_rule_holds() {
        hold(&CHECKS.map(|(name, _)| name));
    }

    #[test]
    fn the_tree_is_seen() {
        let tree = Tree::read();
        assert!(tree.sources.len() > 200, "{} files", tree.sources.len());
        assert!(tree.texts.len() > 10, "{} texts", tree.texts.len());
        assert!(tree.manifests.len() >= 14, "{}", tree.manifests.len());
    }
}
