//! Neighbours come along where they are used, and nowhere else.

use std::collections::{HashSet, VecDeque};

use undercroft_base::{PageCount, ThreadId};
use undercroft_seeded::{Random, Zipf};

use super::super::majority::Majority;
use super::super::{Prefetch, Window};
use super::*;

const BASE: u64 = 0x7_f000_0000;
const OBJECT: u64 = 16;

/// A memory of pages that leave in the order in which they came. All pages are stored at first.
struct World {
    prefetch: Majority,
    memory: HashSet<u64>,
    order: VecDeque<u64>,
    pages: u64,
    room: usize,
    arrivals: u64,
    faults: u64,
    brought: u64,
}

impl World {
    fn new(pages: u64, room: usize) -> World {
        World {
            prefetch: Majority::new(),
            memory: HashSet::new(),
            order: VecDeque::new(),
            pages,
            room,
            arrivals: 0,
            faults: 0,
            brought: 0,
        }
    }

    fn is_stored(&self, page: u64) -> bool {
        (BASE..BASE + self.pages).contains(&page) && !self.memory.contains(&page)
    }

    fn bring(&mut self, page: u64) {
        assert!(self.memory.insert(page));
        self.order.push_back(page);
        self.arrivals += 1;
        while self.order.len() > self.room {
            let oldest = self.order.pop_front().expect("not empty");
            self.memory.remove(&oldest);
        }
    }

    fn around(&self, page: u64) -> Around {
        let at = |bit: u32| page - u64::from(REACH) + u64::from(bit);
        let stored = (0..=2 * REACH).filter(|bit| *bit != REACH && self.is_stored(at(*bit)));
        stored.fold(0, |around, bit| around | 1 << bit)
    }

    fn touch(&mut self, offset: u64) {
        let page = BASE + offset;
        if !self.is_stored(page) {
            return;
        }
        self.faults += 1;
        let fault = FaultSeen {
            space: SpaceId(1),
            page: VirtPage(page),
            thread: ThreadId(1),
            first_touch: false,
        };
        let around = self.around(page);
        let Window { stride, count } = self.prefetch.on_fault(fault);
        let along: Vec<u64> = if count > 0 {
            let steps = 1..=i64::from(count);
            steps
                .map(|step| page.wrapping_add_signed(step * stride))
                .collect()
        } else {
            let now = Now {
                arrivals: self.arrivals,
                resident_max: PageCount(self.room as u64),
                stored: PageCount(self.pages - self.memory.len() as u64),
            };
            let pages = self.prefetch.off_trend(fault, now, &mut || around).pages;
            assert_eq!(pages & !around, 0, "only what is stored");
            let bits = (0..=2 * REACH).filter(|bit| pages >> bit & 1 == 1);
            bits.map(|bit| page - u64::from(REACH) + u64::from(bit))
                .collect()
        };
        self.bring(page);
        for page in along {
            if self.is_stored(page) {
                self.bring(page);
                self.brought += 1;
            }
        }
    }

    /// Objects of 16 pages, used whole and in no order; which object is next is random.
    fn use_objects(&mut self, count: u64, random: &mut Random) {
        for _ in 0..count {
            let object = random.below(self.pages / OBJECT) * OBJECT;
            let mut pages: Vec<u64> = (object..object + OBJECT).collect();
            while !pages.is_empty() {
                let next = random.index(pages.len());
                self.touch(pages.swap_remove(next));
            }
        }
    }

    fn use_at_random(&mut self, count: u64, random: &mut Random) {
        for _ in 0..count {
            self.touch(random.below(self.pages));
        }
    }

    /// The same with the trend alone.
    fn without(mut self) -> World {
        self.prefetch = Majority::trend_alone();
        self
    }
}

#[test]
fn rings_cover_each_distance_once() {
    for (side, sign) in [(0, 1), (1, -1i64)] {
        for distance in 1..=i64::from(REACH) {
            let bit = 1 << (i64::from(REACH) + sign * distance);
            let of = RING[side].map(|ring| ring & bit != 0);
            let expected = distance.ilog2() as usize;
            assert_eq!(of.iter().filter(|of| **of).count(), 1, "{distance}");
            assert!(of[expected], "{side} {distance}");
        }
    }
}

#[test]
fn objects_that_are_used_whole_come_whole() {
    let play = |mut world: World| {
        world.use_objects(4000, &mut Random::new(1));
        (world.faults, world.brought)
    };
    let (without, _) = play(World::new(1 << 16, 1 << 14).without());
    let (with, brought) = play(World::new(1 << 16, 1 << 14));
    assert!(with * 3 < without, "{with} faults, {without} without");
    assert!(with + brought < without + without / 2, "{brought} brought");
}

/// Faults, and the pages that came along besides those of the trend, of the same uses.
fn beyond_the_trend(room: usize, uses: impl Fn(&mut World)) -> (u64, i64) {
    let mut with = World::new(16_384, room);
    let mut without = World::new(16_384, room).without();
    uses(&mut with);
    uses(&mut without);
    (with.faults, with.brought as i64 - without.brought as i64)
}

#[test]
fn random_faults_bring_next_to_nothing_however_much_is_stored() {
    for room in [2048, 8192, 12_288, 15_000, 16_200] {
        let uses = |world: &mut World| world.use_at_random(200_000, &mut Random::new(2));
        let (faults, brought) = beyond_the_trend(room, uses);
        assert!(
            faults > 10_000 && brought * 50 < faults as i64,
            "{room}: {brought} with {faults}"
        );
    }
}

#[test]
fn popular_pages_bring_next_to_nothing() {
    let zipf = Zipf::new(16_384, 0.99);
    let (faults, brought) = beyond_the_trend(4096, |world| {
        let mut random = Random::new(3);
        for _ in 0..100_000 {
            // Popular pages are anywhere.
            world.touch(zipf.rank(&mut random).wrapping_mul(7919) % 16_384);
        }
    });
    assert!(
        faults > 10_000 && brought * 50 < faults as i64,
        "{brought} with {faults}"
    );
}

#[test]
fn neighbours_stay_away_when_they_no_longer_pay() {
    let mut random = Random::new(4);
    let mut world = World::new(1 << 16, 1 << 14);
    world.use_objects(3000, &mut random);
    let before = world.brought;
    assert!(before > 20_000, "{before}");
    world.use_at_random(2000, &mut random);
    let learnt = world.brought;
    world.use_at_random(30_000, &mut random);
    let after = world.brought - learnt;
    assert!(
        learnt - before < 8000,
        "{} until it was seen",
        learnt - before
    );
    assert!(after < 600, "{after} later");
}

#[test]
fn scans_have_their_trend_as_before() {
    for stride in [1, 2, 7, 31] {
        let play = |mut world: World| {
            // Objects first, so that neighbours come along.
            world.use_objects(1000, &mut Random::new(6));
            let (faults, brought) = (world.faults, world.brought);
            for page in (0..1 << 16).step_by(stride) {
                world.touch(page);
            }
            (world.faults - faults, world.brought - brought)
        };
        let with = play(World::new(1 << 16, 1 << 12));
        let without = play(World::new(1 << 16, 1 << 12).without());
        assert!(with.0 <= without.0 + 40, "{stride}: {with:?}, {without:?}");
        assert!(
            with.1 <= without.1 + 1200,
            "{stride}: {with:?}, {without:?}"
        );
    }
}
