//! Where a run's directory may be, and what makes a place unfit.

use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn chosen(path: &Path) -> Candidate {
    Candidate {
        path: path.to_owned(),
        chosen: true,
    }
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
}

/// A program may lack what the shim asks for: it may be static, or have another C library. Then the
/// loader must not refuse the shim, so it needs nothing by a strong symbol that not every C library
/// has.
#[test]
fn the_shim_needs_only_what_every_c_library_has() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let shim = here.path().join(SHIM_NAME);
    std::fs::write(&shim, SHIM).expect("the shim is written");
    let mut nm = std::process::Command::new("nm");
    let nm = nm.args(["--dynamic", "--undefined-only"]).arg(&shim);
    let symbols = nm.output().expect("nm, which comes with the C compiler");
    assert!(symbols.status.success(), "{symbols:?}");
    let symbols = String::from_utf8(symbols.stdout).expect("names");
    let of = |kind: &str| -> Vec<&str> {
        let words = symbols.lines().map(|line| line.split_whitespace());
        let pairs = words.filter_map(|mut words| words.next().zip(words.next()));
        let found = pairs.filter(|(of, _)| *of == kind);
        found.map(|(_, name)| name).collect()
    };
    assert_eq!(of("U"), ["bcmp", "memmove", "strlen"]);
    let weak = [
        "__environ",
        "__errno_location",
        "__register_atfork",
        "dlsym",
    ];
    assert_eq!(of("w"), weak);
}

#[test]
fn a_directory_that_others_can_change_is_refused_with_the_fix() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let place = here.path().join("place");
    assert!(
        prepare(&chosen(&place), user()).is_ok(),
        "made when it is missing"
    );
    for (bits, fit) in [(0o777, false), (0o775, false), (0o755, true), (0o700, true)] {
        mode(&place, bits);
        assert_eq!(check(&place, user()).is_ok(), fit, "{bits:o}");
    }
    // The directory above is open: another could be put in this one's place.
    mode(here.path(), 0o777);
    let why = check(&place, user()).expect_err("the directory above is open");
    assert!(why.to_string().contains(FIX), "{why}");
    match why {
        PlaceError::OpenAbove { above, .. } => assert_eq!(above, here.path()),
        other => panic!("{other}"),
    }
    mode(here.path(), 0o1777);
    assert!(
        check(&place, user()).is_ok(),
        "sticky: only its owner renames it"
    );
    let why = check(&place, user() + 1).expect_err("another user's");
    assert!(
        matches!(why, PlaceError::Foreign { owner, .. } if owner == user()),
        "{why}"
    );
}

#[test]
fn a_link_is_not_followed_where_nobody_chose_it() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let (place, link) = (here.path().join("place"), here.path().join("link"));
    std::fs::create_dir(&place).expect("mkdir");
    mode(&place, 0o755);
    std::os::unix::fs::symlink(&place, &link).expect("a link");
    assert!(matches!(
        check(&link, user()),
        Err(PlaceError::NotADirectory(_))
    ));
    let by_default = Candidate {
        path: link.clone(),
        chosen: false,
    };
    assert!(prepare(&by_default, user()).is_err());
    let (path, _) = prepare(&chosen(&link), user()).expect("the user's own link");
    assert_eq!(path.file_name(), place.file_name());
}

#[test]
fn a_chosen_directory_for_all_has_one_of_each_user() {
    let here = tempfile::tempdir().expect("a temporary directory");
    mode(here.path(), 0o1777);
    let (path, _) = prepare(&chosen(here.path()), user()).expect("sticky");
    assert!(path.ends_with(format!("undercroft-{}", user())));
}

#[test]
fn names_that_a_loader_would_split_are_left_for_another() {
    let here = tempfile::tempdir().expect("a temporary directory");
    for name in ["a b", "a:b", "a$LIB", "a\tb", &"x".repeat(100)] {
        let why = prepare(&chosen(&here.path().join(name)), user()).expect_err("not loadable");
        let expected = match name.len() {
            100.. => matches!(why, PlaceError::TooLong(_)),
            _ => matches!(why, PlaceError::Splits(_)),
        };
        assert!(expected && why.allows_another(), "{name}: {why}");
    }
}

#[test]
fn each_reason_is_told_once_and_the_fix_last() {
    let none = PlaceError::NoneFits(vec![
        PlaceError::NoExec("/a".into()),
        PlaceError::NoExec("/a".into()),
        PlaceError::TooLong("/b".into()),
        PlaceError::unusable(Path::new("/c"), io::ErrorKind::ReadOnlyFilesystem),
        PlaceError::NotADirectory("/d".into()),
    ]);
    let text = none.to_string();
    assert_eq!(text.matches("noexec").count(), 1, "{text}");
    assert!(
        text.contains("/b") && text.contains("/d is no directory"),
        "{text}"
    );
    assert_eq!(text.matches(FIX).count(), 1, "{text}");
}

#[test]
fn candidates_are_of_this_user() {
    let now = Surroundings {
        chosen: None,
        runtime: Some("/".into()),
        temporary: "/tmp".into(),
        user: 1234,
    };
    let paths: Vec<_> = now.candidates().into_iter().map(|c| c.path).collect();
    assert_eq!(paths[0], Path::new("/tmp/undercroft-1234"), "/ is root's");
    let root = Surroundings { user: 0, ..now };
    assert_eq!(root.candidates()[0].path, Path::new("/run/undercroft"));
}

#[test]
fn what_a_dead_keeper_left_is_removed_and_what_lives_is_not() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let open = || check(here.path(), user()).expect("a directory of our own");
    let living = RunDir::create_in(here.path(), open()).expect("a run");
    assert!(living.path(SHIM_LINK).exists());
    // A killed keeper leaves everything but the lock, or had nothing yet. Two more directories are
    // not ours.
    let dead = here.path().join("run-1");
    std::fs::create_dir(&dead).expect("mkdir");
    for file in FILES {
        std::fs::write(dead.join(file), "x").expect("a file");
    }
    for (platform, to) in PLATFORMS {
        std::os::unix::fs::symlink(to, dead.join(platform)).expect("a link");
    }
    std::fs::create_dir(dead.join(STUB_DIR)).expect("mkdir");
    std::fs::write(dead.join(STUB_DIR).join(SHIM_LINK), "x").expect("a file");
    let (foreign, empty) = (here.path().join("2024"), here.path().join("run-2"));
    let full = here.path().join("run-3");
    for path in [&foreign, &empty, &full, &full.join("more")] {
        std::fs::create_dir(path).expect("mkdir");
    }
    let next = RunDir::create_in(here.path(), open()).expect("another run");
    assert!(!dead.exists() && !empty.exists());
    assert!(foreign.exists() && full.exists());
    assert!(
        living.path(SHIM_NAME).exists(),
        "a living run is left alone"
    );
    assert_ne!(next.path, living.path);
    let path = living.path.clone();
    drop(living);
    assert!(!path.exists());
}

#[test]
fn a_run_that_starts_while_leftovers_are_removed_has_its_directory() {
    let here = tempfile::tempdir().expect("a temporary directory");
    let open = || check(here.path(), user()).expect("a directory of our own");
    let ended = AtomicBool::new(false);
    let starts = || {
        // Every name may be taken from it; then it is refused, and has nothing.
        let run = RunDir::take_name(here.path(), open())?;
        Ok::<_, io::Error>(run.is_none_or(|run| run.path(SHIM_LINK).exists()))
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let base = open();
            while !ended.load(Ordering::Relaxed) {
                remove_leftovers(here.path(), &base);
            }
        });
        let all = (0..3000).map(|_| starts()).collect();
        ended.store(true, Ordering::Relaxed);
        all
    });
    for start in all {
        assert!(start.expect("a directory that stays"));
    }
    let left = std::fs::read_dir(here.path()).expect("the directory");
    assert_eq!(left.count(), 0);
}
