//! Compiles the client's shim (`no_std`, a shared object) with the same compiler, so that the binary can embed it.

use std::path::PathBuf;
use std::process::Command;

fn main() {
    let source = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"))
        .join("../client/src");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", source.display());
    let rustc = std::env::var_os("RUSTC").expect("cargo sets it");
    let status = Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "cdylib",
            "--crate-name",
            "undercroft_shim",
        ])
        .args([
            "-C",
            "panic=abort",
            "-C",
            "opt-level=s",
            "-C",
            "strip=symbols",
        ])
        .args([
            "-C",
            "link-arg=-nostartfiles",
            "-C",
            "link-arg=-nostdlib",
            "-C",
            "link-arg=-Wl,-z,now",
        ])
        .args(["-D", "warnings"])
        .arg("-o")
        .arg(out.join("libundercroft_shim.so"))
        .arg(source.join("shim.rs"))
        .status()
        .expect("rustc runs");
    assert!(status.success(), "the shim does not compile");
}
