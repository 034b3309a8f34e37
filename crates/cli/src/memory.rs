//! Memory that a run may have, of the machine and of its control group, and warnings of limits that
//! do not fit into it.

use undercroft_base::Bytes;
use undercroft_sys::{cgroup, procfs};
use undercroft_terminal::{Failure, status};

/// Memory that a process may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    machine: Bytes,
    /// The limit of its control group, if that is lower.
    group: Option<Bytes>,
}

impl Memory {
    /// * `process`: its process id.
    pub(crate) fn of(process: u32) -> Result<Memory, Failure> {
        let machine = procfs::total_memory().ok_or_else(|| {
            Failure::new(
                status::RUN_FAILED,
                "cannot tell how much memory this machine has",
                "/proc/meminfo has no MemTotal line",
                "mount /proc: `mount -t proc proc /proc`",
            )
        })?;
        let group = cgroup::memory_limit(process).filter(|limit| *limit < machine);
        Ok(Memory { machine, group })
    }

    /// Memory that this process may have.
    pub(crate) fn here() -> Result<Memory, Failure> {
        Memory::of(std::process::id())
    }

    /// The lower of both: a percentage is of it.
    pub(crate) fn all(&self) -> Bytes {
        self.group.unwrap_or(self.machine)
    }

    /// A warning for a run with this limit, `u64::MAX` for none.
    pub(crate) fn warning(&self, memory_max: u64) -> Option<String> {
        let (machine, limit) = (self.machine, Bytes(memory_max));
        let (what, fix) = match (memory_max, self.group) {
            (u64::MAX, None) => return None,
            (u64::MAX, Some(group)) => (
                format!(
                    "there is no --memory-max, and this control group has a memory limit of {group}: the kernel kills \
                     the program when it needs more"
                ),
                "--memory-max auto, which is nine tenths of that",
            ),
            // A tenth more, for what is not counted.
            (_, Some(group)) if memory_max.saturating_add(memory_max / 10) > group.0 => (
                format!(
                    "--memory-max {limit} and what is not counted in it may pass the memory limit of this control \
                     group, {group}: the kernel then kills the program"
                ),
                "--memory-max auto, which is nine tenths of that",
            ),
            _ if limit > machine => (
                format!(
                    "--memory-max {limit} is more than this machine has, {machine}: the program may need more than \
                     there is before any page leaves"
                ),
                "--memory-max auto, which is nine tenths of the machine's memory",
            ),
            _ => return None,
        };
        Some(format!("{what}\n  fix: {fix}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_do_not_fit_are_warned_of_with_the_figures() {
        let mib = |count: u64| count << 20;
        let of = |group: Option<u64>, memory_max: u64| {
            let memory = Memory {
                machine: Bytes(mib(1000)),
                group: group.map(|count| Bytes(mib(count))),
            };
            memory.warning(memory_max).unwrap_or_default()
        };
        assert!(of(Some(200), u64::MAX).contains("limit of 200.0 MiB"));
        assert!(of(Some(200), mib(190)).contains("group, 200.0 MiB"));
        assert!(of(Some(200), mib(3000)).contains("group, 200.0 MiB"));
        assert!(of(None, mib(1001)).contains("more than this machine has, 1000.0 MiB"));
        for fits in [
            of(Some(200), mib(180)),
            of(None, mib(1000)),
            of(None, u64::MAX),
        ] {
            assert_eq!(fits, "");
        }
    }
}
