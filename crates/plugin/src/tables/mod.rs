//! The page tables of a guest, read in its memory: which page of the guest is at a virtual address,
//! and the reverse.
//!
//! x86-64 with four levels. A table is a page of the guest with 512 words:
//!
//! ```text
//! CR3 -> words of 512 GiB -> of 1 GiB -> of 2 MiB -> of 4 KiB
//! ```
//! The guest writes its tables while they are read, and as it likes. Some of them may be out of
//! memory, and nothing is loaded for a question. So an answer is a hint, and there may be none. A
//! question costs four reads at most. [`Reverse`] looks at as many tables as its caller allows, so
//! tables that contain themselves cost that and no more.

/// Memory of a guest. Pages have 4 KiB, and are numbered from 0.
pub trait GuestMemory: Send {
    /// How many there are.
    fn pages(&self) -> u64;

    /// Reads words of a page, from the `from`-th on. False: it may be out of memory. Loads nothing.
    fn read(&self, page: u64, from: usize, words: &mut [u64]) -> bool;
}

/// Words of a table.
const WORDS: usize = 512;
const LEVELS: u32 = 4;

const PRESENT: u64 = 1;
/// Above the lowest level: the word names pages, and no table.
const LEAF: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Pages that a word of a level has; 0 is the lowest.
const fn span(level: u32) -> u64 {
    1 << (9 * level)
}

/// The page that a word, or CR3, names.
fn named(word: u64) -> u64 {
    (word & ADDRESS) >> 12
}

/// The meaning of a word.
enum Word {
    Nothing,
    Table(u64),
    Pages(u64),
}

impl Word {
    fn of(word: u64, level: u32) -> Word {
        let is_leaf = word & LEAF != 0;
        // The lowest bit of the address of a large page is no part of it (PAT).
        let first = named(word) & !1;
        match level {
            _ if word & PRESENT == 0 => Word::Nothing,
            0 => Word::Pages(named(word)),
            // Where reserved bits are set the CPU translates nothing.
            1 | 2 if is_leaf && first.is_multiple_of(span(level)) => Word::Pages(first),
            _ if is_leaf => Word::Nothing,
            _ => Word::Table(named(word)),
        }
    }
}

fn read(memory: &dyn GuestMemory, page: u64, from: usize, words: &mut [u64]) -> bool {
    page < memory.pages() && memory.read(page, from, words)
}

/// The page of the guest that is mapped at the virtual page `page`, by the tables of `cr3`.
/// `None`: that is not known, nothing is mapped there, or something that is no memory.
pub fn translate(memory: &dyn GuestMemory, cr3: u64, page: u64) -> Option<u64> {
    // Of an address the highest 17 bits are equal.
    if !matches!(page >> 35, 0 | 0x1_ffff) {
        return None;
    }
    let mut table = named(cr3);
    for level in (0..LEVELS).rev() {
        let mut word = [0];
        let at = (page / span(level)) as usize % WORDS;
        if !read(memory, table, at, &mut word) {
            return None;
        }
        match Word::of(word[0], level) {
            Word::Nothing => return None,
            Word::Table(below) => table = below,
            Word::Pages(first) => {
                let found = first + page % span(level);
                return (found < memory.pages()).then_some(found);
            }
        }
    }
    None
}

/// A guest with more pages (64 GiB) has no [`Reverse`]: it would take too much memory.
const PAGES_MAX: u64 = 1 << 24;

/// Where each page of a guest is mapped by the lower half of one set of tables: a program's. Of a
/// page that is mapped twice, the lowest address. Four bytes a page of the guest.
#[derive(Debug)]
pub struct Reverse {
    cr3: u64,
    /// For each page 512 times the number of a table, its place there, and 1. 0: there is none.
    at: Vec<u32>,
    /// The first virtual page of each lowest table, and of each 512 pages of a large page.
    tables: Vec<u64>,
}

impl Reverse {
    /// Looks at the tables of `cr3`.
    ///
    /// * `looks`: tables, and 512 pages of large pages, that it may look at. Those are taken off.
    pub fn of(memory: &dyn GuestMemory, cr3: u64, looks: &mut u32) -> Reverse {
        let pages = Some(memory.pages()).filter(|pages| *pages <= PAGES_MAX);
        let mut found = Reverse {
            cr3: cr3 & ADDRESS,
            at: vec![0; pages.unwrap_or(0) as usize],
            tables: Vec::new(),
        };
        if pages.is_some() {
            found.look(memory, (named(cr3), LEVELS - 1), 0, looks);
        }
        found
    }

    /// Whether it is of these tables.
    pub fn is_of(&self, cr3: u64) -> bool {
        self.cr3 == cr3 & ADDRESS
    }

    /// The virtual page where a page of the guest was mapped. `None`: that is not known.
    pub fn page(&self, page: u64) -> Option<u64> {
        let at = usize::try_from(page).ok().and_then(|at| self.at.get(at))?;
        let at = at.checked_sub(1)? as usize;
        Some(self.tables.get(at / WORDS)? + (at % WORDS) as u64)
    }

    /// * `table`: a page of the guest, and its level.
    /// * `first`: its first virtual page.
    fn look(
        &mut self,
        memory: &dyn GuestMemory,
        (table, level): (u64, u32),
        first: u64,
        looks: &mut u32,
    ) {
        let mut words = [0; WORDS];
        if !taken(looks) || !read(memory, table, 0, &mut words) {
            return;
        }
        if level == 0 {
            self.tables.push(first);
        }
        // The upper half is that of the guest's kernel, and has all its memory.
        let lower = WORDS / if level == LEVELS - 1 { 2 } else { 1 };
        for (place, word) in words[..lower].iter().enumerate() {
            let page = first + place as u64 * span(level);
            match Word::of(*word, level) {
                Word::Nothing => {}
                Word::Table(below) => self.look(memory, (below, level - 1), page, looks),
                Word::Pages(found) if level == 0 => self.note(found, place),
                Word::Pages(found) => self.note_large(found, page, level, looks),
            }
        }
    }

    fn note_large(&mut self, found: u64, page: u64, level: u32, looks: &mut u32) {
        for part in (0..span(level)).step_by(WORDS) {
            if found + part >= self.at.len() as u64 || !taken(looks) {
                return;
            }
            self.tables.push(page + part);
            (0..WORDS).for_each(|place| self.note(found + part + place as u64, place));
        }
    }

    /// The last of `tables` has this page at `place`.
    fn note(&mut self, page: u64, place: usize) {
        let number = (self.tables.len() - 1) * WORDS + place + 1;
        let at = usize::try_from(page)
            .ok()
            .and_then(|at| self.at.get_mut(at));
        if let (Some(at), Ok(number)) = (at, u32::try_from(number))
            && *at == 0
        {
            *at = number;
        }
    }
}

/// Takes one off, if there is one.
fn taken(looks: &mut u32) -> bool {
    let left = looks.checked_sub(1);
    *looks = left.unwrap_or(0);
    left.is_some()
}

#[cfg(test)]
mod tests;
