//! A search for victims has an end, even where every page was used.

use undercroft_base::{VirtPage, VirtRange};
use undercroft_engine::Taken;
use undercroft_engine::limits::{EVICT_PAGES_MAX, SELECT_SCAN_MAX};

use crate::common;

#[test]
fn a_search_past_used_pages_is_cut_off_with_what_it_found() {
    let pages = SELECT_SCAN_MAX as u64 + 200;
    let reclaim = undercroft_policy::reclaim::by_name("clock").expect("a policy");
    let mut engine = common::engine(3, 2 * pages, reclaim);
    let space = engine.layout().add_space();
    let all = VirtRange::new(VirtPage(0), VirtPage(pages));
    engine.layout().attached(space, all);
    for page in all.pages() {
        common::touch(&mut engine, space, page);
    }
    let (mut batch, mut wake) = (Vec::new(), Vec::new());
    let mut search = |used: u64, want: usize| {
        for page in 0..used {
            let no = engine.uses().number(space, VirtPage(page)).expect("known");
            engine.uses().touch(no, false);
        }
        engine.evictions().select(want, &mut batch);
        for item in &batch {
            let taken = Taken::NotTried;
            engine.evictions().settle(item.at, taken, &mut wake);
        }
        batch.len()
    };
    let of_a_batch = 10;
    let used = (SELECT_SCAN_MAX - of_a_batch) as u64;
    assert_eq!(search(used, EVICT_PAGES_MAX), of_a_batch);
    assert_eq!(search(0, EVICT_PAGES_MAX), EVICT_PAGES_MAX);
    assert_eq!(search(0, 5), 5);
}
