//! How long functions are, from `fn` to the closing brace, comments and all; and how many methods
//! the traits of policies have.

use syn::visit::{self, Visit};

use super::tables::{FUNCTION_LINES_MAX, LONG_FUNCTIONS, LONGEST_LINES_MAX, TRAIT_METHODS_MAX};
use super::tree::{Tree, crate_of};

/// A function over the bound.
struct Long {
    place: String,
    name: String,
    lines: usize,
}

/// Functions over the bound that no table lists, those over the longest bound, and rows of the
/// table that are no longer needed.
pub(super) fn long(tree: &Tree) -> Vec<String> {
    let found = too_long(tree);
    let mut wrong = Vec::new();
    for Long { place, name, lines } in &found {
        if *lines > LONGEST_LINES_MAX {
            wrong.push(format!(
                "{place}: {lines} lines; {LONGEST_LINES_MAX} is the most"
            ));
        } else if !LONG_FUNCTIONS.iter().any(|(known, _)| known == name) {
            wrong.push(format!(
                "{place}: {lines} lines; split it, or list `{name}` with a reason"
            ));
        }
    }
    let unneeded = |name: &&str| !found.iter().any(|long| long.name == *name);
    let names = LONG_FUNCTIONS.iter().map(|(name, _)| *name);
    let rows = names.filter(unneeded);
    wrong.extend(rows.map(|name| format!("{name} is short: take it out of LONG_FUNCTIONS")));
    wrong
}

fn too_long(tree: &Tree) -> Vec<Long> {
    let mut found = Vec::new();
    for (path, text) in &tree.sources {
        let Ok(file) = syn::parse_file(text) else {
            continue; // the compiler reports it better
        };
        let mut seen = Functions::default();
        seen.visit_file(&file);
        for (name, line, lines) in seen.found {
            if lines > FUNCTION_LINES_MAX {
                let name = format!("{}::{}::{name}", crate_of(path), file_of(path));
                let place = format!("{path}:{line}: {name}");
                found.push(Long { place, name, lines });
            }
        }
    }
    found
}

/// Traits of policies that ask more of who writes one than [`TRAIT_METHODS_MAX`] methods.
pub(super) fn wide_traits(tree: &Tree) -> Vec<String> {
    let of_policies = |(path, _): &(&String, &String)| path.starts_with("crates/policy");
    let mut wrong = Vec::new();
    for (path, text) in tree.sources.iter().filter(of_policies) {
        let items = syn::parse_file(text).map_or(Vec::new(), |file| file.items);
        for item in items {
            let syn::Item::Trait(it) = item else { continue };
            let is_method = |item: &&syn::TraitItem| matches!(item, syn::TraitItem::Fn(_));
            let methods = it.items.iter().filter(is_method).count();
            if methods > TRAIT_METHODS_MAX {
                let name = it.ident;
                wrong.push(format!(
                    "{path}: trait {name} has {methods} methods; {TRAIT_METHODS_MAX} is the most"
                ));
            }
        }
    }
    wrong
}

/// The name of a file without its ending; of a `mod.rs`, its folder's.
fn file_of(path: &str) -> &str {
    let mut parts = path.trim_end_matches(".rs").rsplit('/');
    let last = parts.next().unwrap_or_default();
    if last == "mod" {
        parts.next().unwrap_or_default()
    } else {
        last
    }
}

/// Name, first line and number of lines of every function.
#[derive(Default)]
struct Functions {
    found: Vec<(String, usize, usize)>,
}

impl Functions {
    fn note(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let first = signature.fn_token.span.start().line;
        let last = body.brace_token.span.close().end().line;
        let name = signature.ident.to_string();
        self.found.push((name, first, last + 1 - first));
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.note(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.note(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.note(&item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree_of(path: &str, text: String) -> Tree {
        Tree {
            sources: [(path.to_owned(), text)].into(),
            texts: Default::default(),
            manifests: Default::default(),
        }
    }

    #[test]
    fn a_trait_of_policies_with_too_many_methods_is_found() {
        let found = |methods: usize| {
            let methods: String = (0..methods).map(|at| format!("fn f{at}();")).collect();
            let text = format!("trait Place {{ {methods} }}");
            wide_traits(&tree_of("crates/policy/src/a.rs", text)).len()
        };
        assert_eq!(found(TRAIT_METHODS_MAX), 0);
        assert_eq!(found(TRAIT_METHODS_MAX + 1), 1);
    }

    #[test]
    fn a_long_function_is_found_wherever_it_is() {
        let body = "    a();\n".repeat(FUNCTION_LINES_MAX);
        let long_one = format!("fn long() {{\n{body}}}\n");
        let text = format!("{long_one}impl A {{\n{long_one}fn short() {{}}\n}}\n");
        let tree = tree_of("crates/base/src/a.rs", text);
        let found = too_long(&tree);
        let lines: Vec<usize> = found.iter().map(|long| long.lines).collect();
        assert_eq!(lines, [FUNCTION_LINES_MAX + 2; 2]);
        let rows = LONG_FUNCTIONS.len(); // none of them is in this tree
        assert_eq!(long(&tree).len(), 2 + rows);
    }
}
