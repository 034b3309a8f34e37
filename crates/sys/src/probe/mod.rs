//! Abilities of this kernel: each one that Undercroft needs is tried, not guessed from a version
//! number.
//!
//! Nothing is left behind: every trial uses its own descriptor, mapping, thread or child. A failed
//! trial is an answer here.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use undercroft_base::{PageSize, VirtPage, VirtRange};

use crate::access::{AccessError, AccessScanner};
use crate::pagemap::{Category, Pagemap};
use crate::process;
use crate::sideband::Sideband;
use crate::uffd::{Features, Uffd, UffdDevice};
use crate::uffd_source::UffdSource;

mod swap;
mod trial;

pub use swap::Swaps;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As it should be.
    Ok,
    /// Works, with less speed or safety; `detail` says what is missing.
    Degraded,
    /// `undercroft run` cannot work without it.
    Missing,
}

/// An ability and its trial.
#[derive(Clone, Debug)]
pub struct Check {
    /// The ability tried. The name is the same in every release.
    pub name: &'static str,
    /// How it came out.
    pub state: State,
    /// The finding, for the user.
    pub detail: String,
    /// The remedy; empty when `state` is Ok.
    pub fix: String,
}

/// The checks of one probe, in a fixed order.
#[derive(Clone, Debug)]
pub struct KernelReport {
    /// The checks, one an ability.
    pub checks: Vec<Check>,
}

impl KernelReport {
    /// All checks, as `undercroft doctor` prints them. Cost: about 40 ms, at most 300 ms.
    ///
    /// * `dir`: where the files of tiers are tried.
    pub fn take(dir: &Path) -> KernelReport {
        let who = Who::now();
        let mut report = KernelReport::fast();
        report.checks.extend([
            direct_io(dir).named("direct I/O"),
            memlock().named("locked memory"),
            fifo(who).named("real-time priority"),
            layout_watch(who).named("layout watch"),
            access_bits(who).named("access bits"),
            guest_access(trial::zap_one_page(), who).named("guest access"),
            Swaps::open().check(),
            memory_group().named("memory group"),
            huge_pages(&sysfs("/sys/kernel/mm/transparent_hugepage/enabled"))
                .named("transparent huge pages"),
            cpus(process::allowed_cpus(0)).named("CPUs"),
            overcommit(&sysfs("/proc/sys/vm/overcommit_memory")).named("overcommit"),
        ]);
        report
    }

    /// Only the checks that decide whether `undercroft run` can work. Cost: about 1 ms, at most 50
    /// ms (a fork of a large process).
    pub fn fast() -> KernelReport {
        let mut checks = vec![kernel(&sysfs("/proc/sys/kernel/osrelease")).named("kernel")];
        let who = Who::now();
        // As `run` does.
        let source = UffdSource::open();
        let device = UffdDevice::open().map(drop);
        let devices = sysfs("/proc/misc");
        checks
            .push(device_check(&device, source.is_ok(), who, &devices).named("userfaultfd device"));
        let make = || match &source {
            Ok(source) => source.create(),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        };
        checks.extend(features(make().and_then(|uffd| Ok(uffd.api(Features(0))?))));
        let may_trace = process::has_ptrace();
        let has_source = source.is_ok();
        checks.push(match (has_source, may_trace) {
            (true, _) => fork_event(&make, who).named("fork events"),
            (false, true) => not_tried().named("fork events"),
            (false, false) => missing(
                "may not follow forks: no CAP_SYS_PTRACE",
                &who.lacks("sys_ptrace"),
            )
            .named("fork events"),
        });
        checks.push(
            if has_source {
                moves(&make)
            } else {
                not_tried()
            }
            .named("page moves"),
        );
        checks.push(pagemap_scan().named("pagemap scan"));
        checks.push(remote_read().named("reading the program's memory"));
        checks.push(same_memory().named("telling whose memory an agent has"));
        checks.push(ring(&sysfs("/proc/sys/kernel/io_uring_disabled")).named("io_uring"));
        checks.push(open_files().named("open files"));
        KernelReport { checks }
    }

    /// The worst state of all checks.
    pub fn worst(&self) -> State {
        let states = self.checks.iter().map(|check| check.state);
        states.max().unwrap_or(State::Ok)
    }

    /// The checks whose result is `state`.
    pub fn with_state(&self, state: State) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(move |check| check.state == state)
    }

    /// The check of that name, if it was made.
    pub fn check(&self, name: &str) -> Option<&Check> {
        self.checks.iter().find(|check| check.name == name)
    }
}

/// A check that the caller names.
fn found(state: State, detail: impl Into<String>, fix: &str) -> Check {
    Check {
        name: "",
        state,
        detail: detail.into(),
        fix: fix.into(),
    }
}

fn ok(detail: impl Into<String>) -> Check {
    found(State::Ok, detail, "")
}

fn missing(detail: impl Into<String>, fix: &str) -> Check {
    found(State::Missing, detail, fix)
}

fn degraded(detail: impl Into<String>, fix: &str) -> Check {
    found(State::Degraded, detail, fix)
}

impl Check {
    fn named(self, name: &'static str) -> Check {
        Check { name, ..self }
    }
}

fn sysfs(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().into()
}

/// Major and minor of a release text such as `6.18.44-generic`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel(release: &str) -> Check {
    if release.is_empty() {
        return degraded("not known, without /proc", "mount -t proc proc /proc");
    }
    let detail = format!("Linux {release}");
    match version(release) {
        Some(version) if version >= (6, 8) => ok(detail),
        Some(_) => missing(
            format!("{detail} is older than 6.8: pages cannot be moved out"),
            "use Linux 6.8 or newer",
        ),
        None => degraded(
            format!("{detail}: cannot read the version"),
            "none needed if the other checks pass",
        ),
    }
}

/// The user who asks, as far as a fix depends on it.
#[derive(Clone, Copy, Debug)]
struct Who {
    user: u32,
    group: u32,
    /// In a user namespace below that of the machine: the kernel then counts no capability of it
    /// for userfaultfd.
    is_below: bool,
}

impl Who {
    fn now() -> Who {
        let map = sysfs("/proc/self/uid_map");
        let whole = ["0", "0", "4294967295"];
        Who {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            is_below: !map.is_empty() && !map.split_whitespace().eq(whole),
        }
    }

    /// How root gives a run of this user a capability, in two ways.
    fn with(&self, capability: &str) -> String {
        let Who { user, group, .. } = self;
        let upper = capability.to_uppercase();
        format!(
            "as root: setpriv --reuid {user} --regid {group} --init-groups --inh-caps +{capability} --ambient-caps \
             +{capability} undercroft run ..., or: systemd-run --uid {user} --gid {group} --pty \
             -p AmbientCapabilities=CAP_{upper} undercroft run ..."
        )
    }

    /// How to get a capability without which a run works, too.
    fn may_have(&self, capability: &str) -> String {
        if self.is_below || self.user == 0 {
            return self.lacks(capability);
        }
        let upper = capability.to_uppercase();
        format!(
            "run as root; or give CAP_{upper}, too: --inh-caps +{capability} --ambient-caps +{capability} of setpriv, \
             AmbientCapabilities=CAP_{upper} of systemd; the program then has it, too"
        )
    }

    /// How to get a capability that this user lacks.
    fn lacks(&self, capability: &str) -> String {
        let upper = capability.to_uppercase();
        if self.is_below {
            "run outside of the user namespace (a rootless container is in one): the kernel counts no capability of it"
                .to_owned()
        } else if self.user == 0 {
            format!(
                "give the container CAP_{upper}: docker and podman --cap-add {upper}; Kubernetes \
                 securityContext.capabilities.add: [{upper}]; a systemd unit CapabilityBoundingSet="
            )
        } else {
            format!("run as root; or {}", self.with(capability))
        }
    }
}

/// Number of a device in /proc/misc, if the kernel has it.
fn minor<'a>(devices: &'a str, name: &str) -> Option<&'a str> {
    devices.lines().find_map(|line| {
        let (minor, of) = line.trim().split_once(' ')?;
        (of == name).then_some(minor)
    })
}

/// * `call`: whether the system call serves instead.   * `devices`: /proc/misc.
fn device_check(device: &io::Result<()>, call: bool, who: Who, devices: &str) -> Check {
    let Err(error) = device else {
        return ok("/dev/userfaultfd opens");
    };
    let is_absent = error.kind() == io::ErrorKind::NotFound;
    let detail = if is_absent {
        "/dev/userfaultfd does not exist".to_owned()
    } else {
        format!("/dev/userfaultfd does not open: {error}")
    };
    let group = format!(
        "as root: groupadd -f uffd && usermod -aG uffd USER && echo 'KERNEL==\"userfaultfd\", GROUP=\"uffd\", \
         MODE=\"0660\"' > /etc/udev/rules.d/60-userfaultfd.rules && udevadm control --reload && udevadm trigger \
         --name-match=userfaultfd, with the name of user {}, who then logs in again",
        who.user
    );
    let container = "in a container add the device: docker and podman --device /dev/userfaultfd";
    let fix = match (is_absent, who.user) {
        (true, _) => match minor(devices, "userfaultfd") {
            Some(minor) => format!(
                "{container}; in a chroot mount /dev, or make the file: mknod -m 600 /dev/userfaultfd c 10 {minor}"
            ),
            None => {
                format!("{container}; otherwise use Linux 6.1 or newer with CONFIG_USERFAULTFD=y")
            }
        },
        (false, 0) => container.to_owned(),
        (false, _) => group,
    };
    if call {
        degraded(
            format!(
                "{detail}; the system call serves instead: the program keeps CAP_SYS_PTRACE, and what its processes \
                 start after they gave it up is not managed"
            ),
            &fix,
        )
    } else {
        missing(detail, &fix)
    }
}

/// Feature, name of its check, what its absence means, what to do.
const NEEDED: [(Features, &str, State, &str); 8] = [
    (
        Features::EVENT_FORK,
        "uffd EVENT_FORK",
        State::Missing,
        "a forked child would read zeros",
    ),
    (
        Features::EVENT_REMAP,
        "uffd EVENT_REMAP",
        State::Missing,
        "a moved mapping would read zeros",
    ),
    (
        Features::EVENT_REMOVE,
        "uffd EVENT_REMOVE",
        State::Missing,
        "dropped memory would come back",
    ),
    (
        Features::EVENT_UNMAP,
        "uffd EVENT_UNMAP",
        State::Missing,
        "unmapped memory would come back",
    ),
    (
        Features::PAGEFAULT_FLAG_WP,
        "uffd PAGEFAULT_FLAG_WP",
        State::Missing,
        "pages that a fork shares could not be protected, and would pass the limit",
    ),
    (
        Features::THREAD_ID,
        "uffd THREAD_ID",
        State::Missing,
        "the fault thread could not follow the program's CPUs",
    ),
    (
        Features::MOVE,
        "uffd MOVE",
        State::Missing,
        "no page could leave the program",
    ),
    (
        Features::POISON,
        "uffd POISON",
        State::Degraded,
        "a page whose copy is damaged ends the program instead of the access",
    ),
];

fn features(have: io::Result<Features>) -> Vec<Check> {
    let have = match have {
        Ok(have) => have,
        Err(error) => {
            let detail = format!("no userfaultfd can be made: {error}");
            let fix = "run as root, or see the check of the device";
            return vec![missing(detail, fix).named("uffd features")];
        }
    };
    let check = |(feature, name, state, lost): (Features, &'static str, State, &str)| {
        if have.has(feature) {
            return ok("supported").named(name);
        }
        let fix = "use Linux 6.8 or newer (x86-64, CONFIG_HAVE_ARCH_USERFAULTFD_WP)";
        found(state, format!("not supported: {lost}"), fix).named(name)
    };
    NEEDED.into_iter().map(check).collect()
}

/// A check that needs a userfaultfd, and there is none.
fn not_tried() -> Check {
    missing(
        "not tried: no userfaultfd can be made",
        "see the check of the device",
    )
}

fn fork_event(make: &dyn Fn() -> io::Result<Uffd>, who: Who) -> Check {
    match make().and_then(|uffd| Ok(uffd.api(Features::EVENT_FORK)?)) {
        Ok(_) => ok("may follow forks"),
        Err(error) => missing(
            format!("may not follow forks (CAP_SYS_PTRACE): {error}"),
            &who.lacks("sys_ptrace"),
        ),
    }
}

/// The fix, unless the kernel has the thing and refuses it to this user. File capabilities close a
/// process's own files in /proc to it.
fn unless_refused(error: &io::Error, fix: &'static str) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "run as root, or without file capabilities (setcap) on the binary"
        }
        _ => fix,
    }
}

fn moves(make: &dyn Fn() -> io::Result<Uffd>) -> Check {
    match make().and_then(|uffd| trial::move_one_page(&uffd)) {
        Ok(()) => ok("a page moved, bytes intact"),
        Err(error) => missing(
            format!("a page did not move ({error}): none could leave the program"),
            unless_refused(&error, "use Linux 6.8 or newer"),
        ),
    }
}

fn pagemap_scan() -> Check {
    let trial = || -> io::Result<bool> {
        let page = crate::mapping::PageBuf::new(1, PageSize::Base)?;
        let start = VirtPage::of(page.as_ptr() as u64);
        let mut found = Vec::new();
        let range = VirtRange::new(start, start.plus(1));
        let pagemap = Pagemap::open(std::process::id())?;
        pagemap.scan(range, Category::PRESENT, &mut found)?;
        Ok(found.len() == 1 && found[0].1.has(Category::PRESENT))
    };
    match trial() {
        Ok(true) => ok("finds present pages"),
        Ok(false) => missing("a present page was not found", "report this kernel"),
        Err(error) => missing(
            format!("PAGEMAP_SCAN: {error}"),
            unless_refused(
                &error,
                "use Linux 6.7 or newer with CONFIG_PROC_PAGE_MONITOR=y, and /proc mounted",
            ),
        ),
    }
}

fn remote_read() -> Check {
    let yama = sysfs("/proc/sys/kernel/yama/ptrace_scope");
    match trial::read_child() {
        Ok(()) => ok("process_vm_readv works on a child"),
        Err(error) => missing(
            format!("process_vm_readv on a child: {error} (yama ptrace_scope: {yama:?})"),
            "run as root; allow process_vm_readv in the seccomp profile; sysctl kernel.yama.ptrace_scope=1",
        ),
    }
}

fn same_memory() -> Check {
    let this = std::process::id();
    match process::share_memory(this, this) {
        Ok(true) => ok("kcmp works"),
        other => missing(
            format!("kcmp on this process: {other:?}: no page can leave"),
            "a kernel with CONFIG_KCMP; allow kcmp in the container's seccomp profile",
        ),
    }
}

fn ring(sysctl: &str) -> Check {
    match io_uring::IoUring::new(4) {
        Ok(_) => ok("usable"),
        Err(error) => missing(
            format!(
                "not usable ({error}; kernel.io_uring_disabled={sysctl:?}): the manager cannot start"
            ),
            "sysctl kernel.io_uring_disabled=0; allow io_uring in the container's seccomp profile",
        ),
    }
}

/// With fewer descriptors than this, a tree of some hundred processes runs out.
const OPEN_FILES_MIN: u64 = 4096;

fn open_files() -> Check {
    let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if limit >= OPEN_FILES_MIN {
        return ok(format!("hard limit {limit}"));
    }
    let detail = format!("hard limit {limit}: each process of the program takes several");
    degraded(detail, "ulimit -Hn 65536")
}

fn direct_io(dir: &Path) -> Check {
    let open = |flags| -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        options.custom_flags(libc::O_TMPFILE | flags).open(dir)
    };
    let fix = "set UNDERCROFT_DIR to a directory on ext4, xfs or btrfs";
    match (open(libc::O_DIRECT), open(0)) {
        (Ok(_), _) => ok(format!("works in {}", dir.display())),
        (Err(error), Ok(_)) => degraded(
            format!(
                "{} takes no O_DIRECT ({error}): the page cache would hold what was evicted",
                dir.display()
            ),
            fix,
        ),
        (_, Err(error)) => missing(
            format!("no temporary file in {}: {error}", dir.display()),
            "set UNDERCROFT_DIR to a directory on ext4, xfs or btrfs that may be written to; or run with --tier ram",
        ),
    }
}

/// Memory that a manager locks: code, buffers, rings.
const MEMLOCK_MIN: u64 = 64 << 20;

fn memlock() -> Check {
    let limit = getrlimit(Resource::Memlock).maximum.unwrap_or(u64::MAX);
    let may_exceed = process::status_hex(std::process::id(), "CapEff")
        .is_some_and(|caps| caps >> CAP_IPC_LOCK & 1 == 1);
    match limit {
        _ if may_exceed => ok("not limited (CAP_IPC_LOCK)"),
        u64::MAX => ok("not limited"),
        limit if limit >= MEMLOCK_MIN => ok(format!("hard limit {} MiB", limit >> 20)),
        limit => degraded(
            format!(
                "hard limit {} KiB: the manager itself may be swapped out",
                limit >> 10
            ),
            "ulimit -Hl unlimited, or LimitMEMLOCK=infinity in the unit",
        ),
    }
}

const CAP_IPC_LOCK: u32 = 14;

fn fifo(who: Who) -> Check {
    // In its own thread: a thread that raised its priority may not be allowed back.
    let tried = std::thread::spawn(|| process::set_fifo(0, 1)).join();
    match tried {
        Ok(Ok(())) => ok("permitted"),
        Ok(Err(error)) => degraded(
            format!("SCHED_FIFO refused ({error}): a busy machine delays faults"),
            &who.may_have("sys_nice"),
        ),
        Err(_) => degraded("the trial thread failed", "none"),
    }
}

/// In a chroot without it.
const SYSFS: &str = "mount -t sysfs sysfs /sys";

fn no_sysfs() -> bool {
    !Path::new("/sys/kernel").exists()
}

fn layout_watch(who: Who) -> Check {
    match Sideband::open(std::process::id()) {
        Ok(_) => ok("perf side-band events usable"),
        Err(error) => degraded(
            format!("perf side-band refused ({error}): new mappings are found by re-scanning"),
            &match error.kind() {
                // Which CPUs there are.
                io::ErrorKind::NotFound if no_sysfs() => SYSFS.to_owned(),
                io::ErrorKind::NotFound => "see the check of /proc".to_owned(),
                _ => format!(
                    "sysctl kernel.perf_event_paranoid=2 or lower; or {}",
                    who.may_have("perfmon")
                ),
            },
        ),
    }
}

fn access_bits(who: Who) -> Check {
    match AccessScanner::open() {
        Ok(_) => ok("page tables can be walked: `run --access-scan` works"),
        Err(error) => degraded(
            format!("not to be had ({error}): policies learn from faults alone"),
            &match error {
                AccessError::NotPermitted(_) if who.user == 0 => {
                    "give CAP_BPF and CAP_PERFMON; a user namespace cannot have them".to_owned()
                }
                AccessError::NotPermitted(_) => {
                    "run as root; or give CAP_BPF and CAP_PERFMON as above".to_owned()
                }
                AccessError::NoTypes(_) if no_sysfs() => SYSFS.to_owned(),
                AccessError::NoTypes(_) => "a kernel built with CONFIG_DEBUG_INFO_BTF".to_owned(),
                AccessError::FiveLevels => "boot with no5lvl".to_owned(),
                _ => "leave --access-scan out; nothing else needs them".to_owned(),
            },
        ),
    }
}

/// Whether it can be found out which pages a virtual machine uses.
///
/// * `zapped`: a page of this process was taken out of its page tables.
fn guest_access(zapped: io::Result<bool>, who: Who) -> Check {
    const ALONE: &str = "policies learn of a guest from faults alone";
    let fixed_by = |why: &str, fix: &str| degraded(format!("not to be had: {why}; {ALONE}"), fix);
    match zapped {
        _ if !process::has_sys_nice() => {
            fixed_by("CAP_SYS_NICE is missing", &who.may_have("sys_nice"))
        }
        _ if Swaps::open().is_any() => fixed_by("kernel swap is on", "swapoff"),
        Ok(true) => ok("pages can be taken out of page tables: `vm --access-scan` works"),
        Ok(false) => fixed_by(
            "the kernel leaves shared pages mapped",
            "Linux 6.7 or newer",
        ),
        Err(error) => fixed_by(&error.to_string(), "Linux 6.7 or newer"),
    }
}

/// The memory limit of the control group, which `--memory-max` has to stay below.
fn memory_group() -> Check {
    match crate::cgroup::memory_limit(std::process::id()) {
        None => ok("no control group limits this process's memory"),
        Some(limit) => ok(format!(
            "limit {} MiB: a program that passes it is killed; keep --memory-max a tenth below",
            limit.0 >> 20
        )),
    }
}

fn huge_pages(mode: &str) -> Check {
    let chosen = mode.split(['[', ']']).nth(1).unwrap_or("");
    match chosen {
        "always" => degraded(
            "always: each huge page costs about 0.3 ms to split when its first page is evicted",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        "" => ok("not in this kernel"),
        mode => ok(mode),
    }
}

fn cpus(allowed: io::Result<Vec<usize>>) -> Check {
    match allowed {
        Ok(cpus) if cpus.len() >= 2 => ok(format!("{} usable", cpus.len())),
        Ok(_) => degraded(
            "one usable: eviction and the program share it",
            "give it a second CPU (taskset, cpuset, --cpus)",
        ),
        Err(error) => degraded(format!("cannot be told: {error}"), "mount /proc"),
    }
}

fn overcommit(mode: &str) -> Check {
    match mode {
        "2" => degraded(
            "strict: the sparse mappings of the ledger and the RAM tier may be refused",
            "sysctl vm.overcommit_memory=0",
        ),
        mode => ok(format!("vm.overcommit_memory={mode}")),
    }
}

/// How long a trial child may take to answer before it counts as failed.
const CHILD_WAIT_MAX: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
