//! The latency bound of a run: its windows, from what fault threads counted, and the knobs that
//! control turns after each. The law is that of `undercroft-qos`, as in the simulator.

use std::time::{Duration, Instant};

use undercroft_base::Nanos;
use undercroft_engine::reclaim::{Goes, Turned};
use undercroft_proto::grant;
use undercroft_proto::messages::Answered;
use undercroft_proto::report::{BoundControl, BoundReport};
use undercroft_qos::control::MISSES_MAX;
use undercroft_qos::pressure::Pressure;
use undercroft_qos::tail::BUCKETS;
use undercroft_qos::{
    self as qos, Capacity, Demand, LatencyBound, Misses, Monitor, Out, QueueLimits, Refused,
    Unkeepable,
};
use undercroft_tier::profile::channels;

use super::Control;
use crate::books::metered::MeteredTier;
use crate::books::table::Tiers;
use crate::gauges::knobs::Knobs;
use crate::gauges::page_ins::PageIns;
use crate::log::warn;

/// Least time of a window. The paper's monitor has windows of a second, too (NVSwap Fig. 6).
const WINDOW: Duration = Duration::from_secs(1);

/// The only client of the control.
const CLIENT: usize = 0;

/// The devices that control works on.
pub(super) struct Devices {
    limits: QueueLimits,
    has_buffer: bool,
    /// False: the bound is only measured.
    turns: bool,
}

impl Devices {
    /// The last tier is the regular zone. The first is the buffer, if it is another.
    pub(super) fn of(tiers: &Tiers, turns: bool) -> Devices {
        let last = tiers.ranked().next_back();
        let (shape, profile) = last.map_or((None, None), |it| (it.shape, it.profile.as_ref()));
        let channels = channels(shape, profile);
        let has_buffer = tiers.ranks().count() > 1;
        Devices {
            limits: QueueLimits::of_device(channels, has_buffer),
            has_buffer,
            turns,
        }
    }
}

/// The counts of page-ins as they were read last: of all, of those from a device, and of those
/// above the limit.
struct Known {
    all: Box<[u32; BUCKETS]>,
    device: Box<[u32; BUCKETS]>,
    over: u64,
}

impl Known {
    /// All until now.
    fn of(page_ins: &PageIns) -> Known {
        let mut known = Known {
            all: Box::new([0; BUCKETS]),
            device: Box::new([0; BUCKETS]),
            over: 0,
        };
        known.news(page_ins, |_, _| (), |_, _| ());
        known
    }

    /// Calls `all` and `device` with the counts of each bucket that has grown. Returns how many
    /// more are above the limit.
    fn news(
        &mut self,
        page_ins: &PageIns,
        all: impl FnMut(usize, u32),
        device: impl FnMut(usize, u32),
    ) -> u64 {
        // First: every page-in that is counted here is in the counts below.
        let over = page_ins.over();
        page_ins.all.news(&mut self.all, all);
        page_ins.device.news(&mut self.device, device);
        over - std::mem::replace(&mut self.over, over)
    }
}

/// The bounds of a run.
#[derive(Default)]
pub(super) struct Bounds {
    /// Of page-ins.
    pub(super) latency: Option<LatencyWatch>,
    /// How the daemon has the knobs turned, and until when.
    pub(super) obeys: Option<(Turned, Instant)>,
    /// How long the program waits.
    pub(super) pressure: Pressure,
}

/// The bound, its control, and how far the counts are known.
pub(super) struct LatencyWatch {
    control: qos::LatencyControl,
    turns: bool,
    has_buffer: bool,
    /// Of a bound that is only measured, or kept by the daemon.
    misses: Misses,
    /// Of its windows, and of what the daemon was told.
    known: Known,
    told: Known,
    window_since: Instant,
    /// Times that control changed a knob.
    changes: u64,
    /// Windows until the first that kept the bound, with it.
    until_kept: Option<u64>,
}

impl LatencyWatch {
    /// A bound that holds from now on: page-ins before do not count.
    pub(super) fn new(bound: LatencyBound, devices: &Devices, page_ins: &PageIns) -> LatencyWatch {
        LatencyWatch {
            control: qos::LatencyControl::new(devices.limits, &[Some(bound)], devices.has_buffer),
            turns: devices.turns,
            has_buffer: devices.has_buffer,
            misses: Misses::default(),
            known: Known::of(page_ins),
            told: Known::of(page_ins),
            window_since: Instant::now(),
            changes: 0,
            until_kept: None,
        }
    }

    /// The page-ins so far.
    fn monitor(&self) -> Option<&Monitor> {
        self.control.monitor(CLIENT)
    }

    /// Reads what is new in the counts.
    fn read(&mut self, page_ins: &PageIns) {
        let mut queued = Vec::new();
        let Some(monitor) = self.control.monitor_mut(CLIENT) else {
            return;
        };
        let over = self.known.news(
            page_ins,
            |bucket, count| monitor.add_many(bucket, count),
            |bucket, count| queued.push((bucket, count)),
        );
        monitor.add_over(over);
        for (bucket, count) in queued {
            self.control.add_queued_many(CLIENT, bucket, count);
        }
    }

    /// The page-ins that the daemon has not been told of. `None`: no control may keep the bound.
    pub(super) fn tell(&mut self, page_ins: &PageIns) -> Option<grant::PageIns> {
        let bound = grant::Bound(self.monitor()?.bound());
        let (mut all, mut device) = (Vec::new(), Vec::new());
        let over = self.told.news(
            page_ins,
            |bucket, count| all.push((bucket as u16, count)),
            |bucket, count| device.push((bucket as u16, count)),
        );
        // More than that is not told: it is no rate of a program.
        let told = grant::PageIns {
            bound,
            all: all.try_into().unwrap_or_default(),
            device: device.try_into().unwrap_or_default(),
            over,
        };
        self.turns.then_some(told)
    }

    /// Ends the window if it is old enough and has enough page-ins, and turns the knobs; before,
    /// only if the window is lost at the device. Says once that the bound cannot be kept.
    ///
    /// * `obeyed`: the daemon turns the knobs, and this is how.
    fn end_window(
        &mut self,
        page_ins: &PageIns,
        (knobs, obeyed): (&Knobs, Option<Turned>),
        now: Instant,
    ) -> Option<Unkeepable> {
        self.read(page_ins);
        if now.saturating_duration_since(self.window_since) < WINDOW {
            if self.control.cut_short(CLIENT) && obeyed.is_none() {
                self.turn(knobs);
            }
            return None;
        }
        let monitor = self.monitor()?;
        let bound = monitor.bound();
        if monitor.pending() < bound.percentile.samples_min() {
            return None;
        }
        self.control.end_windows();
        self.window_since = now;
        let monitor = self.monitor()?;
        let ((kept, missed), last) = (monitor.windows(), monitor.last());
        if kept == 1 && self.until_kept.is_none() {
            self.until_kept = Some(kept + missed);
        }
        if !self.turns {
            self.misses.note(last?, true); // nothing is done, so nothing is left undone
            return self.misses.take_unkeepable(bound);
        }
        if let Some(obeyed) = obeyed {
            let least = !self.has_buffer && obeyed.batch <= 1;
            self.misses
                .note(last?, least || obeyed.goes == Goes::ToBuffer);
            return self.misses.take_unkeepable(bound);
        }
        self.turn(knobs);
        self.control.take_unkeepable(CLIENT)
    }

    /// Sets the knobs as its own control has decided.
    pub(super) fn turn(&mut self, knobs: &Knobs) {
        let turned = Turned {
            batch: self.control.batch() as usize,
            goes: goes_of(self.control.out(CLIENT)),
        };
        self.turn_to(knobs, self.turns.then_some(turned));
    }

    /// Sets the knobs.
    pub(super) fn turn_to(&mut self, knobs: &Knobs, turned: Option<Turned>) {
        let before = knobs.get();
        knobs.set(turned);
        self.changes += u64::from(before.is_some() && before != knobs.get());
    }

    /// The report on the bound.
    pub(super) fn report(&self, knobs: &Knobs) -> Option<BoundReport> {
        let report = BoundReport::of(self.monitor()?);
        let control = knobs.get().map(|turned| BoundControl {
            pages_go_to: turned.goes.name().to_owned(),
            batch_pages: turned.batch as u64,
            changes: self.changes,
            writes_after_reads: knobs.yields(),
        });
        Some(BoundReport {
            windows_until_kept: self.until_kept,
            control,
            ..report
        })
    }
}

/// The least time of a page-in besides its read: it is verified and installed.
const PATH: Nanos = Nanos(1_000);

impl Control {
    /// Whether the tiers can keep a bound, by their models and by what was measured until now. A
    /// bound that is only measured needs no leave.
    pub(super) fn admits(&self, bound: LatencyBound) -> Result<(), Refused> {
        if !self.shared.options.latency_control {
            return Ok(());
        }
        let key = &self.shared.books.key;
        // A tier of which nothing is known is no faster than the one before it.
        let mut read = Nanos(0);
        let capacity = |tier: &MeteredTier| {
            let least = tier.least_load(key);
            read = if least == Nanos(0) { read } else { least };
            Capacity {
                read,
                pages: tier.state().capacity_pages().0,
            }
        };
        let capacities: Vec<_> = self.shared.books.tiers.ranked().map(capacity).collect();
        let demand = Demand {
            path: PATH,
            pages: None,
        };
        qos::admit(bound, demand, &capacities)
    }

    /// Sets the bounds that the run begins with.
    ///
    /// * `goes_on`: a manager before has admitted them.
    pub(super) fn begin_bounds(&mut self, goes_on: bool) -> Result<(), Refused> {
        if let Some(bound) = self.shared.options.latency {
            if !goes_on {
                self.admits(bound)?;
            }
            self.set_bound(Some(bound));
        }
        Ok(())
    }

    /// Sets another bound while the program runs, if the tiers can keep it.
    pub(super) fn change_bound(&mut self, bound: Option<LatencyBound>) -> Answered {
        if let Some(Err(refused)) = bound.map(|bound| self.admits(bound)) {
            return Answered::Refused(refused.to_string());
        }
        self.set_bound(bound);
        Answered::Yes
    }

    pub(super) fn has_latency_bound(&self) -> bool {
        self.bounds.latency.is_some()
    }

    /// Sets the latency bound; `None` ends it. Page-ins count for it from now on.
    pub(super) fn set_bound(&mut self, bound: Option<LatencyBound>) {
        self.bounds.obeys = None;
        let gauges = &self.shared.gauges;
        let Some(bound) = bound else {
            self.bounds.latency = None;
            gauges.knobs.set(None);
            return;
        };
        let page_ins = gauges.page_ins.get_or_init(|| PageIns::boxed(bound));
        page_ins.set_limit(bound.limit);
        let turns = self.shared.options.latency_control;
        let devices = Devices::of(&self.shared.books.tiers, turns);
        let mut of = LatencyWatch::new(bound, &devices, page_ins);
        of.turn(&gauges.knobs);
        self.bounds.latency = Some(of);
    }

    /// Ends the window of the latency bound, if it is time. Called at each round of the control
    /// thread: at least every 100 ms if there is a bound.
    pub(super) fn note_page_ins(&mut self) {
        let now = Instant::now();
        let obeyed = self.obeyed(now);
        let gauges = &self.shared.gauges;
        if let (Some(bound), Some(page_ins)) = (&mut self.bounds.latency, gauges.page_ins.get())
            && let Some(found) = bound.end_window(page_ins, (&gauges.knobs, obeyed), now)
        {
            warn(&unkeepable(found));
        }
    }

    /// Ends the last window, however short it is: the program has ended.
    pub(super) fn end_last_window(&mut self) {
        let page_ins = self.shared.gauges.page_ins.get();
        if let (Some(bound), Some(page_ins)) = (&mut self.bounds.latency, page_ins) {
            bound.read(page_ins);
            bound.control.end_windows();
        }
    }
}

/// The message to the user on a bound that cannot be kept.
fn unkeepable(found: Unkeepable) -> String {
    format!(
        "the latency bound {} cannot be kept: {MISSES_MAX} windows in a row missed it. p{}={} would \
         have kept them; or raise --memory-max, or give a faster tier",
        found.bound, found.bound.percentile, found.possible
    )
}

/// Where the pages of a client with a bound go, as control has decided.
fn goes_of(out: Out) -> Goes {
    match out {
        Out::Regular => Goes::ToDevice,
        Out::Buffer => Goes::ToBuffer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(channels: u32, has_buffer: bool, turns: bool) -> Devices {
        Devices {
            limits: QueueLimits::of_device(channels, has_buffer),
            has_buffer,
            turns,
        }
    }

    #[test]
    fn a_window_ends_after_a_second_with_all_that_was_counted() {
        let bound: LatencyBound = "p90=100us".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        let knobs = Knobs::default();
        let mut of = LatencyWatch::new(bound, &devices(1, false, false), &page_ins);
        let began = of.window_since;
        let mut after = |millis: u64, fast: u32, slow: u32| {
            (0..fast).for_each(|_| page_ins.add(Nanos(50_000), false));
            (0..slow).for_each(|_| page_ins.add(Nanos(150_000), true));
            let now = began + Duration::from_millis(millis);
            let told = of.end_window(&page_ins, (&knobs, None), now);
            assert_eq!(told, None);
            let monitor = of.monitor().expect("a bound");
            (monitor.windows(), monitor.page_ins())
        };
        assert_eq!(after(999, 90, 10), ((0, 0), (0, 0)));
        assert_eq!(after(1000, 0, 0), ((1, 0), (100, 10)));
        assert_eq!(after(1999, 80, 10), ((1, 0), (100, 10)));
        assert_eq!(after(2000, 0, 0), ((1, 1), (190, 20)));
        // Too few for p90: the window goes on, and ends as soon as there are ten.
        assert_eq!(after(9000, 9, 0), ((1, 1), (190, 20)));
        assert_eq!(after(9001, 1, 0), ((2, 1), (200, 20)));
        assert_eq!(after(9500, 90, 0), ((2, 1), (200, 20)));
    }

    #[test]
    fn a_bound_that_is_missed_again_and_again_is_told_once() {
        let bound: LatencyBound = "p90=100us".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        let knobs = Knobs::default();
        let mut of = LatencyWatch::new(bound, &devices(1, false, false), &page_ins);
        let began = of.window_since;
        let mut told = Vec::new();
        // In milliseconds: a miss, a window that is kept, then four misses.
        for (second, took) in [5, 0, 2, 3, 1, 4].into_iter().enumerate() {
            (0..10).for_each(|_| page_ins.add(Nanos(took * 1_000_000), true));
            let now = began + Duration::from_secs(second as u64 + 1);
            let found = of.end_window(&page_ins, (&knobs, None), now);
            told.extend(found.map(|found| (second, unkeepable(found))));
        }
        let [(second, text)] = &told[..] else {
            panic!("told {} times", told.len());
        };
        assert_eq!(*second, 4, "after the third miss in a row");
        assert!(
            text.contains("p90=100us cannot be kept: 3 windows"),
            "{text}"
        );
        assert!(text.contains("p90=3.0 ms would have"), "{text}");
    }

    /// Ends a window of ten page-ins, all from the device.
    fn window(
        of: &mut LatencyWatch,
        page_ins: &PageIns,
        knobs: &Knobs,
        millis: u64,
    ) -> Option<Turned> {
        (0..10).for_each(|_| page_ins.add(Nanos(millis * 1_000_000), true));
        let now = of.window_since + WINDOW;
        of.end_window(page_ins, (knobs, None), now);
        knobs.get()
    }

    #[test]
    fn a_window_that_missed_the_bound_moves_the_client_to_the_buffer() {
        let bound: LatencyBound = "p90=2ms".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        let knobs = Knobs::default();
        let mut of = LatencyWatch::new(bound, &devices(9, true, true), &page_ins);
        let kept = window(&mut of, &page_ins, &knobs, 1).expect("control is on");
        assert_eq!(kept.goes, Goes::ToDevice);
        let missed = window(&mut of, &page_ins, &knobs, 5).expect("control is on");
        assert_eq!(missed.goes, Goes::ToBuffer);
        let report = of.report(&knobs).expect("a bound");
        let control = report.control.expect("control is on");
        assert_eq!(
            (control.pages_go_to.as_str(), control.changes),
            ("buffer", 1)
        );
        assert_eq!(report.windows_until_kept, Some(1));
        // In all of the windows that the first miss holds.
        for at in 0..7 {
            let held = window(&mut of, &page_ins, &knobs, 1).expect("control is on");
            assert_eq!(held.goes, Goes::ToBuffer, "window {at}");
        }
        let tried = window(&mut of, &page_ins, &knobs, 1).expect("control is on");
        assert_eq!(tried.goes, Goes::ToDevice, "the device is tried again");
        // A tenth of a second later it has failed: three of ten are too slow.
        (0..3).for_each(|_| page_ins.add(Nanos(5_000_000), true));
        let soon = of.window_since + WINDOW / 10;
        assert_eq!(of.end_window(&page_ins, (&knobs, None), soon), None);
        assert_eq!(knobs.get().map(|it| it.goes), Some(Goes::ToBuffer));
        let windows = of.monitor().map(Monitor::windows);
        assert_eq!(windows, Some((9, 1)), "its window goes on");
    }

    #[test]
    fn what_the_daemon_says_stays_whatever_a_window_was_and_it_is_told_each_page_in_once() {
        let bound: LatencyBound = "p90=2ms".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        let knobs = Knobs::default();
        let mut of = LatencyWatch::new(bound, &devices(9, true, true), &page_ins);
        let said = Turned {
            batch: 3,
            goes: Goes::ToBuffer,
        };
        of.turn_to(&knobs, Some(said));
        let mut unkeepable = 0;
        for (millis, kept) in [(9, 0), (1, 1), (9, 1), (9, 1), (9, 1)] {
            (0..9).for_each(|_| page_ins.add(Nanos(millis * 1_000_000), true));
            page_ins.add(Nanos(1_000), false);
            let now = of.window_since + WINDOW;
            let told = of.end_window(&page_ins, (&knobs, Some(said)), now);
            unkeepable += u32::from(told.is_some());
            assert_eq!(knobs.get(), Some(said));
            assert_eq!(of.monitor().map(|it| it.windows().0), Some(kept));
        }
        assert_eq!(
            unkeepable, 1,
            "everything was done, and three windows missed it"
        );
        let told = of.tell(&page_ins).expect("a bound");
        let sum = |of: &grant::Latencies| of.each().map(|(_, count)| count).sum::<u32>();
        assert_eq!((told.bound.0, told.over), (bound, 36));
        assert_eq!((sum(&told.all), sum(&told.device)), (50, 45));
        let told = of.tell(&page_ins).expect("a bound");
        assert_eq!((sum(&told.all), told.over), (0, 0));
    }

    #[test]
    fn without_a_buffer_the_batches_shrink_and_without_control_nothing_changes() {
        let bound: LatencyBound = "p90=2ms".parse().expect("a bound");
        for turns in [true, false] {
            let page_ins = PageIns::new(bound);
            let knobs = Knobs::default();
            let mut of = LatencyWatch::new(bound, &devices(9, false, turns), &page_ins);
            let batches: Vec<_> = (0..20)
                .map(|_| window(&mut of, &page_ins, &knobs, 8).map(|turned| turned.batch))
                .collect();
            if turns {
                assert_eq!(batches.last(), Some(&Some(1)), "{batches:?}");
            } else {
                assert!(batches.iter().all(Option::is_none), "{batches:?}");
            }
        }
    }

    #[test]
    fn page_ins_before_a_bound_do_not_count_for_it() {
        let bound: LatencyBound = "p90=2ms".parse().expect("a bound");
        let page_ins = PageIns::new(bound);
        (0..100).for_each(|_| page_ins.add(Nanos(9_000_000), true));
        let mut of = LatencyWatch::new(bound, &devices(9, true, true), &page_ins);
        window(&mut of, &page_ins, &Knobs::default(), 1);
        let monitor = of.monitor().expect("a bound");
        assert_eq!((monitor.windows(), monitor.page_ins()), ((1, 0), (10, 0)));
    }
}
