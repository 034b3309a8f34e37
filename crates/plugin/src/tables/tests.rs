//! Tables that were made from a list of mappings translate as the list says, and hostile ones are
//! walked within bounds.

use std::cell::Cell;
use std::collections::BTreeMap;

use super::*;

/// Some pages of a guest; the others are out of memory.
#[derive(Default)]
struct Image {
    pages: u64,
    there: BTreeMap<u64, Vec<u64>>,
    reads: Cell<u32>,
}

impl GuestMemory for Image {
    fn pages(&self) -> u64 {
        self.pages
    }

    fn read(&self, page: u64, from: usize, words: &mut [u64]) -> bool {
        assert!(page < self.pages, "a page beyond the memory is asked for");
        self.reads.set(self.reads.get() + 1);
        let of = self.there.get(&page);
        of.map(|of| words.copy_from_slice(&of[from..from + words.len()]))
            .is_some()
    }
}

const CR3: u64 = 1 << 12;

impl Image {
    /// The top table is page 1; other tables follow.
    fn new(pages: u64) -> Image {
        let there = BTreeMap::from([(1, vec![0; WORDS])]);
        Image {
            pages,
            there,
            reads: Cell::new(0),
        }
    }

    /// Maps `span(level)` pages from `to` on at `page`. False: something is there.
    fn map(&mut self, page: u64, to: u64, level: u32) -> bool {
        let mut table = 1;
        for above in (level + 1..LEVELS).rev() {
            let at = (page / span(above)) as usize % WORDS;
            let word = self.there[&table][at];
            if word & LEAF != 0 {
                return false;
            }
            let mut below = word >> 12;
            if word == 0 {
                below = self.there.len() as u64 + 1;
                self.there.insert(below, vec![0; WORDS]);
                self.put(table, at, below << 12 | 7);
            }
            table = below;
        }
        let at = (page / span(level)) as usize % WORDS;
        let is_free = self.there[&table][at] == 0;
        if is_free {
            // No execution, a key, and a bit that belongs to the guest's kernel.
            let leaf = if level > 0 { LEAF } else { 0 };
            self.put(
                table,
                at,
                to << 12 | leaf | PRESENT | 1 << 63 | 5 << 59 | 1 << 9,
            );
        }
        is_free
    }

    fn put(&mut self, page: u64, at: usize, word: u64) {
        self.there.get_mut(&page).expect("a table")[at] = word;
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// The page that [`Image::map`] has mapped, by a list.
fn model(list: &[(u64, u64, u32)], page: u64, pages: u64) -> Option<u64> {
    let (from, to, _) =
        (list.iter()).find(|(from, _, level)| (*from..*from + span(*level)).contains(&page))?;
    Some(to + (page - from)).filter(|found| *found < pages)
}

/// Some pages have neighbours, some are in the upper half, and some are mapped beyond the memory.
fn random_mappings(random: &mut Random, image: &mut Image) -> Vec<(u64, u64, u32)> {
    let mut list = Vec::new();
    for _ in 0..60 {
        let level = [0, 0, 0, 0, 1, 2][random.below(6) as usize];
        let near = random.below(4) * (1 << 18) + random.below(2000);
        let page = [near, 0x1_ffff << 35 | near][random.below(2) as usize];
        let to = random.below(2 * image.pages / span(level) + 1) * span(level);
        let page = page / span(level) * span(level);
        if image.map(page, to, level) {
            list.push((page, to, level));
        }
    }
    list
}

#[test]
fn any_address_translates_as_the_mappings_say() {
    for seed in 1..60 {
        let mut random = Random(seed * 0x9e37_79b9);
        let mut image = Image::new(1 << 19);
        let list = random_mappings(&mut random, &mut image);
        let edges = (list.iter()).flat_map(|(from, _, level)| {
            let after = from + span(*level);
            [from.saturating_sub(1), *from, after - 1, after]
        });
        let edges: Vec<u64> = edges.collect();
        let others = (0..200).map(|_| random.next() >> (12 + random.below(52)));
        let mut found = 0;
        for page in edges.iter().copied().chain(others) {
            let expected = model(&list, page, image.pages);
            image.reads.set(0);
            let told = translate(&image, CR3 | 0xfff, page);
            assert_eq!(told, expected, "page {page:x}, seed {seed}");
            assert!(image.reads.get() <= 4);
            found += u32::from(told.is_some());
        }
        assert!(found > 10, "seed {seed}");
    }
}

#[test]
fn each_page_that_the_lower_half_maps_is_found_back_at_its_lowest_address() {
    for seed in 1..6 {
        let mut random = Random(seed * 0x51_7cc1);
        let mut image = Image::new(1 << 19);
        let list = random_mappings(&mut random, &mut image);
        let mut looks = 1 << 16;
        let found = Reverse::of(&image, CR3, &mut looks);
        let mut lowest = BTreeMap::new();
        for (from, to, level) in list.iter().filter(|(from, ..)| *from < 1 << 35) {
            for at in 0..span(*level) {
                let page = lowest.entry(to + at).or_insert(from + at);
                *page = (*page).min(from + at);
            }
        }
        for page in 0..image.pages {
            let expected = lowest.get(&page).copied();
            assert_eq!(found.page(page), expected, "page {page:x}, seed {seed}");
        }
        assert_eq!(found.page(image.pages), None);
        assert_eq!(found.page(u64::MAX), None);
        assert!(found.is_of(CR3 | 5) && !found.is_of(2 * CR3));
    }
}

#[test]
fn what_a_cpu_does_not_translate_is_not_known() {
    let mut image = Image::new(1 << 20);
    assert!(image.map(0, 9, 0) && image.map(512, 512, 1) && image.map(1 << 18, 1 << 18, 2));
    let is = |image: &Image| [0, 600, (1 << 18) + 70_000].map(|page| translate(image, CR3, page));
    assert_eq!(is(&image), [Some(9), Some(600), Some((1 << 18) + 70_000)]);
    let [top, third, second, lowest] = [1, 2, 3, 4];
    let word = |image: &Image, table: u64, at: usize| image.there[&table][at];
    let cases = [
        (lowest, 0, 9 << 12, [false, true, true], "not present"),
        (top, 0, 2 << 12 | LEAF | 7, [false; 3], "a page of 512 GiB"),
        (top, 0, 1 << 40 | 7, [false; 3], "a table beyond the memory"),
        (
            top,
            0,
            77 << 12 | 7,
            [false; 3],
            "a table that is out of memory",
        ),
        (top, 0, ADDRESS | 7, [false; 3], "the highest address"),
        (
            second,
            1,
            513 << 12 | LEAF | 7,
            [true; 3],
            "the attribute of a large page",
        ),
        (
            second,
            1,
            514 << 12 | LEAF | 7,
            [true, false, true],
            "reserved bits",
        ),
        (
            third,
            1,
            (1 << 18 | 512) << 12 | LEAF | 7,
            [true, true, false],
            "reserved bits",
        ),
    ];
    for (table, at, broken, known, why) in cases {
        let before = word(&image, table, at);
        image.put(table, at, broken);
        assert_eq!(is(&image).map(|page| page.is_some()), known, "{why}");
        image.put(table, at, before);
    }
    for strange in [1 << 35, 1 << 52, 0x1_fffe << 35, u64::MAX] {
        assert_eq!(translate(&image, CR3, strange), None, "{strange:x}");
    }
    for cr3 in [0, 5 << 12, u64::MAX, 1 << 32] {
        assert_eq!(translate(&image, cr3, 0), None, "CR3 {cr3:x}");
    }
}

/// Tables of random words, that name each other and themselves.
#[test]
fn hostile_tables_cost_what_is_allowed_and_no_more() {
    for seed in 1..20 {
        let mut random = Random(seed * 0xdead_beef);
        let mut image = Image::new(64);
        for page in 1..40 {
            let words = (0..WORDS).map(|_| match random.below(4) {
                0 => random.next(),
                1 => random.below(64) << 12 | LEAF | 7,
                2 => 0,
                _ => random.below(48) << 12 | 7,
            });
            image.there.insert(page, words.collect());
        }
        for allowed in [0, 1, 5, 2000] {
            let mut looks = allowed;
            image.reads.set(0);
            let found = Reverse::of(&image, CR3, &mut looks);
            assert!(image.reads.get() <= allowed - looks, "seed {seed}");
            assert!(found.tables.len() <= allowed as usize, "seed {seed}");
            (0..80).for_each(|page| _ = found.page(page));
        }
        for _ in 0..500 {
            let (cr3, page) = (random.next() >> random.below(64), random.next() >> 12);
            let found = translate(&image, cr3, page % (1 << 35));
            assert!(found.is_none_or(|found| found < image.pages));
            translate(&image, CR3, page);
        }
    }
}

#[test]
fn a_guest_that_is_too_large_has_no_reverse() {
    let image = Image::new(PAGES_MAX + 1);
    let mut looks = 10;
    let found = Reverse::of(&image, CR3, &mut looks);
    assert_eq!((found.page(0), looks, image.reads.get()), (None, 10, 0));
}
