//! Ctrl-C and SIGTERM as a flag that every wait looks at, so that guards unwind and the machine is
//! put back.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Takes SIGINT and SIGTERM over for the rest of the process; called before a rig changes the
/// machine.
pub(crate) fn install() {
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

/// True once SIGINT or SIGTERM has come.
pub(crate) fn requested() -> bool {
    FLAG.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}
