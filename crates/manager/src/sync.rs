//! Locking that ignores poison: a panic of any thread ends the manager.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

/// Locks `mutex`, also after a panic of its last holder.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `of` for reading, in the same way.
pub(crate) fn read<T>(of: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    of.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no thread has `of` that locked it before.
pub(crate) fn pass<T>(of: &RwLock<T>) {
    drop(of.write().unwrap_or_else(PoisonError::into_inner));
}
