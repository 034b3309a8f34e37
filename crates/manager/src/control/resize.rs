//! Another memory limit while the program runs, and none while it is paused. A higher one is in
//! force at once. A lower one is approached: the evictor lowers the limit in force as pages leave,
//! so that faults find room meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::Instant;

use undercroft_base::{Bytes, Nanos};
use undercroft_proto::messages::Answered;
use undercroft_proto::report::CurveBegan;
use undercroft_proto::tiers::pool_capacity;
use undercroft_sys::procfs;

use super::Control;
use crate::gauges::Hold;
use crate::space::bring_home::bring_home;
use crate::space::shared::Shared;

/// A thread brings pages in because a user wants to keep them.
static BRINGING: AtomicBool = AtomicBool::new(false);

/// The smallest limit: that of `run --memory-max`.
const LEAST: Bytes = Bytes(1 << 20);

/// Memory of a machine that does not tell.
const MEMORY: Bytes = Bytes(1 << 46);

impl Control {
    /// Changes the limit, if the program can keep to it.
    ///
    /// * `asked`: bytes; `u64::MAX` = no limit.
    pub(super) fn change_limit(&mut self, asked: Bytes) -> Answered {
        if let Err(why) = self.may_have(asked) {
            return Answered::Refused(why);
        }
        let asked = match asked {
            Bytes(u64::MAX) => asked,
            _ => asked.pages_floor().bytes(),
        };
        self.shared.gauges.ask_memory_max(asked);
        limit_pools(&self.shared, asked);
        self.keep_to_limit();
        let around = asked.min(procfs::total_memory().unwrap_or(MEMORY));
        self.begin_curve_again(around, CurveBegan::Limit);
        Answered::Yes
    }

    /// The miss-ratio curve and the cost of faults count from now on.
    fn begin_curve_again(&mut self, around: Bytes, began: CurveBegan) {
        self.shared.books.begin_curve_again(around.pages_floor());
        let stats = *self.shared.books.engine().books().stats();
        let now = Nanos(self.shared.elapsed().as_nanos() as u64);
        self.since.curve = (stats, now, began);
        self.since.toll.begin_again();
    }

    /// After a takeover: which pages other limits would have in memory is known when as many pages
    /// have left as the limit holds. The curve begins then.
    pub(super) fn begin_curve_when_known(&mut self) {
        let out = self.shared.books.engine().books().stats().pages_swapped_out;
        let limit = self.shared.gauges.memory_max();
        let from = *(self.since.curve_from).get_or_insert(out + limit.pages_floor().0);
        if out >= from {
            self.since.curve_from = None;
            let around = limit.min(procfs::total_memory().unwrap_or(MEMORY));
            self.begin_curve_again(around, CurveBegan::Manager);
        }
    }

    /// Stops eviction and moves between tiers, or begins them again. While it is paused the run has
    /// no limit: faults are served, and no page leaves.
    pub(super) fn pause(&mut self, paused: bool) -> Answered {
        if paused && self.shared.books.record.is_some() {
            let why = "a trace is recorded (--trace), and a trace has one limit";
            return Answered::Refused(why.to_owned());
        }
        if paused && self.shared.options.class.is_some() {
            let why = "the daemon gives its memory to others, and a paused run would take more";
            return Answered::Refused(why.to_owned());
        }
        self.hold(Hold::User, paused);
        Answered::Yes
    }

    /// As [`Control::pause`], and a thread brings all pages in that are out.
    pub(super) fn keep(&mut self, keep: bool) -> Answered {
        let paused = self.pause(keep);
        if !keep || paused != Answered::Yes {
            return paused;
        }
        if BRINGING.swap(true, Ordering::Relaxed) {
            return Answered::Refused("pages of the last request still come back".to_owned());
        }
        let shared = self.shared.clone();
        let brings = move || {
            for process in shared.processes.all() {
                // What does not come in comes when it is touched.
                let _ = bring_home(&shared, &process);
            }
            BRINGING.store(false, Ordering::Relaxed);
        };
        let thread = Builder::new().name("uc-keep".into());
        if let Err(error) = thread.spawn(brings) {
            BRINGING.store(false, Ordering::Relaxed);
            self.pause(false);
            return Answered::Refused(format!("no thread for it: {error}"));
        }
        paused
    }

    /// Pauses the run for a reason, or takes the reason back.
    pub(super) fn hold(&mut self, why: Hold, paused: bool) {
        if self.shared.gauges.pause(why, paused) {
            self.keep_to_limit();
        }
    }

    /// Has the engine keep to the limit of this moment.
    pub(super) fn keep_to_limit(&mut self) {
        let limit = self.shared.gauges.limit_now();
        let unmanaged = self.unmanaged_pages().bytes();
        {
            let mut engine = self.shared.books.engine();
            let lower = limit < engine.books().limit();
            if !lower {
                engine.set_limit(limit);
            } else if self.managing {
                engine.approach_limit(limit);
            } else {
                // What is in memory is not in the books yet. Checks see that the limit is near,
                // and manage it.
                engine.set_limit(limit.max(unmanaged));
            }
        }
        self.checks.at = Instant::now();
        self.shared.signals.kick_evictor();
    }

    /// Error: why the limit cannot be changed to this one, with the fix.
    fn may_have(&self, asked: Bytes) -> Result<(), String> {
        if asked < LEAST {
            return Err(format!(
                "{asked} is less than a program needs; {LEAST} at least"
            ));
        }
        if self.shared.books.record.is_some() {
            return Err("a trace is recorded (--trace), and a trace has one limit".to_owned());
        }
        let last = self.shared.books.tiers.ranked().next_back();
        // Compressed pages have no tier below.
        let pool = last.filter(|last| last.facts().charged_to_limit);
        let held = pool.map_or(Bytes(0), |pool| pool.state().held);
        if held.0 > asked.0 / 2 {
            return Err(format!(
                "compressed pages take {held}, and no tier below can have them; give {} at least, or \
                 start it with a tier below, such as --tier ram --tier file:PATH,size=SIZE",
                Bytes(2 * held.0)
            ));
        }
        Ok(())
    }
}

/// As [`limit_pools`], by the limit of now. The control thread may change it at the same time.
pub(super) fn limit_pools_now(shared: &Shared) {
    let mut limit = shared.gauges.memory_max();
    loop {
        limit_pools(shared, limit);
        let now = shared.gauges.memory_max();
        if std::mem::replace(&mut limit, now) == now {
            return;
        }
    }
}

/// Compressed pages get the share of the limit that they would have from the start, but never more
/// than their address space, which the limit gave them at first.
fn limit_pools(shared: &Shared, limit: Bytes) {
    let tiers = &shared.books.tiers;
    let Some(last) = tiers.ranks().next_back() else {
        return;
    };
    // What is in the last tier cannot move down.
    for id in tiers.ranks().filter(|id| *id != last) {
        let metered = &tiers[usize::from(id.0)];
        if metered.facts().charged_to_limit {
            metered.set_ceiling(pool_capacity(metered.max, limit, false));
        }
    }
}
