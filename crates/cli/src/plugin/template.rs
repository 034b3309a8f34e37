//! `undercroft policy new`: a policy to begin with.

use std::fs;
use std::io;
use std::path::Path;

use undercroft_terminal::{Failure, line, status};

const FILES: [(&str, &str); 3] = [
    ("policy.c", include_str!("../../../../policies/behind.c")),
    (
        "undercroft_policy.h",
        include_str!("../../../../policies/undercroft_policy.h"),
    ),
    ("Makefile", include_str!("../../../../policies/Makefile")),
];

/// Writes the files into a new or empty directory. Errors: it has files, or cannot be written.
pub(crate) fn write(dir: &Path) -> Result<u8, Failure> {
    let written = fs::create_dir_all(dir).and_then(|()| {
        if fs::read_dir(dir)?.next().is_some() {
            return Err(io::Error::other("it is not empty"));
        }
        (FILES.iter()).try_for_each(|(name, text)| fs::write(dir.join(name), text))
    });
    written.map_err(|error| {
        Failure::new(
            status::USAGE,
            format!("cannot begin a policy in {}", dir.display()),
            error.to_string(),
            "name a directory that is empty or not there, and that can be written",
        )
    })?;
    let dir = dir.display();
    let text = format!(
        "{dir}/policy.c is a policy that works. Change it, then:\n  \
         make -C {dir} && undercroft policy check {dir}/policy.wasm\n  \
         undercroft run -m 64M --policy {dir}/policy.wasm -- PROGRAM"
    );
    line(&text)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_shows_the_policy_and_names_every_function() {
        let guide = include_str!("../../../../docs/guide/policies.md");
        let shown = |text: &str| guide.contains(text.trim());
        let [(_, policy), (_, header), (_, makefile)] = FILES;
        assert!(
            shown(policy),
            "docs/guide/policies.md shows another policy.c"
        );
        let build = makefile.lines().find(|line| line.starts_with("CFLAGS"));
        assert!(build.is_some_and(|line| line.contains("--target=wasm32")));
        let functions = header.lines().filter_map(|line| {
            let (_, name) = line
                .split_once("UC_IMPORT(")
                .or(line.split_once("UC_EXPORT("))?;
            name.split_once(')').map(|(name, _)| name)
        });
        for name in functions.filter(|name| *name != "name") {
            assert!(
                shown(&format!("`{name}(")),
                "the guide does not name {name}"
            );
        }
    }

    #[test]
    fn a_new_policy_goes_only_where_nothing_is() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let dir = folder.path().join("mine");
        assert_eq!(write(&dir).expect("an empty folder"), 0);
        for (name, text) in FILES {
            let written = fs::read_to_string(dir.join(name)).expect("a file of the template");
            assert_eq!(written, text);
        }
        let refused = write(&dir).expect_err("it is there");
        assert!(refused.why.contains("not empty"), "{refused}");
    }
}
