//! How much room is kept free below the limit.

use undercroft_base::{Bytes, PageCount, PageNo, VirtPage, VirtRange};
use undercroft_engine::limits;
use undercroft_policy::place::{Migration, Place, Shown, TierOrder, TierState};

use crate::common;

const LIMIT: u64 = 16_384;

/// Has such a part of the limit kept free.
struct Keeps(u64);

impl Place for Keeps {
    fn order(&mut self, _: PageNo, tiers: &[TierState]) -> TierOrder {
        TierOrder::downwards(tiers.len())
    }

    fn next_move(&mut self, _: Bytes, _: &[TierState]) -> Option<Migration> {
        None
    }

    fn shown(&self) -> Shown {
        Shown {
            reserve_part: self.0,
            ..Shown::default()
        }
    }
}

/// The room with which reclaim begins, in pages.
fn begins(part: u64) -> i64 {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(LIMIT as usize / 512, LIMIT, reclaim);
    engine.set_place(Box::new(Keeps(part)));
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(LIMIT));
    engine.layout().attached(space, all);
    let mut pages = all.pages();
    while !engine.books().reclaim_wanted() {
        common::touch(&mut engine, space, pages.next().expect("room is used up"));
    }
    engine.books().room()
}

#[test]
fn a_256th_is_kept_free_and_a_64th_where_pages_go_in_sequences() {
    assert_eq!(begins(Shown::default().reserve_part), 63);
    assert_eq!(begins(64), 255);
}

#[test]
fn the_reserve_has_a_least_and_a_greatest_size_but_never_more_than_a_quarter() {
    let reserve = |limit, part| limits::reserve(PageCount(limit), part).0;
    for (limit, of_256, of_64) in [
        (0, 0, 0),
        (100, 25, 25),
        (1000, 32, 32),
        (8192, 32, 128),
        (131_072, 512, 2048),
        (1 << 30, 2048, 2048),
    ] {
        assert_eq!(reserve(limit, 256), of_256, "{limit}");
        assert_eq!(reserve(limit, 64), of_64, "{limit}");
    }
}
