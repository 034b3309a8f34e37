//! Pages that a virtual machine gave back: a balloon, free page reporting. No event tells of them,
//! and the books go on counting them. Here they are found, and forgotten. They read as zeros.
//!
//! What the kernel says of the memory's size is compared with what came and was taken out. If that
//! is less by [`UNNOTICED`], holes are looked for that the books have as resident, a little at each
//! check. A page that had left before it was given back was a hole already, so that is not noticed:
//! its copy stays until the page is used again.
//!
//! Why no page with contents is forgotten: while `stays` is held, none begins to leave, and none
//! that the books have as resident gets zeros. So one that was resident and is then a hole was
//! given back: it did not leave. A hole that is seen first proves nothing: the page may have been
//! on its way back from a tier.

use std::io;
use std::time::{Duration, Instant};

use undercroft_base::{PageSize, VirtPage, VirtRange};
use undercroft_engine::Missing;

use crate::space::guest::Guest;
use crate::space::process::Process;
use crate::space::shared::Shared;

/// Pages that may be missing before they are looked for. More than can be on their way at once.
const UNNOTICED: i64 = 512;
const UNNOTICED_LARGE: i64 = 16;

/// Longest look of one check.
const LOOK_MAX: Duration = Duration::from_millis(2);

/// Pages of one hold of locks.
const AT_ONCE: u64 = 512;

/// Looks for pages that were given back.
#[derive(Default)]
pub(super) struct GivenBack {
    /// The pages that the memory should have. `None`: it has not been looked through yet.
    expected: Option<i64>,
    /// The part that is still to be looked through.
    left: Option<VirtRange>,
}

impl GivenBack {
    /// Looks for some of them, if there may be any. True if that is to go on soon.
    pub(super) fn look(&mut self, shared: &Shared, process: &Process) -> bool {
        let Some(hosted) = &process.hosted else {
            return false;
        };
        let found = self.look_in(shared, process, &hosted.guest);
        // Memory that cannot be looked at goes on counting.
        found.unwrap_or(false)
    }

    fn look_in(&mut self, shared: &Shared, process: &Process, guest: &Guest) -> io::Result<bool> {
        let object = guest.object();
        let Some(left) = &mut self.left else {
            let each = guest.page_size().bytes() as u64;
            let now = (object.allocated()?.0 / each) as i64;
            let unnoticed = match guest.page_size() {
                PageSize::Base => UNNOTICED,
                PageSize::Large => UNNOTICED_LARGE,
            };
            let grown = guest.take_balance();
            let expected = self.expected.map(|before| before + grown);
            if expected.is_some_and(|expected| now + unnoticed > expected) {
                self.expected = expected;
                return Ok(false);
            }
            self.expected = Some(now);
            self.left = Some(object.whole());
            return Ok(true);
        };
        let (began, before) = (Instant::now(), guest.given_back());
        while !left.is_empty() && began.elapsed() < LOOK_MAX {
            let start = guest.first_hole(left.start)?.unwrap_or(left.end);
            let end = guest.first_data(start)?.unwrap_or(left.end);
            let hole = VirtRange::new(start, end.min(start.plus(AT_ONCE))).intersect(*left);
            left.start = hole.end.max(start.min(left.end));
            forget(shared, process, guest, hole)?;
        }
        if left.is_empty() {
            self.left = None;
        }
        if guest.given_back() > before {
            shared.books.free_released();
            shared.signals.kick_evictor(); // there is more room
        }
        Ok(self.left.is_some())
    }
}

/// Forgets the pages of a hole that the books have as resident. What has changed meanwhile is left
/// to a later look.
fn forget(shared: &Shared, process: &Process, guest: &Guest, hole: VirtRange) -> io::Result<()> {
    let _stays = guest.stays();
    let mut resident = Vec::new();
    {
        let engine = &mut *shared.books.engine_for_many();
        for part in engine.books().parts(process.space, hole) {
            let is_resident = |page: &VirtPage| {
                let discovery = engine.discovery();
                discovery.missing(process.space, *page).is_some()
            };
            resident.extend(part.intersect(hole).pages().filter(is_resident));
        }
    }
    let (Some(first), Some(last)) = (resident.first(), resident.last()) else {
        return Ok(());
    };
    let end = last.plus(1);
    let end = (guest.first_data(*first)?).map_or(end, |data| data.min(end));
    let mut engine = shared.books.engine_for_many();
    for page in resident.into_iter().take_while(|page| *page < end) {
        // It may have been chosen to leave: then its way out finds zeros.
        if engine.discovery().missing(process.space, page).is_some() {
            (engine.discovery()).vanished(process.space, page, Missing::Dropped);
            guest.note_given_back(1);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use undercroft_base::{BASE_PAGE_BYTES, PageState};

    use super::*;
    use crate::evict::guest_tests::Machine;
    use crate::space::port::{Space, Wake, WayOut};

    fn state(machine: &Machine, page: u64) -> PageState {
        let engine = machine.shared.books.engine();
        (engine.books().entry(machine.process.space, VirtPage(page))).state
    }

    fn resident(machine: &Machine) -> u64 {
        machine.shared.books.engine().books().resident().0
    }

    fn punch(machine: &Machine, start: u64, end: u64) {
        let range = VirtRange::new(VirtPage(start), VirtPage(end));
        machine.guest().object().punch(range).expect("a hole");
    }

    /// Looks to the end. False: there was no need to.
    fn look(given_back: &mut GivenBack, machine: &Machine) -> bool {
        let mut any = false;
        while given_back.look(&machine.shared, &machine.process) {
            any = true;
        }
        any
    }

    #[test]
    fn pages_that_were_given_back_are_forgotten_and_others_stay() {
        let Some(mut machine) = Machine::new() else {
            return;
        };
        let mut given_back = GivenBack::default();
        assert!(look(&mut given_back, &machine), "the first look is at all");
        let before = resident(&machine);
        machine.evict();
        assert!(!look(&mut given_back, &machine), "what left is known");
        let out = machine.items.len() as u64;
        assert_eq!(resident(&machine), before - out);
        let away = machine.items[0].page.0;
        punch(&machine, 100, 600);
        assert!(!look(&mut given_back, &machine), "too few");
        punch(&machine, 1000, 1100);
        punch(&machine, 2000, 2048);
        assert!(look(&mut given_back, &machine));
        assert_eq!(resident(&machine), before - out - 648);
        assert_eq!(machine.guest().given_back().0, 648);
        for (page, is) in [
            (away, PageState::Stored),
            (99, PageState::Resident),
            (100, PageState::Untouched),
            (599, PageState::Untouched),
            (600, PageState::Resident),
            (1099, PageState::Untouched),
            (1999, PageState::Resident),
            (2047, PageState::Untouched),
        ] {
            assert_eq!(state(&machine, page), is, "page {page}");
        }
        assert!(!look(&mut given_back, &machine), "all is known");
    }

    /// A hole of a page on its way out belongs to the evictor.
    #[test]
    fn a_page_on_its_way_out_is_not_forgotten() {
        let Some(machine) = Machine::new() else {
            return;
        };
        let first = machine.items[0].page.0;
        machine.guest().begin(&machine.items);
        punch(&machine, first, first + 1);
        look(&mut GivenBack::default(), &machine);
        assert_eq!(state(&machine, first), PageState::Evicting);
        assert_eq!(machine.guest().given_back().0, 0);
    }

    /// A page that was a hole when it was seen, and has come back since.
    #[test]
    fn a_page_that_came_back_is_not_forgotten() {
        let Some(machine) = Machine::new() else {
            return;
        };
        punch(&machine, 600, 610);
        let bytes = [7; BASE_PAGE_BYTES];
        (machine.guest().install(VirtPage(605), &bytes, Wake::Now)).expect("nothing is there");
        let seen = VirtRange::new(VirtPage(600), VirtPage(610));
        forget(&machine.shared, &machine.process, machine.guest(), seen).expect("it seeks");
        for page in 600..610 {
            let is_resident = state(&machine, page) == PageState::Resident;
            assert_eq!(is_resident, page >= 605, "page {page}");
        }
    }

    /// A thread that gives zeros to a page that is missing waits for the look, and the look for it.
    #[test]
    fn pages_are_forgotten_while_none_gets_zeros() {
        let Some(machine) = Machine::new() else {
            return;
        };
        punch(&machine, 600, 610);
        let hole = VirtRange::new(VirtPage(600), VirtPage(610));
        std::thread::scope(|scope| {
            let stays = machine.guest().stays();
            let (shared, process) = (&machine.shared, &machine.process);
            let looks = scope.spawn(|| forget(shared, process, machine.guest(), hole));
            std::thread::sleep(Duration::from_millis(50));
            let early = looks.is_finished();
            drop(stays);
            assert!(!early);
        });
        assert_eq!(machine.guest().given_back().0, 10);
    }
}
