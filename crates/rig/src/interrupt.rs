//! Ctrl-C and SIGTERM as a flag. Every wait checks it, so that guards unwind and the machine is
//! restored.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Handles SIGINT and SIGTERM for the rest of the process. Called before a rig changes the machine.
pub fn install() {
    FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            if let Err(error) = signal_hook::flag::register(signal, flag.clone()) {
                eprintln!(
                    "lab: signal {signal} is not handled ({error}); do not interrupt this run"
                );
            }
        }
        flag
    });
}

/// Whether SIGINT or SIGTERM has come.
pub fn requested() -> bool {
    FLAG.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}
