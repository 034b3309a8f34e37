//! Finds the binary under test and system programs, and compiles the C programs of `programs/`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

/// `target/`, found from the test executable (`target/PROFILE/deps/NAME`).
///
/// Panics: if the test does not run from a Cargo target folder.
pub fn target_folder() -> PathBuf {
    let me = std::env::current_exe().expect("the path of the test executable");
    me.ancestors()
        .nth(3)
        .expect("the test executable is in target/PROFILE/deps")
        .to_owned()
}

/// The folder of the test programs, and of large files of the tests: it is on a disk. It is there
/// after this.
pub fn programs_folder() -> PathBuf {
    let folder = target_folder().join("test-programs");
    std::fs::create_dir_all(&folder).expect("a folder for test programs");
    folder
}

/// The undercroft binary: `UNDERCROFT_BIN`, or this checkout's release build, which is made now
/// unless it is fresh.
///
/// It is a release build because a debug build is several times slower, and real time matters here.
/// Panics: if there is none and it cannot be built. A missing binary must not look like success.
pub fn undercroft() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| given_or_built("UNDERCROFT_BIN", "undercroft"))
}

/// The binary of the lab: `UNDERCROFT_LAB_BIN`, or this checkout's release build. As
/// [`undercroft`].
pub fn undercroft_lab() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| given_or_built("UNDERCROFT_LAB_BIN", "undercroft-lab"))
}

/// Both binaries are built by one command, the one of CI: another choice of packages has other
/// features, and would compile everything again. Tests of clusters need the feature `redis`, those
/// of policy files `wasm`.
fn given_or_built(variable: &str, name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "{variable}={} is no file", path.display());
        return path;
    }
    let target = target_folder();
    let mut cargo = Command::new(env!("CARGO"));
    // Build scripts that look at what cargo says of this test's package would run again, and all
    // that depends on them would be compiled again.
    let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "OUT_DIR"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if of_package.iter().any(|start| text.starts_with(start)) {
            cargo.env_remove(&name);
        }
    }
    let built = cargo
        .args(["build", "--quiet", "--release", "-p", "undercroft-cli"])
        .args([
            "-p",
            "undercroft-lab",
            "--features",
            "undercroft-cli/redis,undercroft-cli/wasm",
        ])
        .arg("--manifest-path")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        .output()
        .expect("cargo runs");
    assert!(
        built.status.success(),
        "the binary under test does not build; set {variable} to test another one:\n{}",
        String::from_utf8_lossy(&built.stderr)
    );
    target.join("release").join(name)
}

/// The full path of a program in `PATH`, `/usr/sbin` or `/sbin`; `None` if it is not installed.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

fn compile(compiler: &str, name: &str, flags: &[&str], output: &str) -> PathBuf {
    static DONE: Mutex<Option<HashMap<String, PathBuf>>> = Mutex::new(None);
    let mut done = DONE.lock().expect("no compilation has panicked");
    let done = done.get_or_insert_default();
    if let Some(path) = done.get(output) {
        return path.clone();
    }
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
    let folder = programs_folder();
    let path = folder.join(output);
    // Another test process may run the old file: write beside it, then rename.
    let fresh = folder.join(format!("{output}.{}", std::process::id()));
    let made = Command::new(compiler)
        .args(["-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .arg(sources.join(format!("{name}.c")))
        .arg("-o")
        .arg(&fresh)
        .output()
        .expect("a C compiler named `cc`; on Debian: apt-get install gcc libc6-dev");
    assert!(
        made.status.success(),
        "{name}.c does not compile:\n{}",
        String::from_utf8_lossy(&made.stderr)
    );
    std::fs::rename(&fresh, &path).expect("the program is put in place");
    done.insert(output.to_owned(), path.clone());
    path
}

/// Compiles `programs/NAME.c`, once a test process. Returns the path of the executable.
///
/// Panics: if it does not compile.
pub fn build(name: &str) -> PathBuf {
    compile("cc", name, &[], name)
}

/// As [`build`], with more flags. `kind` tells the result from others of the same program. `None`
/// if the compiler cannot do it here.
pub fn build_with(name: &str, kind: &str, compiler: &str, flags: &[&str]) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("programs/{name}.c"));
    let path = programs_folder().join(format!("{name}-{kind}"));
    let made = Command::new(compiler)
        .args(["-O1", "-g", "-pthread"])
        .args(flags)
        .arg(source)
        .arg("-o")
        .arg(&path)
        .output();
    made.is_ok_and(|made| made.status.success()).then_some(path)
}

/// As [`build`], linked statically.
pub fn build_static(name: &str) -> PathBuf {
    compile("cc", name, &["-static"], &format!("{name}-static"))
}

/// As [`build`], against musl instead of glibc; `None` if there is no `musl-gcc`.
pub fn build_musl(name: &str) -> Option<PathBuf> {
    find("musl-gcc").map(|_| compile("musl-gcc", name, &[], &format!("{name}-musl")))
}
