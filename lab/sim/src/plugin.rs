//! The user's policy in a replay: it hears each event at once, and what it wishes leaves first, or
//! comes while there is room, or moves between tiers, as in a run. It hears uses of pages only from
//! scans that it asks for, which take no time; and the first use of each page that came along.

use std::fs::File;
use std::io::Read;
use std::sync::Arc;

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{BookEvent, Engine, Journal, PageEvent, Placing};
use undercroft_engine::{VecLedger, WishedMove};
use undercroft_plugin::{Desk, Ears, Found, Host, MODULE_BYTES_MAX, Memory, Tier, What, Wishes};
use undercroft_policy::place::TierState;

/// Pages that a manager loads ahead between two looks for faults.
const LOADS_A_TURN: usize = 16;

/// A policy file at work.
pub(crate) struct Plugin {
    ears: Arc<Ears>,
    desk: Desk,
    wishes: Wishes,
    /// When it was told of a scan last; `None`: there was none.
    scanned_ms: Option<u64>,
}

impl Plugin {
    /// Reads a policy file. Errors: why it cannot be read, or is no policy.
    pub(crate) fn open(path: &str) -> Result<Plugin, String> {
        let mut module = Vec::new();
        File::open(path)
            .and_then(|file| {
                let most = MODULE_BYTES_MAX as u64 + 1;
                file.take(most).read_to_end(&mut module)
            })
            .map_err(|error| error.to_string())?;
        let mut host = Host::default();
        let plugin = undercroft_plugin_wasm::Plugin::read(&module, &mut host);
        let plugin = plugin.map_err(|refusal| refusal.to_string())?;
        let ears = Ears::default();
        if host.asks_tiers() {
            ears.ask_tiers();
        }
        Ok(Plugin {
            ears: Arc::new(ears),
            desk: Desk::with_host(Box::new(plugin), host),
            wishes: Wishes::default(),
            scanned_ms: None,
        })
    }

    /// Has it hear what happens in this engine from now on.
    pub(crate) fn attend(&self, engine: &mut Engine<VecLedger>) {
        engine.add_journal(self.ears.clone());
    }

    /// Tells it what has happened.
    /// * `tiers`: as they are now, fastest first.
    pub(crate) fn tell(&mut self, memory: Memory, tiers: &[TierState], now_ms: u64) {
        let wishes = &self.wishes;
        let mut wish = |wish| _ = wishes.add(wish);
        let free = wishes.moves_free();
        self.desk.tiers(tiers.iter().map(Tier::of), free);
        self.desk.at(memory, now_ms, &mut wish);
        while let Some(event) = self.ears.next() {
            self.desk.hear(&event, &mut wish);
        }
    }

    /// A page that came along is used for the first time.
    pub(crate) fn first_used(&self, space: SpaceId, page: VirtPage) {
        self.ears
            .note(BookEvent::Page(space, page, PageEvent::Used));
    }

    /// When it is to hear of a scan, if it asks for scans.
    pub(crate) fn scan_ms(&self) -> Option<u64> {
        let interval = self.desk.scan_ms();
        (interval > 0).then(|| self.scanned_ms.unwrap_or(0) + interval)
    }

    /// Has it hear of a scan, if that is not the first.
    pub(crate) fn scanned(&mut self, mut found: Found, now_ms: u64) {
        if self.scanned_ms.replace(now_ms).is_none() {
            return;
        }
        (found.take(now_ms).iter()).for_each(|event| self.ears.put(event));
    }

    /// Takes the oldest pages that it wants to leave, as many as a manager takes for a batch.
    pub(crate) fn take_wishes(&self) -> Vec<(SpaceId, VirtPage)> {
        self.take(What::Reclaim, 2 * EVICT_PAGES_MAX)
    }

    /// Takes the oldest pages that it wants to leave although there may be room: a batch.
    pub(crate) fn take_leave_now(&self) -> Vec<(SpaceId, VirtPage)> {
        self.take(What::ReclaimNow, EVICT_PAGES_MAX)
    }

    /// Takes the pages for whose next copy it wishes a tier, or that shall come with others.
    pub(crate) fn take_places(&self) -> Vec<(SpaceId, VirtPage, Placing)> {
        std::iter::from_fn(|| self.wishes.next_place()).collect()
    }

    /// Takes the next moves that it wishes: those that are made together.
    pub(crate) fn take_moves(&self) -> Vec<WishedMove> {
        let mut moves = Vec::new();
        self.wishes.next_moves(&mut moves);
        moves
    }

    /// Takes the oldest pages that it wants in memory.
    pub(crate) fn take_loads(&self) -> Vec<(SpaceId, VirtPage)> {
        self.take(What::Prefetch, LOADS_A_TURN)
    }

    fn take(&self, what: What, most: usize) -> Vec<(SpaceId, VirtPage)> {
        let next = std::iter::from_fn(|| self.wishes.next(what));
        next.take(most).collect()
    }
}
