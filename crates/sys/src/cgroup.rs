//! The memory limit of the control groups that a process is in, as a container has one.

use std::fs;

use undercroft_base::Bytes;

/// Version 1 writes "no limit" as a number near 2^63.
const NO_LIMIT: u64 = 1 << 62;

/// Where version 2 is mounted: alone, or beside version 1.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const MEMORY: [&str; 1] = ["/sys/fs/cgroup/memory"];

/// The lowest memory limit of a process's control group and of those above it. The kernel's OOM
/// killer ends a process of the group when an installed page passes it.
///
/// * `process`: its process id.
pub fn memory_limit(process: u32) -> Option<Bytes> {
    let groups = crate::procfs::text_of(&format!("/proc/{process}/cgroup")).ok()?;
    limit_of(&groups, |path| fs::read_to_string(path).ok())
}

/// * `groups`: the text of `/proc/PID/cgroup`.   * `read`: the text of a file.
pub(crate) fn limit_of(groups: &str, read: impl Fn(&str) -> Option<String>) -> Option<Bytes> {
    let mut lowest: Option<u64> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (roots, file): (&[&str], _) = if number == "0" && controllers.is_empty() {
            (&UNIFIED, "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            (&MEMORY, "memory.limit_in_bytes")
        } else {
            continue;
        };
        // Inside a container the path may be that of outside, and only the root is there.
        let mut group = path.trim_end_matches('/');
        loop {
            for root in roots {
                let limit = read(&format!("{root}{group}/{file}"));
                let limit = limit.and_then(|text| text.trim().parse::<u64>().ok()); // not `max`
                let limit = limit.filter(|bytes| *bytes < NO_LIMIT);
                lowest = lowest.into_iter().chain(limit).min();
            }
            match group.rsplit_once('/') {
                Some((above, _)) => group = above,
                None => break,
            }
        }
    }
    lowest.map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let read = |path: &str| {
            let found = files.iter().find(|(name, _)| *name == path);
            found.map(|(_, text)| (*text).to_owned())
        };
        limit_of(groups, read).map(|bytes| bytes.0)
    }

    #[test]
    fn the_lowest_limit_up_the_hierarchy_counts() {
        let files = [
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "300\n"),
            ("/sys/fs/cgroup/memory.max", "900\n"),
        ];
        assert_eq!(limit("0::/a/b\n", &files), Some(300));
        assert_eq!(limit("0::/\n", &files), Some(900));
        assert_eq!(limit("0::/a/b\n", &files[..1]), None);
    }

    #[test]
    fn version_1_has_a_number_for_no_limit() {
        let own = "/sys/fs/cgroup/memory/job/memory.limit_in_bytes";
        let root = "/sys/fs/cgroup/memory/memory.limit_in_bytes";
        let none = "9223372036854771712\n";
        let groups = "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n";
        assert_eq!(limit(groups, &[(own, "4096\n"), (root, none)]), Some(4096));
        assert_eq!(limit(groups, &[(own, none), (root, none)]), None);
        // The path of outside is not there.
        assert_eq!(
            limit("4:memory:/docker/7f\n", &[(root, "8192\n")]),
            Some(8192)
        );
    }

    #[test]
    fn nonsense_is_no_limit() {
        for groups in ["", "0", "0::", "memory", "x:memory:", "0::/a\n\n"] {
            assert_eq!(limit(groups, &[]), None, "{groups:?}");
        }
    }
}
