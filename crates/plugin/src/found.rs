//! Finds of scans of access bits since the plugin was told last.

use std::collections::BTreeMap;

use undercroft_base::{SpaceId, VirtPage};

use crate::event::{Event, Kind};

/// Pages of one event.
const PAGES: u64 = u64::BITS as u64;

/// Events of one telling: as many as may wait. They are of 16 GiB at least.
const GROUPS_MAX: usize = 1 << 16;

/// Pages that were used, as sets of 64, and the spaces that were scanned.
#[derive(Debug, Default)]
pub struct Found {
    groups: BTreeMap<(SpaceId, u64), u64>,
    scanned: BTreeMap<SpaceId, u64>,
    /// Uses of groups for which there was no room.
    lost: u64,
}

impl Found {
    /// A scan found the page used. One of too many groups is left out, and counted.
    pub fn add(&mut self, space: SpaceId, page: VirtPage) {
        let key = (space, page.0 / PAGES);
        if self.groups.len() < GROUPS_MAX || self.groups.contains_key(&key) {
            *self.groups.entry(key).or_default() |= 1 << (page.0 % PAGES);
        } else {
            self.lost += 1;
        }
    }

    /// A scan of the space has ended, and another was before it: what was not found was not used.
    pub fn scanned(&mut self, space: SpaceId) {
        self.scanned.entry(space).or_default();
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        (self.groups.len() * size_of::<((SpaceId, u64), u64)>()) as u64
    }

    /// Takes what is to be told: of each space that was scanned first the pages, in ascending
    /// order, then that these are all; before everything, how many there was no room for.
    pub fn take(&mut self, now_ms: u64) -> Vec<Event> {
        let mut scanned = std::mem::take(&mut self.scanned);
        let groups = std::mem::take(&mut self.groups);
        let mut events = Vec::with_capacity(groups.len() + scanned.len());
        let event = |kind, space, page, pages, detail| Event {
            kind,
            space,
            page,
            pages,
            detail,
            at: 0,
            cr3: 0,
        };
        if self.lost > 0 {
            events.push(Event::plain(Kind::Lost, std::mem::take(&mut self.lost)));
        }
        let mut rest = groups.into_iter().peekable();
        for (space, pages) in &mut scanned {
            while let Some(((of, at), bits)) = rest.next_if(|((of, _), _)| of <= space) {
                if of == *space {
                    *pages += u64::from(bits.count_ones());
                    events.push(event(Kind::Accessed, of, at * PAGES, PAGES, bits));
                }
            }
            events.push(event(Kind::Scanned, *space, 0, *pages, now_ms));
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_told_by_space_once_and_only_of_spaces_that_were_scanned() {
        let mut found = Found::default();
        let pages = [(3, 200), (1, 64), (1, 127), (2, 5), (1, 63)];
        for (space, page) in pages {
            found.add(SpaceId(space), VirtPage(page));
        }
        for space in [3, 1, 7] {
            found.scanned(SpaceId(space));
        }
        let told: Vec<_> = (found.take(90).iter())
            .map(|of| (of.kind, of.space.0, of.page, of.pages, of.detail))
            .collect();
        let scanned = |space, pages| (Kind::Scanned, space, 0, pages, 90);
        let used = |space, page, bits| (Kind::Accessed, space, page, 64, bits);
        assert_eq!(
            told,
            [
                used(1, 0, 1 << 63),
                used(1, 64, 1 | 1 << 63),
                scanned(1, 3),
                used(3, 192, 1 << 8),
                scanned(3, 1),
                scanned(7, 0),
            ]
        );
        assert_eq!((found.take(91), found.bytes()), (vec![], 0));
    }

    #[test]
    fn a_telling_has_a_bound() {
        let mut found = Found::default();
        for group in 0..2 * GROUPS_MAX as u64 {
            found.add(SpaceId(1), VirtPage(group * PAGES));
        }
        found.add(SpaceId(1), VirtPage(1));
        found.scanned(SpaceId(1));
        let told = found.take(0);
        assert_eq!(told.len(), GROUPS_MAX + 2);
        assert_eq!(told[0], Event::plain(Kind::Lost, GROUPS_MAX as u64));
        assert_eq!(told[1].detail, 3);
    }
}
