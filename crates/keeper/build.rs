//! Makes the shim's shared object with the same compiler, so that the binary can embed it.
//!
//! The shim is a crate of the workspace, where it is checked and linted. A program wants it as a
//! small shared object without the standard library, which Cargo cannot make beside the rest.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let crates = PathBuf::from(manifest).join("..");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let wire = out.join("libundercroft_wire.rlib");
    compile(
        "rlib",
        "undercroft_wire",
        &crates.join("wire/src"),
        &wire,
        &[],
    );
    let mut found = std::ffi::OsString::from("undercroft_wire=");
    found.push(&wire);
    let arguments = [
        "--cfg".as_ref(),
        "shared_object".as_ref(),
        "-C".as_ref(),
        "link-arg=-nostartfiles".as_ref(),
        "-C".as_ref(),
        "link-arg=-nostdlib".as_ref(),
        "-C".as_ref(),
        "link-arg=-Wl,-z,now".as_ref(),
        "--extern".as_ref(),
        found.as_os_str(),
    ];
    let shim = out.join("libundercroft_shim.so");
    compile(
        "cdylib",
        "undercroft_shim",
        &crates.join("shim/src"),
        &shim,
        &arguments,
    );
}

/// Compiles `lib.rs` of `source` into `output`; `more`: further arguments.
fn compile(kind: &str, name: &str, source: &Path, output: &Path, more: &[&std::ffi::OsStr]) {
    println!("cargo::rerun-if-changed={}", source.display());
    let status = Command::new(std::env::var_os("RUSTC").expect("cargo sets it"))
        .args([
            "--edition",
            "2024",
            "--crate-type",
            kind,
            "--crate-name",
            name,
        ])
        .args([
            "-C",
            "panic=abort",
            "-C",
            "opt-level=s",
            // In another unit, a symbol is not weak.
            "-C",
            "codegen-units=1",
            "-C",
            "strip=symbols",
        ])
        .args(["-D", "warnings"])
        .args(more)
        .arg("-o")
        .arg(output)
        .arg(source.join("lib.rs"))
        .status()
        .expect("rustc runs");
    assert!(status.success(), "{name} does not compile");
}
