//! `undercroft top` on a real terminal, and without one.

use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_undercroft");

/// Whether there is `script`, which makes terminals. Without it the test is skipped, loudly.
fn has_script(test: &str) -> bool {
    let found = Command::new("script").arg("--version").output().is_ok();
    if !found {
        // Past the harness's capture.
        let line = format!("SKIPPED: {test}: no `script` (bsdutils)\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    found
}

/// `script`, which runs a command of the shell on a terminal.
fn on_a_terminal(command: &str) -> Child {
    Command::new("script")
        .args(["-qec", command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a terminal")
}

/// The key that leaves is typed before the first picture.
#[test]
fn top_draws_on_a_terminal_and_leaves_with_q() {
    if !has_script("top_draws_on_a_terminal_and_leaves_with_q") {
        return;
    }
    let command = format!("stty rows 24 cols 120; {BINARY} top --interval 100ms");
    let mut child = on_a_terminal(&command);
    let mut typed = child.stdin.take().expect("a pipe");
    typed.write_all(b"fsmp hxq").expect("keys");
    let outcome = child.wait_with_output().expect("it ends");
    drop(typed);
    let screen = String::from_utf8_lossy(&outcome.stdout);
    assert!(outcome.status.success(), "{}: {screen}", outcome.status);
    assert!(screen.contains("DRAM"), "{screen}");
    assert!(
        screen.contains("\u{1b}[?1049h") && screen.contains("\u{1b}[?1049l"),
        "the screen before is put back: {screen:?}"
    );
}

#[test]
fn top_ends_when_its_terminal_is_gone() {
    if !has_script("top_ends_when_its_terminal_is_gone") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let sign = folder.path().join("pid");
    let command = format!("echo $$ >{}; exec {BINARY} top", sign.display());
    let mut script = on_a_terminal(&command);
    let screen = script.stdout.as_mut().expect("a pipe");
    // It draws, so it has taken over the terminal.
    screen.read_exact(&mut [0; 64]).expect("a picture");
    let pid = fs::read_to_string(&sign).expect("its process id");
    script.kill().expect("our child");
    script.wait().expect("our child");
    let begun = Instant::now();
    let name = format!("/proc/{}/comm", pid.trim());
    while fs::read_to_string(&name).is_ok_and(|name| name.trim() == "undercroft") {
        assert!(begun.elapsed() < Duration::from_secs(20), "it goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn top_without_a_terminal_names_what_to_use() {
    let outcome = Command::new(BINARY)
        .arg("top")
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&outcome.stderr);
    assert_eq!(outcome.status.code(), Some(1), "{errors}");
    assert!(errors.contains("status --json"), "{errors}");
    let outcome = Command::new(BINARY)
        .args(["top", "--interval", "1us"])
        .output()
        .expect("it runs");
    let errors = String::from_utf8_lossy(&outcome.stderr);
    assert!(errors.contains("100ms"), "{errors}");
}
