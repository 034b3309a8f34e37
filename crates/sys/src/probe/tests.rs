//! The probe against this kernel, and its judgements against made-up ones.

use super::swap::swap;
use super::*;
use std::time::Instant;

#[test]
fn fast_is_fast_and_every_bad_check_has_a_fix() {
    let start = Instant::now();
    let report = KernelReport::fast();
    let fast = start.elapsed();
    let report_all = KernelReport::take(&std::env::temp_dir());
    let all = start.elapsed() - fast;
    eprintln!("fast {fast:?}, all {all:?}");
    for check in &report_all.checks {
        eprintln!("{:?} {}: {}", check.state, check.name, check.detail);
        assert_eq!(check.state == State::Ok, check.fix.is_empty(), "{check:?}");
        assert!(!check.detail.is_empty());
    }
    assert!(report.checks.len() < report_all.checks.len());
    // Ten times the usual cost: the machine may be busy.
    assert!(fast < Duration::from_millis(500) && all < Duration::from_secs(3));
    let mut names: Vec<_> = report_all.checks.iter().map(|check| check.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), report_all.checks.len(), "names are unique");
}

#[test]
fn a_newer_kernel_is_no_fix_for_what_this_user_may_not_do() {
    let fix = "use a newer kernel";
    for refused in [rustix::io::Errno::PERM, rustix::io::Errno::ACCESS] {
        let fix = unless_refused(&refused.into(), fix);
        assert!(fix.contains("run as root"), "{fix}");
    }
    assert_eq!(unless_refused(&rustix::io::Errno::INVAL.into(), fix), fix);
}

#[test]
fn trials_leave_no_descriptor_and_no_child() {
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    let _ = KernelReport::take(&std::env::temp_dir());
    let before = count();
    for _ in 0..5 {
        let _ = KernelReport::take(&std::env::temp_dir());
    }
    // Other tests of this process open and close descriptors meanwhile. A leak of one a run would
    // be five, and stay.
    let leaks = || count() >= before + 5;
    let zombies = || {
        let children = crate::procfs::children(std::process::id()).into_iter();
        let states = children.map(crate::procfs::process_state);
        states.filter(|state| *state == Some('Z')).count()
    };
    // A probe in another test may not have reaped its child yet.
    for _ in 0..100 {
        if zombies() == 0 && !leaks() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!leaks(), "trials left descriptors");
    panic!("a trial child was not reaped");
}

#[test]
fn versions_are_judged_by_number_not_by_text() {
    assert_eq!(version("6.18.44-fc"), Some((6, 18)));
    assert_eq!(kernel("6.18.44-generic").state, State::Ok);
    assert_eq!(kernel("6.8.0").state, State::Ok);
    assert_eq!(kernel("6.7.0").state, State::Missing);
    assert_eq!(kernel("5.15.0-91-generic").state, State::Missing);
    assert_eq!(kernel("10.0").state, State::Ok);
    assert_eq!(kernel("odd").state, State::Degraded);
}

#[test]
fn a_missing_essential_feature_is_missing_and_a_missing_nicety_degrades() {
    let all = Features(u64::MAX);
    let checks = features(Ok(all));
    assert!(checks.iter().all(|check| check.state == State::Ok));
    for (feature, name, state, _) in NEEDED {
        let checks = features(Ok(Features(all.0 & !feature.0)));
        let check = checks.iter().find(|check| check.name == name).unwrap();
        assert_eq!(check.state, state, "{name}");
        let others = checks.iter().filter(|check| check.state != State::Ok);
        assert_eq!(others.count(), 1);
    }
    let refused = features(Err(io::ErrorKind::PermissionDenied.into()));
    assert_eq!(refused[0].state, State::Missing);
}

const USER: Who = Who {
    user: 1000,
    group: 100,
    is_below: false,
};

#[test]
fn the_fix_of_a_capability_is_for_the_one_who_asks() {
    let fix = USER.lacks("sys_ptrace");
    assert!(fix.contains("setpriv --reuid 1000 --regid 100"), "{fix}");
    assert!(fix.contains("AmbientCapabilities=CAP_SYS_PTRACE"), "{fix}");
    let root = Who { user: 0, ..USER };
    let fix = root.lacks("sys_ptrace");
    assert!(fix.contains("--cap-add SYS_PTRACE"), "{fix}");
    let below = Who {
        is_below: true,
        ..root
    };
    for fix in [below.lacks("sys_ptrace"), below.may_have("sys_nice")] {
        assert!(fix.contains("outside of the user namespace"), "{fix}");
    }
    let fix = USER.may_have("sys_nice");
    assert!(fix.contains("the program then has it"), "{fix}");
}

#[test]
fn the_device_check_tells_absence_from_permission() {
    let absent = || Err(io::ErrorKind::NotFound.into());
    let gone = device_check(&absent(), false, USER, "257 other\n");
    assert!(gone.state == State::Missing && gone.fix.contains("CONFIG_USERFAULTFD"));
    let denied = device_check(
        &Err(io::ErrorKind::PermissionDenied.into()),
        false,
        USER,
        "",
    );
    assert!(denied.state == State::Missing && denied.fix.contains("udev"));
    let called = device_check(&absent(), true, USER, " 59 other\n257 userfaultfd\n");
    assert!(called.state == State::Degraded && called.detail.contains("keeps CAP_SYS_PTRACE"));
    // The kernel has it, so a newer one is no help.
    assert!(
        called
            .fix
            .contains("mknod -m 600 /dev/userfaultfd c 10 257")
    );
    assert!(!called.fix.contains("Linux 6.1"), "{}", called.fix);
}

#[test]
fn environment_checks_judge_what_they_read() {
    let header = "Filename\tType\tSize\tUsed\tPriority\n";
    let swaps = format!("{header}/dev/zram0 partition 1 0 100\n/swap file 1 0 -2\n");
    assert_eq!(swap(header, Some((6, 8))).state, State::Ok);
    let old = swap(&swaps, Some((6, 15)));
    assert!(old.state == State::Missing && old.fix.contains("swapoff /dev/zram0 /swap, or"));
    let zram = swap(&swaps, Some((6, 16)));
    assert_eq!(
        (zram.state, zram.fix.as_str()),
        (State::Degraded, "swapoff /dev/zram0 /swap")
    );
    assert_eq!(huge_pages("[always] madvise never").state, State::Degraded);
    assert_eq!(huge_pages("always [madvise] never").detail, "madvise");
    assert_eq!(cpus(Ok(vec![3])).state, State::Degraded);
    assert_eq!(cpus(Ok(vec![3, 4])).state, State::Ok);
    assert_eq!(overcommit("2").state, State::Degraded);
    assert_eq!(overcommit("1").state, State::Ok);
    let nowhere = direct_io(Path::new("/proc/nowhere"));
    assert_eq!(nowhere.state, State::Missing);
}
