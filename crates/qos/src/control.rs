//! Monitors and queue together, for all clients of one device: what each window changes.
//!
//! After a window that missed its bound, the client's page-outs go to the buffer, whatever the
//! queue says (NVSwap §IV, tail latency enforcement). The paper does so for one window. Then a
//! client whose device is too slow would miss every other window. So each miss holds longer than
//! the one before; after as many good windows at the device, the next hold is short again.
//!
//! A client that tries the device again may find it as slow as before. Its pages go back to the
//! buffer as soon as the window is lost, and not only at its end ([`LatencyControl::cut_short`]). A
//! try is judged by what is read from the device, because most is still read from the buffer.
//!
//! The queue learns nothing while no client with a bound uses it: without their writes, reads are
//! fast. S(t) would grow, and the next try would begin with a long queue.

use undercroft_base::Nanos;

use crate::bound::LatencyBound;
use crate::monitor::{Judged, Monitor, Window};
use crate::queue::{Queue, QueueLimits};
use crate::tail::{self, Tail};

/// Where a client's pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// To the device, through the queue.
    Regular,
    /// To the buffer first: the fastest tier.
    Buffer,
}

/// Part of a limit, in percent, at which the queue aims. Equation 1 comes to rest where the
/// observed latency is its goal. At the limit itself, half of the windows would miss it.
pub const GOAL_PERCENT: u64 = 90;

/// Windows in the buffer after the first miss, and the most after many.
const HOLD_MIN: u32 = 8;
const HOLD_MAX: u32 = 256;

/// A try of the device is not judged by fewer page-ins than this many times what the percentile
/// needs: 1,000 for p99.
const TRY_SAMPLES: u64 = 10;

/// Missed windows in a row, with everything done that can be done, after which a bound counts as
/// one that cannot be kept.
pub const MISSES_MAX: u32 = 3;

const _: () = assert!(0 < HOLD_MIN && HOLD_MIN <= HOLD_MAX);

/// A bound that cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unkeepable {
    /// The bound.
    pub bound: LatencyBound,
    /// The limit that all the windows in question would have kept.
    pub possible: Nanos,
}

/// A client with a bound.
#[derive(Clone, Debug)]
struct Member {
    monitor: Monitor,
    out: Out,
    /// The device cannot keep its bound, however idle: its pages go to the buffer always.
    always: bool,
    /// Its pages that may be out of memory: what it takes of the buffer.
    pages: u64,
    /// Windows for which the buffer is still held, and for how many the next miss will hold it.
    held: u32,
    next_hold: u32,
    /// Windows kept in a row without the buffer.
    calm: u32,
    /// Its page-ins from the device in the window in progress.
    queued: u64,
    /// The window in progress was lost at the device, and goes on in the buffer.
    cut: bool,
    misses: Misses,
}

/// Windows that missed a bound in a row although everything was done, and the highest percentile of
/// them.
#[derive(Clone, Debug, Default)]
pub struct Misses {
    row: u32,
    possible: Nanos,
    told: bool,
}

impl Misses {
    /// Notes a window.
    /// * `done`: everything that can be done was done during it.
    pub fn note(&mut self, window: Window, done: bool) {
        match window.judged {
            Judged::Kept => (self.row, self.possible) = (0, Nanos(0)),
            Judged::Missed if done => {
                self.row += 1;
                self.possible = self.possible.max(window.tail);
            }
            Judged::Missed => {}
        }
    }

    /// Says once that the bound cannot be kept: after [`MISSES_MAX`] windows.
    pub fn take_unkeepable(&mut self, bound: LatencyBound) -> Option<Unkeepable> {
        if self.told || self.row < MISSES_MAX {
            return None;
        }
        self.told = true;
        Some(Unkeepable {
            bound,
            possible: self.possible,
        })
    }
}

/// The control of one device.
#[derive(Clone, Debug)]
pub struct LatencyControl {
    queue: Queue,
    /// Accesses through the queue in the window in progress.
    queued: Tail,
    has_buffer: bool,
    /// Pages that the buffer holds; `None`: enough for all.
    buffer_pages: Option<u64>,
    members: Vec<Option<Member>>,
    goals: Vec<Option<Nanos>>,
    sets: Vec<bool>,
}

impl LatencyControl {
    /// Before the first window: every client uses the device.
    ///
    /// * `bounds`: of each client; `None` for a client that has none.
    /// * `has_buffer`: there is a faster tier above the device.
    pub fn new(
        limits: QueueLimits,
        bounds: &[Option<LatencyBound>],
        has_buffer: bool,
    ) -> LatencyControl {
        let member = |bound: &Option<LatencyBound>| bound.map(Member::new);
        LatencyControl {
            queue: Queue::new(limits),
            queued: Tail::default(),
            has_buffer,
            buffer_pages: None,
            members: bounds.iter().map(member).collect(),
            goals: bounds.iter().map(|of| of.map(goal)).collect(),
            sets: vec![false; bounds.len()],
        }
    }

    /// Makes place for more clients, without bounds at first.
    pub fn make_room(&mut self, clients: usize) {
        let clients = clients.max(self.members.len());
        self.members.resize(clients, None);
        self.goals.resize(clients, None);
        self.sets.resize(clients, false);
    }

    /// A client with a bound comes. It uses the device, as at the start. One that was there before
    /// begins anew.
    pub fn join(&mut self, client: usize, bound: LatencyBound) {
        self.members[client] = Some(Member::new(bound));
        self.goals[client] = Some(goal(bound));
        self.sets[client] = false;
    }

    /// A client that is here has this bound from now on. If that is another, it begins anew; true
    /// then.
    pub fn change_bound(&mut self, client: usize, bound: LatencyBound) -> bool {
        let monitor = self.monitor(client);
        let is_other = monitor.is_none_or(|of| of.bound() != bound);
        if is_other {
            self.join(client, bound);
        }
        is_other
    }

    /// Where admission has placed a client that has come, and what it takes. May change with each
    /// client that comes.
    ///
    /// * `always`: the device cannot keep its bound, so its pages go to the buffer.
    /// * `pages`: of it that may be out of memory at once.
    pub fn place(&mut self, client: usize, always: bool, pages: u64) {
        let Some(member) = &mut self.members[client] else {
            return;
        };
        (member.always, member.pages) = (always && self.has_buffer, pages);
        // The queue is none of the concern of a client that never uses it.
        let bound = member.monitor.bound();
        self.goals[client] = (!member.always).then(|| goal(bound));
        self.share_buffer();
    }

    /// Says how many pages the buffer holds. It is shared among those that want it: first those
    /// that the device cannot serve, then the smallest bounds. One that it has no room for stays at
    /// the device, because a part of its pages would not keep a percentile.
    pub fn set_buffer(&mut self, pages: u64) {
        self.buffer_pages = Some(pages);
    }

    /// Says what the writes of the window in progress need, before it ends.
    ///
    /// * `least`: slots of the queue.
    /// * `waited`: writes waited for a slot. Otherwise a larger queue is of no use.
    pub fn note_writes(&mut self, least: u32, waited: bool) {
        self.queue.set_needs(least, waited);
    }

    /// Says what the writes of all clients will need, with one that comes now: slots of the queue.
    pub fn expect_writes(&mut self, slots: u32) {
        self.queue.begin_at(slots);
    }

    /// A client goes. What its monitor counted stays; the queue no longer regards it.
    pub fn leave(&mut self, client: usize) {
        self.goals[client] = None;
        self.sets[client] = false;
        if let Some(member) = &mut self.members[client] {
            member.always = false;
        }
    }

    /// Places for clients.
    pub fn clients(&self) -> usize {
        self.members.len()
    }

    /// The page-ins of a client, if it has a bound.
    pub fn monitor(&self, client: usize) -> Option<&Monitor> {
        self.members[client].as_ref().map(|member| &member.monitor)
    }

    /// The same, to add to.
    pub fn monitor_mut(&mut self, client: usize) -> Option<&mut Monitor> {
        let member = self.members[client].as_mut();
        member.map(|member| &mut member.monitor)
    }

    /// Adds an access of a client through the queue.
    pub fn add_queued(&mut self, client: usize, took: Nanos) {
        self.add_queued_many(client, tail::bucket(took), 1);
    }

    /// Adds `count` accesses of a bucket of [`crate::tail`].
    pub fn add_queued_many(&mut self, client: usize, bucket: usize, count: u32) {
        self.queued.add_many(bucket, count);
        if let Some(member) = &mut self.members[client] {
            member.queued += u64::from(count);
        }
    }

    /// Sends the pages of a client to the buffer at once if it uses the device and has lost its
    /// window already. True: it did. O(1), unless it did.
    pub fn cut_short(&mut self, client: usize) -> bool {
        let Some(member) = &mut self.members[client] else {
            return false;
        };
        let at_device = self.has_buffer && member.out == Out::Regular && !member.cut;
        if !at_device || !member.has_lost() {
            return false;
        }
        member.cut = true;
        member.hold();
        self.share_buffer();
        true
    }

    /// Ends the window of every client, and turns the knobs for the next.
    pub fn end_windows(&mut self) {
        let (least, used) = (self.queue.is_least(), self.is_queue_used());
        for member in self.members.iter_mut().flatten() {
            if let Some(window) = member.monitor.end_window() {
                let done = if self.has_buffer {
                    member.out == Out::Buffer
                } else {
                    least
                };
                member.note(window, done);
            }
        }
        let observed = self.observed();
        if observed.is_some() {
            self.queued.clear();
        }
        if used {
            self.queue.step(&self.goals, observed, &mut self.sets);
        } else if observed.is_some() {
            self.sets.fill(false);
        }
        self.share_buffer();
        let rests = !self.is_queue_used();
        self.queue.set_rests(rests);
    }

    /// Whether a client with a bound uses the queue in this window, or writes are counted.
    fn is_queue_used(&self) -> bool {
        let mut members = self.members.iter().zip(&self.goals);
        let uses = |member: &Option<Member>| {
            let member = member.as_ref();
            member.is_some_and(|member| member.out == Out::Regular || member.cut)
        };
        self.queue.counts_writes() || members.any(|(of, goal)| goal.is_some() && uses(of))
    }

    /// Decides whose pages go to the buffer.
    fn share_buffer(&mut self) {
        let mut order = Vec::new();
        let members = self.members.iter_mut().zip(&self.sets).zip(&self.goals);
        for (at, ((member, in_set), goal)) in members.enumerate() {
            let Some(member) = member else {
                continue;
            };
            let here = member.always || goal.is_some();
            member.out = Out::Regular;
            if self.has_buffer && here && (member.always || *in_set || member.held > 0) {
                order.push((!member.always, member.monitor.bound().limit, at));
            }
        }
        order.sort_unstable();
        let mut left = self.buffer_pages.unwrap_or(u64::MAX);
        for (_, _, at) in order {
            if let Some(member) = &mut self.members[at]
                && member.pages <= left
            {
                left -= member.pages;
                member.out = Out::Buffer;
            }
        }
    }

    /// The latency of the queue: the percentile of the client with the smallest bound. The paper
    /// does not say which figure it takes; a mean would let the tail grow. `None`: too few accesses
    /// to tell.
    fn observed(&self) -> Option<Nanos> {
        let members = self.members.iter().zip(&self.goals);
        let here = members.filter(|(_, goal)| goal.is_some());
        let bounds = here.filter_map(|(member, _)| Some(member.as_ref()?.monitor.bound()));
        let percentile = bounds.min_by_key(|bound| bound.limit)?.percentile;
        let enough = self.queued.samples() >= percentile.samples_min();
        self.queued.at(percentile).filter(|_| enough)
    }

    /// Where the pages of a client go.
    pub fn out(&self, client: usize) -> Out {
        self.members[client]
            .as_ref()
            .map_or(Out::Regular, |member| member.out)
    }

    /// S(t): the pages of one reclaim batch.
    pub fn batch(&self) -> u32 {
        self.queue.slots()
    }

    /// S(t) with the reserve: requests that may be in the queue.
    pub fn slots(&self) -> u32 {
        self.queue.slots_in_all()
    }

    /// Says once that the bound of a client cannot be kept.
    pub fn take_unkeepable(&mut self, client: usize) -> Option<Unkeepable> {
        let member = self.members[client].as_mut()?;
        member.misses.take_unkeepable(member.monitor.bound())
    }
}

/// At which latency the queue aims for a bound.
fn goal(bound: LatencyBound) -> Nanos {
    Nanos(bound.limit.0 * GOAL_PERCENT / 100)
}

impl Member {
    fn new(bound: LatencyBound) -> Member {
        Member {
            monitor: Monitor::new(bound),
            out: Out::Regular,
            always: false,
            pages: 0,
            held: 0,
            next_hold: HOLD_MIN,
            calm: 0,
            queued: 0,
            cut: false,
            misses: Misses::default(),
        }
    }

    /// * `done`: everything that can be done was done during the window.
    fn note(&mut self, window: Window, done: bool) {
        self.queued = 0;
        let cut = std::mem::take(&mut self.cut);
        self.misses.note(window, done && !cut);
        match window.judged {
            // The hold has begun.
            _ if cut => {}
            Judged::Kept => {
                self.held = self.held.saturating_sub(1);
                match self.out {
                    Out::Regular => self.calm += 1,
                    Out::Buffer => self.calm = 0,
                }
                if self.calm >= self.next_hold {
                    self.next_hold = HOLD_MIN;
                }
            }
            Judged::Missed => self.hold(),
        }
    }

    /// Whether the window in progress is lost, at the device. The first window never is.
    fn has_lost(&self) -> bool {
        let tries = self.calm == 0 && self.next_hold > HOLD_MIN;
        let Some(last) = self.monitor.last() else {
            return false;
        };
        let all = last.page_ins.max(self.monitor.pending());
        let least = TRY_SAMPLES * self.monitor.bound().percentile.samples_min();
        let page_ins = if tries {
            self.queued.max(least).min(all)
        } else {
            all
        };
        self.monitor.would_miss(page_ins)
    }

    /// Its pages go to the buffer for some windows, and after the next miss for more.
    fn hold(&mut self) {
        self.held = self.next_hold;
        self.next_hold = (2 * self.next_hold).min(HOLD_MAX);
        self.calm = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A control with one client, bound p50=100us, on a device with one channel.
    fn control(has_buffer: bool) -> LatencyControl {
        let bound = "p50=100us".parse().expect("a bound");
        LatencyControl::new(QueueLimits::of_channels(1), &[Some(bound)], has_buffer)
    }

    /// A window of 10 page-ins. Through the queue if pages are at the device.
    fn window(of: &mut LatencyControl, micros: u64, queued: bool) -> Out {
        for _ in 0..10 {
            let took = Nanos(micros * 1000);
            of.monitor_mut(0).expect("a bound").add(took);
            if queued {
                of.add_queued(0, took);
            }
        }
        of.end_windows();
        of.out(0)
    }

    #[test]
    fn a_miss_sends_pages_to_the_buffer_and_each_miss_for_longer() {
        let mut of = control(true);
        assert_eq!(window(&mut of, 80, true), Out::Regular);
        let mut holds = Vec::new();
        for _ in 0..8 {
            assert_eq!(window(&mut of, 150, true), Out::Buffer);
            let mut held = 1;
            // The queue has no accesses, so it says nothing.
            while window(&mut of, 5, false) == Out::Buffer {
                held += 1;
            }
            holds.push(held);
        }
        assert_eq!(holds, [8, 16, 32, 64, 128, 256, 256, 256]);
        assert_eq!(of.monitor(0).map(|of| of.windows().1), Some(8));
        for _ in 0..HOLD_MAX {
            assert_eq!(window(&mut of, 80, false), Out::Regular);
        }
        window(&mut of, 150, true);
        let held = (1..).take_while(|_| window(&mut of, 5, false) == Out::Buffer);
        assert_eq!(held.count() + 1, 8, "short again after a calm");
    }

    #[test]
    fn a_try_of_the_device_ends_when_it_has_failed_and_holds_as_a_miss_does() {
        for has_buffer in [true, false] {
            let mut of = control(has_buffer);
            let add = |of: &mut LatencyControl, micros: u64| {
                let monitor = of.monitor_mut(0).expect("a bound");
                monitor.add(Nanos(micros * 1000));
            };
            (0..10).for_each(|_| add(&mut of, 150));
            assert!(!of.cut_short(0), "how long a window is, is not known yet");
            of.end_windows();
            (0..7).for_each(|_| _ = window(&mut of, 5, false));
            (0..90).for_each(|_| add(&mut of, 5));
            assert_eq!(window(&mut of, 5, false), Out::Regular);
            // A window has a hundred, of which fifty may be slower. Of 22 that came from the device
            // eleven may.
            (0..22).for_each(|_| of.add_queued(0, Nanos(1000)));
            for slow in 1..20 {
                add(&mut of, 150);
                assert_eq!(of.cut_short(0), has_buffer && slow == 12, "{slow}");
            }
            (0..19).for_each(|_| add(&mut of, 5));
            if !has_buffer {
                continue;
            }
            for at in 0..16 {
                assert_eq!(of.out(0), Out::Buffer, "{at}");
                window(&mut of, 5, false);
            }
            // The rest of its page-ins was fast: the window was kept all the same.
            assert_eq!(of.monitor(0).map(Monitor::windows), Some((24, 1)));
            assert_eq!(window(&mut of, 5, false), Out::Regular);
        }
    }

    #[test]
    fn a_bound_that_is_changed_begins_anew_and_the_same_bound_goes_on() {
        let mut of = control(true);
        window(&mut of, 150, true);
        assert!(!of.change_bound(0, "p50=100us".parse().expect("a bound")));
        let state = |of: &LatencyControl| (of.out(0), of.monitor(0).map(Monitor::windows));
        assert_eq!(state(&of), (Out::Buffer, Some((0, 1))));
        assert!(of.change_bound(0, "p50=200us".parse().expect("a bound")));
        assert_eq!(state(&of), (Out::Regular, Some((0, 0))));
        assert_eq!(window(&mut of, 150, true), Out::Regular, "it is kept now");
        assert!(of.change_bound(0, "p50=120us".parse().expect("a bound")));
        assert_eq!(window(&mut of, 150, true), Out::Buffer);
    }

    #[test]
    fn the_queue_shrinks_while_it_is_too_slow_and_then_gives_the_buffer() {
        let mut of = control(true);
        let before = of.batch();
        window(&mut of, 80, true);
        assert_eq!(of.batch(), before, "the largest already");
        let mut sizes = vec![of.batch()];
        // The window is kept (its page-ins are fast), but the queue is ten times too slow.
        while of.out(0) == Out::Regular {
            (0..10).for_each(|_| of.add_queued(0, Nanos(1_000_000)));
            window(&mut of, 5, false);
            sizes.push(of.batch());
        }
        assert_eq!(sizes.pop(), Some(QueueLimits::MAX), "nothing bounds it now");
        assert!(sizes.is_sorted_by(|a, b| a >= b), "{sizes:?}");
        assert_eq!((sizes.last(), sizes.len() > 8), (Some(&1), true));
        // What is read without writes says nothing of it.
        (0..10).for_each(|_| of.add_queued(0, Nanos(1000)));
        assert_eq!(window(&mut of, 5, false), Out::Regular);
        assert_eq!(
            of.batch(),
            1,
            "the next try begins where the last one ended"
        );
    }

    #[test]
    fn without_a_buffer_pages_stay_at_the_device() {
        let mut of = control(false);
        for _ in 0..20 {
            assert_eq!(window(&mut of, 150, true), Out::Regular);
        }
    }

    #[test]
    fn a_bound_that_cannot_be_kept_is_told_once_with_the_figure_that_can() {
        for has_buffer in [true, false] {
            let limits = QueueLimits {
                max: 8,
                ..QueueLimits::of_channels(1)
            };
            let mut of = LatencyControl {
                queue: Queue::new(limits),
                ..control(has_buffer)
            };
            let mut told = Vec::new();
            for micros in [130; 40].into_iter().chain([150, 140, 130]) {
                window(&mut of, micros, true);
                told.extend(of.take_unkeepable(0));
            }
            let [one] = told[..] else {
                panic!("told {} times", told.len());
            };
            assert!(one.possible >= Nanos(130_000) && one.possible < Nanos(135_000));
            assert_eq!(one.bound.to_string(), "p50=100us");
        }
    }

    #[test]
    fn a_bound_missed_now_and_then_can_be_kept() {
        let mut of = control(true);
        for _ in 0..50 {
            window(&mut of, 150, true);
            window(&mut of, 150, true);
            window(&mut of, 80, true);
            assert_eq!(of.take_unkeepable(0), None);
        }
    }
}
