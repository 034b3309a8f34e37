//! Which crate may use which: checks `tables::ARROWS` against the manifests.

use std::collections::BTreeMap;

use super::tables::{ARROWS, TEST_ARROWS};
use super::tree::Tree;

/// Dependencies of the workspace that no row of the table allows.
pub(super) fn arrows(tree: &Tree) -> Vec<String> {
    tree.manifests
        .iter()
        .flat_map(|(name, manifest)| wrong_arrows(name, manifest))
        .collect()
}

/// Rows of the table that name a crate listed at or after them.
pub(super) fn circles(_: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    for (position, (name, allowed)) in ARROWS.iter().enumerate() {
        for target in *allowed {
            let level = ARROWS.iter().position(|(known, _)| known == target);
            if level.is_none_or(|level| level >= position) {
                wrong.push(format!(
                    "{name} -> {target}: ARROWS lists a crate after all it uses"
                ));
            }
        }
    }
    wrong
}

/// The workspace crates a manifest names, by section.
fn dependencies(manifest: &str) -> BTreeMap<String, Vec<String>> {
    let mut sections: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut section = String::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_matches(['[', ']']).to_owned();
            continue;
        }
        let key = line.split(['.', '=', ' ']).next().unwrap_or_default();
        if let Some(name) = key
            .strip_prefix("undercroft-")
            .filter(|_| section.ends_with("dependencies"))
        {
            sections
                .entry(section.clone())
                .or_default()
                .push(name.to_owned());
        }
    }
    sections
}

/// Errors of a crate's manifest by the arrows; empty if there are none.
fn wrong_arrows(name: &str, manifest: &str) -> Vec<String> {
    let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
        return vec![format!(
            "crate `{name}` has no line in ARROWS: give it a level"
        )];
    };
    let mut wrong = Vec::new();
    for (section, used) in dependencies(manifest) {
        for target in used {
            let for_tests = section == "dev-dependencies" && TEST_ARROWS.contains(&target.as_str());
            if !allowed.contains(&target.as_str()) && !for_tests {
                wrong.push(format!(
                    "{name} -> {target} ({section}) points up or sideways"
                ));
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_that_points_up_is_found() {
        let up = "[dependencies]\nundercroft-base.workspace = true\n\
                  undercroft-tier = { workspace = true }\n";
        assert_eq!(wrong_arrows("engine", up).len(), 1);
        let fakes = "[dev-dependencies]\nundercroft-model.workspace = true\n";
        assert!(wrong_arrows("engine", fakes).is_empty());
        assert_eq!(wrong_arrows("engine", &fakes.replace("dev-", "")).len(), 1);
        assert_eq!(wrong_arrows("newcomer", "").len(), 1);
    }
}
