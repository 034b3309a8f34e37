//! Tiers that come and go while the program runs (`undercroft tiers add`, `drain`, `remove`).
//!
//! A tier goes in three steps: it is closed, `uc-migrate` empties it, and it is taken out of use.
//! A tier is empty for good once it is closed, no store is under way that began before
//! (`Books::storing`), and it holds nothing.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use undercroft_base::{Bytes, PageCount, PageNo, TierId};
use undercroft_proto::report::Drain;

use super::Books;
use super::metered::MeteredTier;
use crate::sync::{lock, pass};

/// Time until pages that could not be read are tried again, if nothing else is left.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// The drain of one tier.
#[derive(Clone, Copy, Debug)]
struct Begun {
    at: Instant,
    pages: PageCount,
    ended: Option<Instant>,
    /// Pages that could not be read, if the last round over the ledger could move no other.
    unreadable: PageCount,
    /// The most of them in a round. Pages that the program drops later are among them.
    unreadable_most: PageCount,
    /// Not before this time.
    rests_until: Instant,
    /// Whether it is to be taken out of use once it is empty.
    removes: bool,
}

/// The drains of a run.
#[derive(Default)]
pub(crate) struct Drains {
    begun: Mutex<Vec<Option<Begun>>>,
    /// No tier takes what is left at the moment.
    pub stuck: AtomicBool,
}

/// The end of a sentence that says how many pages cannot be read.
fn unreadable_text(pages: PageCount) -> String {
    let pages = pages.0;
    let count = if pages == 1 { "page" } else { "pages" };
    format!(
        "{pages} {count} there cannot be read; a touch of one ends the program, and the tier is \
         empty only after the program has dropped them"
    )
}

impl Books {
    /// Closes a tier and has it emptied. Again: changes nothing.
    ///
    /// Errors: why not; nothing is changed. For the user.
    pub(crate) fn drain(&self, tier: TierId) -> Result<(), String> {
        let mut begun = lock(&self.drains.begun);
        self.begin_drain(&mut begun, tier)?;
        self.engine().migrations().close(tier);
        Ok(())
    }

    /// As [`Books::drain`], and the tier is taken out of use once it is empty.
    pub(crate) fn remove(&self, tier: TierId) -> Result<(), String> {
        let mut begun = lock(&self.drains.begun);
        self.begin_drain(&mut begun, tier)?;
        if let Some(drain) = &mut begun[usize::from(tier.0)] {
            if drain.unreadable > PageCount(0) {
                return Err(unreadable_text(drain.unreadable));
            }
            self.legacy.change_tiers().map_err(str::to_owned)?;
            drain.removes = true;
        }
        // Before anyone can see that it is to be removed: no page may be on its way there then.
        self.engine().migrations().close(tier);
        Ok(())
    }

    fn begin_drain(&self, begun: &mut Vec<Option<Begun>>, tier: TierId) -> Result<(), String> {
        let at = usize::from(tier.0);
        let metered = self.in_use(at)?;
        begun.resize(self.tiers.len(), None);
        if begun[at].is_some() {
            return Ok(());
        }
        let others = self.tiers.ranks().map(|id| usize::from(id.0));
        let open: Vec<usize> = others
            .filter(|other| *other != at && begun[*other].is_none())
            .filter(|other| !self.tiers[*other].facts().is_source)
            .collect();
        if open.is_empty() {
            return Err("it is the only tier in use; pages would have nowhere to go".to_owned());
        }
        let needed = metered.tier.usage().logical;
        let room = open.iter().map(|at| self.tiers[*at].state().headroom().0);
        let room = Bytes(room.fold(0, u64::saturating_add));
        if room < needed {
            return Err(format!(
                "it holds pages of {needed}, and the other tiers have room for {room}"
            ));
        }
        let now = Instant::now();
        begun[at] = Some(Begun {
            at: now,
            pages: needed.pages_floor(),
            ended: None,
            unreadable: PageCount(0),
            unreadable_most: PageCount(0),
            rests_until: now,
            removes: false,
        });
        Ok(())
    }

    /// The tier of this number. Error: none is in use.
    fn in_use(&self, at: usize) -> Result<&MeteredTier, String> {
        match self.tiers.get(at) {
            None => {
                let count = self.tiers.len();
                Err(format!("there is no tier {}; the run has {count}", at + 1))
            }
            Some(of) if of.removed.get().is_some() => Err(format!("tier {} was removed", at + 1)),
            Some(of) if of.facts().is_source => Err(format!(
                "tier {} is the file of the snapshot: its pages are in no other place",
                at + 1
            )),
            Some(of) => Ok(of),
        }
    }

    /// Uses a tier again that was drained, or is being drained.
    ///
    /// Errors: why not; nothing is changed. For the user.
    pub(crate) fn reopen(&self, tier: TierId) -> Result<(), String> {
        let at = usize::from(tier.0);
        let mut begun = lock(&self.drains.begun);
        self.in_use(at)?;
        if begun.get_mut(at).and_then(Option::take).is_some() {
            self.engine().migrations().reopen(tier);
        }
        Ok(())
    }

    /// Takes another tier into use, at the place that its speed gives it.
    ///
    /// Errors: the run has too many. For the user.
    pub(crate) fn add(&self, tier: MeteredTier) -> Result<(), String> {
        if self.source().is_some() {
            return Err("the run serves a snapshot, whose file has to be the last tier".to_owned());
        }
        let mut begun = lock(&self.drains.begun);
        let id = self.tiers.free_number()?;
        let speed = |of: &MeteredTier| (of.latency(), of.state().load_ns);
        let mine = speed(&tier);
        let faster = self.tiers.ranked().filter(|of| speed(of) <= mine).count();
        let class = tier.latency();
        let was_last = self.tiers.ranks().next_back();
        self.legacy.change_tiers().map_err(str::to_owned)?;
        if !self.tiers.place(id, tier) {
            return Err("the run made too many tiers in its time".to_owned());
        }
        begun.resize(self.tiers.len().max(usize::from(id.0) + 1), None);
        begun[usize::from(id.0)] = None;
        let ranks = {
            let mut engine = self.engine();
            engine.migrations().add(id, class, faster);
            engine.migrations().ranks().to_vec()
        };
        self.tiers.set_ranks(&ranks);
        self.tiers.show(id);
        drop(begun);
        // Its pages have had no age so far, and may move down now.
        if let Some(above) = was_last.filter(|_| ranks.last() == Some(&id)) {
            let mut from = Some(PageNo(0));
            while let Some(next) = from {
                from = self.engine_for_many().migrations().note_ages(above, next);
            }
        }
        Ok(())
    }

    /// The first tier that is closed and not empty, and is to be emptied now.
    pub(crate) fn to_drain(&self) -> Option<TierId> {
        let mut begun = lock(&self.drains.begun);
        let now = Instant::now();
        for (at, begun) in begun.iter_mut().enumerate() {
            let Some(begun) = begun else { continue };
            if self.tiers[at].tier.usage().logical == Bytes(0) {
                begun.unreadable = PageCount(0);
                begun.ended.get_or_insert(now);
            } else if now >= begun.rests_until {
                begun.ended = None;
                return Some(TierId(at as u8));
            }
        }
        None
    }

    /// A round over the ledger has ended that moved no page of the tier.
    ///
    /// * `unreadable`: pages that were there and could not be read.
    ///
    /// Returns how many of them are new.
    pub(crate) fn note_unreadable(&self, tier: TierId, unreadable: PageCount) -> u64 {
        let mut begun = lock(&self.drains.begun);
        let Some(Some(drain)) = begun.get_mut(usize::from(tier.0)) else {
            return 0;
        };
        let new = unreadable.0.saturating_sub(drain.unreadable.0);
        drain.unreadable = unreadable;
        drain.unreadable_most = drain.unreadable_most.max(unreadable);
        if unreadable > PageCount(0) {
            drain.removes = false;
            drain.rests_until = Instant::now() + TRY_AGAIN;
        }
        new
    }

    /// Takes the tiers out of use that are to be removed and are empty. Waits for the evictor's
    /// batch. Only `uc-migrate` calls it, and stores nothing meanwhile.
    pub(crate) fn remove_drained(&self) {
        let ready = |drain: &Begun, at: usize| {
            drain.removes && self.tiers[at].tier.usage().logical == Bytes(0)
        };
        let found = {
            let begun = lock(&self.drains.begun);
            let mut all = begun.iter().enumerate();
            all.find_map(|(at, drain)| {
                let drain = (*drain)?;
                ready(&drain, at).then_some((at, drain.at))
            })
        };
        let Some((at, since)) = found else { return };
        // A batch may have begun before the tier was closed, and store there yet.
        pass(&self.storing);
        let drained = self.drain_of(at);
        let mut begun = lock(&self.drains.begun);
        let same = begun[at].filter(|drain| drain.at == since && ready(drain, at));
        let (Some(_), Some(drained)) = (same, drained) else {
            return; // it was opened again, or holds a page
        };
        let (id, metered) = (TierId(at as u8), &self.tiers[at]);
        let ranks = {
            let mut engine = self.engine();
            engine.migrations().remove(id);
            engine.migrations().ranks().to_vec()
        };
        self.tiers.set_ranks(&ranks);
        metered.set_ceiling(Bytes(0));
        let _ = metered.removed.set(Drain {
            removed: true,
            ..drained
        });
        begun[at] = None;
        drop(begun);
        metered.tier.close();
        // A pool that is the last now may have what it had from the start.
        if let Some(last) = self.tiers.ranked().next_back()
            && last.facts().charged_to_limit
        {
            last.set_ceiling(Bytes(u64::MAX));
        }
    }

    /// How far the drain of a tier is; `None`: it has none.
    pub(crate) fn drain_of(&self, at: usize) -> Option<Drain> {
        if let Some(removed) = self.tiers.get(at)?.removed.get() {
            return Some(*removed);
        }
        let begun = (*lock(&self.drains.begun).get(at)?)?;
        let left = self.tiers[at].tier.usage().logical.pages_floor();
        let end = begun.ended.unwrap_or_else(Instant::now);
        let seconds = end.saturating_duration_since(begun.at).as_secs_f64();
        let moved = begun.pages.0.saturating_sub(left.0);
        let stuck = left.0 > 0 && self.drains.stuck.load(Ordering::Relaxed);
        let rate = moved as f64 / seconds;
        Some(Drain {
            pages: begun.pages.0,
            pages_left: left.0,
            seconds,
            seconds_left: (rate > 0.0 && !stuck).then(|| left.0 as f64 / rate),
            stuck,
            pages_unreadable: begun.unreadable_most.0,
            removes: begun.removes,
            removed: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::model_tests::{options, shared};

    #[test]
    fn pages_that_could_not_be_read_are_told_after_the_program_has_dropped_them() {
        let mut options = options("ram");
        options.tiers.push("ram".parse().expect("a tier"));
        let books = &shared(options).books;
        books.drain(TierId(0)).expect("the other has room");
        assert_eq!(books.note_unreadable(TierId(0), PageCount(3)), 3);
        assert_eq!(books.to_drain(), None, "the tier is empty");
        let drain = books.drain_of(0).expect("a drain");
        assert_eq!((drain.pages_left, drain.pages_unreadable), (0, 3));
    }
}
