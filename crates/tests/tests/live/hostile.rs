//! Clients that do not keep to the protocol, and programs that give up rights. The client gets
//! nothing from the manager, other processes notice nothing, and no process keeps rights that the
//! program gave up.
//!
//! `UNDERCROFT_TEST_FORGED`: random handshakes, default 10,000. `UNDERCROFT_TEST_OUTLIVES`: clients
//! that are killed, default 4. These tests need root, because they run programs of several users.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use undercroft_tests::{
    Job, MIB, Turn, beside_others, build, find, plain_only, say, setting, skip, turn,
};

/// Peers that forge handshakes at once: fewer than one user may have open at the manager.
const PEERS: u64 = 40;

/// The turn of test `name`. `None` unless root runs this with Undercroft and setpriv; then prints
/// that it is skipped.
fn turn() -> Option<Turn> {
    let turn = beside_others();
    let why = match () {
        () if plain_only() => "a plain run has no manager to attack",
        () if !rustix::process::getuid().is_root() => "only root runs programs of several users",
        () if find("setpriv").is_none() => "there is no setpriv",
        () => return Some(turn),
    };
    skip(why);
    None
}

/// A hostile client of another user beside a program that verifies its memory, under one manager.
/// Returns the status of both.
fn beside_a_verified_client(attack: &str, rounds: u64) -> undercroft_tests::Outcome {
    let hostile = build("hostile").display().to_string();
    let honest = build("rights").display().to_string();
    // The hostile client has no shim. Its environment has the socket, like that of any process of
    // the program.
    let script = format!(
        "chmod 755 {hostile}; {honest} none {rounds} & honest=$!
         LD_PRELOAD= setpriv --reuid 65534 --regid 65534 --clear-groups {hostile} {attack}; attack=$?
         wait $honest || exit 20
         exit $attack"
    );
    Job::new("sh")
        .args(["-c", &script])
        .limit(48 * MIB)
        .timeout(200)
        .run()
}

#[test]
fn forged_handshakes_change_nothing_for_a_verified_client() {
    let name = "forged_handshakes_change_nothing_for_a_verified_client";
    let Some(_turn) = turn() else { return };
    let count = setting("UNDERCROFT_TEST_FORGED", 10_000);
    let seed = setting("UNDERCROFT_TEST_FORGED_SEED", 1);
    let begin = Instant::now();
    let outcome = beside_a_verified_client(&format!("forge {count} {seed} {PEERS}"), 4);
    say(&format!(
        "{name}: {count} of seed {seed} in {:.1?}",
        begin.elapsed()
    ));
    outcome.expect(0).expect_swapping(2000.0);
}

#[test]
fn floods_and_silent_peers_hold_nobody_up() {
    let name = "floods_and_silent_peers_hold_nobody_up";
    let Some(_turn) = turn() else { return };
    for attack in ["silent 300", "flood 2000"] {
        let outcome = beside_a_verified_client(attack, 3);
        say(&format!("{name}: {attack}: {:.1?}", outcome.wall));
        outcome.expect(0).expect_swapping(2000.0);
    }
}

#[test]
fn a_command_page_keeps_its_size() {
    if let Some(_turn) = turn() {
        beside_a_verified_client("shrink", 1).expect(0);
    }
}

/// A stranger that connects from outside the run is not answered, and the run goes on unharmed.
#[test]
fn strangers_get_nothing() {
    let name = "strangers_get_nothing";
    let Some(_turn) = turn() else { return };
    let hostile = build("hostile");
    let run = Job::new(build("rights"))
        .args(["none", "6"])
        .limit(48 * MIB)
        .start();
    std::thread::sleep(Duration::from_millis(500));
    let environment = run.tree().iter().find_map(|process| {
        let text = std::fs::read(format!("/proc/{}/environ", process.pid)).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let found = text
            .split('\0')
            .find(|word| word.starts_with("UNDERCROFT_SOCKET="))?;
        found.split_once('=').map(|(_, path)| path.to_owned())
    });
    let socket = environment.expect("a process of the run has the socket's path");
    let attack = |user: &str, words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", user, "--regid", user, "--clear-groups"]);
        command.arg(&hostile).args(words);
        command
            .env("UNDERCROFT_SOCKET", &socket)
            .output()
            .expect("setpriv runs")
    };
    for user in ["0", "65534"] {
        let shrink = attack(user, &["shrink"]);
        assert_eq!(
            shrink.status.code(),
            Some(3),
            "no command page for user {user}"
        );
        let flood = attack(user, &["flood", "500"]);
        say(&format!(
            "{name}: user {user} connected {} times in half a second",
            String::from_utf8_lossy(&flood.stdout).trim()
        ));
    }
    let outcome = run.wait().expect(0).expect_swapping(2000.0);
    assert!(
        !outcome.errors.contains("could not be managed"),
        "{outcome}"
    );
}

/// A process of another user that is not part of the run, with a secret at a known address.
struct Victim(Child, u32);

impl Victim {
    fn start(byte: u8) -> Victim {
        let mut child = Command::new(build("hostile"))
            .args(["secret", &byte.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the victim starts");
        let mut line = String::new();
        let output = child.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let pid = line.trim().parse().expect("a process id");
        Victim(child, pid)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        if let Some(mut input) = self.0.stdin.take() {
            let _ = input.flush();
        }
        let _ = self.0.wait();
    }
}

#[test]
fn a_client_cannot_have_another_process_read_for_it() {
    let name = "a_client_cannot_have_another_process_read_for_it";
    let Some(_turn) = turn() else { return };
    let victim = Victim::start(0x5e);
    for how in ["first", "later"] {
        let attack = format!("peek {} 0x5e {how}", victim.1);
        let outcome = beside_a_verified_client(&attack, 3);
        assert_ne!(outcome.code(), Some(9), "the secret was had: {outcome}");
        say(&format!("{name}: {how}: status {:?}", outcome.code()));
        // The hostile client may be ended for what it does. The other must not notice.
        assert_ne!(
            outcome.code(),
            Some(20),
            "the verified client failed: {outcome}"
        );
        assert_ne!(
            outcome.code(),
            Some(125),
            "the whole run was ended: {outcome}"
        );
    }
}

/// A client holds a command and is killed, and a process that shares its memory lives on. The
/// manager then asks whether that memory is gone. The question once put the bytes of the page that
/// was evicted last, another process's, into it.
#[test]
fn a_client_that_outlives_its_agent_gets_no_bytes_of_another() {
    let name = "a_client_that_outlives_its_agent_gets_no_bytes_of_another";
    let Some(_turn) = turn() else { return };
    let rounds = setting("UNDERCROFT_TEST_OUTLIVES", 4);
    let begin = Instant::now();
    let outcome = beside_a_verified_client(&format!("outlive {rounds}"), 4);
    say(&format!("{name}: {rounds} in {:.1?}", begin.elapsed()));
    outcome.expect(0).expect_swapping(2000.0);
}

#[test]
fn no_thread_keeps_rights_that_the_program_gave_up() {
    if let Some(_turn) = turn() {
        let job = Job::new(build("rights")).args(["drop", "2"]);
        let outcome = job.limit(48 * MIB).run().expect(0).expect_swapping(2000.0);
        if !plain_only() {
            assert_eq!(outcome.text(), "agents 1\n");
        }
    }
}

/// By the kernel's word: the manager is filtered and gains no rights, the program is as it was.
#[test]
fn the_manager_gives_up_rights_and_the_program_keeps_its_own() {
    turn!(beside_others, "a plain run has no manager");
    // The program's parent is the keeper. Its children are the manager, the program, and agents.
    let script = "for child in $(cat /proc/$PPID/task/*/children); do
                    case $(cat /proc/$child/comm 2>/dev/null) in uc-agent|'') continue; esac
                    echo of $(tr '\\0' ' ' < /proc/$child/cmdline | head -c 22)
                    grep -E '^(NoNewPrivs|Seccomp):' /proc/$child/status
                  done";
    let text = Job::new("sh")
        .args(["-c", script])
        .limit(48 * MIB)
        .run()
        .expect(0)
        .text();
    let own = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = |name: &str| -> String {
        let found = own.lines().find(|line| line.starts_with(name));
        found.expect("the kernel says it").replace('\t', " ")
    };
    let of = |who: &str| -> Vec<String> {
        let mut lines = text.lines().skip_while(|line| *line != format!("of {who}"));
        lines
            .by_ref()
            .skip(1)
            .take(2)
            .map(|line| line.replace('\t', " "))
            .collect()
    };
    let manager = of("undercroft: manager of");
    assert_eq!(manager, ["NoNewPrivs: 1", "Seccomp: 2"], "{text}");
    assert_eq!(
        of("sh -c for child in $(c"),
        [line("NoNewPrivs:"), line("Seccomp:")],
        "{text}"
    );
}

#[test]
fn a_filter_that_kills_kills_nobody_who_does_not_call() {
    let _turn = beside_others();
    let limited = |how| Job::new(build("rights")).args([how, "2"]).limit(48 * MIB);
    limited("filter").run().expect(0).expect_swapping(2000.0);
    // On all threads, and the agent is none of them.
    limited("tsync").run().expect(0).expect_swapping(2000.0);
}

/// The agents of processes that have ended become children of process 1 of their namespace.
#[test]
fn dead_agents_do_not_fill_a_pid_namespace() {
    let Some(_turn) = turn() else { return };
    if find("unshare").is_none() || find("python3").is_none() {
        return skip("there is no unshare or no python3");
    }
    let script = "import os, subprocess\n\
                  for n in range(80): subprocess.run(['true'], check=True)\n\
                  subprocess.run(['sleep', '1'], check=True)\n\
                  stats = [open(f'/proc/{p}/stat').read() for p in os.listdir('/proc') if p.isdigit()]\n\
                  dead = [s for s in stats if '(uc-agent) Z' in s]\nprint(len(dead), os.getpid())";
    let unshare = ["--pid", "--fork", "--mount-proc", "python3", "-c", script];
    let outcome = Job::new("unshare").args(unshare).limit(48 * MIB).run();
    let outcome = outcome.expect(0);
    let found: [f64; 2] = outcome.numbers();
    assert_eq!(found[1], 1.0, "{outcome}");
    // One may be on its way when the others are counted.
    assert!((32.0..=34.0).contains(&found[0]), "{outcome}");
    assert!(outcome.errors.contains("does not wait"), "{outcome}");
}

#[test]
fn processes_in_other_pid_namespaces_are_managed() {
    let Some(_turn) = turn() else { return };
    if find("unshare").is_none() {
        return skip("there is no unshare");
    }
    let rights = build("rights").display().to_string();
    let script = format!("unshare --pid --fork --mount-proc {rights} none 2");
    let outcome = Job::new("sh").args(["-c", &script]).limit(48 * MIB).run();
    let outcome = outcome.expect(0).expect_swapping(2000.0);
    assert_eq!(outcome.errors, "", "{outcome}");
    // The parent is managed when it forks into the namespace.
    let script = "import os, ctypes, sys\nb = bytearray(os.urandom(80 << 20)); s = hash(bytes(b))\n\
                  assert ctypes.CDLL(None).unshare(0x20000000) == 0\nchild = os.fork()\n\
                  if child == 0:\n    os._exit(0 if hash(bytes(b)) == s else 3)\n\
                  sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    if find("python3").is_some() {
        Job::new("python3")
            .args(["-c", script])
            .limit(48 * MIB)
            .run()
            .expect(0)
            .expect_swapping(2000.0);
    }
}
