//! fork(): what the child has, what the event brings, and which processes may ask for it.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use undercroft_base::VirtRange;
use undercroft_sys::uffd::{Features, MessageBuf, RegisterMode, UffdDevice, UffdError};

use crate::bed::*;

crate::facts! {
    without_the_event_a_child_reads_zeros,
    the_event_brings_the_child_s_own_userfaultfd,
    fork_waits_until_its_event_is_read,
    copy_while_an_event_is_pending_says_the_layout_is_changing,
    protecting_no_page_tells_whether_an_event_is_pending,
    a_fork_event_without_a_free_descriptor_stays_and_fork_waits,
    closing_the_child_s_userfaultfd_lets_it_read_zeros,
    a_wipe_on_fork_child_faults_and_must_get_zeros,
    malloc_of_other_threads_waits_while_a_fork_of_glibc_waits,
    a_fork_of_the_child_is_told_on_the_child_s_userfaultfd,
    vfork_and_spawn_raise_no_event,
    memory_not_copied_on_fork_is_not_in_the_child,
    protection_is_inherited_and_each_process_is_asked_for_its_own,
    the_event_is_refused_without_cap_sys_ptrace,
    the_device_descriptor_serves_a_client_without_capabilities,
}

fn without_the_event_a_child_reads_zeros() {
    let (_ear, area) = Ear::with_area(Features::default(), 1);
    evict(area, 0);
    assert_eq!(child(|_| area.read(0).into()).exit_status(), 0);
}

/// A client with all events whose page 0 is missing; it was moved away, which raises no event.
fn evicted() -> (Ear, Area) {
    let (ear, area) = Ear::with_area(Features::EVENTS, 2);
    crate::moving::move_away(area.part(0, 1));
    (ear, area)
}

fn the_event_brings_the_child_s_own_userfaultfd() {
    let (mut ear, area) = evicted();
    let child = forking_reader(area, 0);
    let mut child_ear = ear.fork();
    assert_eq!(child_ear.fault().page, area.at(0));
    child_ear.serve(area.at(0), 66);
    assert_eq!(child.done(), 66);
    // The parent's page is still missing, and its own.
    let reader = doing(move || area.read(0));
    ear.fault();
    ear.serve(area.at(0), 67);
    assert_eq!(reader.done(), 67);
}

fn fork_waits_until_its_event_is_read() {
    let (mut ear, area) = evicted();
    let child = forking_reader(area, 1);
    child.blocked();
    let _child_ear = ear.fork();
    assert_eq!(child.done(), 11);
}

fn copy_while_an_event_is_pending_says_the_layout_is_changing() {
    let (mut ear, area) = evicted();
    let child = forking_reader(area, 1);
    until("the event is pending", || poll_in(ear.as_fd(), 1) != 0);
    let copied = ear.try_serve(area.at(0), 1);
    assert_eq!(copied, Err(UffdError::LayoutChanging { done: 0 }));
    let _child_ear = ear.fork();
    child.done();
    ear.serve(area.at(0), 1);
    assert_eq!(area.read(0), 1);
}

/// The kernel looks for an event before it looks at the range, and takes no lock for either.
fn protecting_no_page_tells_whether_an_event_is_pending() {
    let (mut ear, area) = evicted();
    let nothing = VirtRange::new(area.at(0), area.at(0));
    let ask = |ear: &Ear| ear.write_protect(nothing, false);
    assert_eq!(ask(&ear), Err(UffdError::Invalid));
    let child = forking_reader(area, 1);
    until("the event is pending", || poll_in(ear.as_fd(), 1) != 0);
    assert_eq!(ask(&ear), Err(UffdError::LayoutChanging { done: 0 }));
    let _child_ear = ear.fork();
    child.done();
    assert_eq!(ask(&ear), Err(UffdError::Invalid));
}

fn a_fork_event_without_a_free_descriptor_stays_and_fork_waits() {
    let (mut ear, area) = evicted();
    let child = forking_reader(area, 1);
    until("the event is pending", || poll_in(ear.as_fd(), 1) != 0);
    let limit = |soft| {
        let limit = libc::rlimit {
            rlim_cur: soft,
            rlim_max: 4096,
        };
        // SAFETY: reads one live structure.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    };
    limit(0);
    let mut buffer = MessageBuf::default();
    let error = ear.read_messages(&mut buffer).err();
    assert_eq!(error.and_then(|e| e.raw_os_error()), Some(libc::EMFILE));
    child.blocked();
    limit(1024);
    let _child_ear = ear.fork();
    assert_eq!(child.done(), 11);
}

fn closing_the_child_s_userfaultfd_lets_it_read_zeros() {
    let (mut ear, area) = evicted();
    let child = forking_reader(area, 0);
    drop(ear.fork());
    assert_eq!(child.done(), 0);
}

fn a_wipe_on_fork_child_faults_and_must_get_zeros() {
    let (mut ear, area) = Ear::with_area(Features::EVENTS, 1);
    assert_eq!(area.advise(libc::MADV_WIPEONFORK), 0);
    let child = forking_reader(area, 0);
    let mut child_ear = ear.fork();
    // The page is present in the parent, yet the child faults.
    assert_eq!(child_ear.fault().page, area.at(0));
    child_ear.serve(area.at(0), 0);
    assert_eq!(child.done(), 0);
    assert_eq!(area.read(0), 10);
}

fn malloc_of_other_threads_waits_while_a_fork_of_glibc_waits() {
    static STEP: AtomicUsize = AtomicUsize::new(0);
    let (mut ear, _area) = evicted();
    doing(|| {
        while STEP.load(SeqCst) == 0 {
            std::hint::spin_loop();
        }
        // Larger than the thread's own cache, smaller than what is mapped directly.
        std::hint::black_box(vec![1u8; 100_000]);
        STEP.store(2, SeqCst);
    });
    let forking = doing(|| child(|_| 7).exit_status());
    // From here on this thread must not allocate either.
    while poll_in(ear.as_fd(), 1) == 0 {}
    STEP.store(1, SeqCst);
    pause(QUIET);
    let went_on = STEP.load(SeqCst) == 2;
    let _child_ear = ear.fork();
    assert_eq!(forking.done(), 7);
    assert!(
        !went_on,
        "malloc went on: a handler inside the client could use it"
    );
    until("malloc", || STEP.load(SeqCst) == 2);
}

fn a_fork_of_the_child_is_told_on_the_child_s_userfaultfd() {
    let (mut ear, area) = evicted();
    let forking = doing(move || {
        let mut child = child(move |_| child(move |_| area.read(0).into()).exit_status());
        child.exit_status()
    });
    let mut child_ear = ear.fork();
    let mut grandchild_ear = child_ear.fork();
    assert_eq!(grandchild_ear.fault().page, area.at(0));
    grandchild_ear.serve(area.at(0), 3);
    assert_eq!(forking.done(), 3);
    ear.silent();
}

fn vfork_and_spawn_raise_no_event() {
    let (mut ear, _area) = evicted();
    // The standard library spawns with CLONE_VM | CLONE_VFORK.
    let spawning = doing(|| std::process::Command::new("/bin/true").status().unwrap());
    assert!(spawning.done().success());
    ear.silent();
}

fn memory_not_copied_on_fork_is_not_in_the_child() {
    let (ear, area) = Ear::with_area(Features::default(), 1);
    assert_eq!(area.advise(libc::MADV_DONTFORK), 0);
    let mut child = child(|_| area.read(0).into());
    let status = child.end();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
    drop(ear);
}

fn protection_is_inherited_and_each_process_is_asked_for_its_own() {
    let wp = Features::EVENTS.with(Features::PAGEFAULT_FLAG_WP);
    let (mut ear, area) = (Ear::new(wp), Area::filled(2));
    ear.register(area.range(), RegisterMode::MISSING_WP)
        .unwrap();
    ear.write_protect(area.range(), true).unwrap();
    let forking = doing(move || {
        let write = move |_: &Parent| {
            area.fill(0, 7);
            (area.read(0) + area.read(1)).into()
        };
        child(write).exit_status()
    });
    let mut child_ear = ear.fork();
    let fault = child_ear.fault();
    assert!(fault.wp && fault.write && fault.page == area.at(0));
    child_ear.write_protect(area.range(), false).unwrap();
    assert_eq!(forking.done(), 7 + 11);
    ear.silent();
    // The parent's is unchanged, protection included.
    assert_eq!(area.read(0), 10);
    let writer = doing(move || area.fill(0, 5));
    assert!(ear.fault().wp);
    ear.write_protect(area.part(0, 1).range(), false).unwrap();
    writer.done();
    assert_eq!(area.read(0), 5);
}

/// Gives up every capability.
fn become_nobody() {
    // SAFETY: numbers only; by raw call, so for this one thread, which is the only one.
    let result = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
    assert_eq!(result, 0);
}

fn skip_unless_root() {
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } != 0 {
        crate::skip("needs root, to give capabilities up");
    }
}

fn the_event_is_refused_without_cap_sys_ptrace() {
    skip_unless_root();
    let device = UffdDevice::open().unwrap();
    let mut client = child(move |_| {
        become_nobody();
        let make = || device.create().unwrap();
        assert_eq!(make().api(Features::EVENT_FORK), Err(UffdError::Denied));
        let others = Features::EVENT_REMAP
            .with(Features::EVENT_REMOVE)
            .with(Features::EVENT_UNMAP);
        assert!(make().api(others).is_ok());
        0
    });
    assert_eq!(client.exit_status(), 0);
}

fn the_device_descriptor_serves_a_client_without_capabilities() {
    skip_unless_root();
    let area = Area::new(1);
    let mut client = child(move |parent| {
        become_nobody();
        if UffdDevice::open().is_ok() {
            println!("  here anybody may open /dev/userfaultfd");
        }
        let device = UffdDevice::from(parent.wait().remove(0));
        let uffd = device.create().unwrap();
        parent.hand_over(&[uffd.as_fd()]);
        drop((uffd, device));
        // A fault in kernel mode, which `unprivileged_userfaultfd=0` would not let it have on its
        // own.
        let (_read, write) = pipe();
        assert_eq!(write_from(write.as_fd(), area, 10).0, 10);
        child(move |_| area.read(0).into()).exit_status()
    });
    client.send(&[UffdDevice::open().unwrap().as_fd()]);
    let mut ear = client.uffd();
    // The handshake and the registration are the manager's.
    ear.api(Features::EVENTS).unwrap();
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    client.go();
    assert_eq!(ear.fault().page, area.at(0));
    ear.serve(area.at(0), 21);
    let _grandchild = ear.fork();
    assert_eq!(client.exit_status(), 21);
}
