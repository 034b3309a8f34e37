//! `undercroft vm`: a run of the monitor of a virtual machine. The guest's memory is a memfd that
//! is made here and that the monitor maps. It outlives managers, and pages can be taken out of it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use undercroft_base::{Bytes, PageCount, PageSize};
use undercroft_proto::options::{LockMemory, RunOptions};
use undercroft_sys::huge_pages::HugePages;
use undercroft_sys::{object, page_locks};
use undercroft_terminal::{Failure, status};
use undercroft_tier::source::{self, Source};

use crate::args::{Log, RunArgs, VmArgs};
use crate::{awaits, door, preflight, qemu, run};

/// Everything before the run itself, as for `run`. Then the guest's memory is made.
///
/// Errors: as printed, with the exit status.
pub(crate) fn options(mut args: VmArgs) -> Result<RunOptions, Failure> {
    if let (Some(socket), Some(file)) = (args.socket.take(), args.memory_file.take()) {
        return of_door(args.run, &socket, &file);
    }
    let words = args.run.command.iter();
    let words: Vec<String> = words
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let is_qemu = Path::new(&words[0])
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("qemu-system-"));
    let bytes = match (args.memory, is_qemu) {
        (None, true) => qemu::memory(&words[1..])?,
        (Some(bytes), false) => bytes,
        (Some(_), true) => {
            let (what, why) = ("--memory is not for QEMU", "QEMU says it by its own -m");
            return Err(Failure::new(status::USAGE, what, why, "leave --memory out"));
        }
        (None, false) => {
            return Err(Failure::new(
                status::USAGE,
                format!("how much memory the guest of {} has is not known", words[0]),
                "only the command line of qemu-system-* is understood",
                "give --memory SIZE; the program finds the number of the memory's descriptor in \
                 UNDERCROFT_MEMORY_FD, and maps all of it with MAP_SHARED",
            ));
        }
    };
    let switch = huge_pages(Path::new("/sys/kernel/mm/transparent_hugepage"));
    if let Some(switch) = switch.filter(|_| args.page_size == PageSize::Base) {
        return Err(Failure::new(
            status::RUN_FAILED,
            "shared memory may have huge pages here",
            "only pages of 4 KiB can leave the guest's memory",
            format!(
                "echo never > {}, or use huge pages for all of it (--page-size 2M)",
                switch.display()
            ),
        ));
    }
    if args.page_size == PageSize::Large && args.run.trace.is_some() {
        return Err(Failure::new(
            status::USAGE,
            "--trace cannot be used with --page-size 2M",
            "a trace has pages of 4 KiB",
            "leave one of them out",
        ));
    }
    let log = args.run.log;
    let mut options = run::options(args.run)?;
    options.client.page_size = args.page_size;
    if is_qemu {
        let sockets = qemu::sockets(&words[1..]);
        options.launcher = awaits::launcher(&sockets, log).map_err(no_path)?;
    }
    if args.page_size == PageSize::Large {
        fits_large_pages(bytes, options.client.memory_max)?;
    }
    let (memfd, locks) = memories(bytes, args.page_size, options.client.memory_max)?;
    if is_qemu {
        options
            .command
            .extend(qemu::options(bytes, memfd.as_raw_fd(), args.page_size));
    }
    // From here on as descriptors that this process was given: the program inherits them.
    options.guest = Some(memfd.into_raw_fd());
    options.locks = Some(locks);
    Ok(options)
}

/// The memory of a guest, and that in which programs lock its pages.
fn memories(bytes: Bytes, page: PageSize, limit: Bytes) -> Result<(OwnedFd, LockMemory), Failure> {
    let refuse = |error: io::Error| {
        Failure::new(
            status::RUN_FAILED,
            format!("cannot make the guest's memory of {bytes}"),
            error.to_string(),
            "give the guest less memory, or raise RLIMIT_FSIZE (ulimit -f)",
        )
    };
    let memfd = object::create("undercroft-guest", bytes, page).map_err(refuse)?;
    Ok((memfd, lock_memory(bytes, page, limit).map_err(refuse)?))
}

/// The memory in which programs lock pages of a guest of `bytes` bytes. All of them may lock a
/// quarter of the limit: twice as much is kept at most, and the other half moves.
fn lock_memory(bytes: Bytes, page: PageSize, limit: Bytes) -> io::Result<LockMemory> {
    let each = page.bytes() as u64;
    let most = bytes.min(limit).0 / (4 * page_locks::CLIENTS as u64 * each);
    let each_max = PageCount(most.max(1));
    let pages = PageCount(bytes.0.div_ceil(each));
    let memfd = page_locks::create(pages, page, each_max)?;
    Ok(LockMemory {
        memfd: memfd.into_raw_fd(),
        each_max: each_max.0,
    })
}

/// The run whose program listens at `socket` for machines that begin as `file` has them.
fn of_door(mut args: RunArgs, socket: &Path, file: &Path) -> Result<RunOptions, Failure> {
    let refuse =
        |what: String, why: String, fix: &str| Failure::new(status::RUN_FAILED, what, why, fix);
    preflight::null()?;
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or(path.to_owned());
    let (socket, file) = (absolute(socket), absolute(file));
    let source = Source::open(&file).map_err(|error| {
        let what = format!("cannot serve {}", file.display());
        refuse(
            what,
            error.to_string(),
            "give the mem_file_path of the snapshot as --memory-file",
        )
    })?;
    let text = file.to_str().filter(|text| !text.contains(','));
    let tier = text.map(|text| format!("{}:{text}", source::FACTS.kind).parse());
    let Some(Ok(tier)) = tier else {
        let what = format!("cannot serve {}", file.display());
        let why = "its name has a comma or is not UTF-8".to_owned();
        return Err(refuse(what, why, "give the file another name, or a link"));
    };
    let own = std::env::current_exe().map_err(no_path)?;
    let listener = door::listen(&socket)?;
    // From here on as a descriptor that this process was given: the program inherits it.
    let number = listener.into_raw_fd().to_string();
    let bytes = source.bytes().0.to_string();
    args.command = vec![own.into_os_string(), "door".into()];
    args.command
        .extend(["--listener", &number, "--bytes", &bytes].map(OsString::from));
    let log = if args.log == Log::Json {
        "json"
    } else {
        "text"
    };
    args.command
        .extend(["--log", log, "--socket"].map(OsString::from));
    args.command.push(socket.into_os_string());
    let mut options = run::options_of_checked(args)?;
    options.client.tiers.push(tier);
    run::check_count(&options.client.tiers)?;
    Ok(options)
}

fn no_path(error: io::Error) -> Failure {
    let (what, fix) = (
        "cannot find the binary of undercroft",
        "start it by its path, and leave it in place",
    );
    Failure::new(status::RUN_FAILED, what, error.to_string(), fix)
}

/// Large pages that the limit holds at least: one on its way in, one on its way out, and those that
/// an instruction needs.
const LARGE_PAGES_MIN: u64 = 8;

/// Whether a guest of this size can have pages of 2 MiB under this limit, and the pool has enough
/// of them now. It may have less later: then the guest is held to less.
fn fits_large_pages(bytes: Bytes, memory_max: Bytes) -> Result<(), Failure> {
    let page = PageSize::Large.bytes() as u64;
    if !bytes.0.is_multiple_of(page) {
        return Err(Failure::new(
            status::USAGE,
            format!("a guest of {bytes} has no whole number of pages of 2 MiB"),
            "pages are not split",
            "give it a multiple of 2M",
        ));
    }
    if memory_max.0 < LARGE_PAGES_MIN * page {
        return Err(Failure::new(
            status::USAGE,
            format!("--memory-max {memory_max} is too small for pages of 2 MiB"),
            format!("it has to hold {LARGE_PAGES_MIN} of them"),
            "raise it, or leave --page-size out",
        ));
    }
    let needed = bytes.min(memory_max).0.div_ceil(page);
    let refuse = |why: String, pages: u64| {
        Failure::new(
            status::RUN_FAILED,
            format!("the machine needs {needed} huge pages"),
            why,
            format!("sysctl vm.nr_hugepages={pages}, or leave --page-size out"),
        )
    };
    let pool = HugePages::now()
        .map_err(|error| refuse(format!("the kernel's pool cannot be read: {error}"), needed))?;
    let lacks = needed.saturating_sub(pool.available);
    if lacks == 0 {
        return Ok(());
    }
    let why = match pool.available {
        0 => "none is free in the kernel's pool".to_owned(),
        some => format!("only {some} are free in the kernel's pool"),
    };
    Err(refuse(why, pool.pages + lacks))
}

/// The first switch below `root` that allows huge pages in shared memory.
fn huge_pages(root: &Path) -> Option<PathBuf> {
    let sizes = fs::read_dir(root).into_iter().flatten().flatten();
    let sizes = sizes.map(|entry| entry.path()).filter(|path| path.is_dir());
    let folders = std::iter::once(root.to_owned()).chain(sizes);
    let mut switches = folders.map(|folder| folder.join("shmem_enabled"));
    switches.find(|switch| {
        let text = fs::read_to_string(switch).unwrap_or_default();
        let on = ["[always]", "[within_size]", "[advise]", "[force]"];
        on.iter().any(|word| text.contains(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_that_allows_huge_pages_is_found() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let folder = root.path().join(name);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join("shmem_enabled"), text).expect("written");
        };
        write("", "always within_size advise [never] deny force\n");
        write(
            "hugepages-64kB",
            "always [inherit] within_size advise never\n",
        );
        assert_eq!(huge_pages(root.path()), None);
        write(
            "hugepages-64kB",
            "always inherit within_size [advise] never\n",
        );
        let found = huge_pages(root.path()).expect("one is on");
        assert!(found.ends_with("hugepages-64kB/shmem_enabled"));
        assert_eq!(huge_pages(Path::new("/nowhere")), None);
    }

    #[test]
    fn a_pool_that_is_too_small_is_refused_with_the_number_that_is_needed() {
        let mib = |count: u64| Bytes(count << 20);
        let refused = |bytes, limit| fits_large_pages(bytes, limit).expect_err("it does not fit");
        assert!(refused(mib(63), mib(32)).why.contains("not split"));
        assert!(refused(mib(64), mib(15)).why.contains("8 of them"));
        // No machine has as many huge pages.
        let failure = refused(mib(1 << 30), Bytes(u64::MAX));
        assert_eq!(failure.what, "the machine needs 536870912 huge pages");
        assert!(failure.fix.contains("sysctl vm.nr_hugepages="), "{failure}");
        let failure = refused(mib(1 << 30), mib(1 << 29));
        assert_eq!(failure.what, "the machine needs 268435456 huge pages");
    }
}
