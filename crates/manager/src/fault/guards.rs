//! Guard pages that the program has put by the system call itself. No event tells of them, so the
//! books go on with the page as stored. A COPY would replace the guard with what was there before.
//!
//! So the kernel is asked before a copy is installed that no thread waits for. A thread that waits
//! shows that there is no guard. Another thread may still put one between the look and the copy.

use std::ops::Range;

use undercroft_base::VirtRange;
use undercroft_engine::LoadItem;
use undercroft_engine::limits::LOAD_PAGES_MAX;
use undercroft_sys::pagemap::{Category, PageIs};

use super::install::{Load, Loads};
use crate::books::Books;
use crate::space::process::Process;

/// Leaves out the items of `part` in whose place is a guard. The program has dropped such a page,
/// and so it is forgotten. The caller holds the layout.
///
/// Cost: one system call for each run of pages with copies that no thread waits for; more if there
/// is a guard.
pub(super) fn spare(books: &Books, process: &Process, loads: &mut Loads, part: Range<usize>) {
    let Some(identity) = process.identity.get() else {
        return;
    };
    let none_waits = loads.plan.fault.thread.0 == 0;
    let is_unasked = |item: &LoadItem| !item.fresh && (!item.demanded || none_waits);
    let mut from = part.start;
    while let Some(run) = loads.next_run(from..part.end, LOAD_PAGES_MAX) {
        from = run.end;
        let unasked = loads.plan.items[run.clone()].iter().any(is_unasked);
        // A guard shows as swapped.
        let marked = |range| identity.pagemap.first(range, Category::SWAPPED);
        if !unasked || matches!(marked(loads.pages(run.clone())), Ok(None)) {
            continue;
        }
        for at in run {
            let item = loads.plan.items[at];
            if !is_unasked(&item) {
                continue;
            }
            match identity.pagemap.place(item.page) {
                Ok(PageIs::Absent | PageIs::Present) => continue,
                Ok(PageIs::Guard) => {
                    let one = VirtRange::one(item.page);
                    books.engine().layout().removed(item.space, one);
                }
                // Linux before 6.15 does not say what it is.
                Ok(PageIs::Swapped | PageIs::Mark) | Err(_) => {}
            }
            loads.states[at] = Load::Skipped;
        }
    }
}
