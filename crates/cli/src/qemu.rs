//! Command lines of QEMU: how much memory the guest has, what cannot be managed, and what is added.

use std::ffi::OsString;
use std::path::PathBuf;

use undercroft_base::{Bytes, PageSize};
use undercroft_terminal::{Failure, status};

/// Guest memory of a QEMU without `-m`.
const DEFAULT: Bytes = Bytes(128 << 20);

/// Options of QEMU with which guest memory cannot be managed: option, part of its value, why, and
/// what to do.
const REFUSED: [(&str, &str, &str, &str); 17] = [
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
    ("device", "vhost-vdpa", PAST, "use a device of QEMU's own"),
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
const PAST: &str = "it writes to guest memory past the manager, into pages that may have left";

/// The options that give QEMU its memory. They go along with other `-machine` options. Huge pages
/// are not reserved for all of it: there are only as many as the limit allows.
pub(crate) fn options(bytes: Bytes, memfd: i32, page: PageSize) -> [OsString; 4] {
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
pub(crate) fn memory(arguments: &[String]) -> Result<Bytes, Failure> {
    let mut bytes = DEFAULT;
    for (at, word) in arguments.iter().enumerate() {
        let Some(option) = word.strip_prefix('-') else {
            continue;
        };
        let option = option.strip_prefix('-').unwrap_or(option);
        let value = arguments.get(at + 1).map_or("", String::as_str);
        check_option(option, value)?;
        if option == "m" {
            bytes = size(value).ok_or_else(|| {
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

/// Errors: an option of QEMU with which guest memory cannot be managed.
fn check_option(option: &str, value: &str) -> Result<(), Failure> {
    let plain = value.replace(char::is_whitespace, "");
    let mut refused = REFUSED.iter();
    let Some((option, part, why, fix)) =
        refused.find(|row| row.0 == option && plain.contains(row.1))
    else {
        return Ok(());
    };
    let what = format!("QEMU's -{option} {part}");
    let what = format!("{} cannot be used with undercroft vm", what.trim_end());
    Err(Failure::new(status::USAGE, what, *why, *fix))
}

/// Errors: a QEMU storage daemon whose disks are read and written past the page cache, and so past
/// the manager.
pub(crate) fn of_storage_daemon(command: &[OsString]) -> Result<(), Failure> {
    let words: Vec<_> = command.iter().map(|word| word.to_string_lossy()).collect();
    if !words[0].ends_with("qemu-storage-daemon") {
        return Ok(());
    }
    for (at, word) in words.iter().enumerate().skip(1) {
        let option = word.trim_start_matches('-');
        let next = words.get(at + 1).map_or("", |next| next);
        let (option, value) = option.split_once('=').unwrap_or((option, next));
        check_option(option, value)?;
    }
    Ok(())
}

/// The size in a value of QEMU's `-m`, as QEMU rounds it.
fn size(value: &str) -> Option<Bytes> {
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

/// The sockets of other processes to which the vhost-user devices of a QEMU with these arguments
/// connect.
pub(crate) fn sockets(arguments: &[String]) -> Vec<PathBuf> {
    let all = arguments.windows(2).filter_map(|words| {
        let option = words[0].strip_prefix('-')?;
        Some((option.strip_prefix('-').unwrap_or(option), &words[1]))
    });
    let is_device = |option: &str| option == "device" || option == "netdev";
    let devices = all.clone().filter(|(option, _)| is_device(option));
    let devices = devices.map(|(_, value)| value.replace(char::is_whitespace, ""));
    let devices: Vec<String> = devices
        .filter(|value| value.contains("vhost-user"))
        .collect();
    let path_of = |value: &String| {
        let words = || value.split(',');
        let part = |name: &str| words().find_map(|word| word.strip_prefix(name));
        let (id, path) = (part("id=")?, part("path=")?);
        let listens = words().any(|word| word == "server" || word == "server=on");
        let (plain, json) = (format!("chardev={id}"), format!("\"chardev\":\"{id}\""));
        let is_its = |of: &String| of.split(',').any(|word| word == plain) || of.contains(&json);
        (!listens && devices.iter().any(is_its)).then(|| PathBuf::from(path))
    };
    let chardevs = all.filter(|(option, value)| *option == "chardev" && value.contains("socket"));
    chardevs.filter_map(|(_, value)| path_of(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory_of(line: &str) -> Result<Bytes, Failure> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        memory(&words)
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
            assert_eq!(memory_of(line), Ok(Bytes(bytes)), "{line}");
        }
        for line in [
            "-m",
            "-m 1.5G",
            "-m 0",
            "-m 5X",
            "-m 99999999999T",
            "-m 512M,foo=1",
        ] {
            let refused = memory_of(line).expect_err(line);
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
            ("-netdev vhost-vdpa,vhostdev=a,id=b", "-netdev tap"),
        ] {
            let refused = memory_of(line).expect_err(line);
            assert_eq!(refused.status, status::USAGE);
            assert!(refused.to_string().contains(fix), "{line}: {refused}");
        }
        assert!(memory_of("-device virtio-blk,drive=a -object rng-random,id=r").is_ok());
        assert!(memory_of("-device vhost-user-blk-pci,chardev=a").is_ok());
    }

    #[test]
    fn a_storage_daemon_that_bypasses_the_page_cache_is_refused() {
        let check = |line: &str| {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            of_storage_daemon(&words)
        };
        for line in [
            "qemu-storage-daemon --blockdev file,filename=a,cache.direct=on",
            "/usr/bin/qemu-storage-daemon --export a --blockdev=file,filename=a,cache.direct=on",
        ] {
            let refused = check(line).expect_err(line);
            assert!(refused.to_string().contains("direct=off"), "{refused}");
        }
        assert!(check("qemu-storage-daemon --blockdev file,filename=a").is_ok());
        assert!(check("other --blockdev file,cache.direct=on").is_ok());
    }

    #[test]
    fn sockets_of_back_ends_are_found_and_no_others() {
        let found = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            sockets(&words)
        };
        let disk = "-chardev socket,id=c,path=/run/c,reconnect=1";
        for (line, expected) in [
            (format!("{disk} -device vhost-user-blk-pci,chardev=c"), 1),
            (
                format!("{disk} -device vhost-user-blk-pci,chardev=c,num-queues=2"),
                1,
            ),
            (format!("{disk} -device vhost-user-blk-pci,chardev=c2"), 0),
            (format!("{disk} -netdev vhost-user,chardev=c,id=n"), 1),
            (format!("--{}", &disk[1..]), 0),
            (
                format!("{disk} -device {{\"driver\":\"vhost-user-fs-pci\",\"chardev\":\"c\"}}"),
                1,
            ),
            (format!("{disk} -device isa-serial,chardev=c"), 0),
            (
                format!("{disk},server=on -device vhost-user-blk-pci,chardev=c"),
                0,
            ),
            ("-device vhost-user-blk-pci,chardev=c".to_owned(), 0),
        ] {
            let paths = found(&line);
            assert_eq!(paths, vec![PathBuf::from("/run/c"); expected], "{line}");
        }
    }
}
