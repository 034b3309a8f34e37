//! A limit that is lowered while pages are in memory.

use undercroft_base::{BASE_PAGE_BYTES, Bytes, PageCount, VirtPage, VirtRange};

use crate::common;

fn pages(count: u64) -> Bytes {
    Bytes(count * BASE_PAGE_BYTES as u64)
}

#[test]
fn a_lower_limit_is_approached_as_pages_leave_and_faults_keep_room() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(3, 1000, reclaim);
    let space = engine.layout().add_space();
    let range = |start, end| VirtRange::new(VirtPage(start), VirtPage(end));
    engine.layout().attached(space, range(0, 900));
    for page in range(0, 900).pages() {
        common::touch(&mut engine, space, page);
    }
    let half_reserve = 16; // a 256th of 1000 pages is less than the least reserve, 32
    for _ in 0..2 {
        engine.approach_limit(pages(400));
        assert_eq!(engine.books().limit(), pages(900 + half_reserve));
    }
    assert!(engine.books().reclaim_wanted());
    engine.layout().removed(space, range(0, 300));
    engine.approach_limit(pages(400));
    assert_eq!(engine.books().limit(), pages(600 + half_reserve));
    // Pages that will be found take room, too.
    engine.layout().removed(space, range(300, 800));
    engine.discovery().expect_found(PageCount(350));
    engine.approach_limit(pages(400));
    assert_eq!(engine.books().limit(), pages(450 + half_reserve));
    engine.discovery().expect_found(PageCount(0));
    engine.approach_limit(pages(400));
    assert_eq!(engine.books().limit(), pages(400));
    engine.approach_limit(pages(2000));
    assert_eq!(engine.books().limit(), pages(400), "it is never raised");
    engine.set_limit(Bytes(u64::MAX));
    assert!(engine.books().room() > 1 << 40, "no limit is much room");
    engine.approach_limit(pages(50));
    let near = pages(100)..=pages(100 + half_reserve);
    assert!(near.contains(&engine.books().limit()), "also from far away");
    assert!(engine.books().reclaim_wanted());
}
