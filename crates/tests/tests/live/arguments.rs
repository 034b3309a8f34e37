//! The program's arguments: as many as the kernel allows, and no other process shows them for
//! longer than the program does.

use rustix::process::Signal;
use undercroft_tests::{Job, MIB, Running, beside_others, build, processes, turn};

/// Some 1.6 MiB with the pointers to them; the kernel allows 2 MiB. And one of 128 KiB, the longest
/// that it allows, each byte of which needs two in JSON.
#[test]
fn arguments_reach_the_program_up_to_what_the_kernel_allows() {
    let _turn = beside_others();
    let many: Vec<String> = (0..110_000).map(|number: u32| number.to_string()).collect();
    let quotes = "\"".repeat(131_000);
    let count = Job::new("sh").args(["-c", "echo $# ${#1}", "sh"]);
    for (job, said) in [
        (count.clone().args(&many), "110000 1\n"),
        (count.clone().arg(&quotes), "1 131000\n"),
        (count.args(["", "a\nb", "\x1b[31m"]), "3 0\n"),
    ] {
        for job in [job.clone(), job.limit(64 * MIB)] {
            // Its line would be 1 MiB of a failed test's message.
            let outcome = job.run();
            assert_eq!(outcome.text(), said, "{}", outcome.errors);
        }
    }
}

/// The command lines of all processes whose `/proc/PID/FILE` holds `text`.
fn holders(file: &str, text: &str) -> Vec<String> {
    let holds = |pid: i32| {
        let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        bytes
            .windows(text.len())
            .any(|part| part == text.as_bytes())
    };
    let all = processes().into_iter().filter(|process| holds(process.pid));
    all.map(|process| format!("{} {}", process.pid, process.command))
        .collect()
}

fn is_ready(run: &Running) -> Option<()> {
    let said = std::fs::read_to_string(run.scratch().join("output")).unwrap_or_default();
    said.contains("ready").then_some(())
}

#[test]
fn what_a_program_wipes_from_its_arguments_is_nowhere() {
    turn!(beside_others, "a plain run has no other process");
    let secret = format!("secret-{:x}-of-a-test", std::process::id());
    let job = Job::new(build("wipes")).arg(&secret).limit(64 * MIB);
    let mut run = job.start();
    run.until("wiped arguments", 60, is_ready);
    // Each process puts its title in place once it has started.
    run.until("titles", 60, |run| {
        let tree = run.tree();
        let has = |title: &&str| {
            let named = |pid: i32| format!("undercroft: {title} of {pid}");
            let is = |command: &str| tree.iter().any(|it| named(it.pid) == command);
            tree.iter().any(|it| is(&it.command))
        };
        let titled = ["keeper", "manager", "holder"].iter().all(has);
        (titled && holders("cmdline", &secret).is_empty()).then_some(())
    });
    let found = [holders("cmdline", &secret), holders("environ", &secret)].concat();
    assert!(found.is_empty(), "{found:#?}");
    // Over its own socket, which is of this user alone, it may be told.
    let status = run.status().expect("a status");
    assert_eq!(status["command"][1], secret.as_str(), "{status}");
    assert_eq!(status["arguments"], 1, "{status}");
    run.signal(Signal::TERM);
    run.wait();
}

#[test]
fn a_command_of_odd_characters_is_one_line_of_the_status() {
    turn!(beside_others, "a plain run has no status");
    let long = "y".repeat(5000);
    let odd = Job::new(build("wipes")).args(["a b\n", "\x1b[31m", "", &long]);
    let mut run = odd.limit(64 * MIB).start();
    run.until("its program", 60, is_ready);
    let pid = run.pid().to_string();
    let text = Job::new(undercroft_tests::undercroft()).args(["status", &pid]);
    let text = text.run().expect(0).text();
    let line = text.lines().next().unwrap_or_default();
    assert!(
        line.contains(r"/wipes $'a b\n' $'\x1b[31m' '' yyy"),
        "{line}"
    );
    assert!(line.ends_with("y...") && line.len() < 4200, "{line}");
    assert!(!text.contains('\x1b'), "{text}");
    run.signal(Signal::TERM);
    run.wait();
}
