//! Shrinks a storm that failed to a short one that fails at the same place.
//!
//! Delta debugging (after Zeller and Hildebrandt 2002): leaves out pieces of the list of steps,
//! halves first, then ever smaller ones; between sizes, parts of the configuration. It ends when
//! neither helps any more, or when the replays are used up.
//!
//! A step that is left out changes what later steps find. So a storm may stay long because no small
//! piece of it can go. Before small pieces are tried, storms of other seeds that fail at the same
//! place are shrunk, too, and the shortest of all goes on.

use super::recipe::Recipe;
use super::run::{Ended, Failure, replay};
use super::setup::StormSetup;

/// The result of shrinking.
#[derive(Clone, Debug)]
pub struct Minimised {
    /// The shortest storm found.
    pub ended: Ended,
    /// Storms run for it.
    pub replays: u32,
    /// False when the replays were used up first.
    pub finished: bool,
}

/// Most other seeds that are tried.
const SEEDS: u64 = 200;
/// Most storms of other seeds that are shrunk.
const STORMS: u32 = 12;
/// The steps of each, in those that are left of the first.
const MORE: u64 = 4;
/// The smallest piece that is left out of a storm before others are tried.
const SMALL: usize = 8;
/// A storm of so few steps is short enough: no others are tried.
const SHORT: usize = 100;
/// Pieces of one size are tried again if this part of the steps could go.
const WORTH_IT: usize = 16;

struct Search<'a> {
    failure: &'a Failure,
    best: Ended,
    replays: u32,
    replays_max: u32,
}

/// Shrinks the storm that [`super::run()`] or [`super::replay`] ended with. `None` when it did not
/// fail, or does not fail again.
///
/// Cost: at most `replays_max` replays, each shorter than the last one that failed.
pub fn minimise(ended: &Ended, replays_max: u32) -> Option<Minimised> {
    let failure = ended.failure.as_ref()?;
    let first = replay(&ended.recipe);
    if first.failure.as_ref()?.place != failure.place {
        return None;
    }
    let mut search = Search {
        failure,
        best: first,
        replays: 1,
        replays_max,
    };
    search.shrink(SMALL);
    search.try_others();
    search.shrink(1);
    Some(Minimised {
        finished: !search.is_spent(),
        replays: search.replays,
        ended: search.best,
    })
}

impl Search<'_> {
    fn is_spent(&self) -> bool {
        self.replays >= self.replays_max
    }

    /// Takes a storm over if it fails at the same place.
    fn fails(&mut self, setup: &StormSetup, steps: Vec<u64>) -> bool {
        if self.is_spent() {
            return false;
        }
        self.replays += 1;
        let recipe = Recipe {
            setup: setup.clone(),
            steps,
        };
        let mut ended = replay(&recipe);
        match &ended.failure {
            Some(failure) if failure.place == self.failure.place => {
                let last = failure.step;
                ended.recipe.steps.retain(|step| *step <= last);
                self.best = ended;
                true
            }
            _ => false,
        }
    }

    /// Shrinks steps, by pieces of `smallest` at least, and the setup.
    fn shrink(&mut self, smallest: usize) {
        loop {
            let setup = self.best.recipe.setup.clone();
            self.shrink_steps(smallest);
            self.shrink_setup();
            if self.is_spent() || self.best.recipe.setup == setup {
                break;
            }
        }
    }

    /// Shrinks storms of other seeds, and keeps the shortest. They begin with some more steps than
    /// are left of this one, because nothing of them was left out yet.
    fn try_others(&mut self) {
        let (mut shortest, mut storms) = (self.best.clone(), 0);
        for seed in 0..SEEDS {
            let is_short = shortest.recipe.steps.len() <= SHORT;
            if self.is_spent() || is_short || storms == STORMS {
                break;
            }
            let setup = StormSetup {
                seed,
                ..shortest.recipe.setup.clone()
            };
            let steps = MORE * shortest.recipe.steps.len() as u64;
            if !self.fails(&setup, (0..steps).collect()) {
                continue;
            }
            storms += 1;
            self.shrink(SMALL);
            if self.best.recipe.steps.len() < shortest.recipe.steps.len() {
                shortest = self.best.clone();
            }
        }
        self.best = shortest;
    }

    /// Whether a good part of `before` steps could go.
    fn was_worth_it(&self, before: usize) -> bool {
        let gone = before - self.best.recipe.steps.len();
        gone > 0 && gone >= before / WORTH_IT
    }

    /// Half of the steps or more: a power of two.
    fn first_piece(&self) -> usize {
        self.best.recipe.steps.len().div_ceil(2).next_power_of_two()
    }

    /// Leaves out pieces: half of the steps at first, then ever smaller pieces, down to
    /// `smallest`.
    fn shrink_steps(&mut self, smallest: usize) {
        let mut size = self.first_piece();
        while size >= smallest && !self.is_spent() {
            let before = self.best.recipe.steps.len();
            self.leave_out(size);
            let (shorter, again) = (
                self.best.recipe.steps.len() < before,
                self.was_worth_it(before),
            );
            if size > 1 || !again {
                size /= 2;
            }
            if shorter {
                // In a simpler configuration fewer steps matter, and each is cheaper to try.
                self.shrink_setup();
            }
        }
    }

    /// Goes through the steps once, from the last, which matter least, and leaves out what it can:
    /// `size` steps at a time at first. After a piece that could go, the next is twice as long;
    /// after one that could not, half as long. So a long stretch that does not matter costs few
    /// replays.
    fn leave_out(&mut self, size: usize) {
        let (mut to, mut piece) = (self.best.recipe.steps.len(), size);
        while to > 0 && !self.is_spent() {
            let steps = &self.best.recipe.steps;
            to = to.min(steps.len());
            let from = to.saturating_sub(piece);
            let kept = [&steps[..from], &steps[to..]].concat();
            let setup = self.best.recipe.setup.clone();
            let gone = self.fails(&setup, kept);
            match gone {
                true => (to, piece) = (from, 2 * piece),
                false if piece > size => piece = (piece / 2).max(size),
                false => to = from,
            }
        }
    }

    fn shrink_setup(&mut self) {
        let mut again = true;
        while again && !self.is_spent() {
            again = false;
            for setup in self.best.recipe.setup.simpler() {
                let steps = self.best.recipe.steps.clone();
                if self.fails(&setup, steps) {
                    again = true;
                    break;
                }
            }
        }
    }
}
