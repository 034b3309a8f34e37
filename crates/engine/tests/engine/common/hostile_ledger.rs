//! The rules that a hostile ledger must not break: it gives an error, or an engine whose books are
//! in order. `tests/ledger.rs` tries random and mutated ledgers, `fuzz/fuzz_targets/ledger.rs`
//! those of the fuzzer.

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{Bytes, PageKey, PageSize, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_policy::reclaim;

use undercroft_engine::{
    Config, Engine, FlatLedger, Found, HeldPage, Here, LedgerError, Outcome, Recovered, Room,
    bytes_for,
};

/// Chunks of the ledger that the words are written to.
const CHUNKS: usize = 3;
const TIERS: usize = 2;
const SPACES: [SpaceId; 2] = [SpaceId(1), SpaceId(2)];

/// Reads `bytes` in two ways. First as the memory of a ledger, page 0 first. Then, because the
/// magic number would keep most inputs out, as pairs of a place (2 bytes) and a word (8 bytes) that
/// are written to an empty ledger. Returns how many of the two were accepted.
///
/// Panics when a promise is broken: an accepted ledger must be recovered, and its books must agree.
pub(crate) fn check(bytes: &[u8]) -> usize {
    let (words, _) = bytes.as_chunks::<8>();
    let raw = words.iter().map(|word| u64::from_le_bytes(*word));
    let raw: Vec<AtomicU64> = raw.map(AtomicU64::new).collect();
    let accepted = FlatLedger::open(raw).is_ok_and(|ledger| recover(ledger, bytes).is_ok());
    usize::from(accepted) + usize::from(recover(patched(bytes), bytes).is_ok())
}

fn patched(bytes: &[u8]) -> FlatLedger<Vec<AtomicU64>> {
    let memory: Vec<AtomicU64> = (0..bytes_for(CHUNKS) / 8)
        .map(|_| AtomicU64::new(0))
        .collect();
    let len = memory.len();
    let (patches, _) = bytes.as_chunks::<10>();
    for patch in patches {
        let (Some(place), Some(word)) = (patch.first_chunk::<2>(), patch.last_chunk::<8>()) else {
            continue;
        };
        let at = usize::from(u16::from_le_bytes(*place)) % len;
        memory[at].store(u64::from_le_bytes(*word), Ordering::Relaxed);
    }
    FlatLedger::create(memory, CHUNKS, &PageKey::KNOWN).expect("memory for the chunks")
}

/// A kernel that reports whatever the input says.
struct Hostile<'a> {
    bytes: &'a [u8],
    next: usize,
}

impl Hostile<'_> {
    fn choose(&mut self, of: u8) -> u8 {
        self.next += 1;
        let byte = self.bytes.get(self.next % self.bytes.len().max(1));
        byte.copied().unwrap_or(0) % of
    }
}

impl Found for Hostile<'_> {
    fn page(&mut self, _: SpaceId, _: VirtPage) -> Here {
        let all = [
            Here::Present,
            Here::Absent,
            Here::NotManaged,
            Here::Swapped,
            Here::Guarded,
        ];
        all[usize::from(self.choose(all.len() as u8))]
    }

    fn held(&mut self, _: SpaceId, _: usize) -> HeldPage {
        [HeldPage::Here, HeldPage::NotMoved, HeldPage::OwnerGone][usize::from(self.choose(3))]
    }
}

fn recover<M: AsRef<[AtomicU64]> + Send>(
    ledger: FlatLedger<M>,
    bytes: &[u8],
) -> Result<Recovered, LedgerError> {
    let config = Config {
        limit: Bytes(1 << 20),
        retain: vec![true; TIERS],
        demotes: vec![true, false],
        room: Room::Ahead,
    };
    let mut hostile = Hostile { bytes, next: 0 };
    let (mut engine, _) = Engine::recover(
        ledger,
        Box::new(reclaim::lru::Lru::new()),
        None,
        config,
        &SPACES.map(|space| (space, PageSize::Base)),
    )?;
    let some = VirtRange::new(VirtPage(0), VirtPage(700));
    match hostile.choose(4) {
        0 => _ = engine.layout().removed(SPACES[0], some),
        1 => _ = engine.layout().remapped(SPACES[0], some, VirtPage(2048)),
        2 => _ = engine.forks().forked(SPACES[1], &[]),
        _ => {}
    }
    let recovered = engine.reconcile(&mut hostile);
    engine.books().audit();
    let mut wakes = Vec::new();
    for (at, page) in recovered.in_hand.iter().enumerate() {
        let slot = Slot((1 << 32) + at as u64);
        let outcome = [
            Outcome::Fill(7),
            Outcome::Stored(TierId(1), slot),
            Outcome::PutBack,
        ];
        let outcome = outcome[usize::from(hostile.choose(3))];
        engine
            .evictions()
            .publish(page.item.at, outcome, &mut wakes);
    }
    engine.books().audit();
    for space in engine.books().spaces() {
        engine.layout().remove_space(space);
    }
    engine.books().audit();
    assert_eq!(
        engine.books().resident().0,
        0,
        "pages of no space are counted"
    );
    let mut freed = Vec::new();
    engine.take_freed(&mut freed);
    let all = freed.len();
    freed.sort_unstable();
    freed.dedup();
    assert_eq!(freed.len(), all, "a slot was freed twice");
    Ok(recovered)
}
