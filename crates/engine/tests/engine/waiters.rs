//! The list of threads that wait for room.

use undercroft_base::{BASE_PAGE_BYTES, Bytes, VirtPage, VirtRange};
use undercroft_engine::FaultAnswer;
use undercroft_engine::limits::WAITERS_MAX;

use crate::common::{self, answer};

const LIMIT: u64 = 64;

#[test]
fn thread_that_finds_the_list_full_faults_again_until_others_have_room() {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let most = LIMIT + WAITERS_MAX as u64 + 8;
    let mut engine = common::engine(most.div_ceil(512) as usize, LIMIT, reclaim);
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(most));
    engine.layout().attached(space, all);
    let mut pages = all.pages();
    let first = pages.find(|page| answer(&mut engine, space, *page) != FaultAnswer::Load);
    let first = first.expect("the limit is reached");
    for page in pages.by_ref().take(WAITERS_MAX - 1) {
        let answered = answer(&mut engine, space, page);
        assert_eq!(answered, FaultAnswer::NoRoom, "{page:?}");
    }
    let next = pages.next().expect("a page");
    assert_eq!(answer(&mut engine, space, next), FaultAnswer::Wake);
    // A page is listed once, so it can be told that its thread waits.
    assert_eq!(answer(&mut engine, space, first), FaultAnswer::NoRoom);
    engine.set_limit(Bytes((LIMIT + 64) * BASE_PAGE_BYTES as u64));
    let mut woken = Vec::new();
    engine.faults().take_waiters(&mut woken);
    assert!(
        !woken.is_empty() && woken.len() < WAITERS_MAX,
        "{}",
        woken.len()
    );
    assert_eq!(woken[0], (space, first));
    for (space, page) in woken {
        assert_eq!(answer(&mut engine, space, page), FaultAnswer::Load);
    }
    assert_eq!(answer(&mut engine, space, next), FaultAnswer::NoRoom);
    engine.books().audit();
}
