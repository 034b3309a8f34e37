//! A page that an agent was told to take out, without an answer, is not taken for one that never
//! left: if it is missing later, it is lost, and does not read as zeros.

use crate::common;
use undercroft_base::{VirtPage, VirtRange};
use undercroft_engine::{EvictItem, Missing, Taken};

/// State of a page that a batch left in memory for the reason `taken`, and that is missing then:
/// for its process, and for a child that was forked meanwhile.
fn missing_after(taken: Taken) -> [Option<Missing>; 2] {
    let reclaim = undercroft_policy::reclaim::by_name("lru").expect("a policy");
    let mut engine = common::engine(8, 1 << 20, reclaim);
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(512));
    engine.layout().attached(space, all);
    engine.discovery().found_resident(space, all);
    let mut items: Vec<EvictItem> = Vec::new();
    assert!(engine.evictions().select(8, &mut items));
    let (child, _) = engine.forks().forked(space, &[]).expect("room");
    let (mut wake, page) = (Vec::new(), items[0].page);
    for item in &items {
        engine.evictions().settle(item.at, taken, &mut wake);
    }
    engine.books().audit();
    [space, child].map(|space| engine.discovery().missing(space, page))
}

#[test]
fn page_without_an_answer_of_the_agent_is_lost_if_it_is_missing() {
    assert_eq!(missing_after(Taken::Unsure), [Some(Missing::Lost); 2]);
}

#[test]
fn page_that_the_agent_did_not_take_is_dropped_if_it_is_missing() {
    for taken in [Taken::Busy, Taken::NotTried] {
        assert_eq!(missing_after(taken), [Some(Missing::Dropped); 2]);
    }
}
