//! Names the commit in `undercroft --version`. A source tree without git has the version alone.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = std::env::var("CARGO_PKG_VERSION").expect("cargo sets it");
    let commit = commit();
    let named = commit.map_or(version.clone(), |commit| format!("{version} ({commit})"));
    println!("cargo::rustc-env=UNDERCROFT_VERSION={named}");
}

/// The commit that is checked out; `None` where git does not tell, or tells of a repository that
/// merely surrounds this tree.
fn commit() -> Option<String> {
    let top = git(&["rev-parse", "--show-toplevel"])?;
    let tree = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR")?).join("../..");
    if Path::new(&top).canonicalize().ok()? != tree.canonicalize().ok()? {
        return None;
    }
    // HEAD names another branch, or the log has another commit.
    for changed in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--path-format=absolute", "--git-path", changed])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(words: &[&str]) -> Option<String> {
    let told = Command::new("git").args(words).output().ok()?;
    let text = String::from_utf8(told.stdout).ok()?;
    told.status.success().then(|| text.trim().to_owned())
}
