//! Which file of a crate names which: no circles, and no arrow in the manager points up.
//!
//! A module and its folder are one thing here: `a.rs` may use `a/b.rs`, and the reverse. Between
//! files and folders that lie beside each other, arrows form no circle. Unit tests do not count. An
//! item that a crate's root re-exports counts as used where it is defined.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::tables::MANAGER_ORDER;
use super::tree::{Tree, crate_of};

/// A module, as its path below the crate's root.
type Path = Vec<String>;

/// Arrows between neighbours: (the folder of both, user, used) -> the first place.
type Arrows = BTreeMap<(Path, String, String), String>;

/// Circles between neighbours, with a place for each of their arrows.
pub(super) fn circles(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    for name in tree.manifests.keys() {
        let arrows = arrows_of(tree, name);
        for (folder, members) in circles_of(&arrows) {
            let inside = |from: &String, to: &String| {
                members.contains(from.as_str()) && members.contains(to.as_str())
            };
            let places: Vec<String> = arrows
                .iter()
                .filter(|((at, from, to), _)| *at == folder && inside(from, to))
                .map(|((_, from, to), place)| format!("{from} -> {to} ({place})"))
                .collect();
            let members: Vec<&str> = members.iter().copied().collect();
            wrong.push(format!(
                "{name}/{}: {}\n    {}",
                folder.join("/"),
                members.join(" "),
                places.join("\n    ")
            ));
        }
    }
    wrong
}

/// Arrows of the manager that run against `MANAGER_ORDER`.
pub(super) fn upward(tree: &Tree) -> Vec<String> {
    let mut wrong = Vec::new();
    for ((folder, from, to), place) in arrows_of(tree, "manager") {
        let folder = folder.join("/");
        let order = MANAGER_ORDER.iter().find(|(name, _)| *name == folder);
        let level = |name: &str| order?.1.iter().position(|known| *known == name);
        match (level(&from), level(&to)) {
            (Some(user), Some(used)) if used < user => {}
            (Some(_), Some(_)) => {
                wrong.push(format!("{folder}: {from} -> {to} points up: {place}"));
            }
            _ => wrong.push(format!(
                "{from} or {to} of {folder:?} has no place in MANAGER_ORDER"
            )),
        }
    }
    wrong
}

/// Names in `MANAGER_ORDER` that no file or folder has.
pub(super) fn missing(tree: &Tree) -> Vec<String> {
    let known: BTreeSet<Path> = (tree.sources.iter())
        .filter(|(path, _)| crate_of(path) == "manager")
        .filter_map(|(path, _)| module_of(path))
        .collect();
    let mut wrong = Vec::new();
    for (folder, names) in MANAGER_ORDER {
        for name in *names {
            let parts = folder.split('/').filter(|part| !part.is_empty());
            let module: Path = parts.chain([*name]).map(str::to_owned).collect();
            if !known.contains(&module) {
                wrong.push(format!(
                    "MANAGER_ORDER names {module:?}, which is no module"
                ));
            }
        }
    }
    wrong
}

/// The arrows between neighbours in one crate.
fn arrows_of(tree: &Tree, name: &str) -> Arrows {
    let mut files: BTreeMap<Path, Names> = BTreeMap::new();
    let mut places: BTreeMap<Path, &str> = BTreeMap::new();
    for (path, text) in &tree.sources {
        let Some(module) = module_of(path).filter(|_| crate_of(path) == name) else {
            continue;
        };
        let Ok(file) = syn::parse_file(text) else {
            continue; // the compiler reports it better
        };
        let mut names = Names {
            module: module.clone(),
            ..Names::default()
        };
        names.visit_file(&file);
        places.insert(module.clone(), path);
        files.insert(module, names);
    }
    let tests: BTreeSet<Path> = files.values().flat_map(|n| n.tests.clone()).collect();
    files.retain(|module, _| !tests.contains(module));
    let mut arrows = Arrows::new();
    for (module, names) in &files {
        for (at, path) in &names.used {
            let Some(target) = resolve(&files, at, path, 8) else {
                continue;
            };
            let common = module.iter().zip(&target).take_while(|(a, b)| a == b);
            let common = common.count();
            if common == module.len() || common == target.len() {
                continue; // a module and what is in its folder
            }
            let key = (
                module[..common].to_vec(),
                module[common].clone(),
                target[common].clone(),
            );
            let place = || format!("{} names {}", places[module], path.join("::"));
            arrows.entry(key).or_insert_with(place);
        }
    }
    arrows
}

/// The module that a file is; none for a program beside the library, and for files outside `src`.
fn module_of(path: &str) -> Option<Path> {
    let inner = path.split_once("/src/")?.1.strip_suffix(".rs")?;
    let mut parts: Path = inner.split('/').map(str::to_owned).collect();
    if parts[0] == "bin" {
        return None;
    }
    if parts.last()? == "mod" || inner == "lib" || inner == "main" {
        parts.pop();
    }
    Some(parts)
}

/// The module that defines what `path` names, seen from the module `at`; none if it is not of this
/// crate.
fn resolve(files: &BTreeMap<Path, Names>, at: &Path, path: &[String], depth: u32) -> Option<Path> {
    let mut here = at.clone();
    let mut rest = path;
    match path.first()?.as_str() {
        "crate" => {
            here.clear();
            rest = &rest[1..];
        }
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                here.pop();
                rest = &rest[1..];
            }
        }
        first => {
            here.push(first.to_owned());
            files.get(&here)?;
            rest = &rest[1..];
        }
    }
    while let Some(part) = rest.first() {
        here.push(part.clone());
        if !files.contains_key(&here) {
            here.pop();
            let exported = files.get(&here).and_then(|names| names.exports.get(part));
            if let Some(exported) = exported.filter(|_| depth > 0) {
                return resolve(files, &here, exported, depth - 1).or(Some(here));
            }
            break;
        }
        rest = &rest[1..];
    }
    while !files.contains_key(&here) {
        here.pop()?; // a module inside its file
    }
    Some(here)
}

/// The names that one file uses.
#[derive(Default)]
struct Names {
    module: Path,
    /// (the module in which it is named, the path)
    used: Vec<(Path, Path)>,
    /// Names that `pub use` re-exports from this module.
    exports: BTreeMap<String, Path>,
    /// Modules that are for tests only.
    tests: Vec<Path>,
}

impl Names {
    fn uses(&mut self, tree: &syn::UseTree, prefix: &mut Path, exported: bool) {
        let end = |names: &mut Self, prefix: &Path, last: String, name: String| {
            let mut path = prefix.clone();
            if last != "self" || path.is_empty() {
                path.push(last);
            }
            if exported {
                names.exports.insert(name, path.clone());
            }
            names.used.push((names.module.clone(), path));
        };
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.uses(&path.tree, prefix, exported);
                prefix.pop();
            }
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                end(self, prefix, name.clone(), name);
            }
            syn::UseTree::Rename(name) => {
                end(
                    self,
                    prefix,
                    name.ident.to_string(),
                    name.rename.to_string(),
                );
            }
            syn::UseTree::Glob(_) => self.used.push((self.module.clone(), prefix.clone())),
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.uses(tree, prefix, exported);
                }
            }
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.module.push(item.ident.to_string());
        if for_tests(&item.attrs) {
            self.tests.push(self.module.clone());
        } else {
            visit::visit_item_mod(self, item);
        }
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !for_tests(&item.attrs) {
            let exported = !matches!(item.vis, syn::Visibility::Inherited);
            self.uses(&item.tree, &mut Vec::new(), exported);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !for_tests(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !for_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            let parts = path.segments.iter().map(|part| part.ident.to_string());
            self.used.push((self.module.clone(), parts.collect()));
        }
        visit::visit_path(self, path);
    }
}

fn for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) => {
            list.path.is_ident("cfg") && list.tokens.to_string().trim() == "test"
        }
        _ => false,
    })
}

/// Sets of neighbours that all reach each other, with their folder.
fn circles_of(arrows: &Arrows) -> Vec<(Path, BTreeSet<&str>)> {
    let mut reach: BTreeMap<(&Path, &str), BTreeSet<&str>> = BTreeMap::new();
    for (folder, from, to) in arrows.keys() {
        reach.entry((folder, from)).or_default().insert(to);
    }
    loop {
        let mut grew = false;
        for key in reach.keys().copied().collect::<Vec<_>>() {
            let next: Vec<&str> = reach[&key]
                .iter()
                .filter_map(|to| reach.get(&(key.0, *to)))
                .flatten()
                .copied()
                .collect();
            let known = reach.entry(key).or_default();
            for to in next {
                grew |= known.insert(to);
            }
        }
        if !grew {
            break;
        }
    }
    let mut found = BTreeSet::new();
    for ((folder, from), reached) in &reach {
        if reached.contains(from) {
            let back = |to: &&&str| {
                reach
                    .get(&(*folder, **to))
                    .is_some_and(|r| r.contains(from))
            };
            let members: BTreeSet<&str> = reached.iter().filter(back).copied().collect();
            found.insert(((*folder).clone(), members));
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree_of(files: &[(&str, &str)]) -> Tree {
        let file = |(path, text): &(&str, &str)| {
            (format!("crates/manager/src/{path}"), (*text).to_owned())
        };
        Tree {
            sources: files.iter().map(file).collect(),
            texts: BTreeMap::new(),
            manifests: [("manager".to_owned(), String::new())].into(),
        }
    }

    /// Arrows between the neighbours at the root, as `a>b`.
    fn arrows(files: &[(&str, &str)]) -> String {
        let tree = tree_of(files);
        let arrows = arrows_of(&tree, "manager");
        let shown = arrows.keys().map(|(_, from, to)| format!("{from}>{to}"));
        shown.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn arrows_are_seen_in_imports_paths_and_re_exports_and_not_in_tests() {
        let import = [("a.rs", "use crate::b::{C, d as e};"), ("b.rs", "")];
        assert_eq!(arrows(&import), "a>b");
        let path = [("a.rs", "fn f() -> super::b::T { g() }"), ("b.rs", "")];
        assert_eq!(arrows(&path), "a>b");
        let root = ("lib.rs", "pub use b::T;");
        assert_eq!(
            arrows(&[root, ("a.rs", "use crate::T;"), ("b.rs", "")]),
            "a>b"
        );
        let test = [
            ("a.rs", "#[cfg(test)] mod t { use crate::b; }"),
            ("b.rs", ""),
        ];
        assert_eq!(arrows(&test), "");
        let below = [("a.rs", "mod c; use c::T;"), ("a/c.rs", "use super::U;")];
        assert_eq!(arrows(&below), "");
        let inline = [("a.rs", "mod i { use super::super::b::T; }"), ("b.rs", "")];
        assert_eq!(arrows(&inline), "a>b");
    }

    #[test]
    fn a_circle_of_three_is_found_and_a_line_is_not() {
        let line = [
            ("a.rs", "use crate::b::T;"),
            ("b.rs", "use crate::c::T;"),
            ("c.rs", ""),
        ];
        let found = |files: &[(&str, &str)]| {
            let arrows = arrows_of(&tree_of(files), "manager");
            circles_of(&arrows)
                .iter()
                .map(|(_, members)| members.len())
                .collect::<Vec<_>>()
        };
        assert!(found(&line).is_empty());
        assert_eq!(
            found(&[line[0], line[1], ("c/x.rs", "use crate::a::T;"), line[2]]),
            [3]
        );
    }

    #[test]
    fn an_arrow_against_the_order_is_found() {
        for (folder, order) in MANAGER_ORDER.iter().filter(|(_, order)| order.len() > 1) {
            let [low, high] = [order[0], order[order.len() - 1]];
            let below = format!("{folder}/{low}.rs");
            let above = format!("{folder}/{high}.rs");
            let [below, above] = [&below, &above].map(|path| path.trim_start_matches('/'));
            let uses = |name: &str| format!("use super::{name}::T;");
            let found = |files: &[(&str, &str)]| {
                let found = upward(&tree_of(files));
                found
                    .iter()
                    .filter(|line| line.contains("points up"))
                    .count()
            };
            assert_eq!(found(&[(below, &uses(high)), (above, "")]), 1);
            assert_eq!(found(&[(above, &uses(low)), (below, "")]), 0);
        }
    }
}
