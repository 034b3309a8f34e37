//! Packages and images, and what others wrote to check files such as those in `packaging`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;

use undercroft_tests::{
    Job, MIB, beside_others, build, find, skip, target_folder, turn, undercroft,
};

fn root() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().expect("the source tree")
}

/// Runs a program in the source tree; `None` if it is not installed, which is said.
fn checker(program: &str, words: &[&str], input: &str) -> Option<Output> {
    let Some(path) = find(program) else {
        skip(&format!("{program} is not installed"));
        return None;
    };
    let outcome = Job::new(path)
        .args(words)
        .folder(root())
        .input(input)
        .timeout(600)
        .run();
    Some(Output {
        status: outcome.status.expect("it ends"),
        stdout: outcome.output,
        stderr: outcome.errors.into_bytes(),
    })
}

/// A checker that ends with 0 and has nothing to say.
#[track_caller]
fn clean(told: &Output) {
    let text = String::from_utf8_lossy(&told.stdout) + String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success() && text.trim().is_empty(), "{text}");
}

/// A checker in Python, of the virtual environment that `.ci/run` makes. `None` if it is not there.
fn python_checker(name: &str) -> Option<String> {
    let path = target_folder().join("checkers/bin").join(name);
    if path.is_file() {
        return Some(path.display().to_string());
    }
    skip(&format!(
        "{} is not there: `.ci/run` installs it",
        path.display()
    ));
    None
}

#[test]
fn scripts_are_clean_for_shellcheck() {
    let _turn = beside_others();
    let Some(list) = checker("git", &["ls-files"], "") else {
        return;
    };
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let is_script = |name: &&str| {
        let text = fs::read(root().join(name)).unwrap_or_default();
        let first =
            String::from_utf8_lossy(text.split(|byte| *byte == b'\n').next().unwrap_or(&[]));
        first.starts_with("#!") && first.trim_end().ends_with("sh")
    };
    let scripts: Vec<&str> = list.lines().filter(is_script).collect();
    if scripts.is_empty() {
        return skip("no checkout of git");
    }
    assert!(scripts.contains(&"packaging/build") && scripts.contains(&".ci/run"));
    let run = |words: &[&str]| checker("shellcheck", words, "");
    let Some(told) = run(&[&["--"], &scripts[..]].concat()) else {
        return;
    };
    clean(&told);
    clean(&run(&["--shell", "sh", "packaging/installed.sh"]).expect("it is there"));
}

#[test]
fn units_are_clean_for_systemd() {
    let _turn = beside_others();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let mut words = vec!["verify".to_owned(), "--man=no".to_owned()];
    let ours = undercroft().display().to_string();
    for unit in ["undercroft.service", "undercroft.socket"] {
        // systemd looks whether the program is there.
        let text = fs::read_to_string(root().join("packaging").join(unit)).expect("a unit");
        let path = scratch.path().join(unit);
        fs::write(&path, text.replace("/usr/bin/undercroft", &ours)).expect("a copy");
        words.push(path.display().to_string());
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let Some(told) = checker("systemd-analyze", &words, "") {
        clean(&told);
    }
}

#[test]
fn kubernetes_files_fit_the_schema() {
    let _turn = beside_others();
    let Some(program) = python_checker("kubernetes-validate") else {
        return;
    };
    let mut files: Vec<String> = fs::read_dir(root().join("packaging/kubernetes"))
        .expect("a folder")
        .map(|file| file.expect("a file").path().display().to_string())
        .collect();
    files.sort();
    let mut words = vec![program.as_str(), "--strict"];
    words.extend(files.iter().map(String::as_str));
    let told = checker("env", &words, "").expect("env is everywhere");
    let text = String::from_utf8_lossy(&told.stdout) + String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success(), "{text}");
    assert!(text.matches(" passed ").count() >= 3, "{text}");
}

/// Answer of `serve` at a path, without its head.
fn answer(socket: &Path, path: &str) -> Option<String> {
    let mut stream = UnixStream::connect(socket).ok()?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    assert!(head.starts_with("HTTP/1.1 200"), "{text}");
    Some(body.to_owned())
}

#[test]
fn metrics_and_openapi_document_are_clean_for_their_checkers() {
    turn!(beside_others, "a plain run serves nothing");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let mut run = Job::new(build("touch"))
        .args(["64", "--rounds", "100000"])
        .limit(32 * MIB)
        .env("UNDERCROFT_DIR", scratch.path())
        .start();
    let socket = scratch.path().join("serve.sock");
    let mut server = Job::new(undercroft())
        .args(["serve", "--listen"])
        .arg(format!("unix:{}", socket.display()))
        .env("UNDERCROFT_DIR", scratch.path())
        .start();
    let metrics = server.until("metrics of a run", 30, |_| {
        let metrics = answer(&socket, "/metrics")?;
        metrics
            .contains("undercroft_fault_latency_seconds_bucket")
            .then_some(metrics)
    });
    let document = answer(&socket, "/v1/openapi.json").expect("it answers");
    assert!(run.is_alive());
    drop((run, server));
    if let Some(told) = checker("promtool", &["check", "metrics"], &metrics) {
        clean(&told);
    }
    let Some(program) = python_checker("openapi-spec-validator") else {
        return;
    };
    let told = checker("env", &[&program, "-"], &document).expect("env is everywhere");
    let text = String::from_utf8_lossy(&told.stdout) + String::from_utf8_lossy(&told.stderr);
    assert!(
        told.status.success() && text.trim().ends_with("OK"),
        "{text}"
    );
}

/// Files that `packaging/build` makes of a binary.
fn made(binary: &Path, what: &[&str]) -> Vec<PathBuf> {
    let script = root().join("packaging/build").display().to_string();
    let binary = binary.display().to_string();
    let words = [&["--binary", &binary], what].concat();
    let told = checker(&script, &words, "").expect("it is in the source tree");
    let errors = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success(), "{errors}");
    let names = String::from_utf8_lossy(&told.stdout).into_owned();
    names.lines().map(|name| root().join(name)).collect()
}

/// The files of a package, as a command lists those of FILE.
fn listed(command: &str, file: &Path) -> Vec<String> {
    let text = command.replace("FILE", &file.display().to_string());
    let told = checker("bash", &["-c", &text], "").expect("a shell");
    let mut names: Vec<String> = String::from_utf8_lossy(&told.stdout)
        .lines()
        .filter(|name| !name.ends_with('/'))
        .map(|name| {
            name.trim_start_matches('.')
                .replace("vendor-completions/_", "site-functions/_")
        })
        .collect();
    names.sort();
    names
}

#[test]
fn packages_of_both_kinds_have_what_a_machine_needs() {
    turn!(beside_others, "it makes packages of the binary under test");
    let programs = ["dpkg-deb", "rpmbuild", "clang", "wasm-ld"];
    if programs.iter().any(|program| find(program).is_none()) {
        return skip(
            "it wants dpkg-deb, rpmbuild, clang and wasm-ld (Debian: dpkg, rpm, clang, lld)",
        );
    }
    let files = made(undercroft(), &["deb", "rpm"]);
    let deb = listed("dpkg-deb --fsys-tarfile FILE | tar -t", &files[0]);
    let rpm = "rpm -qplv FILE | sed -n 's|^-[^/]*/|/|p'";
    assert_eq!(deb, listed(rpm, &files[1]));
    for path in [
        "/etc/undercroft.toml",
        "/usr/bin/undercroft",
        "/usr/include/uc_page_lock.h",
        "/usr/lib/systemd/system/undercroft.service",
        "/usr/lib/systemd/system/undercroft.socket",
        "/usr/lib/sysusers.d/undercroft.conf",
        "/usr/lib/udev/rules.d/60-userfaultfd.rules",
        "/usr/lib/undercroft/core-handler",
        "/usr/share/bash-completion/completions/undercroft",
        "/usr/share/doc/undercroft/docs/guide/README.md",
        "/usr/share/man/man1/undercroft.1.gz",
        "/usr/share/man/man1/undercroft-run.1.gz",
        "/usr/share/undercroft/policies/clock.wasm",
        "/usr/share/undercroft/policies/undercroft_policy.h",
        "/usr/share/zsh/site-functions/_undercroft",
    ] {
        assert!(deb.iter().any(|name| name == path), "no {path}: {deb:?}");
    }
}

/// Runs a script of `packaging` to its end.
fn tried(script: &str, file: &Path) {
    let script = root().join("packaging").join(script).display().to_string();
    let file = file.display().to_string();
    let told = checker(&script, &[&file], "").expect("it is in the source tree");
    let text = String::from_utf8_lossy(&told.stdout) + String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success(), "{text}");
}

/// Whether this user may make containers and has the programs for it; says so otherwise.
fn may_try(programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| find(program).is_none());
    match missing {
        Some(program) => skip(&format!("{program} is not installed")),
        None if !rustix::process::geteuid().is_root() => skip("it wants root"),
        None => return true,
    }
    false
}

#[test]
fn package_in_a_clean_debian_works_and_leaves_nothing() {
    turn!(beside_others, "it installs the binary under test");
    if !may_try(&["debootstrap", "dpkg-deb", "clang", "wasm-ld"]) {
        return;
    }
    tried("try-deb", &made(undercroft(), &["deb"])[0]);
}

#[test]
fn package_of_fedora_works_and_leaves_nothing() {
    turn!(beside_others, "it installs the binary under test");
    if !may_try(&["rpm", "rpmbuild", "perl", "clang", "wasm-ld"]) {
        return;
    }
    tried("try-rpm", &made(undercroft(), &["rpm"])[0]);
}

/// A static binary of a release build, which is quicker than what `packaging/build image` makes.
fn static_binary(target: &str) -> PathBuf {
    let words = "build --release --locked -p undercroft-cli --features redis,wasm --target";
    let folder = target_folder();
    let built = Job::new(env!("CARGO"))
        .args(words.split(' '))
        .args([target, "--target-dir"])
        .arg(&folder)
        .env(
            "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS",
            "-C target-feature=+crt-static",
        )
        .folder(root())
        .timeout(1800)
        .run();
    built.expect(0);
    folder.join(target).join("release/undercroft")
}

#[test]
fn image_of_the_static_binary_runs_programs_in_a_container() {
    turn!(beside_others, "it runs the binary under test");
    if !may_try(&["umoci", "runc", "python3"]) {
        return;
    }
    let binary = static_binary("x86_64-unknown-linux-gnu");
    tried("try-image", &made(&binary, &["image"])[0]);
}

/// Its programs are of glibc all the same.
#[test]
fn image_of_the_binary_of_musl_runs_programs_in_a_container() {
    turn!(beside_others, "it runs the binary under test");
    if !may_try(&["umoci", "runc", "python3", "musl-gcc"]) {
        return;
    }
    let target = "x86_64-unknown-linux-musl";
    let words = ["--print", "target-libdir", "--target", target];
    let folder = checker("rustc", &words, "").map(|told| told.stdout);
    let folder = String::from_utf8(folder.unwrap_or_default()).unwrap_or_default();
    if !Path::new(folder.trim()).is_dir() {
        return skip(&format!(
            "Rust's library for {target} is not installed: `rustup target add {target}`"
        ));
    }
    tried("try-image", &made(&static_binary(target), &["image"])[0]);
}
