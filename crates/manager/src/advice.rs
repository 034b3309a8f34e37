//! The queues of the run's plugin, what it hears and what it wishes, and the counts of both.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use undercroft_base::{Bytes, LatencyClass, Nanos, SpaceId, VirtPage};
use undercroft_plugin::{Counts, Ears, Memory, Parameter, Tier, What, Wishes};
use undercroft_policy::place::{TIERS_MAX, TierState};
use undercroft_proto::report::{PluginParameter, PluginReport};

use crate::sync::lock;

/// The name of the plugin's thread. It may wait for a CPU for very long, and its panics end the
/// plugin and no more.
pub(crate) const PLUGIN_THREAD: &str = "uc-plugin";

/// Between the threads that change the books, the plugin's own, the evictor, and fault threads. No
/// other waits for the plugin's here: it runs only when no other wants the CPU, so a lock that it
/// held could be waited for very long.
#[derive(Default)]
pub(crate) struct Advice {
    /// The path of the plugin's file, for reports.
    file: String,
    /// Another plugin, or none, is in its place.
    over: AtomicBool,
    /// Events on their way to the plugin.
    pub ears: Arc<Ears>,
    /// Pages on their way to the evictor, and to fault threads.
    pub wishes: Wishes,
    /// DRAM in use and faults, as the evictor saw them last.
    used: AtomicU64,
    faults: AtomicU64,
    /// How long the program has waited, as the control thread saw it last.
    waited_ms: AtomicU64,
    /// Wishes that the evictor took.
    asked: AtomicU64,
    /// Wishes that the engine chose.
    chosen: AtomicU64,
    /// Held while wishes of pages to load are taken: several fault threads may do that.
    loads: Mutex<()>,
    /// Such wishes that were taken, and pages of these that are loaded.
    loads_asked: AtomicU64,
    loads_begun: AtomicU64,
    /// The tiers as they were told last, fastest first.
    tiers: [TierCell; TIERS_MAX],
    tier_count: AtomicUsize,
    /// Places that were looked at, and that the engine knows now.
    places_asked: AtomicU64,
    places_known: AtomicU64,
    /// Pages of moves that were looked at, and those of them that moved.
    moves_asked: AtomicU64,
    moves_done: AtomicU64,
    heard: AtomicU64,
    failures: AtomicU64,
    flooded: AtomicU64,
    late: AtomicU64,
    scans: AtomicU64,
    /// Milliseconds between two scans that it asks for; 0: none.
    scan_ms: AtomicU64,
    dismissed: AtomicBool,
    /// The parameters that the plugin has registered at its start.
    parameters: OnceLock<Vec<Setting>>,
    /// A user gave one of them another value, which the plugin's thread has not taken yet.
    was_set: AtomicBool,
}

/// A tier: kind, capacity, free bytes, nanoseconds of a load. Two threads may write it at once; a
/// plugin wishes, so numbers of two moments do no harm.
#[derive(Default)]
struct TierCell([AtomicU64; 4]);

const CLASSES: [LatencyClass; 3] = [
    LatencyClass::Memory,
    LatencyClass::Nvm,
    LatencyClass::Device,
];

/// A parameter, as users set it.
struct Setting {
    name: String,
    value: AtomicI64,
}

impl Advice {
    /// For a plugin that has heard nothing.
    ///
    /// * `file`: its path, for reports.
    pub(crate) fn new(file: &str) -> Advice {
        Advice {
            file: file.to_owned(),
            ..Advice::default()
        }
    }

    /// Another plugin, or none, takes the place of this one: its thread ends.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Whether the plugin's thread is to end.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Takes note of the memory in use, and of the faults so far.
    pub(crate) fn note_memory(&self, used: Bytes, faults: u64) {
        self.used.store(used.0, Ordering::Relaxed);
        self.faults.store(faults, Ordering::Relaxed);
    }

    /// Takes note of the time in which some thread waited for a page.
    pub(crate) fn note_waited(&self, waited: Nanos) {
        let waited_ms = waited.0 / 1_000_000;
        self.waited_ms.store(waited_ms, Ordering::Relaxed);
    }

    /// The memory of the run, for the plugin.
    pub(crate) fn memory(&self, limit: Bytes) -> Memory {
        Memory {
            limit: limit.0,
            used: self.used.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
            waited_ms: self.waited_ms.load(Ordering::Relaxed),
        }
    }

    /// Takes note of the tiers, fastest first, if the plugin asks for them.
    pub(crate) fn note_tiers(&self, tiers: &[TierState]) {
        if !self.ears.asks_tiers() {
            return;
        }
        for (cell, state) in self.tiers.iter().zip(tiers) {
            let tier = Tier::of(state);
            let words = [tier.latency as u64, tier.capacity, tier.free, tier.load_ns];
            for (to, word) in cell.0.iter().zip(words) {
                to.store(word, Ordering::Relaxed);
            }
        }
        let count = tiers.len().min(TIERS_MAX);
        self.tier_count.store(count, Ordering::Release);
    }

    /// The tiers, for the plugin.
    pub(crate) fn tiers(&self) -> impl Iterator<Item = Tier> + '_ {
        let count = self.tier_count.load(Ordering::Acquire);
        self.tiers.iter().take(count).map(|cell| {
            let [class, capacity, free, load_ns] =
                std::array::from_fn(|at| cell.0[at].load(Ordering::Relaxed));
            Tier {
                latency: CLASSES[class as usize % CLASSES.len()],
                capacity,
                free,
                load_ns,
            }
        })
    }

    /// Whether the plugin moves copies, and is asked.
    pub(crate) fn moves(&self) -> bool {
        self.ears.asks_tiers() && !self.dismissed.load(Ordering::Relaxed)
    }

    /// Of `asked` pages that the plugin wanted moved, `moved` moved.
    pub(crate) fn note_moves(&self, asked: u64, moved: usize) {
        self.moves_asked.fetch_add(asked, Ordering::Relaxed);
        self.moves_done.fetch_add(moved as u64, Ordering::Relaxed);
    }

    /// The engine knows `known` of `asked` places that the plugin wished.
    pub(crate) fn note_places(&self, asked: u64, known: u64) {
        self.places_asked.fetch_add(asked, Ordering::Relaxed);
        self.places_known.fetch_add(known, Ordering::Relaxed);
    }

    /// The evictor took `asked` wishes.
    pub(crate) fn note_wishes(&self, asked: usize) {
        self.asked.fetch_add(asked as u64, Ordering::Relaxed);
    }

    /// The engine chose `chosen` pages that the plugin had named.
    pub(crate) fn note_chosen(&self, chosen: u64) {
        self.chosen.fetch_add(chosen, Ordering::Relaxed);
    }

    /// Takes the oldest pages that the plugin wants in memory, up to `most`.
    pub(crate) fn take_loads(&self, most: usize) -> Vec<(SpaceId, VirtPage)> {
        let taking = lock(&self.loads);
        let next = std::iter::from_fn(|| self.wishes.next(What::Prefetch));
        let pages: Vec<_> = next.take(most).collect();
        drop(taking);
        let asked = pages.len() as u64;
        self.loads_asked.fetch_add(asked, Ordering::Relaxed);
        pages
    }

    /// `begun` of the pages that were taken are being loaded.
    pub(crate) fn note_loads(&self, begun: usize) {
        self.loads_begun.fetch_add(begun as u64, Ordering::Relaxed);
    }

    /// Takes note of what the plugin did so far.
    /// * `late`: events that it did not hear, because it was late.
    pub(crate) fn note_counts(&self, counts: Counts, late: u64) {
        self.heard.store(counts.events, Ordering::Relaxed);
        self.failures.store(counts.failures, Ordering::Relaxed);
        self.flooded.store(counts.flooded, Ordering::Relaxed);
        self.late.store(late, Ordering::Relaxed);
        self.scans.store(counts.scans, Ordering::Relaxed);
        if counts.dismissed {
            self.dismiss();
        }
    }

    /// The plugin asks for scans this many milliseconds apart, 0: for none. True if it asked for
    /// none before.
    pub(crate) fn note_scan_ms(&self, scan_ms: u64) -> bool {
        let before = self.scan_ms.swap(scan_ms, Ordering::Relaxed);
        if before != scan_ms {
            self.ears.by_scans(scan_ms > 0);
        }
        scan_ms > 0 && before == 0
    }

    /// The time between two scans that the plugin asks for; `None`: it asks for none.
    pub(crate) fn scan_interval(&self) -> Option<Duration> {
        let scan_ms = self.scan_ms.load(Ordering::Relaxed);
        (scan_ms > 0).then(|| Duration::from_millis(scan_ms))
    }

    /// The plugin is not asked again.
    pub(crate) fn dismiss(&self) {
        self.dismissed.store(true, Ordering::Relaxed);
        self.scan_ms.store(0, Ordering::Relaxed);
    }

    /// Shows these parameters, and lets users set them. Once, at the plugin's start.
    pub(crate) fn show_parameters(&self, parameters: &[Parameter]) {
        let setting = |of: &Parameter| Setting {
            name: of.name.clone(),
            value: AtomicI64::new(of.value),
        };
        let _ = self
            .parameters
            .set(parameters.iter().map(setting).collect());
    }

    /// Whether the plugin is to hear which instructions fault.
    pub(crate) fn wants_instructions(&self) -> bool {
        self.ears.asks_instructions() && !self.dismissed.load(Ordering::Relaxed)
    }

    /// Shows the values that the plugin has given to some of its parameters. Only those: a user may
    /// have set others meanwhile.
    pub(crate) fn show_values(&self, shown: &[(usize, i64)]) {
        let all = self.parameters.get();
        for (at, value) in shown {
            if let Some(of) = all.and_then(|all| all.get(*at)) {
                of.value.store(*value, Ordering::Relaxed);
            }
        }
    }

    /// Gives a parameter another value. Error: there is none of this name, for the user.
    pub(crate) fn set_parameter(&self, name: &str, value: i64) -> Result<(), String> {
        self.setting(name)?.value.store(value, Ordering::Relaxed);
        self.was_set.store(true, Ordering::Release);
        Ok(())
    }

    /// Error: there is no parameter of this name, for the user.
    pub(crate) fn check_parameter(&self, name: &str) -> Result<(), String> {
        self.setting(name).map(|_| ())
    }

    fn setting(&self, name: &str) -> Result<&Setting, String> {
        let Some(all) = self.parameters.get() else {
            return Err("the policy has not begun yet; ask again".to_owned());
        };
        let names = || {
            all.iter()
                .map(|of| &*of.name)
                .collect::<Vec<_>>()
                .join(", ")
        };
        all.iter().find(|of| of.name == name).ok_or_else(|| {
            let of = &self.file;
            match all.len() {
                0 => format!("{of} has no parameter at all"),
                _ => format!("{of} has no parameter `{name}`; it has: {}", names()),
            }
        })
    }

    /// Takes the values that users gave since this was called last, if they gave any.
    pub(crate) fn take_set(&self, mut set: impl FnMut(&str, i64)) {
        if self.was_set.load(Ordering::Relaxed) && self.was_set.swap(false, Ordering::Acquire) {
            for of in self.parameters.get().into_iter().flatten() {
                set(&of.name, of.value.load(Ordering::Relaxed));
            }
        }
    }

    /// For status and report.
    pub(crate) fn report(&self) -> PluginReport {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let parameters = self
            .parameters
            .get()
            .into_iter()
            .flatten()
            .map(|of| PluginParameter {
                name: of.name.clone(),
                value: of.value.load(Ordering::Relaxed),
            });
        PluginReport {
            file: self.file.clone(),
            events: count(&self.heard),
            events_late: count(&self.late),
            failures: count(&self.failures),
            dismissed: self.dismissed.load(Ordering::Relaxed),
            pages_wished: count(&self.asked),
            pages_chosen: count(&self.chosen),
            prefetches_wished: count(&self.loads_asked),
            prefetches_done: count(&self.loads_begun),
            places_wished: count(&self.places_asked),
            places_dropped: count(&self.places_asked).saturating_sub(count(&self.places_known)),
            moves_wished: count(&self.moves_asked),
            moves_done: count(&self.moves_done),
            scans: count(&self.scans),
            wishes_refused: count(&self.flooded),
            wishes_dropped: self.wishes.dropped(),
            parameters: parameters.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::TierId;
    use undercroft_plugin::Wish;

    use super::*;

    /// Each kind of wish has a queue of 4,096, except that tiers and companions share one.
    #[test]
    fn wishes_that_find_their_queue_full_are_counted_in_the_report() {
        let to = |what, page| Wish {
            what,
            space: SpaceId(1),
            page: VirtPage(page),
        };
        let move_one = What::Move {
            pages: 1,
            from: TierId(0),
            to: TierId(1),
        };
        let kinds = [
            What::Reclaim,
            What::ReclaimNow,
            What::Prefetch,
            What::Place(TierId(0)),
            move_one,
        ];
        let advice = Advice::new("a.wasm");
        let dropped = || {
            (
                advice.report().wishes_dropped,
                advice.report().wishes_refused,
            )
        };
        for (kinds_before, what) in kinds.into_iter().enumerate() {
            assert!((0..4096).all(|page| advice.wishes.add(to(what, page))));
            assert_eq!(dropped(), (kinds_before as u64 * 3, 0), "{what:?} has room");
            for page in 0..3 {
                assert!(!advice.wishes.add(to(what, page)), "{what:?} has no room");
            }
        }
        assert!(!advice.wishes.add(to(What::Link(VirtPage(2)), 1)));
        assert_eq!(dropped(), (16, 0));
        assert!(advice.wishes.next(What::Reclaim).is_some());
        assert!(advice.wishes.add(to(What::Reclaim, 9)), "one was taken");
        assert_eq!(dropped(), (16, 0));
    }
}
