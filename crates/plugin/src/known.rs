//! Which pages are in memory, by the events heard so far.
//!
//! A set of bits for each chunk of 512 pages that has any: 128 bytes for 2 MiB. After lost events
//! it is wrong for the pages that those were of, until the next event of each.

use std::collections::BTreeMap;

use crate::event::{Event, Kind};

const PAGES: u64 = 512;

/// Where a page is. The numbers are part of ABI 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageIs {
    /// No event has told of it, or the program dropped it.
    Unknown = 0,
    /// In memory.
    In = 1,
    /// Out of memory.
    Out = 2,
}

#[derive(Clone, Copy, Default)]
struct Chunk {
    present: [u64; 8],
    absent: [u64; 8],
}

/// By space and chunk.
#[derive(Default)]
pub(crate) struct Known(BTreeMap<(u32, u64), Chunk>);

fn split(page: u64) -> (u64, usize, u64) {
    let at = page % PAGES;
    (page / PAGES, (at / 64) as usize, 1 << (at % 64))
}

impl Known {
    pub(crate) fn page(&self, space: u32, page: u64) -> PageIs {
        let (chunk, word, bit) = split(page);
        match self.0.get(&(space, chunk)) {
            Some(chunk) if chunk.present[word] & bit != 0 => PageIs::In,
            Some(chunk) if chunk.absent[word] & bit != 0 => PageIs::Out,
            _ => PageIs::Unknown,
        }
    }

    fn set(&mut self, space: u32, page: u64, is: PageIs) {
        let (chunk, word, bit) = split(page);
        let chunk = self.0.entry((space, chunk)).or_default();
        chunk.present[word] &= !bit;
        chunk.absent[word] &= !bit;
        match is {
            PageIs::In => chunk.present[word] |= bit,
            PageIs::Out => chunk.absent[word] |= bit,
            PageIs::Unknown => {}
        }
    }

    /// Takes the pages of a range out, and returns where they were.
    fn take(&mut self, space: u32, start: u64, pages: u64) -> Vec<(u64, PageIs)> {
        let (Some(last), mut found) = (pages.checked_sub(1), Vec::new()) else {
            return Vec::new();
        };
        let last = start.saturating_add(last);
        let chunks = (space, start / PAGES)..=(space, last / PAGES);
        let mut empty = Vec::new();
        for (key, chunk) in self.0.range_mut(chunks) {
            for at in 0..PAGES {
                let page = key.1 * PAGES + at;
                let (_, word, bit) = split(page);
                let is = [
                    (chunk.present[word] & bit != 0, PageIs::In),
                    (chunk.absent[word] & bit != 0, PageIs::Out),
                ];
                if let Some((_, is)) = is.iter().find(|(is, _)| *is)
                    && (start..=last).contains(&page)
                {
                    found.push((page, *is));
                    chunk.present[word] &= !bit;
                    chunk.absent[word] &= !bit;
                }
            }
            if chunk
                .present
                .iter()
                .chain(&chunk.absent)
                .all(|word| *word == 0)
            {
                empty.push(*key);
            }
        }
        for key in empty {
            self.0.remove(&key);
        }
        found
    }

    pub(crate) fn note(&mut self, event: &Event) {
        let space = event.space.0;
        match event.kind {
            Kind::Fault | Kind::CameAlong | Kind::Stayed | Kind::Used | Kind::Found => {
                self.set(space, event.page, PageIs::In);
            }
            Kind::Left => self.set(space, event.page, PageIs::Out),
            Kind::Dropped => drop(self.take(space, event.page, event.pages)),
            Kind::Moved => {
                self.take(space, event.detail, event.pages);
                for (page, is) in self.take(space, event.page, event.pages) {
                    self.set(space, (page - event.page).saturating_add(event.detail), is);
                }
            }
            Kind::Forked => {
                let parent = event.detail as u32;
                let all = (parent, 0)..=(parent, u64::MAX);
                let copy: Vec<_> = (self.0.range(all))
                    .map(|((_, chunk), pages)| ((space, *chunk), *pages))
                    .collect();
                self.0.extend(copy);
            }
            Kind::Ended => {
                let all = (space, 0)..=(space, u64::MAX);
                self.0.extract_if(all, |_, _| true).for_each(drop);
            }
            // What was used since the last scan may have left since.
            Kind::Accessed | Kind::Scanned => {}
            // Where the page is was told before.
            Kind::Stored | Kind::Loaded => {}
            Kind::Limit | Kind::Tick | Kind::Lost => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use undercroft_base::SpaceId;

    use super::*;

    #[test]
    fn pages_are_where_the_events_put_them() {
        let mut known = Known::default();
        let mut tell = |kind, space, page, pages, detail| {
            let event = Event {
                kind,
                space: SpaceId(space),
                page,
                pages,
                detail,
                at: 0,
                cr3: 0,
            };
            known.note(&event);
        };
        tell(Kind::Fault, 1, 511, 1, 0);
        tell(Kind::CameAlong, 1, 512, 1, 0);
        tell(Kind::Left, 1, 512, 1, 0);
        tell(Kind::Forked, 2, 0, 0, 1);
        tell(Kind::Moved, 1, 500, 100, 10_000);
        tell(Kind::Dropped, 2, 511, 1, 0);
        tell(Kind::Dropped, 2, 0, u64::MAX, 0);
        tell(Kind::Found, 2, 7, 1, 0);
        tell(Kind::Found, 3, u64::MAX, 1, 0);
        tell(Kind::Ended, 3, 0, 0, 0);
        let is = |space, page| known.page(space, page);
        assert_eq!([is(1, 511), is(1, 512)], [PageIs::Unknown; 2]);
        assert_eq!([is(1, 10_011), is(1, 10_012)], [PageIs::In, PageIs::Out]);
        assert_eq!([is(2, 511), is(2, 512)], [PageIs::Unknown; 2]);
        assert_eq!(is(2, 7), PageIs::In);
        assert_eq!(is(3, u64::MAX), PageIs::Unknown);
        assert_eq!(known.0.len(), 2, "an empty chunk is no chunk");
    }
}
