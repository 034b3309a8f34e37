//! `--version` names the commit that the binary was built from.

use std::process::Command;

#[test]
fn version_names_the_commit_that_is_checked_out() {
    let told = |program: &str, word: &str| {
        let output = Command::new(program).args(word.split(' ')).output();
        let output = output.ok().filter(|output| output.status.success());
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let shown = told(env!("CARGO_BIN_EXE_undercroft"), "--version").expect("it has a version");
    let plain = concat!("undercroft ", env!("CARGO_PKG_VERSION"));
    match told("git", "rev-parse --short=12 HEAD") {
        Some(commit) => assert_eq!(shown, format!("{plain} ({commit})")),
        None => assert_eq!(shown, plain),
    }
}
