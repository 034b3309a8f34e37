//! The perf side band on a process tree: its reports, how soon they come, and their cost to the
//! program.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use undercroft_base::VirtRange;
use undercroft_sys::sideband::{Record, Sideband, Wake};

use crate::bed::*;

crate::facts! {
    an_anonymous_mapping_is_reported_with_its_range,
    growth_of_the_heap_is_reported,
    a_protection_change_is_reported,
    mappings_of_later_threads_and_earlier_threads_are_reported,
    fork_and_exit_of_grandchildren_and_their_mappings_are_reported,
    who_outlives_its_parents_is_watched_by_their_descriptors,
    an_exec_is_reported_and_the_new_program_is_watched,
    mremap_munmap_and_madvise_are_not_reported,
    a_merged_mapping_is_reported_whole,
    a_full_ring_reports_what_it_lost,
    latency_from_the_mapping_to_the_wake_up,
    overhead,
}

/// A record whose name needs no borrow.
#[derive(Debug)]
enum Heard {
    Map(u32, VirtRange, bool, String),
    Fork(u32, u32),
    Exit,
    Exec(u32),
    Lost(u64),
}

fn heard(record: Record<'_>) -> Heard {
    match record {
        Record::Mmap {
            pid,
            range,
            anonymous,
            name,
            ..
        } => Heard::Map(pid, range, anonymous, String::from_utf8_lossy(name).into()),
        Record::Fork { pid, tid, .. } => Heard::Fork(pid, tid),
        Record::Exit { .. } => Heard::Exit,
        Record::Exec { pid } => Heard::Exec(pid),
        Record::Lost(count) => Heard::Lost(count),
    }
}

fn watch(pid: u32) -> Sideband {
    match Sideband::open(pid) {
        Ok(sideband) => sideband,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            crate::skip("perf_event_open is refused here")
        }
        Err(error) => panic!("{error}"),
    }
}

/// Everything up to the first record that `wanted` accepts, which comes last. Waits for wake-ups
/// only.
fn hear_until(sideband: &mut Sideband, mut wanted: impl FnMut(&Heard) -> bool) -> Vec<Heard> {
    let (start, mut all, mut found) = (Instant::now(), Vec::new(), false);
    while !found {
        let left = Duration::from_millis(SOON).saturating_sub(start.elapsed());
        assert!(!left.is_zero(), "not reported; heard {all:?}");
        poll_in(sideband.as_fd(), left.as_millis() as u64);
        sideband.drain(|record| {
            let record = heard(record);
            found |= wanted(&record);
            all.push(record);
        });
    }
    all
}

/// A child that waits, does `work`, reports that it is done, and waits again.
fn watched(work: impl FnOnce(&Parent)) -> (Child, Sideband) {
    let child = child(|parent| {
        parent.wait();
        work(parent);
        parent.say(1);
        parent.wait();
        0
    });
    let sideband = watch(child.pid);
    child.go();
    (child, sideband)
}

fn covers(record: &Heard, pid: u32, area: Area) -> bool {
    let Heard::Map(of, range, true, _) = record else {
        return false;
    };
    *of == pid && range.intersect(area.range()) == area.range()
}

/// Shared with the child, which writes here what it mapped.
struct Told(Area);

impl Told {
    fn new() -> Told {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        Told(Area::mapped(1, RW, flags, -1))
    }

    fn tell(&self, slot: usize, value: usize) {
        let at = (self.0.address as *mut usize).wrapping_add(slot);
        // SAFETY: a mapped page that no Rust reference covers.
        unsafe { at.write_volatile(value) };
    }

    fn told(&self, slot: usize) -> usize {
        let at = (self.0.address as *const usize).wrapping_add(slot);
        // SAFETY: as above.
        unsafe { at.read_volatile() }
    }

    fn area(&self, slot: usize, pages: usize) -> Area {
        Area {
            address: self.told(slot),
            pages,
        }
    }
}

/// Maps without any further call that would be reported.
fn plain(pages: usize) -> Area {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    Area::mapped(pages, RW, flags, -1)
}

fn an_anonymous_mapping_is_reported_with_its_range() {
    let told = Told::new();
    let (child, mut sideband) = watched(|_| told.tell(0, plain(33).address));
    child.hear();
    let area = told.area(0, 33);
    hear_until(&mut sideband, |record| covers(record, child.pid, area));
}

fn growth_of_the_heap_is_reported() {
    let told = Told::new();
    let (child, mut sideband) = watched(|_| told.tell(0, crate::layout::grow_heap(16).address));
    child.hear();
    let area = told.area(0, 15);
    let all = hear_until(&mut sideband, |record| covers(record, child.pid, area));
    println!("  {:?}", all.last());
}

fn a_protection_change_is_reported() {
    let area = Area::filled(3);
    area.protect(libc::PROT_NONE);
    let (child, mut sideband) = watched(|_| area.part(1, 1).protect(RW));
    child.hear();
    let part = area.part(1, 1);
    hear_until(&mut sideband, |record| covers(record, child.pid, part));
}

fn mappings_of_later_threads_and_earlier_threads_are_reported() {
    let told = Told::new();
    let mut child = child(|parent| {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let told = told.0;
        let earlier = doing(move || {
            wait.recv().unwrap();
            Told(told).tell(0, plain(21).address);
        });
        parent.say(1);
        parent.wait();
        go.send(()).unwrap();
        earlier.done();
        doing(move || Told(told).tell(1, plain(22).address)).done();
        parent.say(1);
        parent.wait();
        0
    });
    child.hear();
    let mut sideband = watch(child.pid);
    child.go();
    child.hear();
    let (earlier, later) = (told.area(0, 21), told.area(1, 22));
    let pid = child.pid;
    let (mut seen_earlier, mut seen_later) = (false, false);
    let all = hear_until(&mut sideband, |record| {
        seen_earlier |= covers(record, pid, earlier);
        seen_later |= covers(record, pid, later);
        seen_earlier && seen_later
    });
    let started = all
        .iter()
        .any(|r| matches!(r, Heard::Fork(p, t) if *p == pid && *t != pid));
    assert!(started, "the start of the later thread");
    child.go();
    child.end();
}

fn fork_and_exit_of_grandchildren_and_their_mappings_are_reported() {
    // Many children, because inheritance that works only sometimes would be worse than none.
    const GRANDCHILDREN: usize = 40;
    let told = Told::new();
    let (child, mut sideband) = watched(|_| {
        for number in 0..GRANDCHILDREN {
            let mut grandchild = crate::bed::child(|_| {
                let inner = crate::bed::child(|_| {
                    told.tell(2 * number + 1, plain(19).address);
                    0
                })
                .exit_status();
                told.tell(2 * number, plain(17).address);
                inner
            });
            grandchild.exit_status();
        }
    });
    let (mut maps, mut forks, mut exits) = (0, 0, 0);
    let last = loop {
        poll_in(sideband.as_fd(), 5);
        sideband.drain(|record| match heard(record) {
            Heard::Map(_, range, true, _) if (17..=19).contains(&range.count().0) => maps += 1,
            Heard::Fork(..) => forks += 1,
            Heard::Exit => exits += 1,
            Heard::Lost(count) => panic!("lost {count}"),
            _ => {}
        });
        if told.told(2 * GRANDCHILDREN - 2) != 0 && maps >= 2 * GRANDCHILDREN {
            break true;
        }
        if told.told(2 * GRANDCHILDREN - 2) != 0 && poll_in(sideband.as_fd(), 200) == 0 {
            break false;
        }
    };
    child.hear();
    println!(
        "  {maps} mappings, {forks} forks, {exits} exits of {} processes",
        2 * GRANDCHILDREN
    );
    assert!(last && forks >= 2 * GRANDCHILDREN);
}

/// The process watched by its id has long ended, and so have 200 others, when its grandchild maps.
fn who_outlives_its_parents_is_watched_by_their_descriptors() {
    const OTHERS: usize = 200;
    let told = Told::new();
    let (mut child, mut sideband) = watched(|_| {
        // SAFETY: the child's work needs no lock.
        let grandchild = unsafe { libc::fork() };
        if grandchild == 0 {
            told.tell(1, std::process::id() as usize);
            while told.told(2) == 0 {
                pause(1);
            }
            told.tell(0, plain(23).address);
            pause(u64::MAX);
        }
        for _ in 0..OTHERS {
            crate::bed::child(|_| 0).exit_status();
        }
    });
    let descriptors = sideband.descriptors();
    child.hear();
    child.go();
    child.exit_status();
    pause(20);
    sideband.drain(|_| {});
    let grandchild = told.told(1) as u32;
    sideband.watch(grandchild).unwrap();
    assert_eq!(sideband.descriptors(), descriptors, "it is watched already");
    told.tell(2, 1);
    let started = Instant::now();
    while told.told(0) == 0 && started.elapsed() < Duration::from_millis(SOON) {
        pause(1);
    }
    let area = told.area(0, 23);
    hear_until(&mut sideband, |record| covers(record, grandchild, area));
    // SAFETY: a number and a signal.
    unsafe { libc::kill(grandchild as i32, libc::SIGKILL) };
}

fn an_exec_is_reported_and_the_new_program_is_watched() {
    let child = child(|parent| {
        parent.wait();
        crate::death::exec_sleep()
    });
    let mut sideband = watch(child.pid);
    child.go();
    let pid = child.pid;
    let (mut exec, mut loaded) = (false, false);
    let all = hear_until(&mut sideband, |record| {
        exec |= matches!(record, Heard::Exec(of) if *of == pid);
        // Its loader maps the C library.
        loaded |= exec
            && matches!(record, Heard::Map(of, _, false, name) if *of == pid && name.contains("libc"));
        loaded
    });
    println!("  {} records of the loader", all.len());
}

fn mremap_munmap_and_madvise_are_not_reported() {
    let told = Told::new();
    let (child, mut sideband) = watched(|parent| {
        let area = plain(64);
        area.part(32, 32).unmap();
        let area = area.part(0, 32);
        area.fill(0, 1);
        parent.say(2);
        parent.wait();
        let grown = area.remap(48, libc::MREMAP_MAYMOVE, 0);
        let elsewhere = plain_target();
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let moved = grown.remap(48, fixed, elsewhere);
        moved.advise(libc::MADV_DONTNEED);
        told.tell(0, moved.address);
        moved.unmap();
    });
    child.hear();
    pause(20);
    sideband.drain(|_| {});
    child.go();
    child.hear();
    pause(20);
    let mut records = Vec::new();
    sideband.drain(|record| records.push(heard(record)));
    println!("  {records:?}");
    assert!(told.told(0) != 0 && records.is_empty(), "{records:?}");
}

/// Maps one page there.
fn map_at_target() -> Area {
    let area = Area {
        address: plain_target(),
        pages: 1,
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: maps a page where nothing is.
    unsafe { libc::mmap(area.pointer(), PAGE, RW, flags, -1, 0) };
    area
}

/// An address where nothing is mapped.
fn plain_target() -> usize {
    0x1000_0000_0000
}

fn a_merged_mapping_is_reported_whole() {
    let told = Told::new();
    let (child, mut sideband) = watched(|_| {
        let room = plain(64);
        room.unmap();
        for part in [room.part(0, 32), room.part(32, 32)] {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: maps pages where nothing is.
            unsafe { libc::mmap(part.pointer(), part.bytes(), RW, flags, -1, 0) };
        }
        told.tell(0, room.address);
    });
    child.hear();
    let whole = told.area(0, 64);
    hear_until(&mut sideband, |record| covers(record, child.pid, whole));
}

fn a_full_ring_reports_what_it_lost() {
    let (child, mut sideband) = watched(|_| {
        for _ in 0..20_000 {
            plain(1).unmap();
        }
    });
    until("done", || poll_in(sideband.as_fd(), 1) != 0);
    child.hear();
    let (mut maps, mut lost, mut full) = (0u64, 0, 0);
    let mut count = |record: Record<'_>| match record {
        Record::Lost(0) => full += 1,
        Record::Lost(count) => lost += count,
        Record::Mmap { .. } => maps += 1,
        _ => {}
    };
    sideband.drain(&mut count);
    // The kernel reports how many with the next record that finds room on that CPU, if one ever
    // comes.
    child.go();
    pause(20);
    sideband.drain(&mut count);
    println!("  {maps} heard, {full} rings full, {lost} told as lost");
    assert!(full > 0 && maps > 500);
}

fn monotonic_ns() -> usize {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one live structure.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as usize * 1_000_000_000 + time.tv_nsec as usize
}

fn latency_from_the_mapping_to_the_wake_up() {
    const SAMPLES: usize = 200;
    let told = Told::new();
    let (child, mut sideband) = watched(|_| {
        for sample in 0..SAMPLES {
            // The time before the call: the listener may be awake before the call returns.
            let start = monotonic_ns();
            let area = map_at_target();
            told.tell(sample, start);
            area.unmap();
            pause(2);
        }
    });
    let (mut latencies, mut heard) = (Vec::new(), 0);
    while heard < SAMPLES && poll_in(sideband.as_fd(), 500) != 0 {
        let woken = monotonic_ns();
        let before = heard;
        sideband.drain(|record| {
            let ours = |range: VirtRange| range.start.address() == plain_target() as u64;
            heard += usize::from(matches!(record, Record::Mmap { range, .. } if ours(range)));
        });
        // If several came at once, the listener was kept from its CPU, so this is no sample of the
        // kernel's latency.
        if heard == before + 1 {
            until("told", || told.told(before) != 0);
            latencies.push(woken.saturating_sub(told.told(before)) / 1000);
        }
    }
    child.hear();
    assert_eq!(heard, SAMPLES);
    latencies.sort_unstable();
    let at = |percent: usize| latencies[(latencies.len() - 1) * percent / 100];
    println!(
        "  {} samples: p50 {} us, p99 {} us, max {} us (client and listener on any CPU)",
        latencies.len(),
        at(50),
        at(99),
        at(100)
    );
    assert!(latencies.len() > SAMPLES / 2 && at(50) < 50_000);
}

/// The client's loads in the overhead fact: name, repetitions, one operation.
const LOADS: [(&str, usize, fn()); 3] = [
    ("mmap + touch + munmap", 1500, || {
        let area = plain(1);
        area.fill(0, 1);
        area.unmap();
    }),
    ("fork + exit + wait", 30, || {
        child(|_| 0).exit_status();
    }),
    ("thread start + end", 100, || {
        let _ = std::thread::spawn(|| {}).join();
    }),
];

fn overhead() {
    let told = Told::new();
    // Rounds alternate in one client, watched and not watched, so that noise affects both alike.
    const KINDS: usize = 4;
    const ROUNDS: usize = 3 * KINDS;
    let child = child(|parent| {
        for round in 0..ROUNDS {
            parent.wait();
            for (load, (_, count, work)) in LOADS.iter().enumerate() {
                let start = monotonic_ns();
                (0..*count).for_each(|_| work());
                let each = (monotonic_ns() - start) / count;
                told.tell(round * LOADS.len() + load, each);
            }
            parent.say(1);
        }
        0
    });
    for round in 0..ROUNDS {
        let mut sideband = match round % KINDS {
            0 => None,
            1 => {
                let mut idle = Sideband::idle(Wake::HalfFull).unwrap();
                idle.watch(child.pid).unwrap();
                Some(idle)
            }
            _ => Some(watch(child.pid)),
        };
        child.go();
        if round % KINDS == 3 {
            let sideband = sideband.as_mut().unwrap();
            let last = round * LOADS.len() + LOADS.len() - 1;
            while told.told(last) == 0 {
                poll_in(sideband.as_fd(), 10);
                sideband.drain(|_| {});
            }
        }
        child.hear();
    }
    for (load, (name, _, _)) in LOADS.iter().enumerate() {
        let of = |kind: usize| {
            let rounds = (0..ROUNDS).filter(|round| round % KINDS == kind);
            let each = rounds.map(|round| told.told(round * LOADS.len() + load));
            each.min().unwrap()
        };
        println!(
            "  {name}, ns: {} alone, {} watched and woken at half full, {} woken by each, {} and drained",
            of(0),
            of(1),
            of(2),
            of(3)
        );
        assert!(of(1) > 0);
    }
}
