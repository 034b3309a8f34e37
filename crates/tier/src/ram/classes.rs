//! Size classes of the RAM pool: which object sizes there are, and how many pages a block of each
//! takes.
//!
//! A block owns [`BLOCK_BYTES`] of *address space*, but uses only `pages` of it. The number is
//! chosen per class so that the objects fill those pages almost exactly. Unused address space of a
//! memfd costs nothing. So blocks of any number of pages need no buddy allocator, and large objects
//! need no large blocks.

use undercroft_base::BASE_PAGE_BYTES;

/// Address space of one block. The fragmentation of other sizes: docs/design/0006. The test
/// `heap_fragmentation_*` measures it.
pub(super) const BLOCK_BYTES: usize = 32 * 1024;
/// Pages a block may use.
const BLOCK_PAGES: usize = BLOCK_BYTES / BASE_PAGE_BYTES;
/// Objects start at multiples of this, so a slot is an offset divided by it.
pub(super) const ALIGN_BYTES: usize = 16;
/// The largest object, header included. A page that needs more is incompressible.
pub(super) const OBJECT_BYTES_MAX: usize = 3632;
/// Most objects of one block: its bitmap has a bit for each.
pub(super) const BLOCK_OBJECTS_MAX: usize = 256;
/// How many classes there are.
pub(super) const CLASS_COUNT: usize = count();

/// A size class.
#[derive(Clone, Copy, Debug)]
pub(super) struct Class {
    /// Size of each object.
    pub(super) object_bytes: u32,
    /// Objects in a block.
    pub(super) objects: u16,
    /// Pages of a block that are used.
    pub(super) pages: u8,
}

impl Class {
    /// Memory that a block uses when its pages are touched.
    pub(super) fn held_bytes(&self) -> u64 {
        u64::from(self.pages) * BASE_PAGE_BYTES as u64
    }
}

/// The classes, smallest first.
pub(super) const CLASSES: [Class; CLASS_COUNT] = build();

/// For each size in units of [`ALIGN_BYTES`], rounded up: the index of the class that holds it.
const CLASS_OF: [u8; OBJECT_BYTES_MAX / ALIGN_BYTES + 1] = lookup();

/// The class for objects of `bytes`. `None` if they are too large for the pool.
pub(super) fn class_of(bytes: usize) -> Option<usize> {
    CLASS_OF
        .get(bytes.div_ceil(ALIGN_BYTES))
        .map(|&class| class as usize)
}

/// The next larger size: steps of about 3 %, multiples of [`ALIGN_BYTES`].
const fn next_size(bytes: usize) -> usize {
    let step = if bytes < 640 {
        16
    } else if bytes < 1280 {
        32
    } else if bytes < 2048 {
        48
    } else {
        64
    };
    if bytes < OBJECT_BYTES_MAX && bytes + step > OBJECT_BYTES_MAX {
        OBJECT_BYTES_MAX
    } else {
        bytes + step
    }
}

const fn count() -> usize {
    let mut bytes = 2 * ALIGN_BYTES;
    let mut count = 0;
    while bytes <= OBJECT_BYTES_MAX {
        count += 1;
        bytes = next_size(bytes);
    }
    count
}

const fn build() -> [Class; CLASS_COUNT] {
    let mut classes = [Class {
        object_bytes: 0,
        objects: 0,
        pages: 0,
    }; CLASS_COUNT];
    let mut bytes = 2 * ALIGN_BYTES;
    let mut at = 0;
    while at < CLASS_COUNT {
        classes[at] = fit(bytes);
        bytes = next_size(bytes);
        at += 1;
    }
    classes
}

/// The smallest block that wastes at most 1/64 at its end, or else the one that wastes least.
const fn fit(object_bytes: usize) -> Class {
    let mut best = 0;
    let mut best_waste = usize::MAX;
    let mut pages = 1;
    while pages <= BLOCK_PAGES {
        let objects = objects_in(pages, object_bytes);
        let waste =
            (pages * BASE_PAGE_BYTES - objects * object_bytes) * 4096 / (pages * BASE_PAGE_BYTES);
        if waste < best_waste {
            best = pages;
            best_waste = waste;
        }
        if waste <= 4096 / 64 {
            break;
        }
        pages += 1;
    }
    Class {
        object_bytes: object_bytes as u32,
        objects: objects_in(best, object_bytes) as u16,
        pages: best as u8,
    }
}

const fn objects_in(pages: usize, object_bytes: usize) -> usize {
    let objects = pages * BASE_PAGE_BYTES / object_bytes;
    if objects > BLOCK_OBJECTS_MAX {
        BLOCK_OBJECTS_MAX
    } else {
        objects
    }
}

const fn lookup() -> [u8; OBJECT_BYTES_MAX / ALIGN_BYTES + 1] {
    let mut table = [0; OBJECT_BYTES_MAX / ALIGN_BYTES + 1];
    let mut class = 0;
    let mut units = 0;
    while units < table.len() {
        while (CLASSES[class].object_bytes as usize) < units * ALIGN_BYTES {
            class += 1;
        }
        table[units] = class as u8;
        units += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_little_inside_and_at_the_end_of_a_block() {
        let (mut sum, mut worst) = (0.0, 0.0f64);
        let mut sizes = 0.0;
        for bytes in 200..=OBJECT_BYTES_MAX {
            let class = CLASSES[class_of(bytes).unwrap()];
            assert!(class.object_bytes as usize >= bytes);
            let used = bytes as f64 * f64::from(class.objects) / class.held_bytes() as f64;
            worst = worst.max(1.0 - used);
            sum += 1.0 - used;
            sizes += 1.0;
        }
        println!(
            "{CLASS_COUNT} classes, mean waste {:.3}, worst {worst:.3}",
            sum / sizes
        );
        assert!(sum / sizes < 0.05, "mean waste {}", sum / sizes);
        assert!(worst < 0.12, "worst waste {worst}");
    }

    #[test]
    fn classes_ascend_and_fit_their_blocks() {
        for pair in CLASSES.windows(2) {
            assert!(pair[0].object_bytes < pair[1].object_bytes);
        }
        for class in CLASSES {
            assert_eq!(class.object_bytes as usize % ALIGN_BYTES, 0);
            assert!(class.objects as usize <= BLOCK_OBJECTS_MAX);
            assert!(class.pages as usize <= BLOCK_PAGES);
            assert!(u64::from(class.object_bytes) * u64::from(class.objects) <= class.held_bytes());
        }
        assert_eq!(
            CLASSES[CLASS_COUNT - 1].object_bytes as usize,
            OBJECT_BYTES_MAX
        );
        assert_eq!(class_of(OBJECT_BYTES_MAX + 1), None);
    }
}
