//! New program images: all ways to start one give what they give in a plain run, and no loader
//! complains of the shim where it cannot load it.

use std::path::{Path, PathBuf};
use std::process::Command;

use undercroft_tests::{
    Job, MIB, Outcome, beside_others, build, build_with, find, plain_only, say, skip, turn,
};

/// Runs the command plain and under a limit. Both give the same output and errors.
fn same_as_plain(job: &Job) -> Outcome {
    let plain = job.run().expect(0);
    let ours = job.clone().limit(64 * MIB).run();
    let ours = ours.expect(0);
    assert_eq!(plain.text(), ours.text());
    assert_eq!(plain.errors, ours.errors);
    ours
}

/// A folder that every user can search, as programs that give up their rights do.
pub(crate) fn scratch() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(scratch.path(), open).expect("chmod");
    scratch
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The program for 32-bit machines; `None` if this one cannot build or run it.
fn narrow() -> Option<PathBuf> {
    let narrow = build_with("images", "32", "cc", &["-m32", "-w"]).filter(|path| {
        let shown = Command::new(path).arg("show").status();
        shown.is_ok_and(|status| status.code() == Some(7))
    });
    if narrow.is_none() {
        skip("no 32-bit programs here; on Debian: gcc-multilib");
    }
    narrow
}

/// A root with the program, a shell and their libraries, and nothing else.
fn bare_root(root: &Path, program: &Path) {
    let script = "mkdir -p $1/bin; cp $2 $1/bin/images; cp /bin/sh $1/bin/sh
        for file in $2 /bin/sh; do ldd $file; done | grep -o '/[^ ]*' | while read -r library; do
            mkdir -p $1$(dirname $library); cp -n $library $1$library
        done";
    let mut copying = Command::new("sh");
    copying.args(["-ec", script, "sh"]).args([root, program]);
    let status = copying.status().expect("sh runs");
    assert!(status.success(), "the libraries are copied");
}

#[test]
fn searches_for_programs_find_and_fail_as_plain_ones() {
    turn!(beside_others, "it compares with a plain run");
    let program = build("images");
    let table = |limit: bool| {
        let folder = scratch();
        let mut job = Job::new(&program).arg("table").arg(folder.path());
        if limit {
            job = job.limit(64 * MIB);
        }
        job.run().expect(0)
    };
    let (plain, ours) = (table(false), table(true));
    assert_eq!(plain.text(), ours.text());
    assert_eq!(plain.errors, ours.errors);
    assert!(ours.text().lines().count() >= 66, "{ours}");
}

#[test]
fn every_way_to_start_an_image_gives_the_same() {
    turn!(beside_others, "it compares with a plain run");
    let program = build("images");
    let ways = Job::new(&program).arg("ways").arg(&program);
    let shown = same_as_plain(&ways);
    assert_eq!(shown.text().matches("64 bits").count(), 17, "{shown}");
    same_as_plain(&Job::new(&program).arg("ways").arg("/none/such"));
    same_as_plain(&Job::new(&program).arg("descriptors"));
    // A large environment, and a preload of the program's own.
    same_as_plain(&Job::new(&program).args(["large", "ways"]).arg(&program));
    same_as_plain(&ways.env("LD_PRELOAD", "libm.so.6"));
}

#[test]
fn a_32_bit_program_starts_without_a_word_and_its_children_are_managed() {
    let _turn = beside_others();
    let Some(narrow) = narrow() else { return };
    if plain_only() {
        return skip("it compares with a plain run");
    }
    let wide = build("images");
    let ways = Job::new(&wide).arg("ways").arg(&narrow);
    let shown = same_as_plain(&ways);
    assert_eq!(shown.text().matches("32 bits").count(), 17, "{shown}");
    same_as_plain(&ways.clone().env("LD_PRELOAD", "libm.so.6"));
    same_as_plain(&Job::new(&wide).args(["large", "ways"]).arg(&narrow));
    // From a script, and by a search.
    let script = "./narrow show; PATH=.; exec narrow show";
    let scratch = scratch();
    std::os::unix::fs::symlink(&narrow, scratch.path().join("narrow")).expect("a link");
    let job = Job::new("sh").args(["-c", script]).folder(scratch.path());
    let (plain, ours) = (job.run(), job.limit(64 * MIB).run());
    assert_eq!((plain.text(), plain.errors), (ours.text(), ours.errors));
    // 64, 32, 64 bits: the last one has the shim.
    let chain = [
        narrow.as_os_str(),
        "then".as_ref(),
        wide.as_os_str(),
        "maps".as_ref(),
    ];
    let job = Job::new(&wide).arg("then").args(chain);
    let outcome = job.limit(64 * MIB).run().expect(0);
    assert_eq!(
        (outcome.text().as_str(), outcome.errors.as_str()),
        ("mapped\n", "")
    );
}

#[test]
fn a_program_with_another_root_starts_images_without_a_word() {
    let _turn = beside_others();
    if plain_only() || !is_root() {
        return skip("it compares with a plain run, and wants root");
    }
    let (program, root) = (build("images"), scratch());
    bare_root(root.path(), &program);
    let ways = Job::new(&program)
        .arg("chroot")
        .arg(root.path())
        .arg("/bin/images");
    let shown = same_as_plain(&ways);
    assert_eq!(shown.text().matches("64 bits").count(), 17, "{shown}");
    same_as_plain(&ways.clone().env("LD_PRELOAD", "libm.so.6"));
    let large = Job::new(&program).args(["large", "chroot"]);
    same_as_plain(&large.arg(root.path()).arg("/bin/images"));
    let by_chroot = [
        "/bin/sh",
        "-c",
        "/bin/images show a; /bin/images show b; exit 0",
    ];
    same_as_plain(&Job::new("chroot").arg(root.path()).args(by_chroot));
}

#[test]
fn a_sandbox_without_our_directory_starts_programs_without_a_word() {
    let name = "a_sandbox_without_our_directory_starts_programs_without_a_word";
    let _turn = beside_others();
    if plain_only() || find("bwrap").is_none() {
        return skip("it compares with a plain run, and wants bubblewrap");
    }
    let words = "--ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
                 --symlink usr/bin /bin --tmpfs /tmp sh -c";
    let bwrap = Job::new("bwrap").args(words.split_whitespace());
    let bwrap = bwrap.arg("cat /bin/sh | wc -c; sh -c 'echo a'; exit 0");
    if bwrap.run().code() != Some(0) {
        return skip("bubblewrap does not work here");
    }
    say(&format!("{name}: {}", same_as_plain(&bwrap).text().trim()));
}
