//! Ledgers of dead managers that are cut off, damaged or made up give an error that says where,
//! never a panic.

#![allow(clippy::unwrap_used, reason = "everything here is a test")]

use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_base::{Bytes, PageKey, PageSize, SpaceId};
use undercroft_engine::{
    Config, Engine, FlatLedger, LEDGER_VERSION, Ledger, LedgerError, Room, bytes_for,
};
use undercroft_policy::{prefetch, reclaim};
use undercroft_seeded::Random;

#[path = "common/hostile_ledger.rs"]
mod hostile_ledger;

/// A word that a ledger might have at this place, or nearly.
fn plausible(source: &mut Random, place: usize) -> u64 {
    let random = source.bits();
    let space = 1 + random % 3;
    match place {
        0..512 => match random % 3 {
            0 => 1 << 63 | space << 38 | (random >> 8 & 63) << 32 | random >> 20 & 0x3ff,
            1 => random >> 20 & 0x3ff,
            _ => random,
        },
        512..1024 => 1 << 63 | space << 36 | random >> 20 & 7,
        _ => {
            // Mostly possible ones: a stored page has no second copy, and a kept copy is in a tier.
            let state = random % 6;
            let flags = match state {
                3 | 4 => random >> 3 & 0b11101,
                _ => random >> 3 & 31,
            };
            let tiers = if flags & 2 == 2 { 2 } else { 3 };
            let tier = [0, 1, 7][(random >> 40) as usize % tiers];
            state | flags << 3 | tier << 12 | (random >> 16 & 15) << 15 | (random >> 32 & 7) << 48
        }
    }
}

#[test]
fn made_up_ledgers_are_refused_or_recovered_and_never_panic() {
    let mut state = Random::new(1);
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..30_000 {
        let mut bytes = Vec::new();
        let patches = state.bits() % 60;
        for _ in 0..patches {
            let place = match state.bits() % 4 {
                0 => 64 + state.bits() % 448,         // notes
                1 => 512 + state.bits() % 3,          // heads
                _ => 1024 + state.bits() % (3 * 512), // entries
            };
            bytes.extend((place as u16).to_le_bytes());
            let word = match state.bits() % 200 {
                0 => state.bits(),
                _ => plausible(&mut state, place as usize),
            };
            bytes.extend(word.to_le_bytes());
        }
        // All chunks are in use; otherwise their entries would be refused.
        for chunk in 0..3 * u64::from(round % 8 != 0) {
            bytes.extend((512 + chunk as u16).to_le_bytes());
            bytes.extend((1 << 63 | (1 + chunk % 2) << 36 | chunk).to_le_bytes());
        }
        match hostile_ledger::check(&bytes) {
            0 => refused += 1,
            _ => accepted += 1,
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 10_000 && refused > 1000);
}

#[test]
fn random_and_mutated_bytes_never_panic() {
    let mut state = Random::new(2);
    let ledger = FlatLedger::create(words(2), 2, &PageKey::KNOWN).unwrap();
    ledger.chunks()[0].store(1 << 63 | 1 << 36, Ordering::Relaxed);
    let good: Vec<u8> = ledger_bytes(&ledger);
    assert!(
        hostile_ledger::check(&good) >= 1,
        "the good one is accepted"
    );
    for _ in 0..3000 {
        let mut bytes = good.clone();
        for _ in 0..1 + state.bits() % 4 {
            let at = match state.bits() % 2 {
                0 => state.bits() as usize % 24,
                _ => state.bits() as usize % bytes.len(),
            };
            bytes[at] ^= 1 << (state.bits() % 8);
        }
        bytes.truncate(state.bits() as usize % (2 * bytes.len()));
        hostile_ledger::check(&bytes);
    }
}

fn words(chunks: usize) -> Vec<AtomicU64> {
    (0..bytes_for(chunks) / 8)
        .map(|_| AtomicU64::new(0))
        .collect()
}

/// The memory of a ledger of two chunks, put together from its parts as the layout says.
fn ledger_bytes(ledger: &FlatLedger<Vec<AtomicU64>>) -> Vec<u8> {
    let mut memory = vec![0u64; bytes_for(2) / 8];
    memory[0] = u64::from_le_bytes(*b"ucledger");
    memory[1] = LEDGER_VERSION;
    memory[2] = 2;
    for (at, word) in ledger.chunks().iter().enumerate() {
        memory[512 + at] = word.load(Ordering::Relaxed);
    }
    memory.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn refusal(change: impl Fn(&[AtomicU64])) -> LedgerError {
    let memory = words(2);
    let ledger = FlatLedger::create(memory, 2, &PageKey::KNOWN).unwrap();
    ledger.chunks()[0].store(1 << 63 | 1 << 36, Ordering::Relaxed);
    change(ledger.chunks());
    change(ledger.entries());
    let config = Config {
        limit: Bytes(1 << 20),
        retain: vec![false],
        demotes: vec![false],
        room: Room::Ahead,
    };
    let recovered = Engine::recover(
        ledger,
        reclaim::by_name("lru").unwrap(),
        prefetch::by_name("none").unwrap(),
        config,
        &[(SpaceId(1), PageSize::Base)],
    );
    recovered.err().expect("a refusal")
}

#[test]
fn refusals_name_the_place() {
    let entry = |page: usize, word: u64| {
        refusal(move |words| {
            if words.len() > 2 {
                words[page].store(word, Ordering::Relaxed);
            }
        })
        .to_string()
    };
    assert!(entry(3, 6).contains("entry of page 3"), "{}", entry(3, 6));
    assert!(entry(3, 3 | 2 << 12).contains("a tier that there is not"));
    assert!(entry(3, 1 | 1 << 8).contains("a flag that there is not"));
    assert!(entry(512, 1).contains("its chunk is free"));
    let head = |word: u64| {
        refusal(move |words| {
            if words.len() == 2 {
                words[1].store(word, Ordering::Relaxed);
            }
        })
        .to_string()
    };
    assert!(head(5).contains("head of chunk 1"));
    assert!(head(1 << 63 | 1 << 36).contains("same place"));
    let open = |words: Vec<AtomicU64>| FlatLedger::open(words).expect_err("a refusal");
    assert_eq!(open(words(2)), LedgerError::NotALedger);
    assert!(matches!(open(Vec::new()), LedgerError::TooShort { .. }));
    let memory = words(2);
    memory[0].store(u64::from_le_bytes(*b"ucledger"), Ordering::Relaxed);
    memory[1].store(1, Ordering::Relaxed);
    assert_eq!(open(memory), LedgerError::Version(1));
    let memory = words(2);
    memory[0].store(u64::from_le_bytes(*b"ucledger"), Ordering::Relaxed);
    memory[1].store(LEDGER_VERSION, Ordering::Relaxed);
    memory[2].store(u64::MAX, Ordering::Relaxed);
    assert!(open(memory).to_string().contains("cut off"));
}
