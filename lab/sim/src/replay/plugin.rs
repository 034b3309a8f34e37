//! The user's policy in a replay: it hears each event at once, and what it wishes leaves first, as
//! in a run. There it hears uses of pages from scans; here it hears of none.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;

use undercroft_base::{SpaceId, VirtPage};
use undercroft_engine::limits::EVICT_PAGES_MAX;
use undercroft_engine::{Engine, VecLedger};
use undercroft_plugin::{Desk, Ears, Host, MODULE_BYTES_MAX, Memory, Wish};

use crate::replay::client::Client;
use crate::setup::SetupError;

/// Wishes that may wait: as many as in a run.
const WISHES_MAX: usize = 1 << 12;

/// A policy file at work.
pub(crate) struct Plugin {
    ears: Arc<Ears>,
    desk: Desk,
    wishes: VecDeque<Wish>,
}

impl Plugin {
    /// Reads a policy file. Errors: it cannot be read, or is no policy.
    pub(crate) fn open(path: &str) -> Result<Plugin, SetupError> {
        let refused = |why: String| {
            let fix = "docs/guide/policies.md says what a policy file must have";
            SetupError::option("--policy", path, why, fix)
        };
        let mut module = Vec::new();
        File::open(path)
            .and_then(|file| {
                let most = MODULE_BYTES_MAX as u64 + 1;
                file.take(most).read_to_end(&mut module)
            })
            .map_err(|error| refused(error.to_string()))?;
        let mut host = Host::default();
        let plugin = undercroft_plugin_wasm::Plugin::read(&module, &mut host);
        let plugin = plugin.map_err(|refusal| refused(refusal.to_string()))?;
        Ok(Plugin {
            ears: Arc::new(Ears::default()),
            desk: Desk::with_host(Box::new(plugin), host),
            wishes: VecDeque::new(),
        })
    }

    /// Has it hear what happens in this engine from now on.
    pub(super) fn attend(&self, engine: &mut Engine<VecLedger>) {
        engine.add_journal(self.ears.clone());
    }

    /// Tells it what has happened.
    pub(super) fn tell(&mut self, memory: Memory, now_ms: u64) {
        let wishes = &mut self.wishes;
        let mut wish = |wish| {
            if wishes.len() < WISHES_MAX {
                wishes.push_back(wish);
            }
        };
        self.desk.at(memory, now_ms, &mut wish);
        while let Some(event) = self.ears.next() {
            self.desk.hear(&event, &mut wish);
        }
    }

    /// Takes its oldest wishes, as many as a manager takes for a batch.
    pub(super) fn take_wishes(&mut self) -> Vec<(SpaceId, VirtPage)> {
        let some = self.wishes.len().min(2 * EVICT_PAGES_MAX);
        let wishes = self.wishes.drain(..some);
        wishes.map(|wish| (wish.space, wish.page)).collect()
    }
}

impl Client<'_> {
    /// Pages that the user's policy wants to leave first, by what has happened until now. None if
    /// there is no such policy.
    #[inline]
    pub(super) fn take_wishes(&mut self) -> Vec<(SpaceId, VirtPage)> {
        if self.plugin.is_none() {
            return Vec::new(); // no memory is taken
        }
        self.tell_plugin();
        self.plugin
            .as_mut()
            .map_or_else(Vec::new, Plugin::take_wishes)
    }

    /// Tells the user's policy what has happened, if there is one.
    pub(super) fn tell_plugin(&mut self) {
        let books = self.engine.books();
        let memory = Memory {
            limit: books.limit().0,
            used: books.dram_used().0,
            faults: books.stats().faults,
        };
        let now_ms = self.now().0 / 1_000_000;
        if let Some(plugin) = &mut self.plugin {
            plugin.tell(memory, now_ms);
        }
    }
}
