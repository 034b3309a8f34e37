//! The order of layout events. The kernel reports a change after it has unlocked the address space.
//! So another thread may change the same addresses, and be reported, first.
//!
//! A mapping can only move to a free place. So a move to a place that the books have in use shows
//! that an event about that place is late. The move and all events after it wait until the late
//! event has been read. After each move the kernel also reports the end of the old place, as an
//! event of its own; the same rule holds for it.

use std::collections::VecDeque;

use undercroft_base::{VirtPage, VirtRange};
use undercroft_proto::legacy::Row;
use undercroft_sys::uffd::{Message, Receipt};

/// Old places that are remembered. If there are more, they are forgotten once the kernel has no
/// event to report.
pub(crate) const VACATED_MAX: usize = 64;

/// Events of one address space that were read and not applied yet.
#[derive(Default)]
pub(crate) struct EventOrder {
    /// Bounded by the events that the program's threads raise while one of them is between its
    /// change and its report.
    waiting: VecDeque<(Message, Receipt)>,
    /// Old places of moved mappings, until the kernel reports them unmapped. After
    /// `MREMAP_DONTUNMAP` it never does.
    vacated: Vec<VirtRange>,
    /// Where the old places are kept for a successor.
    row: Row,
}

/// Phases of an event that is being applied, as a successor finds them.
pub(crate) mod phase {
    /// The event is the next to apply.
    pub(crate) const CHOSEN: u8 = 1;
    /// A move: what was at its new place before is out of the books.
    pub(crate) const PLACE_IS_FREE: u8 = 2;
}

/// The range of a mapping after its move from `from` to `to`.
fn target(from: VirtRange, to: VirtPage) -> VirtRange {
    VirtRange::new(to, to.plus(from.count().0))
}

fn meet(a: VirtRange, b: VirtRange) -> bool {
    !a.intersect(b).is_empty()
}

impl EventOrder {
    /// The order of a new address space, or of one whose manager died.
    pub(crate) fn new(row: Row, vacated: Vec<VirtRange>) -> EventOrder {
        EventOrder {
            waiting: VecDeque::new(),
            vacated,
            row,
        }
    }

    /// Adds an event that was read. Call [`EventOrder::next`] until it returns `None`.
    pub(crate) fn push(&mut self, event: Message, receipt: Receipt) {
        self.waiting.push_back((event, receipt));
    }

    /// The next event to apply.
    ///
    /// * `late_ones_come`: the kernel may still report events. Otherwise an event waits only for
    ///   one that was read after it.
    /// * `used`: whether the books have a managed page in the range.
    pub(crate) fn next(
        &mut self,
        late_ones_come: bool,
        used: impl Fn(VirtRange) -> bool,
    ) -> Option<(Message, Receipt)> {
        let (first, _) = self.waiting.front()?;
        let at = match self.blocked(first, &used) {
            None => 0,
            Some((from, to)) => {
                let frees = |(event, _): &(Message, Receipt)| match *event {
                    Message::Unmap(range) => meet(range, to) && !meet(range, from),
                    Message::Remap { from: f, to: t } => {
                        let late = meet(f, to) && !meet(f, from) && !meet(target(f, t), from);
                        late && self.blocked(event, &used).is_none()
                    }
                    _ => false,
                };
                match self.waiting.iter().skip(1).position(frees) {
                    Some(after) => 1 + after,
                    None if late_ones_come => return None,
                    None => 0,
                }
            }
        };
        let (event, receipt) = self.waiting.remove(at)?;
        // First: a successor would not choose the same again, once the old places have changed.
        receipt.begin(phase::CHOSEN);
        self.chosen(&event);
        Some((event, receipt))
    }

    /// The event is applied next. A successor calls this again for the event that its predecessor
    /// had chosen.
    pub(crate) fn chosen(&mut self, event: &Message) {
        match *event {
            Message::Remap { from, .. } => self.vacated.push(from),
            Message::Unmap(range) if !self.vacated.is_empty() => {
                let vacated = std::mem::take(&mut self.vacated);
                self.vacated
                    .extend(vacated.into_iter().flat_map(|old| old.minus(&[range])));
            }
            _ => return,
        }
        self.row.put_vacated(&self.vacated);
    }

    /// The old and the new place of a move, if the new place is still in use.
    fn blocked(
        &self,
        event: &Message,
        used: impl Fn(VirtRange) -> bool,
    ) -> Option<(VirtRange, VirtRange)> {
        let Message::Remap { from, to } = *event else {
            return None;
        };
        let to = target(from, to);
        let taken = used(to) || self.vacated.iter().any(|old| meet(*old, to));
        taken.then_some((from, to))
    }

    /// True if every event that was read has been applied.
    pub(crate) fn has_applied_all(&self) -> bool {
        self.waiting.is_empty()
    }

    /// True if the caller should ask the kernel whether an event is pending: to go on, or to forget
    /// old places.
    pub(crate) fn asks(&self) -> bool {
        !self.waiting.is_empty() || self.vacated.len() > VACATED_MAX
    }

    /// Forgets old places. No event is pending, so they are reported, or never will be.
    pub(crate) fn forget_vacated(&mut self) {
        if !self.vacated.is_empty() {
            self.vacated.clear();
            self.row.put_vacated(&[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(VirtPage(start), VirtPage(end))
    }

    fn remap(from: VirtRange, to: u64) -> Message {
        let to = VirtPage(to);
        Message::Remap { from, to }
    }

    /// Books with `a` and `b` in use under these labels.
    fn start(a: VirtRange, b: VirtRange) -> (Labels, EventOrder) {
        let mut books = Labels::default();
        books.put(a, 'a');
        books.put(b, 'b');
        (books, EventOrder::default())
    }

    /// Stands for the books: a label for each page in use.
    #[derive(Default)]
    struct Labels(std::collections::BTreeMap<u64, char>);

    impl Labels {
        fn put(&mut self, at: VirtRange, label: char) {
            at.pages().for_each(|page| _ = self.0.insert(page.0, label));
        }

        fn apply(&mut self, event: &Message) {
            match *event {
                Message::Unmap(gone) => gone.pages().for_each(|page| _ = self.0.remove(&page.0)),
                Message::Remap { from, to } => {
                    let moved: Vec<_> = from.pages().map(|page| self.0.remove(&page.0)).collect();
                    for (offset, label) in moved.into_iter().enumerate() {
                        self.0.remove(&(to.0 + offset as u64));
                        label.map(|label| self.0.insert(to.0 + offset as u64, label));
                    }
                }
                _ => {}
            }
        }

        fn read(&mut self, order: &mut EventOrder, events: impl IntoIterator<Item = Message>) {
            for event in events {
                order.push(event, Receipt::default());
                self.drain(order, true);
            }
        }

        fn drain(&mut self, order: &mut EventOrder, late_ones_come: bool) {
            while let Some((event, _)) = {
                let used =
                    |range: VirtRange| range.pages().any(|page| self.0.contains_key(&page.0));
                order.next(late_ones_come, used)
            } {
                self.apply(&event);
            }
        }

        fn labels(&self) -> String {
            self.0
                .iter()
                .map(|(at, label)| format!("{at}{label} "))
                .collect()
        }
    }

    // Thread A moves 10..12 to 50 and back; thread B moves 20..22 to 50, which A has just left.
    #[test]
    fn the_late_end_of_an_old_place_does_not_drop_what_moved_there() {
        let (mut books, mut order) = start(range(10, 12), range(20, 22));
        books.read(
            &mut order,
            [remap(range(10, 12), 50), Message::Unmap(range(10, 12))],
        );
        books.read(
            &mut order,
            [remap(range(50, 52), 10), remap(range(20, 22), 50)],
        );
        assert_eq!(books.labels(), "10a 11a 20b 21b ", "B's move waits");
        assert!(!order.has_applied_all());
        books.read(
            &mut order,
            [Message::Unmap(range(20, 22)), Message::Unmap(range(50, 52))],
        );
        assert!(order.has_applied_all());
        assert_eq!(books.labels(), "10a 11a 50b 51b ");
    }

    #[test]
    fn a_move_that_was_overtaken_finds_its_pages() {
        let (mut books, mut order) = start(range(50, 52), range(20, 22));
        // B's move to 50 and back is read before A's move away from 50.
        books.read(
            &mut order,
            [remap(range(20, 22), 50), Message::Unmap(range(20, 22))],
        );
        books.read(
            &mut order,
            [remap(range(50, 52), 20), remap(range(50, 52), 10)],
        );
        books.read(
            &mut order,
            [Message::Unmap(range(50, 52)), Message::Unmap(range(50, 52))],
        );
        books.drain(&mut order, false);
        assert_eq!(books.labels(), "10a 11a 20b 21b ");
    }

    #[test]
    fn an_overtaken_unmap_drops_only_what_was_there_before() {
        let (mut books, mut order) = start(range(50, 54), range(20, 22));
        books.read(
            &mut order,
            [remap(range(20, 22), 51), Message::Unmap(range(50, 54))],
        );
        books.read(&mut order, [Message::Unmap(range(20, 22))]);
        assert_eq!(books.labels(), "51b 52b ");
        assert!(order.has_applied_all());
    }

    #[test]
    fn without_a_late_event_nothing_waits() {
        let (mut books, mut order) = (Labels::default(), EventOrder::default());
        books.put(range(10, 12), 'a');
        // MREMAP_DONTUNMAP: the old place is never reported unmapped, and something moves there
        // later.
        books.read(
            &mut order,
            [remap(range(10, 12), 50), remap(range(50, 52), 10)],
        );
        assert!(!order.has_applied_all() && order.asks());
        books.drain(&mut order, false);
        order.forget_vacated();
        assert_eq!(books.labels(), "10a 11a ");
        assert!(order.has_applied_all() && !order.asks());
    }

    // Thread A moves 10..12 to 50. The books have something at 50, though no event about it is
    // late. Thread B moves 20..22 to 10, and both ends of old places are read last.
    #[test]
    fn the_end_of_an_old_place_comes_before_what_moves_there_even_if_all_were_read() {
        for stale in [true, false] {
            let (mut books, mut order) = start(range(10, 12), range(20, 22));
            if stale {
                books.put(range(51, 52), 'x');
            }
            books.read(
                &mut order,
                [remap(range(10, 12), 50), remap(range(20, 22), 10)],
            );
            books.read(
                &mut order,
                [Message::Unmap(range(20, 22)), Message::Unmap(range(10, 12))],
            );
            assert_eq!(order.has_applied_all(), !stale);
            books.drain(&mut order, false);
            order.forget_vacated();
            assert_eq!(books.labels(), "10b 11b 50a 51a ");
            assert!(order.has_applied_all());
        }
    }

    #[test]
    fn what_follows_a_waiting_move_waits_too() {
        let (mut books, mut order) = start(range(50, 52), range(20, 22));
        books.read(&mut order, [remap(range(20, 22), 50)]);
        let removed = Message::Remove(range(50, 51));
        books.read(&mut order, [removed, Message::Unmap(range(20, 22))]);
        assert_eq!(books.labels(), "20b 21b 50a 51a ");
        books.read(&mut order, [Message::Unmap(range(50, 52))]);
        assert_eq!(books.labels(), "50b 51b ");
    }
}
