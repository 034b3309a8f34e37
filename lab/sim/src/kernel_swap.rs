//! How the kernel chooses among swap devices, in place of a placement policy: what the papers
//! compare with. Of a page that is stored nothing moves, and its copy stays until it is written.
//!
//! Source: `swapon(2)`, priorities. Devices of one priority take pages in turn; one of a lower
//! priority takes pages once those above it are full. Differs: the kernel gives up copies of
//! unchanged pages when half of all swap is used. Nothing here is an option of `undercroft run`.

use std::fmt;

use undercroft_base::{Bytes, PageNo, TierId};
use undercroft_policy::place::{Event, Loaded, Migration, Place, Shown, TierOrder, TierState};

use crate::place::Held;

/// The kernel's choice of a swap device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelSwap {
    /// Priorities: the first tier with room.
    Priority,
    /// Equal priorities: each tier in turn, page by page (the RAID-Swap of HybridSwap §5.1).
    Striped,
    /// The same, and `locality` does all its work at each fault and batch, for nothing: what that
    /// work costs (HybridSwap §5.9).
    StripedBesideLocality,
}

impl KernelSwap {
    /// The rule, without history; the one beside it for the replay as well.
    pub(crate) fn make(self) -> (Box<dyn Place>, Option<Held>) {
        let beside = (self == KernelSwap::StripedBesideLocality).then(Held::default);
        let swap = Swap {
            kind: self,
            turn: 0,
            beside: beside.clone(),
            unread: Vec::new(),
        };
        (Box::new(swap), beside)
    }

    fn text(self) -> &'static str {
        match self {
            KernelSwap::Priority => "kernel-priority",
            KernelSwap::Striped => "kernel-striped",
            KernelSwap::StripedBesideLocality => "kernel-striped beside locality",
        }
    }
}

impl fmt::Display for KernelSwap {
    /// For reports.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// A rule at work.
struct Swap {
    kind: KernelSwap,
    /// The tier whose turn it is.
    turn: usize,
    /// A policy that is asked, and not heeded.
    beside: Option<Held>,
    unread: Vec<PageNo>,
}

impl Place for Swap {
    fn order(&mut self, no: PageNo, tiers: &[TierState]) -> TierOrder {
        if let Some(beside) = &mut self.beside {
            beside.order(no, tiers);
        }
        if self.kind == KernelSwap::Priority {
            return TierOrder::downwards(tiers.len());
        }
        let mut order = TierOrder::default();
        for rank in 0..tiers.len() {
            order.then(TierId(((self.turn + rank) % tiers.len()) as u8));
        }
        self.turn = (self.turn + 1) % tiers.len().max(1);
        order
    }

    fn loaded(&mut self, page: Loaded<'_>) -> bool {
        if let Some(beside) = &mut self.beside {
            beside.loaded(page);
        }
        true
    }

    fn next_move(&mut self, _: Bytes, _: &[TierState]) -> Option<Migration> {
        None
    }

    fn together(&mut self, no: PageNo, _: &mut Vec<PageNo>) {
        if let Some(beside) = &mut self.beside {
            self.unread.clear();
            beside.together(no, &mut self.unread);
        }
    }

    fn heard(&mut self, event: Event<'_>) {
        if let Some(beside) = &mut self.beside {
            beside.heard(event);
        }
    }

    fn shown(&self) -> Shown {
        Shown {
            links_pages: self.beside.is_some(),
            ..Shown::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use undercroft_policy::place::LatencyClass;

    fn orders(kind: KernelSwap) -> Vec<Vec<u8>> {
        let tiers = [TierState::empty(LatencyClass::Device); 2];
        let (mut rule, _) = kind.make();
        let mut one = |no| {
            let order = rule.order(PageNo(no), &tiers);
            order.iter().map(|tier| tier.0).collect()
        };
        (0..3).map(&mut one).collect()
    }

    #[test]
    fn priorities_fill_the_first_and_equal_ones_take_turns() {
        assert_eq!(orders(KernelSwap::Priority), [[0, 1], [0, 1], [0, 1]]);
        assert_eq!(orders(KernelSwap::Striped), [[0, 1], [1, 0], [0, 1]]);
    }
}
