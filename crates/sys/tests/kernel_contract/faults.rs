//! Faults: which raise a message, which are errors, which do neither.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use undercroft_base::ThreadId;
use undercroft_sys::process::instruction_of;
use undercroft_sys::uffd::{Features, RegisterMode, Uffd, UffdDevice, UffdError};

use crate::bed::*;

crate::facts! {
    a_missing_page_gives_one_message_with_page_access_and_thread,
    a_thread_that_waits_for_a_page_shows_its_instruction,
    two_readers_get_a_message_once,
    a_user_mode_only_userfaultfd_fails_system_calls_on_missing_pages,
    a_kernel_mode_fault_with_a_pending_signal_repeats_its_message,
    a_user_mode_fault_lets_the_signal_handler_run_and_faults_again,
    a_write_protect_fault_is_told_from_a_missing_one,
    dropping_a_page_does_not_wake_who_waits_for_its_write_protection,
    copy_over_a_present_page_exists_and_wakes_nobody,
    copy_into_a_read_only_or_inaccessible_mapping_works,
    poison_gives_sigbus,
    poison_gives_efault_in_system_calls_and_copy_heals_it,
    poison_survives_the_last_close,
    poison_on_a_present_page_exists,
    a_touch_of_an_inaccessible_registered_page_is_sigsegv_without_a_message,
    a_system_call_blocked_on_a_missing_page_blocks_every_writer_of_the_pipe,
    the_kernel_s_write_at_thread_exit_skips_a_missing_page,
    the_handshake_works_once,
    poll_of_a_blocking_userfaultfd_is_an_error,
    a_second_userfaultfd_cannot_register_the_range,
}

fn a_missing_page_gives_one_message_with_page_access_and_thread() {
    let (mut ear, area) = Ear::with_area(Features::THREAD_ID, 2);
    for write in [false, true] {
        evict(area, 1);
        let toucher = doing(move || {
            if write {
                area.write(1, 5)
            } else {
                assert_eq!(area.read(1), 4)
            }
        });
        let expected = Fault {
            page: area.at(1),
            write,
            wp: false,
            thread: ThreadId(toucher.thread),
        };
        assert_eq!(ear.fault(), expected);
        ear.silent();
        ear.serve(area.at(1), 4);
        toucher.done();
    }
    assert_eq!(area.read(1), 5);
}

fn a_thread_that_waits_for_a_page_shows_its_instruction() {
    let (mut ear, area) = Ear::with_area(Features::THREAD_ID, 2);
    let mut seen = |write: bool| {
        evict(area, 1);
        let toucher = doing(move || {
            if write {
                area.write(1, 5)
            } else {
                let _ = area.read(1);
            }
        });
        assert_eq!(ear.fault().thread.0, toucher.thread);
        let at = instruction_of(std::process::id(), toucher.thread).unwrap();
        ear.serve(area.at(1), 4);
        toucher.done();
        at
    };
    let [read, again, write] = [false, false, true].map(&mut seen);
    assert_eq!(read, again);
    assert_ne!(read, write);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let holds = |line: &str| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|at| u64::from_str_radix(at, 16).unwrap());
        rest.starts_with("r-x") && (from..to).contains(&read)
    };
    assert!(maps.lines().any(holds), "{read:x} is no code: {maps}");
    assert_eq!(instruction_of(std::process::id(), u32::MAX), None);
}

fn two_readers_get_a_message_once() {
    let (mut ear, area) = Ear::with_area(Features::default(), 1);
    let mut second = Ear::of(ear.as_fd().try_clone_to_owned().unwrap().into());
    evict(area, 0);
    let reader = doing(move || area.read(0));
    ear.fault();
    second.silent();
    ear.serve(area.at(0), 1);
    reader.done();
}

const USER_MODE_ONLY: i32 = 1;

fn raw_userfaultfd(flags: i32) -> Option<Uffd> {
    // SAFETY: flags by value only.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    // SAFETY: the kernel just gave us this descriptor; nothing else owns it.
    (fd >= 0).then(|| Uffd::from(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
}

fn a_user_mode_only_userfaultfd_fails_system_calls_on_missing_pages() {
    let uffd = raw_userfaultfd(libc::O_NONBLOCK | USER_MODE_ONLY).unwrap();
    uffd.api(Features::default()).unwrap();
    let area = Area::filled(1);
    uffd.register(area.range(), RegisterMode::MISSING).unwrap();
    evict(area, 0);
    let (_read, write) = pipe();
    assert_eq!(write_from(write.as_fd(), area, 100), (-1, libc::EFAULT));
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_signal(_: i32) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

fn handle_usr1() {
    let handler = count_signal as extern "C" fn(i32);
    // SAFETY: the handler only adds to an atomic, which is allowed in one.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
}

fn signal(thread: u32) {
    // SAFETY: numbers only; the thread is of this process and waits.
    unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), thread, libc::SIGUSR1) };
}

fn a_kernel_mode_fault_with_a_pending_signal_repeats_its_message() {
    handle_usr1();
    let (mut ear, area) = Ear::with_area(Features::default(), 1);
    evict(area, 0);
    let (_read, write) = pipe();
    let writer = doing(move || write_from(write.as_fd(), area, 100).0);
    ear.fault();
    ear.silent();
    signal(writer.thread);
    let (start, mut repeats) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_millis(50) {
        repeats += usize::from(ear.hear(5).as_ref().is_some_and(crate::death::is_fault));
    }
    println!("  {repeats} repeats in 50 ms");
    assert!(repeats > 10);
    ear.serve(area.at(0), 1);
    assert_eq!(writer.done(), 100);
}

fn a_user_mode_fault_lets_the_signal_handler_run_and_faults_again() {
    handle_usr1();
    let (mut ear, area) = Ear::with_area(Features::default(), 1);
    evict(area, 0);
    let reader = doing(move || area.read(0));
    ear.fault();
    signal(reader.thread);
    assert_eq!(ear.fault().page, area.at(0));
    assert_eq!(SIGNALS.load(Ordering::SeqCst), 1);
    ear.silent();
    ear.serve(area.at(0), 9);
    assert_eq!(reader.done(), 9);
}

fn protected() -> (Ear, Area) {
    let ear = Ear::new(Features::PAGEFAULT_FLAG_WP);
    let area = Area::filled(1);
    ear.register(area.range(), RegisterMode::MISSING_WP)
        .unwrap();
    ear.write_protect(area.range(), true).unwrap();
    (ear, area)
}

fn a_write_protect_fault_is_told_from_a_missing_one() {
    let (mut ear, area) = protected();
    assert_eq!(area.read(0), 10);
    let writer = doing(move || area.write(0, 5));
    let fault = ear.fault();
    assert!(fault.wp && fault.write);
    ear.write_protect(area.range(), false).unwrap();
    writer.done();
    assert_eq!(area.read(0), 5);
}

fn dropping_a_page_does_not_wake_who_waits_for_its_write_protection() {
    let (mut ear, area) = protected();
    let writer = doing(move || area.write(0, 5));
    assert!(ear.fault().wp);
    evict(area, 0);
    writer.blocked();
    ear.silent();
    ear.wake(area.range()).unwrap();
    let fault = ear.fault();
    assert!(!fault.wp && fault.write);
    ear.serve(area.at(0), 1);
    writer.done();
    assert_eq!(area.read(0), 5);
}

fn copy_over_a_present_page_exists_and_wakes_nobody() {
    let (mut ear, area) = Ear::with_area(Features::default(), 2);
    evict(area, 0);
    let reader = doing(move || area.read(0));
    ear.fault();
    let page = [3; PAGE];
    ear.copy(area.at(0), &page, true).unwrap();
    let again = ear.try_serve(area.at(0), 4);
    assert_eq!(again, Err(UffdError::Exists { done: 0 }));
    reader.blocked();
    ear.wake(area.range()).unwrap();
    assert_eq!(reader.done(), 3);
    // Progress is counted in pages up to the one that is there, and reported as "again".
    evict(area, 0);
    let both = ear.copy(area.at(0), &[6; 2 * PAGE], false);
    assert_eq!(both, Err(UffdError::LayoutChanging { done: 1 }));
}

fn copy_into_a_read_only_or_inaccessible_mapping_works() {
    for prot in [libc::PROT_READ, libc::PROT_NONE] {
        let (ear, area) = Ear::with_area(Features::default(), 1);
        area.protect(prot);
        evict(area, 0);
        ear.serve(area.at(0), 77);
        area.protect(RW);
        assert_eq!(area.read(0), 77);
    }
}

fn poisoned() -> (Ear, Area) {
    let (ear, area) = (Ear::new(Features::POISON), Area::new(1));
    ear.register(area.range(), RegisterMode::MISSING).unwrap();
    ear.poison(area.range()).unwrap();
    (ear, area)
}

/// The signal that ends a child doing this.
fn signal_of(work: impl FnOnce()) -> Option<i32> {
    let mut child = child(|_| {
        work();
        0
    });
    let status = child.end();
    libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status))
}

fn poison_gives_sigbus() {
    let signal = signal_of(|| {
        let (_ear, area) = poisoned();
        area.read(0);
    });
    assert_eq!(signal, Some(libc::SIGBUS));
}

fn poison_gives_efault_in_system_calls_and_copy_heals_it() {
    let (ear, area) = poisoned();
    let (_read, write) = pipe();
    assert_eq!(write_from(write.as_fd(), area, 10), (-1, libc::EFAULT));
    ear.serve(area.at(0), 4);
    assert_eq!(area.read(0), 4);
}

fn poison_survives_the_last_close() {
    let signal = signal_of(|| {
        let (ear, area) = poisoned();
        drop(ear);
        area.read(0);
    });
    assert_eq!(signal, Some(libc::SIGBUS));
}

fn poison_on_a_present_page_exists() {
    let (ear, area) = Ear::with_area(Features::POISON, 1);
    let refused = ear.poison(area.range());
    assert_eq!(refused, Err(UffdError::Exists { done: 0 }));
}

fn a_touch_of_an_inaccessible_registered_page_is_sigsegv_without_a_message() {
    let mut client = child(|parent| {
        let (ear, area) = Ear::with_area(Features::default(), 1);
        evict(area, 0);
        area.protect(libc::PROT_NONE);
        parent.hand_over(&[ear.as_fd()]);
        area.read(0).into()
    });
    let mut ear = client.uffd();
    client.go();
    let status = client.end();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
    ear.silent();
}

fn a_system_call_blocked_on_a_missing_page_blocks_every_writer_of_the_pipe() {
    let (mut ear, area) = Ear::with_area(Features::default(), 2);
    evict(area, 0);
    let (_read, write) = pipe();
    // SAFETY: numbers only.
    unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
    let again = write.try_clone().unwrap();
    let first = doing(move || write_from(write.as_fd(), area, 100).0);
    ear.fault();
    let second = doing(move || write_from(again.as_fd(), area.part(1, 1), 4).0);
    second.blocked();
    ear.serve(area.at(0), 1);
    assert_eq!((first.done(), second.done()), (100, 4));
}

fn the_kernel_s_write_at_thread_exit_skips_a_missing_page() {
    let (mut ear, area) = Ear::with_area(Features::default(), 1);
    let address = area.address;
    evict(area, 0);
    std::thread::spawn(move || {
        // SAFETY: the kernel clears this word when the thread ends; the page stays mapped.
        unsafe { libc::syscall(libc::SYS_set_tid_address, address) };
        // SAFETY: the thread ends without Rust's clean-up, and no thread joins it.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    });
    // It may ask for the page (a message), but it does not wait for it.
    let asked = ear.hear(QUIET).is_some();
    pause(QUIET);
    ear.serve(area.at(0), 0x5a);
    pause(QUIET);
    println!("  a message came: {asked}");
    assert_eq!(
        area.read(0),
        0x5a,
        "the word was not cleared: a join would hang"
    );
}

fn the_handshake_works_once() {
    let uffd = UffdDevice::open().unwrap().create().unwrap();
    uffd.api(Features::default()).unwrap();
    assert_eq!(uffd.api(Features::default()), Err(UffdError::Invalid));
}

fn poll_of_a_blocking_userfaultfd_is_an_error() {
    let blocking = raw_userfaultfd(0).unwrap();
    blocking.api(Features::default()).unwrap();
    assert_eq!(poll_in(blocking.as_fd(), 0), libc::POLLERR);
    let without_handshake = raw_userfaultfd(libc::O_NONBLOCK).unwrap();
    assert_eq!(poll_in(without_handshake.as_fd(), 0), libc::POLLERR);
}

fn a_second_userfaultfd_cannot_register_the_range() {
    let (_ear, area) = Ear::with_area(Features::default(), 2);
    let second = Ear::new(Features::default());
    let refused = second.register(area.range(), RegisterMode::MISSING);
    assert_eq!(refused, Err(UffdError::Busy { done: 0 }));
}
