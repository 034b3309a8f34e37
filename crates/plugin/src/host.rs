//! Questions and wishes of a policy while it hears an event: the functions of FlexSwap's Table 1.

use std::ops::RangeInclusive;

use undercroft_base::LatencyClass;
use undercroft_policy::place::TierState;

use crate::ears::{MOVE_PAGES_MAX, MovesFree, What, Wish};
use crate::event::Event;
use crate::guest::Guest;
use crate::known::{Known, PageIs};

/// Wishes of one event; further ones are refused and counted.
const WISHES_AN_EVENT: usize = 512;
/// Milliseconds between two scans that a plugin may ask for.
const SCAN_MS: RangeInclusive<u64> = 10..=3_600_000;
/// Parameters of one plugin.
const PARAMETERS_MAX: usize = 16;

/// The memory of the run when the events were taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// The limit in bytes; `u64::MAX`: none.
    pub limit: u64,
    /// Bytes that count against it.
    pub used: u64,
    /// Page faults so far.
    pub faults: u64,
    /// Milliseconds so far in which some thread of the program waited for a page.
    pub waited_ms: u64,
}

/// A tier, as a plugin sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tier {
    /// How fast it is.
    pub latency: LatencyClass,
    /// Bytes that it may hold.
    pub capacity: u64,
    /// Bytes that are free.
    pub free: u64,
    /// Nanoseconds of a load lately; 0 before the first.
    pub load_ns: u64,
}

impl Tier {
    /// The tier of this state.
    pub fn of(state: &TierState) -> Tier {
        Tier {
            latency: state.latency,
            capacity: state.capacity.0,
            free: state.headroom().0,
            load_ns: state.load_ns,
        }
    }
}

/// A number that a plugin has given a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name.
    pub name: String,
    /// The value.
    pub value: i64,
}

/// The side of the run that a policy sees.
#[derive(Default)]
pub struct Host {
    known: Known,
    memory: Memory,
    parameters: Vec<Parameter>,
    wishes: Vec<Wish>,
    flooded: u64,
    scan_ms: u64,
    /// Parameters that the plugin has given another value.
    shown: Vec<usize>,
    /// The instruction of the fault that it hears of.
    at: u64,
    /// Of a guest's fault, the address of its top page table.
    cr3: u64,
    asks_at: bool,
    guest: Option<Guest>,
    asks_guest: bool,
    /// The tiers, fastest first.
    tiers: Vec<Tier>,
    asks_tiers: bool,
    moves_free: MovesFree,
}

impl Host {
    /// Takes a wish. False if the event has wished too much, or of a move if too many wait or it
    /// has none, or too many, pages.
    pub fn wish(&mut self, wish: Wish) -> bool {
        let fits = self.wishes.len() < WISHES_AN_EVENT && self.may_move(wish.what);
        if fits {
            self.wishes.push(wish);
        } else {
            self.flooded += 1;
        }
        fits
    }

    /// Whether a wish is no move, or there is room for the move, which is taken.
    fn may_move(&mut self, what: What) -> bool {
        let What::Move { pages, from, to } = what else {
            return true;
        };
        let free = if to < from {
            &mut self.moves_free.up
        } else {
            &mut self.moves_free.down
        };
        let may = pages <= *free && (1..=MOVE_PAGES_MAX).contains(&pages);
        *free -= if may { pages } else { 0 };
        may
    }

    /// The plugin will ask where copies are, or wish that.
    pub fn ask_tiers(&mut self) {
        self.asks_tiers = true;
    }

    /// The tiers, fastest first.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// Asks for a scan of access bits each `interval_ms`, 0: for none. False if there is no such
    /// interval; the one before goes on.
    pub fn scan(&mut self, interval_ms: u64) -> bool {
        let fits = interval_ms == 0 || SCAN_MS.contains(&interval_ms);
        if fits {
            self.scan_ms = interval_ms;
        }
        fits
    }

    /// The plugin will ask which instructions fault.
    pub fn ask_instructions(&mut self) {
        self.asks_at = true;
    }

    /// The address of the instruction whose fault is heard of; 0: there is none, or it is not
    /// known.
    pub fn instruction(&self) -> u64 {
        self.at
    }

    /// The address of the top page table of the guest whose fault is heard of; 0: it is of no
    /// guest, or not known.
    pub fn top_table(&self) -> u64 {
        self.cr3
    }

    /// The plugin will ask about addresses in a guest.
    pub fn ask_guest(&mut self) {
        self.asks_guest = true;
    }

    /// The page of a space that has a page of a program. `None`: it is not known. In a process it
    /// is the same.
    pub fn gva_to_hva(&mut self, space: u32, cr3: u64, page: u64) -> Option<u64> {
        match &mut self.guest {
            Some(guest) if guest.is(space) => guest.host_page(cr3, page),
            _ => Some(page),
        }
    }

    /// The page of a program that is in a page of a space: the reverse.
    pub fn hva_to_gva(&mut self, space: u32, cr3: u64, page: u64) -> Option<u64> {
        match &mut self.guest {
            Some(guest) if guest.is(space) => guest.guest_page(cr3, page),
            _ => Some(page),
        }
    }

    /// Where a page is, by the events heard so far.
    pub fn page(&self, space: u32, page: u64) -> PageIs {
        self.known.page(space, page)
    }

    /// The memory of the run.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Gives a name to a number. Returns the parameter's number, the same one for a name that is
    /// there. `None`: there are too many.
    pub fn register(&mut self, name: &str, value: i64) -> Option<usize> {
        let parameters = &mut self.parameters;
        if let Some(at) = parameters.iter().position(|of| of.name == name) {
            return Some(at);
        }
        if parameters.len() == PARAMETERS_MAX {
            return None;
        }
        parameters.push(Parameter {
            name: name.to_owned(),
            value,
        });
        Some(parameters.len() - 1)
    }

    /// Gives a parameter another value. False if there is none of this name.
    pub fn set(&mut self, name: &str, value: i64) -> bool {
        let found = self.parameters.iter_mut().find(|of| of.name == name);
        found.map(|of| of.value = value).is_some()
    }

    /// The plugin shows another value of its parameter. False if there is none of this number.
    pub fn show(&mut self, number: usize, value: i64) -> bool {
        let found = self.parameters.get_mut(number);
        let found = found.map(|of| of.value = value).is_some();
        if found && !self.shown.contains(&number) {
            self.shown.push(number);
        }
        found
    }

    /// The parameters.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    pub(crate) fn begin(&mut self, event: &Event) {
        self.known.note(event);
        self.wishes.clear();
        (self.at, self.cr3) = (event.at, event.cr3);
        if let Some(guest) = &mut self.guest {
            guest.begin();
        }
    }

    /// Whether the plugin asks about a guest, and has seen none yet.
    pub(crate) fn lacks_guest(&self) -> bool {
        self.asks_guest && self.guest.is_none()
    }

    pub(crate) fn show_guest(&mut self, guest: Guest) {
        self.guest = Some(guest);
    }

    pub(crate) fn set_memory(&mut self, memory: Memory) {
        self.memory = memory;
    }

    pub(crate) fn set_tiers(&mut self, tiers: impl Iterator<Item = Tier>, free: MovesFree) {
        self.tiers.clear();
        self.tiers.extend(tiers);
        self.moves_free = free;
    }

    /// Whether it will.
    pub fn asks_tiers(&self) -> bool {
        self.asks_tiers
    }

    pub(crate) fn wishes(&self) -> &[Wish] {
        &self.wishes
    }

    pub(crate) fn asks_instructions(&self) -> bool {
        self.asks_at
    }

    pub(crate) fn take_shown(&mut self) -> Vec<(usize, i64)> {
        let shown = std::mem::take(&mut self.shown).into_iter();
        shown.map(|at| (at, self.parameters[at].value)).collect()
    }

    pub(crate) fn scan_ms(&self) -> u64 {
        self.scan_ms
    }

    pub(crate) fn flooded(&self) -> u64 {
        self.flooded
    }
}
