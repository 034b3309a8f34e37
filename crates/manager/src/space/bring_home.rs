//! Brings all pages of a process in. The kernel writes its core, and takes pages that are missing
//! for zeros; or a user wants them in memory. The run is paused: there is room, and none leaves.

use std::time::{Duration, Instant};

use undercroft_base::{PageState, VirtPage};
use undercroft_engine::EVERYTHING;

use crate::space::parts::next_parts;
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Pages that are asked for at a time, and chunks that are looked at.
const BRING_PAGES: usize = 256;
const CHUNKS: usize = 1;

/// Pause between two looks, and the time until pages are asked for again.
const NAP: Duration = Duration::from_millis(1);
const AGAIN: Duration = Duration::from_millis(50);

/// Longest time without progress.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns when all pages are in memory that can be. Error: how many cannot.
pub(crate) fn bring_home(shared: &Shared, process: &Process) -> Result<(), u64> {
    let (mut left, mut missing) = (EVERYTHING, 0);
    while !left.is_empty() {
        let parts = next_parts(
            &shared.books.engine_for_many(),
            process.space,
            &mut left,
            CHUNKS,
        );
        for part in parts {
            missing += bring(shared, process, part.pages().collect());
        }
    }
    if missing == 0 { Ok(()) } else { Err(missing) }
}

/// Brings these pages in. Returns how many did not come.
fn bring(shared: &Shared, process: &Process, mut pages: Vec<VirtPage>) -> u64 {
    let (mut asked, mut progress): (Option<Instant>, _) = (None, Instant::now());
    loop {
        let before = pages.len();
        let mut stored = Vec::new();
        {
            let engine = shared.books.engine_for_many();
            pages.retain(
                |page| match engine.books().entry(process.space, *page).state {
                    PageState::Stored => {
                        stored.push(*page);
                        true
                    }
                    PageState::Evicting | PageState::Loading | PageState::Lost => true,
                    PageState::Untouched | PageState::Resident => false,
                },
            );
        }
        if pages.len() < before {
            progress = Instant::now();
        }
        let ends = || shared.signals.stopped() || !shared.gauges.is_paused();
        let gone = || process.has_lost_its_memory() || ends();
        if pages.is_empty() || progress.elapsed() > PATIENCE || gone() {
            return pages.len() as u64;
        }
        if pages.len() < before || asked.is_none_or(|at| at.elapsed() >= AGAIN) {
            asked = Some(Instant::now());
            let some = stored.into_iter().take(BRING_PAGES);
            shared.signals.bring_in(process.space, some);
        }
        std::thread::sleep(NAP);
    }
}
