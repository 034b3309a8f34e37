//! Neighbours that a prefetch policy brings where it wants no window: only what a device has, in
//! the mapping of the fault, and as many as leave a quarter of the room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use undercroft_base::{BASE_PAGE_BYTES, Bytes, Slot, SpaceId, TierId, VirtPage, VirtRange};
use undercroft_engine::{
    Config, Engine, FaultAnswer, Install, LoadPlan, Outcome, Room, Taken, VecLedger,
};
use undercroft_policy::prefetch::neighbours::{Along, Around, Now};
use undercroft_policy::prefetch::{FaultSeen, Prefetch, Window};
use undercroft_policy::reclaim::lru::Lru;

use crate::common;

/// Asks for every neighbour, stored or not, and counts how often it is asked.
struct All(Arc<AtomicU32>);

impl Prefetch for All {
    fn on_fault(&mut self, _: FaultSeen) -> Window {
        Window::default()
    }

    fn off_trend(&mut self, _: FaultSeen, _: Now, look: &mut dyn FnMut() -> Around) -> Along {
        self.0.fetch_add(1, Ordering::Relaxed);
        look();
        Along {
            pages: Around::MAX,
            used: 0,
        }
    }
}

/// Pages 0 to 99 are out of memory: the even ones on a device, the odd ones in a pool, and 44 is
/// one repeated word. Pages 200 to 299, of another mapping, are in memory.
struct Half {
    engine: Engine<VecLedger>,
    space: SpaceId,
    asked: Arc<AtomicU32>,
}

impl Half {
    fn new() -> Half {
        let config = Config {
            limit: Bytes(1000 * BASE_PAGE_BYTES as u64),
            retain: vec![false, true],
            demotes: vec![false, false],
            room: Room::Ahead,
        };
        let asked = Arc::new(AtomicU32::new(0));
        let prefetch: Box<dyn Prefetch> = Box::new(All(asked.clone()));
        let mut engine = Engine::new(
            VecLedger::new(2),
            Box::new(Lru::new()),
            Some(prefetch),
            config,
        );
        let space = engine.layout().add_space();
        for start in [0, 200] {
            let range = VirtRange::new(VirtPage(start), VirtPage(start + 100));
            engine.layout().attached(space, range);
        }
        let mut half = Half {
            engine,
            space,
            asked,
        };
        (0..100).chain(200..300).for_each(|page| {
            half.fault(page);
        });
        for want in [64, 36] {
            half.push_out(want);
        }
        half
    }

    fn push_out(&mut self, want: usize) {
        let (mut batch, mut wake) = (Vec::new(), Vec::new());
        assert!(self.engine.evictions().select(want, &mut batch));
        for item in &batch {
            let page = item.page.0;
            let outcome = match page {
                44 => Outcome::Fill(7),
                _ => Outcome::Stored(TierId(1 - page as u8 % 2), Slot(page)),
            };
            self.engine
                .evictions()
                .settle(item.at, Taken::Moved, &mut wake);
            self.engine.evictions().publish(item.at, outcome, &mut wake);
        }
    }

    /// Serves a fault. Returns the pages that came.
    fn fault(&mut self, page: u64) -> Vec<u64> {
        let fault = common::fault(self.space, VirtPage(page), false);
        let mut plan = LoadPlan::default();
        let answer = self.engine.faults().answer(fault, &mut plan);
        assert_eq!(answer, FaultAnswer::Load);
        for item in &mut plan.items {
            assert_eq!(item.demanded, item.page.0 == page);
            item.install = Install::Done;
        }
        self.engine.faults().finish(fault, &mut plan.items);
        self.engine.books().audit();
        plan.items.iter().map(|item| item.page.0).collect()
    }
}

fn even(pages: impl Iterator<Item = u64>) -> Vec<u64> {
    pages.filter(|page| page % 2 == 0 && *page != 44).collect()
}

#[test]
fn neighbours_of_a_device_come_in_order_within_the_mapping() {
    assert_eq!(Half::new().fault(50), even(35..=65));
    assert_eq!(Half::new().fault(4), even(0..=19), "the mapping begins");
    assert_eq!(Half::new().fault(98), even(83..100), "the mapping ends");
    let mut half = Half::new();
    half.fault(50);
    assert_eq!(half.fault(66), even(66..=81), "the others are there");
}

#[test]
fn page_of_a_pool_or_of_one_word_brings_no_neighbour() {
    for page in [51, 44] {
        let mut half = Half::new();
        assert_eq!(half.fault(page), [page]);
        assert_eq!(half.asked.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn neighbours_leave_a_quarter_of_the_room_and_the_nearest_come_first() {
    for (room, pages) in [
        (6, vec![46, 48, 50, 52, 54]),
        (3, vec![48, 50, 52]),
        (1, vec![50]),
    ] {
        let mut half = Half::new();
        half.engine
            .set_limit(Bytes((100 + room) * BASE_PAGE_BYTES as u64));
        assert_eq!(half.engine.books().room(), room as i64);
        assert_eq!(half.fault(50), pages);
    }
}
