//! Disks of a machine that another process serves, by vhost-user: QEMU's storage daemon, under
//! `undercroft view`, and an unmodified QEMU with an unmodified Linux.

use std::path::Path;

use rustix::process::Signal;
use tempfile::TempDir;
use undercroft_tests::{Job, MIB, Running, find, say, setting, skip, turn, undercroft};

use crate::takeover::under_kills;
use crate::vm::{NO_MACHINE, drivers, machine, qemu, said};

/// A machine of 128 MiB in half of that, and what its disk needs.
struct Rig {
    run: Running,
    folder: TempDir,
}

impl Rig {
    /// Starts the machine, which waits for its disk. `None`: said that it cannot be had here.
    fn start() -> Option<Rig> {
        if find("qemu-system-x86_64").is_none() || find("qemu-storage-daemon").is_none() {
            skip("no qemu-system-x86_64, or no qemu-storage-daemon");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let Some(machine) = machine(folder.path(), &drivers("virtio_blk")) else {
            skip(NO_MACHINE);
            return None;
        };
        let disk = std::fs::File::create(folder.path().join("disk"));
        let disk = disk.and_then(|disk| disk.set_len(128 * MIB));
        disk.expect("an empty disk");
        let socket = folder.path().join("socket");
        let chardev = format!("socket,id=disk,path={}", socket.display());
        let job = qemu(&machine, "128", "disk").args(["-chardev", &chardev]);
        let job = job.args(["-device", "vhost-user-blk-pci,chardev=disk"]);
        let mut run = job.vm().limit(64 * MIB).timeout(240).start();
        let word = format!("waits for a process that listens at {}", socket.display());
        run.until("word", 60, |run| run.errors().contains(&word).then_some(()));
        Some(Rig { run, folder })
    }
}

/// The command of a process that serves the disk in `folder`.
fn daemon(folder: &Path) -> [String; 5] {
    let [disk, socket] = ["disk", "socket"].map(|name| folder.join(name).display().to_string());
    [
        "qemu-storage-daemon".to_owned(),
        "--blockdev".to_owned(),
        format!("file,node-name=disk,filename={disk}"),
        "--export".to_owned(),
        format!("vhost-user-blk,id=a,node-name=disk,writable=on,addr.type=unix,addr.path={socket}"),
    ]
}

/// All of the memory goes to the disk from where it is, or from a tier, and comes back to other
/// places. The second process does both.
#[test]
fn a_disk_that_another_process_serves_keeps_every_byte_while_managers_die() {
    turn!(one_at_a_time, "it is about guest memory");
    let Some(mut rig) = Rig::start() else { return };
    let keeper = rig.run.keeper().to_string();
    let view = Job::new(undercroft()).args(["view", "--vm", &keeper, "--"]);
    let view = view.args(daemon(rig.folder.path())).timeout(240).start();
    rig.run.until("view", 60, |run| {
        (run.status()?["guest"]["views"].as_u64()? > 0).then_some(())
    });
    let kills = setting("UNDERCROFT_TEST_KILLS", 24) / 6;
    let killed = under_kills(&rig.run, 5, kills, |over| {
        while !over() {
            std::thread::yield_now();
        }
    });
    let outcome = rig.run.wait().expect(0);
    let lines = said(&outcome);
    let is_right = |line: &String| line.contains(" 0 failed, 0 words wrong");
    assert!(lines.len() == 2 && lines.iter().all(is_right), "{outcome}");
    // It outlives no machine.
    view.wait();
    say(&format!(
        "a disk of another process, {killed} kills: {lines:?} in {:?}",
        outcome.wall
    ));
    outcome.expect_swapped(5000.0);
}

/// A process that was started otherwise does not get the memory: it would read zeros.
#[test]
fn a_process_that_is_no_view_does_not_get_the_memory() {
    turn!(one_at_a_time, "it is about guest memory");
    let Some(mut rig) = Rig::start() else { return };
    let [program, words @ ..] = daemon(rig.folder.path());
    let mut stranger = Job::new(program).args(words).timeout(120).start();
    rig.run.until("refusal", 60, |run| {
        let why = "may not send the machine's memory to process";
        let said = run.errors();
        (said.contains(why) && said.contains("start that by `undercroft view`")).then_some(())
    });
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", stranger.pid()));
    assert!(!maps.expect("it runs").contains("undercroft-guest"));
    assert!(stranger.is_alive());
    for run in [&rig.run, &stranger] {
        run.signal(Signal::TERM);
    }
    stranger.wait();
    rig.run.wait();
}
