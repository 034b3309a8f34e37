//! Shrinks a storm that failed to a short one that fails at the same place.
//!
//! Delta debugging (after Zeller and Hildebrandt 2002): leaves out pieces of the list of steps,
//! halves first, then ever smaller ones; between sizes, parts of the configuration. It ends when
//! neither helps any more, or when the replays are used up.
//!
//! A step that is left out changes what later steps find, so no small piece of a storm may be left
//! out. Before small pieces, other seeds are tried: one may fail within half of the steps.

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

/// Other seeds that are tried.
const SEEDS: u64 = 100;
/// They are tried once pieces are as small as this.
const SMALL: usize = 8;

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
    loop {
        let before = (
            search.best.recipe.steps.len(),
            search.best.recipe.setup.clone(),
        );
        search.shrink_steps();
        search.shrink_setup();
        let after = &search.best.recipe;
        if search.is_spent() || (after.steps.len(), after.setup.clone()) == before {
            break;
        }
    }
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

    /// Half of the steps or more: a power of two.
    fn first_piece(&self) -> usize {
        self.best.recipe.steps.len().div_ceil(2).next_power_of_two()
    }

    /// Looks for a seed whose storm fails within half of the steps. False if there is none.
    fn change_seed(&mut self) -> bool {
        let half = self.best.recipe.steps.len() as u64 / 2;
        (0..SEEDS).any(|seed| {
            let setup = StormSetup {
                seed,
                ..self.best.recipe.setup.clone()
            };
            self.fails(&setup, (0..half).collect())
        })
    }

    /// Leaves out pieces: half of the steps at first, then ever smaller pieces, down to single
    /// steps.
    fn shrink_steps(&mut self) {
        let mut size = self.first_piece();
        while size > 0 && !self.is_spent() {
            let shorter = self.leave_out(size);
            if size == SMALL && self.change_seed() {
                size = self.first_piece();
                continue;
            }
            if size > 1 || !shorter {
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
    /// replays. False if nothing could go.
    fn leave_out(&mut self, size: usize) -> bool {
        let (mut to, mut piece) = (self.best.recipe.steps.len(), size);
        let mut shorter = false;
        while to > 0 && !self.is_spent() {
            let steps = &self.best.recipe.steps;
            to = to.min(steps.len());
            let from = to.saturating_sub(piece);
            let kept = [&steps[..from], &steps[to..]].concat();
            let setup = self.best.recipe.setup.clone();
            let gone = self.fails(&setup, kept);
            shorter |= gone;
            match gone {
                true => (to, piece) = (from, 2 * piece),
                false if piece > size => piece = (piece / 2).max(size),
                false => to = from,
            }
        }
        shorter
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
