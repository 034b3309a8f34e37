//! Maps the page numbers of a live trace to its address spaces, and finds the same page in fork
//! relatives.

/// The numbers of each address space, in granules of neighbouring pages.
#[derive(Clone, Debug, Default)]
pub struct Spaces {
    /// Pages of a granule.
    granule: u32,
    /// The address space of each granule, in the order of numbers, and its place there.
    owners: Vec<(u32, u64)>,
    /// For each address space, the first numbers of its granules, ascending. Their places ascend,
    /// too.
    of: Vec<Vec<u32>>,
    /// Some space shares pages with another.
    related: bool,
}

impl Spaces {
    /// * `granules`: as [`Spaces::owners`].   * `related`: some spaces are forks of others.
    pub(crate) fn new(
        granule: u32,
        granules: impl Iterator<Item = (u32, u64)>,
        related: bool,
    ) -> Spaces {
        let mut spaces = Spaces {
            granule,
            related,
            ..Spaces::default()
        };
        for (at, owner) in granules.enumerate() {
            let space = owner.0 as usize;
            if space >= spaces.of.len() {
                spaces.of.resize_with(space + 1, Vec::new);
            }
            spaces.of[space].push(at as u32 * granule);
            spaces.owners.push(owner);
        }
        spaces
    }

    /// Whether a space may share pages with another.
    pub fn are_related(&self) -> bool {
        self.related
    }

    /// Pages of a granule.
    pub fn granule(&self) -> u32 {
        self.granule
    }

    /// The first number of each granule of an address space.
    pub fn granules(&self, space: u32) -> &[u32] {
        self.of.get(space as usize).map_or(&[], |first| first)
    }

    /// Numbers of the pages that two spaces have at the same addresses: (first, second).
    pub fn common(&self, one: u32, other: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let mut others = self.granules(other).iter().copied().peekable();
        let place = |first: u32| self.owners[(first / self.granule) as usize].1;
        let firsts = self.granules(one).iter().filter_map(move |first| {
            while others.next_if(|of| place(*of) < place(*first)).is_some() {}
            let same = others.next_if(|of| place(*of) == place(*first));
            same.map(|of| (*first, of))
        });
        firsts.flat_map(|(one, other)| (0..self.granule).map(move |at| (one + at, other + at)))
    }

    /// The numbers of the same page in other address spaces. Cost: a search in each.
    pub fn relatives(&self, number: u32) -> impl Iterator<Item = u32> + '_ {
        let owner = |first: u32| self.owners[(first / self.granule) as usize];
        let (space, place) = owner(number);
        let others = (0u32..).zip(&self.of).filter(move |of| of.0 != space);
        others.filter_map(move |(_, firsts)| {
            let found = firsts.binary_search_by_key(&place, |first| owner(*first).1);
            found.ok().map(|at| firsts[at] + number % self.granule)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_relatives_are_paired_by_place() {
        let owners = [(0, 5), (0, 7), (0, 9), (2, 4), (2, 7), (2, 9)];
        let spaces = Spaces::new(2, owners.into_iter(), true);
        let common: Vec<_> = spaces.common(2, 0).collect();
        assert_eq!(common, [(8, 2), (9, 3), (10, 4), (11, 5)]);
        assert_eq!(spaces.granules(2), [6, 8, 10]);
        assert_eq!(spaces.common(1, 0).count() + spaces.common(0, 9).count(), 0);
        assert_eq!(spaces.relatives(3).collect::<Vec<_>>(), [9]);
        assert_eq!(spaces.relatives(1).count(), 0);
    }
}
