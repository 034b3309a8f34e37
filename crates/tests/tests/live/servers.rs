//! redis and memcached in a third of their memory: every value is read back, snapshots are exact, a
//! reload is equal.

use std::time::{Duration, Instant};

use undercroft_tests::{
    Client, Job, MIB, Memcached, Reply, Running, anonymous_kib, beside_others, find, free_port,
    plain_only, rounds, say, skip, value_of,
};

const PATIENCE: Duration = Duration::from_secs(20);
/// Keys of memcached.
const CACHED: u64 = 16_000;
const PIPELINE: u64 = 200;

/// Keys of redis.
fn keys() -> u64 {
    rounds(20_000, 32_000)
}

fn value_length(key: u64) -> usize {
    700 + (key * 7919 % 800) as usize
}

fn key_name(key: u64) -> Vec<u8> {
    format!("key:{key}").into_bytes()
}

fn redis_job(redis: &std::path::Path, port: u16, folder: &std::path::Path) -> Job {
    Job::new(redis)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
        .args([
            "--enable-debug-command",
            "local",
            "--dbfilename",
            "dump.rdb",
        ])
        .arg("--dir")
        .arg(folder)
}

fn store(redis: &mut Client, keys: std::ops::Range<u64>, version: u64) {
    let mut from = keys.start;
    while from < keys.end {
        let to = (from + PIPELINE).min(keys.end);
        for key in from..to {
            let value = value_of(key, version, value_length(key));
            redis.send(&[b"SET", &key_name(key), &value]).expect("SET");
        }
        for key in from..to {
            let reply = redis.receive().expect("an answer");
            assert_eq!(reply, Reply::Status("OK".into()), "SET of key {key}");
        }
        from = to;
    }
}

fn verify(redis: &mut Client, what: &str, keys: std::ops::Range<u64>, version: u64) {
    let mut from = keys.start;
    while from < keys.end {
        let to = (from + PIPELINE).min(keys.end);
        for key in from..to {
            redis.send(&[b"GET", &key_name(key)]).expect("GET");
        }
        for key in from..to {
            let expected = value_of(key, version, value_length(key));
            match redis.receive().expect("an answer") {
                Reply::Bytes(Some(found)) if found == expected => {}
                Reply::Bytes(Some(found)) => {
                    let zeros = found.iter().filter(|&&byte| byte == 0).count();
                    let old = found == value_of(key, version.wrapping_sub(1), value_length(key));
                    panic!(
                        "{what}: key {key} is wrong: {} bytes of {}, {zeros} zeros, older version: {old}",
                        found.len(),
                        expected.len()
                    );
                }
                other => panic!("{what}: key {key}: {other:?}"),
            }
        }
        from = to;
    }
}

fn info(redis: &mut Client, field: &str) -> String {
    let Ok(Reply::Bytes(Some(text))) = redis.call(&[b"INFO"]) else {
        panic!("no answer to INFO");
    };
    let text = String::from_utf8_lossy(&text).into_owned();
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .unwrap_or_else(|| panic!("no {field} in INFO"))
        .trim()
        .to_owned()
}

fn server_process(run: &Running, name: &str) -> i32 {
    run.tree()
        .into_iter()
        .find(|process| {
            process
                .command
                .split(' ')
                .next()
                .is_some_and(|word| word.ends_with(name))
        })
        .unwrap_or_else(|| panic!("no {name} in the tree"))
        .pid
}

/// Loads, verifies, snapshots under writes, reloads. Returns the anonymous memory after the load.
///
/// * `limit`: bytes and a tier; `None` is a plain run, to measure.
fn redis_session(redis: &std::path::Path, limit: Option<(u64, &str)>) -> u64 {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let port = free_port();
    let mut job = redis_job(redis, port, folder.path());
    if let Some((bytes, tier)) = limit {
        let spill = folder.path().join("spill").display().to_string();
        job = job.limit(bytes).tier(&tier.replace("SPILL", &spill));
    }
    let run = job.start();
    let begin = Instant::now();
    let mut client = Client::to_port(port, PATIENCE)
        .unwrap_or_else(|error| panic!("redis does not listen: {error}; {}", run.errors()));
    store(&mut client, 0..keys(), 1);
    let footprint = anonymous_kib(server_process(&run, "redis-server")) * 1024;
    verify(&mut client, "after the load", 0..keys(), 1);

    // When the snapshot is taken, exactly the first third has version 2. The rest changes while it
    // is being written.
    let third = keys() / 3;
    store(&mut client, 0..third, 2);
    let reply = client.call(&[b"BGSAVE"]).expect("an answer");
    assert!(
        matches!(&reply, Reply::Status(text) if text.contains("started")),
        "{reply:?}"
    );
    store(&mut client, third..keys(), 2);
    let saving = Instant::now();
    while info(&mut client, "rdb_bgsave_in_progress") != "0" {
        assert!(saving.elapsed() < Duration::from_secs(60), "BGSAVE hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(info(&mut client, "rdb_last_bgsave_status"), "ok");
    verify(&mut client, "after BGSAVE", 0..keys(), 2);

    // A plain redis reads the snapshot.
    let copy = tempfile::tempdir().expect("a scratch folder");
    std::fs::copy(folder.path().join("dump.rdb"), copy.path().join("dump.rdb")).expect("the dump");
    let port = free_port();
    let reader = redis_job(redis, port, copy.path()).start();
    let mut plain = Client::to_port(port, PATIENCE).expect("the plain redis listens");
    wait_until_loaded(&mut plain);
    assert_eq!(
        plain.call(&[b"DBSIZE"]).expect("an answer"),
        Reply::Number(keys() as i64)
    );
    verify(&mut plain, "in the snapshot", 0..third, 2);
    verify(&mut plain, "in the snapshot", third..keys(), 1);
    drop(reader);

    // Save and load within the server: the digest over all data must not change.
    let digest = client.call(&[b"DEBUG", b"DIGEST"]).expect("an answer");
    let reply = client.call(&[b"DEBUG", b"RELOAD"]).expect("an answer");
    assert_eq!(reply, Reply::Status("OK".into()), "DEBUG RELOAD");
    assert_eq!(
        client.call(&[b"DEBUG", b"DIGEST"]).expect("an answer"),
        digest
    );
    verify(&mut client, "after the reload", 0..keys(), 2);

    client.send(&[b"SHUTDOWN", b"NOSAVE"]).expect("SHUTDOWN");
    let outcome = run.wait().expect(0);
    if let Some((bytes, tier)) = limit {
        say(&format!(
            "redis: {} values right five times and the snapshot exact in {} MiB on {tier}, {:.1?}",
            keys(),
            bytes / MIB,
            begin.elapsed()
        ));
        outcome.expect_swapping(5000.0);
    }
    footprint
}

fn wait_until_loaded(redis: &mut Client) {
    let begin = Instant::now();
    while info(redis, "loading") != "0" {
        assert!(begin.elapsed() < PATIENCE, "loading hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn redis_keeps_every_value_and_snapshots_exactly() {
    let Some(redis) = find("redis-server") else {
        return skip("no redis-server; on Debian: apt-get install redis-server");
    };
    let _turn = beside_others();
    let footprint = redis_session(&redis, None);
    assert!(
        footprint > rounds(20, 40) * MIB,
        "only {footprint} bytes of anonymous memory"
    );
    redis_session(&redis, Some((footprint * 35 / 100, "ram")));
    redis_session(&redis, Some((footprint / 2, "file:SPILL,size=2G")));
    if plain_only() {
        skip("everything ran plain: UNDERCROFT_TEST_PLAIN is set");
    }
}

fn memcached_session(memcached: &std::path::Path, limit: Option<u64>) -> u64 {
    let port = free_port();
    let mut job = Job::new(memcached)
        .args(["-p", &port.to_string(), "-U", "0", "-l", "127.0.0.1"])
        .args(["-m", "256", "-t", "2", "-u", "root"]);
    if let Some(bytes) = limit {
        job = job.limit(bytes).tier("ram");
    }
    let run = job.start();
    let connect = || Memcached::connect(port, PATIENCE).expect("memcached listens");
    let check = |what: &str, version: u64, part: u64| {
        let mut client = connect();
        for key in (part..CACHED).step_by(2) {
            let found = client.get(&format!("k{key}")).expect("an answer");
            let expected = value_of(key, version, value_length(key));
            assert!(
                found.as_ref() == Some(&expected),
                "{what}: key {key} is wrong or missing"
            );
        }
    };
    // Two connections at once, so that two of its threads fault at the same time.
    let at_once = |job: &(dyn Fn(u64) + Sync)| {
        std::thread::scope(|scope| {
            scope.spawn(|| job(0));
            scope.spawn(|| job(1));
        });
    };
    for version in [1, 2] {
        at_once(&|part| {
            let mut client = connect();
            for key in (part..CACHED).step_by(2) {
                let value = value_of(key, version, value_length(key));
                client.set(&format!("k{key}"), &value).expect("STORED");
            }
        });
        at_once(&|part| check("read back", version, part));
    }
    let footprint = anonymous_kib(server_process(&run, "memcached")) * 1024;
    run.signal(rustix::process::Signal::TERM);
    let outcome = run.wait();
    // A signal tells memcached to end, and it ends with 0. The signal may also end `undercroft run`
    // itself.
    assert!(matches!(outcome.code(), Some(0 | 143)), "{outcome}");
    if limit.is_some() {
        say(&format!(
            "memcached: {CACHED} values right twice, {:.1?}",
            outcome.wall
        ));
        outcome.expect_swapping(2000.0);
    }
    footprint
}

#[test]
fn memcached_keeps_every_value() {
    let Some(memcached) = find("memcached") else {
        return skip("no memcached; on Debian: apt-get install memcached");
    };
    let _turn = beside_others();
    let footprint = memcached_session(&memcached, None);
    assert!(
        footprint > 20 * MIB,
        "only {footprint} bytes of anonymous memory"
    );
    memcached_session(&memcached, Some(footprint * 35 / 100));
    if plain_only() {
        skip("everything ran plain: UNDERCROFT_TEST_PLAIN is set");
    }
}
