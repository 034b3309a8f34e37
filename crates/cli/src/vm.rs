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
use crate::{door, preflight, run};

/// Guest memory of a QEMU without `-m`.
const QEMU_DEFAULT: Bytes = Bytes(128 << 20);

/// Options of QEMU with which guest memory cannot be managed: option, part of its value, why, and
/// what to do.
const QEMU_REFUSED: [(&str, &str, &str, &str); 20] = [
    ("mem-prealloc", "", TOUCHES, "leave -mem-prealloc out"),
    ("mem-path", "", OURS, "leave -mem-path out"),
    ("object", "memory-backend", OURS, "leave the backend out"),
    ("machine", "memory-backend", OURS, "leave it out"),
    ("M", "memory-backend", OURS, "leave it out"),
    ("numa", "memdev", OURS, "leave memdev= out"),
    ("m", "slots", GROWS, "give -m one size"),
    ("m", "maxmem", GROWS, "give -m one size"),
    ("overcommit", "mem-lock=on", LOCKS, "leave mem-lock out"),
    ("device", "vfio", PAST, "leave VFIO devices out"),
    ("device", "vhost-user", OTHERS, "use a device of QEMU's own"),
    ("device", "vhost-vdpa", PAST, "use a device of QEMU's own"),
    (
        "chardev",
        "vhost-user",
        OTHERS,
        "use a device of QEMU's own",
    ),
    ("netdev", "vhost-user", OTHERS, "use -netdev tap or user"),
    ("netdev", "vhost-vdpa", PAST, "use -netdev tap or user"),
    ("drive", "cache=none", PAST, "use cache=writeback"),
    ("drive", "cache=directsync", PAST, "use cache=writethrough"),
    ("drive", "direct=on", PAST, "use cache=writeback"),
    ("blockdev", "direct=on", PAST, "use cache.direct=off"),
    ("blockdev", "\"direct\":true", PAST, "use \"direct\": false"),
];
const TOUCHES: &str =
    "it would use all guest memory at the start, and the limit is there to avoid that";
const OURS: &str = "undercroft makes the guest's memory, and has to know it from the beginning";
const GROWS: &str = "memory that is plugged in later is not managed";
const LOCKS: &str = "locked memory cannot leave";
const OTHERS: &str =
    "another process would map the guest's memory, and read zeros where pages are away";
const PAST: &str = "it writes to guest memory past the manager, into pages that may have left";

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
        (None, true) => qemu_memory(&words[1..])?,
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
    let mut options = run::options(args.run)?;
    options.client.page_size = args.page_size;
    if args.page_size == PageSize::Large {
        fits_large_pages(bytes, options.client.memory_max)?;
    }
    let (memfd, locks) = memories(bytes, args.page_size, options.client.memory_max)?;
    if is_qemu {
        options
            .command
            .extend(qemu_arguments(bytes, memfd.as_raw_fd(), args.page_size));
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
    let own = std::env::current_exe().map_err(|error| {
        let what = "cannot find the binary of undercroft".to_owned();
        refuse(
            what,
            error.to_string(),
            "start it by its path, and leave it in place",
        )
    })?;
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

/// The options that give QEMU its memory. They go along with other `-machine` options. Huge pages
/// are not reserved for all of it: there are only as many as the limit allows.
fn qemu_arguments(bytes: Bytes, memfd: i32, page: PageSize) -> [OsString; 4] {
    let Bytes(bytes) = bytes;
    let reserve = match page {
        PageSize::Base => "",
        PageSize::Large => ",reserve=off",
    };
    let backend = format!(
        "memory-backend-file,id=undercroft,size={bytes},mem-path=/proc/self/fd/{memfd},share=on\
         {reserve}"
    );
    let machine = "memory-backend=undercroft";
    ["-object", &backend, "-machine", machine].map(OsString::from)
}

/// How much memory a QEMU with these arguments gives its guest.
///
/// Errors: it cannot be managed.
fn qemu_memory(arguments: &[String]) -> Result<Bytes, Failure> {
    let mut bytes = QEMU_DEFAULT;
    for (at, word) in arguments.iter().enumerate() {
        let Some(option) = word.strip_prefix('-') else {
            continue;
        };
        let option = option.strip_prefix('-').unwrap_or(option);
        let value = arguments.get(at + 1).map_or("", String::as_str);
        let plain = value.replace(char::is_whitespace, "");
        let mut refused = QEMU_REFUSED.iter();
        if let Some((option, part, why, fix)) =
            refused.find(|row| row.0 == option && plain.contains(row.1))
        {
            let what = format!("QEMU's -{option} {part}");
            let what = format!("{} cannot be used with undercroft vm", what.trim_end());
            return Err(Failure::new(status::USAGE, what, *why, *fix));
        }
        if option == "m" {
            bytes = qemu_size(value).ok_or_else(|| {
                Failure::new(
                    status::USAGE,
                    format!("QEMU's -m {value} is not understood"),
                    "guest memory is made before QEMU starts",
                    "give a whole number of MiB, or a size such as 512M or 4G",
                )
            })?;
        }
    }
    Ok(bytes)
}

/// The size in a value of QEMU's `-m`, as QEMU rounds it.
fn qemu_size(value: &str) -> Option<Bytes> {
    let value = value.strip_prefix("size=").unwrap_or(value);
    let digits = value.trim_end_matches(|last: char| last.is_ascii_alphabetic());
    let shift = match &value[digits.len()..] {
        "B" | "b" => 0,
        "K" | "k" => 10,
        "" | "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return None,
    };
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    let bytes = bytes.checked_next_multiple_of(8192)?;
    (bytes > 0).then_some(Bytes(bytes))
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

    fn memory(line: &str) -> Result<Bytes, Failure> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        qemu_memory(&words)
    }

    #[test]
    fn the_size_of_a_guest_is_that_of_the_last_m() {
        const MIB: u64 = 1 << 20;
        for (line, bytes) in [
            ("-nographic", 128 * MIB),
            ("-m 512", 512 * MIB),
            ("--m 512M -smp 2", 512 * MIB),
            ("-m 1 -m size=2G", 2048 * MIB),
            ("-m 5000k", 5_120_000),
            ("-m 4097b -append mem-prealloc", 8192),
            ("-drive file=a,cache=writeback -machine q35", 128 * MIB),
        ] {
            assert_eq!(memory(line), Ok(Bytes(bytes)), "{line}");
        }
        for line in [
            "-m",
            "-m 1.5G",
            "-m 0",
            "-m 5X",
            "-m 99999999999T",
            "-m 512M,foo=1",
        ] {
            let refused = memory(line).expect_err(line);
            assert!(refused.what.contains("-m"), "{line}: {refused}");
        }
    }

    #[test]
    fn what_cannot_be_managed_is_refused_with_the_fix() {
        for (line, fix) in [
            ("-m 512 -mem-prealloc", "leave -mem-prealloc out"),
            ("-m 512,slots=2,maxmem=1G", "one size"),
            ("-m size=1G,maxmem=2G", "one size"),
            ("-overcommit mem-lock=on", "mem-lock"),
            ("-object memory-backend-ram,id=a,size=1G", "backend"),
            ("-M pc,memory-backend=a", "leave it out"),
            ("-device vfio-pci,host=1", "VFIO"),
            (
                "-drive file=a,if=virtio,cache=none,aio=native",
                "cache=writeback",
            ),
            ("-drive file=a,cache.direct=on", "cache=writeback"),
            ("-blockdev {\"cache\":{\"direct\":true}}", "false"),
            ("-netdev vhost-user,chardev=a,id=b", "-netdev tap"),
        ] {
            let refused = memory(line).expect_err(line);
            assert_eq!(refused.status, status::USAGE);
            assert!(refused.to_string().contains(fix), "{line}: {refused}");
        }
        assert!(memory("-device virtio-blk,drive=a -object rng-random,id=r").is_ok());
    }

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
