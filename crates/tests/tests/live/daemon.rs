//! The daemon: real programs share its memory, and every byte stays right while limits move and the
//! daemon dies.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Signal, getrlimit, setrlimit};
use undercroft_tests::{Job, MIB, Running, build, find, say, skip, turn, undercroft};

const MEMORY: u64 = 64 * MIB;

/// A daemon in a folder of its own, which is also its clients' directory.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Daemon {
        Daemon::start_by(&[])
    }

    /// * `before`: words before its command line.
    fn start_by(before: &[&str]) -> Daemon {
        Daemon::start_with(before, |folder| {
            format!(
                "memory = \"64M\"\n[[tier]]\nspec = \"ram\"\n[[tier]]\n\
                 spec = \"file:{folder},size=600M\"\ngrant = \"200M\"\n\
                 [class.web]\nweight = 3\nmemory_min = \"16M\"\n"
            )
        })
    }

    /// * `config`: its configuration, by its folder.
    pub(crate) fn start_with(before: &[&str], config: impl Fn(&str) -> String) -> Daemon {
        let folder = tempfile::tempdir().expect("a scratch folder");
        Daemon::start_in(folder, before, config)
    }

    fn start_in(
        folder: tempfile::TempDir,
        before: &[&str],
        config: impl Fn(&str) -> String,
    ) -> Daemon {
        let text = config(&folder.path().display().to_string());
        std::fs::write(folder.path().join("u.toml"), text).expect("a file");
        let child = Daemon::spawn(before, folder.path());
        let daemon = Daemon { child, folder };
        daemon.until_it_answers();
        daemon
    }

    fn spawn(before: &[&str], folder: &Path) -> Child {
        let binary = undercroft().display().to_string();
        let words: Vec<&str> = (before.iter().copied())
            .chain([binary.as_str(), "daemon"])
            .collect();
        Command::new(words[0])
            .args(&words[1..])
            .arg("--config")
            .arg(folder.join("u.toml"))
            .env("UNDERCROFT_DIR", folder)
            .env("XDG_STATE_HOME", folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a daemon")
    }

    /// Changes its configuration while it runs.
    pub(crate) fn reload(&self, old: &str, new: &str) {
        let file = self.folder.path().join("u.toml");
        let text = std::fs::read_to_string(&file).expect("the configuration");
        assert!(text.contains(old), "{text}");
        std::fs::write(&file, text.replace(old, new)).expect("a file");
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).expect("our child");
    }

    fn until_it_answers(&self) {
        let begun = Instant::now();
        while self.status().is_none() {
            assert!(begun.elapsed() < Duration::from_secs(20), "no daemon");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills it, and starts another one at once.
    pub(crate) fn die_and_come_back(&mut self) {
        self.die();
        self.come_back();
    }

    pub(crate) fn die(&mut self) {
        self.child.kill().expect("our child");
        self.child.wait().expect("our child");
    }

    pub(crate) fn come_back(&mut self) {
        self.child = Daemon::spawn(&[], self.folder.path());
        self.until_it_answers();
    }

    pub(crate) fn ask(&self, words: &[&str]) -> undercroft_tests::Outcome {
        let job = Job::new(undercroft()).args(words);
        job.env("UNDERCROFT_DIR", self.folder.path()).run()
    }

    pub(crate) fn status(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&self.ask(&["daemon", "status", "--json"]).text()).ok()
    }

    /// Checks that clients keep to or use, in all, never more than there is. A run may pass its
    /// limit by two percent for moments: it keeps to it, then.
    fn check(&self) -> serde_json::Value {
        let status = self.status().expect("a status");
        let clients = status["clients"].as_array().expect("clients");
        let number = |client: &serde_json::Value, name: &str| client[name].as_u64().unwrap_or(0);
        let used = |client| {
            let (limit, used) = (number(client, "limit_bytes"), number(client, "dram_bytes"));
            if used <= limit + limit / 50 {
                limit
            } else {
                used
            }
        };
        let sum: u64 = clients.iter().map(used).sum();
        assert!(sum <= MEMORY, "{sum} of {MEMORY}: {status:#}");
        status
    }

    fn limit_of(&self, run: &Running) -> Option<u64> {
        let status = self.check();
        let clients = status["clients"].as_array()?.clone();
        let mine = clients.into_iter().find(|it| it["pid"] == run.keeper())?;
        mine["limit_bytes"].as_u64()
    }

    /// Some, if many pages of the run have come back.
    fn swaps(&self, run: &Running) -> Option<u64> {
        let clients = self.status()?["clients"].take();
        let mut clients = clients.as_array()?.iter();
        let mine = clients.find(|it| it["pid"] == run.keeper())?;
        mine["swap_ins"].as_u64().filter(|it| *it > 1000)
    }

    fn program(&self, class: &str, seconds: u64) -> Running {
        let evidence = self.folder.path().join("evidence");
        Job::new(build("holdcheck"))
            .args(["48", &evidence.display().to_string(), &seconds.to_string()])
            .options([format!("--daemon={class}")])
            .env("UNDERCROFT_DIR", self.folder.path())
            .start()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two programs of 48 MiB in 64: the second has its share soon, the daemon dies twice, and what one
/// leaves goes to the other.
#[test]
fn programs_share_memory_and_outlive_the_daemon() {
    let name = "programs_share_memory_and_outlive_the_daemon";
    turn!(one_at_a_time, "a plain run has no daemon");
    let mut daemon = Daemon::start();
    // They end when they are told to, however long the daemon takes.
    let mut first = daemon.program("default", 100);
    first.until("first grant", 20, |run| {
        daemon.limit_of(run).filter(|it| *it == MEMORY)
    });
    let begun = Instant::now();
    let mut second = daemon.program("web", 100);
    let share = second.until("second grant", 20, |run| daemon.limit_of(run));
    let took = begun.elapsed();
    assert!(share >= 16 * MIB, "{share} is less than its protection");
    for _ in 0..2 {
        daemon.die_and_come_back();
        let both = |_: &Running| {
            let status = daemon.check();
            (status["clients"].as_array()?.len() == 2).then_some(())
        };
        first.until("claim of both", 20, both);
        assert!(second.is_alive(), "{}", second.errors());
    }
    daemon.reload("weight = 3", "weight = none");
    daemon.reload("weight = none", "weight = 5");
    let weighs_more = |_: &Running| {
        let status = daemon.check();
        let clients = status["clients"].as_array()?;
        let web = clients.iter().find(|it| it["class"] == "web")?;
        (clients.len() == 2 && web["weight"] == 5).then_some(())
    };
    second.until("other weight", 20, weighs_more);
    daemon.reload("weight = 5", "weight = none");
    first.until("pages that come back", 20, |run| daemon.swaps(run));
    second.signal(Signal::USR1);
    second.wait().expect(0);
    assert_eq!(daemon.check()["memory_bytes"], MEMORY);
    first.until("rest of the memory", 20, |run| {
        daemon.limit_of(run).filter(|it| *it == MEMORY)
    });
    first.signal(Signal::USR1);
    let outcome = first.wait().expect(0).expect_swapping(1000.0);
    assert!(
        !daemon.folder.path().join("evidence").exists(),
        "a wrong byte"
    );
    let begun = Instant::now();
    while daemon.check()["clients"]
        .as_array()
        .is_some_and(|all| !all.is_empty())
    {
        assert!(begun.elapsed() < Duration::from_secs(5), "a client is left");
        std::thread::sleep(Duration::from_millis(20));
    }
    say(&format!(
        "{name}: {} MiB granted {took:.0?} after the start; {:?} pages came back",
        share / MIB,
        outcome.number("pages.swapped_in"),
    ));
}

/// A run in namespaces of its own, as a container has them, reaches the daemon by its socket.
#[test]
fn a_program_in_a_container_is_a_client_like_others() {
    turn!(beside_others, "a plain run has no daemon");
    let own = [
        "--pid",
        "--mount",
        "--ipc",
        "--uts",
        "--net",
        "--fork",
        "--mount-proc",
    ];
    let possible = Command::new("unshare").args(own).arg("true").status();
    if !possible.is_ok_and(|status| status.success()) {
        return skip("no namespaces can be made here");
    }
    let daemon = Daemon::start();
    let evidence = daemon.folder.path().join("evidence").display().to_string();
    let mut run = Job::new(build("holdcheck"))
        .args(["96", &evidence, "2"])
        .before(["unshare"].into_iter().chain(own))
        .options(["--daemon=web"])
        .env("UNDERCROFT_DIR", daemon.folder.path())
        .start();
    let client = run.until("client", 20, |_| {
        let status = daemon.check();
        let clients = status["clients"].as_array()?.clone();
        clients.into_iter().next()
    });
    assert_eq!(client["class"], "web");
    assert_eq!(client["limit_bytes"], MEMORY);
    run.wait().expect(0).expect_swapping(1000.0);
    assert!(
        !daemon.folder.path().join("evidence").exists(),
        "a wrong byte"
    );
}

/// A daemon in a pid namespace of its own sees no process id of its clients, and serves them.
#[test]
fn a_daemon_in_a_container_serves_programs_outside() {
    turn!(beside_others, "a plain run has no daemon");
    let own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let possible = Command::new(own[0]).args(&own[1..]).arg("true").status();
    if !possible.is_ok_and(|status| status.success()) {
        return skip("no namespaces can be made here");
    }
    let daemon = Daemon::start_by(&own);
    let mut run = daemon.program("web", 1);
    let client = run.until("client", 20, |_| {
        let status = daemon.check();
        status["clients"].as_array()?.first().cloned()
    });
    assert_eq!(
        (&client["pid"], &client["class"]),
        (&0.into(), &"web".into())
    );
    run.wait().expect(0);
    assert!(
        !daemon.folder.path().join("evidence").exists(),
        "a wrong byte"
    );
}

/// CPUs and policies (`sched(7)`) of all threads of a process. A thread that ends meanwhile has
/// none.
fn threads(pid: i32) -> Option<Vec<(String, u32)>> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let stat = std::fs::read_to_string(task.path().join("stat")).ok()?;
        let mut lines = status.lines();
        let cpus = lines.find_map(|it| it.strip_prefix("Cpus_allowed_list:"));
        let policy = stat
            .rsplit(") ")
            .next()
            .and_then(|it| it.split(' ').nth(38));
        let policy = policy.and_then(|it| it.parse().ok());
        let cpus = cpus.expect("its CPUs").trim().to_owned();
        Some((cpus, policy.expect("its policy")))
    };
    Some(tasks.flatten().filter_map(of).collect())
}

/// A class has its managers on one CPU, without real-time priority, and moves little in the
/// background. The program itself may use all CPUs.
#[test]
fn a_class_limits_what_its_managers_use() {
    turn!(one_at_a_time, "a plain run has no daemon");
    let own = threads(std::process::id() as i32).expect("our threads");
    let cpus = own[0].0.clone();
    let Some((_, last)) = cpus.rsplit_once([',', '-']) else {
        return skip("there is one CPU");
    };
    const MOVES: u64 = 4 * MIB;
    let daemon = Daemon::start_with(&[], |folder| {
        format!(
            "memory = \"64M\"\n[[tier]]\nspec = \"file:{folder},size=24M\"\ngrant = \"12M\"\n\
             [[tier]]\nspec = \"file:{folder},size=400M\"\ngrant = \"200M\"\n\
             [class.web]\nmemory_max = \"16M\"\ncpus = \"{last}\"\nrealtime = false\n\
             moves = \"{}M\"\n",
            MOVES / MIB
        )
    });
    // Its holder looks the same, and has one thread.
    let managers = |run: &Running| {
        let all = run.tree().into_iter();
        let mut all = all.filter(|it| it.command.contains("undercroft: manager of"));
        all.find_map(|it| threads(it.pid).filter(|all| all.len() > 5))
    };
    let mut others = daemon.program("default", 1);
    // Each thread asks for its priority itself, once it runs.
    let is_root = rustix::process::geteuid().is_root();
    let has_begun = |all: &Vec<(String, u32)>| !is_root || all.iter().any(|it| it.1 == 1);
    let usual = others.until("manager, with real-time priority if we may", 20, |run| {
        managers(run).filter(has_begun)
    });
    assert!(usual.iter().any(|(cpus, _)| cpus != last), "{usual:?}");
    others.wait().expect(0);
    let program = Job::new("nproc").options(["--daemon=web"]);
    let program = program.env("UNDERCROFT_DIR", daemon.folder.path());
    let plain = Command::new("nproc").output().expect("nproc");
    assert_eq!(program.run().expect(0).output, plain.stdout);
    let begun = Instant::now();
    let mut run = daemon.program("web", 4);
    run.until("pages that come back", 20, |run| daemon.swaps(run));
    let granted = managers(&run).expect("its threads");
    let on_last = |of: &(String, u32)| *of == (last.to_owned(), 0);
    assert!(granted.iter().all(on_last), "{granted:?}");
    let outcome = run.wait().expect(0).expect_swapping(1000.0);
    let moved = outcome.number("counters.demoted").expect("a counter") * 4096.0;
    let most = MOVES as f64 * begun.elapsed().as_secs_f64() + MIB as f64;
    assert!(
        moved > 0.0 && moved <= most,
        "{moved} of {most} bytes moved"
    );
    assert!(
        !daemon.folder.path().join("evidence").exists(),
        "a wrong byte"
    );
}

/// A program that does as systemd with `packaging/undercroft.socket`: it listens, and starts the
/// daemon anew half a second after each end.
const LISTENS: &str = r#"
import ctypes, os, socket, subprocess, sys, time
at = socket.socket(socket.AF_UNIX); at.bind(sys.argv[1]); at.listen(64)
os.dup2(at.fileno(), 3)
def child():
    ctypes.CDLL(None).prctl(1, 9)  # it is killed in the moment when its parent ends
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
while True:
    subprocess.run(sys.argv[2:], pass_fds=[3], preexec_fn=child)
    time.sleep(0.5)
"#;

/// A run that asks for its share while there is no daemon waits for the next one, if the socket
/// outlives the daemon.
#[test]
fn a_run_waits_for_a_daemon_whose_socket_is_there() {
    turn!(beside_others, "a plain run has no daemon");
    let Some(python) = find("python3") else {
        return skip("no python3; on Debian: apt-get install python3");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let socket = folder.path().join("daemon.sock").display().to_string();
    let python = python.display().to_string();
    let daemon = Daemon::start_in(folder, &[&python, "-c", LISTENS, &socket], |_| {
        "memory = \"64M\"\n".to_owned()
    });
    let job = Job::new("true").options(["--daemon"]);
    let job = job.env("UNDERCROFT_DIR", daemon.folder.path());
    for _ in 0..3 {
        let status = daemon.status().expect("a status");
        let pid = status["pid"].as_i64().expect("its process id");
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("an id");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it lives");
        job.run().expect(0);
    }
    let path = daemon.folder.path().to_owned();
    let no_socket = "export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$@\" 3</dev/null";
    let refused = Job::new("sh")
        .args(["-c", no_socket, "sh"])
        .args([
            undercroft().as_os_str(),
            "daemon".as_ref(),
            "--config".as_ref(),
        ])
        .arg(daemon.folder.path().join("u.toml"))
        .env(
            "UNDERCROFT_DIR",
            tempfile::tempdir().expect("a folder").path(),
        )
        .run();
    assert_eq!(refused.code(), Some(1), "{refused}");
    assert!(
        refused.errors.contains("no socket that listens"),
        "{refused}"
    );
    assert!(refused.errors.contains("ListenStream="), "{refused}");
    let other = tempfile::tempdir().expect("a scratch folder");
    let _listens = UnixListener::bind(other.path().join("daemon.sock")).expect("a socket");
    // Nothing answers there: a run says that it waits, and ends when its user wants it.
    let mut waits = Job::new(undercroft())
        .args(["run", "--daemon", "--", "true"])
        .env("UNDERCROFT_DIR", other.path())
        .start();
    waits.until("what it waits for", 20, |run| {
        run.errors().contains("waiting for memory").then_some(())
    });
    waits.signal(rustix::process::Signal::TERM);
    assert_eq!(waits.wait().code(), Some(143), "it ends by the signal");
    let refused = Job::new(undercroft())
        .args(["daemon", "--config"])
        .arg(path.join("u.toml"))
        .env("UNDERCROFT_DIR", other.path())
        .run();
    assert_eq!(refused.code(), Some(1), "{refused}");
    assert!(
        refused.errors.contains("another process listens"),
        "{refused}"
    );
}

/// The log says who came, who was refused and why, which limits changed, and who left. It names no
/// argument of a program.
#[test]
fn the_log_says_who_comes_and_goes_and_has_which_limit() {
    turn!(beside_others, "a plain run has no daemon");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let log = folder.path().join("log");
    let script = format!("exec \"$0\" \"$@\" --log json 2>{}", log.display());
    let daemon = Daemon::start_by(&["sh", "-c", &script]);
    let mut first = daemon.program("default", 100);
    first.until("first grant", 20, |run| daemon.limit_of(run));
    let mut second = daemon.program("web", 100);
    second.until("second grant", 20, |run| daemon.limit_of(run));
    let refused = (Job::new("true").options(["--daemon=none"]))
        .env("UNDERCROFT_DIR", daemon.folder.path())
        .run();
    assert_eq!(refused.code(), Some(125), "{refused}");
    let (kept, web) = (first.keeper(), second.keeper());
    let lines = || -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(&log).expect("the log");
        let parse = |line| serde_json::from_str(line).expect("JSON");
        text.lines().map(parse).collect()
    };
    let of = |event: &str, pid: i32| {
        let mut all = lines().into_iter();
        all.find(|line| line["event"] == event && (pid == 0 || line["pid"] == pid))
    };
    // The second took memory of the first.
    first.until("changed limit", 60, |_| of("limit", kept));
    for run in [first, second] {
        run.signal(Signal::USR1);
        run.wait().expect(0);
    }
    let begun = Instant::now();
    while of("left", kept).is_none() || of("left", web).is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:#?}", lines());
        std::thread::sleep(Duration::from_millis(20));
    }
    let (admitted, limit) = (of("admitted", web), of("limit", kept));
    let refused = of("refused", 0).expect("a refusal");
    assert!(
        refused["why"]
            .as_str()
            .is_some_and(|why| why.contains("no class is named none"))
    );
    assert_eq!(admitted.expect("an admission")["class"], "web");
    let limit = limit.expect("a limit");
    assert!(
        limit["limit_bytes"].as_u64() < limit["from_bytes"].as_u64(),
        "{limit}"
    );
    let text = std::fs::read_to_string(&log).expect("the log");
    assert!(!text.contains("evidence"), "an argument: {text}");
    assert!(
        lines()
            .iter()
            .all(|line| line["time"].as_str().is_some_and(|at| at.ends_with('Z')))
    );
}

/// Whatever a peer sends, it is refused or ended, and the next one is served.
#[test]
fn hostile_peers_and_impossible_wishes_are_refused() {
    turn!(beside_others, "a plain run has no daemon");
    let daemon = Daemon::start();
    let config = daemon.folder.path().join("u.toml").display().to_string();
    let second = daemon.ask(&["daemon", "--config", &config]);
    assert_eq!(second.code(), Some(1));
    let pid = daemon.child.id().to_string();
    assert!(second.errors.contains(&pid), "{}", second.errors);

    let connect = || {
        let socket = daemon.folder.path().join("daemon.sock");
        UnixStream::connect(socket).expect("the daemon's socket")
    };
    let mut held = Vec::new();
    for bytes in [
        &b"nothing\n"[..],
        b"{\"Hello\":{}}\n",
        b"{\"Kept\":{\"memory\":1,\"refused\":null}}\n",
        b"{\"Figures\":{\"dram\":1,\"limit\":1,\"stall_seconds\":0,\"swap_ins\":0,\"curve\":null}}\n",
        b"{\"Figures\":{\"dram\":1,\"limit\":1,\"stall_seconds\":0,\"swap_ins\":0,\"curve\":null,\
          \"page_ins\":{\"bound\":\"p99=1ms\",\"all\":[[9999,1]],\"device\":[],\"over\":0}}}\n",
        b"{\"Hello\":{\"version\":1,",
        &[b'['; 200_000],
        &[0; 70_000],
    ] {
        let mut stream = connect();
        let _ = stream.write_all(bytes); // it may be ended already
        held.push(stream);
    }
    let mut program = Job::new("true").options(["--daemon=wbe"]);
    program = program.env("UNDERCROFT_DIR", daemon.folder.path());
    let refused = program.run();
    assert_eq!(refused.code(), Some(125));
    assert!(
        refused.errors.contains("default, web"),
        "{}",
        refused.errors
    );
    // Storage for three.
    let runs: Vec<Running> = (0..3).map(|_| daemon.program("default", 2)).collect();
    let begun = Instant::now();
    while daemon.check()["clients"].as_array().map(Vec::len) != Some(3) {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "three clients fit"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let fourth = daemon.program("default", 1).wait();
    assert_eq!(fourth.code(), Some(125));
    assert!(
        fourth.errors.contains("no room for one more"),
        "{}",
        fourth.errors
    );
    runs.into_iter().for_each(|run| drop(run.wait().expect(0)));
    assert!(
        !daemon.folder.path().join("evidence").exists(),
        "a wrong byte"
    );
    drop(held);
}

/// Connections of peers that say nothing yet. The soft limit of descriptors is lower.
#[test]
fn a_thousand_connections_are_held_and_one_more_is_ended() {
    turn!(beside_others, "a plain run has no daemon");
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files).expect("descriptors for this test");
    let daemon = Daemon::start_by(&["sh", "-c", "ulimit -Sn 200; exec \"$@\"", "sh"]);
    let connect = || {
        let socket = daemon.folder.path().join("daemon.sock");
        let stream = UnixStream::connect(socket).expect("the daemon's socket");
        let second = Some(Duration::from_secs(1));
        stream.set_read_timeout(second).expect("a time limit");
        stream
    };
    let held: Vec<UnixStream> = (0..1024).map(|_| connect()).collect();
    let ended = connect().read(&mut [0]);
    assert!(matches!(ended, Ok(0)), "{ended:?}");
    for mut stream in held {
        stream.set_nonblocking(true).expect("a socket");
        let said = stream.read(&mut [0]);
        let is_open = matches!(&said, Err(error) if error.kind() == ErrorKind::WouldBlock);
        assert!(is_open, "{said:?}");
    }
    daemon.until_it_answers();
}

/// The limit that the daemon gave holds under each manager that takes over.
#[test]
fn a_program_of_the_daemon_outlives_its_managers() {
    turn!(beside_others, "a plain run has no daemon");
    let daemon = Daemon::start();
    let evidence = daemon.folder.path().join("evidence");
    let job = |class: &str, mib: &str, seconds: &str| {
        Job::new(build("holdcheck"))
            .args([mib, &evidence.display().to_string(), seconds])
            .options([&*format!("--daemon={class}"), "--takeovers-max", "9"])
            .env("UNDERCROFT_DIR", daemon.folder.path())
            .start()
    };
    let mut first = job("default", "96", "5");
    let mut second = job("web", "48", "3");
    let both = |_: &Running| {
        let all = daemon.check()["clients"].as_array()?.clone();
        (all.len() == 2).then_some(())
    };
    second.until("both grants", 20, both);
    for _ in 0..2 {
        let asked = |words: &[&str]| daemon.ask(words).text();
        let manager = |run: &Running| {
            let status = asked(&["status", &run.pid().to_string(), "--json"]);
            let status: serde_json::Value = serde_json::from_str(&status).ok()?;
            status["clients"][0]["manager_pid"].as_i64()
        };
        let dead = first.until("a manager", 20, manager);
        let id = rustix::process::Pid::from_raw(dead as i32).expect("an id");
        rustix::process::kill_process(id, rustix::process::Signal::KILL).expect("it lives");
        first.until("another manager", 20, |run| {
            manager(run).filter(|it| *it != dead)
        });
        daemon.check(); // in all, no more than there is
    }
    second.wait().expect(0);
    first.until("rest of the memory", 20, |run| {
        daemon.limit_of(run).filter(|it| *it == MEMORY)
    });
    let outcome = first.wait().expect(0).expect_swapping(100.0);
    assert!(!evidence.exists(), "a wrong byte");
    assert_eq!(outcome.number("takeovers.count"), Some(2.0), "{outcome}");
}

/// A killed keeper leaves its directory. The daemon removes it, also if no run comes after.
#[test]
fn the_directory_of_a_killed_keeper_is_removed_by_the_daemon() {
    turn!(beside_others, "a plain run has no daemon");
    let daemon = Daemon::start();
    let mut run = Job::new("sleep")
        .args(["60"])
        .options(["--daemon"])
        .env("UNDERCROFT_DIR", daemon.folder.path())
        .start();
    run.until("a grant", 20, |run| daemon.limit_of(run));
    let own = daemon.folder.path().join(format!("run-{}", run.keeper()));
    assert!(own.is_dir());
    // The daemon would change the limit back.
    let set = Job::new(undercroft())
        .args(["set", &run.keeper().to_string(), "memory-max=64M"])
        .env("UNDERCROFT_DIR", daemon.folder.path())
        .run()
        .expect(1);
    assert!(set.errors.contains("memory_max of the class"), "{set}");
    let keeper = rustix::process::Pid::from_raw(run.keeper()).expect("an id");
    rustix::process::kill_process(keeper, rustix::process::Signal::KILL).expect("it lives");
    let began = Instant::now();
    while own.exists() {
        assert!(began.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(20));
    }
}
