//! Reads of copies: one master is asked, the other if the first is late or has nothing. The answer
//! is in the caller's inbox before the deadline.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::{ServerErrorKind, Value, cmd};
use undercroft_base::{FailKind, Fetched, Inbox, LoadError, Slot, Stamp};

use super::Shared;
use super::link::{Done, Reply, Request};
use super::net::{Role, is_moved};
use super::table::{Copies, SlotInUse};
use super::value;
use crate::spec::Node;

/// Longest time of a read. Then the caller may ask again, and meanwhile does other work.
pub(super) const DEADLINE: Duration = Duration::from_millis(80);

/// The other copy is asked after three times what 95 % of the reads take, within these bounds.
const HEDGE_MIN: Duration = Duration::from_millis(1);
const HEDGE_MAX: Duration = Duration::from_millis(20);

/// Pause before a master is asked again that was not reached.
const AGAIN: Duration = Duration::from_millis(5);

/// How often the reads in flight are looked at.
const TICK: Duration = Duration::from_millis(1);

/// A page is lost if both masters say this many times, in reads one after another, that they have
/// no copy of it.
const MISSES_MAX: u32 = 3;

/// A page is lost if no master that has a copy is reached for this long. A failover takes the
/// cluster's node timeout (15 s unless it is set) and a second.
const GIVE_UP: Duration = Duration::from_secs(60);

/// Pages with failed reads that are remembered. More than that at once, and some wait longer.
const SUSPECTS_MAX: usize = 1 << 16;

/// The time that 95 % of reads stay below: moves up with each slower read by a sixteenth, down with
/// each faster one by a nineteenth of that.
#[derive(Debug)]
struct Pace(AtomicU64);

impl Pace {
    fn note(&self, took: Duration) {
        let (now, took) = (self.0.load(Relaxed), took.as_nanos() as u64);
        let step = now / 16 + 1;
        let next = if took > now {
            now + step
        } else {
            now - step / 19
        };
        // Two threads may lose a reading to each other.
        self.0.store(next.clamp(20_000, 20_000_000), Relaxed);
    }

    fn hedge(&self) -> Duration {
        (3 * Duration::from_nanos(self.0.load(Relaxed))).clamp(HEDGE_MIN, HEDGE_MAX)
    }
}

/// A page whose reads failed.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    number: u64,
    since: Instant,
    misses: u32,
}

/// The reads in flight, and what was learnt of others.
pub(super) struct Flights {
    list: Mutex<Vec<Arc<Fetch>>>,
    ready: Condvar,
    stop: AtomicBool,
    pace: Pace,
    suspects: Mutex<HashMap<u64, Suspect>>,
    suspect_count: AtomicUsize,
    give_up: Duration,
}

impl Flights {
    pub(super) fn new() -> Flights {
        Flights {
            list: Mutex::default(),
            ready: Condvar::new(),
            stop: AtomicBool::new(false),
            pace: Pace(AtomicU64::new(1_000_000)),
            suspects: Mutex::default(),
            suspect_count: AtomicUsize::new(0),
            give_up: GIVE_UP,
        }
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Fetch>>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stop(&self) {
        let _list = self.list();
        self.stop.store(true, Relaxed);
        self.ready.notify_all();
    }

    fn add(&self, fetch: Arc<Fetch>) {
        let mut list = self.list();
        list.push(fetch);
        if list.len() == 1 {
            self.ready.notify_one();
        }
    }

    /// The body of the thread that watches over the reads in flight.
    pub(super) fn watch(&self) {
        let mut now_due = Vec::new();
        let mut list = self.list();
        while !self.stop.load(Relaxed) {
            if list.is_empty() {
                list = self
                    .ready
                    .wait(list)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            list.retain(|fetch| !fetch.is_done());
            now_due.clone_from(&list);
            drop(list);
            let hedge = self.pace.hedge();
            now_due.drain(..).for_each(|fetch| fetch.look(hedge));
            std::thread::sleep(TICK);
            list = self.list();
        }
        now_due.clone_from(&list);
        drop(list);
        for fetch in now_due {
            fetch.end(Err(LoadError::Late));
        }
    }

    fn suspects(&self) -> MutexGuard<'_, HashMap<u64, Suspect>> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A read failed. Returns why, and whether that is final.
    /// * `missing`: each master says that it has no copy.
    fn failed(&self, slot: u64, number: u64, missing: bool) -> LoadError {
        let mut suspects = self.suspects();
        let fresh = Suspect {
            number,
            since: Instant::now(),
            misses: 0,
        };
        let known = suspects.get(&slot).copied();
        let mut suspect = known.filter(|it| it.number == number).unwrap_or(fresh);
        suspect.misses = if missing { suspect.misses + 1 } else { 0 };
        let lost = suspect.misses >= MISSES_MAX;
        let gone = suspect.since.elapsed() >= self.give_up;
        if lost || gone {
            suspects.remove(&slot);
        } else if known.is_some() || suspects.len() < SUSPECTS_MAX {
            suspects.insert(slot, suspect);
        }
        self.suspect_count.store(suspects.len(), Relaxed);
        match (lost, gone) {
            (true, _) => LoadError::Corrupt,
            (false, true) => LoadError::Failed(FailKind::Io),
            (false, false) => LoadError::Late,
        }
    }

    fn succeeded(&self, slot: u64) {
        if self.suspect_count.load(Relaxed) > 0 {
            let mut suspects = self.suspects();
            suspects.remove(&slot);
            self.suspect_count.store(suspects.len(), Relaxed);
        }
    }
}

/// Knowledge of a copy in this read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Not,
    Waits,
    /// The master was not reached, or does not know.
    Failed(Instant),
    /// The master has no such copy, or a damaged one.
    Missing,
}

#[derive(Debug)]
struct State {
    done: bool,
    /// Where the copies are; they may be stored anew elsewhere during the read.
    place: Copies,
    asked: [Asked; 2],
}

impl State {
    /// Knowledge of the copies there are.
    fn asked(&self) -> &[Asked] {
        &self.asked[..if self.place.is_single() { 1 } else { 2 }]
    }
}

/// A read.
pub(super) struct Fetch {
    shared: Arc<Shared>,
    slot: u64,
    row: SlotInUse,
    token: u64,
    inbox: Arc<dyn Inbox>,
    begun: Instant,
    state: Mutex<State>,
}

/// Begins a read. See `Tier::fetch`.
pub(super) fn begin(
    shared: &Arc<Shared>,
    slot: Slot,
    stamp: Stamp,
    token: u64,
    inbox: &Arc<dyn Inbox>,
) {
    let row = shared.table.row(slot.0).filter(|row| row.stamp == stamp);
    let Some(row) = row else {
        let page = Err(LoadError::Corrupt);
        return inbox.deliver(Fetched { token, page });
    };
    let fetch = Arc::new(Fetch {
        shared: shared.clone(),
        slot: slot.0,
        row,
        token,
        inbox: inbox.clone(),
        begun: Instant::now(),
        state: Mutex::new(State {
            done: false,
            place: row.place,
            asked: [Asked::Not; 2],
        }),
    });
    shared.flights.add(fetch.clone());
    // The first tags of pages are spread over all masters.
    let tags = row.place.tags;
    let other_first = !shared.net.is_well(tags[0]) && shared.net.is_well(tags[1]);
    fetch.ask(usize::from(other_first && !row.place.is_single()));
}

impl Fetch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_done(&self) -> bool {
        self.state().done
    }

    /// Asks for a copy. If its master is not reached, the other copy is asked for.
    fn ask(self: &Arc<Fetch>, which: usize) {
        self.state().asked[which] = Asked::Waits;
        if !self.send(which, None) {
            self.settle(which, Asked::Failed(Instant::now()));
        }
    }

    /// * `asking`: the node that is getting the hash slot at the moment.
    fn send(self: &Arc<Fetch>, which: usize, asking: Option<&Node>) -> bool {
        let net = &self.shared.net;
        let place = self.state().place;
        let tag = place.tags[which];
        let link = match asking {
            Some(node) => net.link(node, Role::Read),
            None => net.of_tag(tag, Role::Read),
        };
        let Some(link) = link else { return false };
        let mut packed = Vec::with_capacity(128);
        if asking.is_some() {
            packed.extend(cmd("ASKING").get_packed_command());
        }
        let key = self.shared.keys.of(place, which);
        packed.extend(cmd("GET").arg(key).get_packed_command());
        let this = self.clone();
        let done: Done = Box::new(move |reply| this.answered(which, reply));
        let skipped = usize::from(asking.is_some());
        let request = Request {
            packed,
            skipped,
            done,
        };
        link.push(request).is_ok()
    }

    /// In a link's thread.
    fn answered(self: &Arc<Fetch>, which: usize, reply: Reply) {
        let row = &self.row;
        match reply {
            Reply::Value(Value::BulkString(bytes)) => {
                match value::decode(&bytes, &self.shared.key, row) {
                    Some(page) => self.found(page),
                    None => {
                        self.shared.counters.damaged.fetch_add(1, Relaxed);
                        self.settle(which, Asked::Missing);
                    }
                }
            }
            Reply::Value(Value::Nil) => self.settle(which, Asked::Missing),
            Reply::Value(Value::ServerError(error))
                if error.kind() == Some(ServerErrorKind::Ask) =>
            {
                let details = error.details().unwrap_or_default();
                let node = details.split_whitespace().nth(1);
                let node = node.and_then(|node| node.parse::<Node>().ok());
                if !node.is_some_and(|node| self.send(which, Some(&node))) {
                    self.settle(which, Asked::Failed(Instant::now()));
                }
            }
            Reply::Value(value) => {
                if is_moved(&value) {
                    let bell = &self.shared.net.bell;
                    bell.ring(|rung| (rung.stale, rung.missing) = (true, true));
                }
                self.settle(which, Asked::Failed(Instant::now()));
            }
            Reply::Unreachable => self.settle(which, Asked::Failed(Instant::now())),
        }
    }

    fn found(&self, page: Box<[u8]>) {
        let missing = self.state().asked.contains(&Asked::Missing);
        if self.end(Ok(page)) {
            self.shared.flights.pace.note(self.begun.elapsed());
            self.shared.flights.succeeded(self.slot);
            if missing {
                self.shared.chores.mend(self.slot);
            }
        }
    }

    /// A copy is not had. The other one is asked for, unless it was.
    fn settle(self: &Arc<Fetch>, which: usize, outcome: Asked) {
        let mut state = self.state();
        if state.done {
            // The other copy was faster. This one is made anew all the same.
            drop(state);
            if outcome == Asked::Missing {
                self.shared.chores.mend(self.slot);
            }
            return;
        }
        state.asked[which] = outcome;
        let other = 1 - which;
        if state.asked().get(other) == Some(&Asked::Not) {
            state.asked[other] = Asked::Waits;
            drop(state);
            if !self.send(other, None) {
                self.settle(other, Asked::Failed(Instant::now()));
            }
            return;
        }
        if state.asked().iter().any(|asked| *asked != Asked::Missing) {
            return;
        }
        // Copies that were stored anew have other keys. A freed page has none.
        let same =
            |row: &SlotInUse| row.stamp == self.row.stamp && row.checksum == self.row.checksum;
        match self.shared.table.row(self.slot).filter(same) {
            Some(row) if row.place == state.place => {}
            Some(row) => {
                (state.place, state.asked) = (row.place, [Asked::Not; 2]);
                drop(state);
                self.ask(0);
            }
            None => {
                drop(state);
                self.end(Err(LoadError::Corrupt));
            }
        }
    }

    /// Looks after a read that is not done.
    fn look(self: &Arc<Fetch>, hedge: Duration) {
        let age = self.begun.elapsed();
        let state = self.state();
        if state.done {
            return;
        }
        let (copies, asked) = (state.asked().len(), state.asked);
        let missing = state.asked().iter().all(|it| *it == Asked::Missing);
        drop(state);
        if age >= DEADLINE {
            let number = self.row.place.number;
            let why = self.shared.flights.failed(self.slot, number, missing);
            if self.takes_end() {
                let counters = &self.shared.counters;
                let counter = match why {
                    LoadError::Late => &counters.late,
                    _ => &counters.lost,
                };
                counter.fetch_add(1, Relaxed);
                self.deliver(Err(why));
            }
            return;
        }
        for (which, asked) in asked.into_iter().enumerate().take(copies) {
            match asked {
                Asked::Not if age >= hedge => {
                    self.shared.counters.hedged.fetch_add(1, Relaxed);
                    self.ask(which);
                }
                Asked::Failed(at) if at.elapsed() >= AGAIN => self.ask(which),
                _ => {}
            }
        }
    }

    /// Delivers the result, unless another one was delivered.
    fn end(&self, page: Result<Box<[u8]>, LoadError>) -> bool {
        let takes = self.takes_end();
        if takes {
            self.deliver(page);
        }
        takes
    }

    /// True once: for the caller that delivers the result.
    fn takes_end(&self) -> bool {
        !std::mem::replace(&mut self.state().done, true)
    }

    fn deliver(&self, page: Result<Box<[u8]>, LoadError>) {
        let token = self.token;
        self.inbox.deliver(Fetched { token, page });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_stays_near_what_most_reads_take() {
        let pace = Pace(AtomicU64::new(1_000_000));
        for round in 0..20_000 {
            let slow = round % 50 == 0; // 2 %
            pace.note(Duration::from_micros(if slow { 9_000 } else { 100 }));
        }
        let hedge = pace.hedge();
        assert_eq!(hedge, HEDGE_MIN, "three times 100 us is below the least");
        for _ in 0..20_000 {
            pace.note(Duration::from_secs(1));
        }
        assert_eq!(pace.hedge(), HEDGE_MAX);
    }

    #[test]
    fn pages_are_lost_after_misses_in_a_row_or_a_long_time() {
        let mut flights = Flights::new();
        assert_eq!(flights.failed(1, 7, true), LoadError::Late);
        assert_eq!(flights.failed(1, 7, true), LoadError::Late);
        assert_eq!(flights.failed(1, 7, false), LoadError::Late, "not in a row");
        assert_eq!(flights.failed(1, 7, true), LoadError::Late);
        assert_eq!(flights.failed(1, 7, true), LoadError::Late);
        assert_eq!(flights.failed(1, 8, true), LoadError::Late, "another page");
        assert_eq!(flights.failed(1, 8, true), LoadError::Late);
        assert_eq!(flights.failed(1, 8, true), LoadError::Corrupt);
        flights.give_up = Duration::ZERO;
        let gone = LoadError::Failed(FailKind::Io);
        assert_eq!(flights.failed(2, 7, false), gone);
        assert!(flights.suspects().is_empty());
    }
}
