//! The demo's workload: fill the store, read and write values by Zipf's law, then read every value
//! back. All bytes are checked.
//!
//! A value is a function of its key and version, so the demo needs no copy of the data to verify
//! it.

use std::fmt::Write as _;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hdrhistogram::Histogram;

use undercroft_resp::{Client, Reply};
use undercroft_seeded::{Random, Zipf, mix};

/// Bytes of one value: with its header it fills one 4 KiB allocation of redis.
pub(super) const VALUE_BYTES: usize = 4000;
/// Connections of the measured part. Each has keys of its own.
pub(super) const CONNECTIONS: usize = 4;
/// Requests in flight while loading and verifying.
const PIPELINE: u64 = 32;
/// Requests for each one that is a write.
const WRITE_EVERY: u64 = 10;
/// Skew of YCSB's zipfian law.
const THETA: f64 = 0.99;

const WORDS: [&str; 32] = [
    "amber", "basalt", "cedar", "delta", "ember", "fjord", "granite", "harbor", "indigo",
    "juniper", "kestrel", "lagoon", "meadow", "nimbus", "opal", "pebble", "quartz", "raven",
    "saffron", "thistle", "umber", "valley", "willow", "xenon", "yarrow", "zephyr", "cobalt",
    "drift", "falcon", "hazel", "marble", "onyx",
];

/// The result of one setting.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Requests of the measured part in one second.
    pub ops_per_second: f64,
    /// Time of one request, in nanoseconds.
    pub latency: Histogram<u64>,
    /// Seconds to fill the store.
    pub load_seconds: f64,
    /// Seconds to read everything back.
    pub verify_seconds: f64,
    /// Values of the final pass that were equal to the last byte.
    pub verified: u64,
    /// Values that were different (in both passes) or missing.
    pub wrong: u64,
}

/// Which part is running, for the progress bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Filling the store.
    Load,
    /// The measured requests.
    Measure,
    /// Reading everything back.
    Verify,
}

/// How much to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Values in the store.
    pub keys: u64,
    /// Requests of the measured part.
    pub ops: u64,
}

/// Runs the three phases against one store: the measured one over all of `clients` at once, the
/// others over the first.
///
/// * `progress`: called with the phase and how much of it is done, at most once a pipeline.
///
/// Errors: a signal asked for the end, the connection broke, or the store refused a request. Wrong
/// bytes are counted, not errors.
pub(super) fn run(
    clients: &mut [Client],
    plan: Plan,
    progress: &mut dyn FnMut(Phase, u64),
) -> io::Result<Measured> {
    let began = Instant::now();
    load(&mut clients[0], plan, progress)?;
    let load_seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let (latency, versions, wrong_seen) = measure(clients, plan, progress)?;
    let seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let verified = verify(&mut clients[0], &versions, progress)?;
    Ok(Measured {
        ops_per_second: plan.ops as f64 / seconds,
        latency,
        load_seconds,
        verify_seconds: began.elapsed().as_secs_f64(),
        verified,
        wrong: wrong_seen + (plan.keys - verified),
    })
}

fn load(client: &mut Client, plan: Plan, progress: &mut dyn FnMut(Phase, u64)) -> io::Result<()> {
    let mut value = String::with_capacity(2 * VALUE_BYTES);
    for start in (0..plan.keys).step_by(PIPELINE as usize) {
        check()?;
        let end = (start + PIPELINE).min(plan.keys);
        for key in start..end {
            write_value(key, 0, &mut value);
            client.queue(&[b"SET", &key_bytes(key), value.as_bytes()])?;
        }
        client.flush()?;
        for _ in start..end {
            expect_ok(client.receive()?)?;
        }
        progress(Phase::Load, end);
    }
    Ok(())
}

/// The measured part, over all connections at once. Returns latencies, the version of every key,
/// and how many values were wrong.
fn measure(
    clients: &mut [Client],
    plan: Plan,
    progress: &mut dyn FnMut(Phase, u64),
) -> io::Result<(Histogram<u64>, Vec<u32>, u64)> {
    let of = clients.len() as u64;
    let (first, others) = clients
        .split_first_mut()
        .ok_or(io::ErrorKind::NotConnected)?;
    let done = AtomicU64::new(0);
    let parts: io::Result<Vec<Part>> = std::thread::scope(|scope| {
        let running: Vec<_> = (1..of)
            .zip(others)
            .map(|(number, client)| {
                let mut part = Part::new(number, of, plan);
                let done = &done;
                scope.spawn(move || part.run(client, done, &mut |_| ()).map(|()| part))
            })
            .collect();
        let mut part = Part::new(0, of, plan);
        let own = part.run(first, &done, &mut |done| progress(Phase::Measure, done));
        let mut parts = vec![own.map(|()| part)];
        parts.extend(
            running
                .into_iter()
                .map(|part| part.join().expect("no panic")),
        );
        parts.into_iter().collect()
    });
    progress(Phase::Measure, plan.ops);
    let mut parts = parts?.into_iter();
    let mut all = parts.next().ok_or(io::ErrorKind::NotConnected)?;
    for part in parts {
        all.latency += part.latency;
        all.wrong += part.wrong;
        for (version, other) in all.versions.iter_mut().zip(part.versions) {
            *version += other; // of each key, one part has another version than 0
        }
    }
    Ok((all.latency, all.versions, all.wrong))
}

/// The share of a connection in the measured part: it has every `of`-th key.
struct Part {
    number: u64,
    of: u64,
    ops: u64,
    zipf: Keys,
    versions: Vec<u32>,
    latency: Histogram<u64>,
    wrong: u64,
}

impl Part {
    fn new(number: u64, of: u64, plan: Plan) -> Part {
        Part {
            number,
            of,
            ops: plan.ops / of + u64::from(number < plan.ops % of),
            zipf: Keys::new(plan.keys / of, 42 + number),
            versions: vec![0; plan.keys as usize],
            // Grows as needed; `saturating_record` would not.
            latency: Histogram::new(3).expect("three digits are valid"),
            wrong: 0,
        }
    }

    /// * `done`: requests of all parts.
    fn run(
        &mut self,
        client: &mut Client,
        done: &AtomicU64,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        let mut value = String::with_capacity(2 * VALUE_BYTES);
        for op in 0..self.ops {
            let key = self.zipf.next() * self.of + self.number;
            let version = &mut self.versions[key as usize];
            let write = op % WRITE_EVERY == WRITE_EVERY - 1;
            *version += u32::from(write);
            write_value(key, *version, &mut value);
            let name = key_bytes(key);
            let began = Instant::now();
            let reply = if write {
                client.call(&[b"SET", &name, value.as_bytes()])?
            } else {
                client.call(&[b"GET", &name])?
            };
            let took = began.elapsed().as_nanos() as u64;
            self.latency
                .record(took)
                .map_err(|error| io::Error::other(error.to_string()))?;
            if write {
                expect_ok(reply)?
            } else {
                self.wrong += u64::from(!is_value(&reply, &value))
            }
            let all = done.fetch_add(1, Ordering::Relaxed);
            if op % 256 == 0 {
                check()?;
                progress(all);
            }
        }
        Ok(())
    }
}

/// Reads every value back. Returns how many were equal to the last byte.
fn verify(
    client: &mut Client,
    versions: &[u32],
    progress: &mut dyn FnMut(Phase, u64),
) -> io::Result<u64> {
    let keys = versions.len() as u64;
    let mut value = String::with_capacity(2 * VALUE_BYTES);
    let mut equal = 0;
    for start in (0..keys).step_by(PIPELINE as usize) {
        check()?;
        let end = (start + PIPELINE).min(keys);
        for key in start..end {
            client.queue(&[b"GET", &key_bytes(key)])?;
        }
        client.flush()?;
        for key in start..end {
            write_value(key, versions[key as usize], &mut value);
            equal += u64::from(is_value(&client.receive()?, &value));
        }
        progress(Phase::Verify, end);
    }
    Ok(equal)
}

fn check() -> io::Result<()> {
    if undercroft_rig::interrupt::requested() {
        Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted"))
    } else {
        Ok(())
    }
}

fn expect_ok(reply: Reply) -> io::Result<()> {
    match reply {
        Reply::Status(_) => Ok(()),
        Reply::Failure(why) => Err(io::Error::other(format!(
            "the store refused a value: {why}"
        ))),
        other => Err(io::Error::other(format!(
            "the store answered a write with {other:?}"
        ))),
    }
}

fn is_value(reply: &Reply, value: &str) -> bool {
    matches!(reply, Reply::Bytes(Some(bytes)) if bytes == value.as_bytes())
}

fn key_bytes(key: u64) -> Vec<u8> {
    format!("item:{key:010}").into_bytes()
}

/// The value of a key at a version: records of a made-up log, which compress like such text.
fn write_value(key: u64, version: u32, out: &mut String) {
    let mut random = Random::new(mix(key) ^ u64::from(version) << 40);
    out.clear();
    while out.len() < VALUE_BYTES {
        let bits = random.bits();
        let word = |shift: u32| WORDS[(bits >> shift) as usize % WORDS.len()];
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "{{\"id\":{},\"name\":\"{}-{:04x}\",\"place\":\"{}\",\"count\":{},\"state\":\"{}\"}}",
            random.bits() % 10_000_000,
            word(0),
            bits >> 48,
            word(5),
            (bits >> 20) & 1023,
            word(10),
        );
    }
    out.truncate(VALUE_BYTES);
}

/// Keys by Zipf's law, with the hot ones spread over the key space.
struct Keys {
    random: Random,
    law: Zipf,
    count: u64,
}

impl Keys {
    fn new(count: u64, seed: u64) -> Keys {
        Keys {
            random: Random::new(seed),
            law: Zipf::new(count, THETA),
            count,
        }
    }

    fn next(&mut self) -> u64 {
        mix(self.law.rank(&mut self.random)) % self.count
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;

    use super::super::bundled;
    use super::*;

    #[test]
    fn values_depend_on_key_and_version_and_have_one_size() {
        let of = |key, version| {
            let mut value = String::new();
            write_value(key, version, &mut value);
            value
        };
        assert_eq!(of(7, 1), of(7, 1));
        assert_eq!(of(7, 1).len(), VALUE_BYTES);
        assert_ne!(of(7, 1), of(7, 2));
        assert_ne!(of(7, 1), of(8, 1));
    }

    /// Runs the workload against the bundled store behind `between`, which may change replies.
    fn run_against(between: impl Fn(u64, &mut Vec<u8>) + Send + 'static) -> Measured {
        let (near, far) = UnixStream::pair().expect("a pair of sockets");
        let (inner_near, inner_far) = UnixStream::pair().expect("a pair of sockets");
        let store = std::thread::spawn(move || {
            bundled::converse(&Mutex::new(bundled::Store::new()), inner_far)
        });
        let proxy = std::thread::spawn(move || {
            let mut store = Client::over(inner_near)?;
            let mut input = io::BufReader::new(far.try_clone()?);
            let mut out = far;
            let mut replies = 0;
            while let Some(words) = undercroft_resp::read_request(&mut input)? {
                let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
                let mut reply = store.call(&words)?;
                if let Reply::Bytes(Some(value)) = &mut reply {
                    between(replies, value);
                    replies += 1;
                }
                undercroft_resp::write_reply(&mut out, &reply)?;
            }
            io::Result::Ok(())
        });
        let mut clients = [Client::over(near).expect("a client")];
        let plan = Plan {
            keys: 300,
            ops: 1000,
        };
        let measured = run(&mut clients, plan, &mut |_, _| {}).expect("it runs");
        drop(clients);
        proxy.join().expect("no panic").expect("no error");
        assert!(
            matches!(store.join(), Ok(Ok(false))),
            "the store ended otherwise than by its client leaving"
        );
        measured
    }

    #[test]
    fn workload_verifies_every_value_of_an_honest_store() {
        let measured = run_against(|_, _| {});
        assert_eq!((measured.verified, measured.wrong), (300, 0));
        assert_eq!(measured.latency.len(), 1000);
        assert!(
            measured.latency.value_at_quantile(0.5) > 100,
            "a request takes longer than 100 ns"
        );
    }

    #[test]
    fn workload_notices_one_wrong_byte_in_either_pass() {
        // 900 of the 1000 requests read; the final pass follows.
        for spoiled in [450, 900 + 123] {
            let measured = run_against(move |reply, value| {
                if reply == spoiled {
                    value[VALUE_BYTES - 1] ^= 1;
                }
            });
            assert_eq!(measured.wrong, 1, "reply {spoiled}");
        }
    }

    #[test]
    fn zipf_is_skewed_and_in_range() {
        let mut zipf = Keys::new(1000, 1);
        let mut counts = vec![0u32; 1000];
        for _ in 0..100_000 {
            counts[zipf.next() as usize] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let top: u32 = counts[..100].iter().sum();
        assert!(
            (55_000..85_000).contains(&top),
            "the hottest tenth got {top} of 100000"
        );
        assert!(
            counts[0] > 10 * counts[100],
            "{} {}",
            counts[0],
            counts[100]
        );
    }
}
