//! Storage of the daemon in slabs: what one run does not use is lent to another, and comes back.
//! Every byte is right, and all runs together never have more than there is.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{Job, MIB, Running, build, find, rounds, say, skip, turn};

use crate::daemon::Daemon;

const SIZE: u64 = 320 * MIB;
const GRANT: u64 = 64 * MIB;

/// DRAM of each run.
const LIMIT: u64 = 24 * MIB;

/// Bytes that a file system may count of a file for its own books.
const BOOKS: u64 = MIB / 4;

fn start() -> Daemon {
    Daemon::start_with(&[], |folder| {
        format!(
            "memory = \"96M\"\n[[tier]]\nspec = \"file:{folder},size={SIZE}\"\ngrant = \"{GRANT}\"\n\
             [class.default]\nmemory_max = \"{LIMIT}\"\n"
        )
    })
}

/// A program of this many MiB that verifies and rewrites its memory, at random.
fn program(daemon: &Daemon, mib: u64, seconds: u64, options: &[&str]) -> Running {
    let evidence = daemon.folder.path().join("evidence");
    Job::new(build("holdcheck"))
        .args([
            &mib.to_string(),
            &evidence.display().to_string(),
            &seconds.to_string(),
        ])
        .options(["--daemon"])
        .options(options)
        .env("UNDERCROFT_DIR", daemon.folder.path())
        .start()
}

/// Space that the nameless files of a run take, by its processes.
fn space(run: &Running, folder: &Path) -> u64 {
    let folder = folder.display().to_string();
    let tree = run.tree();
    let folders = tree.iter().map(|it| format!("/proc/{}/fd", it.pid));
    let fds = folders.flat_map(|path| std::fs::read_dir(path).into_iter().flatten().flatten());
    let mut files: Vec<(u64, u64)> = fds
        .filter(|fd| {
            let to = std::fs::read_link(fd.path()).unwrap_or_default();
            let to = to.display().to_string();
            to.starts_with(&folder) && to.ends_with("(deleted)")
        })
        .filter_map(|fd| std::fs::metadata(fd.path()).ok())
        .filter(|it| it.is_file())
        .map(|it| (it.ino(), it.blocks() * 512))
        .collect();
    files.sort_unstable();
    files.dedup_by_key(|(number, _)| *number);
    files
        .into_iter()
        .map(|(_, bytes)| bytes.saturating_sub(BOOKS))
        .sum()
}

/// The status of the daemon, if it answers. In all, runs may take and have no more than there is.
fn look(daemon: &Daemon, runs: &[&Running]) -> Option<serde_json::Value> {
    let spaces: u64 = runs
        .iter()
        .map(|run| space(run, daemon.folder.path()))
        .sum();
    assert!(spaces <= SIZE, "{spaces} of {SIZE} on disk");
    let status = daemon.status()?;
    let given = status["tiers"][0]["granted_bytes"].as_u64()?;
    assert!(given <= SIZE, "{given} of {SIZE} are given: {status:#}");
    let each = status["clients"].as_array()?.iter();
    let may = |client: &serde_json::Value| {
        let number = |name: &str| client["storage"][0][name].as_u64().expect("a figure");
        number("quota").max(number("held"))
    };
    let sum: u64 = each.map(may).sum();
    assert!(sum <= SIZE, "{sum} of {SIZE}: {status:#}");
    Some(status)
}

/// Storage of a run: quota, space, and what its pages take.
fn storage(status: &serde_json::Value, run: &Running) -> Option<[u64; 3]> {
    let clients = status["clients"].as_array()?;
    let mine = clients.iter().find(|it| it["pid"] == run.keeper())?;
    let of = |name: &str| mine["storage"][0][name].as_u64();
    Some([of("quota")?, of("held")?, of("used")?])
}

fn no_wrong_byte(daemon: &Daemon) {
    let evidence = std::fs::read_to_string(daemon.folder.path().join("evidence"));
    assert!(evidence.is_err(), "a wrong byte: {evidence:?}");
}

fn none_is_left(daemon: &Daemon) {
    let begun = Instant::now();
    while look(daemon, &[]).expect("a status")["tiers"][0]["granted_bytes"] != 0 {
        assert!(begun.elapsed() < Duration::from_secs(5), "storage is left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A run needs more than three times its grant, and an idle one nothing. Then a second one grows,
/// and a third comes: they have what the first one does not use.
#[test]
fn a_run_has_what_others_do_not_use_and_gives_back_what_is_free() {
    let name = "a_run_has_what_others_do_not_use_and_gives_back_what_is_free";
    turn!(one_at_a_time, "a plain run has no daemon");
    let daemon = start();
    let mut idle = program(&daemon, 8, 60, &[]);
    idle.until("the idle run", 20, |run| {
        storage(&look(&daemon, &[run])?, run)
    });
    let mut first = program(&daemon, 224, 8, &[]);
    let [quota, ..] = first.until("three times the grant", 20, |run| {
        let found = storage(&look(&daemon, &[&idle, run])?, run)?;
        (found[2] >= 3 * GRANT).then_some(found)
    });
    assert!(quota <= SIZE - GRANT, "the idle run is granted {GRANT}");
    let outcome = first.wait().expect(0).expect_swapping(1000.0);
    no_wrong_byte(&daemon);
    // How often its tier was full, and how long it was.
    let refused = outcome.number("counters.refused_store").expect("a counter");
    let stall = outcome.number("stall_seconds").expect("a time");
    say(&format!(
        "{name}: {} MiB; {refused} pages refused, {stall} s stall",
        quota / MIB
    ));
    assert_eq!(refused, 0.0, "its tier was full: {outcome}");
    idle.signal(Signal::TERM);
    idle.wait().expect(143);
    none_is_left(&daemon);
}

/// All of a tier is lent to one run. A second one comes and grows, and then a third comes: what
/// the first does not use is theirs, and what they do not use of that comes back.
#[test]
fn what_was_lent_comes_back_when_others_grow_and_come() {
    let name = "what_was_lent_comes_back_when_others_grow_and_come";
    turn!(beside_others, "a plain run has no daemon");
    let daemon = start();
    let mut first = program(&daemon, 88, 60, &[]);
    first.until("all that there is", 20, |run| {
        let found = storage(&look(&daemon, &[run])?, run)?;
        (found[0] == SIZE && found[2] >= 50 * MIB).then_some(())
    });
    let begun = Instant::now();
    let mut second = program(&daemon, 112, 8, &[]);
    second.until("its grant", 20, |run| {
        storage(&look(&daemon, &[&first, run])?, run)
    });
    let came = begun.elapsed();
    let [quota, ..] = second.until("more than its grant", 20, |run| {
        let found = storage(&look(&daemon, &[&first, run])?, run)?;
        (found[2] >= 80 * MIB).then_some(found)
    });
    let begun = Instant::now();
    let mut third = program(&daemon, 8, 3, &[]);
    let found = third.until("its grant", 20, |run| {
        storage(&look(&daemon, &[&first, &second, run])?, run)
    });
    assert!(found[0] >= GRANT, "{found:?}");
    say(&format!(
        "{name}: the second came after {came:.0?} and had {} MiB, the third after {:.0?}",
        quota / MIB,
        begun.elapsed()
    ));
    third.wait().expect(0);
    second.wait().expect(0).expect_swapping(1000.0);
    first.until("what is left", 20, |run| {
        let found = storage(&look(&daemon, &[run])?, run)?;
        (found[0] == SIZE).then_some(())
    });
    first.signal(Signal::TERM);
    first.wait().expect(143).expect_swapping(1000.0);
    no_wrong_byte(&daemon);
    none_is_left(&daemon);
}

/// Kills a run's manager once its pages take this much of its file.
fn kill_manager(daemon: &Daemon, run: &Running, other: &Running, mib: u64) {
    let begun = Instant::now();
    loop {
        let found = look(daemon, &[run, other]).and_then(|status| storage(&status, run));
        if found.is_some_and(|[_, _, used]| used >= mib * MIB) {
            break;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{found:?}: {}",
            run.errors()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut tree = run.tree().into_iter();
    let manager = tree.find(|it| it.command.contains("undercroft: manager of"));
    let manager = manager.and_then(|it| Pid::from_raw(it.pid));
    kill_process(manager.expect("a manager"), Signal::KILL).expect("it lives");
    look(daemon, &[run, other]);
}

/// Two runs grow at once. Their managers are killed, and so is the daemon, at any moment of it.
#[test]
fn managers_and_daemon_die_while_storage_grows() {
    let name = "managers_and_daemon_die_while_storage_grows";
    turn!(beside_others, "a plain run has no daemon");
    let mut daemon = start();
    let options = ["--takeovers-max", "9"];
    let runs = [144, 152].map(|mib| program(&daemon, mib, 12, &options));
    for used in [40, 70, 100] {
        kill_manager(&daemon, &runs[0], &runs[1], used);
        kill_manager(&daemon, &runs[1], &runs[0], used);
        daemon.die_and_come_back();
    }
    let begun = Instant::now();
    let all = |status: &serde_json::Value| status["clients"].as_array().map(Vec::len) == Some(2);
    while !look(&daemon, &[&runs[0], &runs[1]])
        .as_ref()
        .is_some_and(all)
    {
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "both claim what they have"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    for run in runs {
        let outcome = run.wait().expect(0).expect_swapping(1000.0);
        let taken = outcome.number("takeovers.count").expect("a counter");
        say(&format!("{name}: {taken} managers took over"));
        assert_eq!(taken, 3.0, "{outcome}");
    }
    no_wrong_byte(&daemon);
    none_is_left(&daemon);
}

/// Time in which a file follows what it holds.
const FOLLOWS: Duration = Duration::from_secs(5);

/// Most space of a file that holds this.
fn bound(held: u64) -> u64 {
    2 * held + 64 * MIB
}

/// Bytes of pages that the file of a run without a daemon holds.
fn held(run: &Running) -> Option<u64> {
    let status = run.status()?;
    let mut tiers = status["tiers"].as_array()?.iter();
    let file = tiers.find(|tier| tier["kind"] == "file")?;
    file["logical_bytes"].as_u64()
}

/// Waits until there is `done`. At every moment until then the file has no more than its bound for
/// what it has held in the last [`FOLLOWS`]. Returns the most that it had.
fn keeps_its_bound(run: &mut Running, folder: &Path, done: impl Fn(&Running) -> bool) -> u64 {
    let (mut lately, mut most) = (Vec::new(), 0);
    run.until("an end of the changes", 90, |run| {
        lately.push((Instant::now(), held(run)?));
        let has = space(run, folder);
        lately.push((Instant::now(), held(run)?));
        if done(run) {
            return Some(());
        }
        lately.retain(|(at, _)| at.elapsed() < FOLLOWS);
        let held = lately.iter().map(|(_, held)| *held).max()?;
        assert!(has <= bound(held) + 4 * MIB, "{has} B for {held} B");
        most = most.max(has);
        None
    });
    most
}

/// Without a daemon: a program replaces its pages at random, and then drops most of them. At every
/// moment its file has at most twice what it holds, and 64 MiB more; after the drop once the pages
/// that are left are stored together.
#[test]
fn a_file_has_at_most_twice_what_it_holds_and_64_mib_more() {
    let name = "a_file_has_at_most_twice_what_it_holds_and_64_mib_more";
    turn!(beside_others, "a plain run has no file");
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let folder = folder.path();
    let mut run = Job::new(build("scatter"))
        .args(["150", rounds("8", "15"), &folder.display().to_string()])
        .limit(LIMIT)
        .tier(&format!("file:{}", folder.display()))
        .start();
    let most = keeps_its_bound(&mut run, folder, |_| folder.join("drops").exists());
    assert!(most > 100 * MIB, "{most} B: nothing to give back");
    let begun = Instant::now();
    let mut found = (0, 0);
    let (held, has) = run.until("space that is given back", 90, |run| {
        let now = (held(run)?, space(run, folder));
        if now != found {
            say(&format!(
                "{:.1?}: {} B for {} B",
                begun.elapsed(),
                now.1,
                now.0
            ));
        }
        found = now;
        (found.0 < 16 * MIB && found.1 <= bound(found.0)).then_some(found)
    });
    say(&format!(
        "{name}: {} MiB at most; {} MiB for {} MiB {:.1} s after the drop",
        most / MIB,
        has / MIB,
        held / MIB,
        begun.elapsed().as_secs_f64()
    ));
    std::fs::write(folder.join("check"), "").expect("a file");
    let outcome = run.wait().expect(0).expect_swapping(1000.0);
    assert_eq!(outcome.text().trim(), "right");
}

/// 120 MiB of texts, of which 200 at random are changed every 10 ms, for some time. When a file
/// is there, each is compared with what it was changed to.
const TEXTS: &str = r#"
import os, random, sys, time
texts = [bytearray(random.randbytes(4096)) for _ in range(120 * 256)]
sums = [text[0] for text in texts]
until = time.time() + int(sys.argv[1])
while time.time() < until:
    for _ in range(200):
        at = random.randrange(len(texts))
        texts[at][0] = sums[at] = sums[at] + 1 & 255
    time.sleep(0.01)
print("still", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
print(all(text[0] == sum for text, sum in zip(texts, sums)))
"#;

/// The same for the file that a run has by default, below compressed memory.
#[test]
fn the_default_file_keeps_its_bound_in_use_and_afterwards() {
    let name = "the_default_file_keeps_its_bound_in_use_and_afterwards";
    turn!(beside_others, "a plain run has no file");
    let Some(python) = find("python3") else {
        return skip("no python3; on Debian: apt-get install python3");
    };
    let folder = tempfile::tempdir_in("/var/tmp").expect("a scratch folder");
    let folder = folder.path();
    let mut run = Job::new(python)
        .args(["-c", TEXTS, rounds("12", "20")])
        .arg(folder.join("check"))
        .limit(60 * MIB)
        .env("TMPDIR", folder)
        .start();
    let is_still = |run: &Running| {
        let said = std::fs::read_to_string(run.scratch().join("output"));
        said.is_ok_and(|said| said.contains("still"))
    };
    let most = keeps_its_bound(&mut run, folder, is_still);
    let begun = Instant::now();
    // Seconds later. A busy machine takes longer to copy slabs together.
    let (held, has) = run.until("its bound", 60, |run| {
        let now = (held(run)?, space(run, folder));
        let is_later = begun.elapsed() > Duration::from_secs(4);
        (is_later && now.1 <= bound(now.0)).then_some(now)
    });
    say(&format!(
        "{name}: {} MiB at most; afterwards {} MiB for {} MiB",
        most / MIB,
        has / MIB,
        held / MIB
    ));
    assert!(held > 40 * MIB, "{held} B: the file holds little");
    std::fs::write(folder.join("check"), "").expect("a file");
    let outcome = run.wait().expect(0).expect_swapping(10_000.0);
    assert_eq!(outcome.text(), "still\nTrue\n");
}
