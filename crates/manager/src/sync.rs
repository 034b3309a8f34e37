//! Locking that goes on after a panic elsewhere: the manager then ends the client anyway.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
