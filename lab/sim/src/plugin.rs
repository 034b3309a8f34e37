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

/// Wishes that may wait: as many as in a run.
const WISHES_MAX: usize = 1 << 12;

/// A policy file at work.
pub(crate) struct Plugin {
    ears: Arc<Ears>,
    desk: Desk,
    wishes: VecDeque<Wish>,
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
        Ok(Plugin {
            ears: Arc::new(Ears::default()),
            desk: Desk::with_host(Box::new(plugin), host),
            wishes: VecDeque::new(),
        })
    }

    /// Has it hear what happens in this engine from now on.
    pub(crate) fn attend(&self, engine: &mut Engine<VecLedger>) {
        engine.add_journal(self.ears.clone());
    }

    /// Tells it what has happened.
    pub(crate) fn tell(&mut self, memory: Memory, now_ms: u64) {
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
    pub(crate) fn take_wishes(&mut self) -> Vec<(SpaceId, VirtPage)> {
        let some = self.wishes.len().min(2 * EVICT_PAGES_MAX);
        let wishes = self.wishes.drain(..some);
        wishes.map(|wish| (wish.space, wish.page)).collect()
    }
}
