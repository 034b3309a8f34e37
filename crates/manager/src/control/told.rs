//! Hears which pages of its guest's memory the program gives back, and forgets them: also the
//! copies of those that are away, of which no hole in the memory tells (`given_back.rs`).
//!
//! The shim tells after the program has made the hole, and waits for the answer. So nothing that
//! was in the page before comes back after the program's call, and nothing that the guest writes
//! after the call is forgotten. What is written in between may be kept or not.
//!
//! ```text
//! it was told of    what happens                                what else changes the page
//! Stored            its copy is freed                           a load, which is upset
//! Loading           the load is upset, and frees the copy       its installation holds the layout
//! Evicting          its bytes are dead: it is not published     the punch, of published pages only
//! Resident          it is forgotten                             zeros for a missing page (`stays`)
//! ```
//! The pages are punched once more, here. The program may have touched them since, or never have
//! made the hole: a page that is not in the books must not be in memory, or it would not count.
//!
//! A manager that dies before it answers leaves its successor the same range: it is forgotten
//! again, and the program still waits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use undercroft_base::{PageSize, PageState, VirtPage, VirtRange};

use crate::space::guest::Guest;
use crate::space::parts::{CHUNKS, dropped, next_parts, pause};
use crate::space::process::Process;
use crate::space::shared::Shared;

/// How often the thread looks whether it is still needed.
const LOOK: Duration = Duration::from_millis(500);

/// Base pages that are forgotten at once: 32 MiB. The kernel takes 4 ms for the hole if all are
/// there.
const PART: u64 = 8192;

/// Starts the thread that hears the process which maps this guest memory. Call it before a page of
/// the memory leaves.
///
/// Errors: no thread, or the process has no agent.
pub(super) fn listen(shared: &Arc<Shared>, process: &Arc<Process>) -> io::Result<()> {
    let (of, guest) = (shared.clone(), process.clone());
    let hosted = process.hosted.as_ref().ok_or(io::ErrorKind::NotFound)?;
    let commands = hosted.host.commands().ok_or(io::ErrorKind::NotFound)?;
    let thread = std::thread::Builder::new().name("uc-given-back".into());
    thread.spawn(move || hear(&of, &guest))?;
    let (object, base) = (hosted.guest.object(), hosted.guest.base().address());
    let (id, bytes) = (object.id(), object.bytes().0);
    commands.listen([id.device, id.inode, base, bytes], process.page_size());
    Ok(())
}

/// Body of the thread.
fn hear(shared: &Shared, process: &Process) {
    let Some(hosted) = &process.hosted else {
        return;
    };
    let Some(commands) = hosted.host.commands() else {
        return;
    };
    let goes_on = || !shared.signals.stopped() && !process.gone.load(Ordering::Relaxed);
    let mut last = commands.last_heard();
    while let Some((told, given)) = commands.told(last, LOOK, goes_on) {
        let size = process.page_size();
        let most = PART / size.base_pages();
        forget(shared, process, &hosted.guest, pages_of(given, size), most);
        commands.heard(told);
        last = told;
    }
}

/// The whole pages between two bytes of the memory. The program may say anything.
fn pages_of([from, to]: [u64; 2], size: PageSize) -> VirtRange {
    let bytes = size.bytes() as u64;
    let start = from.div_ceil(bytes);
    VirtRange::new(VirtPage(start), VirtPage((to / bytes).max(start)))
}

/// Forgets pages of guest memory that were given back. They read as zeros.
///
/// * `most`: pages that are forgotten while the layout is held once. No page is installed
///   meanwhile, and the program may give gigabytes back in one call.
fn forget(shared: &Shared, process: &Process, guest: &Guest, range: VirtRange, most: u64) {
    let mut left = range.intersect(guest.object().whole());
    while !left.is_empty() {
        // The parts begin at multiples of chunks of base pages, which are forgotten whole.
        let end = VirtPage((left.start.0 / most + 1) * most).min(left.end);
        forget_part(shared, process, guest, VirtRange::new(left.start, end));
        left.start = end;
        if !left.is_empty() {
            pause();
        }
    }
    shared.books.free_released();
    shared.signals.stir();
    shared.signals.kick_evictor(); // there is more room
}

fn forget_part(shared: &Shared, process: &Process, guest: &Guest, range: VirtRange) {
    {
        let _layout = process.layout.write();
        let _held = shared.gauges.layout_holds.hold();
        let _stays = guest.stays();
        let (present, away) = count(shared, process, range);
        // A way out has no command to cancel: the evictor finds such a page dead.
        let _cancels_none = dropped(shared, process.space, range, false);
        // If that is refused, a page of it may be there that does not count.
        let _ = guest.give_up(range, present);
        guest.note_given_back(present + away);
    }
    // A thread that waits for such a page faults again.
    process.memory.wake(range);
}

/// How many pages of a range are in memory by the books, and how many are not and have a copy.
fn count(shared: &Shared, process: &Process, range: VirtRange) -> (u64, u64) {
    let (mut present, mut away, mut left) = (0, 0, range);
    while !left.is_empty() {
        let engine = shared.books.engine_for_many();
        for part in next_parts(&engine, process.space, &mut left, CHUNKS) {
            for page in part.intersect(range).pages() {
                match engine.books().entry(process.space, page).state {
                    PageState::Resident | PageState::Evicting => present += 1,
                    PageState::Stored | PageState::Loading => away += 1,
                    PageState::Untouched | PageState::Lost => {}
                }
            }
        }
        drop(engine);
        if !left.is_empty() {
            pause();
        }
    }
    (present, away)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use undercroft_base::{BASE_PAGE_BYTES, ThreadId};
    use undercroft_engine::{Fault, FaultAnswer, Install, LoadPlan};

    use super::*;
    use crate::evict::guest_tests::Machine;
    use crate::space::port::{Space, Wake};

    fn state(machine: &Machine, page: VirtPage) -> PageState {
        let engine = machine.shared.books.engine();
        engine.books().entry(machine.process.space, page).state
    }

    fn give_back(machine: &Machine, range: VirtRange) {
        forget(
            &machine.shared,
            &machine.process,
            machine.guest(),
            range,
            PART,
        );
    }

    fn in_memory(machine: &Machine, page: VirtPage) -> bool {
        let data = machine.guest().object().data(page).expect("it seeks");
        data.is_some_and(|run| run.contains(page))
    }

    /// As the engine answers it, with the pages to load.
    fn fault(machine: &Machine, page: VirtPage) -> (FaultAnswer, LoadPlan) {
        let fault = Fault {
            space: machine.process.space,
            page,
            write: true,
            thread: ThreadId(1),
            urgent: false,
        };
        let mut plan = LoadPlan::default();
        let answer = (machine.shared.books.engine().faults()).answer(fault, &mut plan);
        (answer, plan)
    }

    /// The group leaves, each page to a slot of its own.
    fn evict(machine: &mut Machine) {
        for item in &machine.items {
            machine.word(item.page).store(1, Relaxed);
        }
        machine.evict();
    }

    /// Bytes of the pages that tiers have.
    fn held(machine: &Machine) -> u64 {
        machine.shared.books.free_released();
        let tiers = machine.shared.books.tiers.iter();
        tiers.map(|of| of.tier.usage().logical.0).sum()
    }

    #[test]
    fn pages_that_are_away_are_forgotten_with_their_copies() {
        let Some(mut machine) = Machine::new() else {
            return;
        };
        evict(&mut machine);
        let first = machine.items[0].page;
        assert_eq!(state(&machine, first), PageState::Stored);
        let before = held(&machine);
        give_back(&machine, VirtRange::new(VirtPage(0), first.plus(1)));
        assert_eq!(state(&machine, first), PageState::Untouched);
        assert!(held(&machine) < before, "{before}");
        assert_eq!(machine.guest().given_back().0, first.0 + 1);
        let (answer, plan) = fault(&machine, first);
        assert_eq!(answer, FaultAnswer::Load);
        assert!(plan.items[0].fresh, "it is zeros");
        for page in machine.items[1..].iter().map(|item| item.page) {
            let is = if page < first {
                PageState::Untouched
            } else {
                PageState::Stored
            };
            assert_eq!(state(&machine, page), is, "{page:?}");
        }
    }

    /// The program has touched the page again, and writes to it, before its eviction ends.
    #[test]
    fn a_page_given_back_on_its_way_out_does_not_leave() {
        let Some(mut machine) = Machine::new() else {
            return;
        };
        let page = machine.items[0].page;
        let took = machine.take();
        give_back(&machine, VirtRange::one(page));
        assert!(!in_memory(&machine, page));
        let (answer, mut plan) = fault(&machine, page);
        assert_eq!(answer, FaultAnswer::Load);
        let zeros = [0; BASE_PAGE_BYTES];
        let installed = machine.guest().install(page, &zeros, Wake::Later);
        installed.expect("nothing is there");
        machine.word(page).store(7, Relaxed);
        for item in &mut plan.items {
            item.install = Install::NotYet;
        }
        plan.items[0].install = Install::Done;
        let (of, items) = (plan.fault, &mut plan.items);
        machine.shared.books.engine().faults().finish(of, items);
        machine.go_on(took);
        assert_eq!(state(&machine, page), PageState::Resident);
        assert!(
            in_memory(&machine, page),
            "it was punched, and its word is lost"
        );
        assert_eq!(machine.word(page).load(Relaxed), 7);
        let other = machine.items[1].page;
        assert_eq!(state(&machine, other), PageState::Stored);
        assert!(!in_memory(&machine, other));
    }

    /// No page is left to be punched, and no thread waits for that.
    #[test]
    fn a_group_given_back_whole_keeps_no_installation_waiting() {
        let Some(mut machine) = Machine::new() else {
            return;
        };
        let took = machine.take();
        let [first, last] = [machine.items.first(), machine.items.last()];
        let (first, last) = (first.expect("a page").page, last.expect("a page").page);
        give_back(&machine, VirtRange::new(first, last.plus(1)));
        machine.go_on(took);
        let zeros = [0; BASE_PAGE_BYTES];
        let installed = machine.guest().install(first, &zeros, Wake::Later);
        installed.expect("nothing is there");
    }

    /// A fault thread has read the copy, and has not installed it.
    #[test]
    fn a_page_given_back_while_it_is_loaded_is_not_installed() {
        let Some(mut machine) = Machine::new() else {
            return;
        };
        evict(&mut machine);
        let page = machine.items[0].page;
        let (answer, mut plan) = fault(&machine, page);
        assert_eq!(answer, FaultAnswer::Load);
        assert_eq!(state(&machine, page), PageState::Loading);
        let before = held(&machine);
        give_back(&machine, VirtRange::one(page));
        assert!(!machine.shared.books.upsets.spare(&plan));
        let mut engine = machine.shared.books.engine();
        engine.faults().validate(&mut plan.items);
        assert!(!plan.items[0].valid, "the old bytes would come back");
        engine.faults().finish(plan.fault, &mut plan.items);
        drop(engine);
        assert_eq!(state(&machine, page), PageState::Untouched);
        assert!(held(&machine) < before, "the plan freed the copy");
    }

    /// Pages that are said to be given back, and are in memory all the same, would not count.
    #[test]
    fn pages_that_only_the_program_calls_given_back_leave_memory() {
        let Some(machine) = Machine::new() else {
            return;
        };
        let range = VirtRange::new(VirtPage(100), VirtPage(200));
        give_back(&machine, range);
        assert_eq!(
            machine
                .guest()
                .object()
                .data(VirtPage(100))
                .expect("it seeks")
                .expect("data")
                .start,
            range.end
        );
        assert_eq!(state(&machine, VirtPage(150)), PageState::Untouched);
        let grown = machine.guest().take_balance();
        assert_eq!(grown, -100, "nothing is missing");
    }

    /// A fault of another page waits for a part of it only.
    #[test]
    fn a_large_hole_lets_pages_be_installed_before_it_is_forgotten_whole() {
        let Some(machine) = Machine::new() else {
            return;
        };
        let (first, last) = (VirtPage(0), VirtPage(2047));
        let all = VirtRange::new(first, last.plus(1));
        let is_half_done = || {
            let _layout = machine.process.layout.read();
            let states = [first, last].map(|page| state(&machine, page));
            states == [PageState::Untouched, PageState::Resident]
        };
        std::thread::scope(|scope| {
            let (shared, process, guest) = (&machine.shared, &machine.process, machine.guest());
            let forgets = scope.spawn(move || forget(shared, process, guest, all, 8));
            let mut half_done = 0;
            while !forgets.is_finished() {
                half_done += u64::from(is_half_done());
            }
            assert!(half_done > 0, "all of it was forgotten at once");
        });
        assert_eq!(machine.guest().given_back(), all.count());
    }

    #[test]
    fn nonsense_is_cut_to_whole_pages_of_the_memory() {
        for (given, start, end) in [
            ([0, 4096], 0, 1),
            ([1, 8191], 1, 1),
            ([1, 8192], 1, 2),
            ([8192, 4096], 2, 2),
            ([u64::MAX, 0], 1 << 52, 1 << 52),
            ([0, u64::MAX], 0, (1 << 52) - 1),
        ] {
            let range = VirtRange::new(VirtPage(start), VirtPage(end));
            assert_eq!(pages_of(given, PageSize::Base), range, "{given:?}");
        }
        let Some(machine) = Machine::new() else {
            return;
        };
        give_back(&machine, pages_of([u64::MAX, 0], PageSize::Base));
        give_back(&machine, pages_of([1 << 40, u64::MAX], PageSize::Base));
        assert_eq!(machine.guest().given_back().0, 0);
        give_back(&machine, pages_of([0, u64::MAX], PageSize::Base));
        assert_eq!(machine.shared.books.engine().books().resident().0, 0);
    }

    /// Zeros that a thread gives to a page which the books have in memory must not come after it
    /// was forgotten: the page would not count. So each waits for the other.
    #[test]
    fn pages_are_forgotten_while_none_is_installed_or_gets_zeros() {
        let Some(machine) = Machine::new() else {
            return;
        };
        let page = VirtRange::one(VirtPage(7));
        for installs in [true, false] {
            std::thread::scope(|scope| {
                let layout = installs.then(|| machine.process.layout.read());
                let stays = (!installs).then(|| machine.guest().stays());
                let forgets = scope.spawn(|| give_back(&machine, page));
                std::thread::sleep(Duration::from_millis(50));
                let early = forgets.is_finished();
                drop((layout, stays));
                assert!(!early, "installs: {installs}");
            });
        }
    }
}
