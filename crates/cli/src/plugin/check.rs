//! `undercroft policy check`: what a policy file needs, and how it takes every kind of event,
//! numbers of no page among them.

use std::path::Path;
use std::time::{Duration, Instant};

use undercroft_base::{LatencyClass, SpaceId};
use undercroft_plugin::{Event, Kind, Memory, MovesFree, Tier, What, Wish};
use undercroft_seeded::Random;
use undercroft_terminal::{Failure, line};

/// Status of a file that fails at events. It would be dismissed in a run.
const FAILS: u8 = 1;

/// Events of the walk, and of the random part.
const PAGES: u64 = 20_000;

/// The check ends after this time, even if not all events were told.
const TIME_MAX: Duration = Duration::from_secs(5);

const fn tier(latency: LatencyClass, bytes: u64) -> Tier {
    Tier {
        latency,
        capacity: bytes,
        free: bytes / 2,
        load_ns: 100_000,
    }
}

/// The tiers of the check: a compressed pool and two devices.
const TIERS: [Tier; 3] = [
    tier(LatencyClass::Memory, 16 << 20),
    tier(LatencyClass::Device, 1 << 30),
    tier(LatencyClass::Device, 1 << 40),
];
const MOVES_FREE: MovesFree = MovesFree {
    up: 4096,
    down: 4096,
};

/// The events of the check: a walk, then any event of any page, then of the last numbers.
fn script() -> impl Iterator<Item = Event> {
    let event = |kind, page| Event {
        kind,
        space: SpaceId(1),
        page,
        pages: 1,
        detail: 0,
        at: 0,
        cr3: 0,
    };
    let (mut random, kinds) = (Random::new(1), Kind::of_spaces().collect::<Vec<_>>());
    let walk = (0..PAGES).map(move |page| event(Kind::Fault, page));
    let last = kinds.clone().into_iter().map(move |kind| Event {
        space: SpaceId(u32::MAX),
        pages: u64::MAX,
        detail: u64::MAX,
        ..event(kind, u64::MAX)
    });
    let any = (0..PAGES).map(move |_| Event {
        detail: random.bits(),
        ..event(kinds[random.index(kinds.len())], random.below(PAGES))
    });
    let plain = [Kind::Limit, Kind::Lost].map(|kind| Event::plain(kind, u64::MAX));
    walk.chain(any).chain(last).chain(plain)
}

/// Prints what there is to say of a file. Errors: it is no policy.
pub(crate) fn check(path: &Path) -> Result<u8, Failure> {
    let file = super::open(path)?;
    let mut desk = super::read(&file.module).map_err(|why| super::refused(path, why))?;
    let memory = Memory {
        limit: 64 << 20,
        used: 60 << 20,
        faults: 1000,
        waited_ms: 10,
    };
    let ([mut named, mut wanted, mut placed, mut linked, mut moved], began) =
        ([0u64; 5], Instant::now());
    let mut wish = |wish: Wish| match wish.what {
        What::Reclaim | What::ReclaimNow => named += 1,
        What::Prefetch => wanted += 1,
        What::Place(_) => placed += 1,
        What::Link(_) => linked += 1,
        What::Move { .. } => moved += 1,
    };
    let of_tiers = desk.asks_tiers();
    for (at, event) in script().enumerate() {
        if !of_tiers && event.kind.is_of_tiers() {
            continue; // a run does not tell it either
        }
        if at % 1000 == 0 {
            desk.tiers(TIERS.into_iter(), MOVES_FREE);
            desk.at(memory, at as u64, &mut wish);
        }
        desk.hear(&event, &mut wish);
        if began.elapsed() > TIME_MAX {
            break;
        }
    }
    let (counts, took) = (desk.counts(), began.elapsed());
    let each = took.as_secs_f64() * 1e6 / counts.events.max(1) as f64;
    let mut text = format!(
        "{}: {} bytes, for version 1 of the interface\n",
        path.display(),
        file.module.len()
    );
    for parameter in desk.parameters() {
        text += &format!("  parameter  {} = {}\n", parameter.name, parameter.value);
    }
    if desk.scan_ms() > 0 {
        text += &format!("  scans      each {} ms\n", desk.scan_ms());
    }
    text += &format!(
        "  events     {} heard, {:.2} us each, {} failed\n  pages      {named} to leave, \
         {wanted} to come, {} refused as too many for one event\n",
        counts.events, each, counts.failures, counts.flooded
    );
    if of_tiers || linked > 0 {
        text += &format!("  tiers      {placed} pages placed, {linked} linked, {moved} moves\n");
    }
    let status = match desk.last_failure() {
        None => {
            text += "  good: it can be used with `undercroft run --policy`\n";
            0
        }
        Some(failure) => {
            text += &format!(
                "  bad: {failure}. A policy that fails {} times is not asked again\n",
                undercroft_plugin::FAILURES_MAX
            );
            FAILS
        }
    };
    line(text.trim_end())?;
    Ok(status)
}
