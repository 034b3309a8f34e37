//! Machines of Cloud Hypervisor that `undercroft restore` restores from a snapshot, with memory
//! that a run of `vm --socket` fills. Cloud Hypervisor is one of ours (`programs/receiver.c`):
//! static, outside of the run, and it checks every byte.

use std::fs::{self, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use rustix::process::Signal;
use tempfile::TempDir;
use undercroft_tests::{
    Job, MIB, Outcome, Running, build_static, rounds, say, setting, turn, undercroft,
};

use crate::takeover::{manager_of, under_kills};

/// A run that has the memory of a snapshot, and the snapshot.
struct Served {
    run: Running,
    folder: TempDir,
    receiver: PathBuf,
    mib: String,
}

impl Served {
    fn start(mib: u64) -> Served {
        let (monitor, receiver) = (build_static("monitor"), build_static("receiver"));
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = |name: &str| folder.path().join(name);
        let made = Job::new(monitor).arg("snapshot").arg(path("memory"));
        let made = made.arg(mib.to_string());
        made.run().expect(0);
        // As the offload daemon writes it, with two slots: the second begins in its memfd where the
        // first ends.
        let half = mib * MIB / 2;
        let slots = [(3, 4 << 30, half), (0, 0u64, 0)].map(|(slot, gpa, offset)| {
            serde_json::json!({"slot": slot, "gpa": gpa, "size": half, "zone_id": "mem0",
                "virtio_mem": false, "file_offset": offset})
        });
        let config = serde_json::json!({"vm_config": {"cpus": {"boot_vcpus": 1}},
            "memory_manager_data": {"guest_ram_mappings": slots, "boot_ram": mib * MIB}});
        let write = |name: &str, text: String| fs::write(path(name), text).expect("written");
        write("migration_config.json", config.to_string());
        write("state.json", "{\"state\": 1} ".repeat(20_000));
        let (socket, memory) = (path("socket"), path("memory"));
        let mut run = Job::vm_alone::<&str>([])
            .options(["--socket".as_ref(), socket.as_os_str()])
            .options(["--memory-file".as_ref(), memory.as_os_str()])
            .timeout(300)
            .start();
        run.until("manager", 30, |run| manager_of(run.keeper()));
        Served {
            run,
            folder,
            receiver,
            mib: mib.to_string(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A Cloud Hypervisor that listens, and the command that restores a machine there.
    fn machine(&self, what: &str, name: &str, words: &[&str], more: &[&str]) -> (Running, Running) {
        let to = self.path(name);
        let job = Job::new(&self.receiver).arg(what).arg(&to);
        let job = job.arg(self.folder.path()).arg(&self.mib).args(words);
        let mut machine = job.timeout(120).start();
        machine.until("socket", 20, |_| to.exists().then_some(()));
        (machine, self.restore(name, more).start())
    }

    fn restore(&self, name: &str, more: &[&str]) -> Job {
        let job = Job::new(undercroft()).arg("restore");
        let job = job.arg(self.folder.path()).arg("--to").arg(self.path(name));
        let job = job.arg("--socket").arg(self.path("socket"));
        job.args(more).timeout(120)
    }
}

/// Panics unless no byte was wrong, and every page was asked for.
fn check(outcome: &Outcome, mib: u64) {
    let [increments, checks, given_back, asked, wrong] = outcome.numbers();
    assert_eq!(wrong, 0.0, "{outcome}");
    assert!(increments > 100.0 && checks > 1000.0, "{outcome}");
    assert!(given_back > 10.0, "{outcome}");
    assert!(asked >= (mib * 256) as f64, "{outcome}");
    assert_eq!(outcome.errors, "");
}

/// Several machines at once, whose threads touch pages, write to them and give them back while the
/// others are asked for one by one, and the manager dies again and again.
#[test]
fn machines_that_are_restored_keep_every_byte_while_managers_die() {
    turn!(beside_others, "it is about memory that is handed over");
    const MIB_EACH: u64 = 16;
    for (seed, kills) in [(1, 0), (2, setting("UNDERCROFT_TEST_KILLS", 24) / 4)] {
        let mut served = Served::start(MIB_EACH);
        let seconds = rounds("3", "10");
        let start = |at: usize| {
            let (name, number) = (format!("machine{at}"), format!("{seed}{at}"));
            let words = ["3", seconds, &number];
            let paused: (&[&str], &[&str]) = (&["paused"], &["--paused"]);
            let (word, option) = if at == 0 { paused } else { (&[][..], &[][..]) };
            served.machine("run", &name, &[&words[..], word].concat(), option)
        };
        let all: Vec<_> = (0..3).map(start).collect();
        let killed = under_kills(&served.run, seed, kills, |over| {
            while kills > 0 && !over() {
                std::thread::yield_now();
            }
        });
        for (machine, restore) in all {
            check(&machine.wait().expect(0), MIB_EACH);
            let told = restore.wait().expect(0).text();
            assert_eq!(told, "the machine has all of its memory\n");
        }
        served.run.until("end of the machines", 20, |run| {
            (run.status()?["guest"]["handed_over"] == 0).then_some(())
        });
        served.run.signal(Signal::TERM);
        let outcome = served.run.wait().expect(0);
        if kills == 0 {
            let came = outcome.number("pages.swapped_in");
            assert!(came >= Some(3.0 * MIB_EACH as f64 * 256.0), "{outcome}");
        }
        say(&format!(
            "restored by its socket: 3 machines, {killed} kills, 0 wrong bytes"
        ));
    }
}

/// A Cloud Hypervisor that says what it may not ends its own restore, with the reason, and a
/// machine that is restored meanwhile notices nothing.
#[test]
fn a_hostile_cloud_hypervisor_is_refused_with_the_reason_and_others_are_untouched() {
    turn!(beside_others, "it is about memory that is handed over");
    let mut served = Served::start(16);
    let (other, restores) = served.machine("run", "other", &["2", "8", "3"], &[]);
    for (how, why) in [
        ("rejects", "refuses Start: it answers with status 2"),
        ("unknown", "refuses Start: it answers with status 77"),
        ("payload", "bytes where none are expected"),
        ("hangs-up", "ended the connection at MemoryFd"),
        ("state", "refuses State: it answers with status 2"),
        ("command", "gives command 4 where it may ask for pages"),
        ("length", "asks for pages with 17 bytes"),
        ("outside", "no pages of one slot"),
        ("crossing", "no pages of one slot"),
        ("unaligned", "asks for 4096 bytes at guest address 0xc"),
        ("nothing", "asks for 0 bytes"),
        ("huge", "no pages of one slot"),
        ("half", "in the middle of a request"),
        ("early", "has ended when it had 16 of its 4096 pages"),
        ("abandons", "has ended when it had 16 of its 4096 pages"),
    ] {
        let (machine, restore) = served.machine("hostile", how, &[how], &[]);
        let outcome = restore.wait().expect(1);
        assert!(outcome.errors.contains(why), "{how}: {outcome}");
        machine.wait().expect(0);
    }
    // No process listens, by one of two errors.
    fs::remove_file(served.path("early")).expect("it is left");
    let outcome = served.restore("early", &[]).run().expect(1);
    assert!(outcome.errors.contains("does not answer at"), "{outcome}");
    let outcome = served.restore("hangs-up", &[]).run().expect(1);
    assert!(outcome.errors.contains("does not answer at"), "{outcome}");
    check(&other.wait().expect(0), 16);
    restores.wait().expect(0);
    served.run.until("end of the machines", 20, |run| {
        (run.status()?["guest"]["handed_over"] == 0).then_some(())
    });
    // The run has another snapshot's memory.
    fs::write(served.path("memory-3"), vec![1; 8 << 20]).expect("written");
    let outcome = served.restore("early", &[]).run().expect(1);
    let why = "another snapshot: page 0 of slot 3";
    assert!(outcome.errors.contains(why), "{outcome}");
    // The configuration names more memory than the run's file has.
    let file = served.path("migration_config.json");
    let text = fs::read_to_string(&file).expect("it is there");
    let more = text.replace(&(8 * MIB).to_string(), &(16 * MIB).to_string());
    fs::write(&file, more).expect("written");
    let outcome = served.restore("early", &[]).run().expect(1);
    assert!(
        outcome.errors.contains("of the snapshot's memory"),
        "{outcome}"
    );
    fs::write(&file, "{}").expect("written");
    let outcome = served.restore("early", &[]).run().expect(1);
    assert!(outcome.errors.contains("is not understood"), "{outcome}");
    served.run.signal(Signal::TERM);
    served.run.wait().expect(0);
    let outcome = served.folder.path().join("socket");
    assert!(!outcome.exists(), "its socket is removed");
}

/// A page that the file has no more is refused, and is no zeros.
#[test]
fn a_page_that_the_snapshot_has_no_more_is_refused() {
    turn!(beside_others, "it is about memory that is handed over");
    let served = Served::start(16);
    let file = OpenOptions::new().write(true).open(served.path("memory"));
    file.and_then(|file| file.set_len(4 * MIB))
        .expect("it is cut");
    let (machine, restore) = served.machine("run", "cut", &["2", "1", "3"], &[]);
    let outcome = machine.wait().expect(4);
    assert!(outcome.errors.contains("is refused"), "{outcome}");
    let outcome = restore.wait().expect(1);
    assert!(outcome.errors.contains("cannot be read"), "{outcome}");
    served.run.signal(Signal::TERM);
    served.run.wait().expect(0);
}

/// The end of the run ends what restores, and so the machine is refused its pages: it would wait
/// for ever, or read zeros.
#[test]
fn no_restore_outlives_the_run() {
    turn!(beside_others, "it is about memory that is handed over");
    let mut served = Served::start(16);
    // No thread touches its pages, so that it asks for them one by one, for a minute.
    let (machine, restore) = served.machine("run", "ends", &["0", "60", "3"], &[]);
    served.run.until("machine", 20, |run| {
        (run.status()?["guest"]["handed_over"] == 1).then_some(())
    });
    served.run.signal(Signal::TERM);
    served.run.until("word", 10, |run| {
        run.errors().contains("still run").then_some(())
    });
    served.run.signal(Signal::TERM);
    served.run.wait().expect(0);
    let outcome = restore.wait();
    let signal = outcome.status.and_then(|status| status.signal());
    assert_eq!(signal, Some(9), "{outcome}");
    let outcome = machine.wait().expect(4);
    assert!(outcome.errors.contains("is refused"), "{outcome}");
}
