//! The core of a process has all its pages, those too that had left memory: by a handler of cores
//! that calls `undercroft core`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use undercroft_tests::{Job, MIB, build, mix, say, skip, turn, undercroft};

const FOOTPRINT_MIB: u64 = 64;
const LIMIT: u64 = 24 * MIB;
const PAGE: usize = 4096;

/// Longest time until a handler has written its core.
const WRITTEN: Duration = Duration::from_secs(60);

/// Settings of the whole machine; dropped, they are as before.
struct Setting(&'static str, String);

impl Setting {
    fn to(path: &'static str, value: &str) -> Option<Setting> {
        let old = fs::read_to_string(path).ok()?;
        let setting = Setting(path, old);
        fs::write(path, value).ok()?;
        (fs::read_to_string(path).ok()?.trim() == value).then_some(setting)
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = fs::write(self.0, self.1.trim());
    }
}

/// The handler of `packaging/`, with this binary and this folder for cores.
fn handler(folder: &Path) -> [Option<Setting>; 2] {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/core-handler");
    let script = format!(
        "#!/bin/sh\nexport UNDERCROFT_CORES={folder} UNDERCROFT={binary}\n\
         {example} \"$@\" 2>{folder}/said.$1\necho $? >{folder}/status.$1\n",
        folder = folder.display(),
        binary = undercroft().display(),
        example = example.display(),
    );
    let path = folder.join("handler");
    fs::write(&path, script).expect("the scratch folder");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&path, mode).expect("it is ours");
    let limit = Setting::to("/proc/sys/kernel/core_pipe_limit", "16");
    let line = format!("|{} %P", path.display());
    [limit, Setting::to("/proc/sys/kernel/core_pattern", &line)]
}

/// The pages of `programs/dumps.c` that are whole in the core.
fn whole_pages(core: &[u8]) -> u64 {
    let mut seen = vec![false; FOOTPRINT_MIB as usize * 256];
    for page in core.chunks_exact(PAGE) {
        let word = |at: usize| u64::from_le_bytes(page[8 * at..8 * at + 8].try_into().expect("8"));
        if word(0) >> 32 != 0xC0DE_C0DE {
            continue;
        }
        let number = word(0) & 0xffff_ffff;
        let mut next = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
        let right = (1..PAGE / 8).all(|at| {
            next ^= next << 13;
            next ^= next >> 7;
            next ^= next << 17;
            word(at) == if number % 2 == 1 { next } else { number + 1 }
        });
        if let (true, Some(seen)) = (right, seen.get_mut(number as usize)) {
            *seen = true;
        }
    }
    seen.into_iter().filter(|seen| *seen).count() as u64
}

/// The core that a handler has written whole, and what it said.
fn written(folder: &Path, name: &str) -> Option<(Vec<u8>, String)> {
    let files = fs::read_dir(folder).ok()?.filter_map(Result::ok);
    for file in files.map(|file| file.path()) {
        let pid = file.file_name()?.to_str()?.strip_prefix("status.");
        let Some(pid) = pid.map(str::to_owned) else {
            continue;
        };
        let core = fs::read(folder.join(format!("core.{pid}"))).ok()?;
        // The front ends by the same signal, and dumps core, too.
        if core
            .windows(name.len())
            .any(|bytes| bytes == name.as_bytes())
            && whole_pages(&core) > 0
        {
            let said = fs::read_to_string(folder.join(format!("said.{pid}"))).ok()?;
            return Some((core, said));
        }
    }
    None
}

#[test]
fn a_core_has_the_pages_that_had_left() {
    turn!(one_at_a_time, "a plain run has all its pages in memory");
    let spill = "file:SPILL,size=256M";
    for (at, (words, tier)) in [(&[][..], "ram"), (&["child"], "ram"), (&[], spill)]
        .into_iter()
        .enumerate()
    {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let settings = handler(folder.path());
        if settings.iter().any(Option::is_none) {
            let why = "core_pattern cannot be set: it takes root, and no container";
            return skip(why);
        }
        let file = folder.path().join(format!("spill{:x}", mix(at as u64)));
        let job = Job::new("sh")
            .args(["-c", "ulimit -c unlimited; \"$@\"; exit 0", "sh"])
            .arg(build("dumps"))
            .arg(FOOTPRINT_MIB.to_string())
            .args(words)
            .limit(LIMIT)
            .options(["--wait-all"])
            .tier(&tier.replace("SPILL", &file.to_string_lossy()));
        job.run().expect(0).expect_swapped(1000.0);
        let began = Instant::now();
        let (core, said) = loop {
            if let Some(found) = written(folder.path(), "dumps") {
                break found;
            }
            let files: Vec<_> = fs::read_dir(folder.path()).expect("ours").collect();
            assert!(began.elapsed() < WRITTEN, "no core: {files:?}");
            std::thread::sleep(Duration::from_millis(50));
        };
        let whole = whole_pages(&core);
        say(&format!("core {words:?} in {tier}: {whole} pages"));
        assert_eq!(whole, FOOTPRINT_MIB * 256, "{words:?} in {tier}: {said}");
        assert!(said.is_empty(), "{said}");
    }
}
