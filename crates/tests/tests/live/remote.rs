//! The remote tier under a real program, on a real cluster of six nodes on loopback: a master is
//! killed under verified load, both copies of a page are lost, and clusters are refused.
//!
//! `UNDERCROFT_TEST_KILLS`: masters that are killed one after the other. Default: 1.

use std::path::Path;
use std::time::Duration;

use undercroft_resp::cluster::{Certificates, Cluster};
use undercroft_tests::{Job, MIB, Outcome, Running, build, find, say, setting, skip, turn};

/// Longest touch of a page while a master dies.
const LONGEST_US: f64 = 100_000.0;

/// Threads that such a touch waits for, one after the other: fault thread, link, server, link,
/// fault thread, program. The machine may let each of them wait.
const THREADS: f64 = 6.0;

/// The steps share a cluster: it takes two seconds to start.
#[test]
fn remote_under_a_real_program() {
    turn!(one_at_a_time, "a plain run has no tiers");
    for program in ["redis-server", "openssl"] {
        if find(program).is_none() {
            return skip(&format!("{program} is not installed"));
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let files = certificates(folder.path());
    let cluster = Cluster::start(&std::env::temp_dir(), 3, Some(&files));
    let mut cluster = cluster.expect("a cluster of six nodes");
    pages_that_lose_both_copies_are_poisoned_and_reported_and_no_others(&cluster, folder.path());
    access_is_encrypted_and_restricted(&cluster, &files, folder.path());
    clusters_that_cannot_be_used_are_refused(&cluster);
    masters_are_killed_under_verified_load_and_no_page_is_lost(&mut cluster);
    half_a_cluster_is_refused(&mut cluster);
}

fn tier(cluster: &Cluster) -> String {
    format!("redis:{},size=512M", Cluster::addresses(&cluster.ports()))
}

/// The program with `mib` MiB in a quarter of them. Most of the rest is in the cluster.
fn job(mib: u64, ms: u64, tier: &str) -> Job {
    Job::new(build("remote"))
        .args([mib.to_string(), ms.to_string()])
        .limit(mib * MIB / 4)
        .tier("ram,max=1M")
        .tier(tier)
}

fn wait_for(running: &mut Running, word: &str) {
    running.until(word, 30, |running| {
        running.errors().contains(word).then_some(())
    });
}

/// A number of the report on the second tier.
fn of_tier(outcome: &Outcome, name: &str) -> f64 {
    let path = format!("/tiers/1/{}", name.replace('.', "/"));
    let value = outcome
        .report
        .as_ref()
        .and_then(|report| report.pointer(&path)?.as_f64());
    value.unwrap_or_else(|| panic!("no {path}: {outcome}"))
}

fn word(outcome: &Outcome, name: &str) -> f64 {
    let text = outcome.text();
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value
        .and_then(|it| it.parse().ok())
        .unwrap_or_else(|| panic!("no {name}: {outcome}"))
}

fn masters_are_killed_under_verified_load_and_no_page_is_lost(cluster: &mut Cluster) {
    let kills = setting("UNDERCROFT_TEST_KILLS", 1);
    let mut running = job(48, 500 + 3500 * kills, &tier(cluster)).start();
    wait_for(&mut running, "filled");
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(500));
        let master = cluster.masters()[0];
        cluster.kill(master);
        std::thread::sleep(Duration::from_millis(2700));
        if kills > 1 {
            // It comes back as a replica, so that the next one has one, too.
            cluster.restart(master).expect("it starts again");
            cluster.until_whole().expect("the cluster is whole again");
        }
    }
    let outcome = running.wait().expect(0);
    let (touches, longest) = (word(&outcome, "touches"), word(&outcome, "longest_us"));
    let remote = |name: &str| of_tier(&outcome, &format!("remote.{name}"));
    say(&format!(
        "{kills} master(s) killed: {touches} touches, the longest {:.1} ms, {} above 20 ms (a thread \
         that slept was woken {:.1} ms late at most); {} reads \
         of the cluster, {} hedged, {} late, {} pages stored anew",
        longest / 1000.0,
        word(&outcome, "over_20_ms"),
        word(&outcome, "machine_us") / 1000.0,
        of_tier(&outcome, "reads"),
        remote("reads_hedged"),
        remote("reads_late"),
        remote("pages_mended"),
    ));
    assert!(of_tier(&outcome, "reads") > 1000.0, "{outcome}");
    assert!(
        remote("connections_broken") > 0.0,
        "nothing was killed: {outcome}"
    );
    assert_eq!(outcome.number("counters.lost"), Some(0.0), "{outcome}");
    assert_eq!(remote("pages_lost"), 0.0, "{outcome}");
    // Not counted: how long the machine let threads wait that could run.
    let machine = word(&outcome, "machine_us");
    assert!(
        longest <= LONGEST_US + THREADS * machine,
        "a touch took {longest} us: {outcome}"
    );
    assert_eq!(cluster.keys(), 0, "the run left keys behind");
}

fn pages_that_lose_both_copies_are_poisoned_and_reported_and_no_others(
    cluster: &Cluster,
    folder: &Path,
) {
    let sign = folder.join("sign");
    let mut running = job(16, 200, &tier(cluster)).arg(&sign).start();
    wait_for(&mut running, "waits");
    std::thread::sleep(Duration::from_millis(200)); // what was freed is deleted by now
    let lost = delete_copies_of_some(cluster);
    std::fs::write(&sign, "").expect("a file");
    let outcome = running.wait().expect(0);
    let poisoned = word(&outcome, "lost");
    say(&format!("{lost} pages without a copy: {poisoned} poisoned"));
    // A page that was in memory again does not need its copies.
    assert!(poisoned >= 1.0 && poisoned <= lost as f64, "{outcome}");
    assert_eq!(outcome.number("counters.lost"), Some(poisoned), "{outcome}");
    assert_eq!(
        of_tier(&outcome, "remote.pages_lost"),
        poisoned,
        "{outcome}"
    );
    assert_eq!(cluster.keys(), 0, "the run left keys behind");
}

/// Deletes all copies of eight pages. Returns of how many.
fn delete_copies_of_some(cluster: &Cluster) -> usize {
    let mut keys = Vec::new();
    for port in cluster.masters() {
        keys.extend(cluster.scan(port, "uc:{*").expect("keys"));
    }
    // The last part of a key is the same in both copies of a page.
    let page = |key: &str| key.rsplit(':').next().unwrap_or_default().to_owned();
    let mut pages: Vec<String> = keys.iter().map(|key| page(key)).collect();
    pages.sort();
    pages.dedup();
    let step = (pages.len() / 8).max(1);
    let chosen: Vec<String> = pages.into_iter().step_by(step).take(8).collect();
    for key in keys.iter().filter(|key| chosen.contains(&page(key))) {
        for port in cluster.masters() {
            let _ = cluster.call(port, &["DEL", key]);
        }
    }
    chosen.len()
}

/// A refusal is told before the program starts, with status 125.
fn refused(tier: &str, reason: &str) {
    refused_with(125, tier, reason);
}

fn refused_with(status: i32, tier: &str, reason: &str) {
    let marker = tempfile::tempdir().expect("a folder");
    let started = marker.path().join("started");
    let outcome = Job::new("/usr/bin/touch")
        .arg(&started)
        .limit(64 * MIB)
        .tier("ram")
        .tier(tier)
        .run();
    assert_eq!(outcome.code(), Some(status), "{outcome}");
    let said = format!("{outcome}");
    assert!(said.contains(reason), "no `{reason}`: {said}");
    assert!(!started.exists(), "the program ran");
}

fn access_is_encrypted_and_restricted(cluster: &Cluster, files: &Certificates, folder: &Path) {
    let rules = [
        "on",
        ">right horse",
        "~uc:*",
        "+get",
        "+set",
        "+unlink",
        "+exists",
        "+scan",
        "+time",
        "+info",
        "+ping",
        "+asking",
        "+cluster|slots",
        "+cluster|info",
    ];
    for port in cluster.ports() {
        let words: Vec<&str> = ["ACL", "SETUSER", "swap"]
            .into_iter()
            .chain(rules)
            .collect();
        cluster.call(port, &words).expect("an answer");
    }
    let secret = folder.join("password");
    std::fs::write(&secret, "right horse\n").expect("a file");
    let with = |more: &str| {
        let nodes = Cluster::addresses(&cluster.tls_ports());
        let (ca, cert, key) = (&files.authority, &files.cert, &files.key);
        let [ca, cert, key] = [ca, cert, key].map(|path| path.display());
        format!("redis:{nodes},size=256M,tls={ca},cert={cert},key={key}{more}")
    };
    let user = format!(",user=swap,password-file={}", secret.display());
    let outcome = job(16, 500, &with(&user)).run().expect(0);
    assert!(of_tier(&outcome, "writes") > 1000.0, "{outcome}");
    assert!(
        !format!("{outcome}").contains("right horse"),
        "the password is in the report"
    );
    say(&format!(
        "TLS and a user: {} reads",
        of_tier(&outcome, "reads")
    ));
    std::fs::write(&secret, "wrong horse\n").expect("a file");
    refused(&with(&user), "refuses the user or password");
}

fn clusters_that_cannot_be_used_are_refused(cluster: &Cluster) {
    let plain = format!("redis:{}", Cluster::addresses(&cluster.tls_ports()));
    refused(&plain, "no node answers");
    refused("redis:no-such-host.invalid:6379", "no node answers");
    refused("redis:127.0.0.1:1", "refused");
    for (text, reason) in [
        ("redis:localhost", "HOST:PORT"),
        ("redis", "needs a node"),
        ("redis:h:1,size=1G,size=1G", "twice"),
        ("redis:h:1,shape=pcm", "no setting `shape`"),
        ("redis:h:1,password=x", "password-file"),
        ("redis:h:1,tbw=1T", "does not wear out"),
        ("redis:h:1,price=x", "example: 4.5"),
    ] {
        refused_with(2, text, reason);
    }
    let open = format!("redis:{}", Cluster::addresses(&cluster.ports()));
    let mut other = job(16, 700, &open).start();
    wait_for(&mut other, "filled");
    refused(&open, "is used by another run");
    other.wait().expect(0);
}

/// A master and its replica are gone.
fn half_a_cluster_is_refused(cluster: &mut Cluster) {
    cluster.halve().expect("a part without a master");
    let open = format!("redis:{}", Cluster::addresses(&cluster.ports()));
    refused(&open, "not whole");
}

/// An authority, and a certificate for 127.0.0.1.
fn certificates(folder: &Path) -> Certificates {
    let openssl = |words: &str| {
        let made = std::process::Command::new("openssl")
            .args(words.split(' '))
            .current_dir(folder)
            .output();
        let made = made.expect("openssl runs");
        let said = String::from_utf8_lossy(&made.stderr);
        assert!(made.status.success(), "openssl {words}: {said}");
    };
    openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -keyout ca.key -out ca.pem");
    openssl("req -newkey rsa:2048 -nodes -subj /CN=node -keyout node.key -out node.csr");
    std::fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").expect("a file");
    openssl(
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names \
         -out node.pem",
    );
    Certificates {
        authority: folder.join("ca.pem"),
        cert: folder.join("node.pem"),
        key: folder.join("node.key"),
    }
}
