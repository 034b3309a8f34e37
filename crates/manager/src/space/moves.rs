//! The moves of mappings around a fork. The kernel reports a fork and another thread's move after
//! it has unlocked the address space, so in either order. The books of the child are a copy of the
//! parent's: they may lack a move that the child has, or have one that it has not.
//!
//! ```text
//! the parent's moves:   m1   m2   |fork is read|   m3   m4
//!                       before                     after
//! from the books of the child, as copied, to its memory:  m2 and m1 backwards, or m3, m4, ...
//! ```
//! The mappings of the child say which. One that is gone in the child and one that is new there are
//! the same if a chain of these moves leads from one to the other.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use undercroft_base::{VirtPage, VirtRange};

use crate::sync::lock;

/// Moves that are remembered, before a fork and after it.
const MOVES_MAX: usize = 64;

/// A mapping went from one place to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub from: VirtRange,
    pub to: VirtRange,
}

impl Move {
    pub(crate) fn new(from: VirtRange, to: VirtPage) -> Move {
        let to = VirtRange::new(to, to.plus(from.count().0));
        Move { from, to }
    }

    fn back(self) -> Move {
        Move {
            from: self.to,
            to: self.from,
        }
    }
}

type After = Mutex<Vec<Move>>;

/// The last moves of an address space, and the children that still want to hear of the next ones.
#[derive(Default)]
pub(crate) struct Moves(Mutex<Listed>);

#[derive(Default)]
struct Listed {
    last: VecDeque<Move>,
    children: Vec<Weak<After>>,
}

/// The moves of the parent around the fork of a child.
pub(crate) struct ForkMoves {
    before: Vec<Move>,
    after: Arc<After>,
}

impl Moves {
    /// The books have followed this move.
    pub(crate) fn add(&self, moved: Move) {
        let listed = &mut *lock(&self.0);
        if listed.last.len() == MOVES_MAX {
            listed.last.pop_front();
        }
        listed.last.push_back(moved);
        listed.children.retain(|child| {
            let Some(after) = child.upgrade() else {
                return false;
            };
            let mut after = lock(&after);
            after.push(moved);
            after.len() < MOVES_MAX
        });
    }

    /// No event is pending: a fork that is read later came after all moves so far, and those that
    /// are read later came after all forks so far.
    pub(crate) fn settle(&self) {
        *lock(&self.0) = Listed::default();
    }

    /// A fork was read, and the books have followed all moves that were read before it.
    /// * `more_come`: an event is pending, which may be a move that the child has.
    pub(crate) fn fork(&self, more_come: bool) -> ForkMoves {
        let listed = &mut *lock(&self.0);
        listed.children.retain(|child| child.strong_count() > 0);
        let after = Arc::new(After::default());
        if more_come {
            listed.children.push(Arc::downgrade(&after));
        }
        ForkMoves {
            before: listed.last.iter().copied().collect(),
            after,
        }
    }
}

impl ForkMoves {
    /// The move that the child's books are to follow next, if there is one.
    ///
    /// * `gone`: what the books have, and the child has not.
    /// * `new`: what the child has, and the books have not. Both ascending, without overlaps.
    /// * `own`: what the child has moved itself.
    pub(crate) fn next(&self, gone: &[VirtRange], new: &[VirtRange], own: &Moves) -> Option<Move> {
        let back = self.before.iter().rev().map(|moved| moved.back());
        let mut steps: Vec<Move> = back.collect();
        steps.extend(lock(&self.after).iter());
        steps.extend(lock(&own.0).last.iter());
        let whole =
            |range: VirtRange, of: &[VirtRange]| range.minus(&of[range.overlapping(of)]).is_empty();
        for (at, first) in steps.iter().enumerate() {
            if !whole(first.from, gone) {
                continue;
            }
            let mut place = first.from;
            for step in &steps[at..] {
                if step.from != place {
                    continue;
                }
                place = step.to;
                if whole(place, new) {
                    return Some(Move::new(first.from, place.start));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    fn moved(from: VirtRange, to: u64) -> Move {
        Move::new(from, VirtPage(to))
    }

    fn next(fork: &ForkMoves, gone: VirtRange, new: VirtRange) -> Option<Move> {
        fork.next(&[gone], &[new], &Moves::default())
    }

    #[test]
    fn a_move_that_is_read_after_the_fork_is_followed_if_the_child_has_it() {
        let parent = Moves::default();
        let fork = parent.fork(true);
        assert_eq!(next(&fork, range(10, 12), range(50, 52)), None);
        parent.add(moved(range(10, 12), 50));
        let found = next(&fork, range(10, 12), range(50, 52));
        assert_eq!(found, Some(moved(range(10, 12), 50)));
        // Only where the child shows both.
        assert_eq!(next(&fork, range(10, 11), range(50, 52)), None);
        assert_eq!(next(&fork, range(10, 12), range(50, 51)), None);
        assert_eq!(next(&fork, range(20, 22), range(50, 52)), None);
    }

    #[test]
    fn a_move_that_was_read_before_the_fork_is_taken_back_if_the_child_has_it_not() {
        let parent = Moves::default();
        parent.add(moved(range(10, 12), 50));
        let fork = parent.fork(true);
        let found = next(&fork, range(50, 52), range(10, 12));
        assert_eq!(found, Some(moved(range(50, 52), 10)));
        assert_eq!(next(&fork, range(10, 12), range(50, 52)), None);
    }

    /// What the program maps at an old place later is not what was moved from there.
    #[test]
    fn moves_that_are_settled_are_forgotten() {
        let parent = Moves::default();
        parent.add(moved(range(10, 12), 50));
        let fork = parent.fork(true);
        parent.settle();
        parent.add(moved(range(20, 22), 60));
        assert_eq!(next(&fork, range(20, 22), range(60, 62)), None);
        assert!(next(&fork, range(50, 52), range(10, 12)).is_some());
        parent.settle();
        let fork = parent.fork(false);
        assert_eq!(next(&fork, range(60, 62), range(20, 22)), None);
        parent.add(moved(range(30, 32), 70));
        assert_eq!(next(&fork, range(30, 32), range(70, 72)), None);
    }

    #[test]
    fn a_chain_of_moves_is_one() {
        let parent = Moves::default();
        parent.add(moved(range(10, 12), 30));
        parent.add(moved(range(30, 32), 50));
        let fork = parent.fork(true);
        parent.add(moved(range(20, 22), 10));
        parent.add(moved(range(50, 52), 70));
        // Two back, none of them alone.
        let found = next(&fork, range(50, 52), range(10, 12));
        assert_eq!(found, Some(moved(range(50, 52), 10)));
        let found = next(&fork, range(50, 52), range(70, 72));
        assert_eq!(found, Some(moved(range(50, 52), 70)));
        // The child has moved it once more.
        let own = Moves::default();
        own.add(moved(range(70, 72), 90));
        let found = fork.next(&[range(50, 52)], &[range(90, 92)], &own);
        assert_eq!(found, Some(moved(range(50, 52), 90)));
    }

    #[test]
    fn only_the_moves_next_to_the_fork_are_kept() {
        let parent = Moves::default();
        let fork = parent.fork(true);
        for at in 0..3 * MOVES_MAX as u64 {
            parent.add(moved(range(at, at + 1), at + 1));
        }
        assert_eq!(lock(&fork.after).len(), MOVES_MAX);
        assert_eq!(
            lock(&fork.after)[0],
            moved(range(0, 1), 1),
            "the first ones"
        );
        assert!(lock(&parent.0).children.is_empty());
        let late = parent.fork(true);
        assert_eq!(late.before.len(), MOVES_MAX);
        drop((fork, late));
        drop(parent.fork(true));
        assert_eq!(
            lock(&parent.0).children.len(),
            1,
            "those of dead children go"
        );
    }
}
