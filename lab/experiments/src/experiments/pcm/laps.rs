//! CLOCK and CLOCK-W written a second time, in plain code over one stream of pages. They count what
//! the engine does not: which pages are read back, and which second laps were useful.
//!
//! The engine's runs decide; these runs explain. They explain a case only if the pages read and
//! written equal the engine's.

use std::collections::VecDeque;
use undercroft_sim::PageStream;

/// The rule of the hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// A page that was used since the hand last passed gets another lap.
    Clock,
    /// A page that was written since the hand last passed gets another lap.
    ClockW,
    /// CLOCK-W, but a page is written out when its bit is cleared; the write is not remembered.
    CleanedInPassing,
    /// Both bits: a used page gets a lap, a written page gets a second one.
    ReadsCount,
}

/// The counts of one replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Laps {
    /// Reads of pages that the program never writes.
    pub(super) read_clean: u64,
    /// Reads of pages that it writes at some time.
    pub(super) read_written: u64,
    /// Pages written out.
    pub(super) write_outs: u64,
    /// Laps given.
    pub(super) laps: u64,
    /// Laps given to pages that left without being used again: frames held for nothing.
    pub(super) laps_wasted: u64,
    /// Reads of pages that had left although they were used since the hand last passed. Under CLOCK
    /// they would have stayed.
    pub(super) read_forgotten: u64,
    /// Reads of such pages that had been written out when they left.
    pub(super) written_forgotten: u64,
}

impl Laps {
    pub(super) fn reads(&self) -> u64 {
        self.read_clean + self.read_written
    }
}

const USED: u16 = 1;
const WRITTEN: u16 = 2;
/// The page must be written out when it leaves.
const DIRTY: u16 = 4;
const RESIDENT: u16 = 8;
/// The page got a lap and was not used since.
const PASSED: u16 = 16;
/// A reference of the trace writes it.
const EVER_WRITTEN: u16 = 32;
/// The page was used since the hand last passed, whatever the rule.
const RECENT: u16 = 64;
/// The page left while recent.
const LEFT_RECENT: u16 = 128;
/// The page left while recent, and was written out.
const LEFT_DIRTY: u16 = 256;

/// Replays one client's pages in `frames` frames. The access that faulted sets the page's bits, as
/// in the experiment.
pub(super) fn replay(stream: &PageStream, frames: u64, rule: Rule) -> Laps {
    let mut pages = vec![0u16; stream.numbers as usize];
    for reference in stream.references.iter().filter(|word| *word & 1 != 0) {
        pages[(reference >> 1) as usize] |= EVER_WRITTEN;
    }
    let mut ring: VecDeque<u32> = VecDeque::new();
    let mut laps = Laps::default();
    for reference in &stream.references {
        let page = (reference >> 1) as usize;
        if pages[page] & RESIDENT == 0 {
            if ring.len() as u64 == frames {
                leave(&mut ring, &mut pages, rule, &mut laps);
            }
            if pages[page] & EVER_WRITTEN != 0 {
                laps.read_written += 1
            } else {
                laps.read_clean += 1
            }
            laps.read_forgotten += u64::from(pages[page] & LEFT_RECENT != 0);
            laps.written_forgotten += u64::from(pages[page] & LEFT_DIRTY != 0);
            pages[page] &= EVER_WRITTEN;
            pages[page] |= RESIDENT;
            ring.push_back(page as u32);
        }
        pages[page] |= USED | RECENT;
        pages[page] &= !PASSED;
        if reference & 1 != 0 {
            pages[page] |= WRITTEN | DIRTY;
        }
    }
    laps
}

/// Turns the hand until a page has left.
fn leave(ring: &mut VecDeque<u32>, pages: &mut [u16], rule: Rule, laps: &mut Laps) {
    while let Some(number) = ring.pop_front() {
        let page = &mut pages[number as usize];
        let again = match rule {
            Rule::Clock => *page & USED,
            Rule::ClockW | Rule::CleanedInPassing => *page & WRITTEN,
            Rule::ReadsCount => match *page & USED {
                0 => *page & WRITTEN,
                used => used,
            },
        };
        if again == 0 {
            laps.write_outs += u64::from(*page & DIRTY != 0);
            laps.laps_wasted += u64::from(*page & PASSED != 0);
            let left = match (*page & RECENT != 0, *page & DIRTY != 0) {
                (false, _) => 0,
                (true, false) => LEFT_RECENT,
                (true, true) => LEFT_RECENT | LEFT_DIRTY,
            };
            *page = *page & EVER_WRITTEN | left;
            return;
        }
        *page = *page & !(again | RECENT) | PASSED;
        if rule == Rule::CleanedInPassing {
            laps.write_outs += u64::from(*page & DIRTY != 0);
            *page &= !DIRTY;
        }
        laps.laps += 1;
        ring.push_back(number);
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::generated;
    use super::super::study::{Pages, base};
    use super::*;
    use undercroft_sim::Setup;

    #[test]
    fn reads_and_writes_equal_the_engines() {
        for text in [
            "zipf:page=512,pages=600,refs=30000,writes=0.3,dirty=0.4,seed=3",
            "scan_hot:page=512,pages=600,refs=30000,writes=0.3,dirty=0.5,seed=4",
        ] {
            let loaded = generated("t", text).expect("a trace");
            let pages = Pages::of(&loaded, 512).expect("pages");
            for percent in [5.0, 40.0, 90.0, 100.0] {
                for (rule, reclaim) in [(Rule::Clock, "clock"), (Rule::ClockW, "clock_w")] {
                    let setup = Setup {
                        reclaim: reclaim.to_owned(),
                        ..base()
                    };
                    let (_, run) = pages.simulate(percent, &setup).expect("a run");
                    let laps = replay(&pages.streams[0], run.memory_pages, rule);
                    assert_eq!(
                        (laps.reads(), laps.write_outs),
                        (run.pages_read, run.pages_written),
                        "{text} {percent} {reclaim}"
                    );
                }
            }
        }
    }

    #[test]
    fn cleaning_in_passing_writes_no_less_and_counting_reads_reads_no_more_at_ease() {
        let loaded = generated(
            "t",
            "zipf:page=512,pages=600,refs=30000,theta=0.9,writes=0.5,seed=5",
        )
        .expect("a trace");
        let pages = Pages::of(&loaded, 512).expect("pages");
        let of = |rule| replay(&pages.streams[0], 300, rule);
        assert!(of(Rule::CleanedInPassing).write_outs > of(Rule::ClockW).write_outs);
        assert!(of(Rule::ReadsCount).reads() < of(Rule::ClockW).reads());
        assert!(of(Rule::ClockW).laps_wasted <= of(Rule::ClockW).laps);
        // CLOCK lets every page stay that was used since the hand passed; CLOCK-W does not.
        assert_eq!(of(Rule::Clock).read_forgotten, 0);
        assert!(of(Rule::ClockW).read_forgotten > of(Rule::ClockW).written_forgotten);
    }
}
