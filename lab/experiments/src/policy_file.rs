//! The policy files of `policies`, built when an experiment needs one.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

macro_rules! policies {
    ($($name:literal),+ $(,)?) => {
        [$((
            concat!($name, ".c"),
            include_str!(concat!("../../../policies/", $name, ".c")),
        )),+]
    };
}

const POLICIES: [(&str, &str); 9] = policies![
    "clock",
    "clock_w",
    "dt_reclaimer",
    "linear_pf",
    "locality",
    "sys_agg",
    "sys_r",
    "temperature",
    "wsr",
];

/// Files that build them.
const TOOLS: [(&str, &str); 2] = [
    ("Makefile", include_str!("../../../policies/Makefile")),
    (
        "undercroft_policy.h",
        include_str!("../../../policies/undercroft_policy.h"),
    ),
];

/// Why none can be built here.
pub(crate) fn lacks() -> Option<String> {
    let is_there = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
    let there = ["make", "clang", "wasm-ld"].into_iter().all(is_there);
    (!there).then(|| "make, clang or wasm-ld is missing: they make the policy".to_owned())
}

/// Builds a policy with other first values of its parameters into a folder of its own in `folder`,
/// and returns the file.
///
/// * `values`: macros of the policy, and their values.
pub(crate) fn build(folder: &Path, name: &str, values: &[(&str, u32)]) -> anyhow::Result<PathBuf> {
    if let Some(why) = lacks() {
        bail!("{why}");
    }
    let defines: Vec<_> = (values.iter().map(|(of, value)| format!("-D{of}={value}"))).collect();
    let folder = folder.join([&[name.to_owned()], &defines[..]].concat().concat());
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    for (file, text) in POLICIES.iter().chain(&TOOLS) {
        std::fs::write(folder.join(file), text).with_context(|| format!("write {file}"))?;
    }
    let file = format!("{name}.wasm");
    let make = Command::new("make")
        .arg("-C")
        .args([&folder, Path::new(&file)])
        .arg(format!("DEFINE={}", defines.join(" ")))
        .output()
        .context("start make")?;
    if !make.status.success() {
        let why = String::from_utf8_lossy(&make.stderr).into_owned();
        bail!("{file} cannot be built: {why}");
    }
    Ok(folder.join(file))
}

/// Whether a test can have one. If not, that is said.
#[cfg(test)]
pub(crate) fn can_test() -> bool {
    let lacks = lacks();
    if let Some(why) = &lacks {
        println!("SKIPPED: {why}");
    }
    lacks.is_none()
}

/// Builds one for a test, and returns its path, if that is possible.
#[cfg(test)]
pub(crate) fn of_test(folder: &Path, name: &str, values: &[(&str, u32)]) -> Option<String> {
    can_test().then(|| {
        let file = build(folder, name, values).expect("a policy file");
        file.to_str().expect("a plain path").to_owned()
    })
}
