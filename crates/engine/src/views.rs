//! The engine's face: one view for each thing that a caller does. A view borrows the engine, and
//! costs nothing.

use crate::Engine;

/// The fault path: [`Faults::answer`] -> the caller loads -> [`Faults::validate`], if a load
/// was upset meanwhile -> the caller installs -> [`Faults::finish`].
pub struct Faults<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// The eviction path: [`Evictions::select`] -> the caller takes the pages out ->
/// [`Evictions::settle`] -> the caller stores them where [`Evictions::tiers_for`] says ->
/// [`Evictions::publish`]. An item is named by its [`BatchIndex`](crate::BatchIndex).
pub struct Evictions<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// Changes of address spaces by the program: maps, drops, moves, locks, ends.
pub struct Layout<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// Forks, and which of the relatives is charged for a frame that they share. A large fork is
/// [`Forks::begin_fork`] -> [`Forks::inherit_range`] for each part of [`BooksView::parts`].
pub struct Forks<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// Corrections of the books by what the kernel shows of the program's memory.
pub struct Discovery<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// Contents of the tiers, and what moves between them: [`Migrations::set_tiers`] ->
/// [`Migrations::wanted`] -> [`Migrations::select`] -> the caller copies ->
/// [`Migrations::demoted`].
pub struct Migrations<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// Uses of pages that are in memory, as access bits or a trace tell. A caller that knows of every
/// use, as a simulation does, takes [`Uses::number`] once and names the page by that.
pub struct Uses<'e, L> {
    pub(crate) engine: &'e mut Engine<L>,
}

/// Reading of the books. Changes nothing.
pub struct BooksView<'e, L> {
    pub(crate) engine: &'e Engine<L>,
}

impl<L> Clone for BooksView<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L> Copy for BooksView<'_, L> {}

impl<L> Engine<L> {
    /// Page faults.
    #[inline(always)]
    pub fn faults(&mut self) -> Faults<'_, L> {
        Faults { engine: self }
    }

    /// Pages that leave memory.
    #[inline(always)]
    pub fn evictions(&mut self) -> Evictions<'_, L> {
        Evictions { engine: self }
    }

    /// Address spaces and their mappings.
    #[inline(always)]
    pub fn layout(&mut self) -> Layout<'_, L> {
        Layout { engine: self }
    }

    /// Forks and shared frames.
    #[inline(always)]
    pub fn forks(&mut self) -> Forks<'_, L> {
        Forks { engine: self }
    }

    /// Findings of the kernel.
    #[inline(always)]
    pub fn discovery(&mut self) -> Discovery<'_, L> {
        Discovery { engine: self }
    }

    /// Tiers, and moves between them.
    #[inline(always)]
    pub fn migrations(&mut self) -> Migrations<'_, L> {
        Migrations { engine: self }
    }

    /// Uses of pages.
    #[inline(always)]
    pub fn uses(&mut self) -> Uses<'_, L> {
        Uses { engine: self }
    }

    /// Counts, states and limits.
    #[inline(always)]
    pub fn books(&self) -> BooksView<'_, L> {
        BooksView { engine: self }
    }
}
