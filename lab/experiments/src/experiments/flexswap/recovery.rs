//! `flexswap-fig13` (FlexSwap §6.8, figure 13): the limit of a machine is lowered, so that it waits
//! for its pages all the time, and raised again. How soon does it serve as many requests as before?
//!
//! The machine is the one of the live tests, under KVM. A request uses a page of its working set,
//! at random. Beside ours without and with the working set restored there is the kernel's swap,
//! which reads ahead.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use undercroft_base::Bytes;

use super::super::{Lab, progress, retrying};
use super::{Guests, Line, curves, record, said, unreadable};
use crate::results::{Better, Results, Target, median};
use crate::rig::{CommandLine, Finished, Rig, RigError, Running, SwapFile};

const CASE: &str = "a limit raised again";
/// Time between two lines of the monitor.
const LINE_SECONDS: f64 = 0.02;
/// Lines of which the mean is taken, and the part of the requests before that must be reached.
const MEAN: usize = 5;
const REACHED: f64 = 0.9;

struct Sizes {
    set: Bytes,
    low: Bytes,
    high: Bytes,
    /// Of service before the limit is lowered, in which it is low, and after that at most.
    warm: Duration,
    thrash: Duration,
    after: Duration,
}

pub(crate) fn fig13(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let set = Bytes(lab.options.footprint_mib.unwrap_or(lab.pick(32, 256)) << 20);
    let rounds = lab.rounds(1, 3);
    let seconds = |small, real| Duration::from_millis(lab.pick(small, real));
    let sizes = Sizes {
        set,
        low: Bytes(set.0 / 2),
        high: Bytes(set.0 * 2),
        warm: seconds(500, 2000),
        thrash: seconds(500, 3000),
        after: seconds(4000, 10_000),
    };
    let burst = 8192u64;
    results.parameters = BTreeMap::from([
        ("working_set_bytes".into(), sizes.set.0.to_string()),
        ("limit_bytes".into(), sizes.high.0.to_string()),
        ("lowered_limit_bytes".into(), sizes.low.0.to_string()),
        ("words_of_a_request".into(), burst.to_string()),
        ("rounds".into(), rounds.to_string()),
    ]);
    let Some(guests) = Guests::new(lab, "flexswap-fig13", results)? else {
        return Ok(());
    };
    let memory = Bytes((set.0 * 3 / 2).max(48 << 20));
    let plain = ["--prefetch".to_owned(), "none".to_owned()];
    let file = guests.policy("wsr", &[])?;
    let with_file = (plain.clone().into_iter()).chain(["--policy".to_owned(), file]);
    let directory = lab.swap_directory();
    let swap = Bytes(memory.0 * 2);
    let rigs: [Box<dyn Rig>; 3] = [
        guests.rig("4k", memory, plain),
        guests.rig("4k-wsr", memory, with_file),
        Box::new(SwapFile { swap, directory }),
    ];
    let numbers = [memory.0 >> 20, 1, 1, set.0 >> 20, burst].map(|of| of.to_string());
    let command = guests.command(std::iter::once("serve".to_owned()).chain(numbers));
    let mut lines = Vec::new();
    for round in 0..rounds {
        for rig in &rigs {
            let turn = format!("round {} of {rounds}, {}", round + 1, rig.name());
            progress(&format!("flexswap-fig13: {turn}"));
            let setter = (rig.name() != "swapfile").then(|| guests.binary.clone());
            let done = retrying(results, || one(rig.as_ref(), &sizes, &command, &setter))?;
            if let Some((values, line, outcome)) = done {
                if round == 0 {
                    lines.push((rig.name().to_owned(), line));
                }
                record(results, round, rig.name(), CASE, values, outcome);
            }
        }
    }
    let title =
        "a machine whose limit is raised again at 0: requests, of those before it was lowered";
    let labels = ["seconds since the limit was raised", "part"];
    results
        .figures
        .push(curves("recovery", title, labels, CASE, 50, lines));
    compare(results);
    guests.end()
}

/// Sets the limit of a run: by the binary, or of its group.
fn set_limit(
    running: &Running,
    rig: &dyn Rig,
    limit: Bytes,
    setter: &Option<PathBuf>,
) -> Result<(), RigError> {
    let Some(binary) = setter else {
        return running.set_limit(limit);
    };
    let change = format!("memory-max={}", limit.0);
    let mut command = Command::new(binary);
    let command = command.args(["set", &running.id().to_string(), &change]);
    let done = command
        .stdout(std::process::Stdio::null())
        .status()
        .map_err(RigError::failed("start `undercroft set`"))?;
    if !done.success() {
        return Err(unreadable(rig, "undercroft", format!("set: {done}")));
    }
    Ok(())
}

/// A run. Returns its values, and the part of the requests before, from the raise on.
fn one(
    rig: &dyn Rig,
    sizes: &Sizes,
    command: &CommandLine,
    setter: &Option<PathBuf>,
) -> Result<(BTreeMap<String, f64>, Line, Finished), RigError> {
    let mut running = rig.set_up(sizes.high)?.spawn(command)?;
    said(&mut running, rig, "filled", Duration::from_secs(60))?;
    std::thread::sleep(sizes.warm);
    let lowered = running.lines_so_far().len();
    set_limit(&running, rig, sizes.low, setter)?;
    std::thread::sleep(sizes.thrash);
    let raised = running.lines_so_far().len();
    set_limit(&running, rig, sizes.high, setter)?;
    let began = Instant::now();
    while began.elapsed() < sizes.after && running.is_running() {
        std::thread::sleep(Duration::from_millis(20));
    }
    running.stop();
    let what = "the monitor";
    let outcome = running.finish()?.successful(rig.name(), what)?;
    let rates = rates(&outcome.lines);
    if rates.len() < raised + 10 || lowered < 10 || raised < lowered + 10 {
        return Err(unreadable(rig, what, format!("only {} lines", rates.len())));
    }
    let before = median(&rates[2..lowered - 2]);
    let thrash = median(&rates[(lowered + raised) / 2..raised - 1]);
    let after: Line = rates[raised..].iter().map(|rate| rate / before).collect();
    let means: Vec<f64> = (after.windows(MEAN))
        .map(|some| some.iter().sum::<f64>() / MEAN as f64)
        .collect();
    let reached = means.iter().position(|mean| *mean >= REACHED);
    let reached = reached.unwrap_or(means.len()) + MEAN - 1;
    let lost: f64 = after.iter().map(|part| (1.0 - part).max(0.0)).sum();
    let values = BTreeMap::from([
        ("before_per_second".to_owned(), before),
        ("thrashing_per_second".to_owned(), thrash),
        ("recovery_seconds".to_owned(), reached as f64 * LINE_SECONDS),
        ("lost_seconds".to_owned(), lost * LINE_SECONDS),
    ]);
    Ok((values, after, outcome))
}

/// Requests a second between the lines of the monitor; nothing for its other lines.
fn rates(lines: &[String]) -> Vec<f64> {
    let points: Vec<[f64; 2]> = lines
        .iter()
        .filter_map(|line| {
            let mut words = line.split(' ').map(str::parse::<f64>);
            Some([words.next()?.ok()?, words.next()?.ok()?])
        })
        .collect();
    let rate = |pair: &[[f64; 2]]| (pair[1][1] - pair[0][1]) / (pair[1][0] - pair[0][0]);
    points.windows(2).map(rate).collect()
}

fn compare(results: &mut Results) {
    for (metric, must) in [("recovery_seconds", 0.5), ("lost_seconds", 0.5)] {
        let target = Some(Target::new(must, None));
        results.compare(CASE, metric, ("4k-wsr", "4k"), Better::Lower, target);
        results.compare(CASE, metric, ("4k-wsr", "swapfile"), Better::Lower, None);
        results.compare(CASE, metric, ("4k", "swapfile"), Better::Lower, None);
    }
    for note in [
        "FlexSwap, §6.8, figure 13 (Redis under memtier): without restoring 4k takes longest, with \
         it \"recovers performance almost as fast as Linux\"; pages of 2 MiB are the fastest. The \
         text gives no seconds",
        "lost_seconds: time of service as before that was lost from the raise on",
    ] {
        results.notes.push(note.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::{Bytes, Nanos};
    use undercroft_sim::setup::{Initial, Memory, Setup, SimRoom};
    use undercroft_sim::sharing::{Sharing, Terms};
    use undercroft_sim::sweep::streams_of;
    use undercroft_sim::{open, simulate};

    /// A client whose limit is lowered while another is there, and raised when that ends. Returns
    /// its faults, of which what came back by a policy are none.
    fn faults(reclaim: &str) -> u64 {
        let part = |client: u64, refs: u64| {
            format!("uniform:writes=0,pages=6500,refs={refs},client={client},seed={client}")
        };
        let trace = open::open(&[part(0, 150_000), part(1, 20_000)].join("+")).expect("a trace");
        let streams = streams_of(&trace, 4096).expect("pages");
        let terms = |seconds: u64| Terms {
            weight: 1,
            least: Bytes(1 << 20),
            most: Bytes(64 << 20),
            bound: None,
            demand: None,
            comes: Nanos(seconds * 1_000_000_000),
            reference_time: Nanos(100_000),
        };
        let setup = Setup {
            memory: Memory::Bytes(Bytes(24 << 20)),
            reclaim: reclaim.to_owned(),
            tiers: vec!["sata-ssd".parse().expect("a tier")],
            room: SimRoom::Ahead,
            initial: Initial::Stored,
            sharing: Some(Sharing {
                terms: vec![terms(0), terms(5)],
                by_curves: false,
                every: Nanos(1_000_000_000),
                admission: true,
            }),
            ..Setup::default()
        };
        let report = simulate(&streams, &setup, &mut |_| ()).expect("it runs");
        report.clients[0].misses
    }

    /// The same file as live: what left while the limit was low comes back before it is needed.
    #[test]
    fn a_working_set_comes_back_by_wsr_in_the_lab() {
        let folder = tempfile::tempdir().expect("a directory");
        let Some(file) = crate::policy_file::of_test(folder.path(), "wsr", &[]) else {
            return;
        };
        let [without, with] = ["lru".to_owned(), format!("lru+{file}")].map(|of| faults(&of));
        println!("{without} faults without, {with} with the working set restored");
        // Of its 6500 pages 3000 have room while the limit is low, and 6000 before and after.
        assert!(with + 1500 < without, "{with} of {without}");
    }
}
