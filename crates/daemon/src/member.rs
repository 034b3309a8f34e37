//! A client that was admitted: what it has, what it said, and what it wants.

use std::time::Duration;

use undercroft_base::Bytes;
use undercroft_proto::grant::{Figures, Hello, MemberStatus, StorageFigures, UNKNOWN};
use undercroft_qos::Curves;
use undercroft_qos::shares::{self, Want};

use crate::config::{Class, Divide};
use crate::store::{BYTES_MAX, Store, sane};

/// Shortest time over which page-ins are measured.
const MEASURED_MIN: Duration = Duration::from_millis(900);

/// A run without a page-in for this long from its start counts as one that needs none.
pub(crate) const FILLS_MAX: Duration = Duration::from_secs(30);

/// A client that was admitted.
pub(crate) struct Member {
    pub(crate) pid: u32,
    pub(crate) command: String,
    pub(crate) class_name: String,
    pub(crate) class: Class,
    /// The most that it may ever have.
    pub(crate) most: Bytes,
    /// The limit that it keeps to.
    pub(crate) limit: Bytes,
    /// The limit that it was asked to keep to, and has not answered.
    pub(crate) asked: Option<Bytes>,
    /// The most that it may still use: an earlier limit.
    pub(crate) ceiling: Bytes,
    /// When it was asked for figures; `None`: it has answered.
    pub(crate) told: Option<Duration>,
    pub(crate) next_tell: Duration,
    pub(crate) figures: Figures,
    /// When they came.
    pub(crate) heard: Duration,
    /// Whether it waited for its pages before that.
    pub(crate) waits: bool,
    /// Its page-ins a second lately; `None`: not measured.
    pub(crate) page_ins: Option<f64>,
    /// When its page-ins were counted for that, and how many there were; and how long threads had
    /// waited at its last figures. `None`: it has told nothing yet.
    pub(crate) counted: Option<(Duration, u64)>,
    pub(crate) stalled: Option<f64>,
    pub(crate) curves: Curves,
    pub(crate) refused_until: Duration,
    pub(crate) target: Bytes,
    /// Less than it shall have was free when it was last given memory: the rest is no new step.
    pub(crate) lacks: bool,
    /// Its room in each tier with a budget.
    pub(crate) storage: Vec<Store>,
    /// Whether it was asked to keep to other quotas, and has not answered.
    pub(crate) asked_quotas: bool,
    pub(crate) claimed: bool,
    /// Whether it has paged in between its last two figures.
    pub(crate) pages_in: bool,
}

impl Member {
    /// Notes whether it waits, and its page-ins a second. A manager that did not answer has told
    /// neither.
    pub(crate) fn measure(&mut self, figures: &Figures, now: Duration) {
        if figures.dram == UNKNOWN {
            return;
        }
        if let Some(before) = self.stalled.replace(figures.stall_seconds) {
            let passed = now.saturating_sub(self.heard).as_secs_f64();
            self.waits = shares::is_waiting(figures.stall_seconds - before, passed);
        }
        let (since, before) = *self.counted.get_or_insert((now, figures.swap_ins));
        let passed = now.saturating_sub(since);
        if passed >= MEASURED_MIN {
            let page_ins = figures.swap_ins.saturating_sub(before);
            // A program that still fills its memory pages nothing in. That says nothing of later.
            if page_ins > 0 || self.page_ins.is_some() || passed >= FILLS_MAX {
                self.page_ins = Some(page_ins as f64 / passed.as_secs_f64());
                self.counted = Some((now, figures.swap_ins));
            }
        }
    }

    /// A member without storage. Nothing is known of what it does.
    pub(crate) fn new(
        pid: u32,
        hello: Hello,
        class: Class,
        (limit, most): (Bytes, Bytes),
        now: Duration,
    ) -> Member {
        Member {
            pid,
            command: hello.command,
            class_name: hello.class,
            class,
            most,
            limit,
            asked: None,
            ceiling: limit,
            told: None,
            next_tell: now,
            figures: Figures::default(),
            heard: now,
            waits: false,
            page_ins: None,
            counted: None,
            stalled: None,
            curves: Curves::default(),
            refused_until: Duration::ZERO,
            target: limit,
            lacks: false,
            storage: Vec::new(),
            asked_quotas: false,
            claimed: false,
            pages_in: false,
        }
    }

    /// Memory that counts as its own.
    pub(crate) fn held(&self) -> u64 {
        let uses = self.figures.dram.min(self.ceiling.0);
        self.limit
            .0
            .max(self.asked.map_or(0, |asked| asked.0))
            .max(uses)
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.asked.is_none() && self.held() == self.limit.0
    }

    /// Whether it gives memory or storage, and is not done: a slow disk or a busy processor keeps
    /// it.
    pub(crate) fn is_at_work(&self) -> bool {
        let is_asked = self.asked.is_some_and(|asked| asked < self.limit);
        let uses_more = self.figures.dram.min(self.ceiling.0) > self.limit.0;
        is_asked || uses_more || self.storage.iter().any(Store::gives)
    }

    /// Memory that its class keeps for it, whatever others want.
    pub(crate) fn protection(&self) -> Bytes {
        self.class.memory_min.min(self.most)
    }

    pub(crate) fn want(&self, divide: Divide, now: Duration) -> Want {
        let least = if now < self.refused_until {
            self.limit
        } else {
            self.protection()
        };
        // A client that has not swapped uses what it uses, and some more.
        let uses = shares::enough(Bytes(self.figures.dram.min(BYTES_MAX)));
        let blind = divide == Divide::Weights || self.figures.dram == 0;
        Want {
            weight: self.class.weight,
            least,
            most: self.most,
            enough: if blind { self.most } else { uses },
            waits: self.waits,
            curve: match divide {
                Divide::Auto => self.curves.mean(),
                Divide::Weights => Vec::new(),
            },
        }
    }
}

impl Member {
    /// Nothing of its storage changes.
    pub(crate) fn storage_is_settled(&self) -> bool {
        !self.asked_quotas && !self.fills_storage()
    }

    /// Its figures of each tier that has a budget. Errors: they cannot be.
    pub(crate) fn note_storage(
        &mut self,
        told: &[StorageFigures],
        now: Duration,
    ) -> Result<(), &'static str> {
        if told.len() != self.storage.len() {
            return Err("it has other tiers than it was granted");
        }
        for (store, told) in self.storage.iter_mut().zip(told) {
            store.note(sane(*told), now);
        }
        Ok(())
    }

    /// Its answer to `Quotas`. Errors: it was not asked, or keeps to something else.
    pub(crate) fn kept_quotas(&mut self, told: &[StorageFigures]) -> Result<(), &'static str> {
        if !std::mem::take(&mut self.asked_quotas) {
            return Err("it was not asked to keep to quotas");
        }
        let keeps =
            |(store, told): (&Store, &StorageFigures)| told.quota == store.asked || told.quota == 0;
        if told.len() != self.storage.len() || !self.storage.iter().zip(told).all(keeps) {
            return Err("it was not asked to keep to these quotas");
        }
        for (store, told) in self.storage.iter_mut().zip(told) {
            store.answer(sane(*told));
        }
        Ok(())
    }

    /// Its pages took more lately than before.
    pub(crate) fn storage_grows(&self) -> bool {
        self.storage.iter().any(|store| store.pace > 0.0)
    }

    /// Whether it will soon have filled what is free for it.
    pub(crate) fn fills_storage(&self) -> bool {
        self.storage.iter().any(Store::fills)
    }

    /// Its quotas: the room that it may take of each tier that has a budget.
    pub(crate) fn quotas(&self) -> Vec<u64> {
        self.storage.iter().map(|store| store.quota).collect()
    }

    /// For a user.
    pub(crate) fn storage_told(&self) -> Vec<StorageFigures> {
        let told = |store: &Store| StorageFigures {
            quota: store.quota,
            ..store.told
        };
        self.storage.iter().map(told).collect()
    }
}

/// For a user.
pub(crate) fn status_of(member: &Member) -> MemberStatus {
    let finite = |seconds: f64| if seconds.is_finite() { seconds } else { 0.0 };
    MemberStatus {
        pid: member.pid,
        command: member.command.clone(),
        class: member.class_name.clone(),
        weight: member.class.weight,
        memory_min_bytes: member.class.memory_min.0,
        limit_bytes: member.limit.0,
        target_bytes: member.target.0,
        dram_bytes: match member.figures.dram {
            UNKNOWN => member.limit.0,
            dram => dram,
        },
        has_curve: !member.curves.is_empty(),
        stall_seconds: finite(member.figures.stall_seconds),
        swap_ins: member.figures.swap_ins,
        storage: member.storage_told(),
        claimed: member.claimed,
        latency: None,
    }
}
