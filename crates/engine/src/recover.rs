//! Takes over from a dead manager: rebuilds the engine from the ledger. Then it ends what was in
//! flight by what the client's memory shows.
//!
//! The successor's walk. Meanwhile nothing else installs or moves pages of the client.
//! 1. It stops the agents: no command of the dead manager may still be carried out.
//! 2. [`Engine::recover`], with the spaces whose processes live. The ledger does not say which
//!    process has which number, nor its managed ranges. The caller keeps the numbers where it keeps
//!    the descriptors, and reads the ranges from `/proc/PID/maps`.
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
//! | entry | page present | absent |
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

use undercroft_base::{
    Entry, Flags, PageNo, PageState, Slot, SpaceId, Stamp, TierId, VirtPage, VirtRange,
};
use undercroft_policy::prefetch::Prefetch;
use undercroft_policy::reclaim::{Arrival, Reclaim};

use crate::batch::{EvictItem, InFlight};
use crate::ledger::{Ledger, LedgerError};
use crate::limits::STAMP_EVICTIONS;
use crate::notes::{self, Note};
use crate::page_table::PageTable;
use crate::{Config, Engine};

/// What the kernel shows of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    /// It has a frame.
    Present,
    /// It is mapped and registered, and has no frame (a poison mark is none).
    Absent,
    /// It is not mapped, or not registered.
    NotManaged,
    /// Its process cannot be looked at. For pages in flight only: such a page is where its bytes
    /// are if an agent has them, and otherwise where it was.
    Unknown,
}

/// What became of bytes that an agent was told to move out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// They are in its holding area.
    Here,
    /// It did not move the page.
    NotMoved,
    /// Its process has ended, and the bytes with it.
    OwnerGone,
}

/// Answers the questions of [`Engine::reconcile`].
pub trait Found {
    /// The page, as the page tables of its process show it.
    fn page(&mut self, space: SpaceId, page: VirtPage) -> Here;
    /// Place `place` of the last command given to the agent of `owner`.
    fn held(&mut self, owner: SpaceId, place: usize) -> Held;
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

/// What [`Engine::reconcile`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Pages to store or put back.
    pub in_hand: Vec<InHand>,
    /// Slots that pages refer to, sorted. The caller frees all others of its tiers.
    pub claims: Vec<(TierId, Slot)>,
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
    /// * `spaces`: those whose process lives. Pages of others are forgotten.
    ///
    /// Errors: the ledger is damaged, or names more tiers than there are; nothing was changed.
    /// Cost: O(all entries).
    pub fn recover(
        ledger: L,
        reclaim: Box<dyn Reclaim>,
        prefetch: Box<dyn Prefetch>,
        config: Config,
        spaces: &[SpaceId],
    ) -> Result<Engine<L>, LedgerError> {
        let notes = notes::read(ledger.notes());
        let table = PageTable::recover(ledger, spaces, config.retain.len())?;
        let mut engine = Engine::over(table, reclaim, prefetch, config);
        if let Some((old, new)) = notes.moved {
            engine.finish_move(old, new);
        }
        engine.recover_batch();
        engine.recover_books();
        Ok(engine)
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

    /// Rebuilds everything that follows from the entries.
    fn recover_books(&mut self) {
        let mut stored = Vec::new();
        for (no, entry) in self.known() {
            let entry = match entry.state {
                PageState::Loading => {
                    let locked = Flags(entry.flags.0 & Flags::LOCKED.0);
                    let back = if crate::layout::is_zero(entry) {
                        Entry {
                            flags: locked,
                            ..Entry::UNTOUCHED
                        }
                    } else {
                        Entry {
                            state: PageState::Stored,
                            flags: locked,
                            ..entry
                        }
                    };
                    self.table.set(no, back);
                    back
                }
                _ => entry,
            };
            let own = !entry.flags.has(Flags::INHERITED);
            match entry.state {
                PageState::Resident if own => {
                    self.count();
                    self.reclaim.insert(no, Arrival::FirstTouch);
                }
                PageState::Evicting if own => self.count(),
                PageState::Stored => stored.push((no, entry)),
                _ => {}
            }
            if let Some((tier, slot)) = claim(entry) {
                *self.refs.entry((tier, slot)).or_insert(0) += 1;
            }
        }
        self.refs.retain(|_, count| *count > 1);
        let newest = self.newest_stamp(&stored);
        self.evictions = (u64::from(newest.0) + 1) * STAMP_EVICTIONS;
        stored.sort_by_key(|(_, entry)| std::cmp::Reverse(newest.0.wrapping_sub(entry.stamp.0)));
        for (no, entry) in stored {
            self.remember_age(no, entry);
        }
    }

    /// Stamps wrap: the newest is the one before the widest gap.
    fn newest_stamp(&self, stored: &[(PageNo, Entry)]) -> Stamp {
        let mut stamps: Vec<u16> = stored.iter().map(|(_, entry)| entry.stamp.0).collect();
        stamps.sort_unstable();
        stamps.dedup();
        let mut newest = (0, u16::MAX);
        for (at, stamp) in stamps.iter().enumerate() {
            let next = stamps[(at + 1) % stamps.len()];
            let gap = next.wrapping_sub(*stamp).wrapping_sub(1);
            if at == 0 || gap > newest.0 {
                newest = (gap, *stamp);
            }
        }
        Stamp(newest.1)
    }

    /// Every page that is not `Untouched`, by number.
    fn known(&self) -> Vec<(PageNo, Entry)> {
        let everything = VirtRange::new(VirtPage(0), VirtPage(u64::MAX));
        let mut known = Vec::new();
        for space in self.books().spaces() {
            for (_, no) in self.table.known_pages(space, everything) {
                let entry = self.table.entry(no);
                if entry != Entry::UNTOUCHED {
                    known.push((no, entry));
                }
            }
        }
        known.sort_unstable_by_key(|(no, _)| *no);
        known
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
        for (no, entry) in self.known() {
            let (space, page) = self.table.address(no);
            match (entry.state, found.page(space, page)) {
                (_, Here::NotManaged) => {
                    recovered.strays += 1;
                    self.drop_page(no);
                }
                (PageState::Resident, Here::Absent) => {
                    recovered.vanished += 1;
                    self.drop_page(no);
                }
                (PageState::Stored, Here::Present) => {
                    recovered.installed += 1;
                    self.was_installed(no, entry);
                }
                _ => {}
            }
        }
        self.reconcile_flight(found, &mut recovered);
        recovered.claims = self.claims();
        self.freed.clear();
        recovered
    }

    /// Every slot that an entry refers to, sorted. A caller that uses [`Engine::reconcile_present`]
    /// asks right after [`Engine::recover`], and frees all other slots of its tiers. From then on
    /// [`Engine::take_freed`] has those that are released. Cost: O(all entries).
    pub fn claims(&self) -> Vec<(TierId, Slot)> {
        let known = self.known().into_iter();
        let mut claims: Vec<_> = known.filter_map(|(_, entry)| claim(entry)).collect();
        claims.sort_unstable();
        claims.dedup();
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
    /// * `present`: pages that have a frame.
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

    /// The pages that [`Engine::reconcile_flight`] will ask for.
    pub fn in_flight(&self) -> Vec<(SpaceId, VirtPage)> {
        let evicting = |(_, entry): &(PageNo, Entry)| entry.state == PageState::Evicting;
        let known = self.known().into_iter().filter(evicting);
        known.map(|(no, _)| self.table.address(no)).collect()
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
        for (no, entry) in self.known() {
            if entry.state == PageState::Evicting && !self.is_in_batch(no) {
                self.reconcile_stranded(no, entry, found, recovered);
            }
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
        self.count();
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
                    (Here::Present, _) | (Here::Unknown, Held::NotMoved) => {
                        recovered.returned += 1;
                        self.back_to_resident(at, Arrival::Returned);
                        self.batch.pages[at].dead = true;
                    }
                    (_, Held::Here) => {}
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
        held: Held,
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
                (Here::Present, _) | (Here::Unknown, Held::NotMoved) => {
                    recovered.returned += 1;
                    self.batch.followers.retain(|(_, follower)| *follower != no);
                    self.returned_follower(no, entry, held == Held::Here);
                }
                (_, Held::Here) => {}
                (_, Held::NotMoved) => {
                    recovered.vanished += 1;
                    self.drop_page(no);
                }
                (_, Held::OwnerGone) => self.lose(no, recovered),
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
                self.uncount();
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
            Here::Present => {
                recovered.returned += 1;
                self.returned_follower(no, entry, false);
            }
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
