//! Virtual machines: the guest's memory is held to the limit, and no byte of it is lost.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use undercroft_tests::{
    Job, MIB, Outcome, build, build_static, find, rounds, say, setting, skip, target_folder, turn,
};

use crate::takeover::{manager_of, successor, under_kills, wait_for_end};

/// A run of a monitor among `programs`: `guest`, which has no machine, or `kvm_guest`.
pub(crate) fn guest(monitor: &str, bytes: u64, arguments: &[&str]) -> Job {
    let memory = format!("{bytes}");
    let job = Job::new(build(monitor)).args(arguments).vm();
    job.options(["--memory", &memory])
}

/// Threads write to their memory and compare it, give pages back, and the manager dies again and
/// again: no byte of the guest is wrong.
#[test]
fn a_guest_in_a_quarter_of_its_memory_keeps_every_byte_while_managers_die() {
    turn!(beside_others, "it is about guest memory");
    let most = setting("UNDERCROFT_TEST_KILLS", 24) / 3;
    for (seed, kills) in [(1, 0), (2, most)] {
        let arguments = ["3", rounds("6", "10"), &seed.to_string()];
        let job = guest("guest", 64 * MIB, &arguments).limit(17 * MIB);
        let mut run = job.timeout(60 + kills).start();
        // A guest that fills its memory at once is found above the limit, and shrinks then.
        let seen = run.until("guest memory in tiers", 30, |run| {
            let guest = run.status()?["guest"].clone();
            let [stored, resident] =
                ["stored_bytes", "resident_bytes"].map(|of| guest[of].as_u64());
            (stored? > 0 && resident? < 48 * MIB).then_some(guest)
        });
        assert_eq!(seen["bytes"], 64 * MIB, "{seen}");
        let pid = run.keeper();
        let killed = under_kills(&run, seed, kills, |_| wait_for_end(pid, kills));
        let outcome = run.wait().expect(0);
        let [increments, checks, given, empty, wrong] = outcome.numbers();
        assert_eq!(wrong, 0.0, "{outcome}");
        assert!(increments > 1000.0 && checks > 1000.0, "{outcome}");
        assert!(
            given > 10.0 && empty > 0.0,
            "pages that are given back are zeros: {outcome}"
        );
        let taken = outcome.number("takeovers.count");
        // There is no report if the last manager was killed when the program had ended.
        assert!(
            killed == 0 || taken.is_none_or(|taken| taken > 0.0),
            "{outcome}"
        );
        if killed == 0 {
            let outcome = outcome.expect_swapped(2000.0);
            let noticed = outcome.number("guest.given_back_bytes");
            assert!(noticed > Some(1e6), "{outcome}");
            let vanished = outcome.number("counters.vanished");
            assert!(vanished > Some(0.0), "{outcome}");
            let limit = 17.0 * MIB as f64;
            let peak = outcome.number("guest.resident_bytes");
            assert!(peak <= Some(1.05 * limit), "{outcome}");
        }
        say(&format!(
            "guest: {killed} kills, {increments} increments, {checks} pages compared, {given} given \
             back, {empty} of them zeros"
        ));
    }
}

/// A guest far below the limit is not looked at, and counts.
#[test]
fn a_guest_below_its_limit_has_no_fault() {
    turn!(beside_others, "it is about guest memory");
    let mut run = guest("guest", 16 * MIB, &["2", "7", "5"])
        .limit(256 * MIB)
        .start();
    run.until("memory", 20, |run| {
        let memory = run.status()?["memory_bytes"].as_u64()?;
        (memory > 15 * MIB).then_some(())
    });
    let outcome = run.wait().expect(0);
    assert_eq!(outcome.number("faults.total"), Some(0.0), "{outcome}");
    let at_last = outcome.number("guest.resident_bytes");
    assert!(at_last > Some(15.0 * MIB as f64), "{outcome}");
}

/// The run ends with the reason and the fix, before a page of the guest has left.
#[test]
fn guest_memory_that_cannot_be_managed_ends_the_run_with_the_reason() {
    turn!(beside_others, "it is about guest memory");
    for (how, why) in [
        ("fork", "MADV_DONTFORK"),
        ("twice", "in one piece and once"),
        ("later", "in one piece and once"),
        ("beyond", "from its first byte to its last"),
    ] {
        let job = guest("guest", 32 * MIB, &["2", "20", "5", how]).limit(12 * MIB);
        let outcome = job.timeout(60).run().expect(125);
        assert!(outcome.errors.contains(why), "{outcome}");
    }
    let outcome = Job::new(build("guest")).vm().run().expect(2);
    assert!(outcome.errors.contains("--memory SIZE"), "{outcome}");
    if find("qemu-system-x86_64").is_some() {
        let job = Job::new("qemu-system-x86_64").args(["-mem-prealloc"]);
        let outcome = job.vm().run().expect(2);
        assert!(
            outcome.errors.contains("leave -mem-prealloc out"),
            "{outcome}"
        );
    }
}

/// A file of an archive in the format that the kernel unpacks as its first file system.
fn archived(name: &str, mode: u32, bytes: &[u8]) -> Vec<u8> {
    let mut archive = b"070701".to_vec();
    let name_length = name.len() as u32 + 1;
    let fields = [
        0,
        mode,
        0,
        0,
        1,
        0,
        bytes.len() as u32,
        0,
        0,
        0,
        0,
        name_length,
        0,
    ];
    for field in fields {
        archive.extend(format!("{field:08x}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(bytes);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive
}

/// The drivers of a device of virtio, and that of its kind.
pub(crate) fn drivers(of: &'static str) -> [&'static str; 6] {
    let bus = [
        "virtio_ring",
        "virtio",
        "virtio_pci",
        "virtio_pci_modern_dev",
    ];
    [bus[0], bus[1], bus[2], bus[3], "virtio_pci_legacy_dev", of]
}

/// The only folder or file in `folder` whose name has `part`.
fn only(folder: &Path, part: &str) -> Option<PathBuf> {
    let all = fs::read_dir(folder).ok()?;
    let mut all = all.flatten().map(|entry| entry.path());
    all.find(|path| path.to_string_lossy().contains(part))
}

/// Where the kernel is that `.ci/run` has fetched.
fn guest_kernel() -> PathBuf {
    target_folder().join("guest-kernel")
}

/// The kernel, and a first file system with `guest_init` alone.
/// * `drivers`: that the file system has besides.
pub(crate) fn machine(folder: &Path, drivers: &[&str]) -> Option<[PathBuf; 2]> {
    let mut files = Vec::new();
    for driver in drivers {
        let name = format!("{driver}.ko");
        let modules = only(&guest_kernel().join("lib/modules"), "cloud")?;
        let folders = ["virtio", "block"].map(|of| modules.join("kernel/drivers").join(of));
        let mut read = folders.iter().map(|of| fs::read(of.join(&name)));
        let bytes = read.find_map(Result::ok)?;
        files.push((name, bytes));
    }
    machine_of(folder, "guest_init", files)
}

/// The same with another first program, and files of any name.
fn machine_of(folder: &Path, init: &str, files: Vec<(String, Vec<u8>)>) -> Option<[PathBuf; 2]> {
    let kernel = only(&guest_kernel().join("boot"), "vmlinuz")?;
    let init = fs::read(build_static(init)).expect("the program");
    let mut archive = archived("init", 0o100_755, &init);
    let mut folders = BTreeSet::from(["dev".to_owned(), "proc".to_owned()]);
    for (name, _) in &files {
        let ends = name.match_indices('/').map(|(end, _)| &name[..end]);
        folders.extend(ends.map(str::to_owned));
    }
    for name in folders {
        archive.extend(archived(&name, 0o040_755, &[]));
    }
    for (name, bytes) in files {
        archive.extend(archived(&name, 0o100_755, &bytes));
    }
    archive.extend(archived("TRAILER!!!", 0, &[]));
    let path = folder.join("initrd");
    fs::write(&path, archive).expect("a scratch file");
    Some([kernel, path])
}

/// This machine's redis-server, and the libraries that it is linked with.
fn redis_files() -> Option<Vec<(String, Vec<u8>)>> {
    let server = find("redis-server")?;
    let linked = Command::new("ldd").arg(&server).output().ok()?;
    let text = String::from_utf8(linked.stdout).ok()?;
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
    let read = |name: &str, from: &Path| Some((name.to_owned(), fs::read(from).ok()?));
    let mut files = vec![read("redis-server", &server)?];
    for library in libraries {
        files.push(read(&library[1..], Path::new(library))?);
    }
    Some(files)
}

pub(crate) const NO_MACHINE: &str =
    "no kernel of a guest in target/guest-kernel: .ci/run fetches one";

/// QEMU, which interprets the guest's instructions: KVM may be missing.
/// * `words`: arguments of the guest's program.
/// * `mib`: memory of the machine.
pub(crate) fn qemu([kernel, initrd]: &[PathBuf; 2], mib: &str, words: &str) -> Job {
    let job = Job::new("qemu-system-x86_64").args(["-accel", "tcg", "-nodefaults", "-nographic"]);
    let job = job.args(["-serial", "stdio", "-no-reboot", "-m", mib, "-kernel"]);
    let job = job.arg(kernel).arg("-initrd").arg(initrd);
    let line = format!("console=ttyS0 panic=-1 quiet -- {words}");
    job.args(["-append", &line]).timeout(120)
}

/// The lines of the guest's program.
pub(crate) fn said(outcome: &Outcome) -> Vec<String> {
    let text = outcome.text();
    // The firmware's marks may be in front of the first.
    let lines = text
        .lines()
        .filter_map(|line| line.find("guest:").map(|at| &line[at..]));
    lines.map(|line| line.trim().to_owned()).collect()
}

/// An unmodified QEMU boots Linux in half of the machine's memory, and its manager dies.
#[test]
fn a_machine_boots_in_half_of_its_memory_and_finds_every_word() {
    turn!(beside_others, "it is about guest memory");
    if find("qemu-system-x86_64").is_none() {
        return skip("no qemu-system-x86_64");
    }
    let scratch = tempfile::tempdir().expect("a folder");
    let Some(machine) = machine(scratch.path(), &[]) else {
        return skip(NO_MACHINE);
    };
    let plain = qemu(&machine, "160", "").run().expect(0);
    let rounds = said(&plain);
    assert!(
        rounds.len() == 4 && rounds[3].contains(" 0 words wrong"),
        "{plain}"
    );
    let mut run = qemu(&machine, "160", "").vm().limit(80 * MIB).start();
    let keeper = run.keeper();
    let manager = run.until("guest memory in tiers", 60, |run| {
        let stored = run.status()?["guest"]["stored_bytes"].as_u64()?;
        manager_of(keeper).filter(|_| stored > 8 * MIB)
    });
    let pid = Pid::from_raw(manager).expect("a number");
    kill_process(pid, Signal::KILL).expect("it runs");
    run.until("another manager", 60, |_| successor(keeper, manager));
    run.until("its takeover in the status", 60, |run| {
        (run.status()?["takeovers"]["count"] == 1).then_some(())
    });
    let outcome = run.wait().expect(0);
    assert_eq!(said(&outcome), rounds, "{outcome}");
    assert_eq!(outcome.number("takeovers.count"), Some(1.0), "{outcome}");
    say(&format!(
        "a machine: {:?} plain, {:?} in half of its memory",
        plain.wall, outcome.wall
    ));
    outcome.expect_swapped(2000.0);
}

/// An unmodified Linux reports its free pages. They count no more, neither those in memory nor
/// those that were away, and what it writes there later is right.
#[test]
fn memory_that_a_machine_gives_back_counts_no_more() {
    turn!(beside_others, "it is about guest memory");
    if find("qemu-system-x86_64").is_none() {
        return skip("no qemu-system-x86_64");
    }
    let scratch = tempfile::tempdir().expect("a folder");
    let Some(machine) = machine(scratch.path(), &drivers("virtio_balloon")) else {
        return skip(NO_MACHINE);
    };
    let balloon = "virtio-balloon-pci,free-page-reporting=on";
    let job = qemu(&machine, "160", "give").args(["-device", balloon]);
    let mut run = job.vm().limit(80 * MIB).start();
    let mut most = 0;
    let [given, used] = run.until("memory that counts no more", 90, |run| {
        let guest = run.status()?["guest"].clone();
        let of = |of: &str| guest[of].as_u64();
        let used = of("resident_bytes")? + of("stored_bytes")?;
        most = most.max(used);
        let given = of("given_back_bytes")?;
        (given > 48 * MIB && used + 48 * MIB < most).then_some([given, used])
    });
    let outcome = run.wait().expect(0);
    let lines = said(&outcome);
    let is_right = |line: &String| line.contains(" 0 words wrong");
    assert!(lines.len() == 4 && lines.iter().all(is_right), "{outcome}");
    say(&format!(
        "a machine gave {} MiB back: {} MiB in memory and in tiers, {} before",
        given / MIB,
        used / MIB,
        most / MIB
    ));
}

/// Redis under load in an unmodified Linux of 512 MiB, beside a program that compares its memory.
/// All of it is in 200 MiB, and managers die. Every word and every value is right, each time.
#[test]
fn redis_in_a_machine_in_two_fifths_of_its_memory_keeps_every_value() {
    turn!(one_at_a_time, "it is about guest memory");
    if find("qemu-system-x86_64").is_none() {
        return skip("no qemu-system-x86_64");
    }
    let Some(files) = redis_files() else {
        return skip("no redis-server, or no ldd");
    };
    let scratch = tempfile::tempdir().expect("a folder");
    let Some(machine) = machine_of(scratch.path(), "guest_redis", files) else {
        return skip(NO_MACHINE);
    };
    let job = qemu(&machine, "512", "150 20000").vm().limit(200 * MIB);
    let mut run = job.timeout(400).start();
    let keeper = run.keeper();
    let killed = 6;
    for _ in 0..killed {
        let mut before = u64::MAX;
        let manager = run.until("pages that come back", 120, |run| {
            let now = run.status()?["pages"]["swapped_in"].as_u64()?;
            before = before.min(now);
            manager_of(keeper).filter(|_| now > before + 5000)
        });
        let pid = Pid::from_raw(manager).expect("a number");
        kill_process(pid, Signal::KILL).expect("it runs");
        run.until("another manager", 60, |_| successor(keeper, manager));
    }
    let outcome = run.wait().expect(0);
    let rounds = said(&outcome);
    let right = |round: usize| {
        format!("guest: round {round}, 38400 pages, 0 words wrong, 38400 values, 0 values wrong")
    };
    assert_eq!(rounds, [1, 2, 3].map(right), "{outcome}");
    let taken = outcome.number("takeovers.count");
    assert_eq!(taken, Some(f64::from(killed)), "{outcome}");
    let stored = outcome.number("guest.stored_bytes");
    assert!(stored > Some(100.0 * MIB as f64), "{outcome}");
    say(&format!(
        "redis in a machine: {killed} managers died, {:?}",
        outcome.wall
    ));
    outcome.expect_swapped(20_000.0);
}
