//! Failures around the engine: tiers that fail, hang and disappear, a space that refuses, wake-ups
//! late and out of order.

use undercroft_base::{Bytes, LatencyClass, SpaceId, Tier, TierId, VirtPage, VirtRange};
use undercroft_model::{Content, FailRates, Mm, NotInstalled};

use super::work::SpaceRates;
use super::world::{Doing, World};

/// Longest time a device hangs, in steps.
const HANG_MAX: u64 = 600;

impl World {
    /// True `rate` times in 1000, while failures are on.
    pub(super) fn fails(&mut self, rate: u64) -> bool {
        let on = self.setup.failures && !self.calm && rate > 0;
        on && self.random.chance(rate, 1000)
    }

    /// Draws new rates of failures, or none.
    pub fn set_failures(&mut self, on: bool) {
        let on = on && self.setup.failures;
        let random = &mut self.random;
        let mut rate = |most: u64| {
            if on && random.chance(1, 2) {
                random.below(most)
            } else {
                0
            }
        };
        self.space_rates = SpaceRates {
            again: rate(200),
            no_memory: rate(100),
            move_again: rate(100),
        };
        let ram = FailRates {
            full: rate(300),
            incompressible: rate(200),
            flip: rate(4),
            ..FailRates::NONE
        };
        // A page of the mapping is gone, or damaged. There is no request that could go astray.
        let nvm = FailRates {
            full: rate(200),
            store_io: rate(50),
            torn: rate(6),
            flip: rate(6),
            load_io: rate(10),
            ..FailRates::NONE
        };
        let file = FailRates {
            full: rate(200),
            no_space: rate(100),
            store_io: rate(100),
            short: rate(100),
            torn: rate(6),
            lost: rate(6),
            flip: rate(6),
            load_io: rate(50),
            stale: rate(50),
            misdirected: rate(50),
            ..FailRates::NONE
        };
        // A read may be late, and both copies of a page may be lost. No write goes astray.
        let remote = FailRates {
            full: rate(200),
            no_space: rate(100),
            store_io: rate(100),
            lost: rate(6),
            load_io: rate(100),
            ..FailRates::NONE
        };
        for tier in &self.tiers {
            let facts = tier.info().facts;
            tier.set_rates(match facts.class {
                LatencyClass::Memory => ram,
                LatencyClass::Nvm => nvm,
                LatencyClass::Device if facts.remote => remote,
                LatencyClass::Device => file,
            });
        }
        if !on {
            self.hung_until.fill(0);
            for tier in &self.tiers {
                tier.set_capacity(tier.info().capacity);
            }
        }
    }

    /// Changes one thing, for the worse or the better.
    pub(super) fn fail_some(&mut self) {
        let at = self.random.index(self.tiers.len());
        let facts = self.tiers[at].info().facts;
        let (is_file, waits) = (facts.is_local_device(), !facts.is_memory());
        match self.random.below(16) {
            0..6 => self.set_failures(true),
            6..9 if waits && self.setup.failures => {
                self.hung_until[at] = self.steps + self.random.below(HANG_MAX);
                self.log(|| format!("tier {at} hangs"));
            }
            9 if is_file && self.setup.failures => {
                let gone = self.random.chance(1, 3);
                self.tiers[at].set_gone(gone);
                self.log(|| format!("tier {at} gone: {gone}"));
            }
            10..13 => self.wake_without_reason(),
            13..15 if is_file => self.change_quota(at),
            _ => {}
        }
    }

    /// A file may hold more from now on, or less, perhaps less than it has.
    fn change_quota(&mut self, at: usize) {
        let tier = &self.tiers[at];
        let (size, used) = (tier.info().capacity.0, tier.usage().logical.0);
        let quota = match self.random.below(3) {
            0 => size,
            1 => used / 2 + self.random.below(used + 1),
            _ => self.random.below(size + 1),
        };
        tier.set_capacity(Bytes(quota));
        self.saw(if quota < used {
            "quota: below what is there"
        } else {
            "quota: changed"
        });
        self.log(|| format!("tier {at} quota {quota}"));
    }

    /// Whether requests to the tier hang for now.
    pub(super) fn hangs(&mut self, tier: TierId) -> bool {
        let until = self.hung_until.get(tier.0 as usize).copied().unwrap_or(0);
        let hangs = !self.calm && self.steps < until;
        if hangs {
            self.saw("tier hangs");
        }
        hangs
    }

    /// UFFDIO_COPY or ZEROPAGE, which may be refused.
    pub(super) fn install(
        &mut self,
        mm: Mm,
        page: VirtPage,
        content: Content,
    ) -> Result<(), NotInstalled> {
        if self.fails(self.space_rates.again) {
            self.saw("space: EAGAIN");
            return Err(NotInstalled::LayoutChanging);
        }
        if self.fails(self.space_rates.no_memory) {
            self.saw("space: ENOMEM");
            return Err(NotInstalled::NoMemory);
        }
        let done = self.memory.install(mm, page, content);
        match done {
            Ok(()) => self.touched.push((mm, page)),
            Err(NotInstalled::Exists) => self.saw("space: EEXIST"),
            Err(_) => {}
        }
        done
    }

    /// UFFDIO_WAKE, or the wake-up by COPY: threads stopped at the page try again.
    pub fn wake(&mut self, proc: usize, page: VirtPage) {
        self.procs[proc].messages.retain(|m| m.page != page);
        for at in 0..self.threads.len() {
            if self.threads[at].proc != proc {
                continue;
            }
            if let Doing::Stopped { page: of, write } = self.threads[at].doing
                && of == page
            {
                self.threads[at].doing = Doing::Running;
                self.access(at, page, write);
            }
        }
    }

    /// Wakes all threads that are stopped in the range.
    pub fn wake_range(&mut self, proc: usize, range: VirtRange) {
        for at in 0..self.threads.len() {
            if let Doing::Stopped { page, .. } = self.threads[at].doing
                && self.threads[at].proc == proc
                && range.contains(page)
            {
                self.wake(proc, page);
            }
        }
    }

    /// Wakes the threads that the engine names: some at once, some later and in another order.
    pub fn wake_all(&mut self, wake: Vec<(SpaceId, VirtPage)>) {
        for (space, page) in wake {
            if self.fails(500) {
                self.wakes.push((space, page));
            } else if let Some(proc) = self.proc_of(space) {
                self.wake(proc, page);
            }
        }
    }

    /// Sends one of the wake-ups that were held back. False if there is none.
    pub(super) fn send_a_wake(&mut self) -> bool {
        if self.wakes.is_empty() {
            return false;
        }
        let at = self.random.index(self.wakes.len());
        self.saw(match at {
            0 => "wake-up late",
            _ => "wake-up late and out of order",
        });
        let (space, page) = self.wakes.remove(at);
        if let Some(proc) = self.proc_of(space) {
            self.wake(proc, page);
        }
        true
    }

    /// A thread tries again without a change (a signal, a stale wake-up).
    fn wake_without_reason(&mut self) {
        let stopped: Vec<(usize, VirtPage)> = self
            .threads
            .iter()
            .filter_map(|thread| match thread.doing {
                Doing::Stopped { page, .. } => Some((thread.proc, page)),
                Doing::Running => None,
            })
            .collect();
        if let Some((proc, page)) = stopped.get(self.random.index(stopped.len())).copied() {
            self.saw("wake-up without reason");
            self.wake(proc, page);
        }
    }
}
