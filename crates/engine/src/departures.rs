//! When pages left whose copy is older than that: clean ones, which leave without a new copy.
//!
//! Every other page leaves when its copy is made, so the copy's stamp tells. Memory: 1 KiB for each
//! chunk that had a clean page leave.

use undercroft_base::{CHUNK_PAGES, PageNo, Stamp};

/// The steps of one chunk's pages; 0 = the page did not leave clean. A step of 0 is kept as 1.
type Steps = Box<[u16; CHUNK_PAGES as usize]>;

#[derive(Default)]
pub(crate) struct Departures {
    chunks: Vec<Option<Steps>>,
    held: u64,
}

impl Departures {
    /// The page left clean, at `now`. O(1); allocates at the first page of a chunk.
    pub(crate) fn left_clean(&mut self, page: PageNo, now: Stamp) {
        let chunk = page.chunk().0 as usize;
        if chunk >= self.chunks.len() {
            self.chunks.resize_with(chunk + 1, || None);
        }
        let steps = self.chunks[chunk].get_or_insert_with(|| {
            self.held += 1;
            Box::new([0; CHUNK_PAGES as usize])
        });
        steps[(page.0 % CHUNK_PAGES) as usize] = now.0.max(1);
    }

    /// The page left, and its copy was made then. O(1).
    #[inline]
    pub(crate) fn left_with_copy(&mut self, page: PageNo) {
        if let Some(Some(steps)) = self.chunks.get_mut(page.chunk().0 as usize) {
            steps[(page.0 % CHUNK_PAGES) as usize] = 0;
        }
    }

    /// The page `to` has the state of `from` from now on: it is the same page at another address,
    /// or a fork child's. O(1); allocates as [`Departures::left_clean`].
    pub(crate) fn copy(&mut self, from: PageNo, to: PageNo) {
        match self.when(from) {
            Some(left) => self.left_clean(to, left),
            None => self.left_with_copy(to),
        }
    }

    /// When the page left clean. `None`: it left when its copy was made. O(1).
    #[inline]
    pub(crate) fn when(&self, page: PageNo) -> Option<Stamp> {
        let steps = self.chunks.get(page.chunk().0 as usize)?.as_ref()?;
        let step = steps[(page.0 % CHUNK_PAGES) as usize];
        (step != 0).then_some(Stamp(step))
    }

    /// Bytes held now.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.held * size_of::<[u16; CHUNK_PAGES as usize]>() as u64
            + (self.chunks.capacity() * size_of::<usize>()) as u64
    }
}
