//! The queues of the run's plugin, what it hears and what it wishes, and the counts of both.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use undercroft_base::Bytes;
use undercroft_plugin::{Counts, Ears, Memory, Parameter, Wishes};
use undercroft_proto::report::{PluginParameter, PluginReport};

/// The name of the plugin's thread. It may wait for a CPU for very long, and its panics end the
/// plugin and no more.
pub(crate) const PLUGIN_THREAD: &str = "uc-plugin";

/// Between the threads that change the books, the plugin's own, and the evictor. None of them
/// waits for another here: the plugin's thread runs only when no other wants the CPU, so a lock
/// that it held could be waited for very long.
#[derive(Default)]
pub(crate) struct Advice {
    /// Events on their way to the plugin.
    pub ears: Arc<Ears>,
    /// Pages on their way to the evictor.
    pub wishes: Wishes,
    /// DRAM in use and faults, as the evictor saw them last.
    used: AtomicU64,
    faults: AtomicU64,
    /// Wishes that the evictor took.
    asked: AtomicU64,
    heard: AtomicU64,
    failures: AtomicU64,
    flooded: AtomicU64,
    late: AtomicU64,
    dismissed: AtomicBool,
    /// The parameters that the plugin has registered at its start.
    parameters: OnceLock<Vec<Parameter>>,
}

impl Advice {
    /// Takes note of the memory in use, and of the faults so far.
    pub(crate) fn note_memory(&self, used: Bytes, faults: u64) {
        self.used.store(used.0, Ordering::Relaxed);
        self.faults.store(faults, Ordering::Relaxed);
    }

    /// The memory of the run, for the plugin.
    pub(crate) fn memory(&self, limit: Bytes) -> Memory {
        Memory {
            limit: limit.0,
            used: self.used.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
        }
    }

    /// The evictor took `asked` wishes.
    pub(crate) fn note_wishes(&self, asked: usize) {
        self.asked.fetch_add(asked as u64, Ordering::Relaxed);
    }

    /// Takes note of what the plugin did so far.
    /// * `late`: events that it did not hear, because it was late.
    pub(crate) fn note_counts(&self, counts: Counts, late: u64) {
        self.heard.store(counts.events, Ordering::Relaxed);
        self.failures.store(counts.failures, Ordering::Relaxed);
        self.flooded.store(counts.flooded, Ordering::Relaxed);
        self.late.store(late, Ordering::Relaxed);
        if counts.dismissed {
            self.dismiss();
        }
    }

    /// The plugin is not asked again.
    pub(crate) fn dismiss(&self) {
        self.dismissed.store(true, Ordering::Relaxed);
    }

    /// The parameters that the plugin has registered at its start.
    pub(crate) fn set_parameters(&self, parameters: &[Parameter]) {
        let _ = self.parameters.set(parameters.to_vec()); // once
    }

    /// For status and report.
    /// * `chosen`: victims that it had named, as the engine counts them.
    pub(crate) fn report(&self, file: &str, chosen: u64) -> PluginReport {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let parameters = self
            .parameters
            .get()
            .into_iter()
            .flatten()
            .map(|of| PluginParameter {
                name: of.name.clone(),
                value: of.value,
            });
        PluginReport {
            file: file.to_owned(),
            events: count(&self.heard),
            events_late: count(&self.late),
            failures: count(&self.failures),
            dismissed: self.dismissed.load(Ordering::Relaxed),
            pages_wished: count(&self.asked),
            pages_chosen: chosen,
            wishes_refused: count(&self.flooded) + self.wishes.dropped(),
            parameters: parameters.collect(),
        }
    }
}
