//! Policy files of papers, for experiments that compare them with our rules. Tests only.

use std::path::Path;
use std::process::Command;

/// Builds a policy of `crates/tests/policies` into a folder, and returns its path. `None`: there is
/// no compiler, and that was said.
pub(crate) fn build(name: &str, folder: &Path) -> Option<String> {
    build_with(name, None, folder)
}

/// The same. * `constant`: `NAME=VALUE`, another value of one of its macros.
pub(crate) fn build_with(name: &str, constant: Option<&str>, folder: &Path) -> Option<String> {
    let there = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
    if !there("clang") || !there("wasm-ld") {
        println!("SKIPPED: no clang or no wasm-ld: no policy can be built from C");
        return None;
    }
    let crates = format!("{}/../../crates", env!("CARGO_MANIFEST_DIR"));
    let file = folder.join(format!("{name}.wasm"));
    let flags = "--target=wasm32 -O2 -mbulk-memory -nostdlib -Wl,--no-entry";
    let built = Command::new("clang")
        .args(flags.split_whitespace())
        .args(constant.map(|of| format!("-D{of}")))
        .args(["-I", &format!("{crates}/cli/src/plugin"), "-o"])
        .arg(&file)
        .arg(format!("{crates}/tests/policies/{name}.c"))
        .output()
        .expect("clang");
    assert!(built.status.success(), "{built:?}");
    Some(file.to_str().expect("a plain path").to_owned())
}
