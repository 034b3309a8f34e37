//! Takes over from a dead manager: rebuilds the engine from the ledger. Then it ends what was in
//! flight by what the client's memory shows.
//!
//! The successor's walk. Meanwhile nothing else installs or moves pages of the client.
//! 1. It stops the agents: no command of the dead manager may still be carried out.
//! 2. [`Engine::recover`], with the spaces whose processes live. The ledger does not say which
//!    process has which number, nor its managed ranges. The caller keeps both where it keeps
//!    the descriptors.
//! 3. It applies the layout event that its predecessor had read last and may not have applied.
//!    [`Layout::removed`](crate::Layout::removed), [`Layout::unmapped`](crate::Layout::unmapped)
//!    and [`Forks::forked`](crate::Forks::forked) may be applied twice; for a move see
//!    [`Layout::remap_rest`](crate::Layout::remap_rest). The kernel takes an event for acknowledged
//!    once it is read, so it must have been read into memory that survives. Then it applies the
//!    unread events.
//! 4. [`Engine::reconcile`], with no event unread. The caller frees the slots that no page refers
//!    to. The pages in its hands are a batch like any other.
//! 5. It wakes every thread: faults that the dead manager had read are not reported again.
//!
//! | entry | page present, or in the kernel's swap | absent |
//! |---|---|---|
//! | Resident | stays | reads as zeros: the program dropped it |
//! | Loading, fresh | Untouched, and unknown: a REMOVE may be about to drop it | Untouched |
//! | Loading | Resident: the load had installed it | Stored |
//! | Evicting | Resident: never left, or was put back | in hand if the holding area has it [^1] |
//!
//! [^1]: Else the program dropped it.
//!
//! A page in hand may have been put back, and then dropped by the zap of a REMOVE that was
//! acknowledged before. It then comes back as if it had been written after the zap. That is wrong
//! if the program wrote it anew between the two (docs/design/0009).
//!
//! Lost with the manager: the order of pages (they are inserted by number), ages between tiers
//! except the stamp, statistics.

use std::sync::atomic::Ordering;

use undercroft_base::{
    CHUNK_PAGES, ChunkNo, Entry, Flags, PageNo, PageSize, PageState, Slot, SpaceId, Stamp, TierId,
    VirtPage, VirtRange,
};
use undercroft_policy::prefetch::Prefetch;
use undercroft_policy::reclaim::{Arrival, Reclaim};

use crate::batch::{EvictItem, InFlight};
use crate::claims::Claims;
use crate::ledger::{Ledger, LedgerError, LedgerWords};
use crate::limits::STAMP_EVICTIONS;
use crate::notes::{self, Note};
use crate::page_table::PageTable;
use crate::stamps::{Stamps, Turn, Window};
use crate::{Config, Engine};

/// State of one page, as the kernel shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// The page has a frame.
    Present,
    /// The page is in the kernel's swap, or the kernel moves it between frames: it is where the
    /// program left it, and a touch needs no manager.
    Swapped,
    /// The page is mapped and registered, and has no bytes (a poison mark has none).
    Absent,
    /// The program has put a guard there, without an event: it has dropped the page.
    Guarded,
    /// The page is not mapped, or not registered.
    NotManaged,
    /// Its process cannot be looked at. For pages in flight only: such a page is where its bytes
    /// are if an agent has them, and otherwise where it was.
    Unknown,
}

/// Fate of bytes that an agent was told to move out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldPage {
    /// They are in its holding area.
    Here,
    /// The agent did not move the page.
    NotMoved,
    /// Its process has ended, and the bytes with it.
    OwnerGone,
}

impl Here {
    /// Whether the program has its bytes.
    fn has_bytes(self) -> bool {
        matches!(self, Here::Present | Here::Swapped)
    }
}

/// Answers the questions of [`Engine::reconcile`].
pub trait Found {
    /// The page, as the page tables of its process show it.
    fn page(&mut self, space: SpaceId, page: VirtPage) -> Here;
    /// Place `place` of the last command given to the agent of `owner`.
    fn held(&mut self, owner: SpaceId, place: usize) -> HeldPage;
}

/// A page whose bytes the caller has: an item of the batch, which is `Moved`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InHand {
    /// The item, for [`Evictions::publish`](crate::Evictions::publish).
    pub item: EvictItem,
    /// Whose agent has the bytes.
    pub owner: SpaceId,
    /// Where in its holding area they are.
    pub place: usize,
}

/// Findings of [`Engine::reconcile`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Pages to store or put back.
    pub in_hand: Vec<InHand>,
    /// Slots that pages refer to. The caller frees all others of its tiers.
    pub claims: Claims,
    /// Pages whose bytes ended with a process.
    pub lost: Vec<(SpaceId, VirtPage)>,
    /// Pages that a load had installed but not finished.
    pub installed: u64,
    /// Pages that were being evicted and are in the client.
    pub returned: u64,
    /// Pages that the program had dropped without an event.
    pub vanished: u64,
    /// Pages that have an entry, but are not managed.
    pub strays: u64,
}

impl<L: Ledger> Engine<L> {
    /// The engine that the ledger describes, with everything in flight undecided. Until
    /// [`Engine::reconcile`] it takes layout events and nothing else.
    ///
    /// * `spaces`: those whose process lives, with the sizes of their pages. Pages of others are
    ///   forgotten.
    ///
    /// Returns also every slot that an entry refers to. A caller that uses
    /// [`Engine::reconcile_present`] frees all other slots of its tiers at once. From then on
    /// [`Engine::take_freed`] has those that are released.
    ///
    /// Errors: the ledger is damaged, or names more tiers than there are; nothing was changed.
    /// Cost: O(all entries).
    pub fn recover(
        ledger: L,
        reclaim: Box<dyn Reclaim>,
        prefetch: Option<Box<dyn Prefetch>>,
        config: Config,
        spaces: &[(SpaceId, PageSize)],
    ) -> Result<(Engine<L>, Claims), LedgerError> {
        let notes = notes::read(ledger.notes());
        let table = PageTable::recover(ledger, spaces, config.retain.len())?;
        let mut engine = Engine::over(table, reclaim, prefetch, config);
        if let Some((old, new)) = notes.moved {
            engine.finish_move(old, new);
        }
        engine.recover_batch();
        let claims = engine.recover_books();
        Ok((engine, claims))
    }

    /// A page may have two entries, or its note may have the old number. Completes the move.
    fn finish_move(&mut self, old: PageNo, new: PageNo) {
        if self.table.has_page(old) && self.table.has_page(new) && old != new {
            let entry = self.table.entry(old);
            if entry != Entry::UNTOUCHED {
                self.note_move(old, new, true);
                self.table.set(new, entry);
                self.table.set(old, Entry::UNTOUCHED);
            }
        }
        self.forget_move();
    }

    /// Visits every page that is not `Untouched`, by number, as it is then.
    fn each_known(&mut self, mut act: impl FnMut(&mut Engine<L>, PageNo, Entry)) {
        for chunk in (0..self.table.chunks_used()).map(ChunkNo) {
            if !self.table.has_page(chunk.page(0)) {
                continue;
            }
            for no in (0..CHUNK_PAGES).map(|offset| chunk.page(offset)) {
                if let Some(entry) = self.table.known(no) {
                    act(self, no, entry);
                }
            }
        }
    }

    /// Rebuilds everything that follows from the entries. Nothing is kept of each page meanwhile: a
    /// machine that is short of memory may have very many.
    fn recover_books(&mut self) -> Claims {
        let (mut claims, mut stamps) = (Claims::default(), Stamps::new(&self.config.demotes));
        self.each_known(|engine, no, entry| {
            let entry = match entry.state {
                PageState::Loading => engine.end_load(no, entry),
                _ => entry,
            };
            let own = !entry.flags.has(Flags::INHERITED);
            match entry.state {
                PageState::Resident if own => {
                    engine.count(no);
                    engine.reclaim.insert(no, Arrival::FirstTouch);
                }
                PageState::Evicting => {
                    engine.stranded |= !engine.is_in_batch(no);
                    if own {
                        engine.count(no);
                    }
                }
                PageState::Stored => stamps.note(entry.tier, entry.stamp),
                _ => {}
            }
            if let Some((tier, slot)) = claim(entry)
                && !claims.insert(tier, slot)
            {
                *engine.refs.entry((tier, slot)).or_insert(1) += 1;
            }
        });
        let newest = stamps.newest();
        self.evictions = (u64::from(newest.0) + 1) * STAMP_EVICTIONS;
        for window in stamps.windows(newest) {
            self.recover_ages(&window);
        }
        claims
    }

    /// Ends a load: the slot still holds the page's bytes.
    fn end_load(&mut self, no: PageNo, entry: Entry) -> Entry {
        let flags = Flags(entry.flags.0 & Flags::LOCKED.0);
        let back = if crate::layout::is_zero(entry) {
            Entry {
                flags,
                ..Entry::UNTOUCHED
            }
        } else {
            Entry {
                state: PageState::Stored,
                flags,
                ..entry
            }
        };
        self.table.set(no, back);
        back
    }

    /// Remembers the ages of the pages in a window, the oldest first.
    fn recover_ages(&mut self, window: &Window) {
        let (mut sorted, tier) = (window.room(), usize::from(window.tier.0));
        for chunk in self.table.chunks() {
            let pages = (0..CHUNK_PAGES).map(|offset| chunk.page(offset));
            for (no, word) in pages.zip(self.table.ledger().words(chunk)) {
                let entry = Entry::unpack(word.load(Ordering::Relaxed));
                if entry.state != PageState::Stored || entry.tier != window.tier {
                    continue;
                }
                match sorted.place(entry.stamp) {
                    Turn::Sorted(place) => *place = no,
                    Turn::InOrder => self.ages.push_all(tier, [no]),
                    Turn::Elsewhere => {}
                }
            }
        }
        self.ages.push_all(tier, sorted.pages);
    }

    /// Rebuilds the batch from its notes. Items whose page was dropped, or that were finished, are
    /// dead.
    fn recover_batch(&mut self) {
        let notes = notes::read(self.table.ledger().notes());
        // Items are counted pages, followers are not. A page that is noted otherwise is treated as
        // stranded.
        let evicting = |no: &PageNo, inherited: bool| {
            self.table.has_page(*no) && {
                let entry = self.table.entry(*no);
                let same = entry.flags.has(Flags::INHERITED) == inherited;
                entry.state == PageState::Evicting && same
            }
        };
        let nobody = EvictItem {
            at: self.batch.index(0),
            no: PageNo(u32::MAX),
            space: SpaceId(u32::MAX),
            page: VirtPage(u64::MAX),
            place: 0,
            size: PageSize::Base,
            stamp: Stamp(0),
            retained: None,
        };
        let mut taken = Vec::new();
        let mut batch: Vec<Option<Note>> = Vec::new();
        let mut pages = Vec::new();
        for note in &notes.batch {
            let no = note.and_then(|note| note.page);
            let no = no.filter(|no| evicting(no, false));
            // A page belongs to one item only.
            let no = no.filter(|no| !taken.contains(no));
            taken.extend(no);
            batch.push(note.map(|note| Note { page: no, ..note }));
            let at = self.batch.index(pages.len());
            pages.push(InFlight {
                item: EvictItem {
                    at,
                    // Its agent keeps the bytes for a fork child, as long as they are in flight.
                    space: note.map_or(nobody.space, |note| note.owner),
                    place: note.map_or(0, |note| note.place as u8),
                    ..no.map_or(nobody, |no| self.recovered_item(no))
                },
                dead: no.is_none(),
                wanted: false,
                settled: note.is_none(),
                moved: false,
                heir: None,
            });
        }
        let mut followers = Vec::new();
        let mut follower_notes = Vec::new();
        for note in &notes.followers {
            let same = |leader: &Option<Note>| {
                leader.is_some_and(|l| (l.owner, l.place) == (note.owner, note.place))
            };
            let no = note.page.filter(|no| evicting(no, true));
            let no = no.filter(|no| !taken.contains(no));
            if let (Some(no), Some(at)) = (no, batch.iter().position(same)) {
                taken.push(no);
                pages[at].item.size = self.table.size(no);
                followers.push((at, no));
                follower_notes.push(*note);
            }
        }
        self.batch.pages = pages;
        self.batch.followers = followers;
        self.rewrite_notes(&batch, &follower_notes);
    }

    fn recovered_item(&self, no: PageNo) -> EvictItem {
        let entry = self.table.entry(no);
        let (space, page) = self.table.address(no);
        EvictItem {
            at: self.batch.index(0),
            no,
            space,
            page,
            place: 0, // its note has it
            size: self.table.size(no),
            stamp: Stamp(0),
            retained: claim(entry).map(|(tier, slot)| (tier, slot, entry.stamp)),
        }
    }

    /// Gives a space the managed ranges that it had: between [`Engine::recover`] and the first
    /// layout event, if the caller has kept them ([`Ledger::regions_changed`]).
    pub fn restore_regions(&mut self, space: SpaceId, regions: Vec<VirtRange>) {
        self.table.set_regions(space, regions);
    }

    /// Ends what was in flight, by what the kernel shows. No layout event may be unread, or
    /// acknowledged meanwhile. Afterwards the engine is as any other; the pages in hand are
    /// published next. Cost: O(all entries).
    pub fn reconcile(&mut self, found: &mut dyn Found) -> Recovered {
        let mut recovered = Recovered::default();
        self.each_known(|engine, no, entry| {
            let (space, page) = engine.table.address(no);
            match (entry.state, found.page(space, page)) {
                (_, Here::NotManaged) => {
                    recovered.strays += 1;
                    engine.drop_page(no);
                }
                (PageState::Resident, Here::Absent) => {
                    recovered.vanished += 1;
                    engine.drop_page(no);
                }
                (PageState::Resident, Here::Guarded) => _ = engine.drop_page(no),
                (PageState::Stored, here) if here.has_bytes() => {
                    recovered.installed += 1;
                    engine.was_installed(no, entry);
                }
                _ => {}
            }
        });
        self.reconcile_flight(found, &mut recovered);
        recovered.claims = self.claims();
        self.freed.clear();
        recovered
    }

    /// Every slot that an entry refers to. Cost: O(all entries).
    fn claims(&mut self) -> Claims {
        let mut claims = Claims::default();
        self.each_known(|_, _, entry| {
            if let Some((tier, slot)) = claim(entry) {
                claims.insert(tier, slot);
            }
        });
        claims
    }

    /// The first part of [`Engine::reconcile`] for a caller that cannot keep all processes from
    /// changing their memory for so long. It is called for parts of a space, in any order and also
    /// twice, while no event of that space is unread. [`Engine::reconcile_flight`] follows.
    ///
    /// Only pages that a load had installed are corrected. A resident page that is absent stays in
    /// the books: a thread that touches it faults, and
    /// [`Discovery::missing`](crate::Discovery::missing) knows what it reads.
    ///
    /// * `present`: pages whose bytes the program has, in a frame or in the kernel's swap.
    pub fn reconcile_present(&mut self, space: SpaceId, present: VirtRange) -> u64 {
        let mut installed = 0;
        let known: Vec<PageNo> = self
            .table
            .known_pages(space, present)
            .map(|(_, no)| no)
            .collect();
        for no in known {
            let entry = self.table.entry(no);
            if entry.state == PageState::Stored {
                installed += 1;
                self.was_installed(no, entry);
            }
        }
        installed
    }

    /// A load had installed the page.
    fn was_installed(&mut self, no: PageNo, entry: Entry) {
        self.release(entry.tier, entry.slot);
        self.now_resident(no, entry.flags);
    }

    /// The pages that [`Engine::reconcile_flight`] will ask for. Cost: O(batch), unless the notes
    /// were full when the manager died: then O(all entries).
    pub fn in_flight(&mut self) -> Vec<(SpaceId, VirtPage)> {
        let items = self.batch.pages.iter();
        let open = items.filter(|flying| !flying.dead && !flying.settled);
        let items = open.map(|flying| flying.item.no);
        let noted = items.chain(self.batch.followers.iter().map(|(_, no)| *no));
        let mut pages: Vec<PageNo> = noted.collect();
        if self.stranded {
            self.each_known(|engine, no, entry| {
                if entry.state == PageState::Evicting && !engine.is_in_batch(no) {
                    pages.push(no);
                }
            });
        }
        pages.into_iter().map(|no| self.table.address(no)).collect()
    }

    /// Whose agent was told to move this page out, and to which place, if that is noted and the
    /// page is not shared: before [`Engine::reconcile_flight`]. A caller that has its bytes may put
    /// it back: pages that are present count as returned.
    pub fn noted_place(&self, space: SpaceId, page: VirtPage) -> Option<(SpaceId, usize)> {
        let notes = notes::read(self.table.ledger().notes());
        let of = |(at, flying): (usize, &InFlight)| {
            let item = &flying.item;
            let open = !flying.dead && !flying.settled && (item.space, item.page) == (space, page);
            let shared = (self.batch.followers.iter()).any(|(leader, _)| *leader == at);
            let note = (*notes.batch.get(at)?)?;
            (open && !shared).then_some((note.owner, note.place))
        };
        self.batch.pages.iter().enumerate().find_map(of)
    }

    /// The second part of [`Engine::reconcile`]: ends the batch. No layout event of a space that
    /// has pages of it may be unread.
    pub fn reconcile_flight(&mut self, found: &mut dyn Found, recovered: &mut Recovered) {
        self.reconcile_batch(found, recovered);
        if std::mem::take(&mut self.stranded) {
            self.each_known(|engine, no, entry| {
                if entry.state == PageState::Evicting && !engine.is_in_batch(no) {
                    engine.reconcile_stranded(no, entry, found, recovered);
                }
            });
        }
        self.stats.vanished += recovered.vanished;
        self.stats.lost += recovered.lost.len() as u64;
    }

    fn is_in_batch(&self, no: PageNo) -> bool {
        self.batch.position(no).is_some() || self.batch.followers.iter().any(|(_, f)| *f == no)
    }

    /// The page is in the client, in its own frame.
    fn now_resident(&mut self, no: PageNo, flags: Flags) {
        let resident = Entry {
            state: PageState::Resident,
            flags: Flags(flags.0 & Flags::LOCKED.0),
            ..Entry::UNTOUCHED
        };
        self.table.set(no, resident.that_left());
        self.count(no);
        self.reclaim.insert(no, Arrival::Returned);
    }

    fn reconcile_batch(&mut self, found: &mut dyn Found, recovered: &mut Recovered) {
        let notes = notes::read(self.table.ledger().notes());
        for (at, note) in notes.batch.iter().enumerate() {
            let (Some(note), false) = (note, self.batch.pages[at].settled) else {
                continue;
            };
            let held = found.held(note.owner, note.place);
            let page = self.batch.pages[at];
            if !page.dead {
                let here = found.page(page.item.space, page.item.page);
                match (here, held) {
                    (Here::Present | Here::Swapped, _) | (Here::Unknown, HeldPage::NotMoved) => {
                        recovered.returned += 1;
                        self.back_to_resident(at, Arrival::Returned);
                        self.batch.pages[at].dead = true;
                    }
                    (Here::Guarded, _) => _ = self.drop_page(page.item.no),
                    (_, HeldPage::Here) => {}
                    (Here::NotManaged, _) => {
                        recovered.strays += 1;
                        self.drop_page(page.item.no);
                    }
                    _ => {
                        recovered.vanished += 1;
                        self.drop_page(page.item.no);
                    }
                }
            }
            self.reconcile_followers(at, held, found, recovered);
            if !self.batch.is_alive(at) {
                self.batch.pages[at].settled = true;
                self.forget_note(at);
                continue;
            }
            self.batch.pages[at].item.stamp = self.stamp();
            recovered.in_hand.push(InHand {
                item: self.batch.pages[at].item,
                owner: note.owner,
                place: note.place,
            });
        }
    }

    fn reconcile_followers(
        &mut self,
        at: usize,
        held: HeldPage,
        found: &mut dyn Found,
        recovered: &mut Recovered,
    ) {
        let followers: Vec<PageNo> = self
            .batch
            .followers
            .iter()
            .filter(|(leader, _)| *leader == at)
            .map(|(_, no)| *no)
            .collect();
        for no in followers {
            let entry = self.table.entry(no);
            let (space, page) = self.table.address(no);
            match (found.page(space, page), held) {
                (Here::Present | Here::Swapped, _) | (Here::Unknown, HeldPage::NotMoved) => {
                    recovered.returned += 1;
                    self.batch.followers.retain(|(_, follower)| *follower != no);
                    self.returned_follower(no, entry, held == HeldPage::Here);
                }
                (Here::Guarded, _) => _ = self.drop_page(no),
                (_, HeldPage::Here) => {}
                (_, HeldPage::NotMoved) => {
                    recovered.vanished += 1;
                    self.drop_page(no);
                }
                (_, HeldPage::OwnerGone) => self.lose(no, recovered),
            }
        }
    }

    /// A fork child's page is in memory. `own`: it was put back, in a frame of its own. Otherwise
    /// it has its parent's.
    fn returned_follower(&mut self, no: PageNo, entry: Entry, own: bool) {
        if let Some((tier, slot)) = claim(entry) {
            self.release(tier, slot);
        }
        let counted = !entry.flags.has(Flags::INHERITED);
        if own || counted {
            if counted {
                self.uncount(no);
            }
            self.now_resident(no, entry.flags);
        } else {
            let flags = Flags(entry.flags.0 & Flags::LOCKED.0).with(Flags::INHERITED);
            let resident = Entry {
                state: PageState::Resident,
                flags,
                ..Entry::UNTOUCHED
            };
            self.table.set(no, resident.that_left());
        }
    }

    /// A page was being evicted, and no note says where its bytes are.
    fn reconcile_stranded(
        &mut self,
        no: PageNo,
        entry: Entry,
        found: &mut dyn Found,
        recovered: &mut Recovered,
    ) {
        let (space, page) = self.table.address(no);
        match found.page(space, page) {
            Here::Present | Here::Swapped => {
                recovered.returned += 1;
                self.returned_follower(no, entry, false);
            }
            Here::Guarded => _ = self.drop_page(no),
            _ => self.lose(no, recovered),
        }
    }

    fn lose(&mut self, no: PageNo, recovered: &mut Recovered) {
        recovered.lost.push(self.table.address(no));
        self.drop_page(no);
        let lost = Entry {
            state: PageState::Lost,
            ..Entry::UNTOUCHED
        };
        self.table.set(no, lost);
    }
}

/// The slot the entry refers to.
fn claim(entry: Entry) -> Option<(TierId, Slot)> {
    let refers = entry.state == PageState::Stored || entry.flags.has(Flags::RETAINED);
    (refers && entry.tier != TierId::FILL).then_some((entry.tier, entry.slot))
}
