//! Translates addresses of a mapping to pages of the memory object that is mapped there.

use undercroft_base::{PageSize, VirtPage, VirtRange};

/// Where a memory object is mapped, in base pages, and the size of its pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View(pub VirtRange, pub PageSize);

impl View {
    /// The page of the object that has a base page of the mapping. `None`: it is another's.
    pub(crate) fn page(self, base: VirtPage) -> Option<VirtPage> {
        let View(at, size) = self;
        at.contains(base)
            .then(|| VirtPage((base.0 - at.start.0) / size.base_pages()))
    }
}
