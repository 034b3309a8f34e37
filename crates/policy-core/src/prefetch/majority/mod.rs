//! Trend prefetch: a majority vote over the last strides of each access stream. The default.
//!
//! Source: Leap (ATC '20) §4.1-4.2. A Boyer-Moore vote over windows of the last strides, which
//! double in size until one has a majority. The prefetch window doubles while the trend holds.
//! Differs:
//! - A thread has up to [`STREAMS`] streams, told apart by address. So `memcpy` or a matrix
//!   product, which read several arrays in turn, show one clean trend each instead of a mixture
//!   with none.
//! - A stride that leaves its stream's neighbourhood is found by four equally spaced pages among
//!   the last [`LOOSE`] + 1 faults that no stream claimed. So two scans with wide strides may be
//!   interleaved.
//! - Prefetched pages are mapped and do not fault. A scan that continues appears as a fault just
//!   behind the window: that is the hit, and the window doubles. A fault inside the window means
//!   that the engine brought less; it keeps the window.
//! - A stride that is a multiple of the trend's looks like the trend: the scan leaves each window
//!   at its end. So one full window in [`PROBE_AFTER`] is not prefetched. If the next faults have
//!   the same stride twice, that stride is the trend.
//! - Off the trend neighbours come along where they pay: [`super::neighbours`]. The next stride
//!   counts from the last of them, so a scan goes on with stride 1. An eighth of the window is
//!   remembered, for scans that skip a little.
//!
//! ```text
//! fault at p, window 3, stride s:   p   p+s  p+2s  p+3s  p+4s  ...
//!                                 fault [--- brought --]  next fault: trend holds, window 7
//! ```
//! First touches have their own streams. Threads are kept in a table of [`THREADS`]; a new one
//! replaces the one that faulted least recently. Cost: O(1), no allocation after `new` (about 110
//! KiB).

use super::neighbours::{Along, Around, Neighbours, Now, REACH};
use super::{FaultSeen, Prefetch, WINDOW_MAX, Window};

/// Threads remembered, loads and first touches each.
pub const THREADS: usize = 32;
/// Streams of one thread.
pub const STREAMS: usize = 6;
/// Faults remembered that no stream claimed.
pub const LOOSE: usize = 8;

/// Strides remembered by one stream.
const HISTORY: usize = 8;
/// A fault this near to a stream's last one belongs to the stream, trend or not.
const NEAR_PAGES: u64 = 32;
/// A stream with a trend is kept this many faults longer than one without. So random faults do not
/// replace it while the program uses its window.
const TREND_FAULTS: u64 = 1024;
/// First window of a new trend; then 7, 15, 31, 63.
const WINDOW_FIRST: u32 = 3;

/// Full windows of a trend before one is left out. This costs a scan one more fault in a thousand
/// pages.
const PROBE_AFTER: u8 = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Probe {
    /// Full windows since the last probe.
    After(u8),
    /// No window was given: the next fault shows the stride.
    Asks,
    /// The next fault had this stride; once more makes it the trend.
    AsksAgain(i64),
}

#[derive(Clone, Copy)]
struct Stream {
    last: u64,
    /// 0: no trend.
    stride: i64,
    window: u32,
    /// The rest of the window size after the trend broke.
    memory: u32,
    used_at: u64,
    history: [i64; HISTORY],
    len: u8,
    next: u8,
    probe: Probe,
    /// The first and the last page of those that came with the last fault, off the trend.
    came: Option<(u64, u64)>,
}

const NO_STREAM: Stream = Stream {
    last: u64::MAX,
    stride: 0,
    window: 0,
    memory: 0,
    used_at: 0,
    history: [0; HISTORY],
    len: 0,
    next: 0,
    probe: Probe::After(0),
    came: None,
};

const NOTHING: Window = Window {
    stride: 0,
    count: 0,
};

impl Stream {
    fn push(&mut self, stride: i64) {
        self.history[self.next as usize] = stride;
        self.next = (self.next + 1) % HISTORY as u8;
        self.len = (self.len + 1).min(HISTORY as u8);
    }

    /// The stride `back` faults ago; 0 = the newest.
    fn stride_at(&self, back: usize) -> i64 {
        self.history[(self.next as usize + HISTORY - 1 - back) % HISTORY]
    }

    /// The majority stride of the last 2 strides, else of the last 4, else of the last 8.
    fn majority(&self) -> Option<i64> {
        [2, 4, 8].into_iter().find_map(|size| {
            if size > self.len as usize {
                return None;
            }
            let (mut candidate, mut votes) = (0, 0);
            for back in 0..size {
                let stride = self.stride_at(back);
                if votes == 0 {
                    candidate = stride;
                }
                votes += if stride == candidate { 1 } else { -1 };
            }
            let count = (0..size)
                .filter(|&back| self.stride_at(back) == candidate)
                .count();
            (count * 2 > size && candidate != 0).then_some(candidate)
        })
    }

    /// How many strides ahead `page` is, if the trend explains it.
    fn steps_to(&self, page: u64) -> Option<u32> {
        if self.stride == 0 {
            return None;
        }
        let delta = page.wrapping_sub(self.last) as i64;
        let limit = i64::from(2 * self.window + 4);
        let steps = match self.stride {
            1 => delta,
            -1 => delta.wrapping_neg(),
            stride => {
                let reach = stride.unsigned_abs().saturating_mul(limit as u64);
                if delta.unsigned_abs() > reach || delta % stride != 0 {
                    return None;
                }
                delta / stride
            }
        };
        (1..=limit).contains(&steps).then_some(steps as u32)
    }

    /// The trend holds: the fault is `steps` strides ahead of the last one.
    fn follow(&mut self, page: u64, steps: u32) -> Window {
        let delta = page.wrapping_sub(self.last) as i64;
        self.came = None;
        self.last = page;
        self.push(self.stride);
        match self.probe {
            Probe::Asks if delta != self.stride => {
                self.probe = Probe::AsksAgain(delta);
                return NOTHING;
            }
            Probe::AsksAgain(stride) if stride == delta => {
                self.stride = stride;
                self.window = 0;
                self.probe = Probe::After(0);
            }
            Probe::Asks | Probe::AsksAgain(_) => self.probe = Probe::After(0),
            Probe::After(full) if full >= PROBE_AFTER => {
                self.probe = Probe::Asks;
                return NOTHING;
            }
            Probe::After(full) => {
                self.probe = Probe::After(full + u8::from(self.window == WINDOW_MAX));
            }
        }
        if steps > self.window {
            self.window = (2 * self.window.max(self.memory) + 1).clamp(WINDOW_FIRST, WINDOW_MAX);
        }
        self.memory = 0;
        self.bring()
    }

    /// A fault of this stream that no trend explains.
    fn stray(&mut self, page: u64) -> Window {
        let from = match self.came.take() {
            Some((_, last)) if page > last => last,
            Some((first, _)) if page < first => first,
            _ => self.last,
        };
        let delta = page.wrapping_sub(from) as i64;
        self.last = page;
        self.push(delta);
        self.memory = self.memory.max(self.window / 8);
        self.window = 0;
        match self.majority() {
            Some(stride) if stride == delta => {
                self.stride = stride;
                self.window = WINDOW_FIRST.max(self.memory);
                self.memory = 0;
            }
            Some(stride) => self.stride = stride,
            None => (self.stride, self.memory) = (0, 0),
        }
        self.bring()
    }

    /// Order of replacement: the stream of least worth goes first.
    fn worth(&self) -> u64 {
        self.used_at + if self.stride != 0 { TREND_FAULTS } else { 0 }
    }

    fn bring(&self) -> Window {
        Window {
            stride: self.stride,
            count: self.window,
        }
    }
}

#[derive(Clone, Copy)]
struct Thread {
    key: u64,
    used_at: u64,
    streams: [Stream; STREAMS],
    /// Faults that no stream claimed; the newest overwrites the oldest.
    loose: [u64; LOOSE],
    loose_next: u8,
    /// The stream of the last fault, if no trend explained that fault.
    off_trend: Option<usize>,
}

const NO_PAGE: u64 = u64::MAX;

impl Thread {
    fn new(key: u64) -> Thread {
        Thread {
            key,
            used_at: 0,
            streams: [NO_STREAM; STREAMS],
            loose: [NO_PAGE; LOOSE],
            loose_next: 0,
            off_trend: None,
        }
    }

    fn on_fault(&mut self, page: u64, now: u64) -> Window {
        self.off_trend = None;
        let mut near: Option<(usize, u64)> = None;
        let mut oldest = (0, u64::MAX);
        for index in 0..STREAMS {
            let stream = &mut self.streams[index];
            if let Some(steps) = stream.steps_to(page) {
                stream.used_at = now;
                return stream.follow(page, steps);
            }
            let distance = stream.last.abs_diff(page);
            if distance <= NEAR_PAGES
                && stream.used_at != 0
                && near.is_none_or(|(_, nearest)| distance < nearest)
            {
                near = Some((index, distance));
            }
            if stream.worth() < oldest.1 {
                oldest = (index, stream.worth());
            }
        }
        self.off_trend = Some(near.map_or(oldest.0, |(index, _)| index));
        match near {
            Some((index, 0)) => {
                // The same page again: it lost a race with eviction, or was reported twice. It
                // teaches nothing.
                self.streams[index].used_at = now;
                Window::default()
            }
            Some((index, _)) => {
                self.streams[index].used_at = now;
                self.streams[index].stray(page)
            }
            None => {
                let stride = self.far_stride(page);
                self.loose[self.loose_next as usize] = page;
                self.loose_next = (self.loose_next + 1) % LOOSE as u8;
                let mut stream = Stream {
                    last: page,
                    used_at: now,
                    ..NO_STREAM
                };
                if let Some(stride) = stride {
                    stream.push(stride);
                    stream.push(stride);
                    stream.stride = stride;
                    stream.window = WINDOW_FIRST;
                }
                self.streams[oldest.0] = stream;
                stream.bring()
            }
        }
    }

    /// The stride `s` for which `page - s`, `page - 2s` and `page - 3s` are among the loose faults.
    fn far_stride(&self, page: u64) -> Option<i64> {
        self.loose
            .iter()
            .filter(|&&other| other != NO_PAGE && other != page)
            .map(|other| page.wrapping_sub(*other))
            .find(|&stride| {
                let second = page.wrapping_sub(stride.wrapping_mul(2));
                let third = page.wrapping_sub(stride.wrapping_mul(3));
                self.loose.contains(&second) && self.loose.contains(&third)
            })
            .map(|stride| stride as i64)
    }
}

/// Prefetch by the majority stride of each access stream.
pub struct Majority {
    /// Packed together for a quick search; loads, then first touches.
    keys: [[u64; THREADS]; 2],
    threads: [Vec<Thread>; 2],
    /// Where the last fault was found.
    recent: [usize; 2],
    clock: u64,
    neighbours: Option<Neighbours>,
}

impl Default for Majority {
    fn default() -> Self {
        Majority::new()
    }
}

impl Majority {
    /// A prefetcher without history. Allocates all that it will ever use.
    pub fn new() -> Majority {
        Majority {
            neighbours: Some(Neighbours::new()),
            ..Majority::trend_alone()
        }
    }

    /// As [`Majority::new`], and off the trend nothing comes along.
    pub fn trend_alone() -> Majority {
        // No key is `u64::MAX`: a space id and a thread id are never both all ones.
        let table = || vec![Thread::new(u64::MAX); THREADS];
        Majority {
            keys: [[u64::MAX; THREADS]; 2],
            threads: [table(), table()],
            recent: [0; 2],
            clock: 0,
            neighbours: None,
        }
    }

    fn place(&mut self, kind: usize, key: u64) -> usize {
        let recent = self.recent[kind];
        if self.keys[kind][recent] == key {
            return recent;
        }
        let found = self.keys[kind].iter().position(|&other| other == key);
        let place = found.unwrap_or_else(|| {
            let used_at = |place: &usize| self.threads[kind][*place].used_at;
            let oldest = (0..THREADS).min_by_key(used_at).unwrap_or(0);
            self.threads[kind][oldest] = Thread::new(key);
            self.keys[kind][oldest] = key;
            oldest
        });
        self.recent[kind] = place;
        place
    }
}

impl Prefetch for Majority {
    fn on_fault(&mut self, fault: FaultSeen) -> Window {
        self.clock += 1;
        if let Some(neighbours) = self.neighbours.as_mut().filter(|_| !fault.first_touch) {
            neighbours.hear(fault);
        }
        let kind = usize::from(fault.first_touch);
        let key = u64::from(fault.space.0) << 32 | u64::from(fault.thread.0);
        let place = self.place(kind, key);
        let thread = &mut self.threads[kind][place];
        debug_assert_eq!(thread.key, key);
        thread.used_at = self.clock;
        thread.on_fault(fault.page.0, self.clock)
    }

    fn off_trend(&mut self, fault: FaultSeen, now: Now, look: &mut dyn FnMut() -> Around) -> Along {
        let thread = &mut self.threads[0][self.recent[0]];
        let (Some(neighbours), Some(stream)) = (&mut self.neighbours, thread.off_trend) else {
            return Along::default();
        };
        let along = neighbours.on_fault(fault, now, look);
        if along.pages != 0 {
            let all = along.pages | 1 << REACH;
            let start = fault.page.0.wrapping_sub(u64::from(REACH));
            let at = |bit: u32| start.wrapping_add(u64::from(bit));
            thread.streams[stream].came = Some((at(all.trailing_zeros()), at(all.ilog2())));
        }
        along
    }
}

#[cfg(test)]
mod tests;
