//! `undercroft top` on a real terminal, and without one.

use std::io::Write;
use std::process::{Command, Stdio};

const BINARY: &str = env!("CARGO_BIN_EXE_undercroft");

/// `script` makes the terminal. The key that leaves is typed before the first picture.
#[test]
fn top_draws_on_a_terminal_and_leaves_with_q() {
    let found = Command::new("script").arg("--version").output();
    if found.is_err() {
        // Past the harness's capture.
        let line = "SKIPPED: top_draws_on_a_terminal_and_leaves_with_q: no `script` (bsdutils)\n";
        let _ = std::io::stderr().write_all(line.as_bytes());
        return;
    }
    let command = format!("stty rows 24 cols 120; {BINARY} top --interval 100ms");
    let mut child = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a terminal");
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
