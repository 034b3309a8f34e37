//! Ten clients of one daemon at once: started, killed, stopped, limited anew and their tiers
//! drained, at random. Every byte is right, and nothing of them stays.
//!
//! `UNDERCROFT_TEST_SOAK_SECONDS`: how long. Default: 5. `UNDERCROFT_TEST_SOAK_SEED`: the order of
//! what is done.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, Running, anonymous_kib, build, mix, say, setting, turn};

use crate::daemon::Daemon;

const CLIENTS: usize = 10;
const MEMORY: u64 = 160 * MIB;

/// The status with which a client ends if a byte is wrong.
const WRONG: i32 = 86;

/// The daemon may keep this much more than one that has just begun: its allocator's.
const KEPT_KIB: u64 = 1024;

/// Longest time until all is as it was before.
const GONE: Duration = Duration::from_secs(30);

struct Client {
    run: Running,
    /// Whether a process of it was ended by force, so that its status says nothing.
    killed: bool,
}

/// The clients, and what was done to them.
struct Soak {
    daemon: Daemon,
    clients: Vec<Client>,
    done: BTreeMap<&'static str, u64>,
    ended: Vec<Running>,
    random: u64,
}

impl Soak {
    fn new(seed: u64) -> Soak {
        let config = |folder: &str| {
            format!(
                "memory = \"{MEMORY}\"\n[[tier]]\nspec = \"ram\"\n[[tier]]\n\
                 spec = \"file:{folder},size=3G\"\ngrant = \"200M\"\n[[tier]]\n\
                 spec = \"file:{folder},size=3G\"\ngrant = \"200M\"\n[class.web]\nweight = 3\n"
            )
        };
        Soak {
            daemon: Daemon::start_with(&[], config),
            clients: Vec::new(),
            done: BTreeMap::new(),
            ended: Vec::new(),
            random: mix(seed),
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = mix(self.random);
        (self.random % below as u64) as usize
    }

    fn evidence(&self) -> PathBuf {
        self.daemon.folder.path().join("evidence")
    }

    /// Starts clients until there are [`CLIENTS`], and takes leave of those that have ended.
    fn fill(&mut self) {
        let mut at = 0;
        while at < self.clients.len() {
            if self.clients[at].run.is_alive() {
                at += 1;
            } else {
                let client = self.clients.swap_remove(at);
                self.part(client);
            }
        }
        while self.clients.len() < CLIENTS {
            let (class, seconds) = (["default", "web"][self.random(2)], 2 + self.random(8));
            let takeovers = ["0", "9"][self.random(2)];
            let mib = ["16", "32", "48"][self.random(3)];
            let run = Job::new(build("holdcheck"))
                .args([
                    mib,
                    &self.evidence().display().to_string(),
                    &seconds.to_string(),
                ])
                .options([&*format!("--daemon={class}"), "--takeovers-max", takeovers])
                .env("UNDERCROFT_DIR", self.daemon.folder.path())
                .start();
            run.keeper(); // known from now on, also if it has ended when it is asked for
            self.count("started");
            self.clients.push(Client { run, killed: false });
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.done.entry(what).or_default() += 1;
    }

    /// Checks how a client ended. Its processes are looked for later.
    fn part(&mut self, client: Client) {
        let evidence = fs::read_to_string(self.evidence()).unwrap_or_default();
        assert!(evidence.is_empty(), "a wrong byte: {evidence}");
        let outcome = client.run.outcome();
        assert_ne!(outcome.code(), Some(WRONG), "{outcome}");
        if !client.killed {
            assert_eq!(outcome.code(), Some(0), "{outcome}");
            assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
            self.count("ended by themselves");
        }
        self.ended.push(client.run);
    }

    /// Does one thing to one client, or to the daemon.
    fn act(&mut self) {
        let at = self.random(self.clients.len());
        let pid = self.clients[at].run.pid().to_string();
        let what = self.random(16);
        match what {
            0 => self.kill(at, "keeper", |tree, keeper| tree.first().map(|_| keeper)),
            1 => self.kill(at, "manager", |tree, _| {
                find(tree, "undercroft: manager of")
            }),
            2 | 3 => self.kill(at, "program", |tree, _| find(tree, "holdcheck")),
            4 => {
                self.clients[at].run.signal(Signal::TERM);
                self.clients[at].killed = true;
                self.count("ended");
            }
            5..=7 => {
                let number = ["1", "2", "3"][self.random(3)];
                self.ask("drained", &["tiers", "drain", &pid, number]);
            }
            8..=10 => {
                let number = ["1", "2", "3"][self.random(3)];
                self.ask("added again", &["tiers", "add", &pid, number]);
            }
            11 => {
                // The daemon gives what it does not use to others, so it may not be paused.
                assert!(!self.ask("paused", &["set", &pid, "paused=yes"]));
            }
            12 => {
                self.ask("bounds set", &["set", &pid, "latency=p90=900ms"]);
            }
            13 => {
                let weight = 1 + self.random(5);
                self.weigh(weight);
            }
            _ => {
                let status = self.daemon.status().expect("a status");
                let all = status["clients"].as_array().expect("clients");
                assert!(all.len() <= CLIENTS + 4, "{status:#}");
                self.count("looked at");
            }
        }
    }

    /// Asks by the command line. A client may be on its way in or out, so it may refuse.
    fn ask(&mut self, what: &'static str, words: &[&str]) -> bool {
        let outcome = self.daemon.ask(words);
        let done = outcome.code() == Some(0);
        self.count(if done { what } else { "refused" });
        done
    }

    fn kill(
        &mut self,
        at: usize,
        what: &'static str,
        whom: impl Fn(&[undercroft_tests::Process], i32) -> Option<i32>,
    ) {
        let run = &self.clients[at].run;
        let Some(pid) = whom(&run.tree(), run.keeper()).and_then(Pid::from_raw) else {
            return; // it has not started yet
        };
        self.clients[at].killed = true;
        let _ = kill_process(pid, Signal::KILL); // it may have ended
        self.count(match what {
            "keeper" => "keepers killed",
            "manager" => "managers killed",
            _ => "programs killed",
        });
    }

    /// Gives class `web` another weight, so all limits change.
    fn weigh(&mut self, weight: usize) {
        let file = self.daemon.folder.path().join("u.toml");
        let text = fs::read_to_string(file).expect("the configuration");
        let old = text
            .lines()
            .find(|line| line.starts_with("weight"))
            .expect("a weight");
        let old = old.to_owned();
        self.daemon.reload(&old, &format!("weight = {weight}"));
        self.count("limits changed");
    }

    /// Kills the daemon and starts another. A client that asks for a share in between is refused,
    /// so all have theirs before.
    fn restart(&mut self) {
        let began = Instant::now();
        loop {
            let status = self.daemon.status().expect("a status");
            let all = status["clients"].as_array().expect("clients");
            let known = |run: &Running| all.iter().any(|client| client["pid"] == run.keeper());
            let mut clients = self.clients.iter_mut();
            if clients.all(|client| known(&client.run) || !client.run.is_alive()) {
                break;
            }
            assert!(began.elapsed() < GONE, "a client has no share: {status:#}");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.daemon.die_and_come_back();
    }

    /// Ends all clients. Nothing of them is left then.
    fn end(&mut self) {
        for client in &mut self.clients {
            client.run.signal(Signal::TERM);
            client.killed = true;
        }
        let began = Instant::now();
        while !self.clients.is_empty() {
            assert!(
                began.elapsed() < GONE,
                "{} clients do not end",
                self.clients.len()
            );
            for at in (0..self.clients.len()).rev() {
                if !self.clients[at].run.is_alive() {
                    let client = self.clients.swap_remove(at);
                    self.part(client);
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        for run in &self.ended {
            while !run.left().is_empty() {
                assert!(began.elapsed() < GONE, "still there: {:#?}", run.left());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let none = |status: &serde_json::Value| {
            let all = status["clients"].as_array();
            all.is_some_and(Vec::is_empty)
        };
        while !self.daemon.status().as_ref().is_some_and(none) {
            assert!(began.elapsed() < GONE, "the daemon still has clients");
            std::thread::sleep(Duration::from_millis(20));
        }
        // What a killed keeper left is removed by the next run, or by the daemon.
        let is_run = |name: &String| name.contains("/run-");
        while names(self.daemon.folder.path()).iter().any(is_run) {
            assert!(
                began.elapsed() < GONE,
                "left over: {:?}",
                held(&self.daemon)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn find(tree: &[undercroft_tests::Process], words: &str) -> Option<i32> {
    // The keeper's own line has the program's name too.
    let is = |process: &&undercroft_tests::Process| {
        process.command.contains(words) && !process.command.contains(" run ")
    };
    tree.iter().find(is).map(|process| process.pid)
}

/// The daemon's holdings: descriptors, granted bytes of each tier, its files, its own memory.
fn held(daemon: &Daemon) -> (usize, Vec<serde_json::Value>, Vec<String>, u64) {
    let pid = daemon.child.id();
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let status = daemon.status().expect("a status");
    let tiers = status["tiers"].as_array().cloned().unwrap_or_default();
    let tiers = tiers
        .iter()
        .map(|tier| tier["granted_bytes"].clone())
        .collect();
    let mut files = names(daemon.folder.path());
    files.sort();
    (descriptors, tiers, files, anonymous_kib(pid as i32))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| {
            let path = entry.path();
            let name = path.display().to_string();
            let length = entry
                .metadata()
                .map_or(0, |it| if it.is_file() { it.len() } else { 0 });
            let below = if path.is_dir() {
                names(&path)
            } else {
                Vec::new()
            };
            // The configuration changes by a digit.
            std::iter::once(format!("{name} {}", length / 4096)).chain(below)
        })
        .collect()
}

#[test]
fn ten_clients_come_and_go_and_nothing_is_left() {
    let name = "ten_clients_come_and_go_and_nothing_is_left";
    turn!(one_at_a_time, "a plain run has no daemon");
    let seconds = setting("UNDERCROFT_TEST_SOAK_SECONDS", 5);
    let seed = setting("UNDERCROFT_TEST_SOAK_SEED", 1);
    let mut soak = Soak::new(seed);
    let before = held(&soak.daemon);
    let (began, time) = (Instant::now(), Duration::from_secs(seconds));
    let mut restarts = 0;
    while began.elapsed() < time {
        soak.fill();
        soak.act();
        // Its last third is one daemon's, so that what it leaks adds up.
        let (passed, chance) = (began.elapsed(), soak.random(200) == 0);
        if chance && passed < time * 2 / 3 || restarts == 0 && passed > time / 3 {
            soak.restart();
            restarts += 1;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    soak.end();
    let after = held(&soak.daemon);
    assert_eq!(
        (after.0, &after.1, &after.2),
        (before.0, &before.1, &before.2),
        "left over"
    );
    assert!(
        after.3 <= before.3 + KEPT_KIB,
        "{} KiB, {} before",
        after.3,
        before.3
    );
    say(&format!(
        "{name}: {seconds} s, seed {seed}, daemon killed {restarts} times: {:?}; it has {} KiB, \
        {} before",
        soak.done, after.3, before.3
    ));
}
