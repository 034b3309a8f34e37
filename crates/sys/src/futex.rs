//! Waiting on a word shared between processes.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex;

/// Sleeps while `word` is `expected`, until woken or for `timeout`. Returns at once if it differs;
/// may wake without a reason. False: the time is over.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) -> bool {
    let timeout = timeout.map(|t| rustix::fs::Timespec {
        tv_sec: t.as_secs() as i64,
        tv_nsec: i64::from(t.subsec_nanos()),
    });
    let result = futex::wait(word, futex::Flags::empty(), expected, timeout.as_ref());
    result != Err(rustix::io::Errno::TIMEDOUT)
}

/// Wakes up to `count` threads that wait on `word`, in this process or another.
pub fn wake(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, futex::Flags::empty(), count);
}
