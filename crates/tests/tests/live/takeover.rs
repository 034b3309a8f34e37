//! The manager is killed with `kill -9` again and again, at random moments and also while it takes
//! over. Another takes over each time. The programs go on, every byte is verified, and nothing
//! hangs. `UNDERCROFT_TEST_KILLS`: how often it is killed under redis, memcached and `asfuzz`
//! together. `UNDERCROFT_TEST_TAKEOVER_MIB`: memory of `holdcheck`, default 48. Also what stands on
//! takeover: upgrades, and pauses that outlive a manager.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    Client, Job, MIB, Memcached, Outcome, Process, Reply, Running, beside_others, build, find,
    free_port, mix, plain_only, processes, programs_folder, rounds, say, setting, skip, turn,
    undercroft, value_of,
};

/// More takeovers than the default allows.
const MANY: [&str; 2] = ["--takeovers-max", "1000000"];

/// The options of a run whose manager is killed up to `most` times: none if the default will do.
pub(crate) fn allowed(most: u64) -> &'static [&'static str] {
    if most < 900 { &[] } else { &MANY }
}

const PATIENCE: Duration = Duration::from_secs(20);

/// Longest time until another manager is ready. On an idle machine it takes some 60 ms; on one that
/// is overloaded, with a busy disk, more than ten seconds.
const TAKEN_OVER: Duration = Duration::from_secs(100);

/// Kills of one test; `share` of 100 are this test's.
pub(crate) fn kills(share: u64) -> u64 {
    (setting("UNDERCROFT_TEST_KILLS", 24) * share / 100).max(3)
}

/// A holder has the command line of its manager, and another name.
fn is_holder(process: &Process) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{}/comm", process.pid));
    name.is_ok_and(|name| name.trim() == "uc-fds")
}

/// The manager that the keeper has now.
pub(crate) fn manager_of(keeper: i32) -> Option<i32> {
    manager_among(&processes(), keeper)
}

fn manager_among(all: &[Process], keeper: i32) -> Option<i32> {
    let is = |process: &&Process| {
        let named = process.command.contains("undercroft: manager of");
        process.parent == keeper && named && process.state != 'Z' && !is_holder(process)
    };
    all.iter().find(is).map(|process| process.pid)
}

/// The manager, if it has taken over from `dead`: the keeper has ended the holder of that one.
pub(crate) fn successor(keeper: i32, dead: i32) -> Option<i32> {
    let all = processes();
    let held = (all.iter()).any(|process| process.parent == keeper && is_holder(process));
    manager_among(&all, keeper).filter(|manager| *manager != dead && !held)
}

/// Kills the manager of one run.
struct Killer<'a> {
    run: &'a Running,
    keeper: i32,
    seed: u64,
    killed: AtomicU64,
    over: AtomicBool,
}

impl Killer<'_> {
    fn of(run: &Running, seed: u64) -> Killer<'_> {
        Killer {
            run,
            keeper: run.keeper(),
            seed,
            killed: AtomicU64::new(0),
            over: AtomicBool::new(false),
        }
    }

    fn random(&self, most: u64) -> u64 {
        mix(self.seed << 20 ^ self.killed.load(Ordering::Relaxed) << 1 ^ most) % most
    }

    /// Kills the manager, and returns which.
    fn kill(&self) -> Option<i32> {
        let manager = manager_of(self.keeper)?;
        kill_process(Pid::from_raw(manager)?, Signal::KILL).ok()?;
        self.killed.fetch_add(1, Ordering::Relaxed);
        Some(manager)
    }

    /// Kills until told to stop, at most `most` times. Each time but one in six, the next manager
    /// is left to serve before it is killed. The others are killed while they take over.
    fn work(&self, most: u64) {
        let ends = || self.over.load(Ordering::Relaxed);
        while !ends() && self.killed.load(Ordering::Relaxed) < most {
            std::thread::sleep(Duration::from_micros(self.random(150_000)));
            let mut dead = self.kill();
            if self.random(6) == 0 {
                std::thread::sleep(Duration::from_micros(self.random(60_000)));
                dead = self.kill().or(dead);
            }
            let since = Instant::now();
            let is_over = || dead.is_none_or(|dead| successor(self.keeper, dead).is_some());
            while !ends() && !is_over() {
                let said = || self.run.errors();
                assert!(
                    since.elapsed() < TAKEN_OVER,
                    "no manager takes over: {}",
                    said()
                );
                // A look at all processes takes as long. There may be eight who look.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Ends the killing, also if the test has failed: it would go on for ever.
struct Ends<'a>(&'a Killer<'a>);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
        if std::thread::panicking() {
            say(&format!("the run said: {}", self.0.run.errors()));
        }
    }
}

/// Does `work` with the run while its manager is killed, up to `most` times. `work` is given a
/// question: whether all kills are done. Returns the number of kills.
pub(crate) fn under_kills(
    run: &Running,
    seed: u64,
    most: u64,
    work: impl FnOnce(&dyn Fn() -> bool),
) -> u64 {
    let killer = Killer::of(run, seed);
    std::thread::scope(|scope| {
        let kills = scope.spawn(|| killer.work(most));
        let ends = Ends(&killer);
        work(&|| kills.is_finished());
        drop(ends);
        kills.join().expect("each takeover ends");
    });
    killer.killed.load(Ordering::Relaxed)
}

/// Prints what the takeovers of a run took. Panics if there was none.
#[track_caller]
pub(crate) fn told(name: &str, killed: u64, outcome: &Outcome) {
    let number = |field: &str| outcome.number(&format!("takeovers.{field}"));
    let ms = |field: &str| number(field).unwrap_or(f64::NAN) * 1e3;
    say(&format!(
        "takeover, {name}: killed {killed} times, taken over {} times; the program waited for {:.0} ms \
         (median), {:.0} ms (p99), {:.0} ms (longest); 0 wrong bytes; {:.1?}",
        number("count").unwrap_or(f64::NAN),
        ms("pause_seconds_p50"),
        ms("pause_seconds_p99"),
        ms("pause_seconds_max"),
        outcome.wall,
    ));
    // There is no report if the last manager was killed when the program had ended.
    assert!(
        killed > 0 && number("count").is_none_or(|count| count > 0.0),
        "{outcome}"
    );
}

/// `holdcheck` verifies its pages without pause.
#[test]
fn memory_is_right_whenever_the_manager_is_killed() {
    turn!(beside_others, "a plain run has no manager");
    let most = kills(40);
    let mib = setting("UNDERCROFT_TEST_TAKEOVER_MIB", 48);
    let seconds = (3 + most / 7).to_string();
    for (seed, tiers) in [(1, &["ram"][..]), (2, &["ram", "file:SPILL,size=2G"])] {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let evidence = scratch.path().join("evidence");
        let spill = scratch.path().join("spill").display().to_string();
        let is_set = tiers.len() > 1;
        let mut job = Job::new(build("holdcheck"))
            .arg(mib.to_string())
            .arg(&evidence)
            .arg(if is_set { &seconds } else { "3" })
            .limit(mib / 2 * MIB)
            .options(allowed(most))
            .options(["--compressors", if is_set { "4" } else { "1" }])
            .timeout(60 + most);
        for tier in tiers {
            job = job.tier(&tier.replace("SPILL", &spill));
        }
        let run = start_ready(&job);
        let pid = run.keeper();
        let limit = mib / 2 - if is_set { mib / 12 } else { 0 };
        if is_set {
            for change in [format!("memory-max={limit}M"), "latency=p99=50ms".into()] {
                let set = Job::new(undercroft()).args(["set", &pid.to_string(), &change]);
                set.run().expect(0);
            }
        }
        let killed = under_kills(&run, seed, most, |_| wait_for_end(pid, most));
        let outcome = run.wait();
        // What a user has set holds under each successor.
        if let Some(report) = &outcome.report {
            let bound = &report["latency_bound"]["bound"];
            assert_eq!(report["memory_max_bytes"], limit * MIB, "{outcome}");
            assert_eq!(bound.is_null(), !is_set, "{outcome}");
        }
        let seen = std::fs::read_to_string(&evidence).unwrap_or_default();
        assert!(seen.is_empty(), "{seen}\n{outcome}");
        let outcome = outcome.expect(0);
        told(&format!("holdcheck on {tiers:?}"), killed, &outcome);
    }
}

/// Starts `holdcheck`, and waits until it has filled its memory.
pub(crate) fn start_ready(job: &Job) -> Running {
    let mut run = job.start();
    run.until("its memory", 60, |run| {
        let said = std::fs::read_to_string(run.scratch().join("output"));
        said.is_ok_and(|said| said.contains("ready")).then_some(())
    });
    run
}

/// Eight programs at once, and each has a killer of its own.
#[test]
fn programs_are_right_while_the_managers_of_all_are_killed() {
    let name = "programs_are_right_while_the_managers_of_all_are_killed";
    turn!(beside_others, "a plain run has no manager");
    let most = kills(5).max(rounds(20, 60));
    let seconds = (8 + most / 5).to_string();
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let at = |what: &str, number: u64| scratch.path().join(format!("{what}-{number}"));
    let runs: Vec<Running> = (0..8)
        .map(|number| {
            let job = Job::new(build("holdcheck"))
                .args([
                    "12",
                    &at("evidence", number).display().to_string(),
                    &seconds,
                ])
                .limit(6 * MIB)
                .options(allowed(most))
                .tier("ram")
                .tier(&format!("file:{},size=64M", at("spill", number).display()));
            start_ready(&job.timeout(60 + most))
        })
        .collect();
    let killed: Vec<u64> = std::thread::scope(|scope| {
        let work =
            |(seed, run)| move || under_kills(run, seed, most, |_| wait_for_end(run.pid(), most));
        let killers: Vec<_> = (900..).zip(&runs).map(|it| scope.spawn(work(it))).collect();
        let ended = killers
            .into_iter()
            .map(|it| it.join().expect("each takeover ends"));
        ended.collect()
    });
    for ((number, run), killed) in (0..).zip(runs).zip(&killed) {
        let outcome = run.wait().expect(0);
        let seen = std::fs::read_to_string(at("evidence", number)).unwrap_or_default();
        assert!(seen.is_empty(), "{seen}\n{outcome}");
        told(&format!("program {number} of 8"), *killed, &outcome);
    }
    let all: u64 = killed.iter().sum();
    say(&format!("{name}: {all} kills of {}", 8 * most));
    assert!(all >= 8 * 3, "{killed:?}");
}

/// Waits until the process is a zombie, or its time is up.
pub(crate) fn wait_for_end(pid: i32, kills: u64) {
    let since = Instant::now();
    let state = || {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        text.rsplit(')')
            .next()
            .and_then(|rest| rest.trim().chars().next())
    };
    while !matches!(state(), None | Some('Z')) && since.elapsed() < Duration::from_secs(60 + kills)
    {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// `asfuzz`: mappings come, go, move and fork; threads; children that execute.
#[test]
fn address_spaces_are_right_whenever_the_manager_is_killed() {
    turn!(beside_others, "a plain run has no manager");
    let most = kills(40);
    let folder = programs_folder();
    for seed in 0..1 + most / 100 {
        let ops = (120 * most.min(100)).max(3_000);
        let spill = tempfile::tempdir_in(&folder).expect("a folder for the file tier");
        let spill = spill.path().join("spill").display().to_string();
        let mut run = Job::new(build("asfuzz"))
            .args([
                "--seed",
                &(700 + seed).to_string(),
                "--ops",
                &ops.to_string(),
            ])
            .args(["--threads", "2", "--footprint-mib", "32", "--dir"])
            .arg(&folder)
            .limit(20 * MIB)
            .options(allowed(most))
            .tier("ram")
            .tier(&format!("file:{spill},size=256M"))
            .timeout(240)
            .start();
        let pid = run.keeper();
        // Before its start, a manager that dies ends the run.
        run.until("its program", 60, |run| {
            let is = |process: &Process| {
                let ours = [pid, run.pid()].contains(&process.pid);
                !ours && !process.command.contains("undercroft: manager of")
            };
            run.tree().iter().any(is).then_some(())
        });
        let killed = under_kills(&run, seed, most.min(100), |_| wait_for_end(pid, 180));
        let outcome = run.wait();
        // Forks, moves and the like at the moment of a death: a takeover that is not certain is
        // refused, and the program is ended. It never sees a wrong byte.
        assert!(
            !outcome.errors.contains("MISMATCH"),
            "seed {seed}: {outcome}"
        );
        if outcome.code() == Some(125) && outcome.errors.contains("the manager died") {
            let why = outcome.errors.lines().last().unwrap_or_default();
            say(&format!(
                "takeover, asfuzz seed {seed}: refused after {killed} kills: {why}"
            ));
            continue;
        }
        assert_eq!(outcome.code(), Some(0), "seed {seed}: {outcome}");
        assert!(outcome.text().contains("\nmismatches 0\n"), "{outcome}");
        told(&format!("asfuzz seed {seed}"), killed, &outcome);
    }
}

const KEYS: u64 = 20_000;

fn redis_value(key: u64, version: u64) -> Vec<u8> {
    value_of(key, version, 900 + key as usize % 800)
}

/// Asks redis once for each key, 200 at a time, and checks each answer.
fn for_each_key(
    client: &mut Client,
    ask: impl Fn(&mut Client, &[u8], u64),
    check: impl Fn(Reply, u64),
) {
    for from in (0..KEYS).step_by(200) {
        for key in from..from + 200 {
            ask(client, format!("key:{key}").as_bytes(), key);
        }
        for key in from..from + 200 {
            check(client.receive().expect("an answer"), key);
        }
    }
}

fn store(client: &mut Client, version: u64) {
    for_each_key(
        client,
        |client, name, key| {
            let value = redis_value(key, version);
            client.send(&[b"SET", name, &value]).expect("SET");
        },
        |reply, _| assert_eq!(reply, Reply::Status("OK".into())),
    );
}

fn verify(client: &mut Client, version: u64) {
    for_each_key(
        client,
        |client, name, _| client.send(&[b"GET", name]).expect("GET"),
        |reply, key| {
            let right =
                matches!(&reply, Reply::Bytes(Some(found)) if *found == redis_value(key, version));
            assert!(right, "key {key} of version {version} is wrong");
        },
    );
}

/// A real redis. Every value is read back; snapshots are taken by a fork child.
#[test]
fn redis_keeps_every_value_whenever_the_manager_is_killed() {
    let _turn = beside_others();
    let (Some(redis), false) = (find("redis-server"), plain_only()) else {
        return skip("no redis-server, or a plain run");
    };
    let most = kills(30);
    let folder = tempfile::tempdir().expect("a scratch folder");
    let port = free_port();
    let spill = folder.path().join("spill").display().to_string();
    let run = Job::new(redis)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .arg("--dir")
        .arg(folder.path())
        .limit(20 * MIB)
        .options(allowed(most))
        .tier("ram")
        .tier(&format!("file:{spill},size=256M"))
        .timeout(120 + most)
        .start();
    let mut client = Client::to_port(port, PATIENCE).expect("redis listens");
    store(&mut client, 0);
    let mut rounds = 0;
    let killed = under_kills(&run, 3, most, |all_done| {
        while !all_done() {
            rounds += 1;
            store(&mut client, rounds);
            if rounds % 3 == 1 {
                let _ = client.call(&[b"BGSAVE"]).expect("an answer");
            }
            verify(&mut client, rounds);
        }
    });
    verify(&mut client, rounds);
    client.send(&[b"SHUTDOWN", b"NOSAVE"]).expect("SHUTDOWN");
    let outcome = run.wait().expect(0);
    told(
        &format!("redis, {rounds} rounds of {KEYS} values"),
        killed,
        &outcome,
    );
}

/// memcached: several threads in one process.
#[test]
fn memcached_keeps_every_value_whenever_the_manager_is_killed() {
    let _turn = beside_others();
    let (Some(memcached), false) = (find("memcached"), plain_only()) else {
        return skip("no memcached, or a plain run");
    };
    let most = kills(30);
    let port = free_port();
    let mut job = Job::new(memcached)
        .args(["-p", &port.to_string(), "-l", "127.0.0.1", "-U", "0"])
        .args(["-m", "512", "-t", "4"])
        .limit(24 * MIB)
        .options(allowed(most))
        .tier("ram")
        .tier(
            "file:SPILL,size=256M"
                .replace("SPILL", &scratch_file("spill"))
                .as_str(),
        )
        .timeout(120 + most);
    if rustix::process::getuid().is_root() {
        job = job.args(["-u", "root"]);
    }
    let run = job.start();
    let mut client = Memcached::connect(port, PATIENCE).expect("memcached listens");
    let value = |key: u64, version: u64| value_of(key, version, 2000 + key as usize % 1000);
    let keys = 12_000u64;
    for key in 0..keys {
        client.set(&format!("k{key}"), &value(key, 0)).expect("set");
    }
    let mut versions = vec![0u64; keys as usize];
    let mut verified = 0u64;
    let killed = under_kills(&run, 4, most, |all_done| {
        while !all_done() {
            let key = mix(verified) % keys;
            let found = client.get(&format!("k{key}")).expect("get");
            let version = &mut versions[key as usize];
            assert_eq!(found, Some(value(key, *version)), "key {key}");
            *version += 1;
            client
                .set(&format!("k{key}"), &value(key, *version))
                .expect("set");
            verified += 1;
        }
    });
    for key in 0..keys {
        let found = client.get(&format!("k{key}")).expect("get");
        assert_eq!(found, Some(value(key, versions[key as usize])), "key {key}");
    }
    run.signal(Signal::TERM);
    let outcome = run.wait();
    told(
        &format!("memcached, {verified} values read and changed"),
        killed,
        &outcome,
    );
}

fn scratch_file(name: &str) -> String {
    let folder = programs_folder();
    folder
        .join(format!("takeover-{name}-{}", std::process::id()))
        .display()
        .to_string()
}

/// A manager that dies again and again before it serves is given up on. The program is ended, and
/// sees no wrong byte.
#[test]
fn managers_that_die_again_and_again_are_given_up_on() {
    turn!(beside_others, "a plain run has no manager");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let mut run = Job::new(build("holdcheck"))
        .arg("24")
        .arg(&evidence)
        .arg("40")
        .limit(12 * MIB)
        .options(MANY)
        .tier("ram")
        .start();
    run.until("its memory", 60, |run| {
        let said = std::fs::read_to_string(run.scratch().join("output"));
        said.is_ok_and(|said| said.contains("ready")).then_some(())
    });
    let keeper = run.keeper();
    let mut last = 0;
    let since = Instant::now();
    while run.is_alive() && since.elapsed() < Duration::from_secs(30) {
        // As soon as one is there, before it can have taken over.
        if let Some(manager) = manager_of(keeper).filter(|manager| *manager != last) {
            last = manager;
            let _ = kill_process(Pid::from_raw(last).expect("an id"), Signal::KILL);
        }
    }
    let outcome = run.wait();
    let seen = std::fs::read_to_string(&evidence).unwrap_or_default();
    assert!(seen.is_empty(), "{seen}\n{outcome}");
    let outcome = outcome.expect(125);
    assert!(outcome.errors.contains("in a row died"), "{outcome}");
}

/// A process is stopped in the middle of moving pages out, by another that needs a page before it
/// lets it go on. A takeover that waited for the first without serving the second would never end.
#[test]
fn a_process_that_another_has_stopped_does_not_hold_up_a_takeover() {
    let name = "a_process_that_another_has_stopped_does_not_hold_up_a_takeover";
    turn!(beside_others, "a plain run has no manager");
    let spill = scratch_file("stopper");
    let mut run = Job::new(build("stopper"))
        .args(["12", "4"])
        .limit(12 * MIB)
        .options(MANY)
        .tier("ram")
        .tier(&format!("file:{spill},size=64M"))
        .start();
    run.until("its memory", 60, |run| {
        let said = std::fs::read_to_string(run.scratch().join("output"));
        said.is_ok_and(|said| said.contains("ready")).then_some(())
    });
    let pid = run.keeper();
    let killed = under_kills(&run, 5, 12, |_| wait_for_end(pid, 12));
    told(name, killed, &run.wait().expect(0));
}

/// `holdcheck` on twice its limit, without end, once its memory is there.
fn without_end(evidence: &Path, options: &[&str]) -> Running {
    let mut run = Job::new(build("holdcheck"))
        .arg("48")
        .arg(evidence)
        .arg("600")
        .limit(24 * MIB)
        .options(options)
        .tier("ram")
        .tier(&format!(
            "file:{},size=256M",
            evidence.with_extension("spill").display()
        ))
        .start();
    run.until("its memory", 60, |run| {
        let said = std::fs::read_to_string(run.scratch().join("output"));
        said.is_ok_and(|said| said.contains("ready")).then_some(())
    });
    run
}

/// Ends it; every byte was right until then.
#[track_caller]
fn end(run: Running, evidence: &Path) -> Outcome {
    run.signal(Signal::TERM);
    let outcome = run.wait();
    let seen = std::fs::read_to_string(evidence).unwrap_or_default();
    assert!(seen.is_empty(), "{seen}\n{outcome}");
    outcome.expect(128 + 15)
}

/// The answer of `undercroft upgrade` for a run, and its status.
fn upgrade(pid: i32, binary: &Path) -> (serde_json::Value, Option<i32>) {
    let job = Job::new(undercroft())
        .args(["upgrade", "--json", &pid.to_string(), "--binary"])
        .arg(binary);
    let outcome = job.run();
    let said: serde_json::Value =
        serde_json::from_str(&outcome.text()).unwrap_or_else(|why| panic!("{why}: {outcome}"));
    (said["runs"][0].clone(), outcome.code())
}

/// The file that the manager runs.
fn binary_of(keeper: i32) -> PathBuf {
    let manager = manager_of(keeper).expect("a manager");
    std::fs::read_link(format!("/proc/{manager}/exe")).expect("it runs")
}

/// Copies a binary into a folder.
fn copy(from: &Path, to: PathBuf, mode: u32) -> PathBuf {
    std::fs::copy(from, &to).expect("a copy");
    std::fs::set_permissions(&to, Permissions::from_mode(mode)).expect("our file");
    to
}

/// Binaries that may not manage a run are refused, and its manager is not touched.
fn refused_binaries(keeper: i32, folder: &Path) {
    let (first, other) = (manager_of(keeper), Path::new("/bin/true"));
    let script = copy(other, folder.join("script"), 0o755);
    std::fs::write(&script, "#!/bin/sh\nexec undercroft \"$@\"\n").expect("a script");
    for (binary, part) in [
        (copy(other, folder.join("other"), 0o755), "no undercroft"),
        (script, "a script"),
        (copy(undercroft(), folder.join("open"), 0o775), "chmod go-w"),
    ] {
        let (said, status) = upgrade(keeper, &binary);
        let outcome = (&said["outcome"], status);
        assert_eq!(outcome, (&"refused".into(), Some(1)), "{said}");
        let why = said["why"].as_str().unwrap_or_default();
        assert!(why.contains(part), "{said}");
    }
    assert_eq!(manager_of(keeper), first, "nothing was touched");
}

/// Another binary takes over, three times, also under a run that allows no takeover. One that
/// cannot is refused, or gives way to the one before.
#[test]
fn another_binary_manages_a_program_that_goes_on() {
    let name = "another_binary_manages_a_program_that_goes_on";
    turn!(beside_others, "a plain run has no manager");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let mut run = without_end(&evidence, &[]);
    let pid = run.keeper();
    refused_binaries(pid, scratch.path());
    let new = copy(undercroft(), scratch.path().join("new"), 0o755);
    let own = undercroft().canonicalize().expect("it is there");
    let mut pauses = Vec::new();
    for binary in [&new, &own, &new] {
        let (said, status) = upgrade(pid, binary);
        let outcome = (&said["outcome"], status);
        assert_eq!(outcome, (&"upgraded".into(), Some(0)), "{said}");
        pauses.extend(said["pause_seconds"].as_f64());
        assert_eq!(binary_of(pid), binary.canonicalize().expect("it is there"));
        // Pages that an earlier one had stored, too.
        run.until("pages from the tiers", 60, |run| {
            let back = run.status()?["pages"]["swapped_in"].as_u64();
            back.filter(|pages| *pages > 2000)
        });
    }
    // It does not become ready; and it dies soon.
    let halfway = copy(&build("halfway"), scratch.path().join("halfway"), 0o755);
    let (said, _) = upgrade(pid, &halfway);
    assert_eq!(said["outcome"], "kept", "{said}");
    let dead = manager_of(pid).expect("a manager");
    kill_process(Pid::from_raw(dead).expect("an id"), Signal::KILL).expect("it lives");
    run.until("another manager", 60, |_| successor(pid, dead));
    assert_eq!(binary_of(pid), own);
    let outcome = end(run, &evidence);
    let number = |field: &str| outcome.number(&format!("takeovers.{field}"));
    let counts = (number("upgrades"), number("count"));
    assert_eq!(counts, (Some(3.0), Some(5.0)), "{outcome}");
    let wall = outcome.wall;
    say(&format!(
        "{name}: pauses of the upgrades {pauses:.3?} s; {wall:.1?}"
    ));
}

/// The program has ended, and a process that it left behind runs on under another manager.
#[test]
fn what_a_program_leaves_behind_outlives_an_upgrade() {
    turn!(beside_others, "a plain run has no manager");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let mark = scratch.path().join("mark");
    let leaves = format!("(sleep 3; echo here > {}) & exit 3", mark.display());
    let mut run = Job::new("sh")
        .args(["-c", &leaves])
        .limit(64 * MIB)
        .options(["--wait-all"])
        .tier("ram")
        .start();
    let pid = run.keeper();
    run.until("a manager", 60, |run| run.status());
    std::thread::sleep(Duration::from_millis(500)); // the shell has ended by then
    for (binary, becomes) in [
        (Path::new("/bin/true"), "refused"),
        (undercroft(), "upgraded"),
    ] {
        let (said, _) = upgrade(pid, binary);
        assert_eq!(said["outcome"], becomes, "{said}");
    }
    run.wait().expect(3);
    assert!(mark.exists(), "what was left behind was ended");
}

/// No process of the program chooses what its keeper runs.
#[test]
fn the_program_itself_may_not_upgrade_its_manager() {
    turn!(beside_others, "a plain run has no manager");
    let asks = format!("{} upgrade $PPID", undercroft().display());
    let job = Job::new("sh")
        .args(["-c", &asks])
        .limit(64 * MIB)
        .tier("ram");
    let outcome = job.run().expect(1);
    assert!(
        outcome.text().contains("a process of the program may not"),
        "{outcome}"
    );
}

/// No page leaves while a run is paused, also under the next manager; then it keeps its limit.
#[test]
fn a_paused_run_keeps_its_pages_and_outlives_its_manager() {
    let name = "a_paused_run_keeps_its_pages_and_outlives_its_manager";
    turn!(beside_others, "a plain run has no manager");
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let evidence = scratch.path().join("evidence");
    let mut run = without_end(&evidence, &MANY);
    let pid = run.keeper();
    let ask = |what: &str| {
        let job = Job::new(undercroft()).args(["set", &pid.to_string(), what]);
        job.run().expect(0);
    };
    let of = |status: &serde_json::Value, field: &str| status[field].as_u64().unwrap_or(0);
    // What a user asked before holds under the next manager, paused or not.
    let drain = ["tiers", "drain", &pid.to_string(), "1"];
    Job::new(undercroft()).args(drain).run().expect(0);
    ask("paused=yes");
    // All its pages come back, beyond the limit.
    let whole = |run: &Running| {
        let status = run.status()?;
        assert_eq!(status["paused"], true, "{status:#}");
        (of(&status, "resident_bytes") > 40 * MIB).then_some(status)
    };
    let before = run.until("all of its memory", 60, whole);
    let dead = manager_of(pid).expect("a manager");
    kill_process(Pid::from_raw(dead).expect("an id"), Signal::KILL).expect("it lives");
    run.until("another manager", 60, |_| successor(pid, dead));
    let after = run.until("all of its memory", 60, whole);
    assert_ne!(before["manager_pid"], after["manager_pid"]);
    assert!(!after["tiers"][0]["drain"].is_null(), "{after:#}");
    std::thread::sleep(Duration::from_millis(300));
    let status = run.status().expect("a status");
    assert_eq!(status["pages"]["swapped_out"], 0, "{status:#}");
    assert_eq!(status["limit_exceeded"]["events"], 0, "{status:#}");
    let taken = &status["takeovers"];
    let pauses = ["pause_seconds_last", "pause_seconds_max"].map(|of| taken[of].as_f64());
    assert_eq!(taken["count"], 1, "{taken}");
    assert!(pauses[0] > Some(0.0) && pauses[0] == pauses[1], "{taken}");
    ask("paused=no");
    let kept = |run: &Running| {
        let status = run.status()?;
        assert_eq!(status["paused"], false, "{status:#}");
        (of(&status, "dram_bytes") <= 24 * MIB).then_some(())
    };
    run.until("the limit", 60, kept);
    ask("paused=yes"); // and ends so
    let outcome = end(run, &evidence);
    assert_eq!(outcome.number("pauses.count"), Some(2.0), "{outcome}");
    told(name, 1, &outcome);
}
